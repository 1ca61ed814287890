"""Predictions for today's nodes with our formats, and the papers' own rates: the table of docs/planner.md.

python benchmarks/planner/planner_today.py
"""

from __future__ import annotations

from unbounded.planner.evaluation import Request
from unbounded.planner.models.configs import read_model
from unbounded.planner.models.footprint import COMPILED, STATE_BYTES, footprint_of
from unbounded.planner.presets import find_machine
from unbounded.planner.search import search

CASES = (  # model, machine, tokens per step
    ("llama-7b", "rtx4090", 2**16),
    ("llama-22b", "rtx4090", 2**16),
    ("llama-70b", "h200:8", 2**20),
    ("gpt3-175b", "h200:64", 2**20),
    ("gpt3-175b", "b200:64", 2**20),
    ("llama-405b", "h200:128", 2**22),
    ("gpt-1t", "h200:8", 2**19),
    ("gpt-1t", "h200:512", 2**21),
    ("gpt-1t", "b200:512", 2**21),
)
PAPERS = (  # what, GPUs, tokens per second
    ("ZeRO-Infinity, 1T on 16 V100", 16, 16 * 27e12 / 8e12),
    ("ZeRO-Infinity, 1T on 512 V100", 512, 512 * 49e12 / 8e12),
    ("Megatron-LM, 175B on 1,536 A100 (145.6B measured)", 1536, 1536 * 148e12 / (8 * 175e9)),
    ("Megatron-LM, 1T on 3,072 A100", 3072, 3072 * 163e12 / 8.06e12),
)


def main() -> None:
    print(
        "| model | machine | axes | states | step | tokens/s | TFLOP/s per GPU | paced by "
        "| GPU hours per billion tokens |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model, name, tokens in CASES:
        machine = find_machine(name)
        request = Request(tokens, formats={"exact": STATE_BYTES["bf16", "exact"]}, stages=(1, 3))
        found = search(footprint_of(read_model(model), kernels=COMPILED), machine, request)
        prediction, setup = found.prediction, found.setup
        tiers = ", ".join(
            f"{prediction.tier_bytes(tier) / 2**30:,.0f} GiB {tier}"
            for tier in ("device", "host", "disk")
            if prediction.tier_bytes(tier) > 2**28
        )
        hours = machine.num_devices * 1e9 / prediction.tokens_per_second / 3600
        print(
            f"| {model} | {name} | stage {setup.stage}, {setup.data} x {setup.tensor} x {setup.pipeline} | {tiers} | "
            f"{prediction.seconds:.3g} s | {prediction.tokens_per_second:,.0f} | {prediction.tflops:.0f} | "
            f"{prediction.bottleneck} | {hours:,.0f} |",
            flush=True,
        )
    for what, gpus, rate in PAPERS:
        print(f"| {what} | | | | | {rate:,.0f} | | | {gpus * 1e9 / rate / 3600:,.0f} |")


if __name__ == "__main__":
    main()
