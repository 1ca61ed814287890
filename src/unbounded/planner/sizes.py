"""Byte counts as people write them: "24GiB" in, "24.0 GiB" out; and how much of a device can be counted on."""

from __future__ import annotations

import math
import re

from unbounded.errors import PlanError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[_letter] = 1024**_power

# What is lost of a device between the allocator's blocks: a part of it, and the most (measured: 0.3 to 3.6 GiB).
GAPS_PART, GAPS_BYTES = 0.1, 8 << 30


def allocatable_bytes(device_bytes: float) -> int:
    """What may be allocated of a device's memory."""
    return int(device_bytes - min(GAPS_PART * device_bytes, GAPS_BYTES))


def parse_bytes(value: int | float | str, what: str = "a size") -> int:
    """The number of bytes that `value` (1024, "24GiB", "1.5 TB", "500M") stands for."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise PlanError(f'{what} is {value!r}, which is not a size. Give a number of bytes or a text like "24GiB".')
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)
        if not match or match[2].lower() not in _UNITS:
            raise PlanError(f'{what} is {value!r}, which is not a size. Give a number of bytes or a text like "24GiB".')
        value = float(match[1]) * _UNITS[match[2].lower()]
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{what} is {value}, which is not a size. Give a finite number of bytes.")
    if value < 0:
        raise PlanError(f"{what} is {value}, but a size cannot be negative. Give a number of bytes of at least 0.")
    return int(value)


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` in the largest binary unit that keeps it at least 1: "1.5 GiB"."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
