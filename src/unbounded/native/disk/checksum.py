"""CRC32C of tensors, and of bytes one after the other from their checksums."""

from __future__ import annotations

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
