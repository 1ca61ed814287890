"""A checkpoint's folder, and how it is made: whole at once, or not at all.

    claim      lock beside the folder; what dead saves left is removed; an empty staging folder is made
    (ranks write their files into the staging folder and fsync them)
    commit     manifest written and fsynced, staging folder fsynced, exchanged with the folder, parent fsynced
    release    the folder that was replaced, now under the staging name, is removed; lock gone

A folder counts as a checkpoint if and only if it holds a manifest, which is written last and under the staging name.
What lies beside a folder `x` while it is saved: `.x.lock`, `.x.saving-<12 hex digits>`, and `.x.old-<12 hex digits>`
if folders cannot be exchanged. The lock is the operating system's, so a killed process does not keep it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from unbounded.checkpoint.format.leftovers import SaveLock, beside, left_beside, remove_dead_saves
from unbounded.checkpoint.format.manifest import FILE_NAME
from unbounded.errors import CheckpointError, DiskError, MissingCheckpointError, UnboundedError
from unbounded.paths import expand_home

_OURS = re.compile(r"manifest\.json|data-\d+\.bin")
_EXCHANGE = 2
_AT_FDCWD = -100
# How often to look for a folder that another job may be replacing at the same time.
LOOKS = 5
# How often to read a checkpoint: again only if it was replaced during the last read.
ATTEMPTS = 20
T = TypeVar("T")


def data_name(rank: int) -> str:
    return f"data-{rank:05d}.bin"


def is_whole(folder: Path) -> bool:
    return (folder / FILE_NAME).is_file()


def find(folder: str | os.PathLike[str]) -> Path:
    """The folder to read: the one asked for or, if a replacement was cut short, the one being replaced."""
    path = real(folder)
    with told(path, "reading"):
        for _ in range(LOOKS):  # between the two renames of a replacement it is under neither name for a moment
            for candidate in [path, *left_beside(path, "old")]:
                if is_whole(candidate):
                    return candidate
        reason = "it does not exist" if not path.exists() else f"it has no {FILE_NAME}"
        found = list(path.iterdir()) if path.is_dir() else []
        inside = sorted(one.name for one in found if is_whole(one) and not one.name.startswith("."))
    instead = f'one of those inside it, such as "{inside[-1]}"' if inside else "the folder that a save was finished in"
    raise MissingCheckpointError(f"there is no whole checkpoint in {path}: {reason}. Give {instead}.")


def read_whole(folder: str | os.PathLike[str], work: Callable[[Path], T]) -> T:
    """What `work` returns for the checkpoint in `folder`; it is called again if another replaces that meanwhile."""
    for attempt in range(1, ATTEMPTS + 1):
        path = find(folder)
        before = identify(path)
        try:
            return work(path)
        except UnboundedError:
            if attempt == ATTEMPTS or identify(path) == before:
                raise
    raise AssertionError("the last attempt returns or raises")


def identify(folder: Path) -> tuple[int, ...] | None:
    """A value that changes when the checkpoint in `folder` is replaced by another; None if there is none."""
    try:
        held = os.stat(folder / FILE_NAME)
    except OSError:
        return None
    return held.st_dev, held.st_ino, held.st_size, held.st_mtime_ns


class Claim:
    """The right to write a checkpoint to one folder, from `claim` to `release`."""

    def __init__(self, folder: Path, lock: SaveLock) -> None:
        self.folder, self._lock = folder, lock
        self.staging = beside(folder, f"saving-{secrets.token_hex(6)}")

    def commit(self, manifest: bytes) -> None:
        """Makes the staging folder, whose data files are on stable storage, the checkpoint."""
        with told(self.folder):
            write_synced(self.staging / FILE_NAME, manifest)
            sync_folder(self.staging)
            self._put_in_place()
            sync_folder(self.folder.parent)

    def release(self) -> None:
        """Removes the staging folder (a failed save, or what was replaced), and always releases the lock."""
        if not self._lock.is_held:
            return
        try:
            shutil.rmtree(self.staging, ignore_errors=True)
            if is_whole(self.folder):
                for old in left_beside(self.folder, "old"):
                    shutil.rmtree(old, ignore_errors=True)
            is_clean = not os.path.lexists(self.staging)
        except OSError:  # out of descriptors, for example; the next save removes what is left
            is_clean = False
        finally:
            self._lock.release(remove=is_clean)

    def _put_in_place(self) -> None:
        if not self.folder.exists():
            os.rename(self.staging, self.folder)
        elif not _exchange(self.staging, self.folder):
            # Without an atomic exchange there is a moment with no folder; `find` then reads the old one.
            old = beside(self.folder, f"old-{secrets.token_hex(6)}")
            os.rename(self.folder, old)
            os.rename(self.staging, self.folder)


def claim(folder: str | os.PathLike[str]) -> Claim:
    """Locks `folder` for one save and makes its staging folder. Raises if another job is saving there."""
    path = real(folder)
    with told(path):
        _check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = SaveLock.take(path)
        if lock is None:
            raise CheckpointError(f"another job is saving to {path} now. Let it finish, or save to another folder.")
        made = Claim(path, lock)
        try:
            remove_dead_saves(path, lock, is_whole)
            made.staging.mkdir()
        except BaseException:
            made.release()
            raise
    return made


@contextlib.contextmanager
def told(folder: Path, doing: str = "saving to") -> Iterator[None]:
    """Raises the system's errors as a DiskError with the checkpoint, the path and the errno."""
    try:
        yield
    except UnboundedError:
        raise
    except OSError as error:
        place = str(error.filename or folder)
        remedy = (
            "Check the space and the permissions there. What was there before is unharmed."
            if doing != "reading"
            else "Check the disk and the permissions there."
        )
        told_error = DiskError(f"{doing} {folder} failed: {error.strerror} (errno {error.errno}) at {place}. {remedy}")
        told_error.errno, told_error.filename = error.errno, place
        raise told_error from error


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file to stable storage; a system error names it."""
    with _named(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to stable storage; a system error names it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _named(folder):
            os.fsync(fd)
    finally:
        os.close(fd)


def real(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, with links followed."""
    return Path(os.path.realpath(expand_home(folder)))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the path to errors of calls on descriptors, which do not name a file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _check_replaceable(path: Path) -> None:
    if os.path.ismount(path):
        raise CheckpointError(
            f"{path} is a mount point, and saving replaces the whole folder. Save to a folder inside it."
        )
    if path.is_dir():
        foreign = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name))
        if foreign:
            shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
            raise CheckpointError(
                f"{path} holds files that do not belong to a checkpoint: {shown}. "
                "Saving replaces the whole folder, so choose another one or move them away."
            )
    elif path.exists():
        raise CheckpointError(f"{path} is a file. A checkpoint is a folder; choose another name.")


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders atomically; False if the system or the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))
