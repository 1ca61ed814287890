"""The strategy of Lightning Fabric: `fabric.setup(model, optimizer)` shards them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from unbounded.checkpoint.loading import load
from unbounded.checkpoint.saving import save
from unbounded.errors import CheckpointError, PlanError
from unbounded.lightning.plain_values import as_plain
from unbounded.lightning.precision import only_optimizer, refuse_clipping_by_value, with_precision
from unbounded.planner.plan import Plan, read_data_plan
from unbounded.sharding.placing import shard
from unbounded.sharding.running import is_sharded, sharded
from unbounded.zero.step.optimizer import ShardedOptimizer


class _EverySync(_BackwardSyncControl):
    """Gradients are reduced in every backward: whole ones on each rank might not fit."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


class UnboundedFabricStrategy(DDPStrategy):
    """`Fabric(strategy="unbounded")`, or this with a plan: "auto", a `Plan` or a dict of its fields."""

    def __init__(self, plan: str | Plan | dict[str, Any] = "auto", **kwargs: Any) -> None:
        self.open_plan = read_data_plan(plan, "Fabric")
        self._flag: Any = "32-true"
        super().__init__(**kwargs)
        self._backward_sync_control = _EverySync()
        self._placed: list[ShardedOptimizer] = []

    @property
    def precision(self) -> Precision:
        return self._precision if self._precision is not None else Precision()

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        """The engine casts, so only the precision is taken from the plugin."""
        self._precision = None if plugin is None else Precision()
        self._flag = self._flag if plugin is None else plugin.precision

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any] | None:  # type: ignore[override]
        """None leaves a loader its own sampler: one rank has nothing to divide."""
        return super().distributed_sampler_kwargs if self.world_size > 1 else None

    # -- set-up ----------------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """`shard` places the module; moving it whole might not fit."""

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], *args: Any, **kwargs: Any) -> Any:
        """All ranks call this."""
        plan = with_precision(self.open_plan, self._flag)
        module, placed = shard(module, only_optimizer(optimizers), plan)
        self._placed.append(placed)
        return (module, [placed], *args)

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """All ranks call this. A module without an optimizer, for evaluation."""
        return shard(module, None, with_precision(self.open_plan, self._flag))[0]

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        raise PlanError(
            "the model was set up without its optimizer. Set them up together: fabric.setup(model, optimizer)."
        )

    # -- steps -----------------------------------------------------------------------------------------------------

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        scaling = [optimizer for optimizer in self._placed if optimizer.loss_scale is not None]
        if len(scaling) > 1:
            raise PlanError(
                "two models in fp16 each have a loss scale, and this loss may belong to either. Train them in bf16."
            )
        super().backward(scaling[0].scale(tensor) if scaling else tensor, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """All ranks call this. The norm over every rank and tier."""
        norm: torch.Tensor = optimizer.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {float(norm)}, so they cannot be clipped.")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float | int) -> None:
        refuse_clipping_by_value()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """All ranks call this. Writes one checkpoint folder: model, optimizer, and everything else as plain values."""
        model = _sharded_in(state)
        if model is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter is not None:
            raise PlanError("fabric.save was given a filter, but a sharded model is saved whole. Leave it out.")
        optimizer = sharded(model).optimizer
        rest = {key: value for key, value in state.items() if value is not model and value is not optimizer}
        rest = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in rest.items()}
        with_states = any(value is optimizer for value in state.values())
        save(path, model, optimizer if with_states else None, fabric=as_plain(rest))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        """All ranks call this. What `state` names is restored in place; the rest is returned.

        A file, which another strategy or torch.save has written, is loaded as Fabric does.
        """
        model = state if isinstance(state, nn.Module) else _sharded_in(state or {})
        if Path(path).is_dir() and model is None:
            raise CheckpointError(
                f"{path} is the folder of a sharded model, which is loaded into one, but the state that was given to "
                'load has none. Set the model up first, and call fabric.load(path, {"model": model}).'
            )
        if model is None or not is_sharded(model) or Path(path).is_file():
            return super().load_checkpoint(path, state, strict, weights_only)
        named = state if isinstance(state, dict) else {}
        optimizer = sharded(model).optimizer
        with_states = any(value is optimizer for value in named.values())
        rest: dict[str, Any] = load(path, model, optimizer if with_states else None).get("fabric", {})
        others = {key: value for key, value in named.items() if value is not model and value is not optimizer}
        if strict and (lacking := sorted(set(others) - set(rest))):
            raise CheckpointError(
                f"the state that was given to load names {', '.join(lacking)}, which {path} does not have. Leave them "
                "out of the state, or load with strict=False, which leaves them as they are."
            )
        for key, value in others.items():
            if key in rest:
                found = rest.pop(key)
                if hasattr(value, "load_state_dict"):
                    value.load_state_dict(found)
                else:
                    named[key] = found
        return rest


def _sharded_in(state: dict[str, Any]) -> nn.Module | None:
    """The sharded model of a state; one folder holds the states of one model."""
    found = [value for value in state.values() if isinstance(value, nn.Module) and is_sharded(value)]
    if len(found) > 1:
        raise PlanError(
            f"the state has {len(found)} sharded models, and a checkpoint holds one. Save and load each of them, with "
            "its optimizer, in a folder of its own."
        )
    return found[0] if found else None
