"""The last line of a test run, for someone who has never seen one; and how long each test took, in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DURATIONS = Path("build") / "test-durations.txt"


def conclude(stats: Mapping[str, list[Any]], exit_code: int) -> str:
    """Sums up the outcomes of all tests in one sentence."""
    passed, failed = len(stats.get("passed", ())), len(stats.get("failed", ())) + len(stats.get("error", ()))
    skipped = Counter(_reason(report) for report in stats.get("skipped", ()))
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    counts = f"{passed:,} passed, {failed:,} failed, {skipped.total():,} skipped" + (f" ({reasons})" if reasons else "")
    if failed:
        return f"{counts}: something is broken, see above"
    if exit_code:
        return f"{counts}: the tests did not run to their end (exit code {exit_code})"
    return f"{counts}: everything this machine can check holds"


def write_durations(reports: Iterable[Any], root: Path) -> None:
    """Every test with its seconds, including its setup, the slowest first."""
    seconds: Counter[str] = Counter()
    for report in reports:
        if hasattr(report, "duration"):
            seconds[report.nodeid] += report.duration
    path = root / DURATIONS
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{spent:8.2f}  {name}\n" for name, spent in seconds.most_common()))


def _reason(report: Any) -> str:
    reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    return reason.removeprefix("Skipped: ").strip() or "for no reason given"
