"""Compares predictions with measurements: step time, peak device memory and peak host memory over many trainings.

    python benchmarks/planner/planner_check.py              # on a GPU: 0.1B to 70B, 2k to 64k tokens, all tiers, LoRA
    python benchmarks/planner/planner_check.py --cpu        # small models on the CPU
    python benchmarks/planner/planner_check.py --part 1/4   # a quarter of the cases
    python benchmarks/planner/planner_check.py --cases 3b-16k,7b-lora

The machine is measured first (under 30 s), and predictions use nothing else. Each case runs in its own process and is
predicted before its first step. One line of JSON per case goes to `--out`, to which later parts append.

Where other programs share the machine, `--each` measures it before and after each case. A case during which it became
another machine (a rate that counts differs by more than a tenth) runs again, twice at most, and is marked with * if it
never ran on one machine; the summary counts steps with and without those.

Each row prints what was predicted, what was measured, and the error.
On a CPU, activations are in the allocator's heap, which keeps much of what was freed. A second process of each case
gives it back at once, so that "host" is what tensors and libraries need; "resident" is the first process's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

SIZES: dict[str, tuple[int, ...]] = {  # hidden, layers, heads, ffn, vocabulary, and heads of keys if they are fewer
    "tiny": (128, 3, 4, 352, 1024),
    "small": (256, 4, 4, 704, 2048),
    "deep": (192, 10, 4, 512, 1024),
    "0.1b": (768, 12, 12, 2048, 32000),
    "1.3b": (2048, 24, 16, 5504, 32000),
    "3b": (3072, 26, 24, 8192, 32000),
    "7b": (4096, 32, 32, 11008, 32000),
    "13b": (5120, 40, 40, 13824, 32000),
    "22b": (6144, 48, 48, 16512, 32000),
    "70b": (8192, 80, 64, 28672, 128256, 8),
}
HOST = {"weights": "host", "optimizer": "host"}
STEP, MEMORY, STEADY = 0.15, 0.05, 0.1
RATES = ("device_bandwidth", "host_bandwidth", "host_thread_rate")
DISK_RATES = ("disk_read", "disk_write")
SETTLED = 12  # steps, where the engine tries how many units to update in two parts: the last half is timed
WARM_STEPS = 2  # at least so many are not timed, if there are more
# glibc and mimalloc give back what is freed, and processes take much longer.
NOTHING_KEPT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MIMALLOC_PURGE_DELAY": "0"}


@dataclass(frozen=True)
class Case:
    """One training: `rows` sequences in each of `accumulate` backwards. With `early`, nothing is clipped, and updates
    begin in the backward; otherwise they follow it."""

    size: str
    rows: int
    sequence: int = 2048
    accumulate: int = 1
    plan: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    steps: int = 6
    early: bool = False


GPU = {
    "0.1b-2k": Case("0.1b", 1),
    "0.1b-32k": Case("0.1b", 16),
    "1.3b-8k": Case("1.3b", 4),
    "1.3b-32k": Case("1.3b", 16),
    "1.3b-64k-in-4": Case("1.3b", 8, accumulate=4),
    "1.3b-long": Case("1.3b", 2, sequence=16384),
    "1.3b-recompute": Case("1.3b", 16, plan={"activations": "recompute"}),
    "1.3b-disk": Case("1.3b", 8, plan={"optimizer": "disk"}, steps=4),
    "3b-4k": Case("3b", 2),
    "3b-16k": Case("3b", 8),
    "3b-15gib": Case("3b", 8, plan={"device_bytes": "15GiB"}, steps=SETTLED),
    "3b-host-in-4": Case("3b", 2, accumulate=4, plan=HOST, steps=SETTLED),
    "3b-compact": Case("3b", 8, plan={**HOST, "optimizer_format": "compact"}),
    "7b-4k": Case("7b", 2),
    "7b-16k": Case("7b", 8),
    "7b-24gib": Case("7b", 8, plan={"device_bytes": "24GiB"}, steps=SETTLED),
    "7b-24gib-early": Case("7b", 8, plan={"device_bytes": "24GiB"}, steps=14, early=True),
    "7b-lora": Case("7b", 4, lora=True),
    "13b-4k": Case("13b", 2, steps=SETTLED),
    "13b-lora-24gib": Case("13b", 2, lora=True, plan={"device_bytes": "24GiB"}, steps=4),
    "22b-2k": Case("22b", 1, steps=3),  # half a minute each; what blocks keep has settled in the third
    "70b-lora": Case("70b", 4, lora=True, steps=3),
    "70b-lora-24gib": Case("70b", 4, lora=True, plan={"device_bytes": "24GiB"}, steps=3),
}
_DISK = {"weights": "disk", "optimizer": "disk"}
CPU = {
    "tiny": Case("tiny", 8, 128, steps=20),
    "tiny-long": Case("tiny", 2, 1024, steps=20),
    "tiny-in-4": Case("tiny", 2, 128, accumulate=4, steps=20),
    "tiny-host": Case("tiny", 8, 128, plan=HOST, steps=20),
    "tiny-disk": Case("tiny", 8, 128, plan={"optimizer": "disk"}, steps=20),
    "tiny-all-disk": Case("tiny", 8, 128, plan=_DISK, steps=20),
    "small": Case("small", 8, 256, steps=10),
    "small-wide-batch": Case("small", 16, 256, steps=10),
    "small-in-4": Case("small", 4, 256, accumulate=4, steps=10),
    "small-host": Case("small", 8, 256, plan=HOST, steps=10),
    "small-disk": Case("small", 8, 256, plan={"optimizer": "disk"}, steps=10),
    "small-recompute": Case("small", 8, 256, plan={"activations": "recompute"}, steps=10),
    "small-lora": Case("small", 8, 256, lora=True, steps=10),
    "deep": Case("deep", 8, 128, steps=10),
    "deep-recompute": Case("deep", 8, 128, plan={"activations": "recompute"}, steps=10),
    "deep-host-in-2": Case("deep", 4, 128, accumulate=2, plan=HOST, steps=10),
    "deep-all-disk": Case("deep", 8, 128, plan=_DISK, steps=10),
    "deep-lora": Case("deep", 8, 128, lora=True, steps=10),
    "0.1b": Case("0.1b", 2, 256, steps=4),
    "0.1b-host": Case("0.1b", 2, 256, plan=HOST, steps=4),
    "0.1b-disk": Case("0.1b", 2, 256, plan={"optimizer": "disk"}, steps=4),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--cases", default="", help="names, separated by commas")
    parser.add_argument("--part", default="1/1", metavar="I/N")
    parser.add_argument(
        "--machine", help="a machine file; if it does not exist, the machine is measured and saved there"
    )
    parser.add_argument("--each", action="store_true", help="measure before and after each case: the machine is shared")
    parser.add_argument("--disk-path", default=".", help="where the disk tier is")
    parser.add_argument("--out", default="build/planner_check.jsonl")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a case may take")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cases = CPU if options.cpu else GPU
    if options.child:
        print(json.dumps(run_case(cases[options.child], Path(options.machine), options.disk_path)), flush=True)
        os._exit(0)  # nothing waits for the last update, which takes half a minute with states on disk
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    machine = Path(options.machine or out.with_name(f"machine-{'cpu' if options.cpu else 'gpu'}.json"))
    rows = []
    if options.each or not machine.exists():
        measure(machine, options.disk_path)
    for name in chosen(cases, options):
        row = steadily(name, machine, options) if options.each else in_child(name, machine, options, {})
        if options.cpu and "error" not in row:
            exact = in_child(name, machine, options, NOTHING_KEPT)
            row = {**row, "resident_bytes": row["host_bytes"], "host_bytes": exact.get("host_bytes", 0)}
        rows.append({"case": name, **row})
        show(rows[-1])
        with out.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    summarize(rows)


def steadily(name: str, machine: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs a case until the machine is the same before and after it, three times at most."""
    for _ in range(3):
        before = json.loads(machine.read_text())
        row = in_child(name, machine, options, {})
        measure(machine, options.disk_path)
        if "error" in row:
            return row
        row["drift"] = drift(before, json.loads(machine.read_text()), uses_disk=row["disk_bytes"] > 0)
        if row["drift"] <= STEADY:
            break
    return row


