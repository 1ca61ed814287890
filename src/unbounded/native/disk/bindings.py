"""The signatures of the core's disk functions, declared once."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from unbounded.native.host_memory import PAGE_BYTES
from unbounded.native.library import declare

_pointer, _int, _unsigned, _u64, _i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int64
_array = ctypes.c_void_p  # ctypes passes an array of any element type as the address of its first element

SHORT_READ, CHECKSUM_MISMATCH = -1, -2
READ, WRITE = 0, 1
ALIGNMENT = PAGE_BYTES


class Disk:
    """The core's disk functions by their short names."""

    def __init__(self) -> None:
        self.engine_open = declare("unbounded_disk_engine_open", _pointer, [_unsigned, _u64, _int])
        self.engine_close = declare("unbounded_disk_engine_close", None, [_pointer])
        self.engine_release = declare("unbounded_disk_engine_release", None, [_pointer])
        self.allocate = declare("unbounded_disk_allocate", _int, [_int, _u64])
        self.file_open = declare("unbounded_disk_file_open", _pointer, [_int] * 3)
        self.file_direct = declare("unbounded_disk_file_direct", _int, [_pointer])
        self.file_sync = declare("unbounded_disk_file_sync", _int, [_pointer])
        self.file_close = declare("unbounded_disk_file_close", None, [_pointer])
        self.file_release = declare("unbounded_disk_file_release", None, [_pointer])
        self.submit = declare(
            "unbounded_disk_submit",
            _int,
            [_pointer, _int, _u64, _array, _array, _array, _array, _array, _u64, _int, ctypes.POINTER(_pointer)],
        )
        self.wait = declare("unbounded_disk_wait", _int, [_pointer, _i64])
        self.done = declare("unbounded_disk_done", _int, [_pointer])
        self.result = declare("unbounded_disk_result", _int, [_pointer, _array])
        self.span = declare("unbounded_disk_span", None, [_pointer, _array])
        self.release = declare("unbounded_disk_release", None, [_pointer])
        self.crc32c = declare("unbounded_crc32c", ctypes.c_uint32, [_pointer, _u64, ctypes.c_uint32])
        self.crc32c_combine = declare("unbounded_crc32c_combine", ctypes.c_uint32, [ctypes.c_uint32] * 2 + [_u64])
        self.crc32c_kernel = declare("unbounded_crc32c_kernel", ctypes.c_char_p, [])


@lru_cache(maxsize=1)
def disk() -> Disk:
    """The functions of the loaded core."""
    return Disk()
