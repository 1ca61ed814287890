"""Packed weights give back every bit, in any stretch, on host and disk, beside a GPU or not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from unbounded.errors import BudgetError
from unbounded.native import kernels
from unbounded.planner.models.packed_size import GROUP_NUMEL, RECORD_NUMEL, packed_bytes
from unbounded.tiers.pool import BufferPool
from unbounded.tiers.tiers import Tiers

NUMEL = GROUP_NUMEL + 5 * RECORD_NUMEL + 77
HOST = torch.device("cpu")


def _weights(kind: str, numel: int = NUMEL) -> torch.Tensor:
    """Weights as models have them, and as none should."""
    made = torch.Generator().manual_seed(len(kind))
    values = torch.randn(numel, generator=made) * 0.02
    if kind == "outliers":
        values[:: RECORD_NUMEL // 2] *= 100
    elif kind == "sparse":
        values *= torch.rand(numel, generator=made) > 0.9
    elif kind == "any bits":  # infinities, NaN and denormals among them
        return torch.randint(-(2**15), 2**15, (numel,), generator=made, dtype=torch.int16).view(torch.bfloat16)
    elif kind == "denormal":
        values *= 1e-38
    return values.to(torch.bfloat16)


KINDS = ("normal", "outliers", "sparse", "any bits", "denormal")


@pytest.fixture
def tiers(tmp_path) -> Iterator[Tiers]:
    yield from _make_tiers(HOST, tmp_path)


def _make_tiers(device: torch.device, path, host_bytes: int | None = None) -> Iterator[Tiers]:
    made = Tiers(
        device,
        budgets={"device": None, "host": host_bytes, "disk": None},
        disk_bytes=4 * packed_bytes(NUMEL),
        disk_path=(str(path),),
        num_threads=2,
    )
    yield made
    made.close()


def _bounce(tiers: Tiers) -> BufferPool:
    return tiers.pool(2, 2**20)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().view(torch.int16), other.cpu().view(torch.int16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", [1, RECORD_NUMEL - 1, RECORD_NUMEL, 3 * RECORD_NUMEL + 5])
def test_records_give_back_every_bit_unless_they_say_that_they_do_not(kind: str, numel: int) -> None:
    weights = _weights(kind, numel)
    records = torch.full((packed_bytes(numel),), 7, dtype=torch.uint8, device="cpu")
    kernels.pack(weights, records)
    back = torch.zeros(numel, dtype=torch.bfloat16, device="cpu")
    kernels.unpack(records, back)
    flags = (records.view(-1, packed_bytes(1))[:, 1] == 255).repeat_interleave(RECORD_NUMEL)[:numel]
    assert bool(flags.any()) == (kind == "any bits" and numel > 1)
    assert _same(back[~flags], weights[~flags])
    middle = numel // 3
    if middle < RECORD_NUMEL and not flags.any():
        part = torch.zeros(numel - middle, dtype=torch.bfloat16, device="cpu")
        kernels.unpack(records, part, middle)
        assert _same(part, weights[middle:])


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_stretch_is_read_and_written(tiers: Tiers, tier: str, kind: str) -> None:
    array = tiers.allocate_packed(tier, NUMEL, _bounce(tiers))
    expected = torch.zeros(NUMEL, dtype=torch.bfloat16, device="cpu")
    for start, stop in (
        (100, 200),
        (0, NUMEL),
        (GROUP_NUMEL - 3, GROUP_NUMEL + RECORD_NUMEL + 3),
        (NUMEL - 1, NUMEL),
        (RECORD_NUMEL, 2 * RECORD_NUMEL),
    ):
        expected[start:stop] = _weights(kind if stop - start != RECORD_NUMEL else "normal", stop - start)
        array.evict(expected[start:stop].clone(), start).wait()
        for first, last in ((0, NUMEL), (start, stop), (max(0, start - 5), start + 1), (5, NUMEL - 7)):
            target = torch.full((last - first,), 3.0, dtype=torch.bfloat16, device="cpu")
            array.fetch(target, first).wait()
            assert _same(target, expected[first:last]), (start, stop, first, last)
    tiers.free(array)
    assert tiers.use()["disk"].used_bytes == 0


def test_threads_write_and_read_parts_of_one_record(tiers: Tiers) -> None:
    array, expected = tiers.allocate_packed("host", NUMEL, _bounce(tiers)), _weights("outliers", NUMEL)
    stripes = [(start, min(start + 1000, 20_000)) for start in range(0, 20_000, 1000)]

    def write(mine: int) -> None:
        for start, stop in stripes[mine::4]:
            array.evict(expected[start:stop].clone(), start).wait()
            back = torch.empty(stop - start, dtype=torch.bfloat16, device="cpu")
            array.fetch(back, start).wait()
            assert _same(back, expected[start:stop])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    back = torch.empty(20_000, dtype=torch.bfloat16, device="cpu")
    array.fetch(back).wait()
    assert _same(back, expected[:20_000])


def test_it_takes_three_quarters_and_frees_everything(tiers: Tiers) -> None:
    before = tiers.use()["host"].used_bytes
    array = tiers.allocate_packed("host", NUMEL, _bounce(tiers))
    taken = tiers.use()["host"].used_bytes - before - 2 * 2**20  # the pool's
    assert taken <= 0.77 * 2 * NUMEL
    array.evict(_weights("any bits")).wait()
    assert tiers.use()["host"].used_bytes > before + taken
    array.evict(_weights("normal")).wait()  # what did not pack is out of use, and would be used again
    held = tiers.use()["host"].used_bytes
    array.evict(_weights("any bits")).wait()
    assert tiers.use()["host"].used_bytes == held
    tiers.free(array)
    assert tiers.use()["host"].used_bytes <= before + 2 * 2**20


def test_what_does_not_pack_is_refused_beyond_the_budget_and_nothing_is_lost(tmp_path) -> None:
    for tiers in _make_tiers(HOST, tmp_path, host_bytes=packed_bytes(NUMEL) + 4 * 2**20):
        tiers.planned_host_bytes = packed_bytes(NUMEL) + 2 * 2**20
        array = tiers.allocate_packed("host", NUMEL, _bounce(tiers))
        weights, back = _weights("normal"), torch.empty(NUMEL, dtype=torch.bfloat16, device="cpu")
        array.evict(weights).wait()
        with pytest.raises(BudgetError, match=r"do not pack.*pack_frozen=False"):
            array.evict(_weights("any bits")).wait()
        array.fetch(back).wait()
        assert _same(back, weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_packs_and_unpacks_the_same_bits(tmp_path, tier: str, kind: str) -> None:
    from unbounded.tiers.packed import device_packing

    device = torch.device("cuda")
    for tiers in _make_tiers(device, tmp_path):
        array, weights = tiers.allocate_packed(tier, NUMEL, _bounce(tiers)), _weights(kind)
        array.evict(weights.to(device)).wait()
        records, expected = (torch.empty(packed_bytes(NUMEL), dtype=torch.uint8, device=on) for on in (device, HOST))
        device_packing.pack(weights.to(device), records)
        kernels.pack(weights, expected)
        assert torch.equal(records.cpu(), expected)
        for start, stop in ((0, NUMEL), (5, 5000), (GROUP_NUMEL - 1, NUMEL), (RECORD_NUMEL, 2 * RECORD_NUMEL)):
            target = torch.full((stop - start,), 3.0, dtype=torch.bfloat16, device=device)
            array.fetch(target, start).wait()
            assert _same(target, weights[start:stop]), (start, stop)
        tiers.free(array)
