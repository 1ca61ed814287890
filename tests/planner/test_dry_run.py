"""Runs on the meta device: values that models ask for, what grows with the length of a sequence, and given inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from unbounded.errors import PlanError
from unbounded.planner.plan import Plan
from unbounded.planning.alike_blocks import find_alike
from unbounded.planning.dry_run import _growth
from unbounded.planning.known_values import KnownValues, WrittenValues
from unbounded.planning.module_footprint import footprint_of_module


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


def test_blocks_that_know_other_numbers_are_alike() -> None:
    blocks = {f"layers.{number}": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)) for number in range(3)}
    for number, block in enumerate(blocks.values()):
        block.number, block[0].layer_idx = number, 2 * number + 1
    first, second, third = find_alike(blocks).values()
    assert first == second == third
    blocks["layers.2"][1].p = 0.5
    assert find_alike(blocks)["layers.2"] != first


class Residual(nn.Module):
    """A block of a conv net, and the only one here that changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + self.layers(image)  # type: ignore[no-any-return]


class Reader(nn.Module):
    """Embeds ids, of which it counts only those above 4, and reads them with torch's own blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList([layer, nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)])
        self.shift = torch.ones(32)  # no buffer

    def forward(self, ids: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        read = self.table(ids[ids > 4])[None] * scale + self.shift
        for block in self.blocks:
            read = block(read)
        return read


IDS = torch.arange(12)[None]


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (nn.Sequential(*(Residual() for _ in range(3))), torch.randn(2, 8, 6, 6)),
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3))),
            (torch.ones(5, 8),),
        ),
        (Reader(), {"ids": IDS, "scale": 2.0}),
        (Reader(), IDS),
    ],
)
def test_blocks_of_any_module_keep_what_autograd_saves_with_given_inputs(model: nn.Module, inputs: Any) -> None:
    parts = [part for part in footprint_of_module(model, None, Plan(), 7, inputs=inputs).parts if part.is_block]
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    inside, saved, alive = [0], [0], []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            own.add(storage.data_ptr())
            alive.append(tensor)
            saved[0] += storage.nbytes() * inside[0]
        return tensor

    for part in parts:
        block = model.get_submodule(part.module_name)
        block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, 1))
        block.register_forward_hook(lambda *_: inside.__setitem__(0, 0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if isinstance(inputs, dict):
            model(**inputs)
        else:
            model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    assert len(parts) >= 2
    assert 7 * sum(part.cost.kept_bytes(7) for part in parts) == pytest.approx(saved[0])


def test_given_inputs_leave_the_module_alone() -> None:
    model = nn.Sequential(*(Residual() for _ in range(3))).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    unbounded.plan(model, machine="h200:1", sequence=64, inputs=torch.randn(1, 8, 6, 6))
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_inputs_that_a_model_cannot_read_are_one_clear_line() -> None:
    model = nn.Sequential(*(Residual() for _ in range(3)))
    with pytest.raises(PlanError, match="the Sequential does not run on the meta device with these inputs: ") as raised:
        unbounded.plan(model, machine="h200:1", inputs=torch.randn(1, 5, 6, 6))
    assert "\n" not in str(raised.value)
    with pytest.raises(PlanError, match="given inputs for a str"):
        unbounded.plan("llama-7b", machine="h200:1", inputs=IDS)
