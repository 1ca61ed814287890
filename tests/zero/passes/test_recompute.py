"""Activation checkpointing of both kinds inside sharded models: equal gradients, also after an exception."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zero.training import Batch, Block, Run, Task, TinyGPT, assert_parity, shard, train, train_both, train_plain


class Recomputing(TinyGPT):
    """Every block, or every pair of blocks, is run under `torch.utils.checkpoint`."""

    def __init__(self, *, reentrant: bool, pairs: bool = False) -> None:
        super().__init__(depth=4)
        self.reentrant = reentrant
        self.stride = 2 if pairs else 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for start in range(0, len(self.blocks), self.stride):
            x = checkpoint(self._segment, start, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return self.head(self.norm(x))

    def _segment(self, start: int, x: Tensor) -> Tensor:
        for block in self.blocks[start : start + self.stride]:
            x = block(x)
        return x


class Inside(Block):
    """A block that checkpoints its own layers, so that the recomputation does not go through the block's forward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(11)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[return-value]


class Checkpointed(Task):
    def __init__(self, *, reentrant: bool, pairs: bool = False) -> None:
        self.reentrant, self.pairs = reentrant, pairs

    def model(self) -> nn.Module:
        return Recomputing(reentrant=self.reentrant, pairs=self.pairs)


class CheckpointedInside(Checkpointed):
    def model(self) -> nn.Module:
        model = TinyGPT()
        model.blocks = nn.ModuleList(Inside(reentrant=self.reentrant) for _ in range(3))
        return model


class CheckpointedFrozen(Checkpointed):
    """What is recomputed has frozen blocks and single frozen parameters inside."""

    def model(self) -> nn.Module:
        model = super().model()
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.weight.requires_grad_(False)
        return model


class CheckpointedWithDropout(Checkpointed):
    """The recomputation must draw the same random numbers."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.blocks:
            block.up = nn.Sequential(nn.Dropout(0.2), nn.Linear(11, 23))
        return model


class Accumulated(Checkpointed):
    accumulate = 2


KINDS = [Checkpointed, CheckpointedInside, CheckpointedFrozen, CheckpointedWithDropout, Accumulated]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 2), (2, 3)])
def test_recomputed_blocks_give_the_same_gradients(
    ranks: Any, kind: Any, reentrant: bool, world_size: int, stage: int
) -> None:
    assert_parity(ranks(world_size, train_both, kind(reentrant=reentrant), {"stage": stage}))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_segment_of_several_blocks_may_be_recomputed_at_once(ranks: Any, reentrant: bool) -> None:
    assert_parity(ranks(2, train_both, Checkpointed(reentrant=reentrant, pairs=True), {"stage": 3}))


class Failing(nn.Module):
    """Raises once, in its n-th run: the forward or, later, the recomputation in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_at = -1
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == self.fail_at:
            raise ValueError("deliberate failure in the middle")
        return x


class Interrupted(Checkpointed):
    """An exception in the forward, or in the recomputation, is caught by the user, who tries the batch again."""

    def __init__(self, *, reentrant: bool, phase: str) -> None:
        super().__init__(reentrant=reentrant)
        self.phase = phase

    def model(self) -> nn.Module:
        model = super().model()
        model.blocks[2].norm = nn.Sequential(model.blocks[2].norm, Failing())
        return model


def train_interrupted(rank: int, world_size: int, task: Interrupted, plan: dict[str, Any]) -> tuple[Run, Run]:
    torch.manual_seed(3)
    model = task.model()
    reference = train_plain(task, copy.deepcopy(model), rank=rank, world_size=world_size)
    model, optimizer = shard(model, task.optimizer(model), plan)
    model.blocks[2].norm[1].fail_at = 1 if task.phase == "forward" else 2
    with pytest.raises(ValueError, match="deliberate failure"):
        task.loss(model, Batch(0, 0, rank)).backward()
    optimizer.zero_grad()
    ours = train(task, model, optimizer, rank=rank, finish=lambda: None)
    ours.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return reference, ours


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 2), (2, 3)])
def test_training_goes_on_after_an_exception_and_a_retry(
    ranks: Any, phase: str, reentrant: bool, world_size: int, stage: int
) -> None:
    task = Interrupted(reentrant=reentrant, phase=phase)
    assert_parity(ranks(world_size, train_interrupted, task, {"stage": stage}))
