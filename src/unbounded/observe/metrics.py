"""The numbers of a run: one JSON object per line, and the same for the boards that were asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unbounded.observe.boards import Board
from unbounded.observe.replacing import naming, write_file

FILE_NAME = "metrics.jsonl"


class Metrics:
    """Appends to `folder/metrics.jsonl`; a resumed run first drops the lines of steps that will be done again."""

    def __init__(self, folder: Path, *, after_step: int = 0, boards: Sequence[Board] = ()) -> None:
        self.path = folder / FILE_NAME
        folder.mkdir(parents=True, exist_ok=True)
        _trim(self.path, after_step)
        self._file = self.path.open("a")
        self._boards = boards

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Add one line; numbers also go to the boards."""
        with naming(self.path):
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        numbers = {f"{kind}/{name}": value for name, value in _flatten(values)}
        for board in self._boards:
            board.write(step, numbers)

    def close(self) -> None:
        """Close the file and the boards."""
        with suppress(OSError):  # every line was flushed: what is left is one that has already failed
            self._file.close()
        for board in self._boards:
            board.close()


def read_metrics(path: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The lines of one kind, without a torn last line, and of each its numbers: somebody may have edited it."""
    lines = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and line.get("kind") == kind and isinstance(line.get("step"), int):
            lines.append({name: value for name, value in line.items() if name == "kind" or _is_number(value)})
    return lines


def _is_number(value: Any) -> bool:
    """Whether it is a number, or a table of numbers under names."""
    if isinstance(value, dict):
        return all(map(_is_number, value.values()))
    return isinstance(value, (int, float))


def is_metrics(path: Path) -> bool:
    """Whether metrics may go to `path`: it does not exist, or its first line is one of ours (or torn)."""
    if not path.exists():
        return not path.is_symlink()
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline(64)
    return not first or first.startswith(b'{"kind": ')


def _flatten(values: dict[str, Any]) -> list[tuple[str, float]]:
    """The numbers of a line; those of a table under the table's name."""
    flat: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            flat += [(f"{name}/{inner}", number) for inner, number in _flatten(value)]
        elif isinstance(value, (int, float)):
            flat.append((name, value))
    return flat


def _trim(path: Path, after_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            if json.loads(text)["step"] <= after_step:
                kept.append(text + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # torn by a kill
    write_file(path, "".join(kept))
