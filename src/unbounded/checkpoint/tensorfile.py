"""Writing safetensors as a stream: where every byte goes is known before the first one is there.

The files are laid out from names, dtypes and shapes alone, so tensors may come in any order and in pieces, and
memory holds no more than the piece at hand. Files appear under their names only when all are whole.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unbounded.checkpoint.folder import sync_folder
from unbounded.checkpoint.reading import disk_engine
from unbounded.checkpoint.weightfiles import INDEX, SINGLE
from unbounded.errors import CheckpointError
from unbounded.native.disk import DiskFile

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
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
    """Files of at most `max_bytes` of tensors (one that is larger has a file of its own), in the order given."""
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
    # The widest first, so that every tensor is aligned to its element.
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
    """Writes planned files into `folder`; use as a context, and they appear when it ends well."""

    folder: Path
    plans: Sequence[ShardPlan]
    _files: dict[str, tuple[DiskFile, int]] = field(default_factory=dict)

    def __enter__(self) -> ShardWriter:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._staging = self.folder / f".export-{secrets.token_hex(4)}"
        self._staging.mkdir()
        try:
            for plan in self.plans:
                file = disk_engine().open(self._staging / plan.name, create=True, size_bytes=plan.nbytes)
                file.write(0, torch.frombuffer(bytearray(plan.header), dtype=torch.uint8)).wait()
                self._files |= {name: (file, offset) for name, offset in plan.offsets.items()}
        except BaseException:
            self._close()
            shutil.rmtree(self._staging, ignore_errors=True)
            raise
        return self

    def write(self, name: str, values: torch.Tensor, start: int = 0) -> None:
        """Elements of tensor `name` from flat element `start` on (host memory)."""
        if values.numel():
            file, offset = self._files[name]
            raw = values.detach().reshape(-1).contiguous().view(torch.uint8)
            file.write(offset + start * values.element_size(), raw).wait()

    def __exit__(self, kind: Any, *exception: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._close()
            shutil.rmtree(self._staging, ignore_errors=True)

    def _finish(self) -> None:
        for file in {id(file): file for file, _ in self._files.values()}.values():
            file.sync()
        if self.plans[0].name.startswith("model"):  # adapters may lie beside the base model's files
            for stale in [*self.folder.glob("model*.safetensors"), self.folder / INDEX]:
                stale.unlink(missing_ok=True)
        if len(self.plans) > 1:
            total = sum(plan.nbytes - len(plan.header) for plan in self.plans)
            places = {name: plan.name for plan in self.plans for name in plan.offsets}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2)
            (self._staging / INDEX).write_text(text + "\n")
        for plan in self.plans:
            os.replace(self._staging / plan.name, self.folder / plan.name)
        if len(self.plans) > 1:
            os.replace(self._staging / INDEX, self.folder / INDEX)
        sync_folder(self.folder)

    def _close(self) -> None:
        for file in {id(file): file for file, _ in self._files.values()}.values():
            file.close()
