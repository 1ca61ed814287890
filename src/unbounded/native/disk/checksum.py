"""CRC32C of tensors, of joined bytes from their checksums, and of transfers while they run."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING

from unbounded.native.disk.bindings import disk
from unbounded.native.disk.handle import byte_view

if TYPE_CHECKING:
    import torch


def crc32c(tensor: torch.Tensor, seed: int = 0) -> int:
    """The CRC32C of a contiguous host tensor's bytes, appended to bytes whose checksum is `seed`."""
    address, nbytes = byte_view(tensor)
    return int(disk().crc32c(address, nbytes, seed))


def crc32c_combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC32C of two runs of bytes joined, from the checksum of each and the length of the second."""
    return int(disk().crc32c_combine(first, second, second_bytes))


class Checksums:
    """The CRC32C of every `grain_bytes` of one transfer: a write puts them here, a read is checked against them."""

    def __init__(self, grain_bytes: int, values: Iterable[int]) -> None:
        held = list(values)
        self.grain_bytes = grain_bytes
        self._slots = (ctypes.c_uint32 * len(held))(*held)

    @classmethod
    def empty(cls, grain_bytes: int, nbytes: int) -> Checksums:
        """Room for the checksums of `nbytes`, the last of which may be of less than a grain."""
        return cls(grain_bytes, [0] * -(-nbytes // grain_bytes))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def values(self) -> list[int]:
        """The checksums, once the transfer is over."""
        return list(self._slots)
