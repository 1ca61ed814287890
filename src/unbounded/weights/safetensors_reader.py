"""A folder of safetensors as a source of named tensors. Nothing is read before it is asked for."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from unbounded.errors import CheckpointError, MissingCheckpointError
from unbounded.paths import expand_home
from unbounded.ranks.cut import Cut

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_INDEX_BYTES = 1 << 30
_PIECE_NUMEL = 1 << 22
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightFolder:
    """The tensors of a folder of safetensors, by name."""

    def __init__(self, folder: str | os.PathLike[str], *, only: str | None = None) -> None:
        self.folder = expand_home(folder)
        self._files: dict[str, Any] = {}
        self.places = self._find() if only is None else self._list([only])

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def is_float(self, key: str) -> bool:
        """Whether a tensor holds values, and not codes that mean something only with their scales."""
        return self._slice(key).get_dtype() in _FLOATS

    def dtype(self) -> torch.dtype | None:
        """That of the first tensor with values, which counts where a configuration names none."""
        kinds = (self._slice(key).get_dtype() for key in self.places)
        return next((_FLOATS[kind] for kind in kinds if kind in _FLOATS), None)

    def read(self, key: str) -> torch.Tensor:
        return self._open(self.places[key]).get_tensor(key)

    def read_part(self, key: str, cut: Cut) -> torch.Tensor:
        """A tensor-axis rank's part of a tensor; only that part is read."""
        stored = self._slice(key)
        before = (slice(None),) * cut.dim
        places = [before + (slice(start, stop),) for start, stop in cut.intervals]
        return torch.cat([stored[place] for place in places], cut.dim)

    def are_equal(self, one: str, other: str, dtype: torch.dtype) -> bool:
        """Whether two tensors have the same values in `dtype`; a piece of them is read at a time."""
        pair = [self._slice(one), self._slice(other)]
        shape, shape_of_other = (tuple(held.get_shape()) for held in pair)
        if shape != shape_of_other or not shape:
            return shape == shape_of_other and torch.equal(self.read(one).to(dtype), self.read(other).to(dtype))
        step = max(1, _PIECE_NUMEL // max(1, math.prod(shape[1:])))
        pieces = (slice(start, start + step) for start in range(0, shape[0], step))
        return all(torch.equal(*(held[piece].to(dtype) for held in pair)) for piece in pieces)

    def close(self) -> None:
        self._files.clear()

    def _find(self) -> dict[str, str]:
        """Which file holds each tensor; every file that is named must be there."""
        if not self.folder.is_dir():
            raise MissingCheckpointError(f"the weights folder {self.folder} does not exist. Check the path.")
        if (self.folder / SINGLE).is_file():  # before the index, as in transformers
            return self._list([SINGLE])
        if (self.folder / INDEX).is_file():
            return self._read_index(self.folder / INDEX)
        found = sorted(path.name for path in self._all())
        if not found:
            raise MissingCheckpointError(
                f"{self.folder} has no .safetensors files. Give one written by save_pretrained or unbounded.export."
            )
        return self._list(found)

    def _read_index(self, index: Path) -> dict[str, str]:
        """The file that an index names for each tensor. It must be in the same folder as the index."""
        try:
            if index.stat().st_size > MAX_INDEX_BYTES:
                raise ValueError(f"it has more than {MAX_INDEX_BYTES:,} bytes")
            places = json.loads(index.read_text())["weight_map"]
            if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
                raise ValueError("its weight_map does not name files")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} cannot be read ({error}). Download it again.") from None
        outside = sorted({name for name in places.values() if Path(name).name != name or name in (".", "..")})
        if outside:
            raise CheckpointError(
                f"{index} names files outside its folder: {', '.join(outside[:4])}. Put them next to the index."
            )
        missing = sorted({name for name in places.values() if not (self.folder / name).is_file()})
        if missing:
            raise MissingCheckpointError(
                f"{index} names files that are not there: {', '.join(missing[:8])}. Download them too."
            )
        return places

    def _list(self, names: Iterable[str]) -> dict[str, str]:
        return {key: name for name in names for key in self._open(name).keys()}  # noqa: SIM118

    def _slice(self, key: str) -> Any:
        from safetensors import SafetensorError

        file = self.places[key]
        try:
            return self._open(file).get_slice(key)
        except SafetensorError as error:  # the files are of several downloads or exports
            raise CheckpointError(
                f"{self.folder / file} has no {key}, but {INDEX} says so ({error}). Download both again."
            ) from None

    def _all(self) -> Iterable[Path]:
        found = self.folder.glob("*.safetensors")
        return (path for path in found if path.name != ADAPTER_WEIGHTS and path.is_file())

    def _open(self, name: str) -> Any:
        if name not in self._files:
            from safetensors import SafetensorError, safe_open

            path = self.folder / name
            if path.is_file() and not os.access(path, os.R_OK):  # which safetensors calls a file that does not exist
                raise CheckpointError(f"{path} is not readable by this user. Check its permissions.")
            try:
                self._files[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read ({error}). Download it again.") from None
        return self._files[name]
