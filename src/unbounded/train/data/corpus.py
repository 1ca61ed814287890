"""Packed sequences in one fixed order.

The samples of a run are numbered; sample `s` is sequence `s // S` of stream `s % S`, where the number of streams `S`
depends only on the data. In each epoch the blocks are put in an order drawn from the seed and dealt to the streams
like cards; within a block (for Parquet, within 1,024 rows) the documents are shuffled. Each stream joins its
documents' tokens and cuts them into sequences, so that which tokens a sample holds does not depend on the batch size
or the number of ranks, and a rank reads only the streams that its samples come from.

A stream's place is five integers (`StreamPlace`): sequences given so far, and where the first token of the next one
is. Resuming reads only that one block again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unbounded.errors import DataError
from unbounded.train.data.document import DocumentReader, Split
from unbounded.train.data.records import Continued, Document, has_answer
from unbounded.train.data.sample import Masking, Sequence, ask_next
from unbounded.train.data.source import Block
from unbounded.train.data.tokenizer import IGNORED, Encoded, Tokenizer

_MAX_STREAMS = 16
_BLOCKS_PER_STREAM = 4  # with fewer, a stream could get nothing but empty blocks
_MAX_EMPTY_EPOCHS = 100
_ENCODE_CHARACTERS = 8 << 10  # documents are tokenised in groups of about this size: more would come in bursts


class StreamPlace(NamedTuple):
    """Where a stream is: the next sequence begins `offset` tokens into a document of a block of an epoch."""

    taken: int = 0
    epoch: int = 0
    position: int = 0
    document: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Corpus:
    """A dataset as the streams see it: what to read, which part, with which tokenizer and in which order.

    With `separated`, documents in a sequence do not predict each other's tokens. A sequence that begins within a
    document repeats the `overlap` tokens before it as context. With `masking`, masked tokens are predicted instead of
    the next one everywhere.
    """

    reader: DocumentReader
    tokenizer: Tokenizer
    split: Split
    sequence_length: int
    seed: int
    separated: bool = False
    overlap: int = 0
    masking: Masking | None = None

    @cached_property
    def num_streams(self) -> int:
        """How many streams the samples are divided into."""
        count = _MAX_STREAMS
        filled = self.reader.source.count_filled(count * _BLOCKS_PER_STREAM)
        while count > 1 and filled < count * _BLOCKS_PER_STREAM:
            count //= 2
        return count

    def order(self, epoch: int, stream: int) -> NDArray[np.int64]:
        """The blocks that a stream reads in an epoch."""
        shuffle = np.random.default_rng([self.seed, epoch])
        return shuffle.permutation(len(self.reader.source.blocks))[stream :: self.num_streams]

    def documents(self, block: int, epoch: int) -> Iterator[Document]:
        """The block's documents as shuffled in an epoch, including those of the other split."""
        return self.reader.read(self.reader.source.blocks[block], np.random.default_rng([self.seed, epoch, block]))

    def has(self, document: Document) -> bool:
        """Whether a document is a part of this corpus: of its split, and with something to be predicted."""
        return bool(document) and (self.masking is not None or has_answer(document)) and self.split.has(document)

    def is_empty(self) -> bool:
        """Whether it has no document at all; reads up to the first one."""
        blocks = self.reader.source.blocks
        return not any(self.has(document) for block in blocks for document in self.reader.read(block))

    def ask(
        self, tokens: NDArray[np.int32], targets: NDArray[np.int32], starts: NDArray[np.bool_], number: int
    ) -> Sequence:
        """Sample `number`, made from its tokens and one more."""
        if self.masking is None:
            return ask_next(tokens, targets, starts, separated=self.separated)
        return self.masking.hide(Sequence(tokens[:-1], targets[:-1], starts[:-1]), self.seed, number)

    @cached_property
    def fingerprint(self) -> int:
        """A number that changes whenever the samples, or what is to be predicted in them, do."""
        files = [(str(file.path.name), file.num_bytes) for file in self.reader.source.files]
        kind: tuple[object, ...] = (self.reader.kind, self.tokenizer.name.rsplit("/", 1)[-1], self.split, self.seed)
        kind += (self.overlap,) if self.masking is None else (self.overlap, self.masking)
        kind += ("separated",) if self.separated else ()
        digest = blake2b(repr((files, kind, self.sequence_length)).encode(), digest_size=6).digest()
        return int.from_bytes(digest, "little")

    @cached_property
    def reading(self) -> list[int | str]:
        """How its files are read: in how many streams, and in which ways."""
        return [self.num_streams, *sorted({file.container for file in self.reader.source.files})]


class _OpenDocument:
    """A tokenised document and the place it came from; its first `offset` tokens are already used."""

    __slots__ = ("document", "epoch", "offset", "position", "targets", "tokens")

    def __init__(self, place: StreamPlace, encoded: Encoded) -> None:
        self.epoch, self.position, self.document, self.offset = place.epoch, place.position, place.document, 0
        self.tokens, self.targets = encoded


