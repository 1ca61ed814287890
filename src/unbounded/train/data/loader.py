"""A rank's part of every global batch, made ahead on its own thread.

Of the `rows` samples of a global batch, rank `r` of `n` takes those whose number is `r` modulo `n`: the same samples
make up a batch on any number of ranks. Every batch carries the state after it, so that a checkpoint has what was
consumed and not what was made ahead.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unbounded.errors import DataError, InputError
from unbounded.train.data.corpus import Corpus, Stream, StreamPlace
from unbounded.train.data.sample import Sequence
from unbounded.train.data.tokenizer import IGNORED

State = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """This rank's rows of a global batch; `state` resumes right after it. `starts` marks where documents begin."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    starts: NDArray[np.bool_]
    num_targets: int
    state: State


def stack(sequences: Iterable[Sequence], state: State | None = None) -> Batch:
    """Join sequences into one batch."""
    rows = list(sequences)
    targets = np.stack([row.targets for row in rows]).astype(np.int64)
    inputs = np.stack([row.inputs for row in rows]).astype(np.int64)
    starts = np.stack([row.starts for row in rows])
    return Batch(inputs, targets, starts, int((targets != IGNORED).sum()), state or {})


class Loader:
    """Yields one `Batch` after another without end; `close` ends its thread."""

    def __init__(self, corpus: Corpus, *, rows: int, rank: int = 0, num_ranks: int = 1, num_ahead: int = 4) -> None:
        if rows % num_ranks:
            raise InputError(
                f"a global batch of {rows} sequences cannot be split evenly over {num_ranks} ranks. "
                f"Choose --batch-tokens so that it holds a multiple of {num_ranks} sequences."
            )
        self._corpus, self._rows, self._rank, self._num_ranks = corpus, rows, rank, num_ranks
        self._num_ahead = num_ahead
        self._num_samples = 0
        self._streams: dict[int, Stream] = {}
        self._places: dict[int, StreamPlace] = {}
        self._state = self._describe()
        self._thread: threading.Thread | None = None
        self.wait_seconds = 0.0

    def state_dict(self) -> State:
        """Where the last batch given out ended, as small integers (of the streams that this rank reads)."""
        return self._state

    def load_state_dict(self, state: State) -> None:
        """Continue after the batch that `state` came with; the batch size and number of ranks may differ."""
        if self._thread is not None:
            raise DataError("a loader's state can only be set before its first batch.")
        own = self._describe()
        same = state["fingerprint"] == own["fingerprint"]
        if not same or any(state.get(key, own[key]) != own[key] for key in ("content", "reading")):
            raise DataError(
                "the data, or what its order depends on (tokenizer, --seed, --sequence-length, --sequence-overlap, "
                "--eval-fraction, --objective, --packing, --data-format), is not what the checkpoint was trained on, "
                "so the run cannot continue at the exact sample. "
                "Bring both back, or pass --restart-data to start the data again."
            )
        self._num_samples = state["samples"]
        self._places = {int(index): StreamPlace(*place) for index, place in state["streams"].items()}
        self._state = state

    @property
    def epoch(self) -> float:
        """Passes over the data up to the last batch given out: the mean of the streams that this rank reads."""
        places = [StreamPlace(*place) for place in self._state["streams"].values()]
        lengths = [max(len(self._corpus.order(0, int(index))), 1) for index in self._state["streams"]]
        done = [place.epoch + place.position / length for place, length in zip(places, lengths, strict=True)]
        return sum(done) / len(done) if done else 0.0

    def next(self) -> Batch:
        """The next batch. Waits for the thread if it is not ready, and raises the thread's error."""
        if self._thread is None:
            self._queue: queue.Queue[Batch | BaseException] = queue.Queue(self._num_ahead)
            self._closing = threading.Event()
            self._thread = threading.Thread(target=self._work, name="unbounded-data", daemon=True)
            self._thread.start()
        start = time.perf_counter()
        batch = self._queue.get()
        self.wait_seconds += time.perf_counter() - start
        if isinstance(batch, BaseException):
            raise batch
        self._state = batch.state
        return batch

    def close(self) -> None:
        """End the thread; the batches made ahead are dropped, the state stays that of the last one given out."""
        if self._thread is None:
            return
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._closing.is_set():
                self._queue.put(self._make())
        except BaseException as error:
            self._queue.put(error)

    def _make(self) -> Batch:
        first = self._num_samples
        rows = [self._sample(first + row) for row in range(self._rank, self._rows, self._num_ranks)]
        self._num_samples += self._rows
        return stack(rows, self._describe())

    def _sample(self, sample: int) -> Sequence:
        taken, index = divmod(sample, self._corpus.num_streams)
        if index not in self._streams:
            self._streams[index] = Stream(self._corpus, index, self._places.get(index))
        self._streams[index].skip_to(taken)
        return self._streams[index].next()

    def _describe(self) -> State:
        places = self._places | {index: stream.place for index, stream in self._streams.items()}
        return {
            "fingerprint": self._corpus.fingerprint,
            "content": self._corpus.reader.source.content,
            "reading": self._corpus.reading,
            "samples": self._num_samples,
            "streams": {str(index): list(place) for index, place in sorted(places.items())},
        }


def merge(states: Iterable[State]) -> State:
    """The state of all ranks together: the furthest place of each stream."""
    first, *others = states
    streams = dict(first["streams"])
    for other in others:
        for index, place in other["streams"].items():
            streams[index] = max(streams.get(index, place), place)
    return {**first, "streams": streams}
