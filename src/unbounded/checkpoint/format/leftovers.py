"""Locks of saves, and what killed saves have left beside their folders.

Every save removes what dead saves left, also for other folders beside its own: a run that is killed while it writes
`step-20` resumes and saves `step-30`, and nobody would save `step-20` again. A lock shows that a save is still running.
A filesystem may keep locks to one machine, so leftovers of another machine count as dead only after a day without a
change. If it has no locks at all (Lustre may be mounted so), all leftovers do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

_LEFT = re.compile(r"\.(?P<name>.+)\.(saving|old)-[0-9a-f]{12}")
_TOKEN = re.compile(r"[0-9a-f]{12}")
ABANDONED_SECONDS = 24 * 3600
CLEANING_SECONDS = 0.5
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class SaveLock:
    """The lock of one checkpoint's folder. Its file says on which machine the last holder ran.

    If it does not `exclude`, the filesystem has no locks, and nobody knows who else saves.
    """

    def __init__(self, path: Path, fd: int, *, excludes: bool = True) -> None:
        self._path, self._fd, self.excludes = path, fd, excludes

    @classmethod
    def take(cls, folder: Path) -> SaveLock | None:
        """The lock, or None if a running save holds it. Waits for one that only cleans up."""
        lock, deadline = cls.find(folder), time.monotonic() + CLEANING_SECONDS
        while lock is None and time.monotonic() < deadline:
            time.sleep(0.01)
            lock = cls.find(folder)
        if lock is not None:
            with contextlib.suppress(OSError):  # the disk is full; the note is only a hint for others
                os.pwrite(lock._fd, _this_machine().ljust(256), 0)
        return lock

    @classmethod
    def find(cls, folder: Path) -> SaveLock | None:
        """Like `take`, with the note of the last holder left as it is."""
        path = beside(folder, "lock")
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder before may have removed the file between our open and our lock.
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
                    return cls(path, fd)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return cls(path, fd, excludes=False)
                os.close(fd)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return None
                if error.errno != errno.ENOENT:
                    raise
            else:
                os.close(fd)

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    def note(self) -> bytes:
        """The machine of the last holder; empty if there was none."""
        return os.pread(self._fd, 256, 0).strip()

    def release(self, *, remove: bool) -> None:
        """Releases the lock; with `remove`, also its file, if nothing is left that needs its note."""
        if remove:
            with contextlib.suppress(OSError):
                self._path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # a child forked in the meantime has the descriptor too
        os.close(self._fd)
        self._fd = -1


def beside(folder: Path, what: str) -> Path:
    return folder.parent / f".{folder.name}.{what}"


def left_beside(folder: Path, what: str) -> list[Path]:
    """The folders `.<name>.<what>-<token>`. Names are compared, not matched: they may have any character."""
    prefix = f".{folder.name}.{what}-"
    try:
        entries = sorted(folder.parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [e for e in entries if e.name.startswith(prefix) and _TOKEN.fullmatch(e.name[len(prefix) :])]


def remove_dead_saves(folder: Path, lock: SaveLock, is_whole: Callable[[Path], bool]) -> None:
    """Called by the holder of the folder's `lock`. Removes what dead saves left of it and of the folders beside it."""
    if lock.excludes or _is_abandoned(folder):
        _clean(folder, is_whole)
    names = {match["name"] for entry in folder.parent.iterdir() if (match := _LEFT.fullmatch(entry.name))}
    for name in sorted(names - {folder.name}):
        with contextlib.suppress(OSError):  # it belongs to somebody else, so a failure does not matter
            _clean_other(folder.parent / name, is_whole)


def _clean_other(folder: Path, is_whole: Callable[[Path], bool]) -> None:
    lock = SaveLock.find(folder)
    if lock is None:
        return
    is_clean = False
    try:
        note = lock.note()
        if (lock.excludes and note == _this_machine()) or _is_abandoned(folder):
            _clean(folder, is_whole)
        is_clean = not note or not [*left_beside(folder, "saving"), *left_beside(folder, "old")]
    finally:
        lock.release(remove=is_clean)


def _this_machine() -> bytes:
    return os.uname().nodename.encode()[:256]


def _is_abandoned(folder: Path) -> bool:
    """Whether what a save left has not changed for a long time."""
    left = [*left_beside(folder, "saving"), *left_beside(folder, "old")]
    try:
        changed = [os.stat(path).st_mtime for entry in left for path in [entry, *entry.iterdir()]]
    except OSError:  # somebody is changing it now
        return False
    return bool(changed) and time.time() - max(changed) > ABANDONED_SECONDS


def _clean(folder: Path, is_whole: Callable[[Path], bool]) -> None:
    """Called when none of it is alive. A replacement that was cut short is undone."""
    for old in left_beside(folder, "old"):
        if is_whole(folder):
            shutil.rmtree(old, ignore_errors=True)
        elif is_whole(old):
            if folder.exists():
                shutil.rmtree(folder)
            os.rename(old, folder)
    for staging in left_beside(folder, "saving"):
        shutil.rmtree(staging, ignore_errors=True)
