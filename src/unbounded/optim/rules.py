"""Update rules: what an optimizer does to flat buffers.

A rule says what it must see at once (`granularity`) and which state arrays it keeps besides the weights (`specs`),
reads a param group and a step count into frozen numbers (`resolve`), and updates buffers in place (`apply`).
`NativeRule` runs the fused host kernel or, for buffers on a GPU, the fused device kernel. Everything else runs the
optimizer's own class (`optim/class_rules.py`). Which rule an optimizer has: `optim/book.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unbounded.errors import StateError
from unbounded.native import kernels
from unbounded.native.kernels import UpdatePart
from unbounded.optim.granularity import Granularity

BLOCK = kernels.BLOCK
NATIVE = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Adagrad": "adagrad", "Lion": "lion"}


@dataclass(frozen=True)
class StateSpec:
    """One state array: an element for every `every` parameters, filled with `initial` before the first step."""

    name: str
    dtype: torch.dtype
    every: int = 1
    initial: float = 0.0

    def numel(self, numel: int) -> int:
        return -(-numel // self.every)


Scalars = Mapping[str, float]
Groups = Sequence[Mapping[str, Any]]


class UpdateRule(Protocol):
    """How one optimizer updates flat buffers: any stretch of them or, with `whole`, one whole parameter.

    `granularity` says which. If it is TENSOR, a parameter may have `factor_shapes`: states of other shapes.
    """

    granularity: Granularity
    format: str
    specs: tuple[StateSpec, ...]

    def factor_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]: ...

    def resolve(self, group: Mapping[str, Any], step: int) -> Any: ...

    def has_parts(self, numbers: Any) -> bool: ...

    def apply(
        self,
        numbers: Any,
        scalars: Scalars,
        *,
        weight: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        grad_scale: float | torch.Tensor,
        pool: kernels.Pool | None,
        whole: Whole | None = None,
    ) -> dict[str, float]: ...


@dataclass(frozen=True)
class Whole:
    """A whole parameter: its shape, and those of its states that have other shapes."""

    shape: tuple[int, ...]
    factors: Mapping[str, torch.Tensor]


class NativeRule:
    """AdamW, Adam, SGD, Adagrad and Lion in the fused kernels."""

    def __init__(
        self, kind: str, groups: Groups, dtype: torch.dtype, optimizer_format: str, *, initial_sum: float = 0.0
    ) -> None:
        self.name = NATIVE[kind]
        momentum = any(group.get("momentum", 0) != 0 for group in groups)
        # fp16 cannot be completed to fp32 by 16 bits over its whole range, so its master is kept whole.
        self.has_master = dtype == torch.float16 and optimizer_format == "exact"
        self.format = "fp32" if dtype == torch.float32 or self.has_master else optimizer_format
        specs = [StateSpec("master", torch.float32)] if self.has_master else []
        arrays = kernels.state_arrays(
            self.name, self.format, torch.float32 if self.has_master else dtype, momentum=momentum
        )
        initial = _initial_sum(initial_sum, arrays["sum"].dtype) if self.name == "adagrad" else {}
        for name, spec in arrays.items():
            every = BLOCK if spec.per_block else 1
            specs.append(StateSpec(name, spec.dtype, every, initial.get(name, 0.0)))
        self.specs = tuple(specs)
        self.granularity = Granularity.BLOCK if self.format == "compact" else Granularity.ELEMENT

    def factor_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        return {}

    def resolve(self, group: Mapping[str, Any], step: int) -> kernels.Rule:
        self._refuse_new_states(group)
        self._refuse_late_momentum(group, step)
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        is_decoupled = self.name == "adam" and group.get("decoupled_weight_decay")  # groups may differ
        return kernels.Rule(
            name="adamw" if is_decoupled else self.name,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group.get("eps", 0.0)),
            weight_decay=float(group.get("weight_decay", 0.0)),
            momentum=float(group.get("momentum", 0.0)),
            dampening=float(group.get("dampening", 0.0)),
            nesterov=bool(group.get("nesterov", False)),
            maximize=bool(group.get("maximize", False)),
            lr_decay=float(group.get("lr_decay", 0.0)),
            step=step,
        )

    def apply(
        self,
        numbers: kernels.Rule,
        scalars: Scalars,
        *,
        weight: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor] | None,
        grad_scale: float | torch.Tensor,
        pool: kernels.Pool | None,
        whole: Whole | None = None,
        source: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """With `source`, the old values ("weight" and the states) are read there, on the host, and stay unchanged.

        Then `states` may be None: only the new weights are written.
        """
        if source is not None:
            self._write_beside(numbers, source, weight, grad, states, float(grad_scale), pool)
            return {}
        assert states is not None
        if weight.device.type == "cuda":
            from unbounded.optim.device import device_kernels

            target, out, moments = self._targets(weight, states)
            device_kernels.update(numbers, self.format, target, grad, moments, grad_scale, out)
        else:
            self.apply_part(
                UpdatePart.WHOLE, numbers, weight=weight, grad=grad, states=states, factor=float(grad_scale), pool=pool
            )
        return {}

    def has_parts(self, numbers: kernels.Rule) -> bool:
        """Whether an update on the host may be done in two parts: the weights, and later the moments."""
        return kernels.has_parts(numbers, self.format)

    def apply_part(
        self,
        part: UpdatePart,
        numbers: kernels.Rule,
        *,
        weight: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        factor: float,
        pool: kernels.Pool | None,
    ) -> None:
        """On the host, in place."""
        target, out, moments = self._targets(weight, states)
        kernels.update(
            numbers,
            self.format,
            weight=target,
            grad=grad,
            states=moments,
            grad_scale=factor,
            out=out,
            part=part,
            pool=pool,
        )

    def _targets(
        self, weight: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        """What is stepped, what receives a copy of it, and the other states."""
        moments = {name: state for name, state in states.items() if name != "master"}
        return (states["master"], weight, moments) if self.has_master else (weight, None, moments)

    def _write_beside(
        self,
        numbers: kernels.Rule,
        source: Mapping[str, torch.Tensor],
        weight: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor] | None,
        factor: float,
        pool: kernels.Pool | None,
    ) -> None:
        """An update from `source` to other arrays. A moment that this step does not use is copied unchanged."""
        master = "master" if self.has_master else "weight"
        before = {**source, "weight": source[master]}
        target = {"weight": weight, **(states or {})}
        moments = None if states is None else {name: state for name, state in states.items() if name != "master"}
        stepped = kernels.state_arrays(
            numbers.name, self.format, before["weight"].dtype, momentum=numbers.momentum != 0
        )
        for name in (moments or {}).keys() - stepped.keys():
            kernels.copy(source[name], target[name], pool)
        kernels.update(
            numbers,
            self.format,
            weight=target.get(master, before["weight"]),
            grad=grad,
            states=moments,
            grad_scale=factor,
            out=weight if self.has_master else None,
            source=before,
            part=UpdatePart.WHOLE if states is not None else UpdatePart.WEIGHTS,
            pool=pool,
        )

    def _refuse_new_states(self, group: Mapping[str, Any]) -> None:
        """Refuses options that need an array that was not there when the states were placed."""
        if self.name == "sgd" and group.get("momentum") and not any("momentum" in spec.name for spec in self.specs):
            raise StateError(
                f"a param group of SGD now has momentum={group['momentum']}, but had 0 in `shard`, so no momentum is "
                "kept. Make the scheduler that sets it (OneCycleLR, CyclicLR) before `shard`, give it "
                "cycle_momentum=False, or give SGD a momentum."
            )
        if group.get("amsgrad"):
            raise StateError("a param group now has amsgrad=True, but did not in `shard`. Set it before `shard`.")

    def _refuse_late_momentum(self, group: Mapping[str, Any], step: int) -> None:
        """torch damps all but the first gradient with a momentum; which one that was is not kept beside the states."""
        is_damped = self.name == "sgd" and step == 1 and not group.get("momentum") and group.get("dampening")
        if is_damped and any("momentum" in spec.name for spec in self.specs):
            raise StateError(
                f"a param group of SGD begins with momentum=0 and dampening={group['dampening']}, so a momentum that "
                "is set later would begin damped, as it does not in torch. Leave dampening at 0, or begin with a "
                "momentum."
            )


def _initial_sum(value: float, dtype: torch.dtype) -> dict[str, float]:
    """Adagrad's sum of squares before the first step, in each array that represents it."""
    if dtype == torch.float32:
        return {"sum": value}
    codes, scale = torch.empty(BLOCK, dtype=dtype, device="cpu"), torch.empty(1, dtype=torch.float32, device="cpu")
    kernels.encode_moment(torch.full((BLOCK,), value, dtype=torch.float32, device="cpu"), codes, scale)
    return {"sum": float(codes[0]), "sum_scale": float(scale[0])}
