"""What `unbounded doctor` finds: one thing looked at, how it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, BROKEN = "ok", "note", "broken"


@dataclass(frozen=True)
class Finding:
    """One thing looked at. A note works, but could be better; a broken one has to be put right."""

    name: str
    status: str
    value: str
    remedy: str = ""
