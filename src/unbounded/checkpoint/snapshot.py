"""What one rank puts into a checkpoint: segments of its arrays with the names of what is in them, and plain values.

Nothing is read here. A snapshot refers to the arrays where they are; whoever writes it must keep them from changing
(`Segment.reader`) until they were read. Small things (buffers, random states, the user's tensors) are copied.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint import values
from unbounded.checkpoint.manifest import TensorEntry
from unbounded.checkpoint.slices import Slice, deal
from unbounded.checkpoint.stream import Segment
from unbounded.native.disk import crc32c
from unbounded.tiers.array import Array, MemoryArray
from unbounded.tiers.reader import Reader
from unbounded.zero.layout import clip_range
from unbounded.zero.unit import Unit
from unbounded.zero.units import find_members

WEIGHT, BUFFER, GRADIENT, UNREDUCED, LOOSE = "weight", "buffer", "gradient", "unreduced", "value"
COMPLETING = ("low", "master")  # states that are part of the weights


@dataclass(frozen=True)
class Stored:
    """A stretch of a named tensor inside a segment; what a slice will be once the segment has its place."""

    segment: Segment
    start: int  # elements into the segment
    name: str
    kind: str
    shape: tuple[int, ...]
    range: tuple[int, int]  # of the flattened tensor
    every: int = 1
    rank: int | None = None

    def entry(self, file: int) -> TensorEntry:
        dtype = self.segment.dtype
        nbytes = (self.range[1] - self.range[0]) * dtype.itemsize
        piece = Slice(file, self.segment.offset + self.start * dtype.itemsize, nbytes, (self.range,))
        return TensorEntry(self.name, self.kind, self.shape, dtype, (piece,), self.every, self.rank)


@dataclass
class Snapshot:
    """The segments of a rank's file in order, and what they hold."""

    rank: int
    size: int
    segments: list[Segment] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    num_loose: int = 0

    def add_unit(
        self,
        unit: Unit,
        number: int,
        every: Mapping[str, int],
        kinds: Iterable[str],
        reader: Reader,
        *,
        copy: bool = False,
    ) -> None:
        """The unit's weights and the states named `kinds`: what this rank owns, or its part of what all have.

        With `copy` what lies on the device is copied there now, so that nobody has to wait for it.
        """
        start, stop = self._part(unit, number)
        arrays: dict[str, Array] = {WEIGHT: unit.weights, **{kind: unit.states[kind] for kind in kinds}}
        for kind, array in arrays.items() if start < stop else ():
            kept = _copied(array) if copy else array
            waits = reader if kept is array else None
            self._add_flat(unit, kind, kept, (start, stop), every.get(kind, 1), waits)

    def _part(self, unit: Unit, number: int) -> tuple[int, int]:
        """What this rank writes of a unit's flat buffer."""
        if unit.is_whole and self.size > 1:
            return deal(unit.layout.numel, number, self.rank, self.size)
        return unit.owned

    def add_gradient(self, unit: Unit, number: int, reader: Reader) -> None:
        """The gradient added up so far: reduced, and what waits for its reduction on this rank."""
        array = unit.gradient.array
        if unit.gradient.present and not unit.gradient.consumed and array is not None:
            start, stop = self._part(unit, number)
            if start < stop:
                self._add_flat(unit, GRADIENT, array, (start, stop), 1, reader)
        if unit.unreduced is not None:
            whole = MemoryArray(unit.unreduced, "device")
            self._add_flat(unit, UNREDUCED, whole, (0, unit.layout.numel), 1, reader, own=True)

    def _add_flat(
        self,
        unit: Unit,
        kind: str,
        array: Array,
        part: tuple[int, int],
        every: int,
        reader: Reader | None,
        *,
        own: bool = False,
    ) -> None:
        """Elements `part` of a unit's flat buffer, which `array` holds from the first owned one on."""
        base = 0 if own else unit.owned[0]
        start, stop = (part[0] - base) // every, -(-(part[1] - base) // every)
        segment = Segment((array, start), stop - start, reader)
        self.segments.append(segment)
        for slot in unit.layout.slots:
            clipped = clip_range(slot.start, slot.stop, *part)
            if clipped is None:
                continue
            inside = (clipped[0] - slot.start) // every, -(-(clipped[1] - slot.start) // every)
            shape = slot.shape if every == 1 else (-(-slot.numel // every),)
            position = (clipped[0] - part[0]) // every
            rank = self.rank if own else None
            self.stored.append(Stored(segment, position, slot.name, kind, shape, inside, every, rank))

    def add_tensor(self, name: str, kind: str, tensor: torch.Tensor, rank: int | None) -> None:
        """A small tensor of this rank's own, whole."""
        flat = tensor.detach().reshape(-1).contiguous().cpu()
        segment = Segment((MemoryArray(flat, "host"), 0), flat.numel())
        self.segments.append(segment)
        if flat.numel():
            self.stored.append(Stored(segment, 0, name, kind, tuple(tensor.shape), (0, flat.numel()), 1, rank))
        else:
            self.stored.append(Stored(segment, 0, name, kind, tuple(tensor.shape), (0, 0), 1, rank))

    def put(self, tensor: torch.Tensor) -> str:
        """Stores a tensor of the user's; named by number and content, so that equal values have equal text."""
        copy = tensor.detach().to("cpu", copy=True).contiguous()
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


def _copied(array: Array) -> Array:
    return (
        MemoryArray(array.direct.clone(), array.tier) if array.tier == "device" and array.direct is not None else array
    )


def checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return crc32c(flat.view(torch.uint8)) if flat.numel() else 0


# -- plain values ------------------------------------------------------------------------------------------------------


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that `state_dict` has."""
    found = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def describe_parameters(model: nn.Module, units: Sequence[Unit]) -> dict[str, Any]:
    """Every parameter by name, with what is counted for each."""
    names = {member.names[0]: member.names[1:] for member in find_members(model)}
    described: dict[str, Any] = {}
    for unit in units:
        for slot, step in zip(unit.layout.slots, unit.steps, strict=True):
            entry: dict[str, Any] = {"shape": list(slot.shape), "trainable": unit.trainable}
            if names.get(slot.name):
                entry["aliases"] = names[slot.name]
            if step:
                entry["step"] = int(step)
            described[slot.name] = entry
    return described


def owned_scalars(units: Sequence[Unit]) -> dict[str, dict[str, float]]:
    """The scalars of parameters that this rank updates a part of; others' are not kept current here."""
    found = {}
    for unit in units:
        for slot, scalars in zip(unit.layout.slots, unit.scalars, strict=True):
            if scalars and clip_range(slot.start, slot.stop, *unit.owned):
                found[slot.name] = {key: float(value) for key, value in scalars.items()}
    return found


def used_names(units: Sequence[Unit]) -> list[str]:
    """The parameters that got a gradient on this rank since the last step."""
    return [
        slot.name
        for unit in units
        for slot, used in zip(unit.layout.slots, unit.used, strict=True)
        if used and unit.fires
    ]


def describe_config(model: nn.Module) -> dict[str, Any]:
    """A Hugging Face model's configuration, so that a checkpoint can be exported without the model."""
    found = {}
    for name in ("config", "generation_config"):
        config: Any = getattr(model, name, None)
        if hasattr(config, "to_json_string"):
            found[name] = config.to_json_string(use_diff=False) if name == "config" else config.to_json_string()
    return found


def describe_optimizer(optimizer: Any, model: nn.Module, put: values.Put) -> dict[str, Any]:
    """Param groups with their hyper-parameters, the loss scale, and where in a step the optimizer is."""
    names = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        encoded = values.encode(options, f"param_groups[{index}]", put)
        groups.append({"names": [names[id(p)] for p in group["params"]], "options": encoded})
    scale = optimizer.loss_scale
    clip = optimizer._clip
    return {
        "kind": optimizer.kind,
        "groups": groups,
        "loss_scale": None if scale is None else asdict(scale),
        "skipped_steps": optimizer.skipped_steps,
        "scaled": optimizer._scaled,
        "clip": None if clip is None else values.encode(float(clip), "clip", put),
    }


def random_states(device: torch.device) -> dict[str, Any]:
    import numpy

    states = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    import numpy

    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
