"""Step time of a Llama- or BERT-shaped model with Unbounded on one GPU; one JSON line per batch size.

    python benchmarks/steps/throughput.py --size 7b --batches 2,8 --plan device_bytes=24GiB --compile

TFLOP/s = (6 x parameters + 12 x layers x hidden x sequence) x tokens / second: recomputation is not counted, frozen
parameters count 4, and for BERT only its blocks count, and its head for the tokens that are predicted.
`ceiling_tflops` is what a large bf16 matmul reaches in the same process. `--engine torch` trains the same model
resident in plain PyTorch (fp32 master weights, bf16 autocast, fused AdamW), `--engine fsdp2` under `fully_shard` on a
mesh of one, `--engine deepspeed` under DeepSpeed with its optimizer on the host or on NVMe.
`early_updates` counts the units that may be updated inside the backward, and their drafts that steps have used and not
used; with `--trace` also the part of the host optimizer's time inside backwards. Compare with `--plan ...
early_units=0`, which updates all of them after the backward.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import unbounded
from unbounded.observe import trace
from unbounded.observe.lanes import HOST_OPTIMIZER, PASS
from unbounded.observe.spans import merge, read_spans
from unbounded.train.step.objective import MicroBatch, summed_loss
from unbounded.zero.setup import blueprint
from unbounded.zero.step.early.drafts import Drafts

MASKED_PART = 0.15
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes, or a BERT's."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    key_heads: int | None = None
    vocabulary: int = 32_000
    is_bert: bool = False

    def flops_per_token(self, numel: int, trained: int, sequence: int) -> float:
        parameters: float = 6 * trained + 4 * (numel - trained)
        if self.is_bert:
            head = self.hidden * (self.vocabulary + self.hidden)
            parameters = 6 * (12 * self.layers * self.hidden**2 + MASKED_PART * head)
        return parameters + 12 * self.layers * self.hidden * sequence


SIZES = {
    "tiny": Shape(256, 4, 4, 704),
    "narrow": Shape(64, 12, 4, 176, vocabulary=512),
    "tiny-bert": Shape(128, 2, 2, 512, vocabulary=512, is_bert=True),
    "0.1b": Shape(768, 12, 12, 2048),
    "bert-large": Shape(1024, 24, 16, 4096, vocabulary=30_528, is_bert=True),
    "1.3b": Shape(2048, 24, 16, 5504),
    "3b": Shape(3072, 26, 24, 8192),
    "7b": Shape(4096, 32, 32, 11008),
    "8b": Shape(4096, 32, 32, 14336, key_heads=8, vocabulary=128_256),  # Llama 3
    "10b": Shape(4096, 48, 32, 11008),
    "13b": Shape(5120, 40, 40, 13824),
    "14.8b": Shape(5120, 48, 40, 13824, key_heads=8, vocabulary=152_064),  # Qwen 2.5
    "20b": Shape(6144, 44, 48, 16512),
    "22b": Shape(6144, 48, 48, 16512),
    "24b": Shape(6144, 52, 48, 16512),
    "27b": Shape(6144, 59, 48, 16512),
    "30b": Shape(6656, 60, 52, 17920),
    "45b": Shape(8192, 55, 64, 22016),
    "70.6b": Shape(8192, 80, 64, 28672, key_heads=8, vocabulary=128_256),  # Llama 3
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.3b", choices=SIZES)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batches", default="4", help="sequences per step, several separated by commas")
    parser.add_argument("--accumulate", type=int, default=1, help="backwards per step")
    parser.add_argument("--plan", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compile every block")
    parser.add_argument(
        "--activations",
        choices=("auto", "keep", "recompute"),
        help="what blocks keep; recompute is the model's own checkpointing (default: auto, for peers recompute)",
    )
    parser.add_argument("--no-clip", action="store_true")
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="clip to this norm; untrained models are often above 1"
    )
    parser.add_argument(
        "--streamed", type=float, help="the part of host states that the GPU updates (default: decided by the plan)"
    )
    parser.add_argument("--one-part", action="store_true", help="no unit's moments are updated later than its weights")
    parser.add_argument("--lora", type=int, help="train adapters of this rank (only Unbounded)")
    parser.add_argument("--muon", action="store_true", help="Muon for the blocks' matrices, AdamW for the rest (ours)")
    parser.add_argument("--engine", default="unbounded", choices=("unbounded", "torch", "fsdp2", "deepspeed"))
    parser.add_argument("--offload", action="store_true", help="FSDP2's parameters and optimizer on the host")
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
    shape: Shape = SIZES[options.size]
    common = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": options.sequence,
        "attn_implementation": "sdpa",
    }
    if shape.is_bert:
        return BertForMaskedLM(BertConfig(**common))  # its dropout is on
    return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=shape.key_heads or shape.heads, use_cache=False))


def blocks_of(model: Any) -> Any:
    return model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers


def prepare(model: Any, options: argparse.Namespace) -> None:
    model.train()
    if options.activations == "recompute":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if options.compile and options.engine != "unbounded":  # whose plan says so
        for block in blocks_of(model):
            block.compile()


def adapt(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """The model's own loss; for BERT its head runs only on the tokens that are predicted, as in its training."""
    if "places" not in batch:
        return model(**batch).loss  # type: ignore[no-any-return]
    part = MicroBatch(batch["input_ids"], batch["labels"], places=batch["places"])
    return summed_loss(model, part) / len(batch["places"])


