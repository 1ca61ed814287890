"""Update rules: a stock `torch.optim` optimizer read as a rule over flat buffers.

A rule knows which state arrays it keeps beside the weights (`specs`), reads a param group and a step count into
frozen numbers (`resolve`), and updates a stretch of buffers in place (`apply`). `NativeRule` runs the fused host
kernel or, for buffers on a GPU, the fused device kernel. `TorchRule` covers the other elementwise optimizers by
running the torch optimizer itself on the flat fp32 master: elementwise updates do not care how tensors are cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unbounded.errors import PlanError, StateError
from unbounded.native import kernels
from unbounded.optim.recognition import kind_of

BLOCK = kernels.BLOCK
_NATIVE = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Adagrad": "adagrad", "Lion": "lion"}


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
    """How one optimizer updates flat buffers."""

    format: str
    specs: tuple[StateSpec, ...]

    def resolve(self, group: Mapping[str, Any], step: int) -> Any: ...

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
    ) -> dict[str, float]: ...


def read_rule(optimizer: torch.optim.Optimizer, dtype: torch.dtype, optimizer_format: str) -> UpdateRule:
    """The rule of `optimizer` for weights of `dtype`, or an error that says why it has none."""
    return make_rule(kind_of(optimizer), optimizer.param_groups, dtype, optimizer_format)


def make_rule(kind: str, groups: Groups, dtype: torch.dtype, optimizer_format: str) -> UpdateRule:
    """The rule of an optimizer of `kind` with these param groups."""
    if any(isinstance(group.get("lr"), torch.Tensor) and group["lr"].numel() != 1 for group in groups):
        raise PlanError("a param group has a learning rate of several elements. Give one number a group.")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise PlanError(
            f"parameters of {dtype} cannot be trained. Freeze them, or convert them to a float dtype first."
        )
    if dtype != torch.float64 and kind in _NATIVE and not any(group.get("amsgrad") for group in groups):
        return NativeRule(kind, groups, dtype, optimizer_format)
    if kind == "Lion":
        raise PlanError(f"Lion has no kernel for parameters of {dtype}. Convert them to float32.")
    if optimizer_format == "compact" and dtype != torch.float32:
        raise PlanError(f'{kind} has no "compact" format. Use optimizer_format="exact", or AdamW.')
    return TorchRule(getattr(torch.optim, kind), groups, dtype)


class NativeRule:
    """AdamW, Adam, SGD, Adagrad and Lion in the fused kernels."""

    def __init__(self, kind: str, groups: Groups, dtype: torch.dtype, optimizer_format: str) -> None:
        self.name = _NATIVE[kind]
        momentum = any(group.get("momentum", 0) != 0 for group in groups)
        # fp16 cannot be completed to fp32 by 16 bits over its whole range, so its master is kept whole.
        self.has_master = dtype == torch.float16 and optimizer_format == "exact"
        self.format = "fp32" if dtype == torch.float32 or self.has_master else optimizer_format
        specs = [StateSpec("master", torch.float32)] if self.has_master else []
        arrays = kernels.state_arrays(
            self.name, self.format, torch.float32 if self.has_master else dtype, momentum=momentum
        )
        first = float(groups[0].get("initial_accumulator_value", 0.0))
        initial = _initial_sum(first, arrays["sum"].dtype) if self.name == "adagrad" else {}
        for name, spec in arrays.items():
            every = BLOCK if spec.per_block else 1
            specs.append(StateSpec(name, spec.dtype, every, initial.get(name, 0.0)))
        self.specs = tuple(specs)

    def resolve(self, group: Mapping[str, Any], step: int) -> kernels.Rule:
        self._refuse_new_states(group)
        beta1, beta2 = group.get("betas", (0.0, 0.0))
        is_decoupled = self.name == "adam" and group.get("decoupled_weight_decay")  # one group may be, another not
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
        states: Mapping[str, torch.Tensor],
        grad_scale: float | torch.Tensor,
        pool: kernels.Pool | None,
        source: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, float]:
        """With `source` what is stepped is read there ("weight" and the states), on the host, and stays as it is."""
        moments = {name: state for name, state in states.items() if name != "master"}
        target, out = (states["master"], weight) if self.has_master else (weight, None)
        if weight.device.type == "cuda":
            from unbounded.optim import device_kernels

            device_kernels.update(numbers, self.format, target, grad, moments, grad_scale, out)
        else:
            kernels.update(
                numbers,
                self.format,
                weight=target,
                grad=grad,
                states=moments,
                grad_scale=float(grad_scale),
                out=out,
                source=None if source is None else self._bring_along(numbers, source, moments, pool),
                pool=pool,
            )
        return {}

    def _bring_along(
        self,
        numbers: kernels.Rule,
        source: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        pool: kernels.Pool | None,
    ) -> dict[str, torch.Tensor]:
        """The source as the kernel takes it. A moment that these numbers do not step is copied as it is."""
        stepped = kernels.state_arrays(
            numbers.name, self.format, source["master" if self.has_master else "weight"].dtype,
            momentum=numbers.momentum != 0,
        )  # fmt: skip
        for name in moments.keys() - stepped.keys():
            kernels.copy(source[name], moments[name], pool)
        return {**source, "weight": source["master"]} if self.has_master else dict(source)

    def _refuse_new_states(self, group: Mapping[str, Any]) -> None:
        """Options that need an array which was not there when the states were placed."""
        if self.name == "sgd" and group.get("momentum") and not any("momentum" in spec.name for spec in self.specs):
            raise StateError(
                f"a param group of SGD now has momentum={group['momentum']}, but had 0 in `shard`, so no momentum is "
                "kept. Make the scheduler that sets it (OneCycleLR, CyclicLR) before `shard`, give it "
                "cycle_momentum=False, or give SGD a momentum."
            )
        if group.get("amsgrad"):
            raise StateError("a param group now has amsgrad=True, but had not in `shard`. Set it before `shard`.")


def _initial_sum(value: float, dtype: torch.dtype) -> dict[str, float]:
    """Adagrad's sum of squares before the first step, in each array that stands for it."""
    if dtype == torch.float32:
        return {"sum": value}
    codes, scale = torch.empty(BLOCK, dtype=dtype), torch.empty(1)
    kernels.encode_moment(torch.full((BLOCK,), value), codes, scale)
    return {"sum": float(codes[0]), "sum_scale": float(scale[0])}


