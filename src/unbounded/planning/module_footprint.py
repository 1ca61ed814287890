"""The footprint of a module or of whatever describes a model: its units, and what each costs per token.

If a model's config is of a known family, costs come from its shape; otherwise they are counted from its layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.optim.book import RuleBook
from unbounded.optim.formats import DTYPES
from unbounded.optim.rules import UpdateRule
from unbounded.planner.models.configs import FAMILIES, read_model, shape_of
from unbounded.planner.models.footprint import (
    EAGER,
    STATE_BYTES,
    Cost,
    Footprint,
    StateBytes,
    UnitFootprint,
    footprint_of,
    widen,
)
from unbounded.planner.models.shapes import Shape
from unbounded.planner.plan import Plan
from unbounded.zero.members import find_members
from unbounded.zero.setup.admission import check_optimizer, common_precision
from unbounded.zero.setup.sites import find_sites
from unbounded.zero.setup.specs import UnitSpec, find_specs


def read_footprint(
    model: Any, optimizer: torch.optim.Optimizer | None, asked: Plan
) -> tuple[Footprint, str, Mapping[str, StateBytes]]:
    """The footprint of whatever describes a model, its precision, and the bytes of its states."""
    if isinstance(model, nn.Module):
        precision = asked.precision or common_precision(model)
        states = _state_bytes(optimizer, precision, asked.optimizer_format)
        return footprint_of_module(model, optimizer, asked), precision, {asked.optimizer_format: states}
    if hasattr(model, "to_dict"):
        shape = shape_of(model.to_dict(), type(model).__name__)
    elif isinstance(model, Shape):
        shape = model
    elif isinstance(model, str | os.PathLike):
        shape = read_model(os.fspath(model))
    else:
        raise PlanError(
            f"plan was given a {type(model).__name__} as the model. Give an nn.Module, a transformers config, a config "
            "folder, a preset's name, or layers=..,hidden=.."
        )
    precision = asked.precision or "bf16"
    states = _state_bytes(optimizer, precision, asked.optimizer_format)
    return footprint_of(shape), precision, {asked.optimizer_format: states}


def _state_bytes(optimizer: torch.optim.Optimizer | None, precision: str, state_format: str) -> StateBytes:
    """Bytes per parameter of the optimizer's rule; without an optimizer, those of AdamW."""
    if optimizer is None:
        return STATE_BYTES[precision, state_format]
    book, dtype = RuleBook(optimizer, state_format), DTYPES[precision]
    total, mean = 0, StateBytes(dtype.itemsize, dtype.itemsize, 0.0, 0.0, max(4, dtype.itemsize))
    for index, group in enumerate(optimizer.param_groups):  # each counts by its size
        shapes = [tuple(parameter.shape) for parameter in group["params"]]
        numel = sum(map(math.prod, shapes))
        rule = book.rule(book.member_of(index), dtype, shapes) if numel else None
        if rule is None:
            continue
        held, total = rule_bytes(rule, dtype), total + numel
        factors = 4 * sum(math.prod(factor) for shape in shapes for factor in rule.factor_shapes(shape).values())
        optimizer_bytes = mean.optimizer + (held.optimizer + factors / numel - mean.optimizer) * numel / total
        remainder = mean.remainder + (held.remainder - mean.remainder) * numel / total
        mean = replace(mean, optimizer=optimizer_bytes, remainder=remainder)
    return mean


def rule_bytes(rule: UpdateRule, dtype: torch.dtype) -> StateBytes:
    sizes = {spec.name: spec.dtype.itemsize / spec.every for spec in rule.specs}
    remainder = sizes.pop("remainder", 0.0)
    return StateBytes(dtype.itemsize, dtype.itemsize, sum(sizes.values()), remainder, max(4, dtype.itemsize))


def footprint_of_module(model: nn.Module, optimizer: torch.optim.Optimizer | None, asked: Plan) -> Footprint:
    """The units that `shard` would make of `model`, with what each costs per token."""
    sites = find_sites(model)
    lowered = DTYPES[asked.precision] if asked.precision is not None else None
    specs = find_specs(sites, check_optimizer(optimizer, find_members(model)), 1, lowered)
    if not specs:
        raise PlanError(f"the {type(model).__name__} has no parameters, so there is nothing to plan.")
    shape = _known_shape(model)
    has_head = any(not isinstance(s.module, nn.Embedding) and _is_leaf(s.module) for s in sites if s.name)
    parts, charged = [], set()
    for spec in specs:
        first = id(spec.site) not in charged
        charged.add(id(spec.site))
        parts.append(_part(spec, specs, shape, is_charged=first, has_head=has_head))
    hidden = shape.hidden if shape is not None else 0
    return Footprint(
        getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__,
        tuple(parts),
        hidden,
        logits_bytes=EAGER.logits * shape.vocabulary if shape is not None else 0.0,
        vocabulary=shape.vocabulary if shape is not None else 0,
        layers=sum(part.is_block for part in parts),
    )


