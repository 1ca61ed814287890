"""From a blueprint to a running engine: units, first values, lanes, the optimizer, hooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from unbounded.optim.rules import NativeRule, UpdateRule
from unbounded.planner.plan import Plan
from unbounded.planner.streaming import choose_streamed, streamed_part
from unbounded.tiers.budget import BOUNCE_BUFFERS, local_size
from unbounded.tiers.lane import Lane
from unbounded.tiers.memory import Tiers
from unbounded.zero import access, hooks
from unbounded.zero.blueprint import DTYPES, Blueprint
from unbounded.zero.collectives import Ranks
from unbounded.zero.engine import Engine, Stop
from unbounded.zero.failures import Failures
from unbounded.zero.gathering import Gathering
from unbounded.zero.gradient import Gradient
from unbounded.zero.initial import Installer, Places
from unbounded.zero.optimizer import ShardedOptimizer
from unbounded.zero.reduction import Reduction
from unbounded.zero.unit import Unit
from unbounded.zero.units import Member, Site
from unbounded.zero.updates import Lanes, Updates

Entries = Sequence[tuple[Unit, Sequence[Member], Places]]
# Puts the first values of all units on their tiers.
Fill = Callable[[Entries, Installer], None]


@dataclass(eq=False)
class Sharded:
    """Everything that runs behind one sharded model."""

    engine: Engine
    rules: dict[torch.dtype, UpdateRule]
    tiers: Tiers
    plan: Plan
    optimizer: ShardedOptimizer | None
    detach: Callable[[], None]


class Assembly:
    """The parts of one sharded model, made in order by `build`."""

    def __init__(
        self, model: nn.Module, sites: Sequence[Site], blueprint: Blueprint, ranks: Ranks, device: torch.device
    ) -> None:
        self.model, self.sites, self.blueprint, self.ranks, self.device = model, sites, blueprint, ranks, device
        self.plan = blueprint.plan
        self.threads = self.plan.host_threads or max(1, (os.cpu_count() or 1) // local_size(ranks.size))
        self.rules = {spec.dtype: spec.rule for spec in blueprint.specs if spec.rule is not None}
        # Without overlap every lane works at once where it is asked to: for measuring what overlap is worth.
        self.inline = os.environ.get("UNBOUNDED_OVERLAP", "1") == "0"

    def build(self, optimizer: torch.optim.Optimizer | None, fill: Fill, cast_inputs: torch.dtype | None) -> Sharded:
        """All ranks must call this."""
        plan, buffers = self.plan, self.blueprint.buffers
        tiers = Tiers(
            self.device,
            budgets={"device": plan.device_bytes, "host": plan.host_bytes, "disk": plan.disk_bytes},
            disk_bytes=self.blueprint.disk_bytes,
            disk_path=plan.disk_path,
            num_threads=self.threads,
        )
        tiers.planned_host_bytes = self.blueprint.host_bytes
        bounce = tiers.pool(BOUNCE_BUFFERS, buffers.bounce_bytes)
        entries = self._entries()
        fill(entries, Installer(tiers, self.ranks, bounce, self.rules))
        self._move_buffers()
        engine = self._engine([unit for unit, _, _ in entries], tiers, bounce, cast_inputs)
        sharded_optimizer = self._optimizer(optimizer, engine, tiers) if optimizer is not None else None
        return Sharded(engine, self.rules, tiers, plan, sharded_optimizer, self._attach(engine))

    def _entries(self) -> Entries:
        places, entries = self.blueprint.places, []
        candidates = [self.device.type == "cuda" and where.optimizer == "host" for where in places]
        native = all(isinstance(rule, NativeRule) for rule in self.rules.values())
        streamed = choose_streamed(candidates, streamed_part(self.threads) if native else 0.0)
        for spec, where, is_streamed in zip(self.blueprint.specs, places, streamed, strict=True):
            unit = Unit(spec.name, spec.members, spec.layout, dtype=spec.dtype, device=self.device)
            partitioned = self.ranks.size > 1
            if partitioned and self.plan.stage > 0 and (spec.trainable or self.plan.stage == 3):
                unit.owned = spec.layout.shard_range(self.ranks.rank)
            unit.resident = where.weights == "device" and (not partitioned or self.plan.stage < 3)
            unit.streamed = is_streamed
            owned_numel = unit.owned[1] - unit.owned[0]
            unit.gradient = Gradient(where.gradients, owned_numel, spec.dtype, DTYPES[self.plan.accumulate_dtype])
            tiers = {"weights": where.weights, "optimizer": where.optimizer, "low": where.completion}
            entries.append((unit, spec.members, tiers))
        return entries

    def _move_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device:
                    module._buffers[name] = buffer.to(self.device)

    def _engine(self, units: Sequence[Unit], tiers: Tiers, bounce: object, cast_inputs: torch.dtype | None) -> Engine:
        self.ranks.open_words()
        reduction = Reduction(self.ranks.lane(), self._lane("reduce"), bounce, replicate=self.plan.stage == 0)  # type: ignore[arg-type]
        for tier in ("device", "host", "disk"):
            reduction.allocate[tier] = partial(tiers.allocate, tier, bounce=bounce)  # type: ignore[arg-type]
        by_site: dict[str, list[Unit]] = {site.name: [] for site in self.sites}
        for spec, unit in zip(self.blueprint.specs, units, strict=True):
            by_site[spec.site.name].append(unit)
        failures = Failures(self.ranks, shared=self.blueprint.disk_bytes > 0)
        return Engine(
            [
                Stop(index, site.name or "root", site.inner or index == 0, by_site[site.name])
                for index, site in enumerate(self.sites)
            ],
            ranks=self.ranks,
            device=self.device,
            gathering=Gathering(self.ranks, self.device, self._lane("fetch"), failures, partial(tiers.count, "device")),
            reduction=reduction,
            prefetch_units=self.plan.prefetch_units,
            defer_reduction=self.plan.stage == 1 and self.ranks.size > 1,
            cast_inputs=cast_inputs,
            failures=failures,
        )

    def _optimizer(self, optimizer: torch.optim.Optimizer, engine: Engine, tiers: Tiers) -> ShardedOptimizer:
        buffers = self.blueprint.buffers
        leased = tiers.pool(buffers.num_update, buffers.update_bytes)
        streams = [self._lane(f"stream-{index}") for index in range(2)]
        lanes = Lanes(self._lane("update"), self._lane("buffered"), streams)
        updates = Updates(engine, self.rules, lanes, self.threads, leased, buffers.depth)
        return ShardedOptimizer(optimizer, engine, updates, tiers, self.plan)

    def _attach(self, engine: Engine) -> Callable[[], None]:
        detaches = [hooks.attach(site.module, i, engine, is_root=i == 0) for i, site in enumerate(self.sites)]
        detaches += [handle.remove for handle in access.attach_state_dict(self.model, engine, self.rules)]

        def detach() -> None:
            for remove in detaches:
                remove()

        return detach

    def _lane(self, name: str) -> Lane:
        return Lane(name, self.device, inline=self.inline)
