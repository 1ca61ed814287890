"""Errors that are kept and raised again, above all of a lane whose thread the system does not give."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import unbounded
from tests.process import ThreadLimit
from unbounded import errors
from unbounded.errors import UnboundedError
from unbounded.native.disk.handle import disk_error
from unbounded.tiers.lane import Lane


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


def test_what_a_lane_without_a_thread_was_given_has_failed_and_the_lane_works_once_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane, limit = Lane("read", torch.device("cpu")), ThreadLimit(monkeypatch, "unbounded-read")
    for _ in range(2):
        with pytest.raises(UnboundedError, match=r"no thread for the lane 'read'.*ulimit -u"):
            lane.submit(int).wait()
    lane.drain()
    limit.is_reached = False
    assert lane.submit(int, 5).wait() == 5


@pytest.mark.parametrize(("name", "tier"), [("update", "host"), ("buffered", "disk"), ("fetch", "disk")])
def test_a_step_whose_lane_has_no_thread_is_an_error_and_not_a_hang(
    monkeypatch: pytest.MonkeyPatch, name: str, tier: str
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = unbounded.shard(model, optimizer, {"weights": tier, "optimizer": tier})
    ThreadLimit(monkeypatch, f"unbounded-{name}")
    with pytest.raises(UnboundedError, match=f"no thread for the lane '{name}'"):  # noqa: PT012
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        model(torch.ones(1, 8))
