"""An optimizer's own step, run on tensors that the optimizer was not made with."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

# Options for how torch runs a step, not for what it computes; one tensor at a time needs none of them.
_WAYS = ("foreach", "fused", "capturable", "differentiable")


class Replica:
    """Makes short-lived copies of one optimizer object, with its own attributes and class, for one step each."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def name(self) -> str:
        """The name of the optimizer's class."""
        return type(self._optimizer).__name__

    @staticmethod
    def options(group: Mapping[str, Any]) -> dict[str, Any]:
        """The hyper-parameters of a group as they are now."""
        options = {key: value for key, value in group.items() if key != "params"}
        held = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        return held | {way: False for way in _WAYS if way in held}

    def step(
        self,
        targets: Sequence[nn.Parameter],
        options: Mapping[str, Any],
        states: Mapping[nn.Parameter, dict[str, Any]],
    ) -> MutableMapping[nn.Parameter, dict[str, Any]]:
        """Updates `targets`, which have gradients, and returns their new states."""
        copy = self.copy(targets, options)
        copy.state.update({target: state for target, state in states.items() if state})
        take_step(copy)
        return copy.state  # type: ignore[no-any-return]

    def copy(self, targets: Sequence[nn.Parameter], options: Mapping[str, Any]) -> Any:
        """A copy of the optimizer object that has only `targets`, and no states yet."""
        copy: Any = object.__new__(type(self._optimizer))
        copy.__dict__.update(self._optimizer.__dict__)
        copy.__dict__.pop("step", None)  # schedulers set a `step` on the object itself
        copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        copy.param_groups = [{**options, "params": list(targets)}]
        copy.state = defaultdict(dict)
        return copy


def take_step(copy: Any) -> None:
    """Runs the class's step, without the wrapper in which torch calls hooks for all optimizers: they are called once,
    for the step of the whole model."""
    step = type(copy).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(copy)
