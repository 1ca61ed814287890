"""DeepSpeed's configs and scripts: what each key becomes, and training that equals plain PyTorch's."""

from __future__ import annotations

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
import unbounded.deepspeed as deepspeed
from unbounded.deepspeed.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from unbounded.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from unbounded.deepspeed.ops.building import build_optimizer

STAGE3 = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch", "pin_memory": True, "buffer_count": 4},
        "offload_param": {"device": "cpu", "pin_memory": True, "max_in_cpu": 1e9},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
}
FP16 = {
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3},
    "zero_optimization": {"stage": 2, "cpu_offload": True, "allgather_bucket_size": 2e8, "reduce_scatter": True},
    "steps_per_print": float("inf"),
    "data_types": {"grad_accum_dtype": "fp16"},
}


def test_a_config_becomes_a_plan_and_every_key_is_accounted_for(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(STAGE3))
    told: list[str] = []
    plan = deepspeed.plan_from_config(tmp_path / "ds.json", report=told.append)
    assert plan == unbounded.Plan(
        stage=3, precision="bf16", weights="host", optimizer="disk", gradients="host", disk_path=("/scratch",)
    )
    assert "zero_optimization.offload_optimizer.nvme_path" in told[0]
    assert "zero_optimization.overlap_comm" in told[0]
    assert "(communication is always overlapped)" in told[0]
    found = deepspeed.read_config(STAGE3)
    leaves = {*found.honoured, *found.ignored}
    autos = {"gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"}
    given = {f"{key}.{inner}" for key, value in STAGE3.items() if isinstance(value, dict) for inner in value}
    assert given - leaves == {"zero_optimization.offload_optimizer", "zero_optimization.offload_param"}
    assert {key for key, value in STAGE3.items() if not isinstance(value, dict)} - leaves == autos


def test_loss_scaling_old_flags_and_dtypes_are_honoured() -> None:
    found = deepspeed.read_config(FP16)
    assert found.plan == unbounded.Plan(
        stage=2,
        precision="fp16",
        optimizer="host",
        gradients="host",
        accumulate_dtype="fp16",
        loss_scale=2.0**12,
        loss_scale_window=500,
        loss_scale_hysteresis=3,
    )
    assert found.steps_per_print is None
    nothing = {"compression_training": {}, "pipeline": {}, "graph_harvesting": False}
    assert deepspeed.read_config(nothing).plan == deepspeed.read_config({}).plan
    fixed = deepspeed.read_config({"fp16": {"enabled": True, "loss_scale": 128}}).plan
    assert (fixed.loss_scale, fixed.loss_scale_window) == (128.0, 0)


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimisation": {}}, "unknown keys: 'zero_optimisation' (did you mean 'zero_optimization'?)"),
        ({"zero_optimization": {"stge": 3}}, "'zero_optimization.stge' (did you mean 'zero_optimization.stage'?)"),
        ({"stage": 3, "blorp": 1}, "'stage' (did you mean 'zero_optimization.stage'?), 'blorp'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 enabled"),
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning, which is not available here"),
        ({"amp": {"enabled": True}}, "Use bf16.enabled or fp16.enabled"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast, which is not available here. Use bf16.enabled"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "device is 'gpu'. It may be one of none, cpu"),
        ({"train_batch_size": 2.5}, "train_batch_size is 2.5"),
        ({"bf16": 7}, "bf16 is 7, but it must be an object with the keys enabled"),
        ({"bf16": {"enabled": "false"}}, "bf16.enabled is 'false', but it must be true or false"),
        ({"dataloader_drop_last": "no"}, "dataloader_drop_last is 'no', but it must be true or false"),
        ({"zero_optimization": {"stage": 2.5}}, "zero_optimization.stage is 2.5, but it must be a whole number"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is True, but it must be a whole number"),
        ({"zero_optimization": {"stage": [3]}}, "zero_optimization.stage is [3], but it must be a whole number"),
        ({"train_batch_size": float("inf")}, "train_batch_size is inf, but it must be a whole number of at least 1"),
        ({"train_batch_size": "8"}, "train_batch_size is '8', but it must be a whole number of at least 1"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1, but it must be a number of at least 0"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping is nan, but it must be a number of at least 0"),
        ({"gradient_clipping": [1]}, "gradient_clipping is [1], but it must be a number of at least 0"),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "initial_scale_power is 5000"),
        ({"fp16": {"enabled": True, "loss_scale_window": "x"}}, "loss_scale_window is 'x'"),
        ({"zero_optimization": {"offload_param": {"device": ["cpu"]}}}, "device is ['cpu']. It may be one of none"),
        ({"zero_optimization": {"offload_param": {"nvme_path": 3}}}, "nvme_path is 3, but it must be a text"),
        ({"steps_per_print": "often"}, "steps_per_print is 'often', but it must be a number"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is None, but it must be the name of one"),
        ({"scheduler": {"type": "WarmupLR", "params": [1]}}, "scheduler.params is [1], but it must be an object"),
        ([1], "the DeepSpeed config is a list. Give a dict or the path of a JSON file"),
        (__file__, "is not JSON"),
    ],
)
def test_mistakes_in_a_config_are_told_with_what_was_meant(config: Any, message: str) -> None:
    with pytest.raises(unbounded.PlanError) as failure:
        deepspeed.read_config(config)
    assert message in str(failure.value)