class TorchRule:
    """Any elementwise torch optimizer, run as it is on the flat fp32 master."""

    format = "fp32"

    def __init__(self, kind: Any, groups: Groups, dtype: torch.dtype) -> None:
        self._kind = kind
        self._options = [key for key in inspect.signature(self._kind).parameters if key not in _HOW]
        self.has_master = dtype in (torch.bfloat16, torch.float16)
        self._dtype = torch.float32 if self.has_master else dtype
        held: dict[str, Any] = {}
        for group in groups:  # what one keeps another may not
            held |= self._probe(group)
        arrays = [name for name, value in held.items() if getattr(value, "shape", ()) == (2,)]
        self._scalars = [name for name, value in held.items() if name != "step" and getattr(value, "shape", None) == ()]
        master = [StateSpec("master", torch.float32)] if self.has_master else []
        self.specs = tuple(master + [StateSpec(name, self._dtype) for name in arrays])

    def _probe(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """What the optimizer keeps for a parameter of two elements in `group`."""
        probe = torch.nn.Parameter(torch.zeros(2, dtype=self._dtype))
        probe.grad = torch.zeros(2, dtype=self._dtype)
        trial = self._kind([probe], **self._only_known(group))
        trial.step()
        return trial.state[probe]

    def resolve(self, group: Mapping[str, Any], step: int) -> tuple[dict[str, Any], int]:
        return self._only_known(group), step

    def apply(
        self,
        numbers: tuple[dict[str, Any], int],
        scalars: Scalars,
        *,
        weight: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        grad_scale: float | torch.Tensor,
        pool: kernels.Pool | None,
    ) -> dict[str, float]:
        options, step = numbers
        target = torch.nn.Parameter(states["master"] if self.has_master else weight)
        target.grad = grad.to(self._dtype) * grad_scale
        run = self._kind([target], **options)
        state = {name: value for name, value in states.items() if name != "master"}
        held = {name: torch.tensor(scalars.get(name, 1.0)) for name in self._scalars}
        run.state[target] = {"step": torch.tensor(float(step - 1)), **state, **held}
        run.step()
        if self.has_master:
            weight.copy_(target.detach())
        return {name: float(value) for name, value in held.items()}

    def _only_known(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: group[key] for key in self._options if key in group} | {"foreach": False}


_HOW = ("params", "foreach", "fused", "capturable", "differentiable")
