"""Files that the user names for us to write: new ones, or replacements for older ones of ours.

Anything else that is found there (a device, a FIFO, a folder, a file of another kind or of another user) is not
touched, and is an error before any work is done.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unbounded.errors import PlanError
from unbounded.paths import expand_home


def check_replaceable(path: str | os.PathLike[str], what: str, begins: bytes) -> Path:
    """The real path to write `what` to. A file that is already there must begin with `begins`, or be empty."""
    target = Path(os.path.realpath(expand_home(path)))
    try:
        found = os.stat(target)
    except FileNotFoundError:
        _check_folder(target.parent, what)
        return target
    except (OSError, ValueError) as error:
        raise PlanError(f'{what} cannot go to "{path}": {error}. Choose another file.') from None
    if not stat.S_ISREG(found.st_mode):
        raise PlanError(f'{what} cannot go to "{path}", which is {_kind(found.st_mode)}. Choose another file.')
    if found.st_uid != os.geteuid():
        raise PlanError(f'{what} would replace "{path}", which belongs to another user. Choose another file.')
    _check_folder(target.parent, what)
    with target.open("rb") as file:
        first = file.read(len(begins))
    if first and first != begins:
        raise PlanError(
            f'{what} would replace "{path}", which was not written by unbounded. Choose another file, or remove it.'
        )
    return target


def write_file(path: Path, text: str) -> None:
    """Write the whole file under another name and rename it, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{secrets.token_hex(6)}.partial")
    with naming(path):
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the system inside is of `path`: a write that fails for want of space does not say where."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _check_folder(folder: Path, what: str) -> None:
    """The nearest folder that exists must accept new files."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise PlanError(f'{what} cannot go below "{folder}", which is not a folder. Choose another file.')
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlanError(f'{what} cannot go below "{folder}", where this user may not write. Choose another file.')


def _kind(mode: int) -> str:
    for name, test in (("a folder", stat.S_ISDIR), ("a FIFO", stat.S_ISFIFO), ("a socket", stat.S_ISSOCK)):
        if test(mode):
            return name
    return "a device"
