"""Checks the types of values from JSON. A wrong one is a ValueError that names its place and what it must be."""

from __future__ import annotations

from typing import Any


def integer(value: Any, where: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{where} is {_shown(value)} but must be a whole number from {low:,} to {high:,}")
    return value


def number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"{where} is {_shown(value)} but must be a number")
    return float(value)


def text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise ValueError(f"{where} is {_shown(value)} but must be a string")
    return value


def boolean(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{where} is {_shown(value)} but must be true or false")
    return value


def items(value: Any, where: str) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"{where} is {_shown(value)} but must be a list")
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"{where} is {_shown(value)} but must be an object")
    return value


def texts(value: Any, where: str) -> list[str]:
    return [text(item, where) for item in items(value, where)]


def _shown(value: Any) -> str:
    """A short form of a value, which may be anything of any size."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value):,}"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a number of many digits"
    return repr(value)[:60]
