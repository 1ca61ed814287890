"""The errors users meet: each is also the builtin a caller would expect to catch."""

from __future__ import annotations


class UnboundedError(Exception):
    """Root of every error raised on purpose by this package."""


class PlanError(UnboundedError, ValueError):
    """A plan, argument or model that cannot work as given."""


class BudgetError(PlanError, MemoryError):
    """The states do not fit the budgets of the tiers."""


class MissingFrameworkError(PlanError, ImportError):
    """A part was used whose framework is not installed."""


class StateError(UnboundedError, RuntimeError):
    """Something was asked of a model or optimizer in a state that cannot give it."""


class DiskError(UnboundedError, OSError):
    """A disk operation failed; carries `errno` and `filename`, and prints as its message alone."""

    def __str__(self) -> str:
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class CheckpointError(UnboundedError, RuntimeError):
    """A checkpoint that cannot be read as asked."""


class PeerError(StateError):
    """Another rank failed, stopped, ended or went another way, so this one cannot go on."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no whole checkpoint where one was asked for."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnsavableError(CheckpointError, TypeError):
    """A value of the user's that a checkpoint cannot represent."""


class InputError(UnboundedError, ValueError):
    """Something that the user gave a command cannot work; it ends with exit code 2."""


class DataError(InputError):
    """Data for training that is missing, empty or malformed."""


class TrainingError(UnboundedError, RuntimeError):
    """Training cannot go on; the command ends with exit code 1."""
