"""The plan: what is decided before training, as one frozen value with a readable repr.

A `Plan` may leave fields open (None). `shard` closes every one of them at the edge (see `solve`), so nothing
below it ever sees an open field.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from unbounded.errors import PlanError
from unbounded.planner.sizes import format_bytes, parse_bytes
from unbounded.planner.spelling import find_closest

TIERS = ("device", "host", "disk")
NOWHERE = "none"  # of gradients: each is used up inside its backward
PRECISIONS = ("bf16", "fp16", "fp32")
FORMATS = ("exact", "compact")
ACTIVATIONS = ("auto", "keep", "recompute", "host")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
Placement = str | tuple[tuple[str, str], ...]

_SAID = ("predicted_seconds", "reasons")  # what a plan reports, not what it decides
_CHOICES: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "precision": PRECISIONS,
    "optimizer_format": FORMATS,
    "accumulate_dtype": PRECISIONS,
    "schedule": SCHEDULES,
}
# With gradients="none": what other fields may be, and why nothing else.
_WITHOUT_GRADIENTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("precision", (None, "bf16", "fp32"), "an overflow is known only after the backward, and skips the step"),
    ("pipeline", (1,), "the micro-batches of a pipeline are several backwards"),
    ("early_units", (None, 0), "all units are updated inside the backward already"),
)
_LEAST = {
    "prefetch_units": 0,
    "early_units": 0,
    "host_threads": 1,
    "loss_scale_window": 0,
    "loss_scale_hysteresis": 1,
    "tensor": 1,
    "context": 1,
    "pipeline": 1,
    "microbatches": 1,
}


@dataclass(frozen=True, repr=False)
class Plan:
    """What lives where and how a step runs. A field that is None has its default; if that is None, "auto" decides it.

    docs/reference/plan.md describes every field. With `disk_checksums`, everything that is read back from the disk tier
    is checked against the checksum of what was written, which takes a thousandth of the disk's bytes in host memory.
    So many `early_units` are updated inside the backward, their new weights at least, into other arrays in host memory;
    left None, on a GPU as many as the host has memory to spare for. `move_states` lets other states move between device
    and host once steps show what is left; left None, a plan with a `device_bytes` does. `pack_frozen` keeps frozen bf16
    weights that are not on the device in 12.25 bits each, without loss; left None, on a GPU where they would otherwise
    go to disk.
    With `gradients="none"` every unit is updated inside the backward and no gradient is stored, for loops with one
    backward per step and no clipping.
    """

    stage: int = 3
    precision: str | None = None
    weights: Placement | None = None
    gradients: Placement | None = None
    optimizer: Placement | None = None
    optimizer_format: str = "exact"
    activations: Placement | None = None
    compile: bool | str = False
    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None
    disk_path: tuple[str, ...] | None = None
    disk_checksums: bool = True
    prefetch_units: int = 2
    early_units: int | None = None
    move_states: bool | None = None
    pack_frozen: bool | None = None
    host_threads: int | None = None
    accumulate_dtype: str = "fp32"
    loss_scale: float = 2.0**16  # for fp16, at the start
    loss_scale_window: int = 2000  # steps without overflow until it doubles; 0: it never changes
    loss_scale_hysteresis: int = 1  # overflows until it halves
    loss_scale_minimum: float = 1.0
    watchdog_seconds: float = 60.0
    tensor: int = 1
    sequence: bool = False
    styles: tuple[tuple[str, str], ...] | None = None
    context: int = 1
    pipeline: int = 1
    schedule: str | None = None
    microbatches: int | None = None
    predicted_seconds: float | None = field(default=None, compare=False)  # of a step, if `unbounded.plan` knew it
    reasons: str = field(default="", compare=False)  # a table of bytes and times: why the plan is as it is

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is None:
                object.__setattr__(self, item.name, item.default)
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
            if not isinstance(self.disk_path, (tuple, list)) or not self.disk_path:
                raise PlanError(f"disk_path is {self.disk_path!r}. Give a folder, or a list of folders.")
            object.__setattr__(self, "disk_path", tuple(str(path) for path in self.disk_path))
        for name in ("disk_checksums", "move_states", "pack_frozen"):
            _check_choice(name, getattr(self, name), (True, False))
        for name, least in _LEAST.items():
            _check_count(name, getattr(self, name), least)
        for name in ("loss_scale", "loss_scale_minimum"):
            _check_positive(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))
        if not isinstance(self.compile, (bool, str)) or self.compile == "":
            raise PlanError(f"compile is {self.compile!r}. Choose True or False, or the name of a backend.")
        _check_positive("watchdog_seconds", self.watchdog_seconds, "number of seconds")
        self._check_axes()
        self._check_weights()
        self._check_gradients()

    def _check_axes(self) -> None:
        """The fields of the parallel axes, as far as they can be checked without a model."""
        if not isinstance(self.sequence, bool):
            raise PlanError(f"sequence is {self.sequence!r}. Choose True or False.")
        if self.styles is not None:
            object.__setattr__(self, "styles", _read_styles(self.styles))

    def _check_weights(self) -> None:
        if self.stage < 3 and self.offloads_weights:
            raise PlanError(
                f"stage {self.stage} keeps whole weights on every device, but the plan puts them on "
                f"{_show('weights', self.weights)}. Use stage 3 to keep weights elsewhere."
            )

    def _check_gradients(self) -> None:
        """Refuses what contradicts that no gradient is stored."""
        tiers = {tier for _, tier in self.gradients} if isinstance(self.gradients, tuple) else {self.gradients}
        if NOWHERE not in tiers:
            return
        if len(tiers) > 1:
            others = ", ".join(sorted(repr(tier) for tier in tiers - {NOWHERE}))
            raise PlanError(
                f'gradients are "none" for some units and {others} for others, but a step is clipped, skipped and '
                'accumulated as a whole. Give gradients="none" for all units, or for no unit.'
            )
        for name, allowed, why in _WITHOUT_GRADIENTS:
            value = getattr(self, name)
            if value not in allowed:
                raise PlanError(
                    f'gradients is "none", so units are updated inside the backward, but {name} is {value!r}: {why}. '
                    f'Use {name}={allowed[-1]!r}, or keep gradients: gradients="host".'
                )

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are stored between the backward and the step."""
        tiers = [tier for _, tier in self.gradients] if isinstance(self.gradients, tuple) else [self.gradients]
        return NOWHERE not in tiers

    @property
    def may_drop_gradients(self) -> bool:
        """Whether the other fields would go with gradients="none"."""
        return all(getattr(self, name) in allowed for name, allowed, _ in _WITHOUT_GRADIENTS)

    @property
    def lets_states_move(self) -> bool:
        """Whether states that the plan does not place may move while the model trains."""
        if self.optimizer is not None or self.gradients is not None:
            return False
        return self.device_bytes is not None if self.move_states is None else self.move_states

    @property
    def offloads_weights(self) -> bool:
        """Whether any unit's weights are to be off the device."""
        tiers = [tier for _, tier in self.weights] if isinstance(self.weights, tuple) else [self.weights]
        return not {*tiers} <= {None, "device"}

    @property
    def offloads_activations(self) -> bool:
        """Whether any block's activations go to the host."""
        policies = self.activations if isinstance(self.activations, tuple) else (("*", self.activations),)
        return any(policy == "host" for _, policy in policies)

    def __repr__(self) -> str:
        shown = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value == item.default or item.name in _SAID:
                continue
            shown.append(f"{item.name}={_show(item.name, value)}")
        return f"Plan({', '.join(shown)})"


