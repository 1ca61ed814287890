"""Compares the tiled cross-entropy with the plain loss, eager and compiled: time of both passes, and memory.

    python benchmarks/memory/tiled_loss.py                                   # 16k tokens, 128k classes, width 4,096
    python benchmarks/memory/tiled_loss.py --tokens 65536 --classes 262144

"Extra" is the peak beyond the inputs and the two resulting gradients, which every way has to make. Ways take turns, so
that they run at the same clock rates; times are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import unbounded

GIB = 2**30


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The head and the loss as Hugging Face computes them."""
    return nn.functional.cross_entropy(nn.functional.linear(hidden, weight).float(), labels)


def measure(loss: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[float, int]:
    """Seconds of a forward and backward, and the peak beyond inputs and gradients."""
    hidden, weight, _ = inputs
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    loss(*inputs).backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--classes", type=int, default=128256)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--tile", default=None, help='bytes of a tile of logits, as "512MiB"')
    options = parser.parse_args()
    torch.manual_seed(0)
    where = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    hidden = torch.randn(options.tokens, options.width, **where)
    weight = (torch.randn(options.classes, options.width, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    labels = torch.randint(options.classes, (options.tokens,), device="cuda")

    def tiled(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return unbounded.tiled_cross_entropy(hidden, weight, labels, tile_bytes=options.tile)

    ways = {"plain": plain, "plain, compiled": torch.compile(plain), "tiled": tiled}
    times: dict[str, list[float]] = {name: [] for name in ways}
    extra: dict[str, int] = {}
    for turn in range(options.runs + 2):
        for name, loss in ways.items():
            seconds, extra[name] = measure(loss, (hidden, weight, labels))
            if turn >= 2:  # the first compile, and fill the allocator
                times[name].append(seconds)
    reference = statistics.median(times["plain, compiled"])
    for name in ways:
        seconds = statistics.median(times[name])
        part = extra[name] / max(1, extra["plain, compiled"])
        print(
            f"{name:16} {seconds * 1e3:8.1f} ms {seconds / reference:6.2f} x {extra[name] / GIB:7.2f} GiB {part:6.2f} x"
        )


if __name__ == "__main__":
    main()
