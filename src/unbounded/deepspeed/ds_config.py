"""Reads DeepSpeed's configuration as a plan, batch sizes, an optimizer and a scheduler, with a report of every key.

A key is honoured, or has no meaning here (the report says why), or is refused because ignoring it would change the
results, or is unknown (the error suggests the right key). `"auto"` leaves a value open.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from unbounded.deepspeed.config_values import ConfigValues
from unbounded.deepspeed.keys import CHANGES_TRAINING, KEYS, READ, Table
from unbounded.errors import PlanError
from unbounded.launcher import read_numbers
from unbounded.paths import expand_home
from unbounded.planner.plan import Plan

_TIERS = {"none": "device", "cpu": "host", "nvme": "disk"}
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration asks for. None if it says "auto" or nothing."""

    plan: Plan
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    clipping: float | None = None
    optimizer: tuple[str, Mapping[str, Any]] | None = None
    scheduler: tuple[str, Mapping[str, Any]] | None = None
    steps_per_print: int | None = None
    offloads_checkpoints: bool = False
    drops_last: bool = False
    skips_nonfinite: bool = False  # steps in bf16 whose gradients are not finite; fp16 skips them in any case
    left_open: tuple[str, ...] = ()  # keys that are "auto" and have a meaning here
    honoured: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)

    @property
    def report(self) -> str:
        """What was honoured and what has no meaning here, and why, for a person to read."""
        lines = [f"honoured: {', '.join(self.honoured) or 'nothing'}"]
        reasons: dict[str, list[str]] = {}
        for key, reason in self.ignored.items():
            reasons.setdefault(reason, []).append(key)
        lines += [f"no meaning here: {', '.join(keys)} ({reason})" for reason, keys in reasons.items()]
        return "\n".join([*lines, f"plan: {self.plan}"])


Given = str | os.PathLike[str] | Mapping[str, Any]


def plan_from_config(config: Given, *, report: Callable[[str], Any] | None = print) -> Plan:
    """The plan that a DeepSpeed configuration (a dict or the path of its JSON) asks for; `report` lists each key.

    Batch sizes, clipping, optimizer and scheduler are not part of a plan: `initialize` honours them.
    """
    found = read_config(config)
    if report is not None and read_numbers(os.environ).rank == 0:
        report(found.report)
    return found.plan


def read_config(config: Given) -> DeepSpeedConfig:
    """Everything that a DeepSpeed configuration asks for, checked; unknown keys are an error that names them all."""
    given = config if isinstance(config, Mapping) else _load(config)
    entries = dict(_walk(given, KEYS, ""))
    _refuse_unknown([key for key, (_, verdict) in entries.items() if verdict is None])
    values = ConfigValues({key: value for key, (value, verdict) in entries.items() if verdict == READ})
    _refuse_changes(given)
    plan = _plan(values)
    checks = values.flag("bf16.check_grad_overflow") if "bf16.check_grad_overflow" in values else True
    return DeepSpeedConfig(
        plan=plan,
        train_batch_size=values.count("train_batch_size"),
        micro_batch_size=values.count("train_micro_batch_size_per_gpu"),
        accumulation_steps=values.count("gradient_accumulation_steps"),
        clipping=values.number("gradient_clipping") or None,
        optimizer=_typed(given, "optimizer"),
        scheduler=_typed(given, "scheduler"),
        steps_per_print=_steps_per_print(values),
        offloads_checkpoints=values.flag("activation_checkpointing.cpu_checkpointing"),
        drops_last=values.flag("dataloader_drop_last"),
        skips_nonfinite=checks and plan.precision == "bf16",
        left_open=tuple(_left_open(entries)),
        honoured=values.names(),
        ignored={key: verdict for key, (_, verdict) in entries.items() if verdict},
    )


