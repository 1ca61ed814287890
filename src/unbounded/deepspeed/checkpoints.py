"""Checkpoints under tags, as DeepSpeed names them: DIR/TAG is one of ours, DIR/latest names the newest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unbounded.checkpoint.foreign.deepspeed import is_deepspeed
from unbounded.checkpoint.format.folder import is_whole
from unbounded.errors import CheckpointError

LATEST = "latest"
COUNTERS = ("global_steps", "micro_steps", "global_samples")
"""What an engine counts."""


def find_tag(folder: Path, tag: str | None) -> Path:
    """The checkpoint under `tag`, or the latest, or the folder itself. A FileNotFoundError if there is none."""
    if tag is None and is_whole(folder):  # imported, or written by `unbounded.save`
        return folder
    if tag is None:
        latest = folder / LATEST
        if not latest.is_file():
            raise FileNotFoundError(f"{folder} has no file {LATEST!r}, so there is no finished checkpoint in it.")
        tag = latest.read_text().strip()
    if is_deepspeed(folder / tag):
        raise CheckpointError(
            f"{folder / tag} was saved by DeepSpeed. Convert it first: `unbounded import {folder} OUT`."
        )
    return folder / tag


def sort_extra(extra: Mapping[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """The counters, the schedule's state and the script's own values of a checkpoint.

    An engine keeps them apart. In an imported checkpoint, and in one that `unbounded.save` wrote, they are together.
    """
    if "counters" in extra:
        return extra["counters"], extra["lr_scheduler"], extra["client_state"]
    counters = {key: extra[key] for key in COUNTERS if key in extra}
    client = {key: value for key, value in extra.items() if key not in (*COUNTERS, "lr_scheduler")}
    return counters, extra.get("lr_scheduler"), client


def name_latest(folder: Path, tag: str) -> None:
    """Makes `tag` the latest, atomically."""
    with _replaced(folder / LATEST) as staged:
        staged.write_text(tag)


def write_weights(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes whole weights to one file, atomically: of safetensors by its name, otherwise as torch does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replaced(path) as staged:
        if path.suffix == ".safetensors":
            from safetensors.torch import save_file

            unique = {id(value): name for name, value in reversed(list(state.items()))}
            save_file({name: state[name].contiguous() for name in unique.values()}, staged)
        else:
            torch.save(dict(state), staged)


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Gives a path to write to. What was written there takes the place of `path`, if the block succeeds."""
    staged = path.with_name(f".{path.name}.new")
    try:
        yield staged
        with open(staged) as file:
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
