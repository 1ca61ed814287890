"""Host memory for the host tier and for buffers: allocated once, of exact size, pinned if a GPU reads it.

torch's pinned allocator rounds every block up to a power of two; here memory is mapped with huge pages and
registered with the driver, which avoids that. If registering is refused (a small memory-lock limit), the memory is used
as it is, with one warning: only transfers are slower.
"""

from __future__ import annotations

import contextlib
import threading
import warnings

import torch

from unbounded.native import host_memory
from unbounded.process import finalize


class HostArena:
    """Hands out host tensors and counts them; `close` unregisters what was pinned."""

    def __init__(self, *, pin: bool, num_threads: int) -> None:
        self.pin, self.num_threads = pin, num_threads
        self.used_bytes = 0
        self._pinned: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        # Memory must be unregistered before it is unmapped, even if the arena is merely dropped.
        self._close = finalize(self, _unregister, self._pinned)

    def allocate(self, dtype: torch.dtype, numel: int, *, pin: bool | None = None) -> torch.Tensor:
        """A zeroed 1-D tensor on a page boundary; pinned unless the arena or the caller says otherwise.

        Its storage is whole pages, like its memory, so that whole pages can be read into it.
        """
        num_bytes = max(1, numel * dtype.itemsize)
        raw = host_memory.host_buffer(-(-num_bytes // host_memory.PAGE_BYTES) * host_memory.PAGE_BYTES)
        self.count(num_bytes)
        if self.pin if pin is None else (pin and self.pin):
            self._register(raw)
        return raw[: numel * dtype.itemsize].view(dtype)

    def count(self, num_bytes: int) -> None:
        """Counts host memory that was taken elsewhere (negative: freed). Any thread may call it."""
        with self._lock:
            self.used_bytes += num_bytes

    def release(self, tensor: torch.Tensor) -> None:
        """Returns a tensor of `allocate`; its memory is freed when the caller drops the last reference."""
        self.count(-max(1, tensor.numel() * tensor.element_size()))
        with self._lock:
            raw = self._pinned.pop(tensor.data_ptr(), None)
        if raw is not None:
            torch.cuda.cudart().cudaHostUnregister(raw.data_ptr())

    def close(self) -> None:
        self._close()

    def _register(self, raw: torch.Tensor) -> None:
        host_memory.touch(raw, self.num_threads)
        status = torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), raw.numel(), 0)
        if int(status) == 0:
            with self._lock:
                self._pinned[raw.data_ptr()] = raw
        else:
            self.pin = False
            _clear_error()
            warnings.warn(
                f"pinning {raw.numel()} bytes of host memory was refused (CUDA error {int(status)}), so transfers "
                "will be as slow as from pageable memory. Raise the memory-lock limit (ulimit -l unlimited).",
                RuntimeWarning,
                stacklevel=2,
            )


def _unregister(pinned: dict[int, torch.Tensor]) -> None:
    while pinned:
        pointer, _ = pinned.popitem()
        torch.cuda.cudart().cudaHostUnregister(pointer)


def _clear_error() -> None:
    """Clears the error that a refused registration leaves for the next CUDA call."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, dtype=torch.uint8, device="cuda")
