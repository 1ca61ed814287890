"""Reads a manifest from its file. Nothing in it is trusted before it is checked.

A checksum says that a manifest is as it was written, not who wrote it. So every number and name is checked against
the others here, before any data file is opened: types, bounds, that slices are inside their files and do not overlap,
that every tensor is there completely and once, that states fit their parameters. A manifest that passes can be read in
memory and time that follow from the sizes of the files, which `Files.check_present` then compares with the real ones.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unbounded.checkpoint.format.described import check_values
from unbounded.checkpoint.format.field_checks import integer, items, mapping, text
from unbounded.checkpoint.format.manifest import (
    BLOCK_BYTES,
    BUFFER,
    FILE_NAME,
    FORMAT,
    GRADIENT,
    LOOSE,
    PAGE,
    UNREDUCED,
    VERSION,
    WEIGHT,
    FileEntry,
    Manifest,
    TensorEntry,
    checksum,
)
from unbounded.checkpoint.format.slices import Slice, box_numel, count_runs
from unbounded.errors import CheckpointError, DiskError, MissingCheckpointError
from unbounded.optim.formats import MASTER_STATES
from unbounded.ranks.cut import Interval, Side

MAX_MANIFEST_BYTES = 1 << 30
MAX_DIMS = 64
MAX_RUNS = 1 << 22  # of one tensor
_LARGEST = 2**62
# Kinds by the names that early checkpoints use.
_FORMER_KINDS = {"low": "remainder"}
_DATA_NAME = re.compile(r"data-[0-9]{5,9}\.bin")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "q" not in str(dtype).removeprefix("torch.")[:2] and dtype.itemsize > 0
}


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; an error says what is wrong with it."""
    path = folder / FILE_NAME
    try:
        raw = read_regular(path, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingCheckpointError(
            f"there is no whole checkpoint in {folder}: it has no {FILE_NAME}. Give the folder that was saved to."
        ) from None
    except OSError as error:
        told = DiskError(
            f"{path} cannot be read: {error.strerror} (errno {error.errno}). Check the disk and the permissions."
        )
        told.errno, told.filename = error.errno, str(path)
        raise told from error
    return _parse(raw, path)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The bytes of a plain file. Anything else (a FIFO, a device) is not opened, since that may block."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is not a plain file. Give a folder that a save was finished in.")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        held = os.fstat(file.fileno())
        if not stat.S_ISREG(held.st_mode) or held.st_size > max_bytes:
            raise CheckpointError(
                f"{path} has {held.st_size:,} bytes, but a manifest has at most {max_bytes:,}. Load another one."
            )
        return file.read(max_bytes)