@pytest.mark.parametrize(
    ("section", "params"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lrr": 1e-3}}}, "optimizer.params: .*'lrr'"),
        ({"optimizer": {"type": "Muon"}}, "which parameters it has is said by `use_muon`"),
        ({"optimizer": {"type": "lr_scheduler"}}, "optimizer.type is 'lr_scheduler', which is not available"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": -1}}}, "optimizer.params: Invalid learning rate"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": ["a", 0.9]}}}, "optimizer.params: could not convert"),
        (
            {**ADAM, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "ten"}}},
            "scheduler.params: .*'ten'",
        ),
        (
            {**ADAM, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-4]}}},
            "warmup_max_lr has 2 values for 1 param groups",
        ),
        (
            {**ADAM, "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}},
            "lr_range_test_step_size is 0, but it must be at least 1",
        ),
    ],
)
def test_parameters_that_an_optimizer_or_a_schedule_does_not_take_are_refused(section: Any, params: str) -> None:
    with pytest.raises(unbounded.PlanError, match=params):
        deepspeed.initialize(model=nn.Linear(2, 2), config=section)


def test_batch_sizes_that_contradict_each_other_are_refused() -> None:
    model = nn.Linear(2, 2)
    config = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(unbounded.PlanError, match=r"train_batch_size is 10, but .*4 x .*2 x 1 data ranks is 8"):
        deepspeed.initialize(model=model, config=config)
    with pytest.raises(unbounded.PlanError, match="no config"):
        deepspeed.initialize(model=model)


def test_what_a_trainer_would_fill_in_must_be_given() -> None:
    config: dict[str, Any] = {**CONFIG, "gradient_clipping": "auto"}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}}
    config["zero_optimization"] = {"stage": 2, "reduce_bucket_size": "auto"}
    with pytest.raises(unbounded.PlanError, match=r'"auto" for gradient_clipping, optimizer\.params\.lr, which only'):
        deepspeed.initialize(model=make_model(), config=config)
    config["gradient_clipping"] = 1.0
    model = make_model()
    deepspeed.initialize(model=model, config=config, optimizer=FusedAdam(model.parameters(), lr=1e-3))