def _load(path: Any) -> Mapping[str, Any]:
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(f"the DeepSpeed config is a {type(path).__name__}. Give a dict or the path of a JSON file.")
    try:
        found = json.loads(expand_home(path).read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise PlanError(f"the DeepSpeed config {path} cannot be read: {error.strerror}. Check the path.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"the DeepSpeed config {path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise PlanError(f"the DeepSpeed config {path} is a {type(found).__name__}. It must be a JSON object.")
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    doubles = sorted({key for key in keys if keys.count(key) > 1})
    if doubles:
        raise PlanError(f"the DeepSpeed config has {', '.join(doubles)} twice. Keep one of each.")
    return dict(pairs)


def _walk(given: Mapping[str, Any], table: Table, prefix: str) -> Iterator[tuple[str, tuple[Any, str | None]]]:
    """Every key by its full name, with its value and what the table says; None for one that is unknown."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        if not prefix and key in CHANGES_TRAINING:
            continue
        if key not in table:
            yield name, (value, None)
            continue
        verdict = table[key]
        if verdict is None:  # its keys are those of an optimizer or a scheduler, which checks them
            yield name, (value, READ)
        elif isinstance(verdict, str):
            yield name, (value, verdict)
        elif isinstance(value, Mapping):
            yield from _walk(value, verdict, f"{name}.")
        elif value not in (None, False, "auto"):
            raise PlanError(f"{name} is {value!r}, but it must be an object with the keys {', '.join(verdict)}.")


def _left_open(entries: Mapping[str, tuple[Any, str | None]]) -> Iterator[str]:
    for name, (value, verdict) in entries.items():
        if verdict == READ and value == "auto":
            yield name
        elif verdict == READ and isinstance(value, Mapping):  # of an optimizer or a scheduler
            yield from (f"{name}.{key}" for key, inner in value.items() if inner == "auto")


def _refuse_unknown(names: list[str]) -> None:
    if not names:
        return
    known = dict(_names(KEYS, ""))
    told = []
    for name in names:
        leaf = name.rpartition(".")[2]
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        close = close or [full for full in known if full.rpartition(".")[2] == leaf]  # right key, wrong place
        close = close or difflib.get_close_matches(leaf, [full.rpartition(".")[2] for full in known], n=1, cutoff=0.75)
        told.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    raise PlanError(f"the DeepSpeed config has unknown keys: {', '.join(told)}. Correct them or leave them out.")


def _names(table: Table, prefix: str) -> Iterator[tuple[str, None]]:
    for key, inner in table.items():
        yield f"{prefix}{key}", None
        if isinstance(inner, Mapping):
            yield from _names(inner, f"{prefix}{key}.")


def _refuse_changes(given: Mapping[str, Any]) -> None:
    for key, remedy in CHANGES_TRAINING.items():
        value = given.get(key)
        if isinstance(value, Mapping):
            value = value.get("enabled", True) if value else None
        if value not in (None, False, 0, 1, "auto"):
            raise PlanError(f"the DeepSpeed config asks for {key}, which is not available here. {remedy}")
        if isinstance(value, bool) and value:
            raise PlanError(f"the DeepSpeed config asks for {key}, which is not available here. {remedy}")


def _plan(values: ConfigValues) -> Plan:
    zero = "zero_optimization."
    fields: dict[str, Any] = {"stage": values.count(f"{zero}stage", 0, least=0), **_precision(values)}
    optimizer = _tier(values, f"{zero}offload_optimizer", f"{zero}cpu_offload")
    weights = _tier(values, f"{zero}offload_param", f"{zero}cpu_offload_params", f"{zero}cpu_offload_param")
    if optimizer not in (None, "device"):
        fields |= {"optimizer": optimizer, "gradients": "host"}
    if weights not in (None, "device"):
        fields["weights"] = weights
    found = (values.text(f"{zero}offload_{what}.nvme_path") for what in ("optimizer", "param"))
    paths = dict.fromkeys(path for path in found if path is not None)
    if paths and "disk" in (optimizer, weights):
        fields["disk_path"] = tuple(paths)
    dtype = values.choice("data_types.grad_accum_dtype", _DTYPES)
    if dtype is not None:
        fields["accumulate_dtype"] = dtype
    ranks = values.count("tensor_parallel.autotp_size", 1, least=0)
    return Plan(**fields, tensor=ranks or 1)


def _precision(values: ConfigValues) -> dict[str, Any]:
    bf16 = values.flag("bf16.enabled") or values.flag("bfloat16.enabled")
    fp16 = values.flag("fp16.enabled")
    if bf16 and fp16:
        raise PlanError("the DeepSpeed config has fp16 and bf16 enabled. Enable one of them.")
    if bf16:
        return {"precision": "bf16"}
    if not fp16:
        return {}
    fixed, power = values.number("fp16.loss_scale", 0), values.count("fp16.initial_scale_power", 16, least=0)
    assert power is not None
    if power > 127:
        raise PlanError(f"fp16.initial_scale_power is {power}, and 2 to this power is more than fp32 can hold. Use 16.")
    return {
        "precision": "fp16",
        "loss_scale": fixed or 2.0**power,
        "loss_scale_window": 0 if fixed else values.count("fp16.loss_scale_window", 1000),
        "loss_scale_hysteresis": values.count("fp16.hysteresis", 2),
        "loss_scale_minimum": values.number("fp16.min_loss_scale", 1) or 1.0,
    }


def _tier(values: ConfigValues, section: str, *flags: str) -> str | None:
    """Where an offload section, or one of the flags of older versions, puts its states."""
    if f"{section}.device" in values:
        return values.choice(f"{section}.device", _TIERS)
    return "host" if any(map(values.flag, flags)) else None


def _steps_per_print(values: ConfigValues) -> int | None:
    number = values.number("steps_per_print", float("inf"), least=-1)  # "inf" is what Hugging Face writes
    assert number is not None
    return None if number == float("inf") or number < 1 else int(number)


def _typed(given: Mapping[str, Any], key: str) -> tuple[str, Mapping[str, Any]] | None:
    """The type and the parameters of the optimizer or the scheduler."""
    section = given.get(key)
    if not isinstance(section, Mapping) or not section:
        return None
    if not isinstance(section.get("type"), str):
        raise PlanError(f"{key}.type is {section.get('type')!r}, but it must be the name of one.")
    params = section.get("params") or {}
    if not isinstance(params, Mapping):
        raise PlanError(f"{key}.params is {params!r}, but it must be an object.")
    return section["type"], {name: value for name, value in params.items() if value != "auto"}
