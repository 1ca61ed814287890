"""What a rank needs from a checkpoint: matches a model's units with a manifest. Pure.

A *copy* brings bytes of a file into an array unchanged. A *conversion* is for a stretch of a unit whose values are
stored in another format, or whose bytes are not aligned with the pages of a disk array. This module decides which of
the two a state needs; `transfer` carries them out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from unbounded.checkpoint.format.manifest import PAGE, WEIGHT, FileEntry, Manifest, TensorEntry
from unbounded.checkpoint.format.slices import GRAIN, RunMap
from unbounded.optim import formats
from unbounded.tiers.array import Array, array_bytes
from unbounded.zero.layout import Slot, clip_range
from unbounded.zero.unit import Unit

# The most that one read brings straight into its place, which needs no buffer.
DIRECT_BYTES = 64 << 20


@dataclass(frozen=True)
class Copy:
    """`nbytes` from `offset` of a file to byte `position` of an array; `gaps` of it are padding to be zeroed."""

    file: int
    offset: int
    nbytes: int
    array: Array
    position: int
    gaps: tuple[tuple[int, int], ...] = ()  # (start, stop), from the beginning of the copy


@dataclass(frozen=True)
class Conversion:
    """Elements [start, stop) of a unit's flat buffer, for the target arrays `kinds` that are encoded together.

    The stored bytes of slots that begin at `kept` are right, and are used unchanged.
    """

    unit: Unit
    kinds: tuple[str, ...]
    start: int
    stop: int
    kept: frozenset[int]


class StoredTensors:
    """A manifest by parameter: which kinds of state it has of each, and where. Aliases are found too."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.names: dict[str, str] = {}
        for name, entry in manifest.values["parameters"].items():
            for alias in [name, *entry.get("aliases", ())]:
                self.names.setdefault(alias, name)

    def entry(self, kind: str, name: str) -> TensorEntry | None:
        return self.manifest.tensors.get((kind, self.names.get(name, name), None))

    def runs(self, kind: str, name: str) -> RunMap:
        entry = self.entry(kind, name)
        assert entry is not None
        return entry.runs


def wanted_groups(unit: Unit, *, with_states: bool) -> list[tuple[str, ...]]:
    """The unit's arrays by what must be encoded together: the weights with what completes them, each moment."""
    groups = [(WEIGHT, *(kind for kind in formats.MASTER_STATES if kind in unit.states))]
    if with_states and unit.rule is not None:
        for name in formats.moment_names(unit.rule):
            if name in unit.states:
                groups.append((name, *(k for k in (f"{name}_scale",) if k in unit.states)))
    return groups


def plan_factors(unit: Unit, source: StoredTensors) -> Iterator[Copy]:
    """The copies that fill a unit's factors, which are never on disk."""
    for factor in unit.factors.held:
        assert unit.factors.array is not None
        itemsize = unit.factors.array.dtype.itemsize
        position = factor.start * itemsize
        runs = source.runs(factor.name, unit.layout.slots[factor.slot].name)
        for run in runs.covering(0, factor.stop - factor.start):
            nbytes = (run.stop - run.start) * itemsize
            yield Copy(run.file, run.offset, nbytes, unit.factors.array, position)
            position += nbytes


def array_of(unit: Unit, kind: str) -> Array:
    return unit.weights if kind == WEIGHT else unit.states[kind]


def plan_unit(unit: Unit, source: StoredTensors, groups: Sequence[tuple[str, ...]]) -> Iterator[Copy | Conversion]:
    """The copies and conversions that fill a unit's owned arrays."""
    every = unit.every
    for group in groups:
        slots = [slot for slot, _, _ in owned_slots(unit)]
        kept = [slot.start for slot in slots if all(_has_bytes(unit, slot, kind, source) for kind in group)]
        is_raw = len(kept) == len(slots)
        found = [_plan_copies(unit, kind, source, every.get(kind, 1)) for kind in group] if is_raw else [None]
        if all(copies is not None for copies in found):
            for copies in found:
                yield from copies or ()
        else:
            low, high = unit.owned
            for start in range(low, high, 4 * GRAIN):
                yield Conversion(unit, group, start, min(start + 4 * GRAIN, high), frozenset(kept))


def _has_bytes(unit: Unit, slot: Slot, kind: str, source: StoredTensors) -> bool:
    """Whether the checkpoint stores this state of a slot in the same form as the unit keeps it."""
    entry, every = source.entry(kind, slot.name), unit.every.get(kind, 1)
    if entry is None or entry.dtype != array_of(unit, kind).dtype or entry.every != every:
        return False
    return every == 1 or slot.cut is None or slot.cut.in_blocks(every) is not None


