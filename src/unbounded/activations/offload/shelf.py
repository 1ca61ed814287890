"""The inputs of blocks between forward and backward: their values on the host, and nothing on the device.

    HELD        the device's memory, while the block runs for the first time
    LEAVING     a copy to the host is running; the device's memory is freed two blocks later
    AWAY        the values are only on the host
    (arrival)   a copy on the device again, fetched one block ahead of its recomputation

A tensor that many blocks receive (a mask, rotary tables) is one `Parcel` that goes once and comes back once. A tensor
that is still on the device when it is needed again, because the user keeps it or because it has not left yet, is used
where it is. A weight that a block receives (a table of relative positions) comes and goes by itself, so it is
kept by name.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.weak import TensorWeakRef

from unbounded.activations.geometry import is_movable, lay_flat
from unbounded.activations.offload.host_buffers import Buffer, HostBuffers
from unbounded.activations.offload.movers import Arrival, Event, Mover, make_mover
from unbounded.errors import StateError
from unbounded.tiers.room import Room

# Blocks whose inputs may still be being copied to the host: one leaves while the next computes.
LEAVING_AT_ONCE = 2


class Named(Protocol):
    """A weight, kept by name."""

    def read(self) -> torch.Tensor:
        """Its values."""


class ParcelPlace(enum.Enum):
    HELD = "held"
    LEAVING = "leaving"
    AWAY = "away"


class Parcel:
    """One tensor that goes to the host and comes back, for all blocks that received it."""

    def __init__(self, tensor: torch.Tensor, mover: Mover) -> None:
        self._origin, self._version = TensorWeakRef(tensor), tensor._version
        flat, self._geometry = lay_flat(tensor)
        self._flat: torch.Tensor | None = flat
        self._flat_version = flat._version
        self._dtype, self._numel = flat.dtype, flat.numel()
        self._mover = mover
        self._buffer: Buffer | None = None
        self._sent: Event = None
        self._arrival: Arrival | None = None
        self._num_fetched = 0
        self.num_users = 0
        self.place = ParcelPlace.HELD

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this is the parcel of `tensor` as it is now."""
        return self._origin() is tensor and tensor._version == self._version

    def leave(self, buffers: HostBuffers, ready: Event, block: str) -> None:
        """Starts the copy to the host, after `ready`."""
        assert self._flat is not None
        self._check_unchanged(block)
        self._buffer = buffers.take(self._flat.nbytes, pin=self._flat.is_cuda)
        self._sent = self._mover.send(self._flat, self._stored(), after=(ready, *self._buffer.after))
        self._buffer.after = (self._sent,) if self._sent is not None else ()
        self.place = ParcelPlace.LEAVING
        if self._sent is None:
            self.give_up(block)

    def give_up(self, block: str) -> None:
        """Frees the device's memory."""
        self._check_unchanged(block)
        self._mover.give_up(self._sent)
        self._flat = None
        self.place = ParcelPlace.AWAY

    def prefetch(self) -> None:
        """Starts the copy back, unless the values are still on the device."""
        if self._flat is None and self._arrival is None and self._alive() is None:
            assert self._buffer is not None
            self._arrival = self._mover.bring(self._stored(), after=self._sent)
            self._buffer.after = (self._arrival.event,) if self._arrival.event is not None else ()

    def fetch(self) -> torch.Tensor:
        """The tensor on its device, for one of its users; after the last of them the device's copy is dropped."""
        alive = self._alive()
        if alive is not None:
            return alive.detach()
        if self._flat is not None:
            return self._geometry.restore(self._flat)
        self.prefetch()
        assert self._arrival is not None
        value = self._arrival.order_stream()
        self._num_fetched += 1
        if self._num_fetched % self.num_users == 0:
            self._arrival = None
        return self._geometry.restore(value)

    def _alive(self) -> torch.Tensor | None:
        origin = self._origin()
        return origin if origin is not None and origin._version == self._version else None

    def _stored(self) -> torch.Tensor:
        assert self._buffer is not None
        return self._buffer.tensor(self._dtype, self._numel)

    def _check_unchanged(self, block: str) -> None:
        assert self._flat is not None
        if self._flat._version != self._flat_version:
            raise StateError(
                f"an input of block {block!r} (shape {self._geometry.shape}) was changed in place, so the block cannot "
                'be computed again from it. Give the block the activation policy "keep", or change a copy.'
            )


