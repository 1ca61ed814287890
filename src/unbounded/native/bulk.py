"""Memory for what moves in bulk: weights that are gathered, gradients, states on the device.

On a GPU it comes from torch's allocator. If the CPU computes, it is mappings of this library, which the system has back
as soon as they are freed. torch's allocator may keep what is freed: glibc in part, mimalloc (on aarch64) nearly all of
what one thread takes and another frees, and the resident set would be far more than the budget. A mapping also begins
on a page, so the disk reads and writes it without a copy.

New pages are slow unless they are huge ones (1.6 us for each of 4 KiB, seven times as long as copying it). So a few
small blocks that were freed are kept for whoever needs one of that size next: as it is, or moved under a unit.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import torch

from unbounded.errors import BudgetError
from unbounded.native.host_memory import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    as_tensor,
    hide_pages,
    host_buffer,
    map_pages,
    move_pages,
    show_pages,
    unmap_pages,
)

KEPT_BLOCKS = 16
# Sizes and addresses. Tensors die at any moment, also inside this module, so there is no lock, only atomic operations.
_kept: deque[tuple[int, int]] = deque()

_BY_ROWS, _BY_COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys([torch.sparse_csr, torch.sparse_bsr], _BY_ROWS),
    **dict.fromkeys([torch.sparse_csc, torch.sparse_bsc], _BY_COLUMNS),
}


def new_tensor(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor whose values are undefined. Lanes write to it, also if it is made in inference mode."""
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=device)
    size = _whole_pages(num_bytes)
    kept = _take_kept(size)
    address = map_pages(size) if kept is None else kept
    return as_tensor(address, num_bytes, dtype, partial(_free, size=size))


def convert(tensor: torch.Tensor, dtype: torch.dtype, *, copy: bool = False) -> torch.Tensor:
    """A flat tensor in another dtype: itself if it has that, unless a copy is asked for."""
    if tensor.dtype == dtype and not copy:
        return tensor
    return new_tensor(tensor.numel(), dtype, tensor.device).copy_(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The values one after another in memory: the tensor's own memory if they are so there, otherwise a copy.

    To torch, one element is contiguous whatever its stride is, and what `conj()` and its `imag` give are the values
    before, with a note to change their sign. Bytes of either cannot be taken, or are those of other values.
    """
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return values.as_strided((values.numel(),), (1,))


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that hold a sparse tensor's indices and values; of a dense one, itself."""
    return [getattr(tensor, part)() for part in _PARTS[tensor.layout]] if tensor.layout in _PARTS else [tensor]


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values into a tensor, also into one that `expand` made, whose elements torch refuses to write."""
    own = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())
    tensor.detach()[own].copy_(values.view(tensor.shape)[own])


class Backing:
    """The bytes under `storage`, which come and go while tensors over it stay. At first they may be there or not."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.is_on_host = device.type == "cpu" and num_bytes > 0
        if self.is_on_host:
            self._pages = host_buffer(_whole_pages(num_bytes))
            self.storage = self._pages.untyped_storage()
            hide_pages(*self._span)
        else:
            self.storage = torch.UntypedStorage(num_bytes, device=device)
        self.is_there = not self.is_on_host

    @property
    def _span(self) -> tuple[int, int]:
        return self._pages.data_ptr(), self._pages.nbytes

    def take(self) -> None:
        if self.is_there:
            return
        if self.is_on_host:
            address, size = self._span
            kept = _take_kept(size)
            if kept is not None and not move_pages(kept, address, size, hide=False):
                unmap_pages(kept, size)
                kept = None
            if kept is None:
                show_pages(address, size)
        else:
            self.storage.resize_(self.num_bytes)
        self.is_there = True

    def give_back(self) -> None:
        if not self.is_there:
            return
        if self.is_on_host:
            _hide(*self._span)
        else:
            self.storage.resize_(0)
        self.is_there = False


def _take_kept(size: int) -> int | None:
    address = dict(_kept).get(size)
    try:
        if address is not None:
            _kept.remove((size, address))
    except ValueError:  # another thread has taken it
        return None
    return address


def _keep(address: int, size: int) -> None:
    _kept.append((size, address))
    while len(_kept) > KEPT_BLOCKS:
        size, address = _kept.popleft()
        unmap_pages(address, size)


def _free(address: int, size: int) -> None:
    if size < HUGE_PAGE_BYTES:
        _keep(address, size)
    else:
        unmap_pages(address, size)


def _hide(address: int, size: int) -> None:
    """Keeps the pages elsewhere if they are few."""
    elsewhere = _new_place(size) if size < HUGE_PAGE_BYTES else None
    if elsewhere is not None:
        if move_pages(address, elsewhere, size, hide=True):
            _keep(elsewhere, size)
            return
        unmap_pages(elsewhere, size)
    hide_pages(address, size)


def _new_place(size: int) -> int | None:
    try:
        return map_pages(size)
    except BudgetError:  # whoever gives memory back must not fail for want of it
        return None


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
