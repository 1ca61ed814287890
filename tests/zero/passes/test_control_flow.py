"""Whatever a forward does with its modules: loops, other orders, skipped blocks, branches by rank, evaluation."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zero.training import Batch, Block, Run, Task, TinyGPT, assert_parity, shard, train_both
from unbounded.errors import PeerError


class Looped(TinyGPT):
    """Every block runs three times, in turn."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class Loop(Task):
    def model(self) -> nn.Module:
        return Looped()


class InOrder(TinyGPT):
    """The caller says which blocks run, in which order."""

    is_checkpointed = False

    def forward(self, tokens: Tensor, order: list[int] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for index in order if order is not None else range(len(self.blocks)):
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=True) if self.is_checkpointed else block(x)
        return self.head(self.norm(x))


class Ordered(Task):
    steps = 6

    def model(self) -> nn.Module:
        return InOrder(depth=5)

    def order(self, batch: Batch) -> list[int]:
        return list(range(5))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.tokens(), self.order(batch)).square().mean()


class Shuffled(Ordered):
    def order(self, batch: Batch) -> list[int]:
        return random.Random(batch.step).sample(range(5), 5)


class SkippedTogether(Ordered):
    """Blocks skipped at random, the same ones on all ranks; some step uses none at all."""

    def order(self, batch: Batch) -> list[int]:
        return [] if batch.step == 2 else [i for i in range(5) if random.Random(batch.step * 7 + i).random() < 0.5]


class SkippedApart(Ordered):
    """Blocks skipped at random, different ones on each rank."""

    def order(self, batch: Batch) -> list[int]:
        draw = random.Random(batch.step * 31 + batch.rank)
        return [i for i in range(5) if draw.random() < 0.6]


class OrderByRank(Ordered):
    def order(self, batch: Batch) -> list[int]:
        return random.Random(batch.step * 31 + batch.rank).sample(range(5), 5)


class TimesByRank(Ordered):
    """A block runs once on one rank and three times on another."""

    def order(self, batch: Batch) -> list[int]:
        return [0, *([1] * (1 + 2 * (batch.rank % 2))), 2]


class ManyBlocks(Ordered):
    """Far more blocks than there are gathers and reductions in flight."""

    def model(self) -> nn.Module:
        return InOrder(depth=14)


class ManySkippedApart(ManyBlocks):
    def order(self, batch: Batch) -> list[int]:
        draw = random.Random(batch.step * 31 + batch.rank)
        return [] if batch.step == 3 and batch.rank else [i for i in range(14) if draw.random() < 0.6]


class OneSkippedEach(ManyBlocks):
    """Each rank skips one block, and never the same."""

    def order(self, batch: Batch) -> list[int]:
        return [i for i in range(14) if i != (13 - batch.step * 2 - batch.rank * 7) % 14]


class EarlyExit(ManyBlocks):
    """Two forwards, of which the loss needs one; how far it goes differs by rank."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        middle = model(batch.tokens(), list(range(11 if batch.rank else 2)))
        whole = model(batch.tokens())
        return (middle if batch.step % 2 else whole).square().mean()


class SkippedUnderCheckpoints(ManySkippedApart):
    """Blocks are recomputed in a backward of their own, so the graph of the loss does not show them."""

    def model(self) -> nn.Module:
        model = super().model()
        model.is_checkpointed = True
        return model


class LastSkipped(Ordered):
    """One rank ends before the blocks that are fetched ahead for it; later it runs no block at all."""

    def order(self, batch: Batch) -> list[int]:
        return list(range(5)) if batch.rank == 0 else [0, 1, 2] if batch.step < 3 else []


class UnusedOnOneRank(Ordered):
    def order(self, batch: Batch) -> list[int]:
        return [0, 1, 2] if batch.rank == 0 else [0, 2, 3]  # the last block on none


class UnusedHead(Ordered):
    """A part of the model never runs: its parameters keep their values, even under weight decay."""

    def model(self) -> nn.Module:
        model = InOrder(depth=5)
        model.extra = nn.Linear(11, 31)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)


class Half(nn.Module):
    """Its second half, as large, never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.used(x).tanh()


