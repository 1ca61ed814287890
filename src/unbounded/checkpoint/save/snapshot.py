"""What one rank puts into a checkpoint: segments of its arrays, with the names of what is in them.

Nothing is read here. A snapshot refers to the arrays where they are; its writer must keep them from changing
(`FileSegment.reader`) until they have been read. Small things (buffers, random states, the user's tensors) are copied.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from unbounded.checkpoint.format.manifest import GRADIENT, LOOSE, PAGE, UNREDUCED, WEIGHT, TensorEntry
from unbounded.checkpoint.format.slices import Slice, box_numel, deal
from unbounded.checkpoint.save.segments import FileSegment
from unbounded.native.bulk import flat
from unbounded.native.disk import crc32c
from unbounded.native.kernels import BLOCK
from unbounded.optim import formats
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import Box
from unbounded.tiers.array import Array, MemoryArray
from unbounded.tiers.reader import Reader
from unbounded.zero.layout import Slot, clip_range
from unbounded.zero.unit import Unit


@dataclass(frozen=True)
class Stored:
    """A stretch of a named tensor inside a segment; what a slice will be once the segment has its place."""

    segment: FileSegment
    start: int  # elements into the segment
    name: str
    kind: str
    shape: tuple[int, ...]
    box: Box
    every: int = 1
    rank: int | None = None

    def entry(self, file: int) -> TensorEntry:
        dtype = self.segment.dtype
        nbytes = box_numel(self.box) * dtype.itemsize
        piece = Slice(file, self.segment.offset + self.start * dtype.itemsize, nbytes, self.box)
        return TensorEntry(self.name, self.kind, self.shape, dtype, (piece,), self.every, self.rank)


@dataclass
class Snapshot:
    """The segments of a rank's file in order, and what they hold. `copies` has the ranks of the data axis."""

    rank: int
    copies: Axis
    segments: list[FileSegment] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    num_loose: int = 0

    def add_unit(
        self,
        unit: Unit,
        number: int,
        kinds: Iterable[str],
        reader: Reader,
        *,
        copy: bool = False,
    ) -> None:
        """The unit's weights and the states named `kinds`: what this rank owns, or its part of what all have.

        With `copy`, what is on the device is copied there now, so that nobody has to wait for it.
        """
        part = self._part(unit, number)
        arrays: dict[str, Array] = {WEIGHT: unit.weights, **{kind: unit.states[kind] for kind in kinds}}
        torn = [slot for slot in unit.layout.slots if _is_torn(slot)]
        for kind, array in arrays.items() if part[0] < part[1] else ():
            kept = _copied(array) if copy else array
            waits = reader if kept is array else None
            is_encoded = f"{kind}_scale" in arrays or kind.endswith("_scale")
            self._add_flat(unit, kind, kept, part, waits, without=torn if is_encoded else ())
            if f"{kind}_scale" in arrays:
                for slot in torn:
                    self._add_decoded(unit, kind, slot, part)

    def _add_decoded(self, unit: Unit, kind: str, slot: Slot, part: tuple[int, int]) -> None:
        """A moment in fp32, if its blocks exist only on this mesh and no other could decode them."""
        clipped = clip_range(slot.start, slot.stop, *part)
        if clipped is None or not slot.is_counted:
            return
        arrays = {}
        for name in (kind, f"{kind}_scale"):
            every, base = unit.every.get(name, 1), unit.owned[0]
            arrays[name] = _read(unit.states[name], (clipped[0] - base) // every, -(-(clipped[1] - base) // every))
        values = formats.decode_moment(arrays, kind)
        segment = FileSegment((MemoryArray(values, "host"), 0), values.numel())
        self.segments.append(segment)
        self._add_slot(segment, 0, slot, kind, clipped, 1)

    def add_factors(self, unit: Unit, number: int, reader: Reader, *, copy: bool = False) -> None:
        """States that do not have the parameters' shapes. One rank has them; if all have them, one writes."""
        array = unit.factors.array
        if array is None or (unit.is_whole and number % self.copies.size != self.copies.rank):
            return
        held = [(unit.layout.slots[factor.slot], factor) for factor in unit.factors.held]
        counted = [(slot.name, factor) for slot, factor in held if slot.is_counted]
        if not counted:
            return
        kept = _copied(array) if copy else array
        segment = FileSegment((kept, 0), array.numel, reader if kept is array else None)
        self.segments.append(segment)
        for name, factor in counted:
            box = ((0, factor.stop - factor.start),)
            self.stored.append(Stored(segment, factor.start, name, factor.name, factor.shape, box))

    def _part(self, unit: Unit, number: int) -> tuple[int, int]:
        """What this rank writes of a unit's flat buffer."""
        if unit.is_whole and self.copies.size > 1:
            return deal(unit.layout.numel, number, self.copies.rank, self.copies.size)
        return unit.owned

    def add_gradient(self, unit: Unit, number: int, reader: Reader) -> None:
        """The gradient added up so far: reduced, and what waits for its reduction on this rank."""
        gradient = unit.gradient
        array = gradient.store.array if gradient.is_present else None
        if array is not None:
            start, stop = self._part(unit, number)
            if start < stop:
                self._add_flat(unit, GRADIENT, array, (start, stop), reader)
        if gradient.local is not None:
            whole = MemoryArray(gradient.local, "device")
            self._add_flat(unit, UNREDUCED, whole, (0, unit.layout.numel), reader, own=True)

    def _add_flat(
        self,
        unit: Unit,
        kind: str,
        array: Array,
        part: tuple[int, int],
        reader: Reader | None,
        *,
        own: bool = False,
        without: Sequence[Slot] = (),
    ) -> None:
        """Elements `part` of a unit's flat buffer, which `array` holds from the first owned one on."""
        base, every = 0 if own else unit.owned[0], unit.every.get(kind, 1)
        start, stop = (part[0] - base) // every, -(-(part[1] - base) // every)
        # If several ranks of other axes hold it, the one that counts writes it.
        held = [
            (slot, clip_range(slot.start, slot.stop, *part)) for slot in unit.layout.slots if slot.is_counted or own
        ]
        slots = [(slot, clipped) for slot, clipped in held if clipped is not None and slot not in without]
        if not slots:
            return
        segment = FileSegment((array, start), stop - start, reader)
        self.segments.append(segment)
        for slot, clipped in slots:
            self._add_slot(segment, (clipped[0] - part[0]) // every, slot, kind, clipped, every, own=own)

    def _add_slot(
        self,
        segment: FileSegment,
        position: int,
        slot: Slot,
        kind: str,
        clipped: tuple[int, int],
        every: int,
        *,
        own: bool = False,
    ) -> None:
        """The part of `clipped` in a slot, from element `position` of the segment on."""
        offset = slot.first - slot.start
        inside = (clipped[0] + offset) // every, -(-(clipped[1] + offset) // every)
        cut = None if slot.cut is None or own else slot.cut if every == 1 else slot.cut.in_blocks(every)
        if cut is not None:
            for begin, box in cut.boxes(*inside):
                where = position + begin - inside[0]
                self.stored.append(Stored(segment, where, slot.name, kind, cut.shape, box, every))
        else:
            whole, rank = slot.local_shape, self.rank if own else None
            shape = whole if every == 1 else (-(-math.prod(whole) // every),)
            self.stored.append(Stored(segment, position, slot.name, kind, shape, (inside,), every, rank))

    def add_tensor(self, name: str, kind: str, tensor: torch.Tensor, rank: int | None) -> None:
        """A small tensor that this rank has whole."""
        values = flat(tensor).cpu()
        segment = FileSegment((MemoryArray(values, "host"), 0), values.numel())
        self.segments.append(segment)
        if values.numel():
            self.stored.append(Stored(segment, 0, name, kind, tuple(tensor.shape), ((0, values.numel()),), 1, rank))
        else:
            self.stored.append(Stored(segment, 0, name, kind, tuple(tensor.shape), ((0, 0),), 1, rank))

    def put(self, tensor: torch.Tensor) -> str:
        """Stores a user's tensor under a name made of number and content, so that equal values have equal text."""
        copy = tensor.detach().to("cpu", copy=True)
        name = f"{self.num_loose}-{checksum(copy):08x}"
        self.num_loose += 1
        self.add_tensor(name, LOOSE, copy, self.rank)
        return name

    def drop_loose(self) -> None:
        """Forgets the tensors of values that another rank stores as well."""
        gone = {id(item.segment) for item in self.stored if item.kind == LOOSE}
        self.stored = [item for item in self.stored if id(item.segment) not in gone]
        self.segments = [segment for segment in self.segments if id(segment) not in gone]

    def entries(self) -> list[TensorEntry]:
        """What the file holds, once it is laid out; the file's number is the rank's."""
        return [item.entry(self.rank) for item in self.stored]


def _is_torn(slot: Slot) -> bool:
    """Whether elements that share a scale here are apart in the whole parameter."""
    return slot.cut is not None and slot.cut.in_blocks(BLOCK) is None


def _read(array: Array, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of an array; if it is on disk, their pages are read."""
    step = PAGE // array.dtype.itemsize
    first, last = start // step * step, min(-(-stop // step) * step, array.numel)
    held = torch.empty(last - first, dtype=array.dtype, device="cpu")
    array.fetch(held, first).wait()
    return held[start - first : stop - first].contiguous()


def _copied(array: Array) -> Array:
    return (
        MemoryArray(array.direct.clone(), array.tier) if array.tier == "device" and array.direct is not None else array
    )


def checksum(tensor: torch.Tensor) -> int:
    values = flat(tensor).cpu()
    return crc32c(values.view(torch.uint8)) if values.numel() else 0