def drift(before: dict[str, Any], after: dict[str, Any], *, uses_disk: bool) -> float:
    """By what part the rates that count for a step have changed."""
    products = "fp32_flops" if before["is_cpu"] else "matmul_flops"  # what the cases compute in
    names = [products, *RATES, *(DISK_RATES if uses_disk else ())]
    return float(max(abs(after[name] / before[name] - 1.0) for name in names if before[name]))


def chosen(cases: dict[str, Case], options: argparse.Namespace) -> list[str]:
    if options.cases:
        names = str(options.cases).split(",")
        if unknown := [name for name in names if name not in cases]:
            sys.exit(f"there is no case {', '.join(unknown)}. The cases are {', '.join(cases)}.")
        return names
    index, number = map(int, options.part.split("/"))
    return list(cases)[index - 1 :: number]


def measure(path: Path, disk_path: str) -> None:
    import unbounded

    began = time.perf_counter()
    unbounded.Machine.measure(disk_path, save=False).save(path)
    print(f"measured the machine in {time.perf_counter() - began:.1f} s", flush=True)


def in_child(name: str, machine: Path, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--machine", str(machine), "--disk-path", options.disk_path]
    command += ["--cpu"] * options.cpu
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=options.timeout,
            check=False,
            env={**os.environ, **environment},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {options.timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": " ".join(done.stderr.strip().splitlines()[-1:])}
    return dict(json.loads(lines[-1]))


def build(case: Case, disk_path: str) -> tuple[Any, Any]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import unbounded

    hidden, layers, heads, ffn, vocabulary, *key_heads = SIZES[case.size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads[0] if key_heads else heads,
        intermediate_size=ffn,
        vocab_size=vocabulary,
        max_position_embeddings=case.sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        if torch.cuda.is_available():
            model = model.to(torch.bfloat16)
        if case.lora:
            import peft

            adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
            model = peft.get_peft_model(model, adapters)
            if torch.cuda.is_available():
                model = model.to(torch.bfloat16)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    plan = {"disk_path": disk_path, "early_units": None if case.early else 0, **case.plan}
    return unbounded.shard(model, optimizer, plan)


def run_case(case: Case, machine_path: Path, disk_path: str) -> dict[str, Any]:
    import torch

    import unbounded
    from unbounded.planning.running_step import predict_step

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    torch.zeros(1, device=device)
    imported = import_models(case)
    model, optimizer = build(case, disk_path)
    tokens = case.rows * case.sequence
    machine = unbounded.Machine.load(machine_path)
    predict = partial(predict_step, model, tokens=tokens, sequence=case.sequence, accumulate=case.accumulate)
    predicted = predict(machine=machine)
    forget_peak()
    times = train(case, model, optimizer)
    if case.early:  # whether a step clips is not known before it has run
        predicted = predict(machine=machine)
    assert predicted is not None, "predicted not to fit"
    return {
        "tokens": tokens * case.accumulate,
        "predicted_seconds": predicted.seconds,
        "seconds": typical(times[-6:] if case.early else times),  # drafts take a while to find their number
        "predicted_device_bytes": predicted.tier_bytes("device") if has_gpu else 0.0,
        "device_bytes": torch.cuda.max_memory_allocated() if has_gpu else 0,
        "predicted_host_bytes": predicted.resident_bytes + imported,
        "host_bytes": own_memory("VmHWM"),
        "disk_bytes": predicted.tier_bytes("disk"),
        "process_bytes": machine.process_bytes + imported,
        "bottleneck": predicted.bottleneck,
        "phases": predicted.phases(),
        "held": predicted.held,
        "policies": Counter(policy for _, policy in optimizer.plan.activations or ()),
        "reserved_bytes": torch.cuda.max_memory_reserved() if has_gpu else 0,
        "times": times,
    }


def import_models(case: Case) -> int:
    """What the script's own libraries take, which are no part of what `Machine.measure()` has seen."""
    before = own_memory("VmRSS")
    from transformers import LlamaForCausalLM  # noqa: F401

    if case.lora:
        import peft  # noqa: F401
    return own_memory("VmRSS") - before


def train(case: Case, model: Any, optimizer: Any) -> list[float]:
    """Seconds of each step."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = []
    for _ in range(case.steps):
        start = time.perf_counter()
        for _ in range(case.accumulate):
            batch = torch.randint(0, SIZES[case.size][4], (case.rows, case.sequence), device=device)
            loss = model(input_ids=batch, labels=batch).loss / case.accumulate
            loss.backward()
        optimizer.clip_grad_norm_(1e9 if case.early else 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def typical(times: list[float]) -> float:
    return statistics.median(warmed(times))


def warmed(times: list[float]) -> list[float]:
    """Steps that count. An update runs in the next step's forward, so the first of all has none; and libraries and
    allocators take some steps to find all they need."""
    return times[min(max(WARM_STEPS, len(times) // 2), len(times) - 1) :]


def own_memory(field: str) -> int:
    """Bytes of this process: "VmRSS" is its resident set, "VmHWM" the most that it was since `forget_peak`."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def compared(row: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """What was predicted and what was measured, as far as this case has it."""
    pairs = {
        "step": ("predicted_seconds", "seconds"),
        "device": ("predicted_device_bytes", "device_bytes"),
        "host": ("predicted_host_bytes", "host_bytes"),
        "resident": ("predicted_host_bytes", "resident_bytes"),
    }
    return {
        name: (row[predicted], row[measured])
        for name, (predicted, measured) in pairs.items()
        if row.get(measured) and (name != "host" or row[measured] > 2**30 or row.get("device_bytes") == 0)
    }


def show(row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{row['case']:<18} {row['error']}", flush=True)
        return
    columns = []
    for name, (predicted, measured) in compared(row).items():
        values = f"{predicted:8.3f} s {measured:8.3f} s"
        if name != "step":
            values = f"{name} {predicted / 2**30:7.2f} {measured / 2**30:7.2f} GiB"
        columns.append(f"{values} {predicted / measured - 1:+6.1%}")
    mark = "" if is_steady(row) else " *"
    print(f"{row['case']:<18} {'   '.join(columns)}   {row['bottleneck']}{mark}", flush=True)


def is_steady(row: dict[str, Any]) -> bool:
    return float(row.get("drift", 0.0)) <= STEADY


def summarize(rows: list[dict[str, Any]]) -> None:
    good = [row for row in rows if "error" not in row]
    for name, limit in (("step", STEP), ("device", MEMORY), ("host", MEMORY), ("resident", MEMORY)):
        report(name, limit, good)
    if steady := [row for row in good if not all(map(is_steady, good)) and is_steady(row)]:
        report("step", STEP, steady, " on a machine that stayed the same")


def report(name: str, limit: float, rows: list[dict[str, Any]], where: str = "") -> None:
    pairs = [compared(row)[name] for row in rows if name in compared(row)]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    if errors:
        inside = sum(error <= limit for error in errors)
        median = statistics.median(errors)
        print(f"{name}: {inside} of {len(errors)} within {limit:.0%}{where}, median error {median:.1%}")


if __name__ == "__main__":
    main()
