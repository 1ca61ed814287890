"""Documents out of blocks: text, or the messages of a conversation, and which of them are held out for evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from unbounded.train.data.source import (
    CHAT,
    JSONL,
    PARQUET,
    TEXT,
    Block,
    DataFile,
    Source,
    open_parquet,
    read_lines,
    read_text,
)
from unbounded.train.errors import DataError
from unbounded.train.similar import did_you_mean

Message = dict[str, str]
Document = str | list[Message]

_PARQUET_BATCH_ROWS = 1024  # a window of the shuffle


@dataclass(frozen=True)
class Split:
    """A part of the documents: those whose hash falls below `fraction`, or with `held_out` false the others.

    The hash is of the document's content, so that a document stays on its side when files are added or renamed.
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
class Reader:
    """Reads the documents of a source's blocks; `chat` says that they are conversations."""

    source: Source
    text_field: str = "text"
    messages_field: str = "messages"
    chat: bool = False

    @property
    def field(self) -> str:
        """The JSON key or Parquet column that holds the documents."""
        return self.messages_field if self.chat else self.text_field

    def read(self, block: Block, shuffle: np.random.Generator | None = None) -> Iterator[Document]:
        """The block's documents, in file order or in one drawn from `shuffle`."""
        file = self.source.files[block.file]
        if file.container == TEXT:
            yield read_text(file, block).decode("utf-8", "replace")
        elif file.container == JSONL:
            lines = read_lines(file, block)
            for index in _order(len(lines), shuffle):
                yield self._parse(file, lines[index])
        else:
            yield from self._read_rows(file, block.start, shuffle)

    def _parse(self, file: DataFile, line: bytes) -> Document:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{_where(file, line)} is not JSON: {error}") from None
        if not isinstance(record, dict) or self.field not in record:
            keys = list(record) if isinstance(record, dict) else []
            raise DataError(
                f'{_where(file, line)} has no field "{self.field}".{did_you_mean(self.field, keys)} '
                f"Its fields are {keys}; name the right one with --text-field or --messages-field."
            )
        return self._check(record[self.field], lambda: _where(file, line))

    def _read_rows(self, file: DataFile, row_group: int, shuffle: np.random.Generator | None) -> Iterator[Document]:
        parquet = open_parquet(file.path)
        if self.field not in parquet.schema_arrow.names:
            names = parquet.schema_arrow.names
            raise DataError(
                f'"{file.path}" has no column "{self.field}".{did_you_mean(self.field, names)} '
                f"Its columns are {names}; name the right one with --text-field or --messages-field."
            )
        batches = parquet.iter_batches(_PARQUET_BATCH_ROWS, row_groups=[row_group], columns=[self.field])
        for batch in batches:
            column = batch.column(0)
            for index in _order(len(column), shuffle):
                yield self._check(column[index].as_py(), lambda: f'"{file.path}" row group {row_group}')

    def _check(self, value: Any, where: Any) -> Document:
        if self.chat:
            if isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
                return [{"role": str(m["role"]), "content": str(m["content"] or "")} for m in value]
            raise DataError(f'{where()}: "{self.field}" is not a list of messages with "role" and "content".')
        if not isinstance(value, str):
            raise DataError(f'{where()}: "{self.field}" holds {type(value).__name__}, not text.')
        return value


def open_reader(source: Source, data_format: str, text_field: str, messages_field: str) -> Reader:
    """A reader for `source`; with format "auto", records that have the messages field are conversations."""
    reader = Reader(source, text_field, messages_field, chat=data_format == CHAT)
    if data_format in ("auto", PARQUET):
        reader = replace(reader, chat=_has_messages(source, messages_field))
    if reader.chat and any(file.container == TEXT for file in source.files):
        named = next(file.path for file in source.files if file.container == TEXT)
        raise DataError(f'"{named}" is plain text among chat data. Train on one kind of data at a time.')
    return reader


def _has_messages(source: Source, messages_field: str) -> bool:
    for index, file in enumerate(source.files):
        if file.container == PARQUET:
            return messages_field in open_parquet(file.path).schema_arrow.names
        if file.container == JSONL:
            for line in read_lines(file, Block(index, 0, 1)):
                try:
                    return messages_field in json.loads(line)
                except (ValueError, TypeError):
                    return False
    return False


def _order(count: int, shuffle: np.random.Generator | None) -> Any:
    return range(count) if shuffle is None else shuffle.permutation(count)


def _where(file: DataFile, line: bytes) -> str:
    with file.path.open("rb") as stream:
        number = next((n for n, other in enumerate(stream, 1) if other == line), 0)
    return f'"{file.path}" line {number}'
