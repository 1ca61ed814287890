"""A rank that is stopped, killed or raises on the tensor, context or pipeline axis ends the others, which name it.

Each case trains a tiny model over one axis of two ranks until the fault, and looks at what the other rank raises: which
rank it waited for, in which operation, of which layer or stage.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import unbounded
from tests.parallel import models
from tests.parallel.comparing import optimizer_of
from tests.ranks import RankError
from unbounded.errors import PeerError

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)
LIMIT = 5.0
"""Seconds that a rank is waited for in these cases: enough for one that only lacks its turn on a busy machine."""


class Job:
    """A tiny Llama over one axis; `step` trains it by one batch."""

    def __init__(self, plan: dict[str, Any]) -> None:
        model = models.build("llama", num_hidden_layers=2, attention_dropout=0.0)
        plan = {**plan, "watchdog_seconds": LIMIT}
        self.model, self.optimizer = unbounded.shard(model, optimizer_of(model), plan)
        self.run: Callable[..., Any] = unbounded.pipeline(self.model) if "pipeline" in plan else self._run

    def _run(self, **batch: Any) -> None:
        self.model(**batch).loss.backward()

    def step(self) -> None:
        self.run(**models.batch("llama", 0))
        self.optimizer.step()
        self.optimizer.zero_grad()


def stop(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(rank: int) -> None:
    raise ValueError(f"deliberate failure of rank {rank}")


def meet_fault(
    rank: int, world_size: int, plan: dict[str, Any], fault: Callable[[int], None], in_backward: bool
) -> str:
    """What a rank raises when its peer has a fault in its last block, in the second step."""
    job = Job(plan)
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    job.step()
    block = job.model.model.layers[-1]

    def break_off(_: Any, __: Any, output: Any) -> None:
        handle.remove()
        hidden = output[0] if isinstance(output, tuple) else output
        if in_backward:
            hidden.register_hook(lambda _: fault(rank))
        else:
            fault(rank)

    if rank == 1:
        handle = block.register_forward_hook(break_off)
    try:
        for _ in range(3):
            job.step()
    except PeerError as error:
        return str(error)
    except ValueError as error:
        job.optimizer.engine.axes.world.watch.close(error)  # as the end of the program does
        return str(error)
    finally:
        if rank == 0 and fault is stop:
            os.kill(processes[1], signal.SIGCONT)
    return ""


TENSOR, SEQUENCE = {"tensor": 2}, {"tensor": 2, "sequence": True}
CONTEXT, PIPELINE = {"context": 2}, {"pipeline": 2, "microbatches": 2}
CASES = [
    (TENSOR, stop, False, r"in the (sum|gather|largest logits) of (layer 'lm_head'|the loss)"),
    (SEQUENCE, stop, True, r"in the (gather|sum) of the gradient of layer 'model\.layers\.1"),
    (CONTEXT, stop, True, r"in the (exchange|sum) of the gradient of layer 'model\.layers\.1'"),
    (PIPELINE, stop, False, r"in the receipt of the gradients of stage 1"),
    (SEQUENCE, fail, False, r"was in the (gather|scattered sum|largest logits) of (layer '|the loss)"),
    (PIPELINE, fail, True, r"was in the receipt of the gradients of stage 1"),
]


@pytest.mark.every_second
@pytest.mark.parametrize(("plan", "fault", "in_backward", "operation"), CASES)
def test_a_rank_that_stops_or_raises_on_an_axis_is_named(
    ranks: Any, plan: dict[str, Any], fault: Callable[[int], None], in_backward: bool, operation: str
) -> None:
    waited, told = ranks(2, meet_fault, plan, fault, in_backward)
    if fault is stop:
        assert "for rank 1, which has not been heard from for" in waited
        assert told.startswith("rank 0 failed: ")
    else:
        assert waited.startswith("rank 1 failed: ValueError: deliberate failure of rank 1")
        assert told == "deliberate failure of rank 1"
    assert re.search(operation, waited), waited


@pytest.mark.parametrize("plan", [TENSOR, PIPELINE])
def test_a_rank_that_is_killed_on_an_axis_is_named(ranks: Any, plan: dict[str, Any]) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, raise_fault, plan)
    message = str(caught.value)
    assert "rank 1 failed:\nthe process died with exit code -9" in message
    assert re.search(r"PeerError: rank 0 was in the .* of .* with rank 1, which has not been heard from", message), (
        message
    )


def raise_fault(rank: int, world_size: int, plan: dict[str, Any]) -> None:
    raise PeerError(meet_fault(rank, world_size, plan, die, False))
