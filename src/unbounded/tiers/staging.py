"""How large the staging buffers of checkpoints are: a part of the host's budget that is set aside for them.

They are made at the first save or load and kept. Updates hold all their buffers while they wait for a checkpoint in
the background, so that must have its own buffers.
"""

from __future__ import annotations

# Enough to keep a disk busy in both directions: half of them being filled, half being written.
NUM_BUFFERS, BUFFER_BYTES = 8, 16 << 20
# A buffer holds at least one checksum block of a file, and there is one for each direction.
LEAST_BUFFERS, LEAST_BYTES = 2, 1 << 20
HOST_PART = 16


def size_staging(host: int | None) -> tuple[int, int]:
    """Number and bytes of the buffers under a host budget: a sixteenth of it, unless that is too little."""
    count, buffer_bytes = NUM_BUFFERS, BUFFER_BYTES
    if host is None:
        return count, buffer_bytes
    while buffer_bytes > LEAST_BYTES and count * buffer_bytes > host // HOST_PART:
        buffer_bytes //= 2
    while count > LEAST_BUFFERS and count * buffer_bytes > host // HOST_PART:
        count //= 2
    return count, buffer_bytes
