"""The units that a model will have: which parameters each holds, their layout, and how many bytes that takes.

Nothing here allocates or decides where a unit lives; `blueprint` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from unbounded.errors import PlanError
from unbounded.optim.book import RuleBook, check_trained
from unbounded.optim.granularity import Granularity
from unbounded.optim.rules import UpdateRule
from unbounded.planner.models.packed_size import packed_bytes
from unbounded.planner.unit_bytes import (
    UnitBytes,
    UnitPlace,
)
from unbounded.ranks.cut import Cut
from unbounded.tiers.tiers import disk_size
from unbounded.zero.factors import find_factors
from unbounded.zero.layout import ALIGN, WHOLE_ALIGN, Layout, deal_slots, lay_out
from unbounded.zero.members import Member
from unbounded.zero.setup.sites import Site, split_members


@dataclass(eq=False, kw_only=True)
class UnitShape:
    """What determines the bytes of a unit."""

    name: str
    dtype: torch.dtype
    trainable: bool
    layout: Layout
    rule: UpdateRule | None = None
    rule_if_trained: UpdateRule | None = None  # also of what is frozen and may be trained later
    homes: tuple[int, ...] = ()

    @property
    def needs_wholes(self) -> bool:
        return self.rule is not None and self.rule.granularity is Granularity.TENSOR

    def factor_bytes(self, stage: int) -> int:
        """The most that any rank keeps of states that do not have the parameters' shapes."""
        ranks = [None] if stage == 0 else range(self.layout.num_shards)
        held = [find_factors(self.layout, self.rule, self.homes, rank) for rank in ranks]
        return max((factors[-1].stop * 4 for factors in held if factors), default=0)

    def owned_numel(self, stage: int) -> int:
        return self.layout.numel if stage == 0 else self.layout.shard_numel

    def sizes(self, stage: int, sum_dtype: torch.dtype) -> UnitBytes:
        owned = self.owned_numel(stage)
        weights = (self.layout.shard_numel if stage == 3 else self.layout.numel) * self.dtype.itemsize
        summed = owned * max(sum_dtype.itemsize, self.dtype.itemsize)
        if self.rule is None:  # it may have gradients, for which room is only set aside on the disk
            sums = summed if self.trainable else 0
            return UnitBytes(self.name, weights, 0, 0, summed_gradients=sums, packed=self._packed_bytes(stage))
        states = {spec.name: spec.numel(owned) * spec.dtype.itemsize for spec in self.rule.specs}
        remainder = states.pop("remainder", 0)
        deferred = self.layout.numel * self.dtype.itemsize if stage == 1 and owned < self.layout.numel else 0
        return UnitBytes(
            self.name,
            weights,
            owned * self.dtype.itemsize,
            sum(states.values()) + self.factor_bytes(stage),
            remainder=remainder,
            summed_gradients=summed,
            deferred=deferred,
            owned=owned * self.dtype.itemsize,
        )

    def _packed_bytes(self, stage: int) -> int:
        """What frozen weights take outside the device if they are packed; 0 if that would not be less."""
        numel = self.layout.shard_numel
        packed = packed_bytes(numel) if stage == 3 and self.dtype == torch.bfloat16 and not self.trainable else 0
        return packed if packed < numel * self.dtype.itemsize else 0

    def disk_bytes(self, where: UnitPlace, sizes: UnitBytes, stage: int) -> int:
        """What the unit takes of the disk store, each array rounded up as the store does."""
        owned, arrays = self.owned_numel(stage), []
        if where.weights == "disk" and sizes.weights:
            arrays.append(sizes.size("weights", "disk"))
        if self.rule is not None:
            for spec in self.rule.specs:
                if (where.remainder if spec.name == "remainder" else where.optimizer) == "disk":
                    arrays.append(spec.numel(owned) * spec.dtype.itemsize)
        if self.trainable and where.gradients == "disk":
            arrays.append(sizes.size("gradients", "disk"))
        return sum(disk_size(num_bytes) for num_bytes in arrays)


@dataclass(eq=False, kw_only=True)
class UnitSpec(UnitShape):
    """One unit before it runs, with its modules and parameters."""

    site: Site
    members: list[Member]

    def shape(self) -> UnitShape:
        """The same, for code that must not keep the model alive."""
        return UnitShape(name=self.name, dtype=self.dtype, trainable=self.trainable, layout=self.layout, rule=self.rule)


