"""What a transformers model records of its blocks on request, and which axes leave it incomplete.

`output_hidden_states`, `output_attentions` and `output_router_logits` collect a value from every block. Over a pipeline
a rank runs some of the blocks; over a context axis, and with sequence parallelism, blocks hold a part of the sequence;
over a tensor axis attention has a part of the heads. A loss made of parts (the balance of experts is one) would be
silently another one, so requests that cannot be met are refused. So are caches of keys and values over a context axis,
where each rank would cache those of its part of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from unbounded.errors import StateError
from unbounded.planner.plan import Plan
from unbounded.ranks.mesh import Axes

ROUTING = "output_router_logits"
RECORDS = ("output_hidden_states", "output_attentions", ROUTING)


def records_routing(model: nn.Module) -> bool:
    """Whether the model's configuration asks for what its routers compute, as losses that balance experts do."""
    return any(getattr(config, ROUTING, False) for config in _configs(model))


class RecordCheck:
    """Raises where a call of the model asks for what the axes leave incomplete."""

    def __init__(self, model: nn.Module, plan: Plan, axes: Axes) -> None:
        self._configs = _configs(model)
        self._missing: dict[str, str] = {}
        self._has_context = axes.context.size > 1
        if axes.tensor.size > 1:
            self._missing["output_attentions"] = f"tensor={axes.tensor.size}"
            if plan.sequence:
                self._missing["output_hidden_states"] = "sequence=True"
                if not records_routing(model):  # otherwise routers see whole sequences
                    self._missing[ROUTING] = "sequence=True, unless the model's config asks for it before `shard`"
        for name in ("context", "pipeline"):
            if (size := getattr(axes, name).size) > 1:
                self._missing |= dict.fromkeys(RECORDS, f"{name}={size}")

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Checks every call of the model; the returned function ends that."""
        return model.register_forward_pre_hook(self._before_call, with_kwargs=True).remove

    def _before_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.check(kwargs)

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Raises if a call of the model with these arguments asks for it."""
        if self._has_context and kwargs.get("past_key_values") is not None:
            raise StateError(
                "with a context axis a rank would cache the keys and values of its own part of the sequence only. Call "
                "the model, or model.generate, with use_cache=False."
            )
        for name, reason in self._missing.items():
            if kwargs.get(name, any(getattr(config, name, False) for config in self._configs)):
                raise StateError(
                    f"{name}=True asks for a value of every block, but a rank has only some of it with {reason}. "
                    f"Call the model with {name}=False, or leave that out of the plan."
                )


def _configs(model: nn.Module) -> list[Any]:
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if hasattr(config, "output_hidden_states")}.values())