class Stream:
    """One stream of sequences, beginning at `place`."""

    def __init__(self, corpus: Corpus, index: int, place: StreamPlace | None = None) -> None:
        self._corpus, self._index = corpus, index
        self._place = place or StreamPlace()
        self._pieces: deque[_OpenDocument] = deque()
        self._num_ready = -self._place.offset  # tokens available, minus those that a resumed stream used before
        self._source = self._encoded(self._place)

    @property
    def place(self) -> StreamPlace:
        """Where the next sequence begins."""
        if not self._pieces:
            return self._place
        first = self._pieces[0]
        return StreamPlace(self._place.taken, first.epoch, first.position, first.document, first.offset)

    def skip_to(self, taken: int) -> None:
        """Skip sequences that other ranks take, until `taken` have passed."""
        while self._place.taken < taken:
            self.next()

    def next(self) -> Sequence:
        """The next sequence; its last target is also the first input of the one after it."""
        length = self._corpus.sequence_length
        while self._num_ready + self._num_repeated <= length:
            piece = next(self._source)
            if not self._pieces:
                piece.offset = -self._num_ready if self._num_ready < 0 else 0
            self._pieces.append(piece)
            self._num_ready += len(piece.tokens)
        self._num_ready -= length - self._num_repeated
        sequence = self._cut(length, self._num_repeated)
        self._place = self._place._replace(taken=self._place.taken + 1)
        return sequence

    @property
    def _num_repeated(self) -> int:
        """Tokens of the first document that were used before and are context for what follows."""
        return min(self._corpus.overlap, self._pieces[0].offset) if self._pieces else 0

    def _cut(self, length: int, repeated: int) -> Sequence:
        tokens, targets, starts, missing = [], [], [], length + 1
        self._pieces[0].offset -= repeated
        while missing:
            first = self._pieces[0]
            span = slice(first.offset, first.offset + missing)
            tokens.append(first.tokens[span])
            targets.append(first.targets[span])
            starts.append(np.arange(len(tokens[-1])) == -first.offset)
            missing -= len(tokens[-1])
            first.offset += len(tokens[-1])
            if missing:
                self._pieces.popleft()
        self._pieces[0].offset -= 1
        wanted = np.concatenate(targets)
        num_asked = repeated if self._corpus.masking else repeated + 1  # the very first token is not the next of any
        wanted[:num_asked] = IGNORED
        number = self._place.taken * self._corpus.num_streams + self._index
        return self._corpus.ask(np.concatenate(tokens), wanted, np.concatenate(starts), number)

    def _encoded(self, start: StreamPlace) -> Iterator[_OpenDocument]:
        group: list[tuple[StreamPlace, Document]] = []
        characters = 0
        for place, document in self._documents(start):
            group.append((place, document))
            characters += count_characters(document)
            if characters >= _ENCODE_CHARACTERS:
                yield from self._encode(group)
                group, characters = [], 0

    def _encode(self, group: list[tuple[StreamPlace, Document]]) -> Iterator[_OpenDocument]:
        encoded = self._corpus.tokenizer.encode([document for _, document in group])
        for (place, _), one in zip(group, encoded, strict=True):
            if len(one.tokens):
                yield _OpenDocument(place, one)

    def _documents(self, start: StreamPlace) -> Iterator[tuple[StreamPlace, Document]]:
        corpus, epoch, num_empty = self._corpus, start.epoch, 0
        while num_empty < _MAX_EMPTY_EPOCHS:
            num_empty += 1
            order = corpus.order(epoch, self._index)
            for position in range(start.position if epoch == start.epoch else 0, len(order)):
                resumed = epoch == start.epoch and position == start.position
                documents = enumerate(corpus.documents(int(order[position]), epoch))
                for number, document in islice(documents, start.document if resumed else 0, None):
                    if corpus.has(document):
                        num_empty = 0
                        yield StreamPlace(0, epoch, position, number), document
            epoch += 1
        raise DataError(explain_no_documents(corpus))


def count_characters(document: Document) -> int:
    """How long a document is, before it is tokenised."""
    if isinstance(document, str):
        return len(document)
    if isinstance(document, Continued):
        document = document.messages
    return sum(len(part) if isinstance(part, str) else len(part["content"]) for part in document)


def explain_no_documents(corpus: Corpus) -> str:
    """Why a corpus without documents has none."""
    split, blocks = corpus.split, corpus.reader.source.blocks
    if split.fraction > 0.0 and not split.held_out:
        held_out = replace(corpus, split=replace(split, held_out=True))
        count = sum(held_out.has(document) for block in blocks for document in corpus.reader.read(block))
        if count:
            return (
                f"the training data is empty: --eval-fraction {split.fraction} holds out all {count} documents. "
                "Turn evaluation off with --eval-fraction 0, give --eval-data instead, or give more documents."
            )
    part = "evaluation" if split.held_out else "training"
    return (
        f"the {part} data is empty: {len(corpus.reader.source.files)} files hold no document for it. Give files with "
        "text in them (for conversations, with answers of the assistant), or change --eval-fraction."
    )


def count_tokens(corpus: Corpus, blocks: list[Block]) -> int:
    """Tokens of the sequences of one pass over the corpus' split in `blocks`, counted by tokenising them once.

    What sequences repeat as context counts again.
    """
    total = begin = 0  # `begin`: how far into a document the next sequence begins
    for block in blocks:
        documents = [d for d in corpus.reader.read(block) if corpus.has(d)]
        for encoded in corpus.tokenizer.encode(documents):
            while begin < len(encoded.tokens):
                total += corpus.sequence_length
                begin += corpus.sequence_length - min(corpus.overlap, begin)
            begin -= len(encoded.tokens)
    return total - begin
