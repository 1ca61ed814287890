"""Ranks that do not do the same: each gets one clear error that says who did what, and none of them hangs."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unbounded
from tests import process
from tests.several_ranks.test_whereabouts import COMPILING, SAVING, call_from
from unbounded.checkpoint.peers import Peers
from unbounded.sharding import running

PRELOAD_IN_RANKS = ["unbounded.sharding.placing", "unbounded.checkpoint.saving"]
LIMIT = 5.0
"""Seconds that a rank is waited for in these cases: enough for one that only lacks its turn on a busy machine."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Job:
    """A tiny model in training; each method is a call that every rank should make."""

    def __init__(self, stage: int, **plan: Any) -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.model, self.optimizer = unbounded.shard(
            model, optimizer, {"stage": stage, "watchdog_seconds": LIMIT, **plan}
        )

    def forward(self) -> Tensor:
        return self.model(torch.ones(2, 8)).square().sum()

    def backward(self) -> None:
        self.forward().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        self.backward()
        self.step()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.forward()


def lonely_evaluation(job: Job, rank: int, folder: str) -> None:
    if rank == 0:
        job.evaluate()
    job.train()


def uneven_batches(job: Job, rank: int, folder: str) -> None:
    for _ in range(2 + rank):
        job.evaluate()
    job.train()


def uneven_microbatches(job: Job, rank: int, folder: str) -> None:
    for _ in range(1 + rank):
        job.backward()
    job.step()


def lonely_save(job: Job, rank: int, folder: str) -> None:
    if rank == 0:
        unbounded.save(folder, job.model, job.optimizer)
    job.train()


def lonely_state_dict(job: Job, rank: int, folder: str) -> None:
    if rank == 0:
        job.model.state_dict()
    job.train()


def lonely_load(job: Job, rank: int, folder: str) -> None:
    if rank == 0:
        job.model.load_state_dict(Net().state_dict())
    job.train()


def lonely_clipping(job: Job, rank: int, folder: str) -> None:
    job.backward()
    if rank == 0:
        job.optimizer.clip_grad_norm_(1.0)
    job.step()


def lonely_clearing(job: Job, rank: int, folder: str) -> None:
    job.backward()
    if rank == 0:
        job.model.head.weight.grad = None
    job.step()


def crossed_clearing(job: Job, rank: int, folder: str) -> None:
    job.backward()
    for block in job.model.blocks:
        block[0].bias.grad = None
    job.model.head.get_parameter("bias" if rank else "weight").grad = None
    job.step()


def another_rate(job: Job, rank: int, folder: str) -> None:
    job.train()
    job.optimizer.param_groups[0]["lr"] *= 1 + rank
    job.train()


def another_write(job: Job, rank: int, folder: str) -> None:
    with unbounded.full_params(job.model):
        job.model.head.weight.mul_(1 + rank)


def caught_in_full_params(job: Job, rank: int, folder: str) -> None:
    with suppress(ValueError), unbounded.full_params(job.model):
        if rank == 1:
            raise ValueError("deliberate")
        job.model.head.weight.mul_(2)


def save_of_another_kind(job: Job, rank: int, folder: str) -> None:
    unbounded.save(folder, job.model, job.optimizer if rank == 0 else None)


def load_of_another_kind(job: Job, rank: int, folder: str) -> None:
    unbounded.save(folder, job.model, job.optimizer)
    unbounded.load(folder, job.model, job.optimizer if rank == 1 else None)


def caught_in_backward(job: Job, rank: int, folder: str) -> None:
    def break_off(module: nn.Module, arguments: Any, output: Tensor) -> None:
        output.register_hook(lambda _: 1 // 0)

    hook = job.model.blocks[0].register_forward_hook(break_off) if rank == 1 else None
    with suppress(ZeroDivisionError):
        job.backward()  # breaks off after some units were reduced
    if hook is not None:
        hook.remove()
    job.backward()
    job.step()


def lonely_shard(job: Job, rank: int, folder: str) -> None:
    if rank == 0:
        Job(3)
    job.train()


def lonely_saving(job: Job, rank: int, folder: str) -> None:
    """Rank 1 leaves a save that both have begun."""
    with suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Peers, "agree", Mock(side_effect=KeyboardInterrupt))
        unbounded.save(folder, job.model, job.optimizer)
    job.train()


def longer_generation(job: Job, rank: int, folder: str) -> None:
    for _ in range(3 + 2 * rank):
        job.evaluate()
    if rank == 0:
        job.model.state_dict()


def once_more(job: Job, rank: int, folder: str) -> None:
    x = job.model(torch.ones(2, 8))
    if rank == 1:
        job.model.blocks[1](torch.ones(2, 8))
    x.square().sum().backward()


