"""Folders and descriptors: whether a path can hold a disk tier, and how files are opened and reserved there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import warnings
from pathlib import Path
from typing import NamedTuple

from unbounded.errors import DiskError
from unbounded.native.disk.bindings import disk
from unbounded.native.disk.handle import disk_error

PREFIX, SUFFIX = "unbounded-", ".extents"
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


class Descriptors(NamedTuple):
    """A file's descriptors; `direct_fd` is -1 without O_DIRECT, and may be the same as `fd`."""

    fd: int
    direct_fd: int
    named: Path | None = None  # still in its folder, to be removed when closed

    def close(self) -> None:
        for fd in {self.fd, self.direct_fd} - {-1}:
            os.close(fd)


def check_folder(folder: Path) -> None:
    """Raises a DiskError if `folder` cannot hold a disk tier; warns if it is host memory."""
    name = f'disk path "{folder}"'
    if not folder.exists():
        raise disk_error(errno.ENOENT, f"{name} does not exist. Create it, or choose another disk_path.", str(folder))
    if not folder.is_dir():
        raise disk_error(errno.ENOTDIR, f"{name} is not a folder. Give the folder that holds it.", str(folder))
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        text = f"{name} is on a read-only filesystem. Remount it, or choose another disk_path."
        raise disk_error(errno.EROFS, text, str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"{name} is not writable by this user. Change its permissions, or choose another disk_path."
        raise disk_error(errno.EACCES, text, str(folder))
    kind = filesystem(folder)
    if kind in _MEMORY_FILESYSTEMS:
        warnings.warn(
            f"{name} is on {kind}, so offloading there takes host memory. "
            'Choose a path on a block device, or place the states on "host".',
            stacklevel=3,
        )


def filesystem(path: Path) -> str:
    """The type of the filesystem that `path` is on ("ext4", "tmpfs"); "unknown" if that cannot be found out."""
    target, best, kind = os.path.realpath(path), "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, source = line.partition(" - ")
            mount = fields.split()[4].replace("\\040", " ")
            inside = target == mount or target.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):  # a later mount on the same point hides the earlier one
                best, kind = mount, source.split()[0]
    return kind


def open_named(path: Path, *, create: bool, read_only: bool, direct: bool) -> Descriptors:
    """Opens a file by name, and a second time with O_DIRECT if the filesystem has it."""
    flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
    try:
        fd = os.open(path, flags | (os.O_CREAT if create else 0), 0o666)
    except OSError as error:
        raise disk_error(error.errno or 0, _cannot_open(path, error), str(path)) from error
    if not direct:
        return Descriptors(fd, -1)
    # Through the first descriptor, so that both are the same file whatever happens to the name.
    for again in (f"/proc/self/fd/{fd}", path):
        with contextlib.suppress(OSError):
            return Descriptors(fd, os.open(again, flags | os.O_DIRECT))
    return Descriptors(fd, -1)


_REMEDIES = {
    errno.ENOENT: "Check the path, or open it with create=True.",
    errno.EISDIR: "Give a file, not a folder.",
    errno.EROFS: "Its filesystem is read-only. Choose another path.",
    errno.EACCES: "Check its permissions.",
    errno.EMFILE: "Raise the limit on open files (ulimit -n), or close some.",
}


def _cannot_open(path: Path, error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0, "Check the path and its filesystem.")
    return f"{path} could not be opened: {error.strerror} (errno {error.errno}). {remedy}"


def _cannot_make(folder: Path, error: OSError) -> str:
    remedy = _REMEDIES[errno.EMFILE] if error.errno == errno.EMFILE else "Choose another folder."
    return f"no file could be made in {folder}: {error.strerror} (errno {error.errno}). {remedy}"


def open_anonymous(folder: Path, size_bytes: int, *, direct: bool = True) -> Descriptors:
    """A new, reserved file of `size_bytes` in `folder` that ends with its descriptors, even after `kill -9`.

    Without O_TMPFILE it is created and removed at once. If an open file cannot be removed it stays, locked, and
    whoever starts next in that folder removes it (`reclaim`).
    """
    reclaim(folder)
    descriptors = _open_unnamed(folder, direct=direct)
    try:
        reserve(descriptors.fd, size_bytes, str(folder), "lower disk_bytes, or add another disk_path")
    except DiskError:
        descriptors.close()
        if descriptors.named:
            descriptors.named.unlink(missing_ok=True)
        raise
    return descriptors


def _open_unnamed(folder: Path, *, direct: bool) -> Descriptors:
    for extra in (os.O_DIRECT, 0) if direct else (0,):
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | extra, 0o600)
            return Descriptors(fd, fd if extra else -1)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise disk_error(error.errno or 0, _cannot_make(folder, error), str(folder)) from error
    return _open_and_unlink(folder, direct=direct)


def _open_and_unlink(folder: Path, *, direct: bool) -> Descriptors:
    while True:
        path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}{SUFFIX}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(error.errno or 0, _cannot_make(folder, error), str(folder)) from error
        if _lock(fd):
            break
        os.close(fd)
    if direct:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    try:
        os.unlink(path)
    except OSError:
        return Descriptors(fd, fd if is_direct else -1, path)
    return Descriptors(fd, fd if is_direct else -1)


def _lock(fd: int) -> bool:
    """Locks a new file. False: before that, somebody else who starts in its folder has taken it for a dead one."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a filesystem without locks, where nobody reclaims
        return True
    return os.fstat(fd).st_nlink > 0


def reclaim(folder: Path) -> list[Path]:
    """Removes files of `open_anonymous` whose process is gone: those that nobody holds a lock on."""
    removed = []
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                removed.append(path)
            finally:
                os.close(fd)
    return removed


def free_bytes(path: Path | int) -> int:
    """Space that this user may still take on the filesystem of a path or descriptor."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def reserve(fd: int, size_bytes: int, path: str, remedy: str = "or choose another folder") -> None:
    """Takes blocks for `size_bytes` now, so that a full disk shows at once and not in the middle of a step."""
    held = os.fstat(fd).st_blocks * 512
    free = free_bytes(fd)
    code = disk().allocate(fd, size_bytes)
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        code = errno.ENOSPC if size_bytes - held > free else _lengthen(fd, size_bytes)
    if code == 0:
        return
    raise _reserve_error(code, size_bytes, free + held, path, remedy)


def _lengthen(fd: int, size_bytes: int) -> int:
    """0 or an errno."""
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _reserve_error(code: int, size_bytes: int, free: int, path: str, remedy: str) -> DiskError:
    reason = f"{os.strerror(code)} (errno {code})"
    if code == errno.ENOSPC:
        short = max(0, size_bytes - free)
        text = (
            f"{path} cannot hold {size_bytes:,} bytes: {free:,} are free, which is {short:,} too few: {reason}. "
            f"Free space there, {remedy}."
        )
    else:
        text = f"{size_bytes:,} bytes could not be reserved on {path}: {reason}. Check its limits and quota."
    return disk_error(code, text, path)
