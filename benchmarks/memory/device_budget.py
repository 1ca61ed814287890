"""Checks that `device_bytes` bounds what the driver counts: every case in its own process, one line each.

    python benchmarks/memory/device_budget.py                         # all of them
    python benchmarks/memory/device_budget.py --cases 8b-8k,3b-64k
    python benchmarks/memory/device_budget.py --cases 8b-8k --fraction    # also limit torch's allocator to the budget
    python benchmarks/memory/device_budget.py --list

A thread polls the driver's count every 2 ms from building to the end: what the device has given out minus what it had
before the process began. A case that is refused says so in one line, which counts as a kept budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A Llama shape and its batches."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    ffn: int
    vocabulary: int
    sequence: int
    rows: int
    accumulate: int = 1
    compiled: bool = False
    lora: int = 0
    tied: bool = False


CASES = {
    "7b-16k": Case(4096, 32, 32, 32, 11008, 32000, 2048, 8),
    "7b-16k-4x-compiled": Case(4096, 32, 32, 32, 11008, 32000, 2048, 8, accumulate=4, compiled=True),
    "8b-8k": Case(4096, 32, 32, 8, 14336, 128256, 8192, 2),
    "70b-lora": Case(8192, 80, 64, 8, 28672, 128256, 8192, 1, lora=16),
    "3b-64k": Case(3072, 26, 24, 24, 8192, 32000, 65536, 1),
    "1b-512-256k": Case(2048, 16, 32, 8, 8192, 262144, 512, 32, tied=True),
    "1b-64k-128k": Case(2048, 16, 32, 8, 8192, 128256, 65536, 1, tied=True),
    "1b-2k-compiled": Case(2048, 16, 32, 8, 8192, 128256, 2048, 8, compiled=True),
    "3b-4k-4x": Case(3072, 28, 24, 8, 8192, 128256, 4096, 4, accumulate=4, tied=True),
    "3b-32k-compiled": Case(3072, 28, 24, 8, 8192, 128256, 32768, 1, compiled=True),
    "7b-512": Case(4096, 32, 32, 32, 11008, 50304, 512, 32),
    "8b-2k-compiled": Case(4096, 32, 32, 8, 14336, 128256, 2048, 8, compiled=True),
    "8b-32k": Case(4096, 32, 32, 8, 14336, 128256, 32768, 1),
    "9b-4k-256k": Case(3584, 42, 16, 8, 14336, 256000, 4096, 4, tied=True),
    "14b-2k-2x": Case(5120, 40, 40, 8, 17920, 100352, 2048, 4, accumulate=2),
}


class Watch:
    """The most that the driver has given to this process, including its context."""

    def __init__(self) -> None:
        self.peak_bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def start(self, before_bytes: int) -> None:
        self._before = before_bytes
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.wait(0.002):
            free, total = torch.cuda.mem_get_info()
            self.peak_bytes = max(self.peak_bytes, total - free - self._before)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def build(case: Case, budget: str) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    import unbounded

    config = LlamaConfig(
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.key_heads,
        intermediate_size=case.ffn,
        vocab_size=case.vocabulary,
        max_position_embeddings=case.sequence,
        tie_word_embeddings=case.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    if case.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=case.lora, target_modules="all-linear"))
    if case.compiled:
        for block in model.model.layers:
            block.compile()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    return unbounded.shard(model, optimizer, {"device_bytes": budget})


def train(case: Case, model: Any, optimizer: Any, steps: int) -> tuple[list[float], float]:
    times, loss = [], torch.zeros(())
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(case.accumulate):
            tokens = torch.randint(0, case.vocabulary, (case.rows, case.sequence), device="cuda")
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / case.accumulate).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times, float(loss.detach())


def run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from unbounded.errors import BudgetError
    from unbounded.planner.sizes import parse_bytes

    case, budget, watch = CASES[name], parse_bytes(options.budget), Watch()
    report: dict[str, Any] = {"case": name, "budget": budget / GIB}
    before = options.before_bytes
    watch.start(before)
    if options.fraction:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(budget / total)
    try:
        model, optimizer = build(case, options.budget)
        report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        report["states"] = {tier: round(use.used_bytes / GIB, 1) for tier, use in optimizer.memory().items()}
        torch.cuda.reset_peak_memory_stats()
        times, report["loss"] = train(case, model, optimizer, options.steps)
        report |= {"seconds": round(statistics.median(times[1:] or times), 3), "times": [round(t, 2) for t in times]}
    except BudgetError as error:
        report["refused"] = str(error)
    watch.stop()
    stats = torch.cuda.memory_stats()
    report["allocated"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    report["reserved"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
    report["driver"] = round(watch.peak_bytes / GIB, 2)
    report["retries"] = stats.get("num_alloc_retries", 0)
    report["kept"] = watch.peak_bytes <= budget
    return report


def given_out() -> int:
    """What the device has given out before a case begins, read by a process that has ended."""
    code = "import torch; free, total = torch.cuda.mem_get_info(); print(total - free)"
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    context = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
    )
    if context.returncode == 0 and context.stdout.strip():
        return int(context.stdout.split()[0]) * 2**20
    return max(0, int(alone.stdout) - GIB // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="several separated by commas")
    parser.add_argument("--budget", default="24GiB")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fraction", action="store_true", help="limit torch's allocator to the budget, as a user may")
    parser.add_argument("--timeout", type=int, default=400, help="seconds a case may take")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--alone", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--before-bytes", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        for name, case in CASES.items():
            print(f"{name:20} {asdict(case)}")
        return
    if options.alone:
        print(json.dumps(run(options.alone, options)))
        return
    for name in options.cases.split(","):
        if name not in CASES:
            parser.error(f"there is no case {name!r}. The cases are {', '.join(CASES)}.")
        passed = ["--budget", options.budget, "--steps", str(options.steps), "--before-bytes", str(given_out())]
        command = [sys.executable, __file__, "--alone", name, *passed, *(["--fraction"] if options.fraction else [])]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
        except subprocess.TimeoutExpired:
            print(json.dumps({"case": name, "failed": f"no end after {options.timeout} s"}), flush=True)
            continue
        line = ended.stdout.strip().splitlines()[-1] if ended.returncode == 0 else ""
        print(line or json.dumps({"case": name, "failed": ended.stderr.strip()[-600:]}), flush=True)


if __name__ == "__main__":
    main()
