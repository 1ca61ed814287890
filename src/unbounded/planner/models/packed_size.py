"""What packed weights take: records of fixed size, whatever the values (native/kernels/packed.h)."""

from __future__ import annotations

RECORD_NUMEL = 4096
RECORD_BYTES = 6272
GROUP_NUMEL = 512 * RECORD_NUMEL  # weights whose records end on a page of up to 64 KiB, as the disk reads them
STRETCH_NUMEL = 16 * GROUP_NUMEL  # weights whose records go to a GPU at once, 49 MiB


def packed_bytes(numel: int) -> int:
    return -(-numel // RECORD_NUMEL) * RECORD_BYTES


def unpacking_bytes(numel: int) -> int:
    """What a GPU needs besides for records on their way to an array of so many weights."""
    return packed_bytes(min(numel, STRETCH_NUMEL))
