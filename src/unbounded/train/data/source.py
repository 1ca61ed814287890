"""The files of a dataset and the blocks they are read in.

A block is what is read at once and moved as a whole by the shuffle: a small file, a piece of a large one cut where a
line ends, a stretch of a JSON array, a row group of a Parquet file, or rows of an Arrow file. Blocks are found from
file sizes, Parquet footers and Arrow headers alone, so that opening a terabyte reads none of it; only a JSON array has
to be read through once.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from unbounded.errors import DataError
from unbounded.planner.spelling import did_you_mean
from unbounded.train.data.json_arrays import cut_array, is_array

TEXT, JSONL, ARRAY, PARQUET, ARROW = "text", "jsonl", "array", "parquet", "arrow"
RECORDS = ("chat", "sharegpt", "alpaca", "prompt")
"""Formats of records, which any container except plain text may hold."""

_CONTAINERS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), JSONL),
    **dict.fromkeys((".parquet", ".pq"), PARQUET),
    ".arrow": ARROW,
}
_TEXT_SUFFIXES = {".txt", ".text", ".md", ".rst", ".tex", ".html", ".csv"}
_CODE_SUFFIXES = {".py", ".c", ".h", ".cpp", ".cc", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql", ".toml"}
_TEXT_BLOCK_BYTES = 256 << 10  # one document: small enough that tokenising it does not delay a batch
_LINES_BLOCK_BYTES = 1 << 20  # a window of the shuffle
_ARROW_BLOCK_ROWS = 1024  # the same
# What `datasets` writes beside its data, and the description of a dataset of records.
_ABOUT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_ABOUT_RECORDS = {"README.md"}
_SEAM_BYTES = 4096  # how far from a nominal cut to look for the end of a line
_LOOKED_BYTES = 4096  # of a text file, to see that it is one
_SAMPLED_FILES, _SAMPLED_BYTES = 256, 4096  # to see that data is the same as before
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}


@dataclass(frozen=True)
class Block:
    """Bytes `start` to `end` of a file, rows of an Arrow file, or row group `start` of a Parquet file."""

    file: int
    start: int
    end: int


@dataclass(frozen=True)
class DataFile:
    """One file, with how it is read and its size when the run began."""

    path: Path
    container: str
    num_bytes: int


@dataclass(frozen=True)
class DataSource:
    """All files of a dataset, in an order that does not depend on the file system."""

    files: tuple[DataFile, ...]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Every block, in file order."""
        lines_bytes = _lines_block_bytes(sum(f.num_bytes for f in self.files if f.container in (JSONL, ARRAY)))
        return tuple(block for index, file in enumerate(self.files) for block in _cut(index, file, lines_bytes))

    def count_filled(self, most: int) -> int:
        """How many blocks something begins in, counted up to `most`: those inside a long line hold nothing."""
        return sum(1 for _ in islice((block for block in self.blocks if self._is_filled(block)), most))

    def _is_filled(self, block: Block) -> bool:
        file = self.files[block.file]
        if file.container != JSONL:
            return True
        with file.path.open("rb") as stream:
            _enter(stream, block)
            return stream.tell() < block.end

    @cached_property
    def content(self) -> int:
        """A number that in all likelihood changes if files of the same sizes hold other bytes. It is made of the
        beginning, the middle and the end of at most `_SAMPLED_FILES`, spread over all."""
        digest = blake2b(digest_size=6)
        for file in self.files[:: -(-len(self.files) // _SAMPLED_FILES)]:
            with suppress(OSError), file.path.open("rb") as opened:  # whoever reads it will say so
                for place in (0, file.num_bytes // 2, file.num_bytes - _SAMPLED_BYTES):
                    opened.seek(max(0, place))
                    digest.update(opened.read(_SAMPLED_BYTES))
        return int.from_bytes(digest.digest(), "little")


def open_source(patterns: Iterable[str], data_format: str = "auto") -> DataSource:
    """Find the files that `patterns` (files, folders, globs) name; folders are searched, without hidden files."""
    found: dict[Path, DataFile] = {}
    for pattern in patterns:
        for path in _expand(pattern, data_format):
            num_bytes = path.stat().st_size
            if not path.is_file():
                raise DataError(f'data "{path}" is not a file. Give files, folders or globs of them.')
            if num_bytes:
                found[path] = DataFile(path, _container(path, data_format), num_bytes)
    if not found:
        named = ", ".join(f'"{pattern}"' for pattern in patterns)
        raise DataError(f"the data in {named} is empty: all files there have zero bytes. Give files with text in them.")
    return DataSource(tuple(found[path] for path in sorted(found)))


def _expand(pattern: str, data_format: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        return _walk(path, data_format)
    if path.is_file():
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        siblings = [str(entry) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f'data "{pattern}" does not exist.{did_you_mean(str(path), siblings)}')
    return [file for match in matches for file in (_walk(match, data_format) if match.is_dir() else [match])]


def _walk(folder: Path, data_format: str) -> list[Path]:
    files = sorted(path for path in _below(folder) if path.is_file())
    kept = [p for p in files if data_format == TEXT or (_fits(p, data_format) and p.name not in _ABOUT_DATA)]
    if data_format != TEXT and any(p.suffix.lower() in _CONTAINERS for p in kept):
        kept = [p for p in kept if p.name not in _ABOUT_RECORDS]
    if not kept:
        raise DataError(
            f'folder "{folder}" has no data of format "{data_format}" among its {len(files)} files. '
            "Give the files by name, or their format with --data-format."
        )
    return kept


def _below(folder: Path) -> Iterator[Path]:
    """What is in the folder and those inside it, without hidden ones; links to folders are followed, each folder once.

    A folder that this user may not read is an error: `Path.rglob` would leave out its files without a word.
    """

    def fail(error: OSError) -> None:
        raise error

    seen = set()
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        about = os.stat(place)
        is_new = (about.st_dev, about.st_ino) not in seen
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if is_new and not _is_hidden(name))
        yield from (Path(place, name) for name in names if is_new and not _is_hidden(name))


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _fits(path: Path, data_format: str) -> bool:
    suffix = path.suffix.lower()
    known = _CONTAINERS.get(suffix, TEXT if suffix in _TEXT_SUFFIXES | _CODE_SUFFIXES else None)
    wanted = {"auto": {TEXT, JSONL, PARQUET, ARROW}, **{name: {JSONL, PARQUET, ARROW} for name in RECORDS}}
    return known in wanted.get(data_format, {data_format})


def _container(path: Path, data_format: str) -> str:
    by_suffix = _CONTAINERS.get(path.suffix.lower(), TEXT)
    container = by_suffix if data_format == "auto" else data_format
    if container == TEXT:
        _refuse_no_text(path)
    if container in (TEXT, PARQUET):
        return container
    if by_suffix in (PARQUET, ARROW):
        return by_suffix
    return ARRAY if is_array(path) else JSONL


def _refuse_no_text(path: Path) -> None:
    """Raises for a file that would be read as plain text but cannot be: compressed, wide characters, binary."""
    with path.open("rb") as file:
        head = file.read(_LOOKED_BYTES)
    packed = next((kind for begin, kind in _PACKED.items() if head.startswith(begin)), None)
    if packed is not None:
        raise DataError(f'"{path}" is compressed with {packed}, and is not plain text. Unpack it first.')
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f'"{path}" is text in UTF-16, but text is read as UTF-8. Convert it with iconv.')
    if b"\0" in head:
        raise DataError(f'"{path}" has a zero byte at {head.index(0)}, so it is not plain text. Leave it out.')


def _lines_block_bytes(total_bytes: int) -> int:
    return min(max(total_bytes // 512, 16 << 10), _LINES_BLOCK_BYTES)


def _cut(index: int, file: DataFile, lines_bytes: int) -> Iterator[Block]:
    if file.container == PARQUET:
        for group in range(open_parquet(file.path).num_row_groups):
            yield Block(index, group, group + 1)
        return
    if file.container == ARROW:
        num_rows = open_arrow(file.path).num_rows
        for start in range(0, num_rows, _ARROW_BLOCK_ROWS):
            yield Block(index, start, min(start + _ARROW_BLOCK_ROWS, num_rows))
        return
    if file.container == ARRAY:
        for start, end in cut_array(file.path, lines_bytes):
            yield Block(index, start, end)
        return
    step = _TEXT_BLOCK_BYTES if file.container == TEXT else lines_bytes
    for start in range(0, file.num_bytes, step):
        yield Block(index, start, min(start + step, file.num_bytes))


def open_parquet(path: Path) -> Any:
    """A pyarrow ParquetFile that reads through a small buffer rather than whole column chunks."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f'reading "{path}" needs pyarrow. Install it: pip install "unbounded[hf]".') from None
    try:
        return ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f'"{path}" is not a readable Parquet file: {error}') from None


@lru_cache(maxsize=64)
def open_arrow(path: Path) -> Any:
    """The table of an Arrow file, as `datasets` saves it, mapped and not read."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f'reading "{path}" needs pyarrow. Install it: pip install "unbounded[hf]".') from None
    try:
        mapped = pyarrow.memory_map(str(path))
        try:
            return pyarrow.ipc.open_stream(mapped).read_all()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(mapped).read_all()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f'"{path}" is not a readable Arrow file: {error}') from None


def read_text(file: DataFile, block: Block) -> bytes:
    """The bytes of a text block, whose nominal ends are moved to the next end of a line (or of a character)."""
    with file.path.open("rb") as stream:
        start = _seam(stream, block.start, file.num_bytes)
        end = _seam(stream, block.end, file.num_bytes)
        stream.seek(start)
        return stream.read(end - start)


def _seam(stream: Any, position: int, num_bytes: int) -> int:
    if position in (0, num_bytes):
        return position
    stream.seek(position - 1)  # a block that begins right after a line end begins there
    near: bytes = stream.read(_SEAM_BYTES)
    line_end = near.find(b"\n")
    if line_end >= 0:
        return position + line_end
    continuation = next((i for i, byte in enumerate(near[1:]) if byte & 0xC0 != 0x80), 0)
    return min(position + continuation, num_bytes)


def read_lines(file: DataFile, block: Block) -> list[bytes]:
    """The lines that begin within the block, without blank ones."""
    with file.path.open("rb") as stream:
        _enter(stream, block)
        lines = []
        while stream.tell() < block.end:
            line = stream.readline()
            if not line:
                break
            if line.strip():
                lines.append(line)
        return lines


def _enter(stream: Any, block: Block) -> None:
    """Moves to the first line that begins within the block; if there is none, to the block's end."""
    if block.start:
        stream.seek(block.start - 1)
        stream.readline(block.end - block.start + 1)  # not the rest of a line as long as the file