class BlockInputs:
    """The tensors that one call of a block received; `pack` and `unpack` are its hooks for saved tensors."""

    def __init__(self, shelf: Shelf, block: str, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._shelf, self.block = shelf, block
        self._parcels: dict[tuple[Any, ...], Parcel] = {}
        for tensor in tensors:
            if is_movable(tensor, device) and shelf.save_by_name(tensor) is None:
                self._parcels.setdefault(_key(tensor), shelf.parcel(tensor))
        for parcel in self._parcels.values():
            parcel.num_users += 1
        self._last = next(reversed(self._parcels.values()), None)
        self.previous: weakref.ref[BlockInputs] | None = None
        self.ready = shelf.mover(device).mark()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | Parcel | Named:
        """What is kept instead of `tensor`: its parcel or its name, or the tensor itself if it cannot go."""
        parcel = self._parcels.get(_key(tensor)) if type(tensor) is torch.Tensor else None
        return parcel or self._shelf.save_by_name(tensor) or tensor

    def unpack(self, packed: torch.Tensor | Parcel | Named) -> torch.Tensor:
        """The tensor again. With the last one, fetching the tensors of the preceding block begins."""
        if isinstance(packed, torch.Tensor):
            return packed
        if not isinstance(packed, Parcel):
            return packed.read()
        with torch.no_grad():
            value = packed.fetch()
            before = self.previous() if self.previous is not None else None
            if packed is self._last and before is not None:
                before.prefetch()
        return value

    def leave(self) -> None:
        """The block has run: its inputs go to the host."""
        with torch.no_grad():
            held = [parcel for parcel in self._parcels.values() if parcel.place is ParcelPlace.HELD]
            for parcel in held:
                parcel.leave(self._shelf.buffers, self.ready, self.block)
            self._shelf.follow(self.block, held)

    def prefetch(self) -> None:
        for parcel in self._parcels.values():
            parcel.prefetch()


class Shelf:
    """All activations of one model that are on the host, in the order in which they left.

    `save_by_name` says what to keep of a weight, and None of any other tensor.
    """

    def __init__(self, room: Room, save_by_name: Callable[[torch.Tensor], Named | None]) -> None:
        self.buffers, self.save_by_name = HostBuffers(room), save_by_name
        self._parcels: weakref.WeakValueDictionary[int, Parcel] = weakref.WeakValueDictionary()
        self._movers: dict[torch.device, Mover] = {}
        self._leaving: deque[tuple[str, list[weakref.ref[Parcel]]]] = deque()
        self._newest: weakref.ref[BlockInputs] | None = None

    def hold(self, block: str, tensors: Sequence[torch.Tensor]) -> BlockInputs:
        """The inputs of a call that is about to begin. If one is on a GPU, only those on it can leave."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), torch.device("cpu"))
        inputs = BlockInputs(self, block, tensors, device)
        inputs.previous, self._newest = self._newest, weakref.ref(inputs)
        return inputs

    def parcel(self, tensor: torch.Tensor) -> Parcel:
        """The parcel of a tensor: the one that other blocks have for it, or a new one."""
        known = self._parcels.get(id(tensor))
        if known is not None and known.holds(tensor):
            return known
        parcel = self._parcels[id(tensor)] = Parcel(tensor, self.mover(tensor.device))
        return parcel

    def mover(self, device: torch.device) -> Mover:
        if device not in self._movers:
            self._movers[device] = make_mover(device)
        return self._movers[device]

    def follow(self, block: str, parcels: Sequence[Parcel]) -> None:
        """Frees the device's memory of those that left long enough ago."""
        self._leaving.append(
            (block, [weakref.ref(parcel) for parcel in parcels if parcel.place is ParcelPlace.LEAVING])
        )
        while len(self._leaving) > LEAVING_AT_ONCE:
            name, oldest = self._leaving.popleft()
            for reference in oldest:
                parcel = reference()
                if parcel is not None and parcel.place is ParcelPlace.LEAVING:
                    parcel.give_up(name)


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that identifies a tensor of one call; all of them are alive."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
