"""Finds plain text that is not UTF-8. It is trained on with replacement characters, so the user must hear of it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path

from unbounded.train.data.source import TEXT, DataFile

# A terabyte is not read through before its first step.
LOOKED_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20


def describe_replaced(files: Iterable[DataFile], looked_bytes: int = LOOKED_BYTES) -> list[str]:
    """A line for each text file with bytes that are not UTF-8, as far as the first `looked_bytes` of all show."""
    said = []
    for file in files:
        if file.container != TEXT or looked_bytes <= 0:
            continue
        within = min(file.num_bytes, looked_bytes)
        looked_bytes -= within
        count = count_replaced(file.path, within)
        if count:
            of = "" if within == file.num_bytes else f" of its first {within:,}"
            said.append(
                f'"{file.path}" is not all UTF-8: {count:,} bytes{of} are read as replacement characters. '
                "Convert it with iconv."
            )
    return said


def count_replaced(path: Path, num_bytes: int) -> int:
    """How many of a file's first bytes are no part of a character in UTF-8."""
    decoder, kept, read = codecs.getincrementaldecoder("utf-8")("ignore"), 0, 0
    with path.open("rb") as file:
        while chunk := file.read(min(_CHUNK_BYTES, num_bytes - read)):
            kept += len(decoder.decode(chunk).encode())
            read += len(chunk)
    cut = len(decoder.getstate()[0])  # of a character that the looked bytes, or the file, end in
    return read - kept - (cut if read < path.stat().st_size else 0)
