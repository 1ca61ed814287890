"""The compute lane in a trace: the span of the innermost site that a pass is in."""

from __future__ import annotations

from contextlib import AbstractContextManager

from unbounded.observe import trace
from unbounded.zero.passes.direction import RunningSite


class ComputeSpan:
    """At most one span is open. Sites around others have none, so spans do not overlap, unless a pass is one span."""

    def __init__(self) -> None:
        self._open: AbstractContextManager[None] | None = None

    def begin(self, site: RunningSite, *, is_whole: bool = False) -> None:
        """Ends the open span and begins that of `site`; `is_whole`: with all sites inside, which begin none."""
        self.end()
        if is_whole or not site.is_outer:
            self._open = trace.device_span("compute", site.name)
            self._open.__enter__()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
