"""What a model takes before it runs: its units with their parameters, and what computing each part costs per token.

Bytes and FLOPs only, no machine. A footprint comes from a `Shape` (`footprint_of`), or from a module (`unbounded.
planning`), which fills in the same values. `kernels` describes how the model's operations are run: eagerly one by one
as plain PyTorch does, or fused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import groupby

from unbounded.planner.models.packed_size import RECORD_BYTES, RECORD_NUMEL
from unbounded.planner.models.shapes import Shape


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter, by kind of state. `summed` is a gradient in which several backwards are added up, `packed` a
    frozen weight outside the device that is packed, if it can be."""

    weights: float = 2
    gradients: float = 2
    optimizer: float = 8
    remainder: float = 2
    summed: float = 4
    packed: float = 0

    @property
    def total(self) -> float:
        """With the gradient."""
        return self.weights + self.gradients + self.optimizer + self.remainder


PACKED_BYTES = RECORD_BYTES / RECORD_NUMEL
STATE_BYTES = {
    ("bf16", "exact"): StateBytes(packed=PACKED_BYTES),
    # 8-bit moments with an fp32 scale for each 128 of them; 8 bits complete a weight
    ("bf16", "compact"): StateBytes(2, 2, 2 + 2 * 4 / 128, 1, 4, PACKED_BYTES),
    ("fp16", "exact"): StateBytes(2, 2, 12, 0, 4),
    ("fp16", "compact"): StateBytes(2, 2, 2 + 2 * 4 / 128, 1, 4),
    ("fp32", "exact"): StateBytes(4, 4, 8, 0, 4),
    ("fp32", "compact"): StateBytes(4, 4, 8, 0, 4),
}


@dataclass(frozen=True)
class Cost:
    """What one part of a model takes for a token in the forward; the rest of a step follows from it.

    `products` are multiply-adds with weights that a token passes, `trained` those whose weights get gradients.
    `attention` are multiply-adds for each position of the sequence. `moved` and `attention_moved` are bytes of device
    memory that operations bound by it read and write. `kept` stays for the backward unless it is recomputed; `input`
    is what a recomputed part keeps, `back` what its backward allocates. `exchanged` bytes pass through each all-reduce
    of a tensor axis.
    """

    products: float = 0.0
    trained: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    attention_moved: float = 0.0
    kept: float = 0.0
    attention_kept: float = 0.0
    input: float = 0.0
    back: float = 0.0
    exchanged: float = 0.0
    num_kernels: int = 0

    def flops(self, sequence: int) -> float:
        """FLOPs of the forward, per token. As in the papers, attention includes the half that a mask saves."""
        return 2 * (self.products + self.attention * sequence)

    def kept_bytes(self, sequence: int) -> float:
        return self.kept + self.attention_kept * sequence


@dataclass(frozen=True)
class UnitFootprint:
    """Parameters that move together, `count` times over with the same numbers. Only repeated parts are recomputed."""

    name: str
    numel: int
    count: int = 1
    cost: Cost = field(default_factory=Cost)
    trained_numel: int | None = None  # None: all of it
    is_block: bool = False
    is_outer: bool = False  # other units are inside its module, so it is gathered for the whole pass
    largest: int = 0  # elements of its largest matrix
    module: str = ""  # whose parameters they are, if it may have several units; "": the unit's name

    @property
    def trained(self) -> int:
        return self.numel if self.trained_numel is None else self.trained_numel

    @property
    def module_name(self) -> str:
        """By which policies go. Units of one module are gathered together."""
        return self.module or self.name

    def single(self, index: int) -> UnitFootprint:
        """One of the `count`."""
        if self.count == 1:
            return self
        return replace(
            self, name=f"{self.name}.{index}", count=1, module=f"{self.module}.{index}" if self.module else ""
        )


@dataclass(frozen=True)
class Footprint:
    """A model's parts in the order of its forward."""

    name: str
    parts: tuple[UnitFootprint, ...]
    hidden: int
    states: StateBytes = field(default_factory=StateBytes)
    logits_bytes: float = 0.0  # per token, at the peak of a loss that makes all logits at once
    vocabulary: int = 0
    layers: int = 0
    assumptions: tuple[str, ...] = ()  # what costs per token take for granted

    @property
    def numel(self) -> int:
        return sum(part.numel * part.count for part in self.parts)

    @property
    def trained_numel(self) -> int:
        return sum(part.trained * part.count for part in self.parts)

    def flops(self, sequence: int, *, recompute: bool = False) -> float:
        """FLOPs of one token's forward and backward. With `recompute`, forwards of blocks count twice."""
        total = 0.0
        for part in self.parts:
            again = part.is_block and recompute
            forward = part.cost.flops(sequence)
            total += part.count * (forward * (3 + again) - 2 * (part.cost.products - part.cost.trained))
        return total


def add(one: Cost, other: Cost) -> Cost:
    """What both cost together."""
    return Cost(*(getattr(one, item.name) + getattr(other, item.name) for item in fields(Cost)))


def widen(cost: Cost) -> Cost:
    """The same in fp32: what norms already take in fp32 stays, everything else doubles."""
    return replace(
        cost,
        moved=1.4 * cost.moved,
        kept=1.8 * cost.kept,
        input=2 * cost.input,
        back=2 * cost.back,
        exchanged=2 * cost.exchanged,
    )


