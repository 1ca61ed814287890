"""The optimizer that `shard` returns: a torch.optim.Optimizer whose states live with the engine.

Its param groups are the user's own, so schedulers and changes of the learning rate work as usual. `step` is exact and
returns early: whoever needs its results waits for them.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from unbounded.errors import PlanError, StateError
from unbounded.optim.joined import JoinedOptimizer
from unbounded.optim.recognition import kind_of
from unbounded.planner.plan import Plan
from unbounded.ranks.phases import describe_groups
from unbounded.tiers.tiers import Tiers, TierUse
from unbounded.zero.engine import Engine
from unbounded.zero.gradients import spent
from unbounded.zero.gradients.managed_grad import keep_alive
from unbounded.zero.parameters.views import refuse_stray_gradients
from unbounded.zero.passes.turns import in_turn
from unbounded.zero.reduction import global_norm
from unbounded.zero.step import digest, new_group
from unbounded.zero.step.early.at_once import AtOnce
from unbounded.zero.step.loss_scale import LossScale
from unbounded.zero.step.step_progress import StepProgress
from unbounded.zero.step.updates import Updates
from unbounded.zero.unit import Unit


class _NoStates(defaultdict[Any, Any]):
    """`optimizer.state`: empty, since the states are where the plan put them; reading or resetting them says so."""

    def __missing__(self, key: Any) -> Any:
        raise StateError(
            "optimizer.state is empty: the states of a sharded optimizer are arrays of whole units, kept where the "
            "plan put them. unbounded.save writes them, and a new `shard` of the model begins with new ones."
        )

    def __bool__(self) -> bool:
        """Says that there are states: torch's `get_state_dict` makes them by a step of its own where there are none."""
        return True

    def clear(self) -> None:
        self.__missing__(None)


class _Retired:
    """What an optimizer holds instead of an engine once its model is plain again."""

    def __getattr__(self, name: str) -> Any:
        raise StateError("the model of this optimizer is no longer sharded. Make a new optimizer of its parameters.")


class ShardedOptimizer(torch.optim.Optimizer):
    """Drives the updates of one sharded model. All methods but `scale` and `memory` must be called on all ranks."""

    _is_made = False  # while torch's own constructor adds the groups that `shard` was given

    def __init__(
        self, optimizer: torch.optim.Optimizer, engine: Engine, updates: Updates, tiers: Tiers, plan: Plan
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, _NoStates()
        vars(self).update({name: held for name, held in vars(optimizer).items() if name.endswith("_hooks")})
        self.engine, self.updates, self.tiers, self.plan = engine, updates, tiers, plan
        for member in optimizer.members if isinstance(optimizer, JoinedOptimizer) else [optimizer]:
            member._opt_called = True  # type: ignore[attr-defined]  # schedulers made before `shard` ask
        self.kind, self._given = kind_of(optimizer), optimizer
        self.loss_scale = LossScale.of_plan(plan)
        self.skipped_steps = 0
        self.num_steps = 0  # calls in this process
        self.step_was_skipped = False
        self._scaled = False
        self._members = self._membership()
        self._at_once = AtOnce(engine, updates.run, self.kind)
        self._is_last_backward = False
        self._updates_at_once = not plan.keeps_gradients
        engine.reduction.on_final = weakref.WeakMethod(self._gradient_landed)
        engine.reduction.on_end = weakref.WeakMethod(self._backward_over)
        self._is_made = True

    # -- the training loop -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient. Overflow in fp16 skips the step on all ranks."""
        self.engine.check_process()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @in_turn
    def _update(self) -> None:
        self.engine.refuse_inside_full_params("optimizer.step")
        self.engine.recover()
        self.engine.pending.refuse_broken()
        self.engine.leave_forward()
        refuse_stray_gradients(self.engine.units)
        self.engine.lending.copies.settle()
        units = self._collect("optimizer.step()")
        self._refuse_unscaled(units)
        self._at_once.finish(self.param_groups)
        self.step_was_skipped = False
        if self.loss_scale is not None:
            overflow = not math.isfinite(float(self._total_norm(units)))
            if self._scaled:
                for unit in units:
                    unit.gradient.scale(1.0 / self.loss_scale.value)
            self.loss_scale = self.loss_scale.after_step(overflow=overflow)
            self.step_was_skipped = overflow
            self.skipped_steps += overflow
            units = [] if overflow else units
        else:
            self.engine.failures.meet()
        self.updates.run(units, self.param_groups)
        self._scaled = False
        self.updates.drafts.outlook.num_backwards = self.engine.taking.take_num_backwards()
        for unit in self.engine.units:
            unit.gradient.end_step()
        self.num_steps += 1

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, or makes them zeros. A running update keeps what it reads."""
        self.engine.refuse_pending("optimizer.zero_grad()")
        self._clear_gradients(set_to_none=set_to_none)

    def forget_gradients(self) -> None:
        """All states are replaced: drops gradients, even of units that were updated for a step that never comes."""
        for parameter in [*self._given.state]:  # states from before `shard`, of what was frozen then
            self._given.state.pop(parameter)
        self._at_once.clear()
        for unit in self.engine.units:
            unit.gradient.expect_no_step()
        self._clear_gradients(set_to_none=True)

    def _clear_gradients(self, *, set_to_none: bool) -> None:
        for unit in self.engine.units:
            if not unit.trainable:
                continue
            if 0 in unit.is_grouped:  # parameters that the optimizer does not have keep their gradient
                for index in map(int, np.flatnonzero(unit.is_grouped)):
                    if set_to_none:
                        keep_alive(unit.gradient, [index])
                    (unit.gradient.drop_slot if set_to_none else unit.gradient.zero_slot)(index)
                continue
            if set_to_none:
                keep_alive(unit.gradient)
                unit.gradient.drop()
            else:
                unit.gradient.zero()
        self.engine.reduction.forget()
        self.engine.taking.take_num_backwards()

    @in_turn
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients so that their norm over every rank and tier is at most `max_norm`; returns the norm.

        The factor is applied by the next `step` as it reads the gradients, which saves a pass over them. With a
        `max_norm` of infinity it only measures: gradients stay as they are, whatever their norm is.
        """
        if norm_type != 2.0:
            raise PlanError(f"norm_type is {norm_type}, but only the 2-norm is supported. Leave it at 2.0.")
        self._refuse_norm(f"optimizer.clip_grad_norm_({max_norm})")
        if self.engine.pending.units:
            raise StateError(
                f"{len(self.engine.pending.units)} units were updated inside last_backward(), before anything could be "
                f"clipped. Announce the clipping there: `with optimizer.last_backward(max_norm={max_norm}):`."
            )
        units = self._collect(f"optimizer.clip_grad_norm_({max_norm})")
        norm = self._total_norm(units)
        if self.loss_scale is not None and self._scaled:
            norm = norm / self.loss_scale.value
        dtype = global_norm.norm_dtype(units)
        if max_norm != math.inf:
            factor = global_norm.clip_factor(norm, float(max_norm), dtype)
            for unit in units:
                unit.gradient.scale(factor)
        return norm if isinstance(norm, torch.Tensor) else torch.tensor(norm, dtype=dtype, device="cpu")

    @contextmanager
    def last_backward(self, max_norm: float | None = None) -> Iterator[None]:
        """A hint around the last backward before `step`: units may be updated inside it. Results are the same.

        `max_norm` says that `clip_grad_norm_` will follow: its norm is only known at the end, so updates wait for it.
        """
        if max_norm is not None:
            self._refuse_norm(f"last_backward(max_norm={max_norm})")
        is_alone = self.loss_scale is None and self.engine.ranks.size == 1
        self._is_last_backward = True
        self._updates_at_once = not self.plan.keeps_gradients or (max_norm is None and is_alone)
        try:
            yield
        finally:
            self._is_last_backward = False
            self._updates_at_once = not self.plan.keeps_gradients

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients are added up on each rank and reduced by the first backward outside: less traffic."""
        if not self.plan.keeps_gradients:
            spent.refuse_sums("optimizer.no_sync()")
        return self.engine.taking.no_sync()

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

    @in_turn
    def nonfinite_units(self) -> list[str]:
        """The units whose gradient has an infinity or a NaN on any rank."""
        self._refuse_norm("optimizer.nonfinite_units()")
        units = self._collect("optimizer.nonfinite_units()")
        flags = [not math.isfinite(float(part)) for part in global_norm.unit_squares(units, self.engine.failures)]
        votes = self.engine.ranks.max(torch.tensor(flags, dtype=torch.int32, device=self.engine.device))
        return [unit.name for unit, flag in zip(units, votes.tolist(), strict=True) if flag]

    @in_turn
    def wait(self) -> None:
        """Returns when every update of the last step has been applied; raises what went wrong in one.

        After it, the weights of stages 1 and 2 are whole again, and a rank may evaluate by itself.
        """
        self.engine.check_process()
        for unit in self.engine.units:
            with self.engine.failures.noting():
                for handle in (unit.weights_ready, unit.states_written):
                    if handle is not None:
                        handle.wait()
        self.engine.failures.meet()
        with self.engine.phases.during("optimizer.wait()"):
            self.engine.gathering.complete(self.engine.units)
        self.engine.raise_failures()

    def state_dict(self) -> dict[str, Any]:
        """`groups_and_counters`, with a warning: a user who saves this alone cannot go on from it."""
        digest.warn_of_lack(self.engine.units)
        return self.groups_and_counters()

    @in_turn
    def groups_and_counters(self) -> dict[str, Any]:
        """The small part, in torch's form. The states are where the plan put them: `unbounded.save` saves all."""
        self.engine.refuse_pending("optimizer.state_dict()")
        return {**super().state_dict(), digest.KEY: digest.describe(self, self.engine.units)}

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave; nothing is changed if it does not fit.

        The states must already be those of the same step: `unbounded.load` loads them.
        """
        self.engine.refuse_pending("optimizer.load_state_dict()")
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = change(self, state_dict) or state_dict
        digest.restore(self, self.engine.units, state_dict)
        for tell in self._optimizer_load_state_dict_post_hooks.values():
            tell(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """All ranks must call this. Adds parameters of the model that no group has; they are frozen or unfrozen now.

        What a frozen one needs for training is allocated when it is unfrozen: by `requires_grad_()`.
        """
        if not self._is_made:
            super().add_param_group(param_group)
            return
        self.engine.refuse_pending("optimizer.add_param_group()")
        super().add_param_group(param_group)  # checks it, and fills in the defaults
        try:
            places = new_group.find_places(self.param_groups[-1], self.engine)
            new_group.check_states(self._given, self.plan.optimizer_format, places)
        except BaseException:
            self.param_groups.pop()
            raise
        for unit, indices in places.items():
            unit.regroup(dict.fromkeys(indices, len(self.param_groups) - 1))
        self._members = self._membership()

    def __getstate__(self) -> dict[str, Any]:
        """Asked for by `copy` and by `pickle`."""
        raise StateError(
            "a sharded optimizer cannot be copied or pickled: its states are where the plan put them. Use "
            "unbounded.save, or make a new optimizer for a copy of the model: copy.deepcopy(model)."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning and Fabric wrap an optimizer in a subclass of its class; attributes set there are meant for it."""
        if name == "state" and isinstance(self.__dict__.get("state"), _NoStates):
            self.state.clear()  # `optimizer.state = defaultdict(dict)` is meant to reset the states
        inner = self.__dict__.get("_optimizer")
        if isinstance(inner, ShardedOptimizer) and name in vars(inner):
            setattr(inner, name, value)
        else:
            super().__setattr__(name, value)

    # -- what checkpoints keep ---------------------------------------------------------------------------------------

    def progress(self) -> StepProgress:
        """Where between two steps the optimizer is."""
        return StepProgress(self.loss_scale, self.skipped_steps, self._scaled)

    def resume(self, progress: StepProgress) -> None:
        """Continues from there, on all ranks. The loss scale is taken if this precision has one."""
        if self.loss_scale is not None and progress.loss_scale is not None:
            self.loss_scale = progress.loss_scale
        self.skipped_steps, self._scaled = progress.skipped_steps, progress.scaled

    def retire(self) -> None:
        """Lets go of everything that runs the model, which is plain again: whatever is asked of it now is refused."""
        self.engine = self.updates = self.tiers = self._at_once = _Retired()  # type: ignore[assignment]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _collect(self, call: str) -> list[Unit]:
        """The trainable units with a gradient on any rank, in the order of the next forward, reduced, for `call`."""
        self.engine.check_process()
        if self._membership() != self._members:
            raise StateError(
                "parameters were added to, taken out of or moved between groups of a sharded optimizer, whose states "
                "are laid out by group. Change the groups before `shard`; their options may change at any time."
            )
        options, gradients = describe_groups(self.kind, self.param_groups), self.engine.gradients
        given = f"{gradients.describe()}; backwards since the last step: {self.engine.taking.num_backwards}"
        self.engine.copy_phases.confirm(call, f"{options}; {given}", ["tensor", "context"])
        self.engine.copy_phases.confirm(call, options, ["pipeline"])  # stages hold gradients of their own
        with self.engine.phases.together(call, f"{options}; {gradients.describe_voted()}"):
            gradients.finish()
        for unit in self.engine.units:
            with self.engine.failures.noting():
                if unit.states_written is not None and unit.states_written.launched():
                    unit.states_written.order_stream()  # raises if the last step's states could not be written
        units = [unit for unit in self.engine.forward_order() if unit.trainable]
        return [unit for unit in units if unit.gradient.is_present]

    def _refuse_norm(self, what: str) -> None:
        """Raises where no gradient is stored: `what` needs those of all units together."""
        if not self.plan.keeps_gradients:
            spent.refuse_norm(what)

    def _refuse_unscaled(self, units: list[Unit]) -> None:
        if self._scaled or self.loss_scale is None or self.loss_scale.is_plain:
            return
        if any(unit.gradient.is_new for unit in units):  # those that a step has used already are no longer scaled
            raise StateError(
                "the gradients in fp16 come from a loss that was not scaled, so small ones were lost. Call "
                "`optimizer.scale(loss).backward()`; if the loss needs no scaling, say so in the plan: "
                "loss_scale=1, loss_scale_window=0."
            )

    def _membership(self) -> list[list[int]]:
        """Which parameter is in which group."""
        return [list(map(id, group["params"])) for group in self.param_groups]

    def give_up_drafts(self) -> None:
        """From now on all units are updated after the backward, because the host's memory is needed."""
        self.tiers.shrink(host_bytes=self.updates.drafts.give_up(self.tiers.free), store=None)
        self.plan = replace(self.plan, early_units=0)

    def _total_norm(self, units: list[Unit]) -> float | torch.Tensor:
        axes = self.engine.axes
        self.engine.reduction.measure = True
        squares = global_norm.unit_squares(units, self.engine.failures)
        over = (axes.data, *axes.model) if self.plan.stage > 0 else axes.model
        return global_norm.total_norm(squares, over, self.engine.device, global_norm.norm_dtype(units))

    def _gradient_landed(self, unit: Unit) -> None:
        """A backward has finished the gradient of `unit`, which is being brought to its tier."""
        if self._updates_at_once:
            self._at_once.add(unit, self.param_groups)
        elif self._is_last_backward or self.engine.taking.num_backwards == self.updates.drafts.outlook.num_backwards:
            self.updates.drafts.ask(unit, self.param_groups)

    def _backward_over(self) -> None:
        self._at_once.end(self.param_groups)
