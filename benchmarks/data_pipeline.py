"""What the data pipeline takes from a training step at 100,000 tokens per second.

    python -m benchmarks.data_pipeline

A step that only waits on the main thread, as for a device, is run with ready-made batches and with the pipeline: the
ratio of the two is the cost. `--kind` chooses bytes or a BPE tokenizer trained on the spot.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.train.corpora import make_corpus, save_tokenizer, write_texts

from unbounded.train.data.corpus import Corpus
from unbounded.train.data.loader import Loader
from unbounded.train.data.tokenizer import FolderTokenizer

TOKENS_PER_SECOND = 100_000
LENGTH, ROWS = 2048, 16


def run_steps(loader: Loader | None, num_steps: int) -> float:
    """Seconds for the steps, each as long as a device would need at 100,000 tokens per second."""
    step_seconds = LENGTH * ROWS / TOKENS_PER_SECOND
    start = time.perf_counter()
    for _ in range(num_steps):
        if loader is not None:
            loader.next()
        time.sleep(step_seconds)
    return time.perf_counter() - start


def measure(corpus: Corpus, num_steps: int) -> tuple[float, float]:
    """The ratio of step times with and without the pipeline, and the tokens per second it can make at most."""
    loader = Loader(corpus, rows=ROWS)
    loader.next()
    time.sleep(2.0)  # opening the streams and getting ahead belongs to the start of a run
    ratio = run_steps(loader, num_steps) / run_steps(None, num_steps)
    start = time.perf_counter()
    for _ in range(20):
        loader.next()
    rate = 20 * LENGTH * ROWS / (time.perf_counter() - start)
    loader.close()
    return ratio, rate


def main() -> None:
    """Print one line per kind of data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    num_steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        data = write_texts(Path(folder, "data.jsonl"), 100_000)
        tokenizer = FolderTokenizer(save_tokenizer(Path(folder, "tokenizer")))
        print(f"{'data':<12}{'step, ratio to none':>22}{'tokens/s when pressed':>24}")
        for kind, corpus in (
            ("bytes", make_corpus(data, sequence_length=LENGTH)),
            ("BPE", make_corpus(data, sequence_length=LENGTH, tokenizer=tokenizer)),
        ):
            ratio, rate = measure(corpus, num_steps)
            print(f"{kind:<12}{ratio:>22.4f}{rate:>24,.0f}")


if __name__ == "__main__":
    main()
