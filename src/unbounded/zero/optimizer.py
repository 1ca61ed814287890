"""The optimizer that `shard` returns: a torch.optim.Optimizer whose states live with the engine.

Its param groups are the user's own, so schedulers and changes of the learning rate work as ever. `step` is
exact and returns early: what it started is waited for by whoever needs it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from unbounded.errors import PlanError, StateError
from unbounded.planner.plan import Plan
from unbounded.tiers.memory import Tiers, TierUse
from unbounded.zero.engine import Engine
from unbounded.zero.scaler import LossScale
from unbounded.zero.unit import Unit
from unbounded.zero.updates import Updates


class ShardedOptimizer(torch.optim.Optimizer):
    """Drives the updates of one sharded model. All methods but `scale` and `memory` must be called on all ranks."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Engine, updates: Updates, tiers: Tiers, plan: Plan
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self.engine, self.updates, self.tiers, self.plan = engine, updates, tiers, plan
        self.kind = type(optimizer).__name__
        self.loss_scale = LossScale() if plan.precision == "fp16" else None
        self.skipped_steps = 0
        self._clip: float | torch.Tensor | None = None
        self._scaled = False
        self._updated: set[int] = set()  # units updated inside last_backward

    # -- the training loop -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient. Overflow in fp16 skips the step on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.refuse_inside_full_params("optimizer.step")
        units = self._collect()
        scale = self._pending_factor(units)
        if self.loss_scale is not None:
            overflow = not math.isfinite(float(self._total_norm(units)))
            scale = scale / (self.loss_scale.value if self._scaled else 1.0)
            self.loss_scale = self.loss_scale.after_step(overflow=overflow)
            if overflow:
                self.skipped_steps += 1
                units = []
        else:
            self.engine.failures.meet()
        self.updates.run([unit for unit in units if id(unit) not in self._updated], self.param_groups, scale)
        self._reset(units)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients. An update under way keeps what it reads."""
        for unit in self.engine.units:
            if unit.trainable:
                unit.gradient.drop()
                unit.unreduced = None
                unit.used = bytearray(len(unit.used))
                unit.calls, unit.fires = max(0, unit.calls - unit.fires), 0  # a forward may wait for its backward
        self.engine.reduction.forget()
        self._clip = None
        self._updated.clear()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over every rank and tier is at most `max_norm`; returns the norm.

        The factor is applied by the next `step` as it reads the gradients, which saves a pass over them.
        """
        if norm_type != 2.0:
            raise PlanError(f"norm_type is {norm_type}, but only the 2-norm is supported. Leave it at 2.0.")
        if self._updated:
            raise StateError(
                f"{len(self._updated)} units were updated inside last_backward(), before anything could be clipped. "
                f"Announce the clipping there: `with optimizer.last_backward(max_norm={max_norm}):`."
            )
        units = self._collect()
        norm = self._total_norm(units)
        if self.loss_scale is not None and self._scaled:
            norm = norm / self.loss_scale.value
        before = self._pending_factor(units)
        norm = norm * before
        if math.isfinite(max_norm):
            self._clip = self._clip_factor(norm, float(max_norm)) * before
            for unit in units:
                unit.gradient.clipped = True
        return norm if isinstance(norm, torch.Tensor) else torch.tensor(norm)

    @contextmanager
    def last_backward(self, max_norm: float | None = None) -> Iterator[None]:
        """A hint around the last backward before `step`: units may be updated behind it. Results are the same.

        `max_norm` says that `clip_grad_norm_` will follow: its norm is only known at the end, so updates wait for it.
        """
        engine = self.engine
        if max_norm is None and self.loss_scale is None and engine.ranks.size == 1 and self._clip is None:
            engine.on_complete = self._update_early
        try:
            yield
        finally:
            engine.on_complete = None

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients are added up on each rank and reduced by the first backward outside: less traffic."""
        return self.engine.no_sync()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the dynamic loss scale in fp16; as it is in other precisions."""
        if self.loss_scale is None:
            return loss
        self._scaled = True
        return loss * self.loss_scale.value

    # -- what is held ----------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, TierUse]:
        """What each tier holds on this rank, against its budget."""
        return self.tiers.use()

    def nonfinite_units(self) -> list[str]:
        """The units whose gradient has an infinity or a NaN on any rank."""
        units = self._collect()
        flags = [not math.isfinite(float(part)) for part in self._squares(units)]
        votes = self.engine.ranks.max(torch.tensor(flags, dtype=torch.int32, device=self.engine.device))
        return [unit.name for unit, flag in zip(units, votes.tolist(), strict=True) if flag]

    def wait(self) -> None:
        """Returns when every update of the last step has been applied; raises what went wrong in one.

        Behind it weights that stages 1 and 2 keep whole are so again, and a rank may evaluate by itself.
        """
        for unit in self.engine.units:
            with self.engine.failures.noting():
                for handle in (unit.update, unit.written):
                    if handle is not None:
                        handle.synchronize()
        self.engine.failures.meet()
        self.engine.gathering.complete(self.engine.units)
        self.engine.raise_failures()

    def state_dict(self) -> dict[str, Any]:
        raise StateError(
            "the optimizer states are partitioned over ranks and tiers, so state_dict() cannot give them whole. "
            "Use unbounded.save(folder, model, optimizer) and unbounded.load."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise StateError(
            "optimizer states are loaded into their tiers from a checkpoint. "
            "Use unbounded.load(folder, model, optimizer)."
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "engine"):
            raise StateError("parameters cannot be added to a sharded optimizer. Add the group before `shard`.")
        super().add_param_group(param_group)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _collect(self) -> list[Unit]:
        """The trainable units with a gradient on any rank, in the order of the next forward, reduced."""
        engine, trainable = self.engine, [unit for unit in self.engine.units if unit.trainable]
        for unit, held in zip(trainable, self._agree(trainable), strict=True):
            if held:
                engine.reduction.flush(unit, wide=held > 1)
        engine.reduction.forget()
        for unit in trainable:
            with engine.failures.noting():
                unit.gradient.wait()
                if unit.written is not None and unit.written.launched():
                    unit.written.wait()  # raises where the last step's states could not be written
        order = {site: position for position, site in reversed(list(enumerate(engine.forward.expected)))}
        ranked = [(order.get(stop.index, len(order)), unit) for stop in engine.stops for unit in stop.units]
        ranked.sort(key=lambda entry: entry[0])
        found = [unit for _, unit in ranked if unit.trainable and unit.gradient.present and any(unit.used)]
        for unit in found:
            if unit.gradient.consumed and id(unit) not in self._updated:
                raise StateError(
                    f"the gradient of unit {unit.name!r} was scaled as the last optimizer.step() read it and cannot be "
                    "used again. Call optimizer.zero_grad() after each step, and a backward before the next."
                )
        return found

    def _agree(self, units: list[Unit]) -> list[int]:
        """Makes the ranks agree on which parameters were used and, where their passes went alike, on the order.

        Returns what any of them has yet to reduce of each unit: 0 is nothing, 1 a gradient, 2 a sum of several.
        """
        engine = self.engine
        held = [0 if unit.unreduced is None else 1 + (unit.unreduced.dtype != unit.dtype) for unit in units]
        if engine.ranks.size == 1:
            return held
        used = itertools.chain.from_iterable(unit.used for unit in units)
        marks = [engine.forward.mark, engine.backward.mark]
        votes = torch.tensor([*used, *held, *marks, *(-mark for mark in marks)], dtype=torch.int64)
        agreed = iter(engine.ranks.max(votes.to(engine.device)).tolist())
        for unit in units:
            unit.used = bytearray(itertools.islice(agreed, len(unit.used)))
        held = list(itertools.islice(agreed, len(units)))
        forward, backward, least_forward, least_backward = agreed
        if (forward, backward) == (-least_forward, -least_backward):
            engine.forward.adopt(keep_all=True)
            engine.backward.adopt(keep_all=True)
        return held

    def _total_norm(self, units: list[Unit]) -> float | torch.Tensor:
        engine = self.engine
        engine.reduction.measure = True
        squares = self._squares(units)
        tensors = [part for part in squares if isinstance(part, torch.Tensor)]
        total: float | torch.Tensor = float(sum(part for part in squares if not isinstance(part, torch.Tensor)))
        if tensors:
            total = torch.stack(tensors).double().sum() + total
        if engine.ranks.size > 1 and self.plan.stage > 0:
            held = total if isinstance(total, torch.Tensor) else torch.tensor(total, dtype=torch.float64)
            total = engine.ranks.sum(held.to(engine.device))
            total = total if tensors else float(total)
        if isinstance(total, torch.Tensor):
            return total.sqrt().float()
        return float(torch.tensor(math.sqrt(total) if total >= 0 else math.nan, dtype=torch.float32))

    def _squares(self, units: list[Unit]) -> list[float | torch.Tensor]:
        """The sum of squares of every unit's gradient on this rank. Gradients on disk are read for it."""
        squares: list[float | torch.Tensor] = []
        with self.engine.failures.noting():
            squares += [unit.gradient.squares(self.engine.reduction.bounce) for unit in units]
        self.engine.failures.meet()
        return squares

    def _pending_factor(self, units: list[Unit]) -> float | torch.Tensor:
        """What clipping has left for the step to do, unless the gradients that it was for are gone."""
        if self._clip is None or not any(unit.gradient.clipped for unit in units):
            return 1.0
        return self._clip

    @staticmethod
    def _clip_factor(norm: float | torch.Tensor, max_norm: float) -> float | torch.Tensor:
        if isinstance(norm, torch.Tensor):
            return (max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.tensor(max_norm, dtype=torch.float32) / (torch.tensor(norm, dtype=torch.float32) + 1e-6)
        return float(factor.clamp(max=1.0))

    def _update_early(self, unit: Unit) -> None:
        self._updated.add(id(unit))
        self.updates.run([unit], self.param_groups, 1.0)
        unit.gradient.use_up()

    def _reset(self, units: list[Unit]) -> None:
        self._clip, self._scaled = None, False
        self._updated.clear()
        for unit in units:
            unit.gradient.clipped = False
        for unit in self.engine.units:
            unit.calls = unit.fires = 0