def _parse(raw: bytes, path: Path) -> Manifest:
    head, _, rest = raw.partition(b"\n")
    try:
        opening = json.loads(head.removesuffix(b', "body":') + b"}")
        if not isinstance(opening, dict) or opening.get("format") != FORMAT:
            raise ValueError("it is not a manifest of this format")
        version = opening["version"]
    except (ValueError, KeyError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{path} has version {version}, written by a newer release; this one reads up to {VERSION}. "
            "Install a newer release of unbounded."
        )
    body, _, tail = rest.rpartition(b"\n}\n")
    mark = checksum(body)
    if version != VERSION or tail or opening.get("crc32c") != f"{mark:08x}":
        raise _damaged(path, "its CRC32C differs from the one it was written with")
    try:
        manifest = _read_body(mapping(json.loads(body, parse_constant=_refuse_constant), "the body"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from None
    manifest.mark = mark
    return manifest


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {reason}. Load another checkpoint, or copy this one again.")


def _read_body(body: dict[str, Any]) -> Manifest:
    """Raises a ValueError that says what is impossible."""
    files = [_read_file(entry, f"files[{i}]") for i, entry in enumerate(items(body.pop("files", None), "files"))]
    if not files or len({file.name for file in files}) != len(files):
        raise ValueError("files are missing or named twice")
    listed = items(body.pop("tensors", None), "tensors")
    entries = [_read_tensor(entry, f"tensors[{i}]", files) for i, entry in enumerate(listed)]
    tensors = {entry.key: entry for entry in entries}
    if len(tensors) != len(entries):
        raise ValueError("a tensor is described twice")
    _check_overlaps(entries)
    manifest = Manifest(tensors, files, body)
    check_values(manifest)
    _check_parameters(manifest)
    return manifest


def _read_file(raw: Any, where: str) -> FileEntry:
    held = mapping(raw, where)
    name = text(held.get("name"), f"{where}.name")
    if not _DATA_NAME.fullmatch(name):
        raise ValueError(f"{where}.name is {name[:100]!r}, which is not the name of a data file")
    nbytes = integer(held.get("nbytes"), f"{where}.nbytes", 0, _LARGEST)
    block_bytes = integer(held.get("block_bytes"), f"{where}.block_bytes", PAGE, BLOCK_BYTES)
    starts = [
        integer(s, f"{where}.starts", 0, max(0, nbytes - 1)) for s in items(held.get("starts"), f"{where}.starts")
    ]
    stops = [*starts[1:], nbytes]
    if starts[:1] != [0] or any(a >= b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"{where}.starts do not go up from 0")
    if block_bytes & (block_bytes - 1) or any(start % PAGE for start in starts):
        raise ValueError(f"{where} has blocks that do not begin on pages")
    sums = items(held.get("crc32c"), f"{where}.crc32c")
    num_blocks = sum(-(-(stop - start) // block_bytes) for start, stop in zip(starts, stops, strict=True))
    if len(sums) != num_blocks:
        raise ValueError(f"{where} has {len(sums):,} checksums for {num_blocks:,} blocks")
    return FileEntry(name, nbytes, block_bytes, tuple(starts), tuple(_read_sum(s, where) for s in sums))


def _read_sum(raw: Any, where: str) -> int:
    if not isinstance(raw, str) or len(raw) != 8 or not raw.isascii() or not raw.isalnum():
        raise ValueError(f"{where}.crc32c has {str(raw)[:20]!r}, which is not a checksum")
    return int(raw, 16)


def _read_tensor(raw: Any, where: str, files: Sequence[FileEntry]) -> TensorEntry:
    held = mapping(raw, where)
    shape = tuple(integer(n, f"{where}.shape", 0, _LARGEST) for n in items(held.get("shape"), f"{where}.shape"))
    dtype = _DTYPES.get(text(held.get("dtype"), f"{where}.dtype"))
    if dtype is None:
        raise ValueError(f"{where}.dtype is {held['dtype'][:40]!r}, which no tensor has")
    if len(shape) > MAX_DIMS or math.prod(shape) * dtype.itemsize > _LARGEST:
        raise ValueError(f"{where} is larger than any tensor")
    rank, kind = held.get("rank"), text(held.get("kind"), f"{where}.kind")
    entry = TensorEntry(
        text(held.get("name"), f"{where}.name"),
        _FORMER_KINDS.get(kind, kind),
        shape,
        dtype,
        tuple(_read_slice(s, where, shape, dtype, files) for s in items(held.get("slices"), f"{where}.slices")),
        integer(held.get("every", 1), f"{where}.every", 1, 1 << 20),
        None if rank is None else integer(rank, f"{where}.rank", 0, 1 << 24),
    )
    _check_whole(entry, where)
    return entry


def _read_slice(raw: Any, where: str, shape: Sequence[int], dtype: torch.dtype, files: Sequence[FileEntry]) -> Slice:
    held = mapping(raw, f"{where}.slices")
    number = integer(held.get("file"), f"{where}.file", 0, len(files) - 1)
    nbytes = integer(held.get("nbytes"), f"{where}.nbytes", 0, files[number].nbytes)
    offset = integer(held.get("offset"), f"{where}.offset", 0, files[number].nbytes - nbytes)
    sides = [items(side, f"{where}.box") for side in items(held.get("box"), f"{where}.box")]
    # A single interval is over the flattened tensor, whatever the number of its dims.
    bounds = shape if len(sides) == len(shape) else (math.prod(shape),)
    if len(sides) != len(bounds):
        raise ValueError(f"{where} has a box of {len(sides)} intervals for {len(shape)} dims")
    box = tuple(_read_side(side, f"{where}.box", bound) for side, bound in zip(sides, bounds, strict=True))
    if box_numel(box) * dtype.itemsize != nbytes:
        raise ValueError(f"{where} has a slice of {nbytes:,} bytes, which is not the size of its box")
    return Slice(number, offset, nbytes, box)


def _read_side(side: list[Any], where: str, bound: int) -> Side:
    """An interval, or several that follow one another with gaps between."""
    if side and isinstance(side[0], list):
        found, least = [], 0
        for interval in side:
            found.append(_read_interval(items(interval, where), where, least, bound))
            least = found[-1][1]
        return tuple(found)
    return _read_interval(side, where, 0, bound)


def _read_interval(interval: list[Any], where: str, least: int, bound: int) -> Interval:
    if len(interval) != 2:
        raise ValueError(f"{where} has an interval of {len(interval)} ends")
    start = integer(interval[0], where, least, bound)
    return start, integer(interval[1], where, start, bound)


def _check_whole(entry: TensorEntry, where: str) -> None:
    """Every element must be there once. The runs are counted before they are listed."""
    numel = math.prod(entry.shape)
    if sum(piece.nbytes for piece in entry.slices) != numel * entry.dtype.itemsize:
        raise ValueError(f"{where} ({entry.name[:100]}) is incomplete, or stored more than once")
    if sum(count_runs(piece, entry.shape) for piece in entry.slices) > MAX_RUNS:
        raise ValueError(f"{where} ({entry.name[:100]}) is in more than {MAX_RUNS:,} pieces")
    gap = entry.runs.first_gap()
    if gap is not None:
        raise ValueError(f"{where} ({entry.name[:100]}) lacks element {gap}")


def _check_overlaps(entries: Sequence[TensorEntry]) -> None:
    places = sorted((s.file, s.offset, s.offset + s.nbytes, e.name) for e in entries for s in e.slices if s.nbytes)
    for one, other in itertools.pairwise(places):
        if one[0] == other[0] and other[1] < one[2]:
            raise ValueError(f"{one[3][:100]} and {other[3][:100]} overlap in file {one[0]}")


_SIZED = {WEIGHT, GRADIENT, UNREDUCED, *MASTER_STATES}


def _check_parameters(manifest: Manifest) -> None:
    """States and gradients must belong to parameters, and have their sizes and an allowed dtype."""
    parameters, world_size = manifest.values["parameters"], manifest.values["world_size"]
    for entry in manifest.tensors.values():
        if entry.rank is not None and entry.rank >= world_size:
            raise ValueError(f"{entry.name[:100]} belongs to rank {entry.rank}, but the job had {world_size}")
        if entry.kind in (BUFFER, LOOSE):
            continue
        if entry.name not in parameters:
            raise ValueError(f"there is a {entry.kind[:40]} of {entry.name[:100]}, which is not a parameter")
        numel = math.prod(parameters[entry.name]["shape"])
        if entry.kind == UNREDUCED:  # a rank's own part, if the tensor axis cuts the parameter
            numel = min(numel, math.prod(entry.shape))
        if entry.kind in _SIZED or entry.every > 1:
            fits = math.prod(entry.shape) == -(-numel // entry.every)
        else:  # a moment, or a factor of one, which is smaller
            fits = math.prod(entry.shape) <= numel
        if not fits:
            raise ValueError(f"the {entry.kind[:40]} of {entry.name[:100]} does not have the size of the parameter")
        if not _is_plausible(entry, manifest):
            raise ValueError(f"the {entry.kind[:40]} of {entry.name[:100]} is in {entry.dtype}, which is not allowed")


def _is_plausible(entry: TensorEntry, manifest: Manifest) -> bool:
    """Whether values of this kind can be stored like this; encoded values need what decodes them."""
    dtype = entry.dtype
    if entry.kind == WEIGHT:
        return entry.every == 1
    if entry.kind in (GRADIENT, UNREDUCED, "master"):
        return entry.every == 1 and dtype.is_floating_point and dtype.itemsize >= 2
    if entry.kind == "remainder":
        weight = manifest.tensors.get((WEIGHT, entry.name, None))
        return entry.every == 1 and weight is not None and _completes(dtype, weight.dtype)
    if entry.kind.endswith("_scale"):
        return dtype == torch.float32
    if dtype in (torch.uint8, torch.int8):
        scale = manifest.tensors.get((f"{entry.kind}_scale", entry.name, None))
        return entry.every == 1 and scale is not None and scale.every > 1
    return entry.every == 1 and dtype in (torch.float32, torch.float64)


def _completes(remainder: torch.dtype, weight: torch.dtype) -> bool:
    if remainder == torch.int16:
        return weight == torch.bfloat16
    return remainder == torch.int8 and weight in (torch.bfloat16, torch.float16)
