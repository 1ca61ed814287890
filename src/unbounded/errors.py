"""The errors that users see. Each is also the builtin error that a caller would expect to catch."""

from __future__ import annotations

import contextlib
import types
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


class UnboundedError(Exception):
    """Root of every error raised on purpose by this package."""


class PlanError(UnboundedError, ValueError):
    """A plan, argument or model that cannot work as given."""


class BudgetError(PlanError, MemoryError):
    """The states do not fit the budgets of the tiers."""


class MissingFrameworkError(PlanError, ImportError):
    """The framework that this part needs is not installed."""


class StateError(UnboundedError, RuntimeError):
    """The model or optimizer cannot do this in its present state."""


class DiskError(UnboundedError, OSError):
    """A disk operation failed; has `errno` and `filename`, and prints only its message."""

    def __str__(self) -> str:
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class CheckpointError(UnboundedError, RuntimeError):
    """A checkpoint that cannot be read as asked."""


class PeerError(StateError):
    """Another rank failed, stopped, ended or did something else, so this one cannot continue."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no whole checkpoint where one was asked for."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnsavableError(CheckpointError, TypeError):
    """A user's value that a checkpoint cannot represent."""


class InputError(UnboundedError, ValueError):
    """The input of a command cannot work; it ends with exit code 2."""


class DataError(InputError):
    """Data for training that is missing, empty or malformed."""


class TrainingError(UnboundedError, RuntimeError):
    """Training cannot continue; the command ends with exit code 1."""


def again(error: E) -> E:
    """An equal error with a traceback of its own, for whoever keeps `error` and raises it more than once.

    Raising an error gives it the frames of all callers. The user's hold the loss, and its graph holds the model. So a
    model that kept such an error would never be freed, because Python sees no cycle through a graph.
    """
    built_in: Any = (kind := type(error))
    while built_in.__module__ != "builtins":
        built_in = built_in.__base__
    other: E = built_in.__new__(kind, *error.args)  # no class's own __init__, which may want other arguments
    other.__dict__.update(error.__dict__)
    other.args = error.args
    other.__cause__, other.__context__ = error.__cause__, error.__context__
    for name in [name for one in kind.__mro__ for name, kept in vars(one).items() if _is_slot(kept)]:
        value = getattr(error, name, None)
        if value is not None:  # a file name of None would be shown
            with contextlib.suppress(AttributeError):  # what cannot be set was given by the arguments
                setattr(other, name, value)
    return other.with_traceback(error.__traceback__)


def _is_slot(kept: object) -> bool:
    """Whether an attribute of a class is a value that its objects keep outside their dictionary, such as `errno`."""
    return isinstance(kept, types.MemberDescriptorType)
