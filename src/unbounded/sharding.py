"""The front door: a model, an optimizer and a plan become a running engine.

`shard` resolves every open choice here, checks what it was given before it touches anything, and leaves the
user's objects in place: the same module with removable hooks, the same Parameter objects, the same param groups.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from unbounded.errors import BudgetError, PlanError, StateError
from unbounded.native import kernels
from unbounded.native.memory import available_bytes
from unbounded.optim.rules import NativeRule, UpdateRule, read_rule
from unbounded.planner.placement import Budget, UnitBytes, UnitPlace, check_patterns, place
from unbounded.planner.plan import Plan, read_plan
from unbounded.planner.streaming import choose_streamed, streamed_part
from unbounded.tiers.lane import Lane
from unbounded.tiers.memory import Tiers, disk_size
from unbounded.zero import access, hooks
from unbounded.zero.collectives import Ranks
from unbounded.zero.engine import Engine, Stop
from unbounded.zero.gradient import Gradient
from unbounded.zero.initial import Installer, MetaModel, install_model
from unbounded.zero.layout import lay_out
from unbounded.zero.optimizer import ShardedOptimizer
from unbounded.zero.parameter import ManagedParameter
from unbounded.zero.reduction import Reduction
from unbounded.zero.unit import Unit
from unbounded.zero.units import Member, Site, find_members, find_sites, split_members
from unbounded.zero.update import LEAST_PIECE, PIECE_NUMEL
from unbounded.zero.updates import DEPTH, Updates

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Of a device's budget, kept for activations, and at most so much.
ACTIVATION_PART, ACTIVATION_BYTES = 0.6, 24 * 2**30
# Pieces of an update pass in flight: those ahead and those behind.
PIECES_IN_FLIGHT = 2 * DEPTH
BOUNCE_BUFFERS = 4


@dataclass(eq=False)
class Sharded:
    """Everything that runs behind one sharded model."""

    engine: Engine
    rules: Mapping[torch.dtype, UpdateRule]
    tiers: Tiers
    plan: Plan
    optimizer: ShardedOptimizer | None
    detach: Callable[[], None]


_sharded: weakref.WeakKeyDictionary[nn.Module, Sharded] = weakref.WeakKeyDictionary()


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    plan: str | Plan | Mapping[str, Any] = "auto",
    *,
    weights: str | os.PathLike[str] | None = None,
) -> tuple[nn.Module, ShardedOptimizer]:
    """All ranks must call this. Places the states of `model` and `optimizer` and returns them ready to train.

    The model is changed in place and returned; the optimizer returned is a `torch.optim.Optimizer` over the same
    param groups. `plan` is "auto", a `Plan`, or a dict of its fields. `weights` is a folder of safetensors that
    is streamed into a model on the meta device.
    """
    ranks = Ranks()
    members = _check_model(model)
    open_plan = read_plan(plan)
    groups = _check_optimizer(optimizer, members)
    device = _compute_device(members)
    ranks.check_same(
        "\n".join(f"{m.names} {tuple(m.parameter.shape)} {m.parameter.requires_grad}" for m in members), "model"
    )
    ranks.check_same(repr(open_plan), "plan")
    return _Builder(model, optimizer, open_plan, ranks, device, groups).build(weights)


def sharded(model: nn.Module) -> Sharded:
    """What runs behind a sharded model."""
    try:
        return _sharded[model]
    except KeyError:
        raise StateError("this model is not sharded. Call unbounded.shard(model, optimizer) first.") from None


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """All ranks must enter this. Inside, every parameter holds its full value; what is written to it is kept."""
    state = sharded(model)
    if state.optimizer is not None:
        state.optimizer.wait()
    with torch.no_grad(), access.full_values(state.engine, state.rules):
        yield


class _Builder:
    """The steps of `shard`, in order."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan,
        ranks: Ranks,
        device: torch.device,
        groups: Mapping[int, int],
    ) -> None:
        self.model, self.optimizer, self.ranks, self.device, self.groups = model, optimizer, ranks, device, groups
        self.sites = find_sites(model)
        precision = plan.precision or _common_precision(model)
        self.plan = replace(plan, precision=precision)
        self.lowered = DTYPES[precision] if plan.precision is not None else None
        self.rules: dict[torch.dtype, UpdateRule] = {}
        is_meta = any(parameter.is_meta for parameter in model.parameters())
        self.meta = MetaModel(model, device) if is_meta else None

    def build(self, weights: str | os.PathLike[str] | None) -> tuple[nn.Module, ShardedOptimizer]:
        if self.meta is not None and weights is None:
            self.meta.check()
        kinds = [(site, *kind) for site in self.sites for kind in split_members(site)]
        specs = [self._spec(site, dtype, trainable, members) for site, dtype, trainable, members in kinds]
        for spec in specs:
            if spec.trainable and self.optimizer is not None and spec.dtype not in self.rules:
                self.rules[spec.dtype] = read_rule(self.optimizer, spec.dtype, self.plan.optimizer_format)
        places, disk_bytes = self._place(specs)
        threads = self.plan.host_threads or max(1, (os.cpu_count() or 1) // self._local_size())
        tiers = Tiers(
            self.device,
            budgets={"device": self.plan.device_bytes, "host": self.plan.host_bytes, "disk": self.plan.disk_bytes},
            disk_bytes=disk_bytes,
            disk_path=self.plan.disk_path,
            num_threads=threads,
        )
        self.bounce = tiers.pool(BOUNCE_BUFFERS, self.piece_numel * 4)
        streamed = self._choose_streamed(places, threads)
        units = [self._unit(spec, tier) for spec, tier in zip(specs, places, strict=True)]
        for unit, chosen in zip(units, streamed, strict=True):
            unit.streamed = chosen
        self._install(specs, units, places, tiers, weights)
        engine = self._engine(specs, units, tiers)
        optimizer = self._optimizer(engine, tiers, threads)
        detaches = [
            hooks.attach(site.module, index, engine, is_root=index == 0) for index, site in enumerate(self.sites)
        ]
        detaches += [handle.remove for handle in access.attach_state_dict(self.model, engine, self.rules)]

        def detach() -> None:
            for remove in detaches:
                remove()

        _sharded[self.model] = Sharded(engine, self.rules, tiers, self.plan, optimizer, detach)
        return self.model, optimizer  # type: ignore[return-value]

    # -- what ------------------------------------------------------------------------------------------------------

    def _spec(self, site: Site, dtype: torch.dtype, trainable: bool, members: list[Member]) -> _Spec:
        target = self.lowered if self.lowered is not None and dtype.is_floating_point else dtype
        entries = [(m.names[0], tuple(m.parameter.shape), self.groups.get(id(m.parameter), -1)) for m in members]
        layout = lay_out(entries, self.ranks.size)
        kinds = {(kind, flag) for kind, flag, _ in split_members(site)}
        name = site.name or "root"
        if len(kinds) > 1:
            name += f"[{str(dtype).removeprefix('torch.')}{'' if trainable else ', frozen'}]"
        return _Spec(site, name, target, trainable, members, layout)

    def _choose_streamed(self, places: Sequence[UnitPlace], threads: int) -> list[bool]:
        candidates = [self.device.type == "cuda" and where.optimizer == "host" for where in places]
        native = all(isinstance(rule, NativeRule) for rule in self.rules.values())
        return choose_streamed(candidates, streamed_part(threads) if native else 0.0)

    def _unit(self, spec: _Spec, where: UnitPlace) -> Unit:
        unit = Unit(spec.name, spec.members, spec.layout, dtype=spec.dtype, device=self.device)
        partitioned = self.ranks.size > 1
        if partitioned and self.plan.stage > 0 and (spec.trainable or self.plan.stage == 3):
            unit.owned = spec.layout.shard_range(self.ranks.rank)
        unit.resident = where.weights == "device" and (not partitioned or self.plan.stage < 3)
        unit.gradient = Gradient(
            where.gradients, unit.owned[1] - unit.owned[0], spec.dtype, DTYPES[self.plan.accumulate_dtype]
        )
        return unit

    # -- where -----------------------------------------------------------------------------------------------------

    def _place(self, specs: list[_Spec]) -> tuple[tuple[UnitPlace, ...], int]:
        plan, size = self.plan, self.ranks.size
        if plan.stage < 3 and size > 1 and (plan.weights not in (None, "device")):
            raise PlanError(
                f"stage {plan.stage} keeps whole weights on every device, but the plan puts them on {plan.weights!r}. "
                "Use stage 3 to keep weights elsewhere."
            )
        names, sum_dtype = [spec.name for spec in specs], DTYPES[plan.accumulate_dtype]
        for kind in ("weights", "gradients", "optimizer"):
            check_patterns(getattr(plan, kind), kind, names)
        sizes = [spec.sizes(self.rules.get(spec.dtype), plan.stage, size, sum_dtype) for spec in specs]
        ring = (plan.prefetch_units + 2) * max((spec.layout.numel * spec.dtype.itemsize for spec in specs), default=0)
        budget = self._budget(ring)
        places = _place_within(sizes, budget, plan, ring)
        self.ranks.check_same(repr(places), "placement")
        disk_bytes = 0
        for spec, unit_bytes, where in zip(specs, sizes, places, strict=True):
            disk_bytes += disk_size(unit_bytes.weights) if where.weights == "disk" else 0
            if where.optimizer == "disk" and spec.trainable and spec.dtype in self.rules:
                owned = spec.owned_numel(plan.stage, size)
                states = [s for s in self.rules[spec.dtype].specs if s.name != "low"]
                disk_bytes += sum(disk_size(s.numel(owned) * s.dtype.itemsize) for s in states)
            disk_bytes += (
                disk_size(unit_bytes.completion) if where.completion == "disk" and unit_bytes.completion else 0
            )
            disk_bytes += disk_size(unit_bytes.size("gradients", "disk")) if where.gradients == "disk" else 0
        named = {
            kind: tuple((name, getattr(where, kind)) for name, where in zip(names, places, strict=True))
            for kind in ("weights", "gradients", "optimizer")
        }
        self.plan = replace(
            plan,
            device_bytes=budget.device,
            host_bytes=budget.host,
            disk_bytes=budget.disk,
            **named,  # type: ignore[arg-type]
        )
        return places, disk_bytes

    def _budget(self, ring: int) -> Budget:
        """The budgets of this rank: what the plan says, else its share of what is free."""
        plan, share = self.plan, self._local_size()
        free = int(available_bytes() * 0.9) // share
        if self.device.type == "cuda":
            device = plan.device_bytes if plan.device_bytes is not None else torch.cuda.mem_get_info(self.device)[0]
            activations = min(int(device * ACTIVATION_PART), ACTIVATION_BYTES)
        else:
            device = plan.device_bytes if plan.device_bytes is not None else free * 2 // 3
            free -= min(device, free)
            # With a budget of one's own, "device" memory on a CPU is what the states may take.
            activations = 0 if plan.device_bytes is not None else device // 4
        host = plan.host_bytes if plan.host_bytes is not None else free
        disk = plan.disk_bytes if plan.disk_bytes is not None else _free_disk(plan.disk_path) // share
        needs_ring = ring if plan.weights != "device" else 0
        values = [device, host, disk]
        device, host, disk = (min(column) for column in zip(*self.ranks.objects(values), strict=True))
        self.piece_numel = self._piece(host)
        reserve = (self._update_buffers() + BOUNCE_BUFFERS) * self.piece_numel * 4
        return Budget(device, host, disk, min(activations + needs_ring, device * 3 // 4), min(reserve, host // 2))

    def _piece(self, host: int) -> int:
        """Elements of a piece, so that the buffers of all lanes take a quarter of the host's budget at most."""
        numel = PIECE_NUMEL
        while numel > LEAST_PIECE and (self._update_buffers() + BOUNCE_BUFFERS) * numel * 4 > host // 4:
            numel //= 2
        return numel

    def _update_buffers(self) -> int:
        return PIECES_IN_FLIGHT * (2 + max((len(rule.specs) for rule in self.rules.values()), default=0))

    def _local_size(self) -> int:
        return min(self.ranks.size, int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.size)))

    # -- how -------------------------------------------------------------------------------------------------------

    def _install(
        self,
        specs: list[_Spec],
        units: list[Unit],
        places: tuple[UnitPlace, ...],
        tiers: Tiers,
        weights: str | os.PathLike[str] | None,
    ) -> None:
        entries = [
            (unit, spec.members, {"weights": where.weights, "optimizer": where.optimizer, "low": where.completion})
            for unit, spec, where in zip(units, specs, places, strict=True)
        ]
        installer = Installer(tiers, self.ranks, self.bounce, self.rules)
        if weights is not None:
            from unbounded.checkpoint.pretrained import install_weights

            install_weights(self.model, entries, installer, weights, self.device)
        elif self.meta is not None:
            self.meta.install(entries, installer)
        else:
            state = self.optimizer.state if self.optimizer is not None else {}
            install_model(entries, installer, (lambda p: state.pop(p, {})) if state else None)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device:
                    module._buffers[name] = buffer.to(self.device)

    def _engine(self, specs: list[_Spec], units: list[Unit], tiers: Tiers) -> Engine:
        inline = os.environ.get("UNBOUNDED_OVERLAP", "1") == "0"
        reduce_lane = Lane("reduce", self.device, inline=inline)
        self.ranks.open_words()
        bounce = self.bounce
        reduction = Reduction(self.ranks.lane(), reduce_lane, bounce, replicate=self.plan.stage == 0)
        for tier in ("device", "host", "disk"):
            reduction.allocate[tier] = _allocator(tiers, tier, bounce)
        by_site: dict[str, list[Unit]] = {site.name: [] for site in self.sites}
        for spec, unit in zip(specs, units, strict=True):
            by_site[spec.site.name].append(unit)
        stops = [
            Stop(i, site.name or "root", site.inner or i == 0, by_site[site.name]) for i, site in enumerate(self.sites)
        ]
        return Engine(
            stops,
            ranks=self.ranks,
            device=self.device,
            fetch_lane=Lane("fetch", self.device, inline=inline),
            reduction=reduction,
            prefetch_units=self.plan.prefetch_units,
            defer_reduction=self.plan.stage == 1 and self.ranks.size > 1,
            cast_inputs=self.lowered if self.lowered != torch.float32 else None,
            count_bytes=partial(tiers.count, "device"),
        )

    def _optimizer(self, engine: Engine, tiers: Tiers, threads: int) -> ShardedOptimizer | None:
        if self.optimizer is None:
            return None
        inline = os.environ.get("UNBOUNDED_OVERLAP", "1") == "0"
        lane = Lane("update", self.device, inline=inline)
        streams = [Lane(f"stream-{index}", self.device, inline=inline) for index in range(2)]
        pool = tiers.pool(self._update_buffers(), self.piece_numel * 4)
        updates = Updates(engine, self.rules, lane, streams, kernels.Pool(threads), pool)
        return ShardedOptimizer(self.optimizer, engine, updates, tiers, self.plan)


@dataclass(eq=False)
class _Spec:
    """One unit before it runs."""

    site: Site
    name: str
    dtype: torch.dtype
    trainable: bool
    members: list[Member]
    layout: Any

    def owned_numel(self, stage: int, size: int) -> int:
        return self.layout.numel if stage == 0 else self.layout.shard_numel

    def sizes(self, rule: UpdateRule | None, stage: int, size: int, sum_dtype: torch.dtype) -> UnitBytes:
        owned = self.owned_numel(stage, size)
        weights = (self.layout.shard_numel if stage == 3 else self.layout.numel) * self.dtype.itemsize
        if not self.trainable or rule is None:
            return UnitBytes(self.name, weights, 0, 0)
        states = {spec.name: spec.numel(owned) * spec.dtype.itemsize for spec in rule.specs}
        low = states.pop("low", 0)
        summed = owned * max(sum_dtype.itemsize, self.dtype.itemsize)
        return UnitBytes(self.name, weights, owned * self.dtype.itemsize, sum(states.values()), low, summed)


def _place_within(sizes: list[UnitBytes], budget: Budget, plan: Plan, ring: int) -> tuple[UnitPlace, ...]:
    """The placement with the room for activations wished for; with less of it where it would not fit otherwise."""
    for part in (2, 4):
        try:
            return place(sizes, budget, plan)
        except BudgetError:
            budget = replace(budget, device_reserve=min(budget.device_reserve, ring + budget.device_reserve // part))
    return place(sizes, budget, plan)


def _allocator(tiers: Tiers, tier: str, bounce: Any) -> Any:
    return lambda dtype, numel: tiers.allocate(tier, dtype, numel, bounce)


def _check_model(model: nn.Module) -> list[Member]:
    if not isinstance(model, nn.Module):
        raise PlanError(f"shard was given a {type(model).__name__} as the model. Give an nn.Module.")
    members = find_members(model)
    managed = [member.names[0] for member in members if isinstance(member.parameter, ManagedParameter)]
    if model in _sharded or managed:
        whose = f" (its parameter {managed[0]!r})" if managed else ""
        raise PlanError(f"this model is already sharded{whose}. Call shard once, and keep the model it returns.")
    first: dict[str, str] = {}
    for member in members:
        first.setdefault(str(member.parameter.device), member.names[0])
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise PlanError(
            f"the model's parameters are on different devices: {places}. Move the whole model to one of them first."
        )
    return members


def _check_optimizer(optimizer: torch.optim.Optimizer | None, members: list[Member]) -> dict[int, int]:
    """The group of every parameter the optimizer trains, by the parameter's id."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(f"shard was given a {type(optimizer).__name__} as the optimizer. Give a torch.optim optimizer.")
    if isinstance(optimizer, ShardedOptimizer):
        raise PlanError("this optimizer is already sharded. Give the torch.optim optimizer it was made from.")
    names = {id(member.parameter): member.names[0] for member in members}
    groups: dict[int, int] = {}
    foreign = 0
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in groups:
                raise PlanError(
                    f"the optimizer has the parameter {names.get(id(parameter))!r} twice. List it in one group."
                )
            if parameter.numel() == 0:
                continue
            foreign += id(parameter) not in names
            groups[id(parameter)] = index
    if foreign:
        raise PlanError(
            f"the optimizer has {foreign} parameters that the model does not. "
            "Make it from model.parameters() of this model."
        )
    missing = [m.names[0] for m in members if m.parameter.requires_grad and id(m.parameter) not in groups]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise PlanError(f"the optimizer misses the trainable parameters {shown}. Give them to it, or freeze them.")
    return groups


def _compute_device(members: list[Member]) -> torch.device:
    device = members[0].parameter.device if members else torch.device("cpu")
    if device.type == "cuda":
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    if device.type not in ("cpu", "meta"):
        raise PlanError(f"the model is on {device}, which is not supported. Use CPU, CUDA or the meta device.")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _common_precision(model: nn.Module) -> str:
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    names = {dtype: name for name, dtype in DTYPES.items()}
    known = [dtype for dtype in counts if dtype in names]
    return names[max(known, key=lambda dtype: counts[dtype])] if known else "fp32"


def _free_disk(paths: tuple[str, ...] | None) -> int:
    import shutil
    import tempfile

    try:
        return sum(int(shutil.disk_usage(path).free * 0.95) for path in paths or (tempfile.gettempdir(),))
    except OSError:
        return 2**62  # a path that cannot be read is reported by the store, with its reason
