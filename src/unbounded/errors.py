"""The errors that users see. Each is also the builtin error that a caller would expect to catch."""

from __future__ import annotations


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
