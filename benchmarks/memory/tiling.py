"""The largest layer that trains in fragmented GPU memory, whole and in tiles: Figure 6b of the ZeRO-Infinity paper.

    python benchmarks/memory/tiling.py                                # hidden sizes 8K to 64K, tiling factors 1 to 16
    python benchmarks/memory/tiling.py --hidden 65536 --factors 16

The paper first cuts GPU memory into pieces of 2 GiB, so that every larger request fails. Today's drivers can join
pieces, so the rule itself is applied: the allocator's own record of a run is read, and a run in which any request was
larger than a piece counts as failed. The layer is linear, hidden size h to 4h, in bf16
with SGD, its states on the host. Every case runs in its own process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

GIB = 2**30


def largest_request() -> tuple[int, str]:
    """The largest request to the GPU's allocator since recording began, and who made it."""
    import torch

    traces = torch.cuda.memory._snapshot()["device_traces"]
    requests = [entry for trace in traces for entry in trace if entry["action"] == "alloc"]
    largest = max(requests, key=lambda entry: entry["size"])
    ours = [f"{f['name']} ({Path(f['filename']).name}:{f['line']})" for f in largest["frames"]]
    return largest["size"], " < ".join(ours[:4])


def train(hidden: int, factor: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from torch import nn

    import unbounded

    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(hidden, 4 * hidden, bias=False)).to(torch.bfloat16)
    report: dict[str, Any] = {}
    if factor > 1:
        report["tiles"] = unbounded.tile(model, 8 * hidden * hidden // factor)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-5)
    plan = {"weights": options.weights, "gradients": options.states, "optimizer": options.states, "prefetch_units": 1}
    plan |= {"disk_path": options.path} if options.path else {}
    start = time.perf_counter()
    model, optimizer = unbounded.shard(model, optimizer, plan | {"optimizer_format": options.format})
    report["built"], times = round(time.perf_counter() - start, 1), []
    for _ in range(2):
        start = time.perf_counter()
        inputs = torch.randn(options.rows, hidden, device="cuda", dtype=torch.bfloat16)
        loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(round(time.perf_counter() - start, 2))
    return report | {"seconds": times, "loss": float(loss.detach())}


def run(hidden: int, factor: int, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from unbounded.errors import BudgetError
    from unbounded.planner.sizes import parse_bytes

    torch.cuda.memory._record_memory_history(stacks="python", max_entries=10**6)
    report: dict[str, Any] = {"layer_gib": round(8 * hidden * hidden / GIB, 1)}
    try:
        report |= train(hidden, factor, options)
    except (torch.OutOfMemoryError, BudgetError) as error:
        return report | {"trains": False, "why": str(error).splitlines()[0][:200]}
    (largest, asker), peak = largest_request(), torch.cuda.max_memory_allocated()
    report |= {"largest_request_gib": round(largest / GIB, 2), "by": asker, "peak_gib": round(peak / GIB, 2)}
    return report | {"trains": largest <= parse_bytes(options.piece)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", default="8192,16384,32768,65536", help="several separated by commas")
    parser.add_argument("--factors", default="1,4,16")
    parser.add_argument("--piece", default="2GiB")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--weights", default="host", help='tier of the weights: "host" or "disk"')
    parser.add_argument("--states", default="host", help='tier of gradients and optimizer states: "host" or "disk"')
    parser.add_argument("--format", default="exact", help='format of the states: "exact" or "compact"')
    parser.add_argument("--path", default=None, help="folder of the disk tier")
    parser.add_argument("--timeout", type=int, default=500, help="seconds a case may take")
    parser.add_argument("--alone", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        hidden, factor = map(int, options.alone.split(","))
        print(json.dumps(run(hidden, factor, options)))
        return
    passed = ["--piece", options.piece, "--rows", str(options.rows), "--weights", options.weights]
    passed += [
        "--states",
        options.states,
        "--format",
        options.format,
        *(["--path", options.path] if options.path else []),
    ]
    largest: dict[int, int] = {}
    for factor in map(int, options.factors.split(",")):
        for hidden in map(int, options.hidden.split(",")):
            command = [sys.executable, __file__, "--alone", f"{hidden},{factor}", *passed]
            try:
                ended = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
                line = ended.stdout.strip().splitlines()[-1] if ended.returncode == 0 else ""
            except subprocess.TimeoutExpired:
                line = json.dumps({"hidden": hidden, "factor": factor, "trains": False, "why": "out of time"})
            report = json.loads(line) if line else {"trains": False, "why": ended.stderr.strip()[-300:]}
            print(json.dumps({"hidden": hidden, "factor": factor} | report), flush=True)
            if report["trains"]:
                largest[factor] = max(hidden, largest.get(factor, 0))
    print("the largest hidden size that trains, by tiling factor:", largest)


if __name__ == "__main__":
    main()
