"""The pure parts: arguments taken apart and put together, tensors laid flat and restored, who gets which policy."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.zero.training import TinyGPT
from unbounded.activations.choice import choose_policies, pick_blocks
from unbounded.activations.geometry import is_movable, lay_flat
from unbounded.activations.offload.host_buffers import HostBuffers
from unbounded.activations.structure import take_tensors
from unbounded.errors import BudgetError, PlanError
from unbounded.native.host_memory import PAGE_BYTES
from unbounded.planner.plan import Plan
from unbounded.tiers.arena import HostArena

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    x: Any
    scale: float = 1.0


@dataclass
class Outer:
    inner: Frozen
    rest: list[Any] = field(default_factory=list)


def test_tensors_are_taken_out_of_every_container_and_put_back() -> None:
    tensors = [torch.tensor(float(i)) for i in range(6)]
    value = (
        (tensors[0], [1, tensors[1], None]),
        {"a": Outer(Frozen(tensors[2], 3.0), [tensors[3]]), "b": OrderedDict(c=tensors[4]), "d": Pair(tensors[5], "x")},
    )
    taken, template = take_tensors(value)
    assert all(one is other for one, other in zip(taken, tensors, strict=True))
    doubled = template.fill([2 * tensor for tensor in taken])
    assert doubled[0][1][0] == 1
    assert doubled[0][1][2] is None
    assert doubled[1]["a"].inner == Frozen(torch.tensor(4.0), 3.0)
    assert isinstance(doubled[1]["b"], OrderedDict)
    assert doubled[1]["d"] == Pair(torch.tensor(10.0), "x")
    assert value[1]["a"].inner.x is tensors[2]


def test_what_is_left_holds_no_tensor() -> None:
    tensor = torch.zeros(3)
    dead = weakref.ref(tensor)
    taken, template = take_tensors(((tensor,), {"nested": Outer(Frozen([tensor]))}))
    assert len(taken) == 2
    del tensor, taken
    gc.collect()
    assert dead() is None
    assert template.fill([torch.ones(1)] * 2)[1]["nested"].inner.x[0] == 1


def test_objects_that_hold_no_tensor_are_passed_on_themselves() -> None:
    plain, record = object(), Frozen("text")
    _, template = take_tensors([plain, record, torch.float32])
    again = template.fill([])
    assert again[0] is plain
    assert again[1] is record


def layouts() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).view(2, 3, 4)
    return {
        "plain": base,
        "transposed": base.transpose(0, 2),
        "expanded": torch.arange(4.0).view(1, 1, 4).expand(2, 3, 4),
        "expanded and transposed": torch.arange(8.0).view(2, 1, 4).expand(2, 3, 4).transpose(1, 2),
        "a row of a matrix": base[1],
        "with gaps": base[:, :, 1:3],
        "with gaps, transposed": base[:, :2].transpose(0, 2),
        "a scalar": torch.tensor(3.0),
        "of one element a dim": base[:1, :1, :1],
        "bool": base > 5,
        "complex": torch.view_as_complex(base.view(2, 3, 2, 2)),
    }


@pytest.mark.parametrize("name", layouts())
def test_a_tensor_laid_flat_comes_back_as_it_lay(name: str) -> None:
    tensor = layouts()[name]
    flat, geometry = lay_flat(tensor)
    again = geometry.restore(flat.clone())
    assert torch.equal(again, tensor)
    if "gaps" in name:
        assert again.stride() == tensor.clone().stride()
    else:
        assert again.stride() == tensor.stride()
        assert flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()  # no copy was made
    assert flat.numel() == (4 if name == "expanded" else 8 if name == "expanded and transposed" else tensor.numel())


def test_only_plain_memory_of_the_device_is_moved() -> None:
    cpu = torch.device("cpu")
    assert is_movable(torch.zeros(2), cpu)
    for other in (
        torch.zeros(0),
        torch.zeros(2, device="meta"),
        nn.Parameter(torch.zeros(2)),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ):
        assert not is_movable(other, cpu)
    assert not is_movable(torch.zeros(2), torch.device("cuda", 0))


class Small:
    """A room of `total` bytes."""

    def __init__(self, total: int) -> None:
        self.arena, self.total, self.used = HostArena(pin=False, num_threads=1), total, 0

    def spare_bytes(self, wanted: int = 0) -> int:
        return self.total - self.used

    def count(self, num_bytes: int) -> None:
        self.used += num_bytes

    def shortage(self, num_bytes: int) -> BudgetError:
        return BudgetError(f"short of {num_bytes}")


def address(buffer: Any) -> int:
    return buffer.tensor(torch.uint8, 1).data_ptr()


def test_host_buffers_are_given_back_by_dropping_them_and_used_again() -> None:
    room = Small(8 * PAGE_BYTES)
    buffers = HostBuffers(room)
    first = buffers.take(3 * PAGE_BYTES - 5)
    home = address(first)
    del first
    second, third = buffers.take(2 * PAGE_BYTES), buffers.take(1)  # two parts of what the first one had
    assert (address(second), address(third)) == (home, home + 2 * PAGE_BYTES)
    assert room.used == room.arena.used_bytes == 3 * PAGE_BYTES
    fourth = buffers.take(PAGE_BYTES)
    assert room.used == room.arena.used_bytes == 4 * PAGE_BYTES
    del third, second  # they merge again, whatever the order
    assert address(buffers.take(3 * PAGE_BYTES)) == home
    del fourth
    assert address(buffers.take(PAGE_BYTES)) != home  # the smallest that fits
    assert room.used == 4 * PAGE_BYTES
    buffers.trim()
    assert room.used == room.arena.used_bytes == 0


def test_buffers_in_use_never_overlap() -> None:
    room = Small(64 * PAGE_BYTES)
    buffers, held, generator = HostBuffers(room), {}, torch.Generator().manual_seed(1)
    for turn in range(400):
        size = int(torch.randint(1, 9, (), generator=generator))
        if len(held) > 6:
            gone = list(held)[int(torch.randint(len(held), (), generator=generator))]
            buffer, size, value = held.pop(gone)
            assert (buffer.tensor(torch.int32, size * PAGE_BYTES // 4) == value).all()
            del buffer
        else:
            buffer = buffers.take(size * PAGE_BYTES)
            buffer.tensor(torch.int32, size * PAGE_BYTES // 4).fill_(turn)
            held[turn] = (buffer, size, turn)
            del buffer
    assert room.used == room.arena.used_bytes <= room.total
    held.clear()
    buffers.trim()
    assert room.used == 0


def test_unused_host_buffers_of_the_wrong_size_make_room() -> None:
    room = Small(6 * PAGE_BYTES)
    buffers = HostBuffers(room)
    buffers.take(2 * PAGE_BYTES)
    large = buffers.take(5 * PAGE_BYTES)  # takes the place of the two pages
    assert room.used == room.arena.used_bytes == 5 * PAGE_BYTES
    with pytest.raises(BudgetError, match=f"short of {2 * PAGE_BYTES}"):
        buffers.take(PAGE_BYTES + 1)
    assert room.arena.used_bytes == 5 * PAGE_BYTES
    del large
    buffers.take(PAGE_BYTES + 1)


def test_the_first_pattern_that_matches_a_block_counts() -> None:
    names = ["blocks.0", "blocks.1", "blocks.10", "tail.0"]
    policy = (("blocks.1", "keep"), ("blocks.*", "host"))
    assert list(choose_policies(policy, names).values()) == ["keep" if n == 1 else "host" for n in (0, 1, 2)] + ["keep"]
    assert set(choose_policies("recompute", names).values()) == {"recompute"}


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("recompte", "activations is 'recompte', but it must be one of .* Did you mean 'rec"),
        ("disk", "activations is 'disk', but it must be one of"),
        (7, "activations is 7. Give a policy, or pairs of"),
        ((("blocks.*", "hots"),), "the policy of 'blocks.*' in activations is 'hots'.*Did you mean 'host'"),
        (("blocks.*", "host"), "activations has the entry 'blocks.*'. Give a policy, or pairs of"),
    ],
)
def test_a_wrong_policy_is_an_error_with_a_suggestion(policy: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text.replace("blocks.*", r"blocks\.\*")):
        choose_policies(policy, ["blocks.0"])
    with pytest.raises(PlanError, match=text.replace("blocks.*", r"blocks\.\*")):
        Plan(activations=policy)


def test_a_pattern_that_matches_no_block_is_an_error_that_lists_them() -> None:
    with pytest.raises(PlanError, match=r"'layers\.\*' in activations matches no block. The blocks are blocks.0, bl"):
        choose_policies((("layers.*", "host"),), [f"blocks.{i}" for i in range(3)])


def test_blocks_are_named_by_pattern_or_by_themselves_and_the_outer_one_is_taken() -> None:
    model = TinyGPT()
    assert list(pick_blocks(model, "blocks.*")) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(pick_blocks(model, ["head", model.blocks[1]])) == ["blocks.1", "head"]
    with pytest.raises(PlanError, match=r"blocks has 'layer\*', which is not a submodule of the model. Its submodules"):
        pick_blocks(model, "layer*")
    with pytest.raises(PlanError, match="blocks has Linear, which is not a submodule"):
        pick_blocks(model, [nn.Linear(2, 2)])


def test_a_plan_shows_its_activations() -> None:
    assert "activations='host'" in repr(Plan(activations="host"))
    assert "activations={host: 2 blocks, keep: 1 blocks}" in repr(
        Plan(activations=(("a", "host"), ("b", "host"), ("c", "keep")))
    )
    assert Plan(activations="host").offloads_activations
    assert not Plan(activations="recompute").offloads_activations
    assert not Plan().offloads_activations
