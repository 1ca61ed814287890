"""Runs on the meta device: values that models ask for, and what grows with the length of a sequence."""

from __future__ import annotations

import pytest
import torch

from unbounded.planning.dry_run import _growth
from unbounded.planning.known_values import KnownValues, WrittenValues


def on_meta(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="meta")


def test_what_follows_from_known_values_is_known() -> None:
    scores = torch.empty(4, 8, device="meta")
    with KnownValues(), WrittenValues():
        ids = on_meta(3, 7, 3, 9)
        mask = ids == 3
        assert torch.where(mask)[0].tolist() == [0, 2]
        assert scores[mask].shape == (2, 8)
        assert scores.repeat_interleave(ids, dim=0).shape == (22, 8)
        assert f"expert_{ids[1]}" == "expert_7"
        ids[1:3] = 1  # through a view
        assert ids.cpu().tolist() == [3, 1, 1, 9]
        assert (ids.sum().item(), bool((ids > 1).all()), ids.unique().shape) == (14, False, (3,))


def test_a_choice_by_unknown_values_takes_everything_equally_often() -> None:
    scores = torch.empty(12, 8, device="meta")
    with KnownValues():
        chosen = scores.topk(2, dim=-1).indices
        counts = torch.nn.functional.one_hot(chosen, num_classes=8).sum((0, 1))
        assert counts.tolist() == [3] * 8
        assert scores.argmax(dim=0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        assert [len(set(row)) for row in chosen.tolist()] == [2] * 12
        assert scores.softmax(-1).max().ge(0).item() is True  # a mask lets everything pass


def test_an_unknown_number_is_refused() -> None:
    unknown = torch.empty(4, dtype=torch.int64, device="meta")
    with KnownValues(), WrittenValues():
        with pytest.raises(NotImplementedError, match="values that are not known"):
            unknown.max().item()
        known = on_meta(1, 2)
        known.add_(unknown[:2])
        with pytest.raises(NotImplementedError, match="values that are not known"):
            known.tolist()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([0, 0, 0], (0, 0, 0)),
        ([5 + 3 * n + 2 * n * n for n in (16, 32, 100)], (5, 3, 2)),
        ([640, 640, 1000], (0, 10, 0)),  # padded when short: the longest is what counts
    ],
)
def test_three_lengths_tell_what_grows(found: list[int], expected: tuple[int, int, int]) -> None:
    growth = _growth(found, (16, 32, 100))
    assert growth.once + 100 * growth.token + 100**2 * growth.pair == pytest.approx(found[-1])
    if found[0] != 640:
        assert (growth.once, growth.token, growth.pair) == pytest.approx(expected)