class HalfUsed(Task):
    """A rank's part of a unit may have no gradient at all, while its peer's part has one."""

    def model(self) -> nn.Module:
        return nn.Sequential(Half(), Half(), Half())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.normal(4, 16)).square().mean()


class UsedLater(Ordered):
    """A block that runs for the first time in the third step: its bias correction starts there."""

    def order(self, batch: Batch) -> list[int]:
        return [0, 1] if batch.step < 2 else [0, 1, 4]


class UnusedInOneMicrobatch(Ordered):
    accumulate = 3

    def order(self, batch: Batch) -> list[int]:
        return [0, 1 + batch.micro]


class Recurrent(Task):
    """One cell applied over time: the same unit in a chain of its own outputs."""

    def model(self) -> nn.Module:
        return nn.GRUCell(7, 11)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        state = torch.zeros(3, 11)
        for x in batch.normal(6, 3, 7):
            state = model(x, state)
        return state.square().mean()


class TwoForwards(Task):
    """Two forwards before one backward, as contrastive losses do."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        one, two = model(batch.tokens()), model(batch.tokens().flip(0))
        return (one - two).square().mean() + one.square().mean()


class TwoForwardsBackInOrder(Task):
    """Two graphs alive at once; the first is walked first."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.first = model(batch.tokens()).square().mean()
        self.second = model(batch.tokens().flip(0)).abs().mean()
        return self.first.detach() + self.second.detach()

    def backward(self, loss: Tensor, batch: Batch) -> None:
        self.first.backward()
        self.second.backward()


class EvaluatedBetween(Task):
    """An evaluation under no_grad between steps and between forward and backward."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = super().loss(model, batch)
        with torch.no_grad():
            self.seen = model(batch.tokens()).sum()
        return loss

    def between(self, model: nn.Module, optimizer: Any, step: int) -> None:
        model.eval()
        with torch.inference_mode():
            model(Batch(step, 9, 0).tokens())
        model.train()


class Abandoned(Task):
    """A forward whose loss is thrown away, before the one that is trained on."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        super().loss(model, batch)
        return super().loss(model, batch)


class SubmoduleAlone(Task):
    """Parts of the model are called without the model: the root's forward never runs."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x = model.blocks[1](model.embedding(batch.tokens()))
        return model.head(x).square().mean()


class PartialGradient(Task):
    """Only some inputs of a block need a gradient, and the first blocks run without a graph."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            x = model.blocks[0](model.embedding(batch.tokens()))
        return model.head(model.blocks[2](x)).square().mean()


class Penalized(Ordered):
    """A penalty on the gradient of the inputs: its backward goes through the first backward."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        x = out = model.embedding(batch.tokens()).detach().requires_grad_()
        for block in model.blocks:
            out = block(out)
        (slope,) = torch.autograd.grad(out.tanh().sum(), x, create_graph=True)
        return slope.square().mean()


class Forces(nn.Module):
    """Returns its energy and, as force fields do, the energy's gradient, taken inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(11) for _ in range(3))
        self.head = nn.Linear(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        inner = x
        for block in self.blocks:
            inner = block(inner)
        energy = self.head(inner).tanh()
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + force.square().mean() + self.blocks[0](x).square().mean()


class ForceField(Task):
    def model(self) -> nn.Module:
        return Forces()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.normal(4, 11))


class Keeping(Block):
    """Keeps an auxiliary loss on itself, made after its output, so that its backward comes first."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.auxiliary = self.up(x).square().mean()
        return x


class Auxiliary(Task):
    def model(self) -> nn.Module:
        model = TinyGPT()
        model.blocks = nn.ModuleList(Keeping(11) for _ in range(4))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().loss(model, batch) + sum(block.auxiliary for block in model.blocks)


class Box:
    """Hides what is in it."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxing(Block):
    def forward(self, x: Tensor) -> Any:
        return Box(super().forward(x))


class BoxedGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Boxing(11) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).value
        return self.head(self.norm(x))


class Boxed(TwoForwards):
    """Blocks hide what they return, and there is another forward before the backward."""

    def model(self) -> nn.Module:
        return BoxedGPT()


class FrozenForAWhile(Ordered):
    """Some parameters are frozen after the first step and trained again from the fourth on."""

    def between(self, model: nn.Module, optimizer: Any, step: int) -> None:
        model.blocks[1].requires_grad_(step >= 3)
        model.head.bias.requires_grad = step >= 3


class Dropout(Task):
    def model(self) -> nn.Module:
        model = TinyGPT()
        model.blocks.insert(1, nn.Sequential(nn.Dropout(0.3), Block(11)))
        return model


TASKS = [
    Loop(),
    Shuffled(),
    SkippedTogether(),
    UnusedHead(),
    UsedLater(),
    UnusedInOneMicrobatch(),
    Recurrent(),
    TwoForwards(),
    TwoForwardsBackInOrder(),
    EvaluatedBetween(),
    Abandoned(),
    SubmoduleAlone(),
    PartialGradient(),
    Penalized(),
    ForceField(),
    Auxiliary(),
    Boxed(),
    FrozenForAWhile(),
    Dropout(),
]
BY_RANK = [SkippedApart(), OrderByRank(), UnusedOnOneRank(), HalfUsed()]
MANY_BY_RANK = [ManySkippedApart(), OneSkippedEach(), EarlyExit(), SkippedUnderCheckpoints()]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 2), (2, 3)])
def test_the_same_on_all_ranks_trains_as_in_plain_pytorch(ranks: Any, task: Task, world_size: int, stage: int) -> None:
    assert_parity(ranks(world_size, train_both, task, {"stage": stage}))


@pytest.mark.parametrize(
    "task",
    [Penalized(), ForceField(), Auxiliary(), Boxed(), FrozenForAWhile()],
    ids=lambda task: type(task).__name__,
)
def test_the_same_holds_for_one_rank_with_its_weights_on_the_host(ranks: Any, task: Task) -> None:
    assert_parity(ranks(1, train_both, task, {"weights": "host"}))


@pytest.mark.parametrize("task", BY_RANK, ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 3)])
def test_branches_that_differ_by_rank_neither_hang_nor_change_the_result(
    ranks: Any, task: Task, stage: int, world_size: int
) -> None:
    assert_parity(ranks(world_size, train_both, task, {"stage": stage}))


@pytest.mark.parametrize("task", MANY_BY_RANK, ids=lambda task: type(task).__name__)
@pytest.mark.parametrize(
    ("world_size", "plan"), [(2, {"stage": 3}), (3, {"weights": "host", "gradients": "none"}), (2, {"stage": 2})]
)
def test_any_number_of_blocks_may_be_skipped_on_some_ranks_only(
    ranks: Any, task: Task, world_size: int, plan: Any
) -> None:
    assert_parity(ranks(world_size, train_both, task, plan))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_may_end_before_the_blocks_that_were_fetched_ahead_for_it(ranks: Any, stage: int) -> None:
    plan = {"stage": stage, "unit_numel": None}  # nothing comes after the blocks but the root
    assert_parity(ranks(2, train_both, LastSkipped(), plan))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_block_may_run_more_often_on_one_rank_where_weights_are_whole(ranks: Any, stage: int) -> None:
    assert_parity(ranks(2, train_both, TimesByRank(), {"stage": stage}))


def run_more_often(rank: int, world_size: int) -> str:
    with pytest.raises(PeerError) as raised:
        train_both(rank, world_size, TimesByRank(), {"weights": "host", "gradients": "none"})
    return str(raised.value)


