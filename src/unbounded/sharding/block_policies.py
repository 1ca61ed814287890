"""What the blocks of a model keep between their forward and their backward: `unbounded.checkpoint_activations`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from unbounded.activations.activations import Activations, attach_policies
from unbounded.activations.checkpointed import attached_to
from unbounded.activations.choice import Blocks, choose_policies, pick_blocks
from unbounded.activations.tiled.feedforward import Sizes, find_feed_forwards, pick_feed_forwards
from unbounded.errors import PlanError
from unbounded.planner.plan import Placement, Plan
from unbounded.sharding.device_room import device_limit, forget_shelf, make_headroom, shelf_of
from unbounded.zero.members import find_members
from unbounded.zero.setup.admission import compute_device
from unbounded.zero.setup.sites import find_sites


def checkpoint_activations(
    model: nn.Module,
    policy: Placement = "recompute",
    blocks: Blocks | None = None,
    *,
    tiled: str | Sequence[str] | None = "auto",
) -> Activations:
    """Chooses what blocks keep between forward and backward; call `remove` on what it returns to undo it.

    "keep" keeps everything, "recompute" only the block's inputs, "host" not even those: they go to host memory and
    come back. "auto" takes the first of these that a GPU has room for, anew in every forward; on a CPU it keeps.
    `policy` is one for all blocks, or (block pattern, policy) pairs. The blocks are the repeated ones that `shard`
    finds, or the submodules that `blocks` gives, by pattern or as modules. Works on any model, sharded or not, before
    `shard` or after. Results are those of "keep", bit for bit, if a block may run twice; buffers such as BatchNorm's
    statistics change once. Under "auto" a block with SyncBatchNorm keeps its activations, because ranks decide alone.

    For long sequences, feed-forward layers of recomputed blocks run over tiles of tokens if they would otherwise take a
    large part of the device. Those of Hugging Face models are found; `tiled` names others by patterns, or is None. Such
    a layer must treat every token alone. Its results are those of the whole layer, up to the dtype's rounding.
    """
    found = find_blocks(model) if blocks is None else pick_blocks(model, blocks)
    policies = choose_policies(policy, list(found))
    if not found:
        raise PlanError("the model has no repeated blocks to checkpoint. Name its blocks with blocks=.")
    if "auto" in policies.values():
        device = compute_device(find_members(model))
        policies = {name: close_policy(chosen, device) for name, chosen in policies.items()}
    layers = _find_feed_forwards(found, tiled)
    sizes = Sizes.within(device_limit(model))
    return attach_policies(model, found, policies, shelf_of(model), partial(make_headroom, model), layers, sizes)


def _find_feed_forwards(
    blocks: Mapping[str, nn.Module], tiled: str | Sequence[str] | None
) -> Mapping[str, Sequence[nn.Module]]:
    if tiled is None:
        return {}
    if tiled == "auto":
        return {name: find_feed_forwards(block) for name, block in blocks.items()}
    return pick_feed_forwards(blocks.items(), (tiled,) if isinstance(tiled, str) else tuple(tiled))


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model, by name."""
    return {
        site.name: site.module
        for site in find_sites(model)
        if site.name and next(site.module.children(), None) is not None
    }


def close_activations(model: nn.Module, plan: Plan, device: torch.device) -> Plan:
    """The plan with a policy for every block by name, unless the model came with some."""
    if attached_to(model):
        if plan.activations is None:
            return plan
        raise PlanError(
            f"the plan has activations={plan.activations!r}, but checkpoint_activations was called on this model. "
            "Leave out one of them."
        )
    # Split backwards need everything to be kept.
    unsaid = "keep" if plan.schedule == "zero_bubble" else "auto"
    policies = choose_policies(plan.activations or unsaid, list(find_blocks(model)))
    if not policies and plan.activations is not None:
        warnings.warn(
            f"activations={plan.activations!r} has no effect, because the model has no repeated blocks.", stacklevel=3
        )
    closed = tuple((name, close_policy(policy, device)) for name, policy in policies.items())
    return replace(plan, activations=closed or None)


def close_policy(policy: str, device: torch.device) -> str:
    """Only a GPU reports its free memory, which "auto" needs before every block."""
    return "keep" if policy == "auto" and device.type != "cuda" else policy


@contextmanager
def lifted_policies(model: nn.Module) -> Iterator[None]:
    """Removes activation policies while hooks are attached, around which they belong. Their memory is then ours."""
    blocks = attached_to(model)
    for block in blocks:
        block.detach()
    try:
        yield
        forget_shelf(model)
        open_blocks = [block for block in blocks if block.headroom is not None]
        headroom = make_headroom(model, len(open_blocks)) if open_blocks else None
        for block in blocks:
            block.shelf, block.headroom = shelf_of(model), headroom if block in open_blocks else None
            for layer in block.feed_forwards:
                layer.sizes = Sizes.within(device_limit(model))
    finally:
        for block in blocks:
            block.attach()
