"""Which of a Trainer's checkpoints are whole: a job may be killed while it saves one.

Trainer writes a checkpoint file by file, and `trainer_state.json` last. So a checkpoint with that file is whole, if
every rank has written its own files before, and if the file goes first where a checkpoint is written again.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from unbounded.errors import CheckpointError

LAST_FILE = "trainer_state.json"

logger = logging.getLogger("unbounded")


def find_whole(folder: str | os.PathLike[str]) -> str | None:
    """The newest checkpoint in a run's folder that is whole; None if there are no checkpoints at all."""
    found = {int(match[1]): path for path in Path(folder).glob("*") if (match := _NAME.fullmatch(path.name))}
    newest_first = [found[step] for step in sorted(found, reverse=True)]
    whole = next((path for path in newest_first if is_whole(path)), None)
    if newest_first and whole is None:
        raise CheckpointError(
            f"{folder} has no whole checkpoint: {newest_first[0].name} was cut short while it was saved. Start again "
            "without resume_from_checkpoint."
        )
    if newest_first and whole != newest_first[0]:
        logger.warning("%s was cut short while it was saved, so this run resumes from %s.", newest_first[0], whole)
    return str(whole) if whole is not None else None


def check_whole(checkpoint: str | os.PathLike[str]) -> None:
    """Refuses a checkpoint that was cut short, which would resume with what of it is there."""
    if Path(checkpoint).is_dir() and not is_whole(Path(checkpoint)):
        raise CheckpointError(
            f"{checkpoint} was cut short while it was saved: its {LAST_FILE} is not there or not whole. Resume from "
            "the one before; resume_from_checkpoint=True finds it."
        )


def is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / LAST_FILE).read_text())
    except (OSError, ValueError):
        return False
    return True


_NAME = re.compile(r"checkpoint-(\d+)")
