"""Step time of a Llama-shaped model with Unbounded on one GPU; one JSON line a batch size.

    python benchmarks/throughput.py --size 7b --batches 2,8 --plan device_bytes=24GiB --compile

TFLOP/s = (6 x parameters + 12 x layers x hidden x sequence) x tokens / second: recomputation is not counted.
`early_updates` counts the units that the plan lets be updated inside the backward, and the drafts of them that steps
have taken and refused; with `--trace` also the part of the host optimizer's time inside backwards. Compare with
`--plan ... early_units=0`, which updates all of them after it.
`--engine torch` trains the same model resident in plain PyTorch (fp32 master weights, bf16 autocast, fused AdamW),
`--engine deepspeed` under DeepSpeed with its optimizer on the host or on NVMe.
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
from unbounded.observe import trace
from unbounded.observe.lanes import HOST_OPTIMIZER, PASS
from unbounded.observe.spans import merge, read_spans
from unbounded.zero.setup import blueprint

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
    parser.add_argument(
        "--activations",
        choices=("auto", "keep", "recompute"),
        help="what blocks keep; recompute is the model's own checkpointing (auto in Unbounded, else recompute)",
    )
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument("--max-norm", type=float, default=1.0, help="of clipping; untrained models are often above 1")
    parser.add_argument("--streamed", type=float, help="the part of host states that the GPU updates; else decided")
    parser.add_argument("--engine", default="unbounded", choices=("unbounded", "torch", "deepspeed"))
    parser.add_argument("--stage", type=int, default=3, help="of DeepSpeed")
    parser.add_argument("--optimizer", default="cpu", choices=("cpu", "nvme"), help="where DeepSpeed keeps its own")
    parser.add_argument("--trace", default=None, help="record the last two steps here")
    parser.add_argument("--fixed-batch", action="store_true", help="the same tokens every step: the loss must fall")
    options = parser.parse_args()
    options.activations = options.activations or ("auto" if options.engine == "unbounded" else "recompute")
    if options.activations == "auto" and options.engine != "unbounded":
        parser.error(f"--engine {options.engine} cannot choose activations. Give --activations keep or recompute.")
    return options


def make_model(options: argparse.Namespace) -> Any:
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
    return LlamaForCausalLM(config)


def prepare(model: Any, options: argparse.Namespace) -> None:
    model.train()
    if options.activations == "recompute":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.compile:
        for block in model.model.layers:
            block.compile()


class Unbounded:
    """The model built on the meta device and sharded by the plan."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.clip, self.max_norm = not options.no_clip, options.max_norm
        with torch.device("meta"):
            model = make_model(options).to(torch.bfloat16)
        prepare(model, options)
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
        if options.streamed is not None:
            blueprint.streamed_part = lambda machine: options.streamed
        plan: dict[str, Any] = dict(pair.split("=", 1) for pair in options.plan)
        plan |= {key: int(value) for key, value in plan.items() if value.isdigit()}
        if options.activations == "keep":
            plan["activations"] = "keep"
        self.model, self.optimizer = unbounded.shard(model, optimizer, plan or "auto")

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        for tokens in batches:
            loss = self.model(input_ids=tokens, labels=tokens).loss
            with trace.mark(PASS, "backward"):
                (loss / len(batches)).backward()
        if self.clip:
            self.optimizer.clip_grad_norm_(self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Torch:
    """Plain PyTorch, everything on the device."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.clip, self.max_norm, self.device = not options.no_clip, options.max_norm, device
        with device:
            self.model = make_model(options)
        prepare(self.model, options)
        self.numel = sum(parameter.numel() for parameter in self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, batches: list[torch.Tensor]) -> torch.Tensor:
        for tokens in batches:
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = self.model(input_ids=tokens, labels=tokens).loss
            (loss / len(batches)).backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def build(options: argparse.Namespace, device: torch.device) -> Any:
    if options.engine == "unbounded":
        return Unbounded(options)
    if options.engine == "torch":
        return Torch(options, device)
    from deepspeed_engine import DeepSpeed, settings

    batch = int(options.batches.split(",")[0])
    config = settings(stage=options.stage, optimizer=options.optimizer, batch=batch, accumulate=options.accumulate)
    return DeepSpeed(lambda: make_model(options), lambda model: prepare(model, options), config)


def make_batches(options: argparse.Namespace, batch: int, device: torch.device) -> list[torch.Tensor]:
    if options.fixed_batch:
        torch.manual_seed(1)
    return [torch.randint(0, 32000, (batch, options.sequence), device=device) for _ in range(options.accumulate)]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def early_updates(optimizer: Any, trace_path: str | None) -> dict[str, Any]:
    outlook = optimizer.updates.drafts.outlook
    found = {"units": optimizer.plan.early_units, "taken": outlook.num_taken, "refused": outlook.num_refused}
    if trace_path is not None:
        spans = read_spans(trace_path)
        updates = merge([(span.start, span.stop) for span in spans if span.lane == HOST_OPTIMIZER])
        backwards = [(span.start, span.stop) for span in spans if span.lane == PASS]
        inside = sum(max(0.0, min(b, d) - max(a, c)) for a, b in updates for c, d in backwards)
        found["part_in_backward"] = round(inside / (sum(b - a for a, b in updates) or 1.0), 3)
    return found


def main() -> None:
    options = arguments()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    began = time.perf_counter()
    engine = build(options, device)
    ready = time.perf_counter() - began
    hidden, layers = SIZES[options.size][:2]
    for batch in map(int, options.batches.split(",")):
        times, losses = [], []
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        for index in range(options.steps):
            if options.trace and index == max(0, options.steps - 2):
                trace.start(options.trace)
            if has_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            losses.append(float(engine.step(make_batches(options, batch, device))))
            if has_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
            if not losses[1:]:
                first = time.perf_counter() - began
        if options.trace:
            if options.engine == "unbounded":
                engine.optimizer.wait()
            trace.stop()
        tokens = batch * options.sequence * options.accumulate
        median = statistics.median(times[2:] or times)
        flops = (6 * engine.numel + 12 * layers * hidden * options.sequence) * tokens
        report = {
            "engine": options.engine,
            "size": options.size,
            "plan": options.plan,
            "compile": options.compile,
            "activations": options.activations,
            "batch": batch,
            "tokens": tokens,
            "params": engine.numel,
            "ready_s": round(ready, 1),
            "first_step_s": round(first, 1),
            "step_s": round(median, 4),
            "times": [round(value, 3) for value in times],
            "tflops": round(flops / median / 1e12, 1),
            "losses": [round(value, 3) for value in losses],
            "host_gib": round(resident_bytes() / 2**30, 1),
        }
        if has_gpu:
            report["gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        if options.engine == "unbounded":
            report["early_updates"] = early_updates(engine.optimizer, options.trace)
            tiers = engine.optimizer.memory()
            report["tiers"] = {tier: round(use.used_bytes / 2**30, 2) for tier, use in tiers.items()}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
