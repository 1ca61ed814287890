"""The manifest: what a checkpoint holds and where, as one JSON file that checks itself.

    {"format": "unbounded checkpoint", "version": 1, "crc32c": "0a1b2c3d", "body":
    {...one line of JSON, whose bytes the checksum is of...}
    }

`tensors` describes every tensor by slices of the global tensor (see `slices`); `files` has a CRC32C for every
block of every data file, so that any part of a file can be verified by whoever reads just that part, in the same
pass. Everything else is plain values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from unbounded.checkpoint.slices import RunMap, Slice
from unbounded.errors import CheckpointError
from unbounded.native.disk import crc32c

FILE_NAME = "manifest.json"
FORMAT = "unbounded checkpoint"
VERSION = 1
BLOCK_BYTES = 1 << 20

Key = tuple[str, str, int | None]  # kind, name, rank


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no whole checkpoint where one was asked for."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class TensorEntry:
    """A named tensor of one kind. `every` parameters share an element; `rank` where it is one rank's own."""

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

    def run_map(self) -> RunMap:
        return RunMap(self.slices, self.shape, self.dtype.itemsize)


@dataclass(frozen=True)
class FileEntry:
    """A data file: its length and the CRC32C of every block of it.

    Blocks are counted from each of `starts`, where an array of some size begins, so that what fills memory of its
    own is whole blocks; the last before the next start may be short.
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
    """`values` holds what is not a tensor: parameters, optimizer, extra and what the job was like."""

    tensors: dict[Key, TensorEntry]
    files: list[FileEntry]
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def of_kind(self, kind: str) -> list[TensorEntry]:
        return [entry for entry in self.tensors.values() if entry.kind == kind]


def join_slices(parts: Sequence[TensorEntry]) -> dict[Key, TensorEntry]:
    """The tensors of all ranks, the slices of one tensor brought together."""
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
    head = {"format": FORMAT, "version": VERSION, "crc32c": f"{_checksum(text):08x}"}
    return json.dumps(head)[:-1].encode() + b', "body":\n' + text + b"\n}\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; an error says what is wrong with it."""
    path = folder / FILE_NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingCheckpointError(
            f"there is no whole checkpoint in {folder}: it has no {FILE_NAME}. Give the folder that was saved to."
        ) from None
    return _parse(raw, path)


def _parse(raw: bytes, path: Path) -> Manifest:
    head, _, rest = raw.partition(b"\n")
    try:
        opening = json.loads(head.removesuffix(b', "body":') + b"}")
        if not isinstance(opening, dict) or opening.get("format") != FORMAT:
            raise ValueError("it is not a manifest of this format")
        version = opening["version"]
    except (ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from None
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{path} has version {version}, written by a newer release; this one reads up to {VERSION}. "
            "Install a newer release of unbounded."
        )
    text, _, tail = rest.rpartition(b"\n}\n")
    if version != VERSION or tail or opening.get("crc32c") != f"{_checksum(text):08x}":
        raise _damaged(path, "its CRC32C differs from the one it was written with")
    try:
        return _read_body(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {reason}. Load another checkpoint, or copy this one again.")


def _read_body(body: dict[str, Any]) -> Manifest:
    files = [
        FileEntry(f["name"], f["nbytes"], f["block_bytes"], tuple(f["starts"]), tuple(int(c, 16) for c in f["crc32c"]))
        for f in body.pop("files")
    ]
    for file in files:
        if len(file.crc32c) != len(file.edges) - 1 or "/" in file.name:
            raise ValueError(f"the entry of {file.name} does not fit its length")
    entries = [_read_tensor(entry) for entry in body.pop("tensors")]
    return Manifest({entry.key: entry for entry in entries}, files, body)


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


def _read_tensor(text: dict[str, Any]) -> TensorEntry:
    slices = tuple(
        Slice(s["file"], s["offset"], s["nbytes"], tuple((start, stop) for start, stop in s["box"]))
        for s in text["slices"]
    )
    dtype = getattr(torch, text["dtype"])
    return TensorEntry(
        text["name"], text["kind"], tuple(text["shape"]), dtype, slices, text.get("every", 1), text.get("rank")
    )


def _checksum(text: bytes) -> int:
    return crc32c(torch.frombuffer(bytearray(text), dtype=torch.uint8)) if text else 0
