"""What this process takes of a GPU and of the host as the system counts it, beyond what allocators say.

On a GPU that is the context, loaded kernels and the buffers of collectives: what the device has given out, minus what
torch's allocator has reserved. Another process may be on the device: memory that was taken before, and is more than any
context, belongs to it. On the host it is what has grown since the model was sharded: libraries, stacks, page tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

# A context with all of its kernels and collectives takes 0.5 to 1.5 GiB; more than that belongs to another process.
MOST_CONTEXT_BYTES, USUAL_CONTEXT_BYTES = 3 * 2**30, 768 * 2**20
# Kernels that are loaded as training begins, in all; and what is set aside for more of them in the first forwards.
KERNEL_BYTES, NEXT_KERNEL_BYTES = 256 * 2**20, 128 * 2**20


class DriverCount:
    """The bytes of a device taken outside the allocator: `read` gives (free, total), `reserved` the allocator's own.

    `first_bytes` is what the context took when this process first looked.
    """

    def __init__(
        self, read: Callable[[], tuple[int, int]], reserved: Callable[[], int], first_bytes: int | None = None
    ) -> None:
        self._read, self._reserved = read, reserved
        around = self._around()
        self._foreign_bytes = around - USUAL_CONTEXT_BYTES if around > MOST_CONTEXT_BYTES else 0
        self._most = 0
        self.first_bytes = self.context_bytes() if first_bytes is None else first_bytes

    @property
    def total_bytes(self) -> int:
        return self._read()[1]

    def context_bytes(self) -> int:
        """The most so far: kernels are loaded when they are first used, and stay."""
        self._most = max(self._most, min(self._around() - self._foreign_bytes, MOST_CONTEXT_BYTES))
        return max(0, self._most)

    def coming_bytes(self) -> int:
        """What kernels may still take as training begins: those that are loaded already are part of the context."""
        return max(KERNEL_BYTES - (self.context_bytes() - self.first_bytes), NEXT_KERNEL_BYTES)

    def taken_bytes(self) -> int:
        """What the process takes of the device."""
        return self._reserved() + self.context_bytes()

    def _around(self) -> int:
        free, total = self._read()
        return total - free - self._reserved()


_first_bytes: dict[torch.device, int] = {}


def count_device(device: torch.device) -> DriverCount:
    """Reading it makes the context if there is none yet, so that it is counted."""
    torch.cuda.synchronize(device)
    read, reserved = partial(torch.cuda.mem_get_info, device), partial(torch.cuda.memory_reserved, device)
    count = DriverCount(read, reserved, _first_bytes.get(device))
    _first_bytes.setdefault(device, count.first_bytes)
    return count


def unclaimed_bytes(device: torch.device) -> int:
    """What no pass so far has needed of a GPU and the allocator may still take: its limit may be a plan's budget."""
    free, total = torch.cuda.mem_get_info(device)
    reserved, most = torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    return left_over(free, int(allocator_fraction(device) * total), reserved, most)


def allocator_fraction(device: torch.device) -> float:
    """The part of a GPU that torch's allocator may take."""
    return float(torch.cuda.get_per_process_memory_fraction(device))


def left_over(free_bytes: int, limit_bytes: int, reserved_bytes: int, most_bytes: int) -> int:
    """What is left of a device and of an allocator's limit once it reserves the most that it ever did."""
    return max(0, min(free_bytes - (most_bytes - reserved_bytes), limit_bytes - most_bytes))


def resident_bytes() -> int:
    """What this process takes of the host: the resident set, pinned memory included, and its page tables."""
    sizes = {"VmRSS": 0, "VmPTE": 0}
    try:
        with open("/proc/self/status") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name in sizes:
                    sizes[name] = int(value.split()[0]) * 1024
    except OSError:
        return 0
    return sum(sizes.values())


def page_table_bytes(num_bytes: int) -> int:
    """What the tables of so many bytes in small pages take: an entry per page."""
    return num_bytes // os.sysconf("SC_PAGE_SIZE") * 8
