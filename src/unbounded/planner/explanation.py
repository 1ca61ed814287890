"""Describes a way to train: bytes by tier and kind, the step and its phases, the bottleneck and what removes it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from unbounded.planner.evaluation import Candidate
from unbounded.planner.plan import TIERS
from unbounded.planner.presets import UNMEASURED
from unbounded.planner.sizes import format_bytes
from unbounded.planner.step.loads import LANES
from unbounded.planner.step.prediction import NAMES, REMEDIES, Prediction

KINDS = ("weights", "gradients", "optimizer", "activations", "working memory", "buffers")


def describe(candidate: Candidate) -> list[str]:
    """The report as lines of text."""
    prediction, setup, footprint = candidate.prediction, candidate.setup, candidate.footprint
    trained = "" if footprint.trained_numel == footprint.numel else f", {count(footprint.trained_numel)} trained"
    lines = [
        f"model        {footprint.name}: {count(footprint.numel)} parameters{trained}",
        *(f"assumed      {one}" for one in _assumptions(candidate)),
        f"machine      {prediction.machine.name}: {number_of(prediction.machine.num_devices, 'device')} on "
        f"{number_of(prediction.machine.nodes, 'node')}",
        f"plan         stage {setup.stage}, {candidate.axes}, {candidate.format} states, micro-batches of "
        f"{number_of(setup.tokens, 'token')} x {setup.accumulate}",
        f"states       {_places(candidate)}",
        f"activations  {_policies(candidate)}",
        *([] if candidate.capacity is None else [f"largest      {candidate.capacity.describe()}"]),
        "",
        *bytes_table(candidate),
        "",
        f"step         {seconds(prediction.seconds)} for {number_of(prediction.tokens, 'token')}: "
        f"{prediction.tokens_per_second:,.0f} tokens/s, {prediction.tflops:.3g} TFLOP/s per device",
    ]
    for phase, taken in prediction.phases().items():
        if taken:
            slowest = max(LANES, key=lambda lane: prediction.lane(phase, lane))
            lines.append(f"             {phase:<14}{seconds(taken):>10}  paced by {NAMES[slowest]}")
    return [*lines, *bottleneck(candidate)]


def bytes_table(candidate: Candidate) -> list[str]:
    """Bytes of one rank, by kind and tier."""
    held = candidate.prediction.held
    lines = [f"{'bytes per rank':<16}" + "".join(f"{tier:>12}" for tier in TIERS)]
    for kind in KINDS:
        if any(held[tier].get(kind) for tier in TIERS):
            lines.append(f"{kind:<16}" + "".join(f"{_bytes(held[tier].get(kind, 0.0)):>12}" for tier in TIERS))
    lines.append(f"{'together':<16}" + "".join(f"{_bytes(sum(held[tier].values())):>12}" for tier in TIERS))
    return [*lines, *_process(candidate.prediction)]


def _process(prediction: Prediction) -> list[str]:
    """What the process takes of the host with its libraries, which no budget counts."""
    libraries = prediction.machine.process_bytes
    if not libraries:
        return []
    whole = format_bytes(prediction.resident_bytes)
    return [f"process      {whole} of host memory at its peak, including {format_bytes(libraries)} of libraries"]


def bottleneck(candidate: Candidate) -> list[str]:
    """What sets the pace, what a step would take without it, and what would remove it."""
    prediction = candidate.prediction
    lane, without = prediction.bottleneck, prediction.without_bottleneck()
    return [
        f"bottleneck   {NAMES[lane]}; without it a step would take {seconds(without)}",
        f"             remedy: {REMEDIES[lane]}",
    ]


def as_values(candidate: Candidate) -> dict[str, Any]:
    """The report as plain values, for JSON."""
    prediction, setup = candidate.prediction, candidate.setup
    return {
        "model": candidate.footprint.name,
        "parameters": candidate.footprint.numel,
        "trained_parameters": candidate.footprint.trained_numel,
        "assumptions": _assumptions(candidate),
        "machine": prediction.machine.name,
        "devices": prediction.machine.num_devices,
        "stage": setup.stage,
        "data": setup.data,
        "tensor": setup.tensor,
        "pipeline": setup.pipeline,
        "optimizer_format": candidate.format,
        "micro_batch_tokens": setup.tokens,
        "accumulate": setup.accumulate,
        "sequence": setup.sequence,
        "tokens_per_step": prediction.tokens,
        "step_seconds": prediction.seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "tflops_per_device": prediction.tflops,
        "bottleneck": prediction.bottleneck,
        "step_seconds_without_bottleneck": prediction.without_bottleneck(),
        "phases": prediction.phases(),
        "lanes_busy_seconds": prediction.busy(),
        "bytes_per_rank": {tier: dict(prediction.held[tier]) for tier in TIERS},
        "resident_bytes_per_rank": prediction.resident_bytes,
        "weights": {name: where.weights for name, where in candidate.places},
        "gradients": {name: where.gradients for name, where in candidate.places},
        "optimizer": {name: where.optimizer for name, where in candidate.places},
        "activations": dict(candidate.policies),
        "pack_frozen": candidate.packs,
        "largest_parameters": _largest(candidate, keeps_gradients=True),
        "largest_parameters_without_gradients": _largest(candidate, keeps_gradients=False),
    }


def _assumptions(candidate: Candidate) -> list[str]:
    """What costs take for granted, and rates if nobody has measured them."""
    is_measured = candidate.prediction.machine.name != UNMEASURED.name
    rates = [] if is_measured else ["rates of an H200 machine: this one was not measured (unbounded plan --measure)"]
    return [*candidate.footprint.assumptions, *rates]


def _largest(candidate: Candidate, *, keeps_gradients: bool) -> int | None:
    capacity = candidate.capacity
    if capacity is None or not (keeps_gradients or capacity.may_drop):
        return None
    return int(capacity.most(keeps_gradients=keeps_gradients))


def _places(candidate: Candidate) -> str:
    found = Counter((w.weights, w.gradients, w.optimizer) for _, w in candidate.places)
    parts = []
    for (weights, gradients, optimizer), number in found.most_common():
        where = weights if weights == gradients == optimizer else f"{weights} / {gradients} / {optimizer}"
        parts.append(f"{number_of(number, 'unit')} on {where}")
    mixed = any(len({*key}) > 1 for key in found)
    packed = ", frozen weights outside the device packed" if candidate.packs else ""
    return ", ".join(parts) + (" (weights / gradients / optimizer)" if mixed else "") + packed


def _policies(candidate: Candidate) -> str:
    found = Counter(policy for _, policy in candidate.policies)
    words = {"keep": "kept", "recompute": "recomputed", "host": "recomputed from inputs on the host"}
    parts = [f"{number_of(number, 'block')} {words[policy]}" for policy, number in found.most_common()]
    return ", ".join(parts) or "no blocks"


def number_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _bytes(value: float) -> str:
    return format_bytes(value) if value else "-"


def count(number: float) -> str:
    """12.3B, 1.01T, 340M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:g}"


def seconds(value: float) -> str:
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