def _plan_copies(unit: Unit, kind: str, source: StoredTensors, every: int) -> list[Copy] | None:
    """One array's copies, or None if it is on disk and the pages of file and array are not aligned."""
    array = array_of(unit, kind)
    itemsize = array.dtype.itemsize
    joined: list[Copy] = []
    for slot, start, stop in owned_slots(unit):
        offset = slot.first - slot.start
        inside = (start + offset) // every, -(-(stop + offset) // every)
        position = ((-offset - unit.owned[0]) // every + inside[0]) * itemsize
        runs = source.runs(kind, slot.name)
        for first, last in stored_ranges(slot, *inside, every):
            for run in runs.covering(first, last):
                nbytes = (run.stop - run.start) * itemsize
                _join(joined, Copy(run.file, run.offset, nbytes, array, position))
                position += nbytes
    if array.tier != "disk":
        return [*joined[:-1], *(_fill(copy, source) for copy in joined[-1:])]
    aligned = [_align(copy, source) for copy in joined]
    return [copy for copy in aligned if copy is not None] if all(aligned) else None


def stored_ranges(slot: Slot, start: int, stop: int, every: int = 1) -> Iterator[tuple[int, int]]:
    """Where elements [start, stop) of this rank's part of a parameter are in the whole one, flattened, in order.

    For a state with one element for `every` elements of the parameter, its own elements are counted.
    """
    cut = slot.cut if slot.cut is None or every == 1 else slot.cut.in_blocks(every)
    return iter([(start, stop)]) if cut is None else cut.ranges(start, stop)


def owned_slots(unit: Unit) -> Iterator[tuple[Slot, int, int]]:
    """The slots that this rank owns a part of, with that part in the flat buffer."""
    for slot in unit.layout.slots:
        clipped = clip_range(slot.start, slot.stop, *unit.owned)
        if clipped is not None:
            yield slot, *clipped


def _join(joined: list[Copy], copy: Copy) -> None:
    """Appends a copy, or extends the last one if file and array have the same padding in between."""
    if joined:
        last = joined[-1]
        gap = copy.offset - last.offset - last.nbytes
        if last.file == copy.file and 0 <= gap < PAGE and copy.position - last.position == copy.offset - last.offset:
            gaps = last.gaps + (((last.nbytes, last.nbytes + gap),) if gap else ())
            joined[-1] = Copy(last.file, last.offset, last.nbytes + gap + copy.nbytes, last.array, last.position, gaps)
            return
    joined.append(copy)


def _fill(copy: Copy, source: StoredTensors) -> Copy:
    """An array's last copy, extended by the padding after the last slot if that is in the same block."""
    end, total = copy.position + copy.nbytes, array_bytes(copy.array)
    edges, stop = source.manifest.files[copy.file].edges, copy.offset + copy.nbytes
    if not 0 < total - end < PAGE or stop + total - end > edges[bisect_left(edges, stop)]:
        return copy
    gaps = (*copy.gaps, (copy.nbytes, copy.nbytes + total - end))
    return replace(copy, nbytes=copy.nbytes + total - end, gaps=gaps)


def _align(copy: Copy, source: StoredTensors) -> Copy | None:
    """A copy into a disk array, extended by padding to whole pages, or None if the pages are not aligned."""
    front = copy.position % PAGE
    end, total = copy.position + copy.nbytes, array_bytes(copy.array)
    back = min(-(-end // PAGE) * PAGE, total) - end
    offset, nbytes = copy.offset - front, copy.nbytes + front + back
    file_bytes = source.manifest.files[copy.file].nbytes
    # Only our own padding may be overwritten: less than a slot's alignment before the first and after the last.
    if offset < 0 or offset % PAGE or offset + nbytes > file_bytes or max(front, back) >= 128 * 4:
        return None
    gaps = [(start + front, stop + front) for start, stop in copy.gaps]
    if front:
        gaps.insert(0, (0, front))
    if back:
        gaps.append((nbytes - back, nbytes))
    return Copy(copy.file, offset, nbytes, copy.array, copy.position - front, tuple(gaps))


def cut_copies(
    copies: Sequence[Copy], files: Sequence[FileEntry], chunk_bytes: int, *, direct: bool
) -> Iterator[tuple[int, int, list[Copy]]]:
    """Copies in the order of the files, cut where chunks begin: (file, start of the chunk, copies inside it).

    With `direct`, a copy of whole blocks into host memory is its own chunk, and may be larger.
    """
    pending: dict[tuple[int, int, bool], list[Copy]] = {}
    for copy in copies:
        whole = direct and direct_target(copy, *_blocks(copy, files[copy.file])) is not None
        step = DIRECT_BYTES if whole else chunk_bytes
        starts, position = files[copy.file].starts, copy.offset
        while position < copy.offset + copy.nbytes:
            index = bisect_right(starts, position) - 1
            chunk = starts[index] + (position - starts[index]) // step * step
            following = starts[index + 1] if index + 1 < len(starts) else files[copy.file].nbytes
            stop = min(chunk + step, following, copy.offset + copy.nbytes)
            pending.setdefault((copy.file, chunk, whole), []).append(_clip(copy, position, stop))
            position = stop
    for (file, chunk, _), parts in sorted(pending.items(), key=lambda entry: entry[0]):
        yield file, chunk, parts


def direct_target(copy: Copy, start: int, stop: int) -> torch.Tensor | None:
    """The host memory into which bytes [start, stop) of the file can be read for the copy, if there is any.

    Up to a page of padding after the copy may go into the unused rest of the array's last page.
    """
    held, excess = copy.array.direct, stop - copy.offset - copy.nbytes
    if held is None or held.device.type != "cpu" or start != copy.offset or not 0 <= excess < PAGE:
        return None
    end = copy.position + copy.nbytes
    if excess and end != array_bytes(copy.array):
        return None
    memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(held.untyped_storage())
    base = held.storage_offset() * held.element_size() + copy.position
    return memory[base : base + stop - start] if base + stop - start <= memory.numel() else None


def _blocks(copy: Copy, file: FileEntry) -> tuple[int, int]:
    """The whole blocks that a copy lies in."""
    first = bisect_right(file.edges, copy.offset) - 1
    return file.edges[first], file.edges[bisect_left(file.edges, copy.offset + copy.nbytes)]


def _clip(copy: Copy, start: int, stop: int) -> Copy:
    """The part of a copy between two offsets of its file."""
    skip, nbytes = start - copy.offset, stop - start
    gaps = [clip_range(first - skip, last - skip, 0, nbytes) for first, last in copy.gaps]
    kept = tuple(gap for gap in gaps if gap is not None)
    return Copy(copy.file, start, nbytes, copy.array, copy.position + skip, kept)
