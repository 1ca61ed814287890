"""Brings gradients that were added up but not used yet from a checkpoint back into the units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from unbounded.checkpoint.format.data_files import Files
from unbounded.checkpoint.format.manifest import GRADIENT, UNREDUCED, Manifest, TensorEntry
from unbounded.checkpoint.load.load_plan import StoredTensors, stored_ranges
from unbounded.zero.reduction.reduction import Reduction
from unbounded.zero.unit import Unit


class StoredGradients:
    """The gradients of a checkpoint that concern one rank: reduced ones, and its own that wait for a reduction."""

    def __init__(self, manifest: Manifest, source: StoredTensors, rank: int) -> None:
        self.source, self.rank = source, rank
        self.used = set(manifest.values["used"])
        self.has_deferred = any(entry.kind == UNREDUCED for entry in manifest.tensors.values())  # of any rank
        self.entries: dict[tuple[str, str], TensorEntry] = {
            (entry.kind, entry.name): entry
            for entry in manifest.tensors.values()
            if entry.kind == GRADIENT or (entry.kind == UNREDUCED and entry.rank == rank)
        }

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in self.entries.values())

    def put(
        self, units: Sequence[Unit], files: Files, reduction: Reduction, later: Callable[[Callable[[], None]], None]
    ) -> None:
        """Reads the gradients unit by unit, and gives `later` the actions that put them in place."""
        if self.has_deferred:
            later(reduction.defer)
        for unit in units if self.entries else ():
            reduced = self._read(unit, GRADIENT, files, *unit.owned)
            unreduced = self._read(unit, UNREDUCED, files, 0, unit.layout.numel)
            if reduced is not None or unreduced is not None:
                used = [slot.name in self.used for slot in unit.layout.slots]
                later(partial(reduction.restore, unit, reduced, unreduced, used))

    def _read(self, unit: Unit, kind: str, files: Files, low: int, high: int) -> torch.Tensor | None:
        """A stretch of a unit's flat buffer from named tensors, or None if the checkpoint has none of it."""
        flat: torch.Tensor | None = None
        for slot in unit.layout.slots:
            entry = self.entries.get((kind, self.source.names[slot.name]))
            if entry is None:
                continue
            if flat is None:
                flat = torch.zeros(high - low, dtype=entry.dtype, device="cpu")
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                offset, position = slot.first - slot.start, start - low
                inside = start + offset, stop + offset
                ranges = [inside] if kind == UNREDUCED else stored_ranges(slot, *inside)
                for first, last in ranges:
                    files.read_range(entry, first, last, flat[position : position + last - first])
                    position += last - first
        return flat
