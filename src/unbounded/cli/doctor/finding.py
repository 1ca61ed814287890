"""A finding of `unbounded doctor`: what was checked, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, BROKEN = "ok", "note", "broken"


@dataclass(frozen=True)
class Finding:
    """One thing that was checked. A note works, but could be better; something broken must be fixed."""

    name: str
    status: str
    value: str
    remedy: str = ""
