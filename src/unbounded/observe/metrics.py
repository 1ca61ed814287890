"""The numbers of a run: one JSON object a line, and TensorBoard events beside them when asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from unbounded.errors import StateError


class Metrics:
    """Appends to `folder/metrics.jsonl`; a resumed run first drops the lines of steps that will be done again."""

    def __init__(self, folder: Path, *, after_step: int = 0, tensorboard: bool = False) -> None:
        self.path = folder / "metrics.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        _trim(self.path, after_step)
        self._file = self.path.open("a")
        self._board = _open_board(folder) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add one line; numbers also go to TensorBoard."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind, a torn last line left out."""
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if line["kind"] == kind:
            lines.append(line)
    return lines


def _trim(path: Path, after_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for text in path.read_text().splitlines():
        try:
            if json.loads(text)["step"] <= after_step:
                kept.append(text + "\n")
        except (ValueError, KeyError):
            continue  # torn by a kill
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("".join(kept))
    partial.replace(path)


def _open_board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise StateError('TensorBoard is not installed. Install it: pip install "unbounded[tensorboard]".') from None
    return SummaryWriter(str(folder))
