"""Files that are one JSON array of records. They are read element by element, a window at a time, and never held whole.

Bytes are read as Latin-1, so that every byte is one character. JSON's punctuation is ASCII, so elements end where they
do in UTF-8, and positions in the text are positions in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unbounded.errors import DataError

_WINDOW_BYTES = 1 << 20
_LARGEST_RECORD = 256 << 20
_SPACE = " \t\r\n"


def is_array(path: Path) -> bool:
    """Whether the first character of a file opens an array."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def cut_array(path: Path, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Stretches of whole elements, about `block_bytes` each, as start and end in the file."""
    first: int | None = None
    last = 0
    for start, end in _elements(path):
        if first is not None and end - first > block_bytes:
            yield first, last
            first = None
        first, last = start if first is None else first, end
    if first is not None:
        yield first, last


def read_elements(path: Path, start: int, end: int) -> list[Any]:
    """The elements of a stretch that `cut_array` gave."""
    with path.open("rb") as file:
        file.seek(start)
        text = file.read(end - start)
    try:
        elements: list[Any] = json.loads(b"[" + text + b"]")
    except (ValueError, RecursionError) as error:
        raise DataError(f'"{path}" at byte {start} is not JSON: {error}') from None
    return elements


def _elements(path: Path) -> Iterator[tuple[int, int]]:
    """Where each element begins and ends."""
    decoder = json.JSONDecoder()
    with path.open("rb") as file:
        text, base, at = file.read(_WINDOW_BYTES).decode("latin-1"), 0, 0
        at = text.index("[") + 1
        while True:
            at = _skip(text, at, _SPACE + ",")
            if at < len(text) and text[at] == "]":
                _refuse_more(path, base + at + 1)
                return
            try:
                _, end = decoder.raw_decode(text, at)
                complete = end < len(text) or text[at] in '{["'  # a number at the end of the window may continue
            except (ValueError, IndexError):
                complete = False
            except RecursionError:
                raise DataError(f'"{path}" at byte {base + at} is nested too deeply to be a record.') from None
            if complete:
                yield base + at, base + end
                at = end
                continue
            more = file.read(max(_WINDOW_BYTES, len(text) - at)).decode("latin-1")
            if not more or len(text) - at > _LARGEST_RECORD:
                raise DataError(
                    f'"{path}" at byte {base + at} is not JSON: the array does not end, or an element is incomplete.'
                )
            text, base, at = text[at:] + more, base + at, 0


def _refuse_more(path: Path, position: int) -> None:
    """Raises if anything but space follows the array, which nobody would read."""
    with path.open("rb") as file:
        file.seek(position)
        while window := file.read(_WINDOW_BYTES):
            if window.strip(_SPACE.encode()):
                raise DataError(
                    f'"{path}" goes on after its array, at byte {position}. Give one array, or records on lines.'
                )


def _skip(text: str, at: int, marks: str) -> int:
    while at < len(text) and text[at] in marks:
        at += 1
    return at
