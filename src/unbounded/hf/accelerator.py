"""Accelerate with sharded objects: an `Accelerator` whose backward, clipping and checkpoints know the engine.

`attach(accelerator)` gives that one accelerator these methods. Models and optimizers that `shard` returned pass through
`prepare` unchanged; everything else, and every other accelerator, works as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import nn

from unbounded.checkpoint.loading import load
from unbounded.checkpoint.saving import save
from unbounded.errors import CheckpointError, PlanError, StateError
from unbounded.hf.whole_checkpoints import MARK, find_accelerators, has_mark
from unbounded.planner.plan import Plan
from unbounded.sharding.placing import shard
from unbounded.sharding.running import is_sharded, sharded
from unbounded.zero.step.optimizer import ShardedOptimizer

STATES = "unbounded"
"""The folder next to a framework's own files that holds weights and states."""


class PreparedOptimizer(AcceleratedOptimizer):
    """Steps only when gradients are complete, as Accelerate's wrapper does; its states stay where they are."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._is_accelerate_prepared = True

    @property
    def step_was_skipped(self) -> bool:
        return bool(self.optimizer.step_was_skipped)

    def state_dict(self) -> dict[str, Any]:
        """What frameworks save beside the states."""
        return self.optimizer.groups_and_counters()  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have comes from the optimizer: `scale`, `memory`, `last_backward`."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)


class AttachedAccelerator(Accelerator):
    """The methods that `attach` adds. It is never instantiated."""

    _saves_states = False
    _plan: Plan | None = None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As always; a loader is refused beside a model whose ranks must get the same rows."""
        prepared = super().prepare(*args, **kwargs)
        for model in self._models if self._dataloaders else ():
            if is_sharded(model) and (axes := sharded(model).engine.axes).data.size != axes.world.size:
                raise PlanError(
                    f"Accelerate gives each of the {axes.world.size} ranks other rows of a prepared loader, but only "
                    f"{axes.data.size} of them hold the model by themselves: the others must get the same rows. Leave "
                    "the loader out of prepare, and divide the data by optimizer.engine.axes.data."
                )
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if not is_sharded(model) and evaluation_mode and self._plan is not None:
            shard(model, None, self._plan)  # a frozen reference or reward model, which may be as large as ours
        if not is_sharded(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        if not any(model is known for known in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, ShardedOptimizer):
            optimizer = PreparedOptimizer(optimizer)
        if not isinstance(optimizer, PreparedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """`loss.backward()`, for a micro-batch's part of the step and with fp16's loss scale."""
        scaling = [one for one in self._placed() if one.loss_scale is not None]
        if len(scaling) > 1:
            raise StateError(
                f"{len(scaling)} optimizers in fp16 each have a loss scale, and this loss may belong to any of them. "
                "Call optimizer.scale(loss).backward() on the right one, or train in bf16."
            )
        if scaling:
            (scaling[0].scale(loss / self.gradient_accumulation_steps)).backward(**kwargs)
        else:
            super().backward(loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """All ranks must call this. The norm over every rank and tier."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        known = {id(parameter) for parameter in given}
        touched = [one for one in self._placed() if not known.isdisjoint(_trained(one))]
        if not touched:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        if len(touched) > 1 or not known.issuperset(_trained(touched[0])):
            raise StateError(
                f"clip_grad_norm_ was given {len(given)} parameters that are not all those of one sharded optimizer. "
                "Give model.parameters() of one model."
            )
        return touched[0].clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        known = {id(parameter) for parameter in given}
        self._refuse_scaled([one for one in self._placed() if not known.isdisjoint(_trained(one))], "clip_grad_value_")
        super().clip_grad_value_(given, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Sharded optimizers unscale as they clip by norm and step."""
        named = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._refuse_scaled([one.optimizer for one in named if isinstance(one, PreparedOptimizer)], "unscale_gradients")
        super().unscale_gradients(optimizer)

    def _refuse_scaled(self, optimizers: list[ShardedOptimizer], call: str) -> None:
        if any(one.loss_scale is not None for one in optimizers):
            raise StateError(
                f"{call} was called for a model in fp16, whose gradients are multiplied by the loss scale until the "
                "step. Clip by norm, with clip_grad_norm_, or train in bf16."
            )

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients of a sharded model are reduced in every backward: whole ones on each rank might not fit."""
        if is_sharded(model):
            yield
        else:
            with super().no_sync(model):
                yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole weights on the host; nothing while `save_state` runs, which streams them."""
        if self._saves_states and is_sharded(model):
            return {}
        return super().get_state_dict(model, unwrap)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """All ranks must call this. Writes Accelerate's folder, with one of ours inside for every sharded model."""
        self._saves_states = True
        try:
            folder = super().save_state(*args, **kwargs)
        finally:
            self._saves_states = False
        self.wait_for_everyone()
        if self._writes_marks():
            (Path(folder) / MARK).touch()
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """All ranks must call this. Without a folder, the newest of those that Accelerate named that is whole."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming and self._shards():
            input_dir = find_accelerators(Path(self.project_dir) / "checkpoints")
        return super().load_state(input_dir, *args, **kwargs)

    def _shards(self) -> bool:
        return any(is_sharded(model) for model in self._models)

    def _writes_marks(self) -> bool:
        on_each_node = self.project_configuration.save_on_each_node
        return self._shards() and bool(self.is_local_main_process if on_each_node else self.is_main_process)

    def _save_states(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """Accelerate calls this before it writes its own files. A folder that is written again is not whole."""
        if self._writes_marks():
            (Path(folder) / MARK).unlink(missing_ok=True)
        for index in reversed(range(len(models))):
            if is_sharded(models[index]):
                save(Path(folder) / f"{STATES}_{index}", models[index], sharded(models[index]).optimizer)
                weights.pop(index)

    def _load_states(self, models: list[nn.Module], folder: str) -> None:
        """Accelerate calls this before it reads its own files."""
        placed = [index for index, model in enumerate(models) if is_sharded(model)]
        if any(Path(folder, f"{STATES}_{index}").is_dir() for index in placed) and not has_mark(Path(folder)):
            raise CheckpointError(
                f"{folder} was cut short while it was saved, so what it holds may be of two moments. Load another one."
            )
        for index in reversed(placed):
            load(Path(folder) / f"{STATES}_{index}", models[index], sharded(models[index]).optimizer)
            models.pop(index)

    def _placed(self) -> list[ShardedOptimizer]:
        return [one.optimizer for one in self._optimizers if isinstance(one, PreparedOptimizer)]


def _trained(optimizer: ShardedOptimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def attach(accelerator: Accelerator, plan: Plan | None = None) -> Accelerator:
    """Makes this accelerator know sharded models and optimizers; returns it. Call it before `prepare`.

    With a `plan`, it shards models that are prepared only for evaluation, such as reference and reward models.
    """
    if isinstance(accelerator, AttachedAccelerator):
        return accelerator
    if accelerator.mixed_precision not in ("no", None):
        raise PlanError(
            f"the Accelerator has mixed_precision={accelerator.mixed_precision!r}, which would cast inside the model. "
            f'Make it without, and set precision="{accelerator.mixed_precision}" in the plan.'
        )
    compiler = accelerator.state.dynamo_plugin.backend
    if compiler != DynamoBackend.NO:
        raise PlanError(
            f"the Accelerator has dynamo_backend={compiler.value!r}, but a sharded model is compiled block by block. "
            f"Make it without, and set compile={compiler.value.lower()!r} in the plan."
        )
    own = type(accelerator)
    accelerator.__class__ = type(own.__name__, (AttachedAccelerator, own), {"__module__": own.__module__})
    accelerator._plan = plan  # type: ignore[attr-defined]
    accelerator.register_save_state_pre_hook(accelerator._save_states)  # type: ignore[attr-defined]
    accelerator.register_load_state_pre_hook(accelerator._load_states)  # type: ignore[attr-defined]
    return accelerator
