"""The footprint of a module or of whatever describes a model: its units, and what each costs per token.

A config is built on the meta device if `transformers` is installed, so its parameters are those of the model; without
it, known families are read as shapes. If a model's config is of a known family, costs come from its shape; otherwise
they are counted from its layers. What blocks keep and move is seen in a dry run, where there can be one.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from unbounded.activations.checkpointed import attached_to
from unbounded.errors import PlanError
from unbounded.optim.book import RuleBook
from unbounded.optim.formats import DTYPES
from unbounded.optim.rules import UpdateRule
from unbounded.planner.models.configs import FAMILIES, find_config, read_config, shape_of
from unbounded.planner.models.footprint import (
    COMPILED,
    EAGER,
    PACKED_BYTES,
    STATE_BYTES,
    Cost,
    Footprint,
    Kernels,
    StateBytes,
    UnitFootprint,
    add,
    footprint_of,
    widen,
)
from unbounded.planner.models.shapes import Shape, read_shape
from unbounded.planner.plan import Plan
from unbounded.planning.config_model import build_model
from unbounded.planning.dry_run import SEEN, seen_costs
from unbounded.planning.given_inputs import costs_with
from unbounded.planning.layer_costs import active_experts, count_cost, own_modules
from unbounded.planning.towers import Tower, describe_parts, find_towers, split_by_tower, text_config
from unbounded.sharding.block_policies import find_blocks
from unbounded.weights.lora import add_empty_adapters
from unbounded.zero.members import find_members
from unbounded.zero.setup.admission import check_optimizer, check_shapes, common_precision
from unbounded.zero.setup.sites import Site, find_sites
from unbounded.zero.setup.specs import UnitSpec, find_specs


def read_footprint(
    model: Any, optimizer: torch.optim.Optimizer | None, asked: Plan, sequence: int, inputs: Any = None
) -> tuple[Footprint, str, Mapping[str, StateBytes]]:
    """The footprint of whatever describes a model, its precision, and the bytes of its states."""
    if isinstance(model, nn.Module):
        check_shapes(model)
        precision = asked.precision or common_precision(model)
        footprint = footprint_of_module(model, optimizer, asked, sequence, inputs=inputs)
    elif inputs is not None:
        raise PlanError(
            f"plan was given inputs for a {type(model).__name__}. They are for an nn.Module: leave them out."
        )
    else:
        precision = asked.precision or "bf16"
        footprint = footprint_of_description(model, DTYPES[precision], sequence, _kernels_of(asked))
    states = _state_bytes(optimizer, precision, asked.optimizer_format)
    return footprint, precision, {asked.optimizer_format: states}


def _kernels_of(asked: Plan, model: nn.Module | None = None) -> Kernels:
    """What its blocks run as: compiled if the plan says so, or if the user has compiled any of them."""
    is_compiled = asked.compile in (True, "inductor")
    if model is not None and not is_compiled:
        governed = {block.module: block for block in attached_to(model)}
        is_compiled = any(
            governed[block].is_compiled if block in governed else block._compiled_call_impl is not None
            for block in find_blocks(model).values()
        )
    return COMPILED if is_compiled else EAGER


def footprint_of_description(
    model: Any, dtype: torch.dtype, sequence: int, kernels: Kernels = EAGER, lora_rank: int | None = None
) -> Footprint:
    """The footprint of a config, of a shape, or of what `unbounded plan` takes as MODEL; with adapters of that rank."""
    if isinstance(model, Shape):
        return _footprint_of_shape(model, dtype, kernels, lora_rank)
    if isinstance(model, str | os.PathLike):
        path = find_config(os.fspath(model))
        if path is None:
            return _footprint_of_shape(read_shape(os.fspath(model)), dtype, kernels, lora_rank)
        values, what = read_config(path), f'"{path}"'
    elif hasattr(model, "to_dict"):
        values, what = model.to_dict(), type(model).__name__
    else:
        raise PlanError(
            f"plan was given a {type(model).__name__} as the model. Give an nn.Module, a transformers config, a config "
            "folder, a preset's name, or layers=..,hidden=.."
        )
    if importlib.util.find_spec("transformers") is None:
        return _footprint_of_shape(shape_of(values, what), dtype, kernels, lora_rank)
    built = build_model(values, what, dtype)
    adapted = built if lora_rank is None else add_empty_adapters(built, lora_rank)
    return footprint_of_module(adapted, None, Plan(), sequence, kernels)


def _footprint_of_shape(shape: Shape, dtype: torch.dtype, kernels: Kernels, lora_rank: int | None) -> Footprint:
    return footprint_of(shape, kernels=kernels, is_fp32=dtype == torch.float32, lora_rank=lora_rank)


def _state_bytes(optimizer: torch.optim.Optimizer | None, precision: str, state_format: str) -> StateBytes:
    """Bytes per parameter of the optimizer's rule; without an optimizer, those of AdamW."""
    if optimizer is None:
        return STATE_BYTES[precision, state_format]
    book, dtype = RuleBook(optimizer, state_format), DTYPES[precision]
    total, mean = 0, replace(STATE_BYTES[precision, state_format], optimizer=0.0, remainder=0.0)
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
    packed = PACKED_BYTES if dtype == torch.bfloat16 else 0.0
    return StateBytes(dtype.itemsize, dtype.itemsize, sum(sizes.values()), remainder, max(4, dtype.itemsize), packed)


