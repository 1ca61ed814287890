"""Writes safetensors as a stream: where every byte goes is known before the first one is written.

The files are laid out from names, dtypes and shapes alone, so tensors may come in any order and in pieces, and
memory holds only the current piece. Files appear under their names only when all are whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unbounded.checkpoint.format.data_files import disk_engine
from unbounded.checkpoint.format.folder import data_name, is_whole, sync_folder, told, write_synced
from unbounded.errors import CheckpointError
from unbounded.native.bulk import flat
from unbounded.native.disk import DiskFile
from unbounded.weights.adapter_files import ADAPTER_CONFIG
from unbounded.weights.safetensors_reader import ADAPTER_WEIGHTS, INDEX, SINGLE

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A tensor to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class ShardPlan:
    """One file: its name, its header and where every tensor begins."""

    name: str
    header: bytes
    offsets: dict[str, int]
    nbytes: int


def plan_shards(tensors: Sequence[Planned], max_bytes: int) -> list[ShardPlan]:
    """Files of at most `max_bytes` of tensors (one that is larger has its own file), in the order given."""
    groups: list[list[Planned]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(t.nbytes for t in groups[-1]) + tensor.nbytes > max_bytes:
            groups.append([])
        groups[-1].append(tensor)
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [plan_file(name, group) for name, group in zip(names, groups, strict=True)]


def plan_file(name: str, tensors: Sequence[Planned]) -> ShardPlan:
    """One file with these tensors."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, position = {}, 0
    # The widest dtype first, so that every tensor is aligned to its elements.
    for tensor in sorted(tensors, key=lambda t: -t.dtype.itemsize):
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{tensor.name} is {tensor.dtype}, which safetensors cannot hold. Convert it first.")
        offsets[tensor.name] = position
        head[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return ShardPlan(name, header, {key: start + len(header) for key, start in offsets.items()}, position + len(header))


@dataclass
class ShardWriter:
    """Writes planned files into `folder`; use as a context, and they appear when it ends well.

    A folder with an earlier export is readable at every moment, first as the old one and then as the new one. A reader
    takes `model.safetensors` if there is one, otherwise the index. The files that an index names are never replaced,
    so those of the new one get other names.
    """

    folder: Path
    plans: Sequence[ShardPlan]
    _files: dict[str, tuple[DiskFile, int]] = field(default_factory=dict)

    def __enter__(self) -> ShardWriter:
        if any(plan.name != ADAPTER_WEIGHTS for plan in self.plans):
            refuse_adapters(self.folder)
        _refuse_checkpoint(self.folder)
        with told(self.folder, "exporting to"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.folder)
            try:
                self._open_files()
            except BaseException:
                self._close()
                raise
        return self

    def write(self, name: str, values: torch.Tensor, start: int = 0) -> None:
        """Elements of tensor `name` from flat element `start` on (host memory)."""
        if values.numel():
            file, offset = self._files[name]
            raw = flat(values).view(torch.uint8)
            file.write(offset + start * values.element_size(), raw).wait()

    def __exit__(self, kind: Any, *exception: object) -> None:
        try:
            if kind is None:
                with told(self.folder, "exporting to"):
                    self._put_in_place()
        finally:
            self._close()

    def _open_files(self) -> None:
        self._staging = self.folder / f".export-{secrets.token_hex(6)}"
        for left in self.folder.iterdir():  # left by killed exports, since the lock is ours
            if _STAGING.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)
        self._staging.mkdir()
        for plan in self.plans:
            file = disk_engine().open(self._staging / plan.name, create=True, size_bytes=plan.nbytes)
            self._files |= {name: (file, offset) for name, offset in plan.offsets.items()}
            file.write(0, torch.frombuffer(bytearray(plan.header), dtype=torch.uint8)).wait()

    def _put_in_place(self) -> None:
        for file in {id(file): file for file, _ in self._files.values()}.values():
            file.sync()
        if len(self.plans) == 1:
            os.replace(self._staging / self.plans[0].name, self.folder / self.plans[0].name)
            sync_folder(self.folder)
            if self.plans[0].name == SINGLE:  # adapters may be next to the base model's files
                (self.folder / INDEX).unlink(missing_ok=True)
                self._remove_stale({SINGLE})
            return
        names = self._free_names()
        for plan in self.plans:
            os.rename(self._staging / plan.name, self.folder / names[plan.name])
        write_synced(self._staging / INDEX, self._index(names))
        sync_folder(self.folder)
        os.replace(self._staging / INDEX, self.folder / INDEX)
        sync_folder(self.folder)
        (self.folder / SINGLE).unlink(missing_ok=True)
        self._remove_stale(set(names.values()))

    def _free_names(self) -> dict[str, str]:
        """An unused name in the folder for each planned file."""
        held = {path.name for path in self.folder.iterdir()}
        if not held & {plan.name for plan in self.plans}:
            return {plan.name: plan.name for plan in self.plans}
        tag = secrets.token_hex(4)
        return {plan.name: plan.name.replace("model-", f"model-{tag}-", 1) for plan in self.plans}

    def _index(self, names: dict[str, str]) -> bytes:
        total = sum(plan.nbytes - len(plan.header) for plan in self.plans)
        places = {name: names[plan.name] for plan in self.plans for name in plan.offsets}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2)
        return text.encode() + b"\n"

    def _remove_stale(self, kept: set[str]) -> None:
        """Removes shards of an earlier export, which no index names any more."""
        for path in self.folder.iterdir():
            if _SHARD.fullmatch(path.name) and path.name not in kept:
                path.unlink(missing_ok=True)
        sync_folder(self.folder)

    def _close(self) -> None:
        for file in {id(file): file for file, _ in self._files.values()}.values():
            file.close()
        shutil.rmtree(self._staging, ignore_errors=True)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child forked in the meantime has the descriptor too
        os.close(self._lock)


_STAGING = re.compile(r"\.export-[0-9a-f]{12}")
_SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")


def refuse_adapters(folder: Path) -> None:
    """Raises if there are adapters where a whole model is to go: `from_pretrained` would put them on it."""
    if (folder / ADAPTER_CONFIG).exists():
        raise CheckpointError(
            f"{folder} holds adapters ({ADAPTER_CONFIG}), which from_pretrained would put on the model exported there. "
            "Choose another folder, or remove them first."
        )


def _refuse_checkpoint(folder: Path) -> None:
    """Raises if the folder is a checkpoint, or in one, which would be removed with all that is in it, or never be
    replaced by a save any more."""
    for place in (folder, *folder.resolve().parents):
        if is_whole(place) and (place / data_name(0)).exists():
            raise CheckpointError(f"{place} is a checkpoint, which holds nothing else. Export to another folder.")


def _lock(folder: Path) -> int:
    """A descriptor that keeps other exports away from the folder while it is open."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise CheckpointError(f"another job is exporting to {folder} now. Let it finish, or choose another.") from None
    except OSError:  # a filesystem without locks
        pass
    return fd
