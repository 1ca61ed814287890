"""Checkpoints under tags, as DeepSpeed names them: DIR/TAG is one of ours, DIR/latest names the newest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    staged = folder / f".{LATEST}.new"
    staged.write_text(tag)
    with open(staged) as file:
        os.fsync(file.fileno())
    os.replace(staged, folder / LATEST)
