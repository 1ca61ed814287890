"""Checkpoints under tags, as DeepSpeed names them: DIR/TAG is one of ours, DIR/latest names the newest."""

from __future__ import annotations

import os
from pathlib import Path

from unbounded.checkpoint.foreign.deepspeed import is_deepspeed
from unbounded.errors import CheckpointError

LATEST = "latest"


def find_tag(folder: Path, tag: str | None) -> Path:
    """The checkpoint under `tag`, or the latest. A FileNotFoundError if there is none."""
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


def name_latest(folder: Path, tag: str) -> None:
    """Makes `tag` the latest, atomically."""
    staged = folder / f".{LATEST}.new"
    staged.write_text(tag)
    with open(staged) as file:
        os.fsync(file.fileno())
    os.replace(staged, folder / LATEST)
