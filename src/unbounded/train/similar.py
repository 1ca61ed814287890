"""Suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence naming the closest of `known`, with a space before it; empty where nothing is close."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f' Did you mean "{close[0]}"?' if close else ""
