"""bf16 and fp16 over parallel axes: as on one rank of that precision, clipped. An overflow on one rank skips on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unbounded
from tests.parallel import models
from tests.parallel.comparing import MAX_NORM, optimizer_of, without_dropout

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)
STEPS, BROKEN_STEP = 3, 1
PLANS: dict[str, list[dict[str, Any]]] = {
    "one": [{}],
    "two": [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2, "microbatches": 2}, {"context": 2}],
    "four": [{"tensor": 2, "pipeline": 2, "microbatches": 2, "stage": 1}],
}


def break_gradient(block: Any) -> Any:
    """Makes the gradient that comes to `block` overflow in its next backward."""

    def after(module: Any, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient * float("inf"))

    return block.register_forward_hook(after)


def train(rank: int, size: int, plans: list[dict[str, Any]], precision: str) -> list[Any]:
    """Losses, norms, skipped steps and scales; in one step a gradient overflows on the first rank of the pipeline."""
    results = []
    for plan in plans:
        model = without_dropout(models.build("llama", num_hidden_layers=2))
        plan = {**plan, "precision": precision, "loss_scale": 2.0**10}
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
        pipeline, axes = unbounded.pipeline(model), optimizer.engine.axes
        losses, norms, scales = [], [], []
        for step in range(STEPS):
            is_broken = precision == "fp16" and step == BROKEN_STEP and axes.pipeline.rank == 0
            handle = break_gradient(model.model.layers[0]) if is_broken else None
            losses.append(float(pipeline(**models.batch("llama", step))))
            norms.append(float(optimizer.clip_grad_norm_(MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
            scales.append(optimizer.loss_scale.value if optimizer.loss_scale is not None else 1.0)
            if handle is not None:
                handle.remove()
        weights = {name: value.float() for name, value in model.state_dict().items()}
        results.append((losses, norms, optimizer.skipped_steps, scales, weights))
    return results


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_over_axes_is_that_of_one_rank(ranks: Any, precision: str) -> None:
    tolerance = 1e-2 if precision == "bf16" else 2e-3
    ((losses, norms, skipped, scales, weights),) = ranks(1, train, PLANS["one"], precision)[0]
    assert skipped == (precision == "fp16")
    assert norms[0] > MAX_NORM  # so that every step is clipped
    for size, name in ((2, "two"), (4, "four")):
        for per_rank in ranks(size, train, PLANS[name], precision):
            for plan, found in zip(PLANS[name], per_rank, strict=True):
                assert found[0] == pytest.approx(losses, rel=tolerance), plan
                good = [step for step in range(STEPS) if precision == "bf16" or step != BROKEN_STEP]
                assert [found[1][step] for step in good] == pytest.approx([norms[s] for s in good], rel=5 * tolerance)
                assert (found[2], found[3]) == (skipped, scales), plan
                for key, value in weights.items():
                    assert (found[4][key] - value).norm() <= 5 * tolerance * value.norm() + 1e-3, (plan, key)
                    assert torch.isfinite(found[4][key]).all()
