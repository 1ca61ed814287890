"""Which checkpoints of a Trainer or an Accelerator are whole: a job may be killed while it saves one.

Trainer writes a checkpoint file by file, and `trainer_state.json` last. So a checkpoint with that file is whole, if
every rank has written its own files before, and if the file goes first where a checkpoint is written again. Accelerate
has no such file, so `save_state` writes one of ours (`MARK`) last.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from unbounded.errors import CheckpointError

LAST_FILE = "trainer_state.json"
MARK = "unbounded_whole"

logger = logging.getLogger("unbounded")


def find_whole(
    folder: str | os.PathLike[str], prefix: str, is_whole: Callable[[Path], bool], *, without: str
) -> str | None:
    """The newest of the checkpoints `prefix` + number in a folder that is whole; None if there are none at all.

    Whatever else is in the folder is left alone. `without` is what to leave out in order to start again.
    """
    numbered = re.compile(re.escape(prefix) + r"(\d+)")
    found = {int(match[1]): path for path in Path(folder).glob("*") if (match := numbered.fullmatch(path.name))}
    newest_first = [found[number] for number in sorted(found, reverse=True)]
    whole = next((path for path in newest_first if is_whole(path)), None)
    if newest_first and whole is None:
        raise CheckpointError(
            f"{folder} has no whole checkpoint: {newest_first[0].name} was cut short while it was saved. Start again "
            f"without {without}."
        )
    if newest_first and whole != newest_first[0]:
        logger.warning("%s was cut short while it was saved, so this run resumes from %s.", newest_first[0], whole)
    return str(whole) if whole is not None else None


def find_trainers(folder: str | os.PathLike[str]) -> str | None:
    """The newest whole checkpoint of a Trainer's run."""
    return find_whole(folder, "checkpoint-", has_last_file, without="resume_from_checkpoint")


def find_accelerators(folder: str | os.PathLike[str]) -> str | None:
    """The newest whole checkpoint of those that Accelerate named."""
    return find_whole(folder, "checkpoint_", has_mark, without="load_state")


def check_whole(checkpoint: str | os.PathLike[str]) -> None:
    """Refuses a checkpoint that was cut short, which would resume with what of it is there."""
    if Path(checkpoint).is_dir() and not has_last_file(Path(checkpoint)):
        raise CheckpointError(
            f"{checkpoint} was cut short while it was saved: its {LAST_FILE} is not there or not whole. Resume from "
            "the one before; resume_from_checkpoint=True finds it."
        )


def has_last_file(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / LAST_FILE).read_text())
    except (OSError, ValueError):
        return False
    return True


def has_mark(checkpoint: Path) -> bool:
    return (checkpoint / MARK).is_file()