def expand(parts: Iterable[UnitFootprint]) -> tuple[UnitFootprint, ...]:
    """Every part once, under its own name; parts of one module that follow each other do so again."""
    found = list[UnitFootprint]()
    for (_, count), alike in groupby(parts, lambda part: (part.module_name, part.count)):
        together = list(alike)
        for index in range(count):
            found += [part.single(index) for part in together]
    return tuple(found)


@dataclass(frozen=True)
class Kernels:
    """How a block's operations are run, in bytes per token and hidden element (`wide`: an element inside the ffn)."""

    name: str
    moved: float
    moved_wide: float
    kept: float
    kept_wide: float
    back_wide: float
    num_kernels: int
    logits: float  # bytes per token and entry of the vocabulary
    scores_moved: float = 0.0  # bytes per token, head and position that attention reads and writes
    scores_kept: float = 0.0


# PyTorch as `transformers` runs a Llama block in bf16, counted operation by operation: two norms through fp32 (36
# bytes each), rotary embedding of queries and keys (20 each), two residual additions (6 each), copies around the fused
# attention (4). Kept: two norms (8 each), attention (8). The ffn: silu and a product (10 per wide element), kept 8. In
# its backward the gradients of the product and of both factors are there (2 each).
# The loss: 14 by counting (logits in bf16 and fp32, their gradient, what is between), 12 by recorded peaks.
EAGER = Kernels("eager", 128, 10, 24, 8, 6, num_kernels=45, logits=12)
# The same with each block compiled: a norm reads and writes once (4), rotary 8, additions inside. What is kept (18 and
# 5; 20 and 6 by counting) follows recorded peaks of a 3.1B model.
COMPILED = Kernels("compiled", 28, 6, 18, 5, 6, num_kernels=14, logits=12)
# Megatron-LM of 2020 and 2021: layer norm 4 each, bias, dropout and addition fused (7 each), bias and GeLU fused (4 a
# wide element); attention scores written, softmax and dropout over them (11 a position and head).
MEGATRON = Kernels("megatron", 22, 4, 18, 4, 0, num_kernels=25, logits=8, scores_moved=11, scores_kept=5)


def footprint_of(
    shape: Shape,
    *,
    kernels: Kernels = EAGER,
    states: StateBytes | None = None,
    is_fp32: bool = False,
    lora_rank: int | None = None,
) -> Footprint:
    """The units that `shard` makes of such a model: the embedding, every block, the head, and the rest; with adapters
    of `lora_rank`, which alone are trained, if there is one."""
    hidden, ffn = shape.hidden, shape.ffn * shape.active
    block = Cost(
        products=shape.block_products,
        trained=shape.block_products,
        attention=2 * shape.attention_width,
        moved=kernels.moved * hidden + kernels.moved_wide * ffn,
        attention_moved=kernels.scores_moved * shape.heads,
        kept=kernels.kept * hidden + kernels.kept_wide * ffn,
        attention_kept=kernels.scores_kept * shape.heads,
        input=2 * hidden,
        back=kernels.back_wide * ffn,
        exchanged=2 * hidden,
        num_kernels=kernels.num_kernels,
    )
    logits = shape.tokens_numel
    head = Cost(
        products=logits,
        trained=logits,
        moved=kernels.logits * shape.vocabulary,
        input=2 * hidden,
        num_kernels=12,
    )
    parts = [
        UnitFootprint(
            "embedding",
            shape.embedding_numel,
            cost=Cost(moved=4 * hidden, num_kernels=4),
            is_outer=shape.tied,
        ),
        UnitFootprint("blocks", shape.block_numel, shape.layers, block, is_block=True, largest=hidden * shape.ffn),
    ]
    if shape.tied:
        parts.append(UnitFootprint("root", shape.root_numel, cost=head, is_outer=True))
    else:
        parts.append(UnitFootprint("head", shape.head_numel, cost=head))
        parts.append(UnitFootprint("root", shape.root_numel, is_outer=True))
    name = shape.name
    if lora_rank is not None:
        name, parts = f"{name} with LoRA {lora_rank}", _with_adapters(parts, shape, lora_rank)
    return Footprint(
        name,
        tuple(replace(part, cost=widen(part.cost)) for part in parts) if is_fp32 else tuple(parts),
        hidden,
        states or StateBytes(),
        logits_bytes=kernels.logits * shape.vocabulary,
        vocabulary=shape.vocabulary,
        layers=shape.layers,
    )


def _with_adapters(parts: Iterable[UnitFootprint], shape: Shape, rank: int) -> list[UnitFootprint]:
    """Two thin matrices next to each linear layer of a block, which are a unit of their own; all else is frozen."""
    layers, found = shape.linear_sizes, list[UnitFootprint]()
    numel = rank * sum(inputs + outputs for inputs, outputs in layers)
    added = Cost(
        products=numel,
        moved=sum(10 * outputs for _, outputs in layers),  # a scale (4) and an addition (6)
        kept=2 * rank * len(layers) - 2 * shape.hidden * shape.norms,  # not what frozen norms have normed
        num_kernels=4 * len(layers),
    )
    for part in parts:
        cost = replace(part.cost, trained=0.0)
        if not part.is_block:
            found.append(replace(part, cost=cost, trained_numel=0))
            continue
        cost = add(cost, added)
        cost = replace(cost, trained=cost.products * numel / (part.numel + numel))
        found.append(replace(part, cost=cost, trained_numel=0))
        found.append(UnitFootprint("adapters", numel, part.count, module=part.name))
    return found
