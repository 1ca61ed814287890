"""Where a run will write, checked before anything is built; and what the run trains, as its folder records it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unbounded.errors import InputError
from unbounded.observe import trace
from unbounded.observe.boards import check_boards
from unbounded.train.options.settings import Settings


def check_places(settings: Settings) -> None:
    """Refuse files and folders that must not be written, and boards that are not installed."""
    if settings.trace is not None:
        trace.check_path(settings.trace)
    check_boards(settings.report_to)
    if settings.export is not None:
        _check_export(settings, Path(settings.export))


def _check_export(settings: Settings, target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise InputError(f'--export "{target}" is no folder. Choose another.')
    for flag, base in (
        ("--model", settings.model),
        ("--from-config", settings.from_config),
        ("--tokenizer", settings.tokenizer),
        ("--output", settings.output),
    ):
        within = flag == "--output"  # beside the checkpoints there is room
        if base is not None and _covers(target, Path(base), within=within):
            raise InputError(
                f'--export "{target}" would overwrite what {flag} "{base}" holds. Choose a folder of its own.'
            )


def _covers(target: Path, held: Path, *, within: bool) -> bool:
    """Whether `target` is `held` or around it (or, unless `within`, inside); a link counts as what it points to."""
    a, b = Path(os.path.realpath(target)), Path(os.path.realpath(held))
    return a == b or a in b.parents or (not within and b in a.parents)


def describe_run(settings: Settings) -> dict[str, Any]:
    """What cannot change while a run goes on: with another of these its checkpoints do not fit."""
    given = settings.model or settings.from_config
    model = Path(os.path.realpath(given)).name if given else "the built-in GPT"
    shape = None if given else [settings.layers, settings.width, settings.heads, settings.sequence_length]
    return {
        "model": model,
        "shape": shape,
        "optimizer": settings.optimizer,
        "lora_rank": settings.lora_rank,
        "lora_targets": settings.lora_targets and [*settings.lora_targets],
    }