def test_schedules_follow_the_published_formulas() -> None:
    def rates(kind: Any, **options: Any) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
        schedule, found = kind(optimizer, **options), []
        for _ in range(6):
            found.append(round(optimizer.param_groups[0]["lr"], 4))
            schedule.step()
        return found

    line = {"warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates(WarmupLR, warmup_max_lr=1.0, **line) == [0, 0, 0.25, 0.5, 0.75, 1.0]
    assert rates(WarmupLR, warmup_max_lr=1.0, warmup_num_steps=4) == [0, 0, 0.5, 0.7925, 1.0, 1.0]
    assert rates(WarmupDecayLR, total_num_steps=8, warmup_max_lr=1.0, **line) == [0, 0, 0.25, 0.5, 0.75, 1.0]
    assert rates(WarmupDecayLR, total_num_steps=5, warmup_max_lr=1.0, warmup_num_steps=2)[3:] == [1.0, 0.6667, 0.3333]
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    both = WarmupDecayLR(torch.optim.SGD(groups, lr=2.0), 4, [0.0, 0.1], [1.0, 0.2], 2)
    both.step(3)
    assert [round(rate, 4) for rate in both.get_last_lr()] == [0.5, 0.15]
    cosine = rates(WarmupCosineLR, total_num_steps=4, warmup_num_steps=2, cos_min_ratio=0.0)
    assert cosine == [0, 0, 2.0, 1.0, 0.0, 0.0]
    climb = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2}
    assert rates(LRRangeTest, **climb) == [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]
    assert rates(LRRangeTest, **climb, lr_range_test_staircase=True) == [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2}
    assert rates(OneCycle, **cycle) == [0.1, 0.3, 0.5, 0.3, 0.1, 0.1]
    assert rates(OneCycle, **cycle, cycle_first_stair_count=1) == [0.1, 0.1, 0.5, 0.1, 0.1, 0.1]
    decay = rates(OneCycle, **cycle, cycle_second_step_size=0, decay_lr_rate=1.0, decay_step_size=1)
    assert decay == [0.1, 0.3, 0.1, 0.05, 0.0333, 0.025]


def test_a_cycle_moves_the_first_beta_against_the_rate_and_the_update_follows() -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.05, "cycle_first_step_size": 2, "cycle_min_mom": 0.5}
    config = {**CONFIG, "gradient_accumulation_steps": 1, "scheduler": {"type": "OneCycle", "params": params}}
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for step, (rate, beta) in enumerate([(0.01, 0.5), (0.03, 0.7), (0.05, 0.5), (0.03, 0.7), (0.01, 0.9)]):
        assert engine.get_lr() == pytest.approx([rate])
        assert engine.get_mom() == [(pytest.approx(beta), 0.99)]
        optimizer.param_groups[0].update(lr=rate, betas=(beta, 0.99))
        run_script(engine, 0, step, step + 1)
        nn.functional.cross_entropy(model(batch(step, 0)[0]), batch(step, 0)[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])


