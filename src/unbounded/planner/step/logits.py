"""Device memory of the loss: all logits at once if they are few, otherwise one tile at a time."""

from __future__ import annotations

from unbounded.planner.models.footprint import Footprint
from unbounded.planner.step.loads import Setup

# Logits that exist at a time: 1,500 rows of 128k classes, enough for products at a GPU's full rate.
TILE_BYTES = {"cuda": 384 * 2**20, "cpu": 64 * 2**20}
# One tile of logits takes at most a 48th of a device's budget, unless that is less than this.
BUDGET_PARTS, LEAST_TILE_BYTES = 48, 16 * 2**20
# Besides logits, bytes per token and hidden element: the last norm's input and what it divides by in fp32, its output,
# and the gradient of that. The head's gradient is there, and its place in the unit's.
HIDDEN_BYTES, HEAD_COPIES = 12, 2


def tile_bytes(device_type: str, device_bytes: float | None) -> int:
    """Bytes of logits that a model on such a device makes at a time."""
    within = max(LEAST_TILE_BYTES, int(device_bytes) // BUDGET_PARTS) if device_bytes else 2**62
    return min(TILE_BYTES[device_type], within)


def loss_bytes(footprint: Footprint, setup: Setup) -> float:
    """At the peak of the loss of one micro-batch."""
    logits = setup.tokens * footprint.vocabulary * footprint.states.weights / setup.tensor
    head = _trained_head(footprint) * footprint.states.gradients / setup.tensor
    hidden = setup.tokens * footprint.hidden * HIDDEN_BYTES * footprint.states.weights / 2
    if not setup.logits_tile_bytes or logits <= setup.logits_tile_bytes:
        # The loss itself, or its gradient while the head's is made from it.
        return hidden + max(setup.tokens * footprint.logits_bytes / setup.tensor, logits + HEAD_COPIES * head)
    return setup.logits_tile_bytes + hidden + HEAD_COPIES * head


def _trained_head(footprint: Footprint) -> int:
    """Elements of the head that get a gradient: none if it is frozen."""
    outside = max((part.trained for part in footprint.parts if not part.is_block), default=0)
    return min(footprint.vocabulary * footprint.hidden, outside)
