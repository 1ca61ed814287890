"""The manifest: what a checkpoint holds and where, as one JSON file with its own checksum.

    {"format": "unbounded checkpoint", "version": 1, "crc32c": "0a1b2c3d", "body":
    {...one line of JSON, whose bytes the checksum is of...}
    }

`tensors` describes every tensor by slices of the global tensor (see `slices`); `files` has a CRC32C for every
block of every data file, so that whoever reads only a part of a file can verify that part in the same
pass. Everything else is plain values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from unbounded.checkpoint.format.slices import RunMap, Slice
from unbounded.native.disk import crc32c

FILE_NAME = "manifest.json"
FORMAT = "unbounded checkpoint"
VERSION = 1
BLOCK_BYTES = 1 << 20
PAGE = 4096  # tensors begin on one in their files, whatever machine wrote them

# Kinds of tensors. Others are states of the optimizer, by their names there.
WEIGHT, BUFFER, GRADIENT, UNREDUCED, LOOSE = "weight", "buffer", "gradient", "unreduced", "value"

Key = tuple[str, str, int | None]  # kind, name, rank


@dataclass(frozen=True)
class TensorEntry:
    """A named tensor of one kind. `every` parameters share an element; `rank` is set if it belongs to one rank."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[Slice, ...]
    every: int = 1
    rank: int | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.name, self.rank

    @cached_property
    def runs(self) -> RunMap:
        return RunMap(self.slices, self.shape, self.dtype.itemsize)


@dataclass(frozen=True)
class FileEntry:
    """A data file: its length and the CRC32C of every block of it.

    Blocks are counted from each of `starts`, where a large array begins, so that an array is whole blocks; the last
    one before the next start may be short.
    """

    name: str
    nbytes: int
    block_bytes: int
    starts: tuple[int, ...]
    crc32c: tuple[int, ...]

    @cached_property
    def edges(self) -> list[int]:
        """Where the blocks begin, and the file's end."""
        stops = [*self.starts[1:], self.nbytes]
        found = [
            o for first, stop in zip(self.starts, stops, strict=True) for o in range(first, stop, self.block_bytes)
        ]
        return [*found, self.nbytes]


@dataclass
class Manifest:
    """`values` holds what is not a tensor: parameters, optimizer, extra and what the job was like.

    `mark` is the checksum of the text that it was read from.
    """

    tensors: dict[Key, TensorEntry]
    files: list[FileEntry]
    values: dict[str, Any] = field(default_factory=dict)
    mark: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def of_kind(self, kind: str) -> list[TensorEntry]:
        return [entry for entry in self.tensors.values() if entry.kind == kind]


def join_slices(parts: Sequence[TensorEntry]) -> dict[Key, TensorEntry]:
    """The tensors of all ranks, with all slices of each tensor together."""
    found: dict[Key, list[TensorEntry]] = {}
    for part in parts:
        found.setdefault(part.key, []).append(part)
    return {
        key: TensorEntry(
            first[0].name,
            first[0].kind,
            first[0].shape,
            first[0].dtype,
            tuple(piece for entry in first for piece in entry.slices),
            first[0].every,
            first[0].rank,
        )
        for key, first in found.items()
    }


# -- text --------------------------------------------------------------------------------------------------------------


def write_text(manifest: Manifest) -> bytes:
    body = {
        **manifest.values,
        "files": [_write_file(file) for file in manifest.files],
        "tensors": [_write_tensor(entry) for entry in manifest.tensors.values()],
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    head = {"format": FORMAT, "version": VERSION, "crc32c": f"{checksum(text):08x}"}
    return json.dumps(head)[:-1].encode() + b', "body":\n' + text + b"\n}\n"


def _write_file(file: FileEntry) -> dict[str, Any]:
    return {
        "name": file.name,
        "nbytes": file.nbytes,
        "block_bytes": file.block_bytes,
        "starts": list(file.starts),
        "crc32c": [f"{value:08x}" for value in file.crc32c],
    }


def _write_tensor(entry: TensorEntry) -> dict[str, Any]:
    text: dict[str, Any] = {
        "name": entry.name,
        "kind": entry.kind,
        "shape": list(entry.shape),
        "dtype": str(entry.dtype).removeprefix("torch."),
    }
    if entry.every != 1:
        text["every"] = entry.every
    if entry.rank is not None:
        text["rank"] = entry.rank
    text["slices"] = [
        {"file": s.file, "offset": s.offset, "nbytes": s.nbytes, "box": [list(side) for side in s.box]}
        for s in entry.slices
    ]
    return text


def checksum(text: bytes) -> int:
    return crc32c(torch.frombuffer(bytearray(text), dtype=torch.uint8)) if text else 0
