"""What goes wrong with disks: each fault is made to happen, is reported clearly, and harms nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.native.disk.test_disk import MIB, random_bytes
from tests.native.faults import build_shim, flip_bit, loop_device, mounted_tmpfs, run_python
from unbounded.errors import DiskError
from unbounded.native.disk import DiskEngine, ExtentStore, bindings, place
from unbounded.native.host_memory import host_buffer


@pytest.fixture
def engine() -> Iterator[DiskEngine]:
    with DiskEngine(block_bytes=MIB) as opened:
        yield opened


# --- space


def test_a_store_that_does_not_fit_says_at_once_how_much_is_short(engine: DiskEngine, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "size=4m") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            DiskError, match=r"cannot hold 16,777,216 bytes: 4,194,304 are free, which is 12,582,912 too few"
        ) as e:
            ExtentStore(folder, 16 * MIB, engine=engine)
        assert (e.value.errno, e.value.filename) == (errno.ENOSPC, str(folder))
        assert "lower disk_bytes, or add another disk_path" in str(e.value)
        with ExtentStore(folder, 3 * MIB, engine=engine) as store:  # what was taken before is free again
            assert store.free_bytes == 3 * MIB


def test_a_disk_that_fills_up_fails_that_write_alone(engine: DiskEngine, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "size=4m") as folder:
        kept = random_bytes(2 * MIB)
        with engine.open(folder / "kept", create=True) as file, engine.open(folder / "large", create=True) as large:
            file.write(0, kept).wait()
            with pytest.raises(DiskError, match=rf"write of 8388608 bytes at offset 0 .*{folder}/large.*ENOSPC") as e:
                large.write(0, random_bytes(8 * MIB)).wait()
            assert e.value.errno == errno.ENOSPC
            back = host_buffer(2 * MIB)
            file.read(0, back).wait()
            assert torch.equal(back, kept)


def test_a_file_that_cannot_be_reserved_is_not_left_behind(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "size=4m") as folder, DiskEngine() as engine:
        with pytest.raises(DiskError, match=r"too few.* Free space there, or choose another folder\."):  # no disk_path
            engine.open(folder / "new", create=True, size_bytes=16 * MIB)
        assert list(folder.iterdir()) == []


def test_where_blocks_cannot_be_reserved_files_have_holes_and_a_length_that_is_refused_leaves_none(
    engine: DiskEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings.disk(), "allocate", lambda *_: errno.EOPNOTSUPP)  # NFS 3, ZFS
    with ExtentStore(tmp_path, 4 * MIB, engine=engine) as store:
        extent, data, back = store.allocate(4 * MIB), random_bytes(MIB), host_buffer(4 * MIB)
        store.write(extent, data, offset=2 * MIB).wait()
        store.read(extent, back).wait()
        assert torch.equal(back[2 * MIB : 3 * MIB], data)
        assert not back[: 2 * MIB].any()

    def refuse(*_: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(
        DiskError, match=r"4,194,304 bytes could not be reserved on .*new: File too large .*Check its"
    ) as e:
        engine.open(tmp_path / "new", create=True, size_bytes=4 * MIB)
    assert e.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


FILE_SIZE_LIMIT = """
import resource, sys
from unbounded.native.disk import DiskEngine
from unbounded.native.host_memory import host_buffer
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
with DiskEngine() as engine, engine.open(sys.argv[1] + "/file", create=True) as file:
    try:
        file.write(0, host_buffer(4 << 20)).wait()
    except OSError as error:
        print(error.errno, error)
