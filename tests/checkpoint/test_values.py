"""The user's values come back from a checkpoint exactly, or are refused by name."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy
import pytest
import torch

import unbounded
from unbounded.checkpoint.format.values import decode, encode


def there_and_back(value: Any) -> Any:
    import json

    held: dict[str, torch.Tensor] = {}

    def put(tensor: torch.Tensor) -> str:
        held[str(len(held))] = tensor.clone()
        return str(len(held) - 1)

    return decode(json.loads(json.dumps(encode(value, "extra", put), allow_nan=False)), held.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**63, -(2**200), 0.1, -0.0, 5e-324, math.inf, -math.inf, 1 + 2j, "", "~tuple", "\ud800é",
        b"\x00\xff", (1, (2, [3])), [], {}, {"a": {"b": ()}}, {1: "x", (2, 3): "y", None: 0, 1.5: 1}, {"~tuple": [1]},
        {"x": {"~float": "inf"}}, {1, 2}, frozenset([3]), deque([1, 2]), deque([1, 2], 3), deque(maxlen=0),
        OrderedDict(b=1, a=2), Counter([30, 60, 60]),
        torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), numpy.float64(0.1), numpy.int32(7),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value
    if not isinstance(value, frozenset | set):  # their order is not part of them
        assert repr(back) == repr(value)


def test_nan_tensors_and_arrays_come_back_bit_for_bit() -> None:
    assert math.isnan(there_and_back([math.nan])[0])
    for tensor in (torch.tensor(3.5), torch.randn(2, 3).bfloat16(), torch.zeros(0, 4), torch.tensor([True, False])):
        back = there_and_back({"t": tensor})["t"]
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
    array = numpy.arange(6, dtype=">u2").reshape(2, 3)
    back = there_and_back(array)
    assert back.dtype == array.dtype
    assert (back == array).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[3],
        ),
    ],
    ids=["multistep", "cosine", "onecycle", "plateau", "sequential"],
)
def test_the_state_of_every_kind_of_scheduler_comes_back(make: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make(optimizer)
    state = scheduler.state_dict()
    back = there_and_back(state)
    assert repr(back) == repr(state)


class Thing:
    """Something of the user's."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"a": [1, Thing()]}, r"extra\['a'\]\[1\] is a .*Thing.*state_dict"),
        ({"f": len}, r"extra\['f'\] is a builtins\.builtin_function_or_method"),
        ({Thing(): 1}, r"the key .*Thing.* of extra is a"),
        (torch.eye(2).to_sparse(), "extra is a tensor that is not dense"),
        (numpy.array(["a", object()], dtype=object), "extra is a numpy.ndarray"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_its_path(value: Any, named: str) -> None:
    with pytest.raises(unbounded.CheckpointError, match=named):
        there_and_back(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(unbounded.CheckpointError, match="contains itself"):
        there_and_back(value)
