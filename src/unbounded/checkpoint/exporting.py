"""`export`: writes a running model as a plain safetensors folder for `from_pretrained`.

It works unit by unit: a unit is gathered, written by the first rank and released. `checkpoint/conversion.py` does the
same from a saved checkpoint, without the model.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.format.folder import told
from unbounded.checkpoint.peers import Peers, peers_of
from unbounded.checkpoint.safetensors_writer import Planned, ShardWriter, plan_file, plan_shards
from unbounded.checkpoint.saving import refuse_strangers, settle
from unbounded.held_interrupts import HeldBack, deliver
from unbounded.paths import expand_home
from unbounded.planner.sizes import parse_bytes
from unbounded.sharding.running import sharded
from unbounded.weights.adapter_files import adapter_folder, describe_adapters, file_names, write_config
from unbounded.weights.safetensors_reader import ADAPTER_WEIGHTS
from unbounded.zero.members import persistent_buffers
from unbounded.zero.setup.assembly import Sharded
from unbounded.zero.streamed_values import stream_values

logger = logging.getLogger("unbounded")
Names = Mapping[str, list[str]]  # a tensor of the model -> its name in the files


def export(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    tokenizer: Any = None,
    max_shard_bytes: int | str = "5GB",
) -> None:
    """All ranks must call this. Writes the weights, the configuration and the tokenizer for `from_pretrained`.

    The first rank writes; memory on every rank stays within one unit. Tied weights are written once. For a
    `peft` model, only the adapters are written, for `PeftModel.from_pretrained`.
    """
    state = sharded(model)
    max_bytes = parse_bytes(max_shard_bytes, "max_shard_bytes")
    with HeldBack():
        _export(state, model, expand_home(folder), tokenizer, max_bytes)


def _export(state: Sharded, model: nn.Module, target: Path, tokenizer: Any, max_bytes: int) -> None:
    refuse_strangers(model)
    state.engine.confirm("unbounded.export()")
    settle(state)
    peers = peers_of(model, state.engine.axes.world, "unbounded.export()")
    adapters = describe_adapters(model)
    if adapters:
        _export_adapters(state, model, target, peers, adapters)
    else:
        _export_weights(state, model, target, peers, max_bytes)
    peers.agree(lambda: _save_beside(target, model, tokenizer) if peers.rank == 0 else None)


def _export_weights(state: Sharded, model: nn.Module, target: Path, peers: Peers, max_bytes: int) -> None:
    loose = _loose(model)
    tensors = _planned(state, loose)
    planned = [tensors[name] for name in _in_order(model, tensors)]
    names = {name: [name] for name in tensors}
    _write(state, peers, ShardWriter(target, plan_shards(planned, max_bytes)), names, loose)


def _export_adapters(
    state: Sharded, model: nn.Module, target: Path, peers: Peers, adapters: Mapping[str, Mapping[str, Any]]
) -> None:
    loose = _loose(model)
    tensors = _planned(state, loose)
    written: set[str] = set()
    for adapter, about in adapters.items():
        names, place = file_names(adapter, about), adapter_folder(target, adapter)
        written |= set(names)
        planned = [replace(tensors[name], name=key) for name, keys in names.items() for key in keys]
        _write(state, peers, ShardWriter(place, [plan_file(ADAPTER_WEIGHTS, planned)]), names, loose)
        peers.agree(partial(_write_adapter_config, place, about) if peers.rank == 0 else lambda: None)
    _report_unwritten(state, written, speaks=peers.rank == 0)


def _write_adapter_config(place: Path, about: Mapping[str, Any]) -> None:
    with told(place, "exporting to"):
        write_config(place, about)


def _report_unwritten(state: Sharded, written: set[str], *, speaks: bool) -> None:
    """Reports weights of the base model that are trained themselves, and so belong to no adapter."""
    trained = [slot.name for unit in state.engine.units if unit.trainable for slot in unit.layout.slots]
    lost = [name for name in trained if name not in written]
    if lost and speaks:
        shown = ", ".join(lost[:8]) + (f" and {len(lost) - 8} more" if len(lost) > 8 else "")
        logger.warning("trained weights that belong to no adapter and are not exported: %s", shown)


def _loose(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that no unit holds: buffers, and parameters without elements."""
    return {**persistent_buffers(model), **{name: p for name, p in model.named_parameters() if p.numel() == 0}}


def _planned(state: Sharded, loose: Mapping[str, torch.Tensor]) -> dict[str, Planned]:
    slots: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for held in state.engine.axes.pipeline.objects(
        {slot.name: (unit.dtype, slot.global_shape) for unit in state.engine.units for slot in unit.layout.slots}
    ):
        slots = held | slots
    slots |= {name: (value.dtype, tuple(value.shape)) for name, value in loose.items()}
    return {name: Planned(name, *about) for name, about in slots.items()}


def _write(state: Sharded, peers: Peers, writer: ShardWriter, names: Names, loose: Mapping[str, torch.Tensor]) -> None:
    """Writes the tensors under their names in the files, on the first rank."""
    opened: list[ShardWriter] = []

    def begin() -> None:
        if peers.rank == 0:
            opened.append(writer.__enter__())
            for name, value in loose.items():
                for key in names.get(name, ()):
                    writer.write(key, value.detach().cpu())

    try:
        peers.agree(begin)
        error = _write_units(state, opened[0] if opened else None, names)
        peers.agree(lambda: _raise(error))
    except BaseException as failure:
        if opened:
            opened.pop().__exit__(type(failure), failure, None)
        raise
    peers.agree(lambda: opened.pop().__exit__(None) if opened else None)


def _write_units(state: Sharded, writer: ShardWriter | None, names: Names) -> Exception | None:
    """Every rank takes part in every gather, even after the writing one has failed; returns that error."""
    error, written = None, set()
    units = [unit for unit in state.engine.units if any(slot.name in names for slot in unit.layout.slots)]
    for values in stream_values(state.engine, units):
        deliver()
        for name, first, value in values:
            if writer is None or error is not None or (name, first) in written:
                continue
            written.add((name, first))
            try:
                for key in names.get(name, ()):
                    writer.write(key, value, first)
            except Exception as caught:
                error = caught
    return error


def _in_order(model: nn.Module, names: Mapping[str, Any]) -> list[str]:
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


def _save_beside(target: Path, model: Any, tokenizer: Any) -> None:
    """Saves configuration, generation settings and tokenizer, as `save_pretrained` does."""
    with told(target, "exporting to"):
        _save_config(target, model)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)


def _save_config(target: Path, model: Any) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained") and not hasattr(model, "peft_config"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        if len(dtypes) == 1:
            config.dtype = str(next(iter(dtypes))).removeprefix("torch.")
        config.save_pretrained(target)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "to_json_string"):  # unchanged, even if save_pretrained would reject it
            (target / "generation_config.json").write_text(generation.to_json_string())