def count(model: Any) -> tuple[int, int]:
    """All parameters, and the trained ones."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def make_optimizer(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **options)


def make_optimizers(model: Any, *, muon: bool) -> Any:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not muon:
        return make_optimizer(trained)
    inner = [parameter for parameter in blocks_of(model).parameters() if parameter.ndim == 2]
    chosen = set(map(id, inner))
    rest = [parameter for parameter in trained if id(parameter) not in chosen]
    return [torch.optim.Muon(inner, lr=1e-4, adjust_lr_fn="match_rms_adamw"), make_optimizer(rest)]


class Unbounded:
    """The model built on the meta device and sharded by the plan."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.clip, self.max_norm = not options.no_clip, options.max_norm
        with torch.device("meta"):
            model = make_model(options).to(torch.bfloat16)
        prepare(model, options)
        model = adapt(model, options.lora) if options.lora else model
        self.numel, self.trained = count(model)
        optimizer = make_optimizers(model, muon=options.muon)
        if options.streamed is not None:
            blueprint.streamed_part = lambda machine: options.streamed
        if options.one_part:
            Drafts.num_split = lambda _: 0
        plan: dict[str, Any] = dict(pair.split("=", 1) for pair in options.plan)
        plan |= {key: int(value) for key, value in plan.items() if value.isdigit()}
        plan |= {key: value == "true" for key, value in plan.items() if value in ("true", "false")}
        if options.activations == "keep":
            plan["activations"] = "keep"
        if options.compile:
            plan["compile"] = True
        self.model, self.optimizer = unbounded.shard(model, optimizer, plan or "auto")

    def step(self, batches: list[Batch]) -> torch.Tensor:
        for batch in batches:
            loss = loss_of(self.model, batch)
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
        self.numel, self.trained = count(self.model)
        self.place(options)
        self.optimizer = make_optimizer(self.model.parameters(), fused=True)

    def place(self, options: argparse.Namespace) -> None:
        """Leaves the model where it is."""

    def casts(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16)

    def step(self, batches: list[Batch]) -> torch.Tensor:
        for batch in batches:
            with self.casts():
                loss = loss_of(self.model, batch)
            (loss / len(batches)).backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class FSDP2(Torch):
    """`fully_shard` on every block and the model, on a mesh of one; with `--offload` everything waits on the host."""

    def place(self, options: argparse.Namespace) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        backend = "cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        casts = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policies = {"mp_policy": casts, "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy()}
        for module in (*blocks_of(self.model), self.model):
            fully_shard(module, **policies)

    def casts(self) -> Any:
        return contextlib.nullcontext()


def build(options: argparse.Namespace, device: torch.device) -> Any:
    if options.engine == "unbounded":
        return Unbounded(options)
    if options.engine != "deepspeed":
        return {"torch": Torch, "fsdp2": FSDP2}[options.engine](options, device)
    from deepspeed_engine import DeepSpeed, settings

    batch = int(options.batches.split(",")[0])
    config = settings(stage=options.stage, optimizer=options.optimizer, batch=batch, accumulate=options.accumulate)
    return DeepSpeed(lambda: make_model(options), lambda model: prepare(model, options), config)


def make_batches(options: argparse.Namespace, batch: int, device: torch.device) -> list[Batch]:
    if options.fixed_batch:
        torch.manual_seed(1)
    return [make_batch(SIZES[options.size], (batch, options.sequence), device) for _ in range(options.accumulate)]


def make_batch(shape: Shape, size: tuple[int, int], device: torch.device) -> Batch:
    tokens = torch.randint(0, shape.vocabulary, size, device=device)
    if not shape.is_bert:
        return {"input_ids": tokens, "labels": tokens}
    places = torch.randperm(tokens.numel(), device=device)[: round(MASKED_PART * tokens.numel())]
    return {"input_ids": tokens, "labels": tokens, "places": places}


def matmul_tflops(device: torch.device) -> float:
    """What a large bf16 matmul reaches, the best of five."""
    size = 8192 if device.type == "cuda" else 512
    one = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(5):
            one @ one
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / 5)
    return 2 * size**3 / best / 1e12


class Clock:
    """Times of steps. On a GPU they are read from it in the end, so that nobody waits for it after each step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def times(self) -> list[float]:
        if self._device.type != "cuda":
            return [stop - start for start, stop in self._spans]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in self._spans]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def early_updates(optimizer: Any, trace_path: str | None) -> dict[str, Any]:
    drafts = optimizer.updates.drafts
    outlook = drafts.outlook
    found = {"units": optimizer.plan.early_units, "taken": outlook.num_taken, "refused": outlook.num_refused}
    found["in_two_parts"] = drafts.num_split()
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
    ceiling = matmul_tflops(device)
    for batch in map(int, options.batches.split(",")):
        losses: list[torch.Tensor] = []
        clock = Clock(device)
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        for index in range(options.steps):
            if options.trace and index == max(0, options.steps - 2):
                trace.start(options.trace)
            batches = make_batches(options, batch, device)
            with clock.measure():
                losses.append(engine.step(batches))
            if index == 0:
                float(losses[0])
                first = time.perf_counter() - began
        times = clock.times()
        if options.trace:
            if options.engine == "unbounded":
                engine.optimizer.wait()
            trace.stop()
        tokens = batch * options.sequence * options.accumulate
        median = statistics.median(times[2:] or times)
        flops = SIZES[options.size].flops_per_token(engine.numel, engine.trained, options.sequence) * tokens
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
            "tflops": float(f"{flops / median / 1e12:.4g}"),
            "ceiling_tflops": float(f"{ceiling:.4g}"),
            "losses": [round(float(value), 3) for value in losses],
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
