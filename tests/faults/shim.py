"""System calls that fail on demand: builds the shim, and arms it from inside the process it is preloaded into."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
KILL = 0


def build(folder: Path) -> Path | None:
    """The library to preload, or None if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    library = folder / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@dataclass(frozen=True)
class Fault:
    """From call number `at` on, `calls` of them answer `code` (an errno); with KILL the process ends there."""

    at: int
    code: int
    calls: int = 1


@contextmanager
def armed(folder: Path, fault: Fault | None) -> Iterator[None]:
    """Inside, calls that touch files under `folder` count, and the fault comes; without one they only count."""
    library = ctypes.CDLL(None)
    prefix = (ctypes.c_char * 4096).in_dll(library, "fault_prefix")
    numbers = {"fault_seen": 0, "fault_at": 0, "fault_calls": 1, "fault_errno": 0}
    if fault is not None:
        numbers |= {"fault_at": fault.at, "fault_calls": fault.calls, "fault_errno": fault.code}
    for name, value in numbers.items():
        ctypes.c_int.in_dll(library, name).value = value
    (ctypes.c_char * 64).in_dll(library, "fault_name").value = b""
    prefix.value = os.fsencode(folder)
    try:
        yield
    finally:
        prefix.value = b""


def seen() -> int:
    """How many calls counted since the last `armed`."""
    return ctypes.c_int.in_dll(ctypes.CDLL(None), "fault_seen").value


def failed_call() -> str:
    """The first call that failed."""
    return (ctypes.c_char * 64).in_dll(ctypes.CDLL(None), "fault_name").value.decode()