def _known_shape(model: nn.Module) -> Shape | None:
    """The shape that a model's own config describes, if it is of a known family."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict") or getattr(config, "model_type", None) not in FAMILIES:
        return None
    return shape_of(config.to_dict(), type(model).__name__)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _part(
    spec: UnitSpec, specs: list[UnitSpec], shape: Shape | None, *, is_charged: bool, has_head: bool
) -> UnitFootprint:
    """One unit. The cost of its module, for all that its units train, is charged to the module's first unit."""
    numel = sum(slot.numel for slot in spec.layout.slots)
    trained = numel if spec.trainable else 0
    is_root = not spec.site.name
    is_outer = spec.site.is_outer or is_root
    if not is_charged:
        return UnitFootprint(spec.name, numel, trained_numel=trained, is_outer=is_outer)
    is_block = bool(spec.site.name) and not _is_leaf(spec.site.module)
    same = [other for other in specs if other.site is spec.site]
    total = sum(slot.numel for other in same for slot in other.layout.slots)
    learnt = sum(slot.numel for other in same if other.trainable for slot in other.layout.slots)
    cost = Cost() if is_root and has_head else _cost(spec.site.module, shape, is_block=is_block, is_root=is_root)
    unkept = _unkept_bytes(spec.site.module, shape) if shape is not None and is_block else 0.0
    cost = replace(cost, trained=cost.products * learnt / max(1, total), kept=cost.kept - unkept)
    cost = widen(cost) if spec.dtype == torch.float32 else cost
    largest = max((slot.numel for slot in spec.layout.slots), default=0)
    return UnitFootprint(
        spec.name,
        numel,
        1,
        cost,
        trained,
        is_block=is_block,
        is_outer=is_outer,
        largest=largest,
        module=spec.site.name,
    )


def _unkept_bytes(block: nn.Module, shape: Shape) -> float:
    """What a block does not keep of a token because weights are frozen: what norms have normed, and inputs of layers
    that are needed for nothing else. (Attention and the ffn's product keep theirs anyway, but for the ffn's last.)"""
    unkept = 0.0
    for child in block.children():
        own = list(child.parameters())
        if not own or any(parameter.requires_grad for parameter in own):
            continue
        unkept += 2 * shape.hidden
        if any(shape.ffn in parameter.shape for parameter in own if parameter.dim() > 1):
            unkept += 2 * shape.ffn * shape.active
    return unkept


def _cost(module: nn.Module, shape: Shape | None, *, is_block: bool, is_root: bool) -> Cost:
    """The cost of a known shape (the root includes the head unless that is a unit), or counted from layers."""
    if shape is not None:
        parts = {part.name: part.cost for part in footprint_of(replace(shape, tied=False)).parts}
        if is_block:
            return parts["blocks"]
        return parts["embedding"] if isinstance(module, nn.Embedding) else parts["head"]
    return Cost() if is_root else count_cost(module)


def count_cost(module: nn.Module) -> Cost:
    """Counts from the layers inside: every matrix is a product, every output and norm is kept, and each operation is
    bound by what it reads and writes. A child named after attention counts as attention over positions."""
    products = wide = normed = num_kernels = 0
    widest_input = 0
    for child in module.modules():
        own = list(child.parameters(recurse=False))
        matrices = [p for p in own if p.dim() >= 2]
        if isinstance(child, nn.Embedding):
            continue
        for matrix in matrices:
            products += matrix.numel()
            wide += matrix.shape[0]
            widest_input = max(widest_input, matrix.shape[-1])
        if own and not matrices:
            normed += own[0].numel()
        num_kernels += 1 if not any(child.children()) else 0
    attends = any("attn" in name or "attention" in name for name, _ in module.named_modules())
    hidden = normed // 2 or widest_input
    return Cost(
        products=products,
        attention=2 * hidden if attends else 0,
        moved=8.0 * wide + 36.0 * normed,
        kept=4.0 * wide + 8.0 * normed,
        input=2.0 * hidden,
        back=2.0 * wide,
        exchanged=2.0 * hidden,
        num_kernels=3 * num_kernels,
    )
