"""Records one steady training step with its states on host and disk, and draws its lanes.

    python benchmarks/steps/trace_step.py --out docs/images/lanes.svg

Runs on a GPU if there is one. `unbounded report step.trace.json` shows the same trace as numbers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

import unbounded
from unbounded.observe.report.lane_chart import draw_lanes
from unbounded.observe.spans import at_once, lane_uses, read_spans
from unbounded.train.gpt import GPT, GPTShape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="lanes.svg")
    parser.add_argument("--trace", default=None, help="keep the trace here")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--path", default=None, help="folder of the disk tier")
    options = parser.parse_args()
    shape = GPTShape(layers=options.layers, width=options.width, heads=8, context=256, vocabulary=256)
    model = GPT(shape)
    plan = {"weights": "host", "optimizer": "disk", "prefetch_units": 2}
    if options.path:
        plan["disk_path"] = options.path
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan)

    def step() -> None:
        tokens = torch.randint(0, 256, (4, 257))
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(logits.device))
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    path = Path(options.trace or Path(tempfile.mkdtemp()) / "step.trace.json")
    with unbounded.trace(path):
        step()
        step()
        optimizer.wait()
    spans = read_spans(path)
    Path(options.out).write_text(draw_lanes(spans))
    for use in lane_uses(spans):
        print(f"{use.lane:16} {use.busy_seconds:7.3f} s {use.part:5.0%}")
    print({count: round(seconds, 3) for count, seconds in at_once(spans).items()}, "->", options.out)


if __name__ == "__main__":
    main()
