"""Checksums that the engine's threads compute while they write, and compare while they read."""

import contextlib
import errno
import os

import pytest
import torch

from tests import process
from unbounded.errors import DiskError, PlanError
from unbounded.native.disk import Checksums, DiskEngine, crc32c
from unbounded.native.host_memory import host_buffer

MIB = 1 << 20


def noise(nbytes: int) -> torch.Tensor:
    buffer = host_buffer(nbytes)
    buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    return buffer


@pytest.fixture
def engine():
    with DiskEngine(block_bytes=2 * MIB) as opened:
        yield opened


@pytest.mark.parametrize("shift", [0, 64])  # 64: memory off a page, so that it goes through a bounce buffer
def test_a_write_records_what_a_read_is_held_against(engine, tmp_path, shift):
    data = noise(5 * MIB + 8192)[shift : shift + 5 * MIB + 4096]  # blocks of two grains, the last grain short
    sums = Checksums.empty(MIB, data.numel())
    with engine.open(tmp_path / "f", create=True) as file:
        file.write(4096, data, sums).wait()
        assert sums.values() == [crc32c(part) for part in data.split(MIB)]
        back = host_buffer(data.numel())
        file.read(4096, back, Checksums(MIB, sums.values())).wait()
        assert torch.equal(back, data)


def test_a_flipped_bit_fails_the_read_and_names_its_block(engine, tmp_path):
    data = noise(4 * MIB)
    sums = Checksums.empty(MIB, data.numel())
    with engine.open(tmp_path / "f", create=True) as file:
        file.write(0, data, sums).wait()
        file.write(3 * MIB + 4096, data[:4096]).wait()
        with pytest.raises(DiskError, match=f"at offset {3 * MIB} .*CRC32C differs") as caught:
            file.read(0, host_buffer(data.numel()), sums).wait()
        assert caught.value.errno == errno.EBADMSG
        file.read(0, host_buffer(3 * MIB), sums).wait()


def test_what_cannot_be_checksummed_on_the_way_is_refused(engine, tmp_path):
    with engine.open(tmp_path / "f", create=True) as file:
        for offset, nbytes, grain in ((512, MIB, MIB), (0, MIB + 512, MIB), (0, 3 * MIB, 3 * MIB)):
            with pytest.raises(PlanError, match=r"cannot be checksummed .* Use whole pages of 4096 bytes"):
                file.write(offset, host_buffer(nbytes), Checksums.empty(grain, nbytes))
        with pytest.raises(PlanError, match="1 checksums of 1048576 bytes each do not cover 2097152 bytes"):
            file.write(0, host_buffer(2 * MIB), Checksums.empty(MIB, MIB))


def niceness_of_lanes() -> dict[int, int]:
    """The priority of every thread of a disk engine in this process."""
    found = {}
    for number in [number for number, name in process.threads().items() if name.startswith("disk-")]:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            found[number] = os.getpriority(os.PRIO_PROCESS, number)
    return found


def test_the_threads_of_a_nice_engine_give_way_and_the_callers_does_not(tmp_path):
    own, others = os.getpriority(os.PRIO_PROCESS, 0), niceness_of_lanes()
    with DiskEngine(niceness=7) as engine, engine.open(tmp_path / "f", create=True) as file:
        file.write(0, host_buffer(32 * MIB)).wait()

        def niceness_of_these() -> set[int]:
            return {niceness for number, niceness in niceness_of_lanes().items() if number not in others}

        assert process.eventually(lambda: niceness_of_these() == {min(own + 7, 19)}), niceness_of_these()
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