"""


def test_a_limit_on_file_sizes_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    done = run_python(FILE_SIZE_LIMIT, tmp_path)
    assert done.stdout.startswith(f"{errno.EFBIG} "), done.stderr
    assert "ulimit -f" in done.stdout


# --- paths


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r'disk path ".*/gone" does not exist. Create it'):
        ExtentStore(tmp_path / "gone", MIB)
    with DiskEngine() as engine, pytest.raises(DiskError, match=r"gone.*No such file.*create=True") as caught:
        engine.open(tmp_path / "gone")
    assert caught.value.errno == errno.ENOENT


def test_a_path_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="is not a folder"):
        ExtentStore(tmp_path / "file", MIB)


def test_a_path_mounted_read_only_is_named(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "fixed", "ro,size=1m") as folder:
        with pytest.raises(DiskError, match=r"on a read-only filesystem\. Remount it") as caught:
            ExtentStore(folder, MIB)
        assert caught.value.errno == errno.EROFS


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(DiskError, match="is not writable by this user") as caught:
        ExtentStore(tmp_path, MIB)
    assert caught.value.errno == errno.EACCES


def test_a_path_on_tmpfs_works_with_a_warning(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "memory", "size=8m") as folder:
        with pytest.warns(UserWarning, match="is on tmpfs, so offloading there takes host memory. Choose"):
            store = ExtentStore(folder, MIB)
        store.close()


# --- transfers


def test_a_file_truncated_behind_our_back_is_a_short_read_and_other_reads_go_on(
    engine: DiskEngine, tmp_path: Path
) -> None:
    data = random_bytes(8 * MIB)
    with engine.open(tmp_path / "file", create=True) as file:
        file.write(0, data).wait()
        os.truncate(tmp_path / "file", 5 * MIB + 100)
        back = host_buffer(8 * MIB)
        first = file.read(0, back[: 5 * MIB])
        with pytest.raises(DiskError, match=rf"failed at offset {5 * MIB + 100} of .*the file ends before") as caught:
            file.read(4 * MIB, back[4 * MIB :]).wait()
        assert caught.value.errno == errno.ENODATA
        first.wait()
        assert torch.equal(back[: 5 * MIB], data[: 5 * MIB])


def test_a_device_that_answers_with_an_io_error_is_told_with_path_offset_and_errno(
    engine: DiskEngine, tmp_path: Path
) -> None:
    image, data = tmp_path / "image", random_bytes(4 * MIB)
    with loop_device(image, 4 * MIB) as device, engine.open(device) as file:
        file.write(0, data).wait()
        os.truncate(image, 2 * MIB)
        back = host_buffer(4 * MIB)
        with pytest.raises(DiskError, match=rf"read of 2097152 bytes at offset 2097152 .*{device}.*errno 5, EIO") as e:
            file.read(2 * MIB, back[2 * MIB :]).wait()
        assert (e.value.errno, e.value.filename) == (errno.EIO, device)
        file.read(0, back[: 2 * MIB]).wait()
        assert torch.equal(back[: 2 * MIB], data[: 2 * MIB])


LYING_CALLS = """
import ctypes, errno, sys, torch
from unbounded.native.disk import DiskEngine
from unbounded.native.host_memory import host_buffer
shim = ctypes.CDLL(None)
def inject(count, code=0, nbytes=0):
    ctypes.c_int.in_dll(shim, "fault_errno").value = code
    ctypes.c_long.in_dll(shim, "fault_bytes").value = nbytes
    ctypes.c_int.in_dll(shim, "fault_count").value = count
data = host_buffer(4 << 20).random_()
with DiskEngine(block_bytes=1 << 20) as engine:
    with engine.open(sys.argv[1] + "/file", create=True) as file:
        for name, fault in {
            "short aligned": dict(count=7, nbytes=8192),
            "short unaligned": dict(count=7, nbytes=5000),
            "interrupted": dict(count=5, code=errno.EINTR),
            "busy": dict(count=5, code=errno.EAGAIN),
            "no direct": dict(count=1, code=errno.EINVAL),
        }.items():
            back = host_buffer(4 << 20)
            inject(**fault)
            file.write(0, data).wait()
            if name != "no direct":  # given up by now
                inject(**fault)
            file.read(0, back).wait()
            left = ctypes.c_int.in_dll(shim, "fault_count").value
            print(name, torch.equal(back, data), left <= 1, file.is_direct)
        inject(1, errno.EIO)
        try:
            file.read(0, back).wait()
        except OSError as error:
            print("error", error.errno)
        file.read(0, back).wait()
        print("after", torch.equal(back, data))
