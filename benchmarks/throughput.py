"""Step time of a Llama-shaped model with Unbounded on one GPU; one JSON line a batch size.

    python benchmarks/throughput.py --size 7b --batches 2,8 --plan device_bytes=24GiB --compile

TFLOP/s = (6 x parameters + 12 x layers x hidden x sequence) x tokens / second: recomputation is not counted.
`--peer` trains the same model resident in plain PyTorch (fp32 master weights, bf16 autocast, fused AdamW).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import unbounded
from unbounded.zero import assembly

SIZES = {  # hidden, layers, heads, ffn
    "tiny": (256, 4, 4, 704),
    "0.1b": (768, 12, 12, 2048),
    "1.3b": (2048, 24, 16, 5504),
    "3b": (3072, 26, 24, 8192),
    "7b": (4096, 32, 32, 11008),
    "10b": (4096, 48, 32, 11008),
    "13b": (5120, 40, 40, 13824),
    "20b": (6144, 44, 48, 16512),
    "22b": (6144, 48, 48, 16512),
    "24b": (6144, 53, 48, 16512),
    "30b": (6656, 60, 52, 17920),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.3b", choices=SIZES)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batches", default="4", help="sequences a step, several separated by commas")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards a step")
    parser.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile every block")
    parser.add_argument("--keep-activations", action="store_true", help="no activation checkpointing")
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--no-stream", action="store_true", help="never update host states on the GPU")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--trace", default=None)
    parser.add_argument("--fixed-batch", action="store_true", help="the same tokens every step: the loss must fall")
    return parser.parse_args()


def build(options: argparse.Namespace) -> tuple[Any, Any, int]:
    hidden, layers, heads, ffn = SIZES[options.size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=ffn,
        vocab_size=32000,
        max_position_embeddings=options.sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device if options.peer else "meta"):
        model = LlamaForCausalLM(config)
    if not options.peer:
        model = model.to(torch.bfloat16)
    model.train()
    if not options.keep_activations:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.compile:
        for block in model.model.layers:
            block.compile()
    fused = {"fused": True} if options.peer else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **fused)
    numel = sum(parameter.numel() for parameter in model.parameters())
    if not options.peer:
        if options.no_stream:
            assembly.streamed_part = lambda threads: 0.0
        plan: dict[str, Any] = dict(pair.split("=", 1) for pair in options.plan)
        plan |= {key: int(value) for key, value in plan.items() if value.isdigit()}
        model, optimizer = unbounded.shard(model, optimizer, plan or "auto")
    return model, optimizer, numel


def step(model: Any, optimizer: Any, options: argparse.Namespace, batch: int, device: torch.device) -> torch.Tensor:
    if options.fixed_batch:
        torch.manual_seed(1)
    for _ in range(options.accumulate):
        tokens = torch.randint(0, 32000, (batch, options.sequence), device=device)
        with torch.autocast("cuda", torch.bfloat16, enabled=options.peer):
            loss = model(input_ids=tokens, labels=tokens).loss
        (loss / options.accumulate).backward()
    if not options.no_clip:
        if options.peer:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    options = arguments()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    began = time.perf_counter()
    model, optimizer, numel = build(options)
    ready = time.perf_counter() - began
    hidden, layers = SIZES[options.size][:2]
    for batch in map(int, options.batches.split(",")):
        times, losses = [], []
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        for index in range(options.steps):
            if options.trace and index == options.steps - 1:
                from unbounded.observe import trace

                trace.start(options.trace)
            if has_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            losses.append(float(step(model, optimizer, options, batch, device)))
            if has_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if not losses[1:] and not options.peer:
                first = time.perf_counter() - began
        if options.trace:
            if not options.peer:
                optimizer.wait()
            trace.stop()
        tokens = batch * options.sequence * options.accumulate
        median = statistics.median(times[2:] or times)
        flops = (6 * numel + 12 * layers * hidden * options.sequence) * tokens
        report = {
            "engine": "torch" if options.peer else "unbounded",
            "size": options.size,
            "plan": options.plan,
            "compile": options.compile,
            "batch": batch,
            "tokens": tokens,
            "params": numel,
            "ready_s": round(ready, 1),
            "step_s": round(median, 4),
            "times": [round(value, 3) for value in times],
            "tflops": round(flops / median / 1e12, 1),
            "losses": [round(value, 3) for value in losses],
            "host_gib": round(resident_bytes() / 2**30, 1),
        }
        if has_gpu:
            report["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if not options.peer:
            report["first_step_s"] = round(first, 1)
            report["tiers"] = {tier: round(use.used_bytes / 2**30, 2) for tier, use in optimizer.memory().items()}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
