"""Values of a DeepSpeed config by the full names of their keys, each read as what it must be, or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unbounded.errors import PlanError


class ConfigValues:
    """What a config says. A key that is absent, null or "auto" has no value, so the default counts."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = {key: value for key, value in given.items() if value is not None and value != "auto"}

    def __contains__(self, key: str) -> bool:
        return key in self._given

    def names(self) -> tuple[str, ...]:
        return tuple(self._given)

    def flag(self, key: str) -> bool:
        """True or false; false without a value."""
        value = self._given.get(key, False)
        if not isinstance(value, bool):
            raise PlanError(f"{key} is {value!r}, but it must be true or false.")
        return value

    def number(self, key: str, default: float | None = None, *, least: float = 0) -> float | None:
        """A number; scripts may write it as a text, such as "1e-3" or "inf"."""
        if key not in self._given:
            return default
        value = self._given[key]
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not found >= least:
            raise PlanError(f"{key} is {value!r}, but it must be a number of at least {least:g}.")
        return found

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int | None:
        """A whole number, which may be written as 1e9."""
        if key not in self._given:
            return default
        value = self._given[key]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or value % 1 != 0 or value < least:  # inf % 1 is NaN
            raise PlanError(f"{key} is {value!r}, but it must be a whole number of at least {least}.")
        return int(value)

    def choice(self, key: str, choices: Mapping[str, str]) -> str | None:
        """What one of the `choices` stands for; None without a value."""
        if key not in self._given:
            return None
        value = self._given[key]
        if not isinstance(value, str) or value not in choices:
            raise PlanError(f"{key} is {value!r}. It may be one of {', '.join(choices)}.")
        return choices[value]

    def text(self, key: str) -> str | None:
        """A text, such as a path; None without a value."""
        value = self._given.get(key)
        if value is not None and not isinstance(value, str):
            raise PlanError(f"{key} is {value!r}, but it must be a text.")
        return value