"""


def test_short_interrupted_and_refused_calls_are_resumed_and_errors_raised(tmp_path: Path) -> None:
    done = run_python(LYING_CALLS, tmp_path, LD_PRELOAD=str(build_shim(tmp_path)))
    assert done.stdout.splitlines() == [
        "short aligned True True True",
        "short unaligned True True True",
        "interrupted True True True",
        "busy True True True",
        "no direct True True False",  # falls back to the page cache
        f"error {errno.EIO}",
        "after True",
    ], done.stderr


def test_a_filesystem_that_refuses_direct_when_opening_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, *rest, **options)

    with DiskEngine() as engine:
        monkeypatch.setattr(os, "open", refuse)
        data, back = random_bytes(MIB + 1), host_buffer(MIB + 1)
        with (
            engine.open(tmp_path / "file", create=True) as file,
            ExtentStore(tmp_path, 2 * MIB, engine=engine) as store,
        ):
            extent = store.allocate(MIB + 1)
            assert not file.is_direct
            assert not store.is_direct
            store.write(extent, data).wait()
            store.read(extent, back).wait()
            assert torch.equal(back, data)


@pytest.mark.parametrize("fault", ["no locks", "being reclaimed", "reclaimed"])
def test_without_unnamed_files_a_store_works_without_locks_and_beside_others_that_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    real_open, lock, opened, others = os.open, fcntl.flock, [], []

    def refuse_unnamed(path: str | Path, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "refused")
        fd = real_open(path, flags, *rest, **options)
        if flags & os.O_CREAT and str(path).endswith(place.SUFFIX):
            opened.append(fd)
            if len(opened) == 1 and fault == "being reclaimed":
                others.append(real_open(path, os.O_RDWR))
                lock(others[0], fcntl.LOCK_EX)
            elif len(opened) == 1 and fault == "reclaimed":
                assert place.reclaim(tmp_path) == [path]
        return fd

    def refuse_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "refused")

    monkeypatch.setattr(os, "open", refuse_unnamed)
    if fault == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse_locks)
    with DiskEngine() as engine, ExtentStore(tmp_path, MIB, engine=engine) as store:
        data, back, extent = random_bytes(MIB), host_buffer(MIB), store.allocate(MIB)
        store.write(extent, data).wait()
        store.read(extent, back).wait()
        assert torch.equal(back, data)
        assert len(opened) == (1 if fault == "no locks" else 2)
    for other in others:
        os.close(other)


@pytest.mark.parametrize("num_paths", [1, 2])
def test_a_flipped_bit_is_found_and_named_and_other_extents_read_on(
    engine: DiskEngine, tmp_path: Path, num_paths: int
) -> None:
    folders = [tmp_path / str(index) for index in range(num_paths)]
    for folder in folders:
        folder.mkdir()
    with ExtentStore(folders, 32 * MIB, engine=engine) as store:
        data = random_bytes(10 * MIB)
        good, bad = store.allocate(10 * MIB), store.allocate(10 * MIB)
        store.write(good, data).wait()
        store.write(bad, data).wait()
        position = 9 * MIB + 70_000
        flip_bit(store, bad, position)
        back = host_buffer(10 * MIB)
        page = position // 4096 * 4096
        with pytest.raises(
            DiskError, match=rf"read of extent 1 at its offset {page} .*{tmp_path}.*CRC32C differs"
        ) as e:
            store.read(bad, back).wait()
        assert e.value.errno == errno.EBADMSG
        store.read(good, back).wait()
        assert torch.equal(back, data)
        store.read(bad, back[:page]).wait()  # the rest of it is whole


def test_what_was_never_written_reads_as_zeros_and_a_bit_flipped_there_is_found(tmp_path: Path) -> None:
    with ExtentStore(tmp_path, MIB) as store:
        extent, data, back = store.allocate(MIB - 100), random_bytes(65536), host_buffer(MIB - 100)
        assert extent.is_new
        store.write(extent, data).wait()
        store.read(extent, back).wait()
        assert torch.equal(back[:65536], data)
        assert not back[65536:].any()
        flip_bit(store, extent, MIB - 200)
        with pytest.raises(DiskError, match=rf"at its offset {MIB - 4096} .*CRC32C differs"):
            store.read(extent, back).wait()
        store.free(extent)
        assert not store.allocate(MIB).is_new


def test_a_store_without_checksums_keeps_none_and_notices_nothing(tmp_path: Path) -> None:
    with ExtentStore(tmp_path, MIB, checksum=False) as store, ExtentStore(tmp_path, MIB) as checked:
        assert (store.checksum_bytes, checked.checksum_bytes) == (0, MIB // 1024)
        extent = store.allocate(MIB)
        store.write(extent, random_bytes(MIB)).wait()
        flip_bit(store, extent, 5000)
        store.read(extent, host_buffer(MIB)).wait()
