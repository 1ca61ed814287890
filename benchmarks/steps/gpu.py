"""Ours, plain PyTorch, FSDP2 and DeepSpeed over one table of cases: one command, JSON and a plot.

    python benchmarks/steps/gpu.py                      # every case, an hour or more
    python benchmarks/steps/gpu.py --short              # the cases that take a few minutes in all
    python benchmarks/steps/gpu.py --cases 7b-4k,bert-128 --engines ours,torch --limit 120

Every measurement runs in its own process (`throughput.py`) with a time limit, so that none affects another's memory or
holds up the rest. Results are printed as they come, and written to `results.json` and `results.svg` in `--output` after
each. For a case that an engine cannot run, its last line of output is kept instead.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("throughput.py")
ENGINES = {"ours": "unbounded", "torch": "torch", "fsdp2": "fsdp2", "deepspeed": "deepspeed"}
TRAIN = "train"  # in place of arguments: the job of `unbounded train` without any
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What every engine runs: `common` arguments of `throughput.py`, then each engine's own; `goal` in seconds."""

    title: str
    common: str
    runs: tuple[tuple[str, str], ...]
    goal: float | None = None
    steps: int = 5
    is_short: bool = False


KEPT, AGAIN = "--activations keep", "--activations recompute"
# These models begin with norms above 1, so every step clips. Below the maximum, drafts are taken, whose number settles
# in a dozen steps.
BELOW = "--max-norm 1000"
DRAFTED = f"{BELOW} --plan device_bytes=24GiB --steps 14"
CASES = {
    "7b-4k": Case(
        "6.7B in 24 GiB, 4k tokens",
        "--size 7b --batches 2",
        (
            ("ours", "--plan device_bytes=24GiB"),
            ("fsdp2", f"--offload {AGAIN}"),
            ("deepspeed", f"--stage 3 {AGAIN}"),
        ),
        goal=1.0,
        is_short=True,
    ),
    "7b-16k": Case(
        "6.7B in 24 GiB, 16k tokens, compiled",
        "--size 7b --batches 8 --compile",
        (
            ("ours", "--plan device_bytes=24GiB"),
            ("ours", DRAFTED),
            ("fsdp2", f"--offload {AGAIN}"),
            ("deepspeed", f"--stage 3 {AGAIN}"),
        ),
        goal=1.75,
    ),
    "7b-16k-muon": Case(
        "6.7B in 24 GiB, 16k tokens, AdamW and Muon",
        "--size 7b --batches 8",
        (("ours", "--plan device_bytes=24GiB"), ("ours", "--muon --plan device_bytes=24GiB")),
    ),
    "7b-64k": Case(
        "6.7B, 64k tokens in 4 backwards, compiled",
        "--size 7b --batches 8 --accumulate 4 --compile",
        (
            ("ours", "--plan device_bytes=24GiB"),
            ("ours", DRAFTED),
            ("ours", ""),
            ("torch", AGAIN),
            ("fsdp2", AGAIN),
            ("deepspeed", f"--stage 3 {AGAIN}"),
        ),
        goal=6.5,
        steps=4,
    ),
    "3b-16k": Case(
        "3.1B, 16k tokens, compiled",
        "--size 3b --batches 8 --compile",
        (("ours", ""), ("torch", KEPT), ("fsdp2", KEPT), ("deepspeed", f"--stage 2 {KEPT}")),
        goal=0.54,
        is_short=True,
    ),
    "14.8b-8k": Case(
        "14.8B, vocabulary 152k, 8k tokens",
        "--size 14.8b --batches 4",
        (("ours", ""), ("ours", f"{BELOW} --steps 14")),
        goal=2.0,
    ),
    "70b-lora": Case(
        "70.6B with LoRA 16, 8k tokens", "--size 70.6b --lora 16 --batches 4", (("ours", ""),), goal=7.0, steps=4
    ),
    "70b-lora-24g": Case(
        "the same in 24 GiB, a part of it on disk",
        "--size 70.6b --lora 16 --batches 4",
        (("ours", "--plan device_bytes=24GiB disk_path=."),),
        goal=12.0,
        steps=3,
    ),
    "22b-2k": Case(
        "22.3B exact over three tiers, 2k tokens",
        "--size 22b --batches 1",
        (("ours", "--plan disk_path=."),),
        goal=24.0,
        steps=3,
    ),
    # Budgets of a machine with 125 GiB of host memory and a disk of 64 GiB, nearly all of both.
    "24b": Case(
        "24.1B exact, clipped",
        "--size 24b --batches 1",
        (("ours", "--plan disk_path=. disk_bytes=63GiB host_bytes=119GiB prefetch_units=0"),),
        steps=2,
    ),
    "27b": Case(
        "27.3B exact, not clipped",
        "--size 27b --batches 1 --no-clip",
        (("ours", "--plan disk_path=. host_bytes=115GiB gradients=none"),),
        steps=2,
    ),
    "45b-compact": Case(
        "45B compact",
        "--size 45b --batches 1",
        (("ours", "--plan optimizer_format=compact disk_path=."),),
        steps=2,
    ),
    "bert-128": Case(
        "BERT-Large, sequence 128, 64k tokens, compiled",
        "--size bert-large --sequence 128 --batches 512 --compile",
        (("ours", ""), ("torch", KEPT), ("fsdp2", KEPT)),
        is_short=True,
    ),
    "bert-512": Case(
        "BERT-Large, sequence 512, 64k tokens, compiled",
        "--size bert-large --sequence 512 --batches 128 --compile",
        (("ours", ""), ("torch", KEPT), ("fsdp2", KEPT)),
        is_short=True,
    ),
    "train": Case("the job of `make train`, from start to end", "", (("ours", TRAIN),), goal=120.0),
    "tiny": Case(
        "a tiny Llama, to try this out",
        "--size tiny --batches 1 --sequence 64 --accumulate 2",
        (("ours", ""), ("torch", KEPT), ("fsdp2", AGAIN), ("deepspeed", "--stage 3")),
        steps=3,
    ),
    "tiny-bert": Case(
        "a tiny BERT", "--size tiny-bert --batches 2 --sequence 32", (("ours", ""), ("torch", KEPT)), steps=3
    ),
}
TRIES = ("tiny", "tiny-bert")  # run when they are named


