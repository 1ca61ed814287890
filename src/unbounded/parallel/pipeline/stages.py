"""Which part of a model each stage of a pipeline gets: runs of blocks of equal cost, and what is around them.

Blocks are divided into runs so that the most expensive stage costs as little as possible, counting the embedding with
the first and the head with the last. Embeddings live with the first block after them, the head with the last blocks.
What is left (norms between and after the blocks, small projections) is so small that every rank keeps a copy: whichever
stage uses it has it, and the gradients of the copies are summed. A parameter tied between stages is such a copy too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel.blocks import Stack, find_stacks, unwrap


@dataclass(frozen=True)
class Cutting:
    """The stages of a model. `bounds[s]` are the blocks of stage s, counted over all stacks."""

    stacks: tuple[Stack, ...]
    bounds: tuple[tuple[int, int], ...]
    num_ranks: int
    homes: dict[nn.Module, frozenset[int]] = field(default_factory=dict)  # module -> ranks; others are everywhere

    @property
    def chunks(self) -> int:
        return len(self.bounds) // self.num_ranks

    def rank_of(self, block: int) -> int:
        """The rank that has a block."""
        return next(s for s, (start, stop) in enumerate(self.bounds) if start <= block < stop) % self.num_ranks

    def holders(self, parameter: nn.Parameter, owners: Sequence[nn.Module]) -> frozenset[int]:
        """The ranks that hold a parameter which these modules have."""
        everyone = frozenset(range(self.num_ranks))
        return frozenset().union(*(self.homes.get(owner, everyone) for owner in owners))


def cut_model(model: nn.Module, num_ranks: int, chunks: int) -> Cutting:
    """The stages of a model; raises if it cannot be cut into so many."""
    base = unwrap(model)
    stacks = find_stacks(base)
    if not stacks:
        raise PlanError(
            f"{type(base).__name__} has no list of repeated blocks (an nn.ModuleList or nn.Sequential of one "
            "class), so it cannot be cut into pipeline stages. Put its blocks into an nn.ModuleList, or leave pipeline "
            "out of the plan."
        )
    blocks = [block for stack in stacks for block in stack]
    num_stages = num_ranks * chunks
    if len(blocks) < num_stages:
        names = {id(module): name for name, module in base.named_modules()}
        where = ", ".join(repr(names[id(stack)]) for stack in stacks)
        raise PlanError(
            f"the model has {len(blocks)} blocks (in {where}), too few for {num_stages} pipeline stages. "
            f"Use at most {len(blocks) // chunks} ranks on the pipeline axis"
            f"{', or another schedule than interleaved, which has two stages per rank' if chunks > 1 else ''}."
        )
    homes, first, last = _place_rest(base, stacks)
    costs = [sum(parameter.numel() for parameter in block.parameters()) for block in blocks]
    bounds = balance(costs, num_stages, first=first, last=last)
    cutting = Cutting(tuple(stacks), tuple(bounds), num_ranks)
    for index, block in enumerate(blocks):
        for module in block.modules():  # which blocks of several ranks may share
            cutting.homes[module] = cutting.homes.get(module, frozenset()) | {cutting.rank_of(index)}
    for module, block_index in homes.items():
        cutting.homes[module] = frozenset([cutting.rank_of(block_index)])
    return cutting


def balance(costs: Sequence[int], num_parts: int, *, first: int = 0, last: int = 0) -> list[tuple[int, int]]:
    """Runs of `costs` whose largest sum is as small as possible; `first` and `last` are added to the outer ones."""
    count = len(costs)
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(part: int, start: int, stop: int) -> int:
        extra = (first if part == 0 else 0) + (last if part == num_parts - 1 else 0)
        return sums[stop] - sums[start] + extra

    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]  # stop -> (largest cost, start of the last part)
    for part in range(num_parts):
        row: dict[int, tuple[int, int]] = {}
        for stop in range(part + 1, count - (num_parts - part - 1) + 1):
            choices = [
                (max(worst, cost_of(part, start, stop)), start)
                for start, (worst, _) in best[-1].items()
                if start < stop
            ]
            row[stop] = min(choices, key=lambda choice: (choice[0], -choice[1]))
        best.append(row)
    bounds, stop = [], count
    for row in reversed(best[1:]):
        start = row[stop][1]
        bounds.append((start, stop))
        stop = start
    return bounds[::-1]


def _place_rest(base: nn.Module, stacks: Sequence[Stack]) -> tuple[dict[nn.Module, int], int, int]:
    """Embeddings and the head, each with the block that it lives with, and what they cost the first and last stage."""
    inside = {module for stack in stacks for module in stack.modules()}
    starts, order = _starts(base, stacks)
    total = sum(len(stack) for stack in stacks)
    get_head = getattr(base, "get_output_embeddings", lambda: None)
    head = get_head() if callable(get_head) else None
    homes: dict[nn.Module, int] = {}
    first = last = 0
    for module, number in order.items():
        size = sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)
        if module in inside or not size:
            continue
        after = [start for position, start in starts if position > number]
        is_head = module is head or (isinstance(module, nn.Linear) and not after)
        if isinstance(module, nn.Embedding):
            homes[module] = after[0] if after else starts[-1][1]
            first += size if homes[module] == 0 else 0
        elif is_head:
            homes[module] = total - 1
            last += size
    return homes, first, last


def _starts(base: nn.Module, stacks: Sequence[Stack]) -> tuple[list[tuple[int, int]], dict[nn.Module, int]]:
    """Where stacks are in the order of registration, with the number of their first block; and every module's place."""
    order = {module: number for number, module in enumerate(base.modules())}
    starts, block = [], 0
    for stack in stacks:
        starts.append((order[stack], block))
        block += len(stack)
    return starts, order
