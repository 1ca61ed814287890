"""From where code is called. Walks the stack: not for the hot path."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def called_from(*functions: Any) -> bool:
    """Whether this thread is inside a call of one of `functions`."""
    return find_call(*functions) is not None


def find_call(*functions: Any) -> FrameType | None:
    """The innermost call of one of `functions` that this thread is inside of."""
    frame: FrameType | None = sys._getframe()
    codes = [function.__code__ for function in functions]
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame
