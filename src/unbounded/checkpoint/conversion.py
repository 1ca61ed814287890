"""Writes a saved checkpoint as a plain safetensors folder for `from_pretrained`, without building the model.

Tensors are handled one by one, in pieces that are read, verified and written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unbounded.checkpoint.format import folder as folders
from unbounded.checkpoint.format.data_files import Files
from unbounded.checkpoint.format.field_checks import mapping
from unbounded.checkpoint.format.manifest import BUFFER, WEIGHT, Manifest, TensorEntry
from unbounded.checkpoint.format.parsing import read_manifest
from unbounded.checkpoint.safetensors_writer import Planned, ShardWriter, plan_file, plan_shards
from unbounded.errors import CheckpointError
from unbounded.paths import expand_home
from unbounded.planner.sizes import parse_bytes
from unbounded.weights.adapter_files import adapter_folder, file_names, write_config
from unbounded.weights.safetensors_reader import ADAPTER_WEIGHTS

PIECE_NUMEL = 1 << 24
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    max_shard_bytes: int | str = "5GB",
) -> Path:
    """The weights of a saved checkpoint (of a `peft` model: the adapters) as a safetensors folder; returns the folder.

    The model is not built. `config` is a folder whose configuration and tokenizer files are copied too. Without it, the
    checkpoint's own configuration is written, if it has one.
    """
    max_bytes = parse_bytes(max_shard_bytes, "max_shard_bytes")
    target, beside = expand_home(folder), None if config is None else expand_home(config)
    if beside is not None and not beside.is_dir():
        raise CheckpointError(f"the configuration folder {beside} does not exist. Give the folder of the base model.")
    manifest = folders.read_whole(checkpoint, lambda source: _export(source, target, max_bytes))
    if beside is not None:
        _copy_beside(beside, target)
    elif not manifest.values.get("adapters"):
        _write_config(manifest, target)
    return target


def _export(source: Path, target: Path, max_bytes: int) -> Manifest:
    manifest = read_manifest(source)
    adapters: dict[str, Any] = manifest.values.get("adapters") or {}
    entries = {e.name: e for e in [*manifest.of_kind(WEIGHT), *manifest.of_kind(BUFFER)] if e.rank is None}
    with Files(source, manifest) as files:
        files.check_present()
        for adapter, about in adapters.items():
            names, place = file_names(adapter, about), adapter_folder(target, adapter)
            _check_names(names, entries, source)
            planned = [_plan(entries[name], key) for name, keys in names.items() for key in keys]
            _copy(files, entries, names, ShardWriter(place, [plan_file(ADAPTER_WEIGHTS, planned)]))
            write_config(place, about)
        if not adapters:
            order = {name: place for place, name in enumerate(manifest.values["parameters"])}
            ordered = sorted(entries, key=lambda name: order.get(name, len(order)))
            plans = plan_shards([_plan(entries[name], name) for name in ordered], max_bytes)
            _copy(files, entries, {name: [name] for name in ordered}, ShardWriter(target, plans))
    return manifest


def _check_names(names: Mapping[str, list[str]], entries: Mapping[str, TensorEntry], source: Path) -> None:
    missing = [name for name in names if name not in entries]
    if missing:
        raise CheckpointError(
            f"the checkpoint in {source} has no {missing[0][:100]}, which its adapter needs. Load another."
        )


def _plan(entry: TensorEntry, key: str) -> Planned:
    return Planned(key, entry.dtype, entry.shape)


def _copy(
    files: Files, entries: Mapping[str, TensorEntry], names: Mapping[str, list[str]], writer: ShardWriter
) -> None:
    with writer:
        for name, keys in names.items():
            for key in keys:
                _copy_tensor(files, entries[name], writer, key)


def _copy_tensor(files: Files, entry: TensorEntry, writer: ShardWriter, key: str) -> None:
    numel = math.prod(entry.shape)
    for start in range(0, numel, PIECE_NUMEL):
        stop = min(start + PIECE_NUMEL, numel)
        piece = torch.empty(stop - start, dtype=entry.dtype, device="cpu")
        files.read_range(entry, start, stop, piece)
        writer.write(key, piece, start)


def _copy_beside(source: Path, target: Path) -> None:
    if source.samefile(target):
        return
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copy(path, target / path.name)


def _read_config(text: str) -> dict[str, Any]:
    try:
        return mapping(json.loads(text), "it")
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200]
        raise CheckpointError(f"the checkpoint's configuration is not usable: {reason}. Pass config=folder.") from None


def _write_config(manifest: Manifest, target: Path) -> None:
    if "config" in manifest.values:
        config = _read_config(manifest.values["config"])
        config["architectures"] = [manifest.values["model"].rpartition(".")[2]]
        dtypes = {str(e.dtype).removeprefix("torch.") for e in manifest.of_kind(WEIGHT) if e.dtype.is_floating_point}
        if len(dtypes) == 1:
            config["dtype"] = next(iter(dtypes))
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if "generation_config" in manifest.values:
        (target / "generation_config.json").write_text(manifest.values["generation_config"])