# -- scripts -------------------------------------------------------------------------------------------------------

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 1,
}


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def run_script(engine: Any, rank: int, first: int, last: int) -> list[float]:
    """The loop as DeepSpeed's tutorials write it."""
    losses = []
    for step in range(first, last):
        inputs, labels = batch(step, rank)
        loss = nn.functional.cross_entropy(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_deepspeed(rank: int, world_size: int, tier: str, folder: str) -> Any:
    """Half a run, a save, a new engine, a load, the other half."""
    offload = {"device": {"device": "none", "host": "cpu", "disk": "nvme"}[tier], "nvme_path": folder}
    config = {**CONFIG, "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload}}
    args = argparse.Namespace(deepspeed_config=config)
    engine, optimizer, _, schedule = deepspeed.initialize(args=args, model=make_model())
    losses = run_script(engine, rank, 0, 6)
    norm = engine.get_global_grad_norm()
    assert isinstance(optimizer, torch.optim.Optimizer)
    engine.save_checkpoint(folder, client_state={"seen": 6, "rank": "same"})
    other, _, _, schedule = deepspeed.initialize(model=make_model(), config=config)
    path, client = other.load_checkpoint(folder)
    assert (Path(path).name, client, other.global_steps) == ("global_step3", {"seen": 6, "rank": "same"}, 3)
    losses += run_script(other, rank, 6, 12)
    other.save_16bit_model(f"{folder}/export")
    with pytest.raises(unbounded.StateError if rank else FileExistsError, match=r"pytorch_model\.bin"):
        other.save_16bit_model(f"{folder}/export/pytorch_model.bin")
    return losses, norm, schedule.get_last_lr(), other.get_batch_info()


def train_plain(rank: int, world_size: int) -> Any:
    """The same, written out in plain PyTorch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=3)
    losses, norm = [], None
    for step in range(12):
        inputs, labels = batch(step, rank)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        (loss / 2).backward()
        losses.append(loss.item())
        if step % 2:
            for p in model.parameters() if world_size > 1 else ():
                torch.distributed.all_reduce(p.grad)
                p.grad /= world_size
            found = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            norm = found if step == 5 else norm
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return losses, norm, schedule.get_last_lr(), {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.every_second
@pytest.mark.parametrize(("world_size", "tier"), [(1, "device"), (1, "disk"), (2, "device"), (2, "host"), (2, "disk")])
def test_a_script_trains_saves_and_resumes_as_plain_pytorch(
    ranks: Any, tmp_path: Path, world_size: int, tier: str
) -> None:
    ours = ranks(world_size, train_deepspeed, tier, str(tmp_path))
    plain = ranks(world_size, train_plain)
    for (losses, norm, rate, sizes), (reference, its_norm, its_rate, weights) in zip(ours, plain, strict=True):
        assert losses == pytest.approx(reference, rel=1e-5)
        assert norm == pytest.approx(its_norm, rel=1e-5)
        assert rate == its_rate
        assert sizes == (8 * world_size, 4, 2)
        exported = torch.load(tmp_path / "export" / "pytorch_model.bin", weights_only=True)
        assert all(torch.allclose(exported[name], value, atol=1e-6) for name, value in weights.items())


def test_the_other_calls_of_scripts(tmp_path: Path, caplog: Any) -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    deepspeed.init_distributed("gloo")
    assert torch.distributed.get_rank() == 0  # scripts ask it
    with pytest.raises(unbounded.PlanError, match="given world_size=4, but this process is one of 1"):
        deepspeed.init_distributed(world_size=4)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = make_model()
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(*batch(0, 0))
    schedule = torch.optim.lr_scheduler.ConstantLR
    with caplog.at_level(logging.INFO, logger="unbounded"):
        engine, optimizer, loader, made = deepspeed.initialize(
            args=args, model=model, optimizer=optimizer, training_data=data, lr_scheduler=schedule
        )
        for inputs, labels in loader:
            for _ in range(2):
                loss = nn.functional.cross_entropy(engine(inputs), labels)
                assert float(engine.backward(loss).detach()) == float(loss.detach()) / 2
                is_last = engine.micro_steps % 2 == 1
                assert engine.is_gradient_accumulation_boundary() == is_last
                engine.step()
                assert engine.was_step_applied() == is_last
    assert "step=1, skipped=0" in caplog.text
    assert "no meaning here" not in caplog.text
    assert (engine.global_steps, engine.device.type, engine.local_rank, made.last_epoch) == (1, "cpu", 0, 1)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        assert float(engine.module[0].weight.sum()) != 0
        engine.module[0].weight.fill_(0.5)
    in_order = [int(label) for rows in engine.deepspeed_io(data, 2, "eval") for label in rows[1]]
    assert in_order == data.tensors[1].tolist()
    (reverse,) = engine.deepspeed_io(data, data_sampler=[3, 2, 1, 0])
    assert reverse[1].tolist() == data.tensors[1].flip(0).tolist()
    engine.set_train_batch_size(12)
    assert engine.get_batch_info() == (12, 4, 3)
    engine.set_train_micro_batch_size(2)
    assert engine.get_batch_info() == (6, 2, 3)
    with pytest.raises(unbounded.PlanError, match="given 5, but micro-batches of all ranks have 2 rows together"):
        engine.set_train_batch_size(5)
    engine.load_state_dict(engine.state_dict())
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        with pytest.raises(unbounded.PlanError, match="save_dir is '', as from a variable that is not set"):
            save("")
    with pytest.raises(unbounded.PlanError, match="given custom_load_fn"):
        engine.load_checkpoint(str(tmp_path), custom_load_fn=print)
    engine.module[0].requires_grad_(False)
    engine.save_16bit_model(str(tmp_path), exclude_frozen_parameters=True)
    trained = ["2.weight", "2.bias", "4.weight", "4.bias"]
    assert list(torch.load(tmp_path / "pytorch_model.bin")) == trained
    assert list(engine.module_state_dict(exclude_frozen_parameters=True)) == trained
    engine.set_gradient_accumulation_boundary(False)
    engine.set_lr(0.25)
    assert (engine.get_lr(), engine.get_mom()) == ([0.25], [(0.9, 0.999)])
    engine.eval()
    assert engine.module[0].weight.sum() == 48.0
    assert engine.load_checkpoint(str(tmp_path / "nothing")) == (None, None)
    unbounded.save(tmp_path / "ours", engine.module, optimizer, global_steps=7, epoch=2)  # as `unbounded import` does
    assert engine.load_checkpoint(str(tmp_path / "ours")) == (str(tmp_path / "ours"), {"epoch": 2})
    assert engine.global_steps == 7
    engine.save_checkpoint(str(tmp_path), tag="here")
    state = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert torch.equal(state["0.weight"], torch.full((16, 6), 0.5))
    assert deepspeed.comm.get_world_size() == 1


def test_a_scripts_own_backward_is_divided_by_the_micro_batches_or_refused() -> None:
    engines = [deepspeed.initialize(model=make_model(), config=CONFIG)[0] for _ in range(2)]
    for step in range(4):
        losses = [nn.functional.cross_entropy(engine(batch(step, 0)[0]), batch(step, 0)[1]) for engine in engines]
        engines[0].backward(losses[0])
        engines[1].scale(losses[1]).backward()
        for engine in engines:
            engine.step(lr_kwargs={"last_batch_iteration": 2})
    assert engines[0].get_lr() == [CONFIG["scheduler"]["params"]["warmup_max_lr"]]  # type: ignore[index]
    assert all(map(torch.equal, *(engine.state_dict().values() for engine in engines)))
    engine = engines[0]
    for step in range(2):
        nn.functional.cross_entropy(engine(batch(step, 0)[0]), batch(step, 0)[1]).backward()
        if step == 0:
            engine.step()
    with pytest.raises(unbounded.StateError, match="were not divided by gradient_accumulation_steps 2"):
        engine.step()
    engine = engines[1]
    engine.set_gradient_accumulation_boundary(True)  # Accelerate: one step after all backwards
    for step in range(2):
        engine.backward(nn.functional.cross_entropy(engine(batch(step, 0)[0]), batch(step, 0)[1]))
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (3, 24)


@pytest.mark.parametrize(
    ("precision", "skips"),
    [
        ({"bf16": {"enabled": True}}, True),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, False),
        ({"fp16": {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}}, True),
    ],
)
def test_a_step_whose_gradients_are_not_finite_is_skipped_as_by_deepspeed(precision: Any, skips: bool) -> None:
    config = {**CONFIG, **precision, "gradient_accumulation_steps": 1}
    engine, _, _, schedule = deepspeed.initialize(model=make_model(), config=config)
    run_script(engine, 0, 0, 2)
    before = engine.state_dict()["0.weight"].clone()
    inputs, labels = batch(2, 0)
    inputs[0, 0] = float("nan")
    engine.backward(nn.functional.cross_entropy(engine(inputs), labels))
    engine.step()
    assert engine.was_step_applied() is not skips
    assert (engine.skipped_steps, engine.global_steps, schedule.last_batch_iteration) == (skips, 3, 2 - skips)
    assert torch.equal(engine.state_dict()["0.weight"], before) is skips
    if not skips:
        return
    run_script(engine, 0, 3, 5)
    assert engine.state_dict()["0.weight"].isfinite().all()
    if "fp16" in precision:
        engine.backward(nn.functional.cross_entropy(engine(inputs), labels))
        with pytest.raises(
            unbounded.StateError, match=r"step 6 are not finite, and the loss scale 1 is fp16\.min_loss"
        ):
            engine.step()


def test_helpers_of_scripts_that_have_little_to_do_here() -> None:
    batches = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(batches) for _ in range(5)] == [1, 2, 1, 2, 1]
    model = make_model()
    assert deepspeed.utils.set_z3_leaf_modules(model, ["Tanh"]) == [model[1], model[3]]  # type: ignore[index]
    with pytest.raises(ValueError, match=r"no module of .*Conv2d"):
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv2d])


def test_what_deepspeed_has_and_we_do_not_is_named_with_what_to_do() -> None:
    with pytest.raises(AttributeError, match=r"no 'PipelineModule'. With `unbounded.pipeline\(model\)`"):
        _ = deepspeed.PipelineModule
    with pytest.raises(AttributeError, match=r"no 'nothing'.$"):
        _ = deepspeed.nothing


def test_scripts_ask_the_accelerator_for_a_device_its_memory_and_its_seed(caplog: Any) -> None:
    device = deepspeed.get_accelerator()
    assert torch.empty(2, device=device.current_device_name()).device.type == device.device_name() == "cpu"
    assert (device.is_available(), device.device_count(), device.current_device()) == (True, 1, 0)
    assert device.communication_backend_name() == "gloo"
    assert 0 < device.memory_allocated() <= device.max_memory_allocated() < device.total_memory()
    assert 0 < device.available_memory() < device.total_memory()
    assert device.on_accelerator(device.pin_memory(torch.ones(2)))
    before = device.get_rng_state()
    device.manual_seed_all(7)
    first = torch.rand(3)
    device.manual_seed(7)
    assert (torch.equal(first, torch.rand(3)), device.initial_seed()) == (True, 7)
    device.set_rng_state(before)
    with device.device(0), device.stream(device.Stream()):
        device.synchronize()
        device.empty_cache()
    with pytest.raises(AttributeError, match=r"torch\.cpu has no attribute 'nothing'"):
        _ = device.nothing
    with caplog.at_level(logging.INFO, logger="unbounded"):
        deepspeed.utils.see_memory_usage("not shown")
        deepspeed.utils.see_memory_usage("after the model", force=True)
        deepspeed.utils.log_dist("of rank 3", ranks=[3])
    (shown,) = caplog.messages
    assert re.fullmatch(r"\[Rank 0\] after the model: allocated \d+\.\d.* GiB of the host", shown)


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def train_with_autotp(rank: int, world_size: int) -> list[float]:
    config = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": world_size, "tp_overlap_comm": True},
    }
    rows = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(1))
    engine, _, loader, _ = deepspeed.initialize(model=make_llama(), config=config, training_data=list(rows))
    assert (engine.world_size, engine.dp_world_size, engine.get_batch_info()) == (world_size, 1, (4, 2, 2))
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def test_tensor_parallelism_of_a_config_is_that_of_the_plan(ranks: Any) -> None:
    (alone,) = ranks(1, train_with_autotp)
    for losses in ranks(2, train_with_autotp):
        assert losses == pytest.approx(alone, rel=1e-5)


def average_two_models(rank: int, world_size: int) -> list[float]:
    """The moving average of RLHF scripts, whose parameters belong to two engines and a plain model."""
    models = [make_model() for _ in range(3)]
    for model in models[:2]:
        unbounded.shard(model, torch.optim.AdamW(model.parameters()), {"stage": 3})
    for one, other, plain in zip(*(model.parameters() for model in models), strict=True):
        with deepspeed.zero.GatheredParameters([one, other, plain], modifier_rank=1):
            if rank == 1:
                one.fill_(1.0)
                other.copy_(one * 2)
                plain.data.copy_(other + 1)
    return [float(model.state_dict()["0.weight"].mean()) for model in models]


def test_parameters_of_several_models_are_gathered_together(ranks: Any) -> None:
    assert ranks(2, average_two_models) == [[1.0, 2.0, 3.0]] * 2


def test_tiled_linear_and_checkpointing_compute_what_they_stand_for() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(7, 5)
    tiled = deepspeed.zero.TiledLinear(7, 5, in_splits=2, out_splits=3, init_linear=whole)
    rows = torch.randn(4, 7, requires_grad=True)
    torch.testing.assert_close(tiled(rows), whole(rows))
    for offload in (False, True):
        deepspeed.checkpointing.configure(checkpoint_in_cpu=offload)
        (gradient,) = torch.autograd.grad(deepspeed.checkpointing.checkpoint(whole, rows).sum(), rows)
        torch.testing.assert_close(gradient, whole.weight.sum(0).expand(4, 7))


def lamb_by_hand(weight: torch.Tensor, gradients: list[torch.Tensor], rate: float, decay: float, most: float) -> Any:
    """DeepSpeed's formula, in float64."""
    w, m, v = weight.double(), torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
    for count, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g.double(), 0.999 * v + 0.001 * g.double() ** 2
        step = m / (v.sqrt() + 1e-8) + decay * w
        ratio = float(min(max(w.norm() / step.norm(), 0.01), most))
        w = w - rate * (1 - 0.999**count) ** 0.5 / (1 - 0.9**count) * ratio * step
    return w


@pytest.mark.parametrize("most", [10.0, 0.02])
def test_lamb_is_computed_as_deepspeed_does(most: float) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Lamb", "params": {"lr": 0.05, "weight_decay": 0.1, "max_coeff": most}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    torch.manual_seed(5)
    model = nn.Linear(6, 3, bias=False)
    weight, gradients = model.weight.detach().clone(), []
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for step in range(4):
        engine.backward(nn.functional.cross_entropy(engine(batch(step, 0)[0]), batch(step, 0)[1]))
        gradients.append(model.weight.grad.clone())  # type: ignore[union-attr]
        engine.step()
    expected = lamb_by_hand(weight, gradients, 0.05, 0.1, most)
    torch.testing.assert_close(model.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_the_optimizers_have_deepspeeds_defaults() -> None:
    def made(kind: str, **params: Any) -> Any:
        return build_optimizer(kind, params, make_model().parameters())

    assert made("Lion").defaults["betas"] == (0.9, 0.999)
    assert made("AdamW").defaults["weight_decay"] == 0
    assert made("AdamW", torch_adam=True).defaults["weight_decay"] == 0.01
    assert type(made("Adam", torch_adam=True, adam_w_mode=False)) is torch.optim.Adam


def test_the_optimizers_decay_weights_as_deepspeeds_do() -> None:
    for kind, plain in ((FusedAdam, torch.optim.AdamW), (DeepSpeedCPUAdam, torch.optim.AdamW)):
        one, other = make_model(), make_model()
        _, ours = unbounded.shard(one, kind(one.parameters(), lr=1e-2, weight_decay=0.3))
        theirs = plain(other.parameters(), lr=1e-2, weight_decay=0.3)
        for model, optimizer in ((one, ours), (other, theirs)):
            nn.functional.cross_entropy(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()
            optimizer.step()
        for name, value in one.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name])