@dataclass(frozen=True)
class _Reading:
    """What the costs of a model's parts are read from. Without a shape they are counted from layers."""

    seen: Mapping[str, Cost]  # of blocks, in a dry run
    shape: Shape | None
    kernels: Kernels
    active: int  # experts that a token passes
    has_head: bool
    towers: tuple[Tower, ...]
    sequence: int

    def cost(self, site: Site, sites: list[Site], *, is_block: bool) -> Cost:
        """Of one token of the text. With a shape the root includes the head unless that is a unit."""
        if self.shape is None:
            return self._count(own_modules(site, sites))
        parts = {
            part.name: part.cost for part in footprint_of(replace(self.shape, tied=False), kernels=self.kernels).parts
        }
        if is_block:
            return parts["blocks"]
        if not site.name and self.has_head:
            return Cost()
        return parts["embedding"] if isinstance(site.module, nn.Embedding) else parts["head"]

    def _count(self, modules: Mapping[str, nn.Module]) -> Cost:
        total = Cost()
        for tower, inside in split_by_tower(modules, self.towers):
            cost = count_cost(inside, self.active)
            total = add(total, cost if tower is None else tower.spread(cost, self.sequence))
        return total


def footprint_of_module(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    asked: Plan,
    sequence: int = 2048,
    kernels: Kernels | None = None,
    inputs: Any = None,
) -> Footprint:
    """The units that `shard` would make of `model`, with what each costs per token of sequences of that length.
    `inputs` are those of one sequence; without them, models of `transformers` make their own."""
    kernels = kernels or _kernels_of(asked, model)
    sites = find_sites(model)
    lowered = DTYPES[asked.precision] if asked.precision is not None else None
    specs = find_specs(sites, check_optimizer(optimizer, find_members(model)), 1, lowered)
    if not specs:
        raise PlanError(f"the {type(model).__name__} has no parameters, so there is nothing to plan.")
    shape, towers = _known_shape(model), find_towers(model)
    has_head = any(not isinstance(s.module, nn.Embedding) and _is_leaf(s.module) for s in sites if s.name)
    dtypes = {slot.name: spec.dtype for spec in specs for slot in spec.layout.slots}
    positions = next((tower.positions for tower in towers if not tower.name), None) or sequence
    seen: Mapping[str, Cost] = {}
    if kernels is EAGER:
        seen = (
            costs_with(inputs, model, dtypes, sequence) if inputs is not None else seen_costs(model, dtypes, positions)
        )
    reading = _Reading(seen, shape, kernels, active_experts(text_config(model)), has_head, towers, sequence)
    parts, charged = [], set()
    for spec in specs:
        first = id(spec.site) not in charged
        charged.add(id(spec.site))
        parts.append(_part(spec, specs, sites, reading, is_charged=first))
    vocabulary, hidden = (shape.vocabulary, shape.hidden) if shape is not None else _head_sizes(model)
    return Footprint(
        getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__,
        tuple(parts),
        hidden,
        logits_bytes=kernels.logits * vocabulary,
        vocabulary=vocabulary,
        layers=sum(part.is_block for part in parts),
        assumptions=describe_parts(model, towers),
    )


def _known_shape(model: nn.Module) -> Shape | None:
    """The shape that a model's own config describes, if it is of a known family and all its blocks are equal."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict") or getattr(config, "model_type", None) not in FAMILIES:
        return None
    try:
        return shape_of(config.to_dict(), type(model).__name__)
    except PlanError:
        return None


def _head_sizes(model: nn.Module) -> tuple[int, int]:
    """The classes and the width of a model's output layer; no logits are made without one."""
    find = getattr(model, "get_output_embeddings", None)
    weight = getattr(find() if find is not None else None, "weight", None)
    return (int(weight.shape[0]), int(weight.shape[1])) if isinstance(weight, torch.Tensor) else (0, 0)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _part(
    spec: UnitSpec, specs: list[UnitSpec], sites: list[Site], reading: _Reading, *, is_charged: bool
) -> UnitFootprint:
    """One unit. The cost of its module, for all that its units train, is charged to the module's first unit."""
    numel = sum(slot.numel for slot in spec.layout.slots)
    trained = numel if spec.trainable else 0
    is_outer = spec.site.is_outer or not spec.site.name
    if not is_charged:
        return UnitFootprint(spec.name, numel, trained_numel=trained, is_outer=is_outer, module=spec.site.name)
    is_block = bool(spec.site.name) and not _is_leaf(spec.site.module)
    same = [other for other in specs if other.site is spec.site]
    total = sum(slot.numel for other in same for slot in other.layout.slots)
    learnt = sum(slot.numel for other in same if other.trainable for slot in other.layout.slots)
    cost = reading.cost(spec.site, sites, is_block=is_block)
    unkept = _unkept_bytes(spec.site.module, reading.shape) if reading.shape is not None and is_block else 0.0
    cost = replace(cost, trained=cost.products * learnt / max(1, total), kept=cost.kept - unkept)
    cost = widen(cost) if spec.dtype == torch.float32 else cost
    if is_block and (seen := reading.seen.get(spec.site.name)) is not None:
        cost = replace(cost, **{name: getattr(seen, name) for name in SEEN})
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
