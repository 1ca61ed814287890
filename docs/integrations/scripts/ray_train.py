"""The same job under Ray Train: `TorchTrainer` makes the process group, `shard` uses it."""

import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train(config: dict) -> None:
    import sys

    sys.path.insert(0, config["scripts"])
    from train import main

    main(config["folder"], config["steps"])


if __name__ == "__main__":
    scripts, folder, workers, use_gpu = sys.argv[1], sys.argv[2], int(sys.argv[3]), "gpu" in sys.argv[4:]
    ray.init(include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"scripts": scripts, "folder": folder, "steps": 4},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(storage_path=f"{folder}/ray"),
    ).fit()