def run(case: Case, engine: str, arguments: str, *, steps: int | None, limit: float) -> Result:
    """One process: its last JSON line, or `error` with its last line of output."""
    if engine == "deepspeed" and find_spec("deepspeed") is None:
        return {"error": "not installed"}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if arguments == TRAIN:
            command = [sys.executable, "-m", "unbounded", "train", "--output", f"{folder}/run"]
        else:
            own = f"--engine {ENGINES[engine]} --steps {steps or case.steps} {case.common} {arguments}"
            command = [sys.executable, str(SCRIPT), *own.split()]
        lines, found = [""], None
        with limited(command, limit) as process:
            for line in process.stdout or ():
                lines.append(line.strip() or lines[-1])
                if line.startswith('{"engine"'):
                    found = json.loads(line)
    seconds = round(time.perf_counter() - start, 1)
    if process.returncode == -signal.SIGKILL and seconds >= limit:
        return {"error": f"not done after {limit:.0f} s", "seconds": seconds}
    if arguments == TRAIN and process.returncode == 0:
        found = {"step_s": seconds}
    return {**(found or {"error": lines[-1][:300]}), "seconds": seconds}


@contextlib.contextmanager
def limited(command: list[str], limit: float) -> Iterator[subprocess.Popen[str]]:
    """The process, which ends with the block or at its time limit, together with everything it started."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    try:
        yield process
        process.wait()
    finally:
        timer.cancel()
        end()
        process.wait()


def show(result: Result) -> str:
    """One line."""
    if "error" in result:
        return str(result["error"])
    parts = [f"{result['step_s']:.3f} s"]
    if "tflops" in result:
        parts.append(f"{result['tokens'] / result['step_s']:,.0f} tokens/s")
        parts.append(f"{result['tflops']:.3g} TFLOP/s ({result['tflops'] / result['ceiling_tflops']:.0%})")
    places = (("gpu_gib", "GPU"), ("host_gib", "host"))
    parts += [f"{result[key]:.1f} GiB {name}" for key, name in places if key in result]
    return ", ".join(parts)


# -- the plot ----------------------------------------------------------------------------------------------------------

_LEFT, _WIDE, _ROW, _GAP = 340, 520, 22, 34
_FILLS = {"ours": "#1b6ca8", "torch": "#9aa5b1", "fsdp2": "#c9ced6", "deepspeed": "#e0b84c"}


def draw(results: list[Result]) -> str:
    """Bars of seconds per step, one group per case, each with its own scale; a line marks the goal."""
    body, y = [], 16
    for name in dict.fromkeys(result["case"] for result in results):
        group, case = [one for one in results if one["case"] == name], CASES[name]
        longest = max([one["step_s"] for one in group if "step_s" in one] + [case.goal or 0.0]) or 1.0
        body.append(f'<text x="8" y="{y + 14}" font-weight="bold">{html.escape(case.title)}</text>')
        top = y = y + _ROW
        for one in group:
            width = _WIDE * one.get("step_s", 0.0) / longest
            body += [
                f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{html.escape(label(one))}</text>',
                f'<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 5}" fill="{_FILLS[one["who"]]}"/>',
                f'<text x="{_LEFT + width + 6:.1f}" y="{y + 15}">{html.escape(show(one))}</text>',
            ]
            y += _ROW
        if case.goal:
            x = _LEFT + _WIDE * case.goal / longest
            body.append(f'<path d="M{x:.1f} {top}V{y}" stroke="#b3261e" stroke-dasharray="4 3"/>')
        y += _GAP - _ROW + 8
    style = 'font-family="sans-serif" font-size="12"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1400" height="{y}" {style}>\n' + "\n".join(body) + "\n</svg>\n"
    )


def label(result: Result) -> str:
    return f"{result['who']} {result['arguments']}".strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}")
    parser.add_argument("--engines", default=",".join(ENGINES), help="those to run")
    parser.add_argument("--short", action="store_true", help="only the cases that take a few minutes, four steps each")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a measurement may take")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"))
    options = parser.parse_args()
    chosen = [name for name, case in CASES.items() if name not in TRIES and (case.is_short or not options.short)]
    names = options.cases.split(",") if options.cases else chosen
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"there is no case {', '.join(unknown)}. Choose of {', '.join(CASES)}.")
    options.output.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for name in names:
        case = CASES[name]
        print(f"{case.title}{f' (goal {case.goal:g} s)' if case.goal else ''}", flush=True)
        for who, arguments in case.runs:
            if who not in options.engines.split(","):
                continue
            steps = options.steps or (4 if options.short else None)
            found = run(case, who, arguments, steps=steps, limit=options.limit)
            results.append({"case": name, "who": who, "arguments": arguments, **found})
            print(f"  {label(results[-1])}: {show(found)}", flush=True)
            (options.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
            (options.output / "results.svg").write_text(draw(results))
    print(f'"{options.output / "results.json"}", "{options.output / "results.svg"}"')


if __name__ == "__main__":
    main()
