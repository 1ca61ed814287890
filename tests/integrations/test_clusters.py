"""The scripts for clusters, as far as one machine goes: torchrun with a failure, Slurm's environment, Ray."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import process
from tests.ranks import HANG_SECONDS
from tests.warm import warm_python

SCRIPTS = Path(__file__).parents[2] / "docs" / "integrations" / "scripts"
TRAIN = SCRIPTS / "train.py"

FAILS_ONCE = """
import os, runpy, sys
import unbounded

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    save, saved = unbounded.save, []

    def failing(*args, **kwargs):
        if len(saved) == 2 and os.environ["RANK"] == "1":
            os._exit(3)  # as a machine that goes away
        saved.append(save(*args, **kwargs))

    unbounded.save = failing
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses(text: str) -> dict[tuple[int, int, int], float]:
    """By rank, number of ranks and step; if one ran twice, the last."""
    found = re.findall(r"rank (\d) of (\d): step (\d+), loss ([\d.]+)", text)
    return {(int(rank), int(size), int(step)): float(loss) for rank, size, step, loss in found}


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_worker_that_dies_is_restarted_and_goes_on_as_tasks_of_slurm_do_without(tmp_path: Path) -> None:
    script = tmp_path / "fails_once.py"
    script.write_text(FAILS_ONCE)
    launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text = run([*launcher, "--max-restarts", "1", str(script), str(TRAIN), str(tmp_path / "restarted"), "4"])
    restarted = losses(text)
    assert sorted(restarted) == [(rank, 2, step) for rank in range(2) for step in range(1, 5)]
    assert run_as_slurm_tasks(tmp_path / "slurm") == restarted


def run_as_slurm_tasks(folder: Path) -> dict[Any, float]:
    """Two processes as `srun` starts them: with Slurm's variables and none of torchrun's."""
    common = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(process.free_port()),
    }
    tasks = [
        subprocess.Popen(
            [warm_python(), str(TRAIN), str(folder), "4"],
            env={**os.environ, **common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    done = [task.communicate(timeout=HANG_SECONDS) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], done
    return losses("".join(out for out, _ in done))


def test_the_scripts_for_slurm_and_kubernetes_are_well_formed() -> None:
    for script in SCRIPTS.glob("*.sbatch"):
        subprocess.run([shutil.which("bash") or "bash", "-n", str(script)], check=True)
        assert "train.py" in script.read_text()
    if find_spec("yaml") is not None:
        import yaml

        job = yaml.safe_load((SCRIPTS / "pytorchjob.yaml").read_text())
        specs = job["spec"]["pytorchReplicaSpecs"]
        for kind in ("Master", "Worker"):
            container = specs[kind]["template"]["spec"]["containers"][0]
            assert container["command"] == ["torchrun"]
            assert container["args"][0] == "train.py"


@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_ray_trains_with_two_workers(tmp_path: Path) -> None:
    import unbounded

    source = str(Path(unbounded.__file__).parents[1])
    command = [sys.executable, str(SCRIPTS / "ray_train.py"), str(SCRIPTS), str(tmp_path), "2"]
    patient = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600"}  # Ray gives up on a busy machine otherwise
    paths = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment = {**patient, "RAY_DEDUP_LOGS": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(losses(done.stdout + done.stderr)) == 8
