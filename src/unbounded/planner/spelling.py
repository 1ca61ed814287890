"""Suggestions for misspelt names, and for what other tools call them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_CALLED_ELSEWHERE = {
    "cpu": "host",
    "ram": "host",
    "dram": "host",
    "nvme": "disk",
    "ssd": "disk",
    "gpu": "device",
    "cuda": "device",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "none": "keep",
    "checkpoint": "recompute",
    "offload": "host",
}


def find_closest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` probably means, if any."""
    choices = list(known)
    meant = _CALLED_ELSEWHERE.get(name.lower())
    close = [meant] if meant in choices else get_close_matches(name[:100], choices, n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence naming the closest of `known`, with a space before it; empty if nothing is close."""
    closest = find_closest(name, known)
    return f' Did you mean "{closest}"?' if closest else ""
