"""Changes of single parameters' gradients that were asked for and not carried out yet.

An update in the background may still read the array. Whoever next needs the array carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable

from unbounded.zero.gradients.scale_factor import ScaleFactor, times


class Noted:
    """Slots to be zeroed, and then slots to be scaled."""

    def __init__(self) -> None:
        self._cleared: set[int] = set()
        self._factors: dict[int, ScaleFactor] = {}

    def __bool__(self) -> bool:
        return bool(self._cleared or self._factors)

    def clear(self, index: int) -> None:
        """The slot is to be zeroed; what it was scaled by before no longer matters."""
        self._factors.pop(index, None)
        self._cleared.add(index)

    def scale(self, index: int, factor: ScaleFactor) -> None:
        self._factors[index] = times(self._factors.get(index, 1.0), factor)

    def common(self, used: Iterable[int]) -> ScaleFactor | None:
        """The one factor that every used slot got, if that is all that was noted."""
        if self._cleared:
            return None
        found = [self._factors.get(index) for index, is_used in enumerate(used) if is_used]
        first = found[0] if found else None
        return first if all(f is first or (isinstance(f, float) and f == first) for f in found) else None

    def take(self) -> tuple[set[int], dict[int, ScaleFactor]]:
        """Which slots to zero, and what to scale which slots by afterwards; nothing is noted any more."""
        taken = self._cleared, self._factors
        self._cleared, self._factors = set(), {}
        return taken
