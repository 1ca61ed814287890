"""Reads one value as the type of its key, whether it came from a flag, a file or Python. A mistake gives one line."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from unbounded.errors import InputError
from unbounded.planner.spelling import did_you_mean
from unbounded.train.options.config import Config

FIELDS = {one.name: one for one in fields(Config)}
_HINTS = get_type_hints(Config)
_LONGEST = 80  # characters of a value that a message repeats


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def kind_of(key: str) -> Any:
    """The type of a key's value, if it is given: for `str | None` it is str."""
    hint = _HINTS[key]
    if get_origin(hint) is UnionType:
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    return hint


def fit(key: str, value: Any, where: str) -> Any:
    """`value` as the type of its key, within its choices and bounds; `where` names it in messages."""
    kind, choices = kind_of(key), FIELDS[key].metadata.get("choices")
    if FIELDS[key].metadata.get("keyed"):
        return _fit_table(value, where)
    if get_origin(kind) is tuple:
        return _fit_texts(value, choices, where)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return _fit_number(key, _to_float(value), where)
    if key.endswith("_bytes") and isinstance(value, (int, str)) and not isinstance(value, bool):
        value = str(value)
    if type(value) is not kind:
        raise InputError(f"{where} is {show(value)}, but it must be {_describe(kind)}.")
    if kind is int:
        return _fit_number(key, value, where)
    if choices:
        _check_choice(value, choices, where)
    if not value and FIELDS[key].metadata.get("metavar") == "PATH":  # an unset variable in a script, perhaps
        raise InputError(f"{where} is empty, but it must be a path. Give one, or leave it out.")
    return _fit_text(value, where) if kind is str else value


def fit_all(config: Config) -> Config:
    """`config` as code has made it, with each value as the type of its key. Paths may be objects."""
    given = {key: getattr(config, key) for key in FIELDS if getattr(config, key) is not None}
    return replace(config, **{key: fit(key, _spell(value), f'"{key}"') for key, value in given.items()})


def _spell(value: Any) -> Any:
    """A path, or each of several, as text."""
    if isinstance(value, (list, tuple)):
        return [_spell(one) for one in value] if any(isinstance(one, os.PathLike) for one in value) else value
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def show(value: Any) -> str:
    """A value as messages repeat it: as Python writes it, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write out integers with thousands of digits
        return "a number with thousands of digits"
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _fit_table(value: Any, where: str) -> tuple[tuple[str, Any], ...]:
    if isinstance(value, (list, tuple)) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{where} is {show(value)}, but it must be a table of the plan's fields.")
    return tuple(value.items())


def _fit_texts(value: Any, choices: tuple[str, ...] | None, where: str) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{where} is {show(value)}, but it must be a text or a list of texts.")
    if choices:
        texts = [part.strip() for text in texts for part in text.split(",")]
        for text in texts:
            _check_choice(text, choices, where)
    elif not texts or not all(texts):
        raise InputError(f"{where} is {show(value)}, but it must name at least one, and no name may be empty.")
    return tuple(_fit_text(text, where) for text in texts)


def _fit_text(text: str, where: str) -> str:
    if "\0" in text:
        raise InputError(f"{where} is {show(text)}, which contains a zero byte. Remove it.")
    return text


def _check_choice(value: str, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise InputError(
            f"{where} is {show(value)}, but it must be one of {', '.join(choices)}.{did_you_mean(value, choices)}"
        )


def _to_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _fit_number(key: str, value: Any, where: str) -> Any:
    bounds = FIELDS[key].metadata
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where} is {value}, but it must be a finite number.")
    if "above" in bounds and not value > bounds["above"]:
        raise InputError(f"{where} is {show(value)}, but it must be more than {bounds['above']}.")
    if "least" in bounds and not value >= bounds["least"]:
        wanted = "more than 0" if bounds["least"] == 1 else f"{bounds['least']} or more"
        raise InputError(f"{where} is {show(value)}, but it must be {wanted}.")
    if "below" in bounds and not value < bounds["below"]:
        raise InputError(f"{where} is {show(value)}, but it must be less than {bounds['below']}.")
    if "most" in bounds and not value <= bounds["most"]:
        raise InputError(f"{where} is {show(value)}, but it must be at most {bounds['most']}.")
    return value


def _describe(kind: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
