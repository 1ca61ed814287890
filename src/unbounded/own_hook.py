"""A hook of the library on a user's module. It is for that module: copies of the module are plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Calls `call`. In a deep copy or a pickled copy of the module there is one that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return do_nothing

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _make_nothing, ()


def is_own(hook: Callable[..., Any]) -> bool:
    """Whether a hook is a function or an object of this library."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]


def do_nothing(*_: Any) -> None:
    """Replaces a hook in a copy."""


def _make_nothing() -> Callable[..., None]:
    return do_nothing
