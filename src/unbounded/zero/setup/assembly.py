"""Builds a running engine from a blueprint: units, first values, lanes, the optimizer, hooks."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from unbounded.native.bulk import dense_parts, fill, flat
from unbounded.optim.rules import NativeRule
from unbounded.planner.plan import Plan
from unbounded.ranks.failures import Failures
from unbounded.ranks.mesh import Axes
from unbounded.ranks.phases import CopyPhases, Phases
from unbounded.tiers.array import Array
from unbounded.tiers.budget import BOUNCE_BUFFERS, host_threads
from unbounded.tiers.lane import Lane
from unbounded.tiers.pool import BufferPool
from unbounded.tiers.tiers import Tiers
from unbounded.zero.engine import Engine
from unbounded.zero.factors import Factors, find_factors
from unbounded.zero.parameters.views import ModuleViews
from unbounded.zero.parameters.writes import Writes
from unbounded.zero.passes import hooks
from unbounded.zero.passes.direction import RunningSite
from unbounded.zero.passes.gathering import Gathering
from unbounded.zero.passes.inputs import Inputs
from unbounded.zero.passes.module_buffers import ModuleBuffers
from unbounded.zero.reduction.reduction import Reduction
from unbounded.zero.setup.blueprint import Blueprint
from unbounded.zero.setup.initial import Entries, Installer
from unbounded.zero.setup.sites import Site
from unbounded.zero.setup.thawing import Thawing, make_gradient
from unbounded.zero.step.early.drafts import Draft
from unbounded.zero.step.early.in_backward import InBackward
from unbounded.zero.step.home_exchange import HomeExchange
from unbounded.zero.step.optimizer import ShardedOptimizer
from unbounded.zero.step.updates import Lanes, Updates
from unbounded.zero.unit import Unit

# Puts the first values of all units on their tiers.
Fill = Callable[[Entries, Installer], None]


@dataclass(eq=False)
class Sharded:
    """Everything that belongs to one sharded model."""

    engine: Engine
    tiers: Tiers
    bounce: BufferPool
    first_plan: Plan
    optimizer: ShardedOptimizer | None
    lanes: Sequence[Lane]
    detach: Callable[[], None]

    @property
    def plan(self) -> Plan:
        """The closed plan as it is now; states may move while a model trains."""
        return self.first_plan if self.optimizer is None else self.optimizer.plan

    def add_detach(self, remove: Callable[[], None], *, is_inner: bool = False) -> None:
        """Adds `remove` to what is called when the hooks are removed: before them, or after if it is inside them."""
        first, second = (self.detach, remove) if is_inner else (remove, self.detach)

        def both() -> None:
            first()
            second()

        self.detach = both


class Assembly:
    """The parts of one sharded model, made in order by `build`."""

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        blueprint: Blueprint,
        axes: Axes,
        device: torch.device,
        copy_phases: CopyPhases,
    ) -> None:
        self.model, self.sites, self.blueprint, self.axes, self.device = model, sites, blueprint, axes, device
        self.copy_phases = copy_phases
        self.ranks = axes.data
        self.plan = blueprint.plan
        self.threads = host_threads(self.plan, axes.world.size)
        # Without overlap every lane runs its work immediately in the caller: to measure what overlap gains.
        self.inline = os.environ.get("UNBOUNDED_OVERLAP", "1") == "0"
        self._lanes: list[Lane] = []

    def build(self, optimizer: torch.optim.Optimizer | None, fill: Fill, cast_inputs: torch.dtype | None) -> Sharded:
        """All ranks must call this."""
        plan, buffers = self.plan, self.blueprint.buffers
        tiers = Tiers(
            self.device,
            budgets={"device": plan.device_bytes, "host": plan.host_bytes, "disk": plan.disk_bytes},
            disk_bytes=self.blueprint.disk_bytes,
            disk_path=plan.disk_path,
            disk_checksums=plan.disk_checksums,
            num_threads=self.threads,
        )
        tiers.planned_host_bytes = self.blueprint.host_bytes
        bounce = tiers.pool(BOUNCE_BUFFERS, buffers.bounce_bytes)
        entries = self._entries()
        installer = Installer(tiers, self.ranks, bounce)
        fill(entries, installer)
        for unit, _, _ in entries:
            unit.views.place_data()
        self._move_buffers(cast_inputs)
        self._share_buffers()
        left = optimizer.state if optimizer is not None else {}
        thawing = Thawing(self.blueprint, [unit for unit, _, _ in entries], self.ranks, installer, left)
        engine = self._engine([unit for unit, _, _ in entries], thawing, cast_inputs)
        sharded_optimizer = self._optimizer(optimizer, engine, tiers) if optimizer is not None else None
        engine.gradients.adopt()
        return Sharded(engine, tiers, bounce, plan, sharded_optimizer, self._lanes, self._attach(engine))

    def _entries(self) -> Entries:
        drawn, entries = self.blueprint, []
        rows = zip(drawn.specs, drawn.places, drawn.streamed, drawn.packed, strict=True)
        for spec, where, is_streamed, is_packed in rows:
            unit = Unit(spec.name, spec.layout, dtype=spec.dtype, device=self.device, trainable=spec.trainable)
            unit.views = ModuleViews(unit, spec.members)
            partitioned = self.ranks.size > 1
            if partitioned and self.plan.stage > 0 and (spec.trainable or self.plan.stage == 3):
                unit.owned = spec.layout.shard_range(self.ranks.rank)
            unit.resident = where.weights == "device" and (not partitioned or self.plan.stage < 3)
            unit.streamed, unit.is_packed = is_streamed, is_packed
            unit.homes, unit.rank = spec.homes, self.ranks.rank
            unit.factors = Factors(
                find_factors(spec.layout, spec.rule, spec.homes, None if unit.is_whole else self.ranks.rank)
            )
            unit.rule, unit.rule_if_trained = spec.rule, spec.rule_if_trained
            unit.gradient = make_gradient(unit, unit.owned, where.gradients, self.plan)
            tiers = {"weights": where.weights, "optimizer": where.optimizer, "remainder": where.remainder}
            entries.append((unit, spec.members, tiers))
        return entries

    def _move_buffers(self, lowered: torch.dtype | None) -> None:
        """Moves buffers to the device in their own dtype (`module_buffers`).

        Norms' statistics get that of weights, and so do sparse buffers, which take no class of tensors of ours.
        """
        for module in self.model.modules():
            is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    follows = lowered is not None and (is_norm or buffer.layout is not torch.strided)
                    casts = follows and buffer.dtype == torch.float32
                    module._buffers[name] = buffer.to(self.device, lowered if casts else buffer.dtype)

    def _share_buffers(self) -> None:
        """Every rank begins with the first rank's buffers, as with its parameters. Later, each keeps its own."""
        for part in itertools.chain.from_iterable(map(dense_parts, self.model.buffers())):
            whole = flat(part)
            self.ranks.broadcast(whole.view(torch.uint8), "the broadcast of buffers")
            if whole.data_ptr() != part.data_ptr():
                fill(part, whole)

    def _engine(self, units: Sequence[Unit], thawing: Thawing, cast_inputs: torch.dtype | None) -> Engine:
        ranks, phases = self.ranks, Phases(self.ranks)
        reduction = Reduction(ranks.lane("reduce"), phases, self._lane("reduce"), replicate=self.plan.stage == 0)
        reduction.at_once = not self.plan.keeps_gradients
        for unit in units:
            thawing.connect(unit.gradient)
        by_site: dict[str, list[Unit]] = {site.name: [] for site in self.sites}
        for spec, unit in zip(self.blueprint.specs, units, strict=True):
            by_site[spec.site.name].append(unit)
        # Stages of a pipeline are not in step with each other; otherwise all ranks meet at the same places.
        meeting = self.axes.world if self.axes.pipeline.size == 1 else self.ranks
        failures = Failures(meeting, shared=thawing.uses_disk)
        return Engine(
            [
                RunningSite(index, site.name or "root", site.is_outer or index == 0, by_site[site.name])
                for index, site in enumerate(self.sites)
            ],
            axes=self.axes,
            device=self.device,
            phases=phases,
            copy_phases=self.copy_phases,
            gathering=Gathering(
                ranks,
                phases,
                self.device,
                self._lane("fetch"),
                self._lane("read"),
                failures,
                partial(thawing.tiers.count, "device"),
            ),
            reduction=reduction,
            prefetch_units=self.plan.prefetch_units,
            defer_reduction=self.plan.stage == 1 and ranks.size > 1 and self.plan.keeps_gradients,
            inputs=Inputs(self.device, cast_inputs),
            failures=failures,
            writes=Writes(),
            thawing=thawing,
            buffers=ModuleBuffers(self.model, [site.name for site in self.sites], cast_inputs),
        )

    def _optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine, tiers: Tiers) -> ShardedOptimizer:
        buffers = self.blueprint.buffers
        leased = tiers.pool(buffers.num_update, buffers.update_bytes)
        streams = [self._lane(f"stream-{index}") for index in range(2)]
        lanes = Lanes(self._lane("update"), self._lane("buffered"), streams, self._lane("whole"))
        needs_wholes = any(unit.needs_wholes and not unit.is_whole for unit in engine.units)
        exchange = HomeExchange(self.ranks.lane("whole")) if needs_wholes else None
        drafts = self._drafts(engine.units, tiers, leased)
        updates = Updates(engine, lanes, self.threads, leased, buffers.depth, drafts, exchange)
        sharded = ShardedOptimizer(optimizer, engine, updates, tiers, self.plan)
        tiers.give_up = weakref.WeakMethod(sharded.give_up_drafts)
        return sharded

    def _drafts(self, units: Sequence[Unit], tiers: Tiers, bounce: BufferPool) -> dict[Unit, Draft]:
        """Spare arrays for the units that are updated inside the backward."""

        def allocate(arrays: Mapping[str, Array]) -> dict[str, Array]:
            with tiers.all_or_none() as made:
                for name, array in arrays.items():
                    pin = name == "weight"  # they go to the device from their place
                    made[name] = tiers.allocate(array.tier, array.dtype, array.numel, bounce, pin=pin)
            return made

        drafts = {}
        for unit, drafted in zip(units, self.blueprint.early, strict=True):
            if drafted is not InBackward.NOTHING and isinstance(unit.rule, NativeRule):
                drafts[unit] = Draft(unit, unit.rule, allocate, has_states=drafted is InBackward.ALL)
        return drafts

    def _attach(self, engine: Engine) -> Callable[[], None]:
        detaches = [hooks.attach(site.module, i, engine, is_root=i == 0) for i, site in enumerate(self.sites)]
        detaches.append(hooks.guard_loads(self.model, engine.begin_load))
        detaches += [unit.views.stop_watching for unit in engine.units]

        def detach() -> None:
            for remove in detaches:
                remove()

        return detach

    def _lane(self, name: str) -> Lane:
        self._lanes.append(Lane(name, self.device, inline=self.inline))
        return self._lanes[-1]
