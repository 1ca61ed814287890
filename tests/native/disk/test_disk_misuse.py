"""Wrong use of the disk engine: each is refused with what was given and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.native.disk.test_disk import MIB
from unbounded.errors import DiskError, PlanError, StateError
from unbounded.native.disk import DiskEngine, ExtentStore
from unbounded.native.host_memory import host_buffer


@pytest.fixture
def engine() -> Iterator[DiskEngine]:
    with DiskEngine(block_bytes=MIB) as opened:
        yield opened


def test_wrong_buffers_are_refused_with_what_they_are(tmp_path: Path) -> None:
    with ExtentStore(tmp_path, 4 * MIB) as store, ExtentStore(tmp_path, 4 * MIB) as other:
        extent = store.allocate(MIB)
        with pytest.raises(PlanError, match=r"tensor on meta\. Copy it to host memory"):
            store.read(extent, torch.empty(16, device="meta"))
        with pytest.raises(PlanError, match=r"shape \(4, 4\) that is not contiguous"):
            store.write(extent, torch.zeros(4, 4).t()[:, :4])
        with pytest.raises(PlanError, match="bytes 0 to 2097152 are not all in extent 0, which has 1048576"):
            store.write(extent, host_buffer(2 * MIB))
        with pytest.raises(PlanError, match="not in multiples of 4096"):
            store.write(extent, host_buffer(4096), offset=512)
        with pytest.raises(PlanError, match="not in multiples of 4096"):
            store.write(extent, host_buffer(1000))
        with pytest.raises(PlanError, match="empty tensor"):
            store.write(extent, host_buffer(0))
        with pytest.raises(StateError, match="is not in this store"):
            other.read(extent, host_buffer(MIB))
    with DiskEngine() as engine:
        file = engine.open(tmp_path / "f", create=True)
        with pytest.raises(PlanError, match=r"offset -1 of .* is negative"):
            file.read(-1, host_buffer(10))


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="num_threads is 0"):
        DiskEngine(num_threads=0)
    with pytest.raises(PlanError, match="no disk path was given"):
        ExtentStore([], MIB)
    with pytest.raises(PlanError, match="capacity_bytes is 0"):
        ExtentStore(tmp_path, 0)


def test_use_after_close_is_refused(engine: DiskEngine, tmp_path: Path) -> None:
    store = ExtentStore(tmp_path, MIB, engine=engine)
    extent = store.allocate(4096)
    store.close()
    store.close()
    for use in (lambda: store.allocate(1), lambda: store.read(extent, host_buffer(4096)), lambda: store.free(extent)):
        with pytest.raises(DiskError, match="was used after it was closed"):
            use()
    file = engine.open(tmp_path / "file", create=True)
    file.close()
    file.close()
    for use in (lambda: file.write(0, host_buffer(1)), file.sync, lambda: file.truncate(0), lambda: file.size_bytes):
        with pytest.raises(DiskError, match=r"was used after it was closed\. Open it again"):
            use()
    file = engine.open(tmp_path / "file")
    engine.close()
    with pytest.raises(DiskError, match="the disk engine was closed"):
        file.read(0, host_buffer(1))


def test_a_freed_extent_cannot_be_used(tmp_path: Path) -> None:
    with ExtentStore(tmp_path, MIB) as store:
        extent = store.allocate(4096)
        store.free(extent)
        for use in (lambda: store.free(extent), lambda: store.read(extent, host_buffer(4096))):
            with pytest.raises(StateError, match="extent 0 of 4096 bytes is not in this store: it was freed"):
                use()


def test_a_write_to_a_file_opened_read_only_is_an_error(engine: DiskEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    file = engine.open(tmp_path / "file", read_only=True)
    with pytest.raises(DiskError, match=r"opened read-only, or closed meanwhile\. Open it for writing"):
        file.write(0, host_buffer(4096)).wait()