@dataclass(frozen=True)
class Holdings:
    """What a rank holds of parameters that other axes cut or repeat, by the parameter's id."""

    cuts: Mapping[int, Cut] = field(default_factory=dict)
    uncounted: frozenset[int] = frozenset()  # another rank counts them in sums over the whole model


def find_specs(
    sites: Sequence[Site],
    groups: Mapping[int, int],
    num_shards: int,
    lowered: torch.dtype | None,
    holdings: Holdings | None = None,
    book: RuleBook | None = None,
) -> list[UnitSpec]:
    """The units of the sites, in order; `lowered` is the dtype that the plan wants for float parameters.

    With `book` they have their rules. Parameters of different optimizers are in different units.
    """
    held = holdings or Holdings()
    found: list[UnitSpec] = []
    for site in sites:
        kinds = list(split_members(site, lambda member: _optimizer_of(member, groups, book)))
        for kind in kinds:
            spec = _spec(site, kind, groups, num_shards, lowered, held, book, is_only=len(kinds) == 1)
            spec.homes = deal_slots(spec.layout, len(found))
            found.append(spec)
    return found


def _optimizer_of(member: Member, groups: Mapping[int, int], book: RuleBook | None) -> int:
    return -1 if book is None else book.member_of(_group_of(member, groups))


def _group_of(member: Member, groups: Mapping[int, int]) -> int:
    return groups.get(id(member.parameter if member.whole is None else member.whole), -1)


def _spec(
    site: Site,
    kind: tuple[torch.dtype, bool, int, list[Member]],
    groups: Mapping[int, int],
    num_shards: int,
    lowered: torch.dtype | None,
    held: Holdings,
    book: RuleBook | None,
    *,
    is_only: bool,
) -> UnitSpec:
    dtype, trainable, optimizer, members = kind
    entries = [(m.names[0], tuple(m.parameter.shape), _group_of(m, groups)) for m in members]
    name = site.name or "root"
    if not is_only:
        labels = [str(dtype).removeprefix("torch."), *([] if trainable else ["frozen"])]
        if book is not None and book.num_members > 1 and optimizer >= 0:
            labels.append(book.kind(optimizer))
        name += f"[{', '.join(labels)}]"
    target = lowered if lowered is not None and dtype.is_floating_point else dtype
    cuts = {m.names[0]: held.cuts[id(m.parameter)] for m in members if id(m.parameter) in held.cuts}
    uncounted = frozenset(m.names[0] for m in members if id(m.parameter) in held.uncounted)
    if trainable and (not target.is_complex or any(group >= 0 for _, _, group in entries)):
        check_trained(target)  # complex ones may have gradients, if nobody updates them
    rule = None
    if book is not None:
        with contextlib.nullcontext() if trainable else contextlib.suppress(PlanError):
            given = [shape for _, shape, group in entries if group >= 0]  # which may be frozen
            rule = book.rule(optimizer, target, given or [shape for _, shape, _ in entries])
    needs_wholes = trainable and rule is not None and rule.granularity is Granularity.TENSOR
    if needs_wholes:
        _refuse_parts(members, cuts, book.kind(optimizer) if book is not None else "")
    laid = lay_out(entries, num_shards, cuts, uncounted, WHOLE_ALIGN if needs_wholes else ALIGN)
    return UnitSpec(
        name=name,
        dtype=target,
        trainable=trainable,
        layout=_with_wholes(laid, members),
        rule=rule if trainable else None,
        rule_if_trained=rule,
        site=site,
        members=members,
    )


def _refuse_parts(members: Sequence[Member], cuts: Mapping[str, Cut], kind: str) -> None:
    """Raises if no rank of the data axis has a parameter whole."""
    for member in members:
        name = member.names[0]
        if name in cuts or member.whole is not None:
            how = "cuts it over the tensor axis" if name in cuts else "runs it in tiles"
            remedy = "Use tensor=1" if name in cuts else "Use more device memory instead of tiles"
            raise PlanError(
                f"{kind} needs the parameter {name!r} whole for its update, but the plan {how}. {remedy}, or give "
                "this parameter to an elementwise optimizer such as AdamW: shard(model, [one, other])."
            )


def _with_wholes(layout: Layout, members: Sequence[Member]) -> Layout:
    """The layout with the whole parameters of tiles."""
    wholes = {m.names[0]: (m.first, tuple(m.whole.shape)) for m in members if m.whole is not None}
    slots = (
        replace(slot, first=wholes[slot.name][0], whole=wholes[slot.name][1]) if slot.name in wholes else slot
        for slot in layout.slots
    )
    return replace(layout, slots=tuple(slots))
