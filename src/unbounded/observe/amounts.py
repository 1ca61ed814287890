"""Amounts as people read them."""

from __future__ import annotations


def show_bytes(num_bytes: float) -> str:
    """ "1.5 GiB": the largest binary unit that keeps the number at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def show_seconds(seconds: float) -> str:
    """ "45 s", "2:05", "1:02:05"."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_count(count: float) -> str:
    """ "6.7 B", "4.9 M", "812"."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return f"{count:.0f}"
