"""The extent store: sizes, striping, partial transfers, checksums, space; and its layout as pure arithmetic."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.native.disk.test_disk import MIB, random_bytes
from unbounded.errors import DiskError
from unbounded.native.disk import DiskEngine, ExtentStore
from unbounded.native.disk.striping import STRIPE_BYTES, Extent, FileSpan, FreeList, lane_bytes, parts
from unbounded.native.host_memory import host_buffer


@pytest.fixture
def engine() -> Iterator[DiskEngine]:
    with DiskEngine() as opened:
        yield opened


def folders(root: Path, count: int) -> list[Path]:
    made = [root / f"disk{index}" for index in range(count)]
    for folder in made:
        folder.mkdir()
    return made


@pytest.mark.parametrize("num_paths", [1, 3])
@pytest.mark.parametrize("checksum", [False, True])
def test_extents_of_every_size_come_back_as_written(
    engine: DiskEngine, tmp_path: Path, num_paths: int, checksum: bool
) -> None:
    sizes = [1, 4095, 4096, 65537, STRIPE_BYTES, 3 * STRIPE_BYTES + 1, 9 * MIB + 12345]
    with ExtentStore(folders(tmp_path, num_paths), 64 * MIB, checksum=checksum, engine=engine) as store:
        extents = [store.allocate(size) for size in sizes]
        data = [random_bytes(size, shift=index % 2) for index, size in enumerate(sizes)]
        writes = [store.write(extent, part) for extent, part in zip(extents, data, strict=True)]
        for handle in writes:
            handle.wait()
        back = [host_buffer(size) for size in sizes]
        reads = [store.read(extent, part) for extent, part in zip(extents, back, strict=True)]
        for handle in reads:
            handle.wait()
        assert all(torch.equal(a, b) for a, b in zip(data, back, strict=True))


@pytest.mark.parametrize("checksum", [False, True])
def test_parts_of_an_extent_are_written_and_read_at_their_offsets(
    engine: DiskEngine, tmp_path: Path, checksum: bool
) -> None:
    with ExtentStore(folders(tmp_path, 2), 32 * MIB, checksum=checksum, engine=engine) as store:
        data = random_bytes(20 * MIB + 100)
        extent = store.allocate(data.numel())
        cuts = [0, 3 * MIB, 3 * MIB + 65536, 11 * MIB, data.numel()]
        handles = [store.write(extent, data[a:b], a) for a, b in itertools.pairwise(cuts)]
        for handle in handles:
            handle.wait()
        for start, end in ((0, data.numel()), (65536, 7 * MIB), (13 * MIB, data.numel())):
            back = host_buffer(end - start)
            store.read(extent, back, start).wait()
            assert torch.equal(back, data[start:end])


def test_freed_space_is_used_again_also_in_pieces(engine: DiskEngine, tmp_path: Path) -> None:
    with ExtentStore(tmp_path, 16 * MIB, engine=engine) as store:
        extents = [store.allocate(MIB) for _ in range(16)]
        assert store.free_bytes == 0
        for extent in extents[::2]:
            store.free(extent)
        assert store.free_bytes == 8 * MIB
        data = random_bytes(8 * MIB)
        scattered = store.allocate(8 * MIB)  # no run of free space is larger than 1 MiB
        assert len(scattered.lanes[0]) == 8
        store.write(scattered, data).wait()
        back = host_buffer(8 * MIB)
        store.read(scattered, back).wait()
        assert torch.equal(back, data)


def test_an_extent_that_does_not_fit_says_what_is_free(tmp_path: Path) -> None:
    with ExtentStore(tmp_path, 4 * MIB) as store:
        kept = store.allocate(3 * MIB)
        with pytest.raises(DiskError, match=r"2,097,152 bytes does not fit .* 1,048,576 of its 4,194,304") as caught:
            store.allocate(2 * MIB)
        assert caught.value.errno == errno.ENOSPC
        store.write(kept, host_buffer(3 * MIB)).wait()
        store.allocate(MIB)  # what is free is still there


@pytest.mark.parametrize(("num_paths", "seed"), [(3, 0), (4, 353), (8, 0)])
def test_the_capacity_asked_for_can_be_filled_over_several_paths(tmp_path: Path, num_paths: int, seed: int) -> None:
    stripes = random.Random(seed).choices([0.22, 1.9, 3.8], k=20)
    sizes = [round(number * STRIPE_BYTES / 4096) * 4096 for number in stripes]
    with ExtentStore(folders(tmp_path, num_paths), sum(sizes)) as store:
        for size in sizes:
            store.allocate(size)


def test_nothing_is_to_be_seen_in_the_folder(tmp_path: Path) -> None:
    with ExtentStore(tmp_path, MIB):
        assert list(tmp_path.iterdir()) == []


def make_extent(nbytes: int, num_paths: int, pieces: int) -> Extent:
    """An extent whose lanes are cut into spans in reverse order, each path's file its own."""
    lanes = []
    for size in lane_bytes(nbytes, num_paths):
        cuts = [65536] * min(pieces - 1, size // 65536)
        spans = [*cuts, size - sum(cuts)]
        ends = [sum(spans[index + 1 :]) for index in range(len(spans))]
        lanes.append(tuple(FileSpan(end, length) for end, length in zip(ends, spans, strict=True) if length))
    return Extent(0, nbytes, tuple(range(num_paths)), tuple(lanes))


@pytest.mark.parametrize("num_paths", [1, 2, 5])
@pytest.mark.parametrize("pieces", [1, 4])
def test_the_parts_of_an_extent_cover_it_once_and_never_overlap(num_paths: int, pieces: int) -> None:
    nbytes = 23 * MIB + 8192
    extent = make_extent(nbytes, num_paths, pieces)
    found = list(parts(extent, 0, nbytes))
    assert [part.start for part in found] == [sum(p.length for p in found[:i]) for i in range(len(found))]
    assert sum(part.length for part in found) == nbytes
    places = sorted((part.path, part.offset, part.length) for part in found)
    for (path, offset, length), (next_path, next_offset, _) in itertools.pairwise(places):
        assert path != next_path or offset + length <= next_offset
    inner = list(parts(extent, 5 * MIB + 4096, 4 * MIB))
    whole = {(part.path, part.offset + i) for part in found for i in range(0, part.length, 4096)}
    assert {(part.path, part.offset + i) for part in inner for i in range(0, part.length, 4096)} <= whole
    assert sum(part.length for part in inner) == 4 * MIB


def test_a_free_list_gives_the_tightest_span_and_joins_what_comes_back() -> None:
    spans = FreeList(100 * 65536)
    taken = [spans.take(10 * 65536) for _ in range(10)]
    assert spans.take(1) is None
    for index in (3, 5, 4):  # 4 joins its neighbours
        spans.give(taken[index][0])
    assert spans.take(30 * 65536) == (FileSpan(30 * 65536, 30 * 65536),)
    spans.give(taken[0][0])
    spans.give(taken[7][0])
    spans.give(taken[8][0])
    assert spans.take(10 * 65536) == (taken[0][0],)
    assert spans.free_bytes == 20 * 65536
