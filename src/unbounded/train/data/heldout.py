"""The evaluation set: held-out documents, or separate files, packed once and kept.

Blocks are visited in one fixed random order over all files, and no document gives more than a sixteenth of the set, so
that a small set represents all of the data and not just its first file.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unbounded.errors import DataError
from unbounded.train.data.corpus import Corpus
from unbounded.train.data.loader import Batch, stack
from unbounded.train.data.sample import Sequence
from unbounded.train.data.tokenizer import IGNORED

_LEAST_DOCUMENTS = 16


def pack_held_out(corpus: Corpus, max_tokens: int) -> list[Sequence]:
    """Sequences of the corpus' split, at most `max_tokens` tokens in all; the last one is padded without targets."""
    length = corpus.sequence_length
    limit = max(max_tokens // length, 1) * length + 1
    tokens: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    starts: list[np.ndarray] = []
    num_tokens = 0
    blocks = corpus.reader.source.blocks
    most = max(limit // _LEAST_DOCUMENTS, length)
    for index in np.random.default_rng(0).permutation(len(blocks)):
        documents = [d for d in corpus.reader.read(blocks[index]) if corpus.has(d)]
        for encoded in corpus.tokenizer.encode(documents):
            tokens.append(encoded.tokens[:most])
            targets.append(encoded.targets[:most])
            starts.append(np.arange(len(tokens[-1])) == 0)
            num_tokens += len(tokens[-1])
        if num_tokens >= limit:
            break
    if num_tokens < 2:
        raise DataError(
            "the evaluation data is empty: no document was held out for it. "
            "Raise --eval-fraction, give --eval-data, or turn evaluation off with --eval-fraction 0."
        )
    whole = Sequence(*(np.concatenate(parts)[:limit] for parts in (tokens, targets, starts)))
    sequences = list(_cut(whole, corpus))
    if all((sequence.targets == IGNORED).all() for sequence in sequences):
        raise DataError(
            f"the {len(whole.inputs)} tokens of the evaluation data have nothing to predict: they are prompts without "
            f"their answers, or special tokens. Look at the data, or raise --eval-tokens ({max_tokens})."
        )
    return sequences


def _cut(whole: Sequence, corpus: Corpus) -> Iterator[Sequence]:
    length = corpus.sequence_length
    for number, at in enumerate(range(0, len(whole.inputs) - 1, length)):
        tokens, targets, starts = (array[at : at + length + 1] for array in whole)
        missing = length + 1 - len(tokens)
        yield corpus.ask(
            np.pad(tokens, (0, missing)),
            np.pad(targets, (0, missing), constant_values=IGNORED),
            np.pad(starts, (0, missing)),
            number,
        )


def share(sequences: list[Sequence], *, rows: int, rank: int, num_ranks: int) -> Iterator[Batch]:
    """This rank's batches of `rows` rows, as many on every rank; the last are padded with rows without targets."""
    blank = sequences[0]._replace(targets=np.full_like(sequences[0].targets, IGNORED))
    for start in range(0, len(sequences), rows * num_ranks):
        mine = sequences[start + rank : start + rows * num_ranks : num_ranks]
        yield stack([*mine, *[blank] * (rows - len(mine))])