def read_data_plan(plan: str | Plan | Mapping[str, Any], framework: str) -> Plan:
    """`plan` for a framework that gives every rank rows of its own."""
    read = read_plan(plan)
    for name in ("tensor", "pipeline", "context"):
        if (size := getattr(read, name)) > 1:
            raise PlanError(
                f"the plan has {name}={size}, but {framework} gives every rank other rows, and the ranks of such an "
                "axis must get the same ones. Use your own loop, or `unbounded train`, or leave it out of the plan."
            )
    return read


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
    known = [item.name for item in fields(Plan) if item.name not in _SAID]
    for key in plan:
        if key not in known:
            closest = find_closest(str(key), known)
            hint = f"Did you mean {closest!r}?" if closest else f"The keys are {', '.join(known)}."
            raise PlanError(f"the plan has no key {key!r}. {hint}")
    return Plan(**{key: value for key, value in plan.items() if value not in ("auto", None)})


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value is not None and (isinstance(value, bool) != isinstance(choices[0], bool) or value not in choices):
        shown = ", ".join(repr(choice) for choice in choices)
        meant = {str(choice): choice for choice in choices}
        closest = find_closest(str(value), meant)
        hint = f" Did you mean {meant[closest]!r}?" if closest else ""
        raise PlanError(f"{name} is {value!r}, but it must be one of {shown}.{hint}")


def _check_count(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{name} is {value!r}, but it must be a whole number of at least {least}.")


def _check_positive(name: str, value: Any, noun: str = "number") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise PlanError(f"{name} is {value!r}, but it must be a {noun} above 0 and at most {sys.float_info.max:g}.")


def read_activations(value: Any) -> Placement:
    """`value` as a policy for all blocks, or as (block pattern, policy) pairs."""
    return _read_pairs("activations", value, ACTIVATIONS, "policy", "block")


def _read_placement(name: str, value: Any) -> Placement | None:
    choices = (*TIERS, NOWHERE) if name == "gradients" else TIERS
    return None if value is None else _read_pairs(name, value, choices, "tier", "unit")


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


def _read_styles(value: Any) -> tuple[tuple[str, str], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (tuple, list)):
        raise PlanError(f"styles is {value!r}. Give pairs of (layer pattern, style).")
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise PlanError(f"styles has the entry {pair!r}. Give pairs of (layer pattern, style).")
    return tuple((pattern, style) for pattern, style in pairs)


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
