"""The result of a run: its closing lines, from numbers that the loop gathered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from unbounded.observe.amounts import show_bytes, show_count, show_seconds
from unbounded.observe.lanes import LaneTotal
from unbounded.observe.progress import Tier
from unbounded.observe.report.page import read_report
from unbounded.planner.step.prediction import compare
from unbounded.planning.running_step import predict_step
from unbounded.train.options.settings import Settings


@dataclass(frozen=True)
class Summary:
    """The result of `unbounded train`; `signal` is what interrupted it, if anything did."""

    output: Path
    checkpoint: Path | None
    step: int
    num_steps: int
    num_parameters: int
    num_trained: int
    first_loss: float | None
    last_loss: float | None
    eval_loss: float | None
    tokens_per_second: float
    tflops: float
    seconds: float
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    lanes: Mapping[str, LaneTotal] = field(default_factory=dict)
    sample: str = ""
    exported: Path | None = None
    trace: Path | None = None
    signal: int | None = None
    speaks: bool = True  # whether this rank prints it
    predicted_seconds: float | None = None  # of a step, if the machine was measured
    step_seconds: float = 0.0  # the mean over all steps but the first
    first_seconds: float | None = None  # of that one

    def _repr_html_(self) -> str:
        """In a notebook: the report of the run."""
        return read_report(self.output)._repr_html_()


def predict_seconds(model: nn.Module, settings: Settings, num_ranks: int) -> float | None:
    """What a step was predicted to take, if so many ranks divide the batch; None if the machine was never measured."""
    tokens = settings.micro_batch * settings.sequence_length
    accumulate = max(1, settings.batch_tokens // (tokens * num_ranks))
    found = predict_step(model, tokens=tokens, sequence=settings.sequence_length, accumulate=accumulate)
    return found.seconds if found is not None else None


def describe_summary(summary: Summary) -> list[str]:
    """The summary as lines of text."""
    trained = f", {show_count(summary.num_trained)} of them trained" * (summary.num_trained < summary.num_parameters)
    lines = [f"parameters   {show_count(summary.num_parameters)}{trained}"]
    if summary.first_loss is not None and summary.last_loss is not None:
        lines.append(f"loss         {summary.first_loss:.4f} in the first step, {summary.last_loss:.4f} in the last")
    if summary.eval_loss is not None:
        lines.append(f"held out     {_perplexity(summary.eval_loss)}")
    lines.append(
        f"speed        {summary.tokens_per_second:,.0f} tokens/s, {summary.tflops:.3g} TFLOP/s per device, "
        f"{summary.step} of {summary.num_steps} steps in {show_seconds(summary.seconds)}"
        + (f", the first in {summary.first_seconds:.3g} s" if summary.first_seconds is not None else "")
    )
    if summary.predicted_seconds is not None and summary.step_seconds:
        lines.append(f"a step       {compare(summary.predicted_seconds, summary.step_seconds)}")
    lines += _table("memory", [(name, _describe_tier(tier)) for name, tier in summary.tiers.items()])
    lines += _table(
        "lanes", [(name, _describe_lane(t, summary.seconds)) for name, t in summary.lanes.items() if t.count]
    )
    for title, path in (
        ("checkpoint", summary.checkpoint),
        ("exported to", summary.exported),
        ("trace", summary.trace),
    ):
        if path is not None:
            lines.append(f"{title:<13}{path}")
    lines.append(f"metrics      {summary.output / 'metrics.jsonl'}")
    return lines


def _perplexity(loss: float) -> str:
    return f"loss {loss:.4f}, perplexity {math.exp(min(loss, 700.0)):.3f}"


def _describe_tier(tier: Tier) -> str:
    of = f" of {show_bytes(tier.budget_bytes)}" if tier.budget_bytes is not None else ""
    activations = f", {show_bytes(tier.activation_bytes)} of it activations" if tier.activation_bytes else ""
    return f"{show_bytes(tier.used_bytes):>10}{of}{activations}"


def _describe_lane(total: LaneTotal, seconds: float) -> str:
    moved = f", {show_bytes(total.bytes)}" if total.bytes else ""
    share = f" ({total.busy_seconds / seconds:.0%} of the run)" if seconds > 0 else ""
    return f"{total.busy_seconds:8.1f} s{share}{moved}"


def _table(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"{title if index == 0 else '':<13}{name:<16}{text}" for index, (name, text) in enumerate(rows)]