def test_a_block_that_runs_more_often_on_one_rank_is_refused_where_weights_are_partitioned(ranks: Any) -> None:
    for told in ranks(2, run_more_often):
        assert "the gather of unit 'blocks.1' outside the agreed order: it runs more often" in told


def late_head(rank: int, world_size: int) -> tuple[Run, Run]:
    return train_both(rank, world_size, UnusedHead(), {"stage": 3})


def test_an_unused_parameter_keeps_its_value(ranks: Any) -> None:
    torch.manual_seed(3)
    initial = UnusedHead().model().state_dict()["extra.weight"]
    for reference, ours in ranks(2, late_head):
        assert torch.equal(ours.weights["extra.weight"], reference.weights["extra.weight"])
        assert torch.equal(ours.weights["extra.weight"], initial)


def skip_a_microbatch(rank: int, world_size: int, plan: dict[str, Any], without_sync: bool) -> list[float]:
    """Norms of steps of two microbatches; the last rank skips a block in the second."""
    torch.manual_seed(3)
    model = InOrder(depth=3)
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    norms = []
    for step in range(2):
        for micro in range(2):
            order = [0, 2] if micro and rank == world_size - 1 else [0, 1, 2]
            with optimizer.no_sync() if without_sync and micro == 0 else contextlib.nullcontext():
                model(Batch(step, micro, rank).tokens(), order).float().square().mean().backward()
        norms.append(float(optimizer.clip_grad_norm_(1e9)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize(("stage", "without_sync"), [(1, False), (2, True), (3, True)])
def test_ranks_with_different_sums_meet_in_one_reduction(ranks: Any, stage: int, without_sync: bool) -> None:
    expected = ranks(2, skip_a_microbatch, {"stage": 2}, False)
    for norms in ranks(2, skip_a_microbatch, {"stage": stage, "precision": "bf16"}, without_sync):
        assert norms == pytest.approx(expected[0], rel=2e-2)


def step_without_sync(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = InOrder(depth=3)
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 2})
    with optimizer.no_sync():
        order = [0, 2] if rank == world_size - 1 else [0, 1, 2]
        model(Batch(0, 0, rank).tokens(), order).square().mean().backward()
    optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_step_reduces_what_one_rank_alone_has_kept_back(ranks: Any) -> None:
    first, second = ranks(2, step_without_sync)
    torch.manual_seed(3)
    initial = InOrder(depth=3).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert not torch.equal(value, initial[name])


def break_off(rank: int, world_size: int) -> list[float]:
    """The norm of a first microbatch, and again after a second one whose backward fails before it comes to a unit."""
    torch.manual_seed(3)
    model = TinyGPT()
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 2})
    norms = []
    for _ in range(2):
        with optimizer.no_sync():
            model.loss(Batch(0, 0, rank).tokens()).backward()
        if norms:
            output = model(Batch(0, 1, rank).tokens())
            output.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.square().mean().backward()
            with torch.no_grad():
                model(Batch(0, 1, rank).tokens())
        norms.append(float(optimizer.clip_grad_norm_(1e9)))
        optimizer.zero_grad()
    return norms


def test_a_backward_that_breaks_off_takes_no_earlier_gradient_with_it(ranks: Any) -> None:
    for before, after in ranks(2, break_off):
        assert before == after > 0


def evaluate_alone(rank: int, world_size: int, stage: int) -> bool:
    torch.manual_seed(3)
    model = TinyGPT()
    model, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": stage})
    for step in range(2):
        model.loss(Batch(step, 0, rank).tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()
        if rank == 0:
            with torch.no_grad():
                loss = model.loss(Batch(step, 0, 0).tokens())
        dist.barrier()
        with torch.no_grad():
            again = model.loss(Batch(step, 0, 0).tokens())
    return rank > 0 or torch.equal(loss, again)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_after_a_wait_one_rank_may_evaluate_alone_where_weights_are_whole(ranks: Any, stage: int) -> None:
    assert all(ranks(2, evaluate_alone, stage))
