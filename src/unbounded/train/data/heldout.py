"""The evaluation set: held-out documents, or files of their own, packed once and kept, in file order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unbounded.train.data.loader import Batch, stack
from unbounded.train.data.stream import Corpus, Sequence
from unbounded.train.data.tokenizer import IGNORED
from unbounded.train.errors import DataError


def pack_held_out(corpus: Corpus, max_tokens: int) -> list[Sequence]:
    """Sequences of the corpus' split, at most `max_tokens` tokens of it; the last one is filled up without targets."""
    length = corpus.sequence_length
    limit = max(max_tokens // length, 1) * length + 1
    tokens: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    num_tokens = 0
    for block in corpus.reader.source.blocks:
        documents = [document for document in corpus.reader.read(block) if document and corpus.split.has(document)]
        for encoded in corpus.tokenizer.encode(documents):
            tokens.append(encoded.tokens)
            targets.append(encoded.targets)
            num_tokens += len(encoded.tokens)
        if num_tokens >= limit:
            break
    if num_tokens < 2:
        raise DataError(
            "the evaluation data is empty: no document was held out for it. "
            "Raise --eval-fraction, give --eval-data, or turn evaluation off with --eval-fraction 0."
        )
    return list(_cut(np.concatenate(tokens)[:limit], np.concatenate(targets)[:limit], length))


def _cut(tokens: np.ndarray, targets: np.ndarray, length: int) -> Iterator[Sequence]:
    for start in range(0, len(tokens) - 1, length):
        inputs, wanted = tokens[start : start + length], targets[start + 1 : start + 1 + length]
        inputs = np.pad(inputs, (0, length - len(inputs)))
        yield Sequence(inputs, np.pad(wanted, (0, length - len(wanted)), constant_values=IGNORED))


def share(sequences: list[Sequence], *, rows: int, rank: int, world_size: int) -> Iterator[Batch]:
    """This rank's batches of `rows` rows: as many on every rank, the last ones filled up with rows without targets."""
    blank = Sequence(np.zeros_like(sequences[0].inputs), np.full_like(sequences[0].targets, IGNORED))
    for start in range(0, len(sequences), rows * world_size):
        mine = sequences[start + rank : start + rows * world_size : world_size]
        yield stack([*mine, *[blank] * (rows - len(mine))])
