"""Chooses what drafts hold and which updates are in two parts, whatever memory and time there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from unbounded.planner.unit_bytes import UnitBytes
from unbounded.zero.setup import draft_choice
from unbounded.zero.step.early.drafts import Drafts
from unbounded.zero.step.early.in_backward import InBackward
from unbounded.zero.step.early.pace import Pace, _Share


@contextlib.contextmanager
def drafting(*, states: bool) -> Iterator[None]:
    """Drafts of models that are sharded here have all that is updated, or only new weights; none is left out.

    Units whose drafts are not taken are updated in two parts.
    """
    plain = draft_choice.drafted_bytes

    def drafted_bytes(unit: UnitBytes, drafted: InBackward) -> int:
        return plain(unit, drafted) if states or drafted is not InBackward.ALL else 2**62

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_choice, "drafted_bytes", drafted_bytes)
        patch.setattr(draft_choice, "_end", lambda num_all, num_able, most: min(num_able, most))
        patch.setattr(Pace, "first", 2**62)
        patch.setattr(_Share, "adapt", lambda *_: None)
        patch.setattr(Drafts, "num_split", lambda _: 2**62)
        yield
