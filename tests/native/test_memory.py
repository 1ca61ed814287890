"""Host buffers: alignment, exact size, lifetime; and how much memory is free under cgroup limits."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from unbounded.errors import PlanError
from unbounded.native.host_memory import PAGE_BYTES, available_bytes, host_buffer, touch

MIB = 1 << 20


def mapped(address: int) -> bool:
    """Whether a mapping of this process holds the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(("nbytes", "alignment"), [(1, 4096), (4097, 4096), (2 * MIB, 2 * MIB), (5 * MIB + 3, 2 * MIB)])
def test_a_buffer_is_aligned_zero_and_exactly_as_large_as_asked(nbytes: int, alignment: int) -> None:
    buffer = host_buffer(nbytes)
    assert (buffer.dtype, buffer.shape) == (torch.uint8, (nbytes,))
    assert buffer.data_ptr() % alignment == 0
    assert buffer.data_ptr() % PAGE_BYTES == 0
    assert not buffer.any()
    buffer.fill_(7)
    assert int(buffer.sum()) == 7 * nbytes


def test_an_empty_buffer_is_an_empty_tensor() -> None:
    assert host_buffer(0).numel() == 0


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(PlanError, match="-1 bytes"):
        host_buffer(-1)


def test_memory_is_taken_when_touched_and_given_back_when_the_last_view_dies() -> None:
    before = resident_bytes()
    buffer = host_buffer(64 * MIB)
    address = buffer.data_ptr()
    assert resident_bytes() - before < 32 * MIB  # nothing was written yet
    touch(buffer, 2)
    assert resident_bytes() - before > 56 * MIB
    view = buffer[MIB:].view(torch.float32)
    del buffer
    gc.collect()
    assert mapped(address)
    assert float(view.sum()) == 0
    del view
    gc.collect()
    assert not mapped(address + 32 * MIB)
    assert resident_bytes() - before < 32 * MIB


def test_touching_changes_no_value() -> None:
    buffer = host_buffer(3 * MIB)
    buffer.random_()
    copy = buffer.clone()
    touch(buffer[5:-7], 2)
    assert torch.equal(buffer, copy)


def test_touching_what_is_not_contiguous_is_refused() -> None:
    with pytest.raises(PlanError, match="not contiguous"):
        touch(torch.zeros(4, 4).t()[1:], 1)


def fake_proc(root: Path, cgroup: str, available_kib: int) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root / "proc"


def fill(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_available_bytes_is_what_the_kernel_calls_available_without_limits(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "0::/\n", 1000)
    assert available_bytes(proc=proc, cgroups=tmp_path / "none") == 1000 * 1024


def test_available_bytes_stays_within_a_parent_cgroup_of_version_two(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "0::/job/rank\n", 1 << 30)
    root = tmp_path / "cgroup"
    fill(root / "job", memory__max=5000, memory__current=3000, memory__stat="inactive_file 500")
    fill(root / "job/rank", memory__max="max", memory__current=3000, memory__stat="inactive_file 0")
    assert available_bytes(proc=proc, cgroups=root) == 2500  # the page cache of 500 can be reclaimed


def test_available_bytes_stays_within_a_cgroup_of_version_one_seen_as_the_root(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "4:cpu:/x\n3:memory:/docker/abc\n", 1 << 30)
    root = tmp_path / "cgroup"
    fill(
        root / "memory",
        memory__limit_in_bytes=9000,
        memory__usage_in_bytes=1000,
        memory__stat="cache 1\ntotal_inactive_file 0",
    )
    assert available_bytes(proc=proc, cgroups=root) == 8000


def test_available_bytes_here_is_positive_and_no_more_than_there_is() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available_bytes() <= total
