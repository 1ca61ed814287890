"""Reads documents from blocks (text, conversations or pairs), and decides which are held out for evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from unbounded.errors import DataError
from unbounded.train.data.json_arrays import read_elements
from unbounded.train.data.records import TEXT as TEXT_KIND
from unbounded.train.data.records import Document, RecordKind, kind_named, recognise
from unbounded.train.data.source import (
    ARRAY,
    ARROW,
    JSONL,
    PARQUET,
    TEXT,
    Block,
    DataFile,
    DataSource,
    open_arrow,
    open_parquet,
    read_lines,
    read_text,
)

_PARQUET_BATCH_ROWS = 1024  # a window of the shuffle


@dataclass(frozen=True)
class Split:
    """A part of the documents: those whose hash is below `fraction` or, if `held_out` is false, the others.

    The hash is of the document's content, so a document stays in its part when files are added or renamed.
    """

    fraction: float = 0.0
    held_out: bool = False

    def has(self, document: Document) -> bool:
        """Whether the document belongs to this part."""
        if self.fraction <= 0.0:
            return not self.held_out
        content = document if isinstance(document, str) else json.dumps(document, sort_keys=True)
        digest = blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return (int.from_bytes(digest, "little") < self.fraction * 2**64) == self.held_out


@dataclass(frozen=True)
class DocumentReader:
    """Reads the documents of a source's blocks. All records are of one kind."""

    source: DataSource
    kind: RecordKind

    def read(self, block: Block, shuffle: np.random.Generator | None = None) -> Iterator[Document]:
        """The block's documents, in file order or in one drawn from `shuffle`."""
        file = self.source.files[block.file]
        if file.container == TEXT:
            begins = "utf-8-sig" if block.start == 0 else "utf-8"  # a mark of the encoding is no text
            yield read_text(file, block).decode(begins, "replace")
        elif file.container == JSONL:
            lines = read_lines(file, block)
            for index in _order(len(lines), shuffle):
                yield self._parse(file, lines[index])
        elif file.container == ARRAY:
            elements = read_elements(file.path, block.start, block.end)
            for index in _order(len(elements), shuffle):
                yield self._read(elements[index], lambda: f'"{file.path}", a record after byte {block.start},')
        elif file.container == ARROW:
            rows = open_arrow(file.path).select(self._columns(file)).slice(block.start, block.end - block.start)
            batches = rows.combine_chunks().to_batches()  # one, in whose order rows are drawn
            yield from self._read_rows(file, batches, shuffle, f"after row {block.start}")
        else:
            batches = open_parquet(file.path).iter_batches(
                _PARQUET_BATCH_ROWS, row_groups=[block.start], columns=self._columns(file)
            )
            yield from self._read_rows(file, batches, shuffle, f"row group {block.start}")

    def _parse(self, file: DataFile, line: bytes) -> Document:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            remedy = "A record is one whole line, or an element of one array."
            raise DataError(f"{_where(file, line)} is not JSON: {error}. {remedy}") from None
        return self._read(record, lambda: _where(file, line))

    def _read(self, record: Any, where: Any) -> Document:
        if not isinstance(record, dict):
            found = type(record).__name__
            raise DataError(f'{where()} is of type {found}, but a record is an object such as {{"text": "..."}}.')
        self.kind.check_fields(record, where, "field")
        return self.kind.read(record, where)

    def _columns(self, file: DataFile) -> list[str]:
        """The columns that are read of a table."""
        names = column_names(file)
        self.kind.check_fields(names, lambda: f'"{file.path}"', "column")
        return [*self.kind.fields, *(name for name in self.kind.optional if name in names)]

    def _read_rows(
        self, file: DataFile, batches: Iterable[Any], shuffle: np.random.Generator | None, where: str
    ) -> Iterator[Document]:
        columns = self._columns(file)
        for batch in batches:
            for index in _order(batch.num_rows, shuffle):
                row = {name: batch.column(name)[index].as_py() for name in columns}
                yield self.kind.read(row, lambda: f'"{file.path}" {where}')


def column_names(file: DataFile) -> list[str]:
    """The columns of a file that is a table."""
    if file.container == ARROW:
        return list(open_arrow(file.path).schema.names)
    return list(open_parquet(file.path).schema_arrow.names)


def open_reader(source: DataSource, data_format: str, text_field: str, messages_field: str | None) -> DocumentReader:
    """A reader for `source`. With format "auto" (or "parquet") the first record decides the kind of all."""
    if data_format in ("auto", PARQUET, JSONL):
        kind = recognise(_first_fields(source), text_field, messages_field)
    else:
        kind = kind_named(data_format, text_field, messages_field)
    if kind.name != TEXT_KIND and any(file.container == TEXT for file in source.files):
        named = next(file.path for file in source.files if file.container == TEXT)
        raise DataError(f'"{named}" is plain text among chat data. Train on one kind of data at a time.')
    return DocumentReader(source, kind)


def _first_fields(source: DataSource) -> list[str]:
    """The fields of the first record of the first file that has records."""
    for block in source.blocks:
        file = source.files[block.file]
        if file.container in (PARQUET, ARROW):
            return column_names(file)
        record: Any = None
        if file.container == ARRAY:
            record = read_elements(file.path, block.start, block.end)[0]
        elif file.container == JSONL:
            for line in read_lines(file, block)[:1]:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    return []
        if record is not None:
            return list(record) if isinstance(record, dict) else []
    return []


def _order(count: int, shuffle: np.random.Generator | None) -> Any:
    return range(count) if shuffle is None else shuffle.permutation(count)


def _where(file: DataFile, line: bytes) -> str:
    with file.path.open("rb") as stream:
        number = next((n for n, other in enumerate(stream, 1) if other == line), 0)
    return f'"{file.path}" line {number}'
