"""A checkpoint's folder and how it comes to be: whole at once, or not at all.

    claim      lock beside the folder; what dead saves left is removed; an empty staging folder is made
    (ranks write their files into the staging folder and fsync them)
    commit     manifest written and fsynced, staging folder fsynced, exchanged with the folder, parent fsynced
    release    lock gone; the folder that was replaced, now under the staging name, is removed

A folder counts as a checkpoint if and only if it holds a manifest, which is written last and under the staging
name. The lock is the operating system's, so that a killed process leaves none behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from unbounded.checkpoint.manifest import FILE_NAME, MissingCheckpointError
from unbounded.errors import CheckpointError, DiskError, UnboundedError

_OURS = re.compile(r"manifest\.json|data-\d+\.bin")
_EXCHANGE = 2
_AT_FDCWD = -100


def data_name(rank: int) -> str:
    return f"data-{rank:05d}.bin"


def is_whole(folder: Path) -> bool:
    return (folder / FILE_NAME).is_file()


def find(folder: str | os.PathLike[str]) -> Path:
    """The folder to read: the one asked for or, where a replacement was cut short, the one it was replacing."""
    path = _real(folder)
    if is_whole(path):
        return path
    for left in sorted(path.parent.glob(f".{path.name}.old-*")):
        if is_whole(left):
            return left
    reason = "it does not exist" if not path.exists() else f"it has no {FILE_NAME}"
    raise MissingCheckpointError(
        f"there is no whole checkpoint in {path}: {reason}. Give the folder that a save was finished in."
    )


class Claim:
    """The right to put a checkpoint into one folder, from `claim` to `release`."""

    def __init__(self, folder: Path, lock_fd: int) -> None:
        self.folder, self._lock_fd = folder, lock_fd
        self.staging = _beside(folder, f"saving-{secrets.token_hex(6)}")

    def commit(self, manifest: bytes) -> None:
        """Makes the staging folder, whose data files are on stable storage, the checkpoint."""
        with told(self.folder):
            with open(self.staging / FILE_NAME, "wb") as file:
                file.write(manifest)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self.staging)
            self._put_in_place()
            sync_folder(self.folder.parent)

    def release(self) -> None:
        """Gives the lock back, and removes the staging folder: a failed save, or what was replaced."""
        if self._lock_fd < 0:
            return
        shutil.rmtree(self.staging, ignore_errors=True)
        for old in self.folder.parent.glob(f".{self.folder.name}.old-*"):
            if is_whole(self.folder):
                shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):
            _beside(self.folder, "lock").unlink()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _put_in_place(self) -> None:
        if not self.folder.exists():
            os.rename(self.staging, self.folder)
        elif not _exchange(self.staging, self.folder):
            # Without an atomic exchange there is a moment with no folder; `find` then reads the old one.
            old = _beside(self.folder, f"old-{secrets.token_hex(6)}")
            os.rename(self.folder, old)
            os.rename(self.staging, self.folder)


def claim(folder: str | os.PathLike[str]) -> Claim:
    """Locks `folder` for one save and makes its staging folder. Raises where another job is saving there."""
    path = _real(folder)
    with told(path):
        _check_replaceable(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = Claim(path, _lock(path))
        try:
            _clean(path)
            made.staging.mkdir()
        except BaseException:
            made.release()
            raise
    return made


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Tells the system's errors with the checkpoint they hit."""
    try:
        yield
    except UnboundedError:
        raise
    except OSError as error:
        told_error = DiskError(
            f"saving to {folder} failed: {error.strerror} (errno {error.errno}) at {error.filename or folder}. "
            "Check the space and the permissions there; a checkpoint that was there before is unharmed."
        )
        told_error.errno, told_error.filename = error.errno, str(error.filename or folder)
        raise told_error from error


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _real(folder: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(os.path.expanduser(folder)))


def _beside(folder: Path, what: str) -> Path:
    return folder.parent / f".{folder.name}.{what}"


def _check_replaceable(path: Path) -> None:
    if path.is_dir():
        foreign = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name))
        if foreign:
            shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
            raise CheckpointError(
                f"{path} holds files that are not a checkpoint's: {shown}. "
                "Saving replaces the whole folder, so choose another one or move them away."
            )
    elif path.exists():
        raise CheckpointError(f"{path} is a file. A checkpoint is a folder; choose another name.")


def _lock(path: Path) -> int:
    lock = _beside(path, "lock")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before may have removed the file between our open and our lock.
            if os.path.exists(lock) and os.stat(lock).st_ino == os.fstat(fd).st_ino:
                return fd
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
                raise
            if error.errno == errno.ENOENT:
                continue
            raise CheckpointError(
                f"another job is saving to {path} now. Let it finish, or save to another folder."
            ) from None
        os.close(fd)


def _clean(path: Path) -> None:
    """Removes what dead saves left; called with the lock held, so none of it is alive."""
    for old in sorted(path.parent.glob(f".{path.name}.old-*")):
        if is_whole(path):
            shutil.rmtree(old, ignore_errors=True)
        elif is_whole(old):
            if path.exists():
                shutil.rmtree(path)
            os.rename(old, path)
    for left in path.parent.glob(f".{path.name}.saving-*"):
        shutil.rmtree(left, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders atomically; False where the system or the filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))
