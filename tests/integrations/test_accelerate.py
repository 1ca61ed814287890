"""A loop as users of Accelerate write it, with sharded objects and without."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.integrations.launched import launched
from tests.ranks import RankError

accelerate = pytest.importorskip("accelerate")

PRELOAD_IN_RANKS = ["accelerate", "unbounded.hf.accelerator"]


def make_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def make_loader() -> Any:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(32, 5, generator=generator), torch.randint(0, 3, (32,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=2)


class Job:
    """Model, optimizer, loader, scheduler and accelerator, prepared."""

    def __init__(self, plan: Any, **options: Any) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if plan is not None:
            unbounded.hf.attach(self.accelerator)
            model, optimizer = unbounded.shard(model, optimizer, plan)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        prepared = self.accelerator.prepare(model, optimizer, make_loader(), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, steps: int) -> list[float]:
        """The loop of Accelerate's tutorial; `steps` micro-batches of it."""
        found, batches = [], iter(self.loader)
        for _ in range(steps):
            inputs, labels = next(batches)
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    found.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            found.append(float(loss.detach()))
        return [*found, self.optimizer.param_groups[0]["lr"]]


def compare(rank: int, world_size: int, tiers: list[str], folder: str) -> Any:
    with launched(rank, world_size):
        plain = Job(None)
        reference, wanted = plain.train(4) + plain.train(4), plain.accelerator.get_state_dict(plain.model)
        return reference, [compare_tier(tier, f"{folder}/{tier}", wanted) for tier in tiers]


def compare_tier(tier: str, folder: str, wanted: dict[str, torch.Tensor]) -> Any:
    plan = {"weights": tier, "optimizer": tier, "gradients": tier, "disk_path": folder}
    Path(folder).mkdir(exist_ok=True)
    ours = Job(plan)
    found = ours.train(4)
    ours.accelerator.save_state(f"{folder}/state")
    unbounded.save(f"{folder}/alone", ours.model, ours.optimizer)  # wrapped as prepare returned it
    going_on = ours.train(4)
    again = Job(plan)
    again.accelerator.load_state(f"{folder}/state")
    resumed = again.train(4)
    assert ours.accelerator.unwrap_model(ours.model) is ours.model
    weights = ours.accelerator.get_state_dict(ours.model)
    same = all(torch.allclose(weights[name], value, atol=1e-6) for name, value in wanted.items())
    return found + going_on, going_on, resumed, same


@pytest.mark.parametrize(("world_size", "tiers"), [(1, ["device", "disk"]), (2, ["device", "disk"])])
def test_a_loop_trains_saves_and_resumes_as_the_plain_one(
    ranks: Any, tmp_path: Path, world_size: int, tiers: list[str]
) -> None:
    for reference, of_tiers in ranks(world_size, compare, tiers, str(tmp_path)):
        for found, going_on, resumed, same in of_tiers:
            assert found == pytest.approx(reference, rel=1e-5)
            assert resumed == pytest.approx(going_on, rel=1e-6)
            assert same


class Bomb:
    """Something of the user's in a checkpoint, which Accelerate saves last: the second save kills the process."""

    saves = 0

    def state_dict(self) -> dict[str, Any]:
        self.saves += 1
        if self.saves == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train_with_saves(rank: int, world_size: int, folder: str, how: str) -> Any:
    with launched(rank, world_size):
        project = accelerate.utils.ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        job = Job({"weights": "host", "optimizer": "host", "gradients": "host"}, project_config=project)
        job.accelerator.register_for_checkpointing(Bomb())
        if how == "resumed":
            job.accelerator.load_state()  # the second is newer, but not whole
            with pytest.raises(unbounded.CheckpointError, match="checkpoint_1 was cut short"):
                job.accelerator.load_state(f"{folder}/checkpoints/checkpoint_1")
        else:
            job.train(4)
            job.accelerator.save_state()
        found = job.train(4)
        if how == "killed":
            job.accelerator.save_state()
        return found, job.accelerator.get_state_dict(job.model)


def test_a_job_that_is_killed_while_it_saves_resumes_as_if_it_had_not_been(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(2, train_with_saves, f"{tmp_path}/whole", "whole")
    with pytest.raises(RankError, match="exit code -9"):
        ranks(2, train_with_saves, f"{tmp_path}/killed", "killed")
    (tmp_path / "killed/checkpoints/checkpoint_old").mkdir()  # the user's own
    resumed = ranks(2, train_with_saves, f"{tmp_path}/killed", "resumed")
    for (found, weights), (its_own, its_weights) in zip(whole, resumed, strict=True):
        assert its_own == found
        assert all(torch.equal(weights[name], value) for name, value in its_weights.items())


def prepare_over_a_tensor_axis(rank: int, world_size: int) -> str:
    plan = {"tensor": 2, "styles": (("0", "column"), ("2", "row"))}
    with launched(rank, world_size), pytest.raises(unbounded.PlanError) as caught:
        Job(plan)
    return str(caught.value)


def test_a_loader_is_refused_whose_rows_would_differ_on_ranks_that_need_the_same(ranks: Any) -> None:
    for message in ranks(2, prepare_over_a_tensor_axis):
        assert "gives each of the 2 ranks other rows of a prepared loader, but only 1 of them hold" in message


def test_fp16_is_scaled_by_the_accelerator_and_what_it_cannot_know_is_refused() -> None:
    with launched(0, 1):
        job = Job({"precision": "fp16", "loss_scale": 2.0**20})
        assert len(job.train(2)) == 4
        assert job.optimizer.step_was_skipped is True  # the first gradients overflow
        assert job.accelerator.optimizer_step_was_skipped is True
        job.train(16)
        assert job.optimizer.step_was_skipped is False
        with pytest.raises(unbounded.StateError, match="not all those of one sharded optimizer"):
            job.accelerator.clip_grad_norm_(list(job.model.parameters())[:1], 1.0)
        for call in (
            lambda: job.accelerator.clip_grad_value_(job.model.parameters(), 1.0),
            lambda: job.accelerator.unscale_gradients(job.optimizer),
        ):
            with pytest.raises(
                unbounded.StateError, match=r"in fp16, whose gradients are multiplied by the loss scale"
            ):
                call()
    with launched(0, 1), pytest.raises(unbounded.PlanError, match=r"mixed_precision='bf16'.*precision=\"bf16\""):
        unbounded.hf.attach(accelerate.Accelerator(cpu=True, mixed_precision="bf16"))
    with (
        launched(0, 1),
        pytest.raises(unbounded.PlanError, match=r"dynamo_backend='EAGER'.*compile='eager' in the plan"),
    ):
        unbounded.hf.attach(accelerate.Accelerator(cpu=True, dynamo_backend="eager"))