def out_of_step(
    rank: int, world_size: int, fault: Callable[..., None], stage: int, folder: str, limit: float = LIMIT
) -> tuple[str, str]:
    job = Job(stage, watchdog_seconds=limit)
    job.train()
    start = time.monotonic()
    try:
        fault(job, rank, folder)
        for _ in range(20):  # a rank that has gone on alone meets the others in what follows
            job.train()
    except unbounded.errors.PeerError as error:
        return str(error), f"{time.monotonic() - start:.1f}"
    return "", ""


CASES = [
    (lonely_evaluation, 3, "rank 0 is in a forward without gradients; rank 1 is in a forward with gradients"),
    (lonely_evaluation, 2, "rank 0 is in a forward without gradients; rank 1 is in a forward with gradients"),
    (uneven_batches, 3, "rank 0 is in a forward with gradients; rank 1 is in a forward without gradients"),
    (uneven_microbatches, 0, r"rank 0 is in optimizer.step\(\); rank 1 is in a backward"),
    (uneven_microbatches, 2, r"rank 0 is in optimizer.step\(\); rank 1 is in a backward"),
    (uneven_microbatches, 3, r"rank 0 is in optimizer.step\(\); rank 1 is in a forward with gradients"),
    (lonely_save, 0, r"rank 0 is in unbounded.save\(\); rank 1 is in a "),
    (lonely_save, 3, r"rank 0 is in unbounded.save\(\); rank 1 is in a forward with gradients"),
    (lonely_state_dict, 3, r"rank 0 is in model.state_dict\(\); rank 1 is in a forward with gradients"),
    (lonely_load, 1, r"rank 0 is in model.load_state_dict\(\); rank 1 is in "),
    (lonely_load, 3, r"rank 0 is in model.load_state_dict\(\); rank 1 is in a forward with gradients"),
    (lonely_clipping, 0, r"rank 0 is in optimizer.clip_grad_norm_\(1\.0\); rank 1 is in optimizer.step\(\)"),
    (lonely_clipping, 1, r"rank 0 is in optimizer.clip_grad_norm_\(1\.0\); rank 1 is in optimizer.step\(\)"),
    (lonely_clipping, 2, r"rank 0 is in optimizer.clip_grad_norm_\(1\.0\); rank 1 is in optimizer.step\(\)"),
    (lonely_clipping, 3, r"rank 0 is in optimizer.clip_grad_norm_\(1\.0\); rank 1 is in optimizer.step\(\)"),
    (lonely_clearing, 0, r"gradients of 8 parameters instead of gradients of 7 parameters \(all but head.weight\)"),
    (crossed_clearing, 3, r"(?s)( gradients of 4 parameters .*bias and 1 more, whose checksum is \w+\).*){2}"),
    (longer_generation, 3, r"rank 0 is in model.state_dict\(\); rank 1 is in a forward without gradients"),
    (once_more, 3, "rank 0 is in a backward; rank 1 is in the gather of unit 'blocks.1'"),
    (another_rate, 1, r"rank 1 has different settings in optimizer.step\(\) from rank 0: lr=0.002 instead of lr=0.001"),
    (another_write, 0, r"rank 1 has different settings in the values that unbounded.full_params\(\) keeps from rank 0"),
    (another_write, 3, r"unit 'root' written with checksum \w+ instead of unit 'root' not written"),
    (
        caught_in_full_params,
        0,
        r"rank 0 is in the values that unbounded.full_params\(\) keeps; rank 1 is in a backward",
    ),
    (
        save_of_another_kind,
        3,
        r"rank 0 is in unbounded.save\(\); rank 1 is in unbounded.save\(\) without the optimizer",
    ),
    (
        load_of_another_kind,
        1,
        r"rank 0 is in unbounded.load\(\) without the optimizer; rank 1 is in unbounded.load\(\)",
    ),
]


@pytest.mark.parametrize(("fault", "stage", "message"), CASES)
def test_ranks_that_make_different_calls_get_the_same_error(
    ranks: Any, tmp_path: Path, fault: Callable[..., None], stage: int, message: str
) -> None:
    (first, _), (second, _) = ranks(2, out_of_step, fault, stage, str(tmp_path / "checkpoint"))
    assert first == second
    assert re.search(message, first), first


def keep_the_error(rank: int, world_size: int, fault: Callable[..., None], stage: int, folder: str) -> bool:
    """Whether a model is freed once its user drops it and the error, whose traceback holds the user's frames."""
    job = Job(stage)
    alive = [weakref.ref(job.model), weakref.ref(job.optimizer.engine)]
    with pytest.raises(unbounded.errors.PeerError) as raised:
        fault(job, rank, folder)
    del job, raised
    return process.is_freed(*alive)


