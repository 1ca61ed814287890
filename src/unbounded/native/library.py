"""Finds and loads the compiled core, once per process.

The core is built at install and is never compiled here. Signatures are declared by the modules that call
them (`kernels`, `disk`, `host_memory`), each through `declare`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from unbounded.errors import UnboundedError

FILE_NAME = "libunbounded_core.so"


class CoreMissingError(UnboundedError, ImportError):
    """The compiled core is not where the installation should have put it."""


def candidates() -> list[Path]:
    """Where the core may be: in the package (a wheel), or in site-packages (an editable install)."""
    found = [Path(__file__).resolve().parent.parent / FILE_NAME]
    with suppress(metadata.PackageNotFoundError):
        found.append(Path(str(metadata.distribution("unbounded").locate_file(f"unbounded/{FILE_NAME}"))))
    return found


@lru_cache(maxsize=1)
def core() -> ctypes.CDLL:
    """The loaded core; ctypes releases the GIL around every call into it."""
    paths = candidates()
    for path in paths:
        if path.exists():
            return ctypes.CDLL(str(path))
    raise CoreMissingError(
        f"the compiled core {FILE_NAME} was not found in {', '.join(str(p.parent) for p in paths)}. "
        "Install the package with `pip install .`, which builds it."
    )


def declare(name: str, result: type | None, arguments: Sequence[type]) -> ctypes._NamedFuncPointer:
    """The core's function `name` with its signature set."""
    function = getattr(core(), name)
    function.restype = result
    function.argtypes = list(arguments)
    return function
