"""Reads foreign pickles without running their code: plain values and tensors, or an error that names the class."""

from __future__ import annotations

import pickle
import re
from enum import Enum, IntEnum
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch

from unbounded.errors import CheckpointError


class Inert:
    """Stands for an object whose class is not needed: it takes the values and does nothing."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {})


class ZeroStage(IntEnum):
    """Stands for DeepSpeed's own."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def member_of(kind: Any, name: str) -> Any:
    """Stands for `getattr`, with which Python 3.11.2 pickles the members of an enum, and only for that."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("GLOBAL builtins.getattr: of something that is no enum")


_INERT = [
    (member_of, "builtins.getattr"),
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Inert, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]
"""Classes that DeepSpeed puts into every checkpoint, and what replaces them here."""


def load_tensors(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """What `torch.save` wrote, of plain values and tensors; with `mmap` the tensors stay in the file until read."""
    try:
        with torch.serialization.safe_globals(_INERT):  # type: ignore[arg-type]
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise refused(source, found.group(1) if found else "an object") from None
    except RuntimeError as error:
        raise CheckpointError(f"{source} cannot be read: {str(error).splitlines()[0]}. Copy it again.") from None


def refused(source: Any, name: str) -> CheckpointError:
    return CheckpointError(
        f"{source} pickles {name}, which is not a plain value or tensor; reading it would run foreign code. "
        "Save the checkpoint without it, such as its state_dict() instead of the object."
    )


class MetadataUnpickler(pickle.Unpickler):
    """Reads the `.metadata` of torch's distributed checkpoints: its own dataclasses, dtypes and sizes, nothing else."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePosixPath
        if (module, name) == ("builtins", "getattr"):
            return self._member_of
        if (module, name) in _METADATA:
            return super().find_class(module, name)
        raise refused(self._path, f"{module}.{name}")

    def _member_of(self, kind: Any, name: str) -> Any:
        try:
            return member_of(kind, name)
        except pickle.UnpicklingError:
            raise refused(self._path, "builtins.getattr") from None


_STORED = "torch.distributed.checkpoint.metadata"
_METADATA = {
    *(
        (_STORED, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}