@pytest.mark.parametrize(("fault", "stage"), [(once_more, 3), (uneven_microbatches, 2), (lonely_clipping, 0)])
def test_a_model_is_freed_whose_ranks_were_out_of_step(
    ranks: Any, tmp_path: Path, fault: Callable[..., None], stage: int
) -> None:
    assert ranks(2, keep_the_error, fault, stage, str(tmp_path / "checkpoint")) == [True, True]


def evaluate_alone(rank: int, world_size: int, stage: int) -> str:
    job = Job(stage)
    for _ in range(2):
        job.train()
        job.optimizer.wait()
        if rank == 0:
            job.evaluate()
    return "went on"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_weights_may_be_evaluated_on_one_rank(ranks: Any, stage: int) -> None:
    assert ranks(2, evaluate_alone, stage) == ["went on", "went on"]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_exception_that_one_rank_catches_in_its_backward_ends_both(ranks: Any, tmp_path: Path, stage: int) -> None:
    """In stage 2, one finds that they differ while the other waits for it in a reduction and cannot say what it does:
    neither waits for its limit."""
    for message, _ in ranks(2, out_of_step, caught_in_backward, stage, str(tmp_path), 300.0):
        assert "waited" not in message
        assert "rank 0" in message
        assert "rank 1" in message


@pytest.mark.parametrize(("fault", "call"), [(lonely_shard, "unbounded.shard()"), (lonely_saving, "unbounded.save()")])
def test_the_call_is_named_that_one_rank_is_in_alone(
    ranks: Any, tmp_path: Path, fault: Callable[..., None], call: str
) -> None:
    for message, _ in ranks(2, out_of_step, fault, 3, str(tmp_path), 300.0):
        assert f"wait for each other: rank 0 in {call}; rank 1 in the comparison of what ranks do next" in message


def elsewhere(rank: int, world_size: int, stage: int) -> str:
    job = Job(stage)
    job.train()
    heard = dist.new_group([0, 1])
    try:
        if rank == 1:
            _sleep_in_the_users_code(heard)
        job.train()
    except unbounded.errors.PeerError as error:
        if rank == 0:
            dist.barrier(heard)
        for call in (job.train, job.evaluate):  # of a program that has caught it
            with pytest.raises(unbounded.errors.PeerError, match=r"the job has failed, .* Start all of them again"):
                call()
        return str(error)
    return ""


def _sleep_in_the_users_code(group: Any) -> None:
    dist.barrier(group)  # the other enters it when it has given up


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_stays_elsewhere_is_named_with_its_place(ranks: Any, stage: int) -> None:
    waited, told = ranks(2, elsewhere, stage)
    assert "for rank 1, which is alive but elsewhere: at several_ranks/test_out_of_step.py" in waited
    assert "in _sleep_in_the_users_code" in waited
    assert "raise watchdog_seconds" in waited
    assert told.startswith(f"rank 0 failed: {waited[:30]}")


def busy(rank: int, world_size: int, place: str) -> str:
    job = Job(3)
    job.train()
    if rank == 1:
        call_from(place)(time.sleep, 1.5 * LIMIT)
    job.train()
    return "went on"


@pytest.mark.parametrize("place", [SAVING, COMPILING])
def test_a_rank_that_saves_or_compiles_is_waited_for(ranks: Any, place: str) -> None:
    assert ranks(2, busy, place) == ["went on", "went on"]


def stopped(rank: int, world_size: int, stage: int) -> str:
    job = Job(stage)
    job.train()
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for _ in range(3):
            job.train()
    except unbounded.errors.PeerError as error:
        return str(error)
    finally:
        if rank == 0:
            os.kill(processes[1], signal.SIGCONT)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_a_stopped_rank_is_named(ranks: Any, stage: int) -> None:
    waited, told = ranks(2, stopped, stage)
    assert "for rank 1, which has not been heard from for" in waited
    assert "stopped or killed" in waited
    assert told.startswith("rank 0 failed: ")


def leave_a_vote_open(rank: int, size: int) -> None:
    """Only the last rank votes, and an error keeps it from waiting for the others. They stay until it has ended."""
    unbounded.shard(net := Net(), torch.optim.SGD(net.parameters(), lr=0.1), {"stage": 3})
    lane = running.sharded(net).engine.ranks.lane("vote")
    store = dist.distributed_c10d._get_default_store()
    if rank == size - 1:
        pending = lane.launch_max(torch.zeros(1), "a vote")
        del pending, lane, net
        gc.collect()
        dist.destroy_process_group()
        store.set("the last one has ended", "")
    else:
        store.wait(["the last one has ended"])


def test_the_job_of_a_rank_ends_although_a_collective_of_it_does_not(ranks: Any) -> None:
    ranks(2, leave_a_vote_open)
