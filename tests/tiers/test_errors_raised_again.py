"""Errors that are kept and raised again."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from unbounded import errors
from unbounded.native.disk.handle import disk_error


class CodeError(Exception):
    """Its text is not what it was made from."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def raise_missing_file() -> None:
    Path("/nowhere/at all").read_text()


def raise_from_another() -> None:
    try:
        raise_missing_file()
    except OSError as error:
        raise CodeError(3) from error


CASES = {
    "with an __init__ of its own": CodeError(3),
    "of a disk": disk_error(5, "read failed", "/a/file"),
    "of two built-in kinds": errors.MissingCheckpointError("no checkpoint"),
    "with slots": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "with a file": FileNotFoundError(2, "No such file", "/a/file"),
}


@pytest.mark.parametrize("error", CASES.values(), ids=CASES)
def test_an_error_raised_again_says_the_same(error: Exception) -> None:
    other = errors.again(error)
    assert (type(other), str(other), repr(other), vars(other)) == (type(error), str(error), repr(error), vars(error))
    for name in ("errno", "filename", "object", "reason"):
        assert getattr(other, name, None) == getattr(error, name, None)


def test_an_error_raised_again_shows_where_it_came_from_and_leaves_the_first_as_it_was() -> None:
    with pytest.raises(CodeError) as first:
        raise_from_another()
    frames = traceback.extract_tb(first.value.__traceback__)
    with pytest.raises(CodeError) as second:
        raise errors.again(first.value)
    assert second.value.__cause__ is first.value.__cause__
    assert traceback.extract_tb(second.value.__traceback__)[1:] == frames
    assert traceback.extract_tb(first.value.__traceback__) == frames
