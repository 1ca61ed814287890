"""Errors of the training job: what the user gave and what to do about it, in one line."""

from __future__ import annotations

from unbounded.errors import UnboundedError


class InputError(UnboundedError, ValueError):
    """Something the user gave cannot work; the command ends with exit code 2."""


class DataError(InputError):
    """Data that is missing, empty or malformed."""


class TrainingError(UnboundedError, RuntimeError):
    """Training cannot go on; the command ends with exit code 1."""
