"""The plan: what is decided before training, as one frozen value with a readable repr.

A `Plan` may leave fields open (None); `shard` closes every one of them at the edge (see `placement`), so that
nothing below it ever meets an open field.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from unbounded.errors import PlanError
from unbounded.planner.sizes import format_bytes, parse_bytes

TIERS = ("device", "host", "disk")
PRECISIONS = ("bf16", "fp16", "fp32")
FORMATS = ("exact", "compact")
ACTIVATIONS = ("auto", "keep", "recompute", "host")
Placement = str | tuple[tuple[str, str], ...]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "precision": PRECISIONS,
    "optimizer_format": FORMATS,
    "accumulate_dtype": PRECISIONS,
}


@dataclass(frozen=True, repr=False)
class Plan:
    """What lives where and how a step runs. A field left None is decided by "auto"."""

    stage: int = 3
    precision: str | None = None
    weights: Placement | None = None
    gradients: Placement | None = None
    optimizer: Placement | None = None
    optimizer_format: str = "exact"
    activations: Placement | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    disk_path: tuple[str, ...] | None = None
    prefetch_units: int = 2
    host_threads: int | None = None
    accumulate_dtype: str = "fp32"
    tensor: int = 1
    pipeline: int = 1
    schedule: str | None = None
    microbatches: int | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in ("weights", "gradients", "optimizer"):
            object.__setattr__(self, name, _read_placement(name, getattr(self, name)))
        if self.activations is not None:
            object.__setattr__(self, "activations", read_activations(self.activations))
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else parse_bytes(value, name))
        if isinstance(self.disk_path, str) or hasattr(self.disk_path, "__fspath__"):
            object.__setattr__(self, "disk_path", (str(self.disk_path),))
        elif self.disk_path is not None:
            object.__setattr__(self, "disk_path", tuple(str(path) for path in self.disk_path))
        for name, least in (("prefetch_units", 0), ("host_threads", 1), ("tensor", 1), ("pipeline", 1)):
            _check_count(name, getattr(self, name), least)
        for name, plain in (
            ("tensor", 1),
            ("pipeline", 1),
            ("schedule", None),
            ("microbatches", None),
        ):
            if getattr(self, name) != plain:
                raise PlanError(f"{name}={getattr(self, name)!r} is not available yet. Leave it at {plain}.")

    @property
    def offloads_activations(self) -> bool:
        """Whether any block's activations go to the host."""
        policies = self.activations if isinstance(self.activations, tuple) else (("*", self.activations),)
        return any(policy == "host" for _, policy in policies)

    def __repr__(self) -> str:
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            shown.append(f"{field.name}={_show(field.name, value)}")
        return f"Plan({', '.join(shown)})"


def read_plan(plan: str | Plan | Mapping[str, Any]) -> Plan:
    """`plan` as a Plan: "auto", a Plan, or a dict of its fields (an unknown key is an error with a suggestion)."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, str):
        if plan != "auto":
            raise PlanError(f'plan is {plan!r}. Give "auto", a Plan, or a dict of its fields.')
        return Plan()
    if not isinstance(plan, Mapping):
        raise PlanError(f'plan is a {type(plan).__name__}. Give "auto", a Plan, or a dict of its fields.')
    known = [field.name for field in fields(Plan)]
    for key in plan:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"The keys are {', '.join(known)}."
            raise PlanError(f"the plan has no key {key!r}. {hint}")
    return Plan(**{key: value for key, value in plan.items() if value not in ("auto", None)})


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value is not None and (isinstance(value, bool) or value not in choices):
        shown = ", ".join(repr(choice) for choice in choices)
        close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PlanError(f"{name} is {value!r}, but it must be one of {shown}.{hint}")


def _check_count(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{name} is {value!r}, but it must be a whole number of at least {least}.")


def read_activations(value: Any) -> Placement:
    """`value` as a policy for all blocks, or as (block pattern, policy) pairs."""
    return _read_pairs("activations", value, ACTIVATIONS, "policy", "block")


def _read_placement(name: str, value: Any) -> Placement | None:
    return None if value is None else _read_pairs(name, value, TIERS, "tier", "unit")


def _read_pairs(name: str, value: Any, choices: tuple[str, ...], noun: str, of: str) -> Placement:
    if isinstance(value, str):
        _check_choice(name, value, choices)
        return value
    if not isinstance(value, (tuple, list)):
        raise PlanError(f"{name} is {value!r}. Give a {noun}, or pairs of ({of} pattern, {noun}).")
    pairs = []
    for pair in value:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise PlanError(f"{name} has the entry {pair!r}. Give a {noun}, or pairs of ({of} pattern, {noun}).")
        _check_choice(f"the {noun} of {pair[0]!r} in {name}", pair[1], choices)
        pairs.append((str(pair[0]), str(pair[1])))
    return tuple(pairs)


def _show(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f'"{format_bytes(value)}"'
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        counts: dict[str, int] = {}
        for _, tier in value:
            counts[tier] = counts.get(tier, 0) + 1
        noun = "blocks" if name == "activations" else "units"
        return "{" + ", ".join(f"{tier}: {count} {noun}" for tier, count in counts.items()) + "}"
    return repr(value)
