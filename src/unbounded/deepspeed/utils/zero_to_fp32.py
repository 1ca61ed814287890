"""`deepspeed.utils.zero_to_fp32`: whole fp32 weights of a checkpoint that `save_checkpoint` or DeepSpeed wrote."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from unbounded.checkpoint.conversion import export_checkpoint
from unbounded.checkpoint.foreign.deepspeed import is_deepspeed, read_deepspeed
from unbounded.deepspeed.checkpoints import find_tag


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str], tag: str | None = None, **unused: Any
) -> dict[str, torch.Tensor]:
    """The weights by name, in fp32 on the host, of the checkpoint under `tag` or of the latest."""
    folder = Path(checkpoint_dir)
    given = folder / tag if tag is not None else folder
    if is_deepspeed(given):
        content = read_deepspeed(given)
        found = {name: stored.weight().float() for name, stored in content.parameters.items()}
        found |= {name: found[target] for name, target in content.aliases.items() if target in found}
        return {**found, **content.buffers}
    return _read_ours(folder, tag)


def _read_ours(folder: Path, tag: str | None) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        exported = export_checkpoint(find_tag(folder, tag), place)
        found: dict[str, torch.Tensor] = {}
        for file in sorted(exported.glob("*.safetensors")):
            found |= load_file(file)
    return {name: value.float() if value.is_floating_point() else value for name, value in found.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    **unused: Any,
) -> None:
    """Writes the weights to `output_dir`: as pytorch_model.bin, or model.safetensors."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    target = Path(output_dir)
    target.mkdir(parents=True, exist_ok=True)
    if safe_serialization:
        save_file({name: value.contiguous().clone() for name, value in state.items()}, target / "model.safetensors")
    else:
        torch.save(state, target / "pytorch_model.bin")


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """`model` with the weights of the checkpoint, on the host."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
