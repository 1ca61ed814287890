"""`export`: plain safetensors folders that `from_pretrained` reads, from a running model or from a checkpoint.

Either way tensors pass one by one: from a running model a unit is gathered, written by the first rank and released;
from a checkpoint pieces of a tensor are read, verified and written.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint import folder as folders
from unbounded.checkpoint.manifest import Manifest, TensorEntry, read_manifest
from unbounded.checkpoint.peers import Peers, peers_of
from unbounded.checkpoint.reading import Files
from unbounded.checkpoint.saving import settle
from unbounded.checkpoint.snapshot import BUFFER, WEIGHT, persistent_buffers
from unbounded.checkpoint.tensorfile import Planned, ShardWriter, plan_shards
from unbounded.errors import CheckpointError
from unbounded.planner.sizes import parse_bytes
from unbounded.sharding import Sharded, sharded
from unbounded.zero.unit import Unit

PIECE_NUMEL = 1 << 24
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


def export(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    tokenizer: Any = None,
    max_shard_bytes: int | str = "5GB",
) -> None:
    """All ranks must call this. Writes the weights, the configuration and the tokenizer for `from_pretrained`.

    The first rank writes; memory on every rank stays within one unit. Tied weights are written once. For a `peft`
    model the adapter is written, as peft does it.
    """
    state = sharded(model)
    settle(state)
    peers = peers_of(model, state.engine.ranks)
    target = Path(folder).expanduser()
    if hasattr(model, "peft_config") and hasattr(model, "save_pretrained"):
        _export_adapter(state, model, target, peers)
    else:
        _export_weights(state, model, target, peers, parse_bytes(max_shard_bytes, "max_shard_bytes"))
    peers.agree(lambda: _save_beside(target, model, tokenizer) if peers.rank == 0 else None)


def _export_weights(state: Sharded, model: nn.Module, target: Path, peers: Peers, max_bytes: int) -> None:
    buffers = persistent_buffers(model)
    empty = {name: p for name, p in model.named_parameters() if p.numel() == 0}
    dtypes = {slot.name: (unit.dtype, slot.shape) for unit in state.engine.units for slot in unit.layout.slots}
    loose = {**buffers, **empty}
    dtypes |= {name: (value.dtype, tuple(value.shape)) for name, value in loose.items()}
    planned = [Planned(name, *dtypes[name]) for name in _in_order(model, dtypes)]
    writer: list[ShardWriter] = []

    def begin() -> None:
        if peers.rank == 0:
            writer.append(ShardWriter(target, plan_shards(planned, max_bytes)).__enter__())
            for name, value in loose.items():
                writer[0].write(name, value.detach().cpu())

    error: Exception | None = None
    try:
        peers.agree(begin)
        error = _write_units(state, writer[0] if writer else None)
        peers.agree(lambda: _raise(error))
    except BaseException as failure:
        if writer:
            writer.pop().__exit__(type(failure), failure, None)
        raise
    peers.agree(lambda: writer.pop().__exit__(None) if writer else None)


def _write_units(state: Sharded, writer: ShardWriter | None) -> Exception | None:
    """Every rank takes part in every gather, also after the writing one has failed; its error is given back."""
    error = None
    for unit in state.engine.units:
        for name, value in zip([s.name for s in unit.layout.slots], _gathered(state, unit), strict=True):
            if writer is not None and error is None:
                try:
                    writer.write(name, value.detach().cpu())
                except Exception as caught:
                    error = caught
        state.engine.release(unit)
    return error


def _gathered(state: Sharded, unit: Unit) -> list[torch.Tensor]:
    state.engine.request(unit)
    state.engine.wait(unit)
    return unit.slot_views(unit.fill)


def _in_order(model: nn.Module, names: dict[str, Any]) -> list[str]:
    """Names in the order of the module tree, as `state_dict` has them."""
    ordered = []
    for prefix, module in model.named_modules():
        for name in [*module._parameters, *module._buffers]:
            full = f"{prefix}.{name}" if prefix else name
            if full in names:
                ordered.append(full)
    return ordered


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _export_adapter(state: Sharded, model: Any, target: Path, peers: Peers) -> None:
    """What peft trains is small: gathered whole on the host, and written by peft itself."""
    values: dict[str, torch.Tensor] = {}
    for unit in state.engine.units:
        if unit.trainable:
            for slot, view in zip(unit.layout.slots, _gathered(state, unit), strict=True):
                values[slot.name] = view.detach().cpu().clone()
            state.engine.release(unit)

    def write() -> None:
        if peers.rank == 0:
            model.save_pretrained(target, state_dict=values, save_embedding_layers=False)

    peers.agree(write)


def _save_beside(target: Path, model: Any, tokenizer: Any) -> None:
    """Configuration, generation settings and tokenizer, as `save_pretrained` leaves them."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained") and not hasattr(model, "peft_config"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        if len(dtypes) == 1:
            config.dtype = str(next(iter(dtypes))).removeprefix("torch.")
        config.save_pretrained(target)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)


# -- from a checkpoint -------------------------------------------------------------------------------------------------


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    max_shard_bytes: int | str = "5GB",
) -> Path:
    """The weights of a saved checkpoint as a safetensors folder, without building the model; returns the folder.

    `config` is a folder whose configuration and tokenizer files are copied beside them; without it the checkpoint's
    own configuration is written, where it has one.
    """
    source = folders.find(checkpoint)
    manifest = read_manifest(source)
    entries = [*manifest.of_kind(WEIGHT), *(e for e in manifest.of_kind(BUFFER) if e.rank is None)]
    order = {name: place for place, name in enumerate(manifest.values["parameters"])}
    entries.sort(key=lambda entry: order.get(entry.name, len(order)))
    planned = [Planned(entry.name, entry.dtype, entry.shape) for entry in entries]
    target = Path(folder).expanduser()
    plans = plan_shards(planned, parse_bytes(max_shard_bytes, "max_shard_bytes"))
    with Files(source, manifest) as files, ShardWriter(target, plans) as writer:
        files.check_present()
        for entry in entries:
            _copy_tensor(files, entry, writer)
    if config is not None:
        _copy_beside(Path(config).expanduser(), target)
    else:
        _write_config(manifest, target)
    return target


def _copy_tensor(files: Files, entry: TensorEntry, writer: ShardWriter) -> None:
    numel = math.prod(entry.shape)
    for start in range(0, numel, PIECE_NUMEL):
        stop = min(start + PIECE_NUMEL, numel)
        piece = torch.empty(stop - start, dtype=entry.dtype)
        files.read_range(entry, start, stop, piece)
        writer.write(entry.name, piece, start)


def _copy_beside(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(f"the configuration folder {source} does not exist. Give the folder of the base model.")
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copy(path, target / path.name)


def _write_config(manifest: Manifest, target: Path) -> None:
    if "config" in manifest.values:
        config = json.loads(manifest.values["config"])
        config["architectures"] = [manifest.values["model"].rpartition(".")[2]]
        dtypes = {str(e.dtype).removeprefix("torch.") for e in manifest.of_kind(WEIGHT) if e.dtype.is_floating_point}
        if len(dtypes) == 1:
            config["dtype"] = next(iter(dtypes))
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if "generation_config" in manifest.values:
        (target / "generation_config.json").write_text(manifest.values["generation_config"])
