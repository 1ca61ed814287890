"""The disk engine and processes that are killed, forked, confined, run side by side, or run for long."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import process
from tests.native.disk.test_disk import MIB, random_bytes
from tests.native.faults import mounted_tmpfs
from unbounded.native.disk import DiskEngine, ExtentStore, place
from unbounded.native.host_memory import host_buffer


@pytest.fixture
def engine() -> Iterator[DiskEngine]:
    with DiskEngine(block_bytes=MIB) as opened:
        yield opened


HOLDS_A_STORE = """
import sys, time
from unbounded.native.disk import DiskEngine, ExtentStore, place
if sys.argv[2] == "named":  # a filesystem on which neither O_TMPFILE nor removing an open file works
    import os
    place.os = type("os", (), {**vars(os), "unlink": staticmethod(lambda path: (_ for _ in ()).throw(OSError(16)))})
    place._NO_TMPFILE = (95,)
    real = os.open
    def refuse(path, flags, *rest):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "refused")
        return real(path, flags, *rest)
    place.os.open = staticmethod(refuse)
from unbounded.native.host_memory import host_buffer
store = ExtentStore(sys.argv[1], 64 << 20, engine=DiskEngine())
data, extent = host_buffer(64 << 20), store.allocate(64 << 20)
store.write(extent, data).wait()
print("ready", flush=True)
while True:
    store.write(extent, data).wait()
"""


def start_holder(folder: Path, kind: str) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDS_A_STORE, folder, kind], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    return holder


def kill(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()


def test_a_killed_process_leaves_no_file_and_no_space_behind(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=96m") as folder:
        holder = start_holder(folder, "anonymous")
        assert list(folder.iterdir()) == []
        assert place.free_bytes(folder) < 40 * MIB
        kill(holder)
        assert process.eventually(lambda: place.free_bytes(folder) > 90 * MIB)


def test_files_that_could_not_be_removed_are_kept_while_in_use_and_reclaimed_at_the_next_start(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, "named")
    assert len(list(tmp_path.iterdir())) == 1
    with ExtentStore(tmp_path, MIB):
        assert len(list(tmp_path.iterdir())) == 1  # its owner lives
    kill(holder)
    assert len(list(tmp_path.iterdir())) == 1
    with ExtentStore(tmp_path, MIB):
        assert list(tmp_path.iterdir()) == []


def test_two_stores_on_one_path_do_not_disturb_each_other(engine: DiskEngine, tmp_path: Path) -> None:
    with ExtentStore(tmp_path, 4 * MIB, engine=engine) as first:
        data, back = random_bytes(4 * MIB), host_buffer(4 * MIB)
        extent = first.allocate(4 * MIB)
        first.write(extent, data).wait()
        with ExtentStore(tmp_path, 4 * MIB, engine=engine) as second:
            second.write(second.allocate(4 * MIB), random_bytes(4 * MIB)).wait()
        first.read(extent, back).wait()
        assert torch.equal(back, data)


def test_a_thousand_files_and_stores_leave_no_descriptor_or_thread(tmp_path: Path) -> None:
    data = host_buffer(8192)
    DiskEngine().close()
    threads, files = process.settled()
    with DiskEngine() as engine:
        for index in range(1000):
            file = engine.open(tmp_path / "file", create=True)
            file.write(0, data).wait()
            if index % 2:  # the others go with their last reference
                file.close()
        del file
    for _ in range(40):
        with DiskEngine() as engine, ExtentStore(tmp_path, MIB, engine=engine) as store:
            store.write(store.allocate(8192), data).wait()
    threads_after, files_after = process.settled(threads=threads, files=files)
    assert threads_after <= threads  # one that an earlier test started may have ended since
    assert files_after <= files
