"""`unbounded.plan`: what "auto" would choose for a model on a machine, and why.

The shell around the planner: it reads a module's units and an optimizer's states, finds the machine, asks the pure
search, and closes a `Plan` with what it found.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.activations.checkpointed import attached_to
from unbounded.activations.headroom import choose_policy
from unbounded.errors import PlanError
from unbounded.optim.book import RuleBook
from unbounded.optim.recognition import unwrap
from unbounded.optim.rules import UpdateRule
from unbounded.planner.explanation import describe
from unbounded.planner.machine import MachineRates, saved_path
from unbounded.planner.models.configs import FAMILIES, read_model, shape_of
from unbounded.planner.models.footprint import (
    EAGER,
    FORMATS,
    Cost,
    Footprint,
    StateBytes,
    UnitFootprint,
    expand,
    footprint_of,
    widen,
)
from unbounded.planner.models.shapes import Shape
from unbounded.planner.plan import Plan, read_plan
from unbounded.planner.presets import UNMEASURED, find_machine
from unbounded.planner.search import Candidate, Request, evaluate, search
from unbounded.planner.step.loads import Setup
from unbounded.planner.step.logits import tile_bytes
from unbounded.planner.step.peaks import kept_bytes, working_bytes
from unbounded.planner.step.prediction import Prediction
from unbounded.sharding.running import sharded
from unbounded.tiers import budget as budgets
from unbounded.zero.setup.admission import check_optimizer, common_precision
from unbounded.zero.setup.assembly import Sharded
from unbounded.zero.setup.blueprint import DTYPES, UnitSpec, find_specs
from unbounded.zero.sites import find_members, find_sites

Model = nn.Module | Shape | str | os.PathLike[str]
# Tokens of a step on each device where nobody says.
ASSUMED_TOKENS = 4096


def plan(
    model: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    machine: MachineRates | str | None = None,
    tokens_per_step: int | None = None,
    sequence: int = 2048,
    **budgets: Any,
) -> Plan:
    """What "auto" would choose, closed, with the predicted step time and why (`plan.reasons`).

    `model` is a module (also on the meta device), a `transformers` config, or what `unbounded plan` takes: a config
    folder, a preset's name, `layers=..,hidden=..`. `machine` is a Machine, a preset's name or a saved file; unless
    said, this one as it was measured. `budgets` are any fields of a Plan: what is given is kept.
    """
    found = read_machine(machine)
    asked = read_plan(budgets)
    joined = unwrap(optimizer) if optimizer is not None else None
    footprint, precision, formats = read_footprint(model, joined, asked)
    tokens = tokens_per_step or ASSUMED_TOKENS * found.num_devices
    request = Request(
        tokens,
        sequence,
        plan=asked,
        formats=formats,
        stages=(asked.stage,),
        tensors=(asked.tensor,),
        pipelines=(asked.pipeline,),
    )
    return close(search(footprint, found, request), asked, precision)


def predict_step(
    model: nn.Module, *, tokens: int, sequence: int, accumulate: int = 1, machine: MachineRates | None = None
) -> Prediction | None:
    """One step of a sharded model as it is placed: `tokens` of each of `accumulate` micro-batches on this rank.

    None where the machine was never measured: common rates would say nothing about this one. What blocks keep is
    what "auto" will decide while it runs.
    """
    if machine is None:
        if not saved_path().is_file():
            return None
        machine = MachineRates.load()
    state = sharded(model)
    placed, ranks = state.plan, state.engine.ranks.size
    local = budgets.local_size(ranks)
    machine = replace(
        machine,
        devices=local,
        nodes=max(1, ranks // local),
        host_threads=budgets.host_threads(placed, ranks) * local,
        network_bandwidth=machine.network_bandwidth or UNMEASURED.network_bandwidth,
    )
    dtype = DTYPES[str(placed.precision)]
    states = FORMATS[str(placed.precision), "exact"]
    for unit in state.engine.units:
        if unit.rule is not None and unit.dtype == dtype:
            states = _rule_bytes(unit.rule, dtype)
            break
    setup = Setup(
        tokens=tokens,
        sequence=sequence,
        accumulate=accumulate,
        stage=placed.stage,
        data=ranks,
        prefetch_units=placed.prefetch_units,
        logits_tile_bytes=tile_bytes("cpu" if machine.is_cpu else "cuda", placed.device_bytes),
    )
    footprint = replace(footprint_of_module(model, None, replace(placed, precision=None)), states=states)
    placed = replace(placed, activations=_running_policies(model, state, footprint, setup) or placed.activations)
    request = Request(
        tokens * accumulate * ranks,
        sequence,
        plan=placed,
        formats={placed.optimizer_format: states},
        buffer_bytes=_buffer_bytes(state),
    )
    found = evaluate(footprint, machine, setup, placed.optimizer_format, request)
    if found is None:  # what is placed runs already: only what blocks keep is still to be decided
        tight = replace(placed, device_bytes=2**60, activations=placed.activations if _is_closed(placed) else "host")
        found = evaluate(footprint, machine, setup, placed.optimizer_format, replace(request, plan=tight))
    return found.prediction if found is not None else None


def _running_policies(
    model: nn.Module, state: Sharded, footprint: Footprint, setup: Setup
) -> tuple[tuple[str, str], ...]:
    """What `Headroom` will decide for each block, one after the other; nothing where a plan has decided."""
    headroom = next((block.headroom for block in attached_to(model) if block.headroom is not None), None)
    blocks = [part for part in expand(footprint) if part.is_block]
    if headroom is None or not blocks:
        return ()
    weights = dict(state.plan.weights) if isinstance(state.plan.weights, tuple) else {}
    gathers = any(tier != "device" for tier in weights.values()) or (setup.stage == 3 and setup.data > 1)
    free: float = headroom.limit_bytes - state.tiers.use()["device"].used_bytes
    sizes = [(setup.tokens * part.cost.input, kept_bytes(part, setup)) for part in blocks]
    turn, _ = working_bytes(footprint, setup, gathers=gathers, recomputes=False)
    if turn + sum(kept for _, kept in sizes) <= free:
        return tuple((part.name, "keep") for part in blocks)
    turn, _ = working_bytes(footprint, setup, gathers=gathers, recomputes=True)
    chosen = []
    for index, (part, (entering, kept)) in enumerate(zip(blocks, sizes, strict=True)):
        policy = choose_policy(
            free_bytes=int(free),
            input_bytes=int(entering),
            kept_bytes=int(kept),
            num_later=len(blocks) - index - 1,
            tail_bytes=int(turn),
            first_tail=0,
        )
        free -= {"keep": kept, "recompute": entering, "host": 0.0}[policy]
        chosen.append((part.name, policy))
    return tuple(chosen)


def _is_closed(plan: Plan) -> bool:
    """Whether every block's policy is fixed."""
    policies = plan.activations if isinstance(plan.activations, tuple) else (("*", plan.activations or "auto"),)
    return all(policy != "auto" for _, policy in policies)


def _buffer_bytes(state: Sharded) -> int:
    """What leased buffers come to. Those of updates are made only where states are on disk, and fill only as far as
    there is something to bring through them."""
    units, plan = state.engine.units, state.plan
    held = {"host": 0, "disk": 0, "device": 0}
    for unit in units:
        for array in (unit.weights, *unit.states.values()):
            held[array.tier] += array.numel * array.dtype.itemsize
    for unit, (_, tier) in zip(units, (plan.gradients or ()) if plan.keeps_gradients else (), strict=False):
        held[tier] += (unit.owned[1] - unit.owned[0]) * unit.dtype.itemsize if unit.states else 0
    drafts = state.optimizer.updates.drafts.num_bytes if state.optimizer is not None else 0
    planned = max(0, state.tiers.planned_host_bytes - held["host"] - drafts)
    return min(planned, held["disk"] if held["disk"] else 2**27, max(held.values()))


def close(candidate: Candidate, asked: Plan, precision: str) -> Plan:
    """The plan that says what `candidate` decided."""
    named = {
        kind: tuple((name, getattr(where, kind)) for name, where in candidate.places)
        for kind in ("weights", "gradients", "optimizer")
    }
    return replace(
        asked,
        precision=asked.precision or precision,
        optimizer_format=candidate.format,
        activations=candidate.policies or None,
        predicted_seconds=candidate.seconds,
        reasons="\n".join(describe(candidate)),
        **named,  # type: ignore[arg-type]
    )


def read_machine(machine: MachineRates | str | os.PathLike[str] | None) -> MachineRates:
    """A machine by value, preset, or file; this one where none is given."""
    if isinstance(machine, MachineRates):
        return machine
    if machine is None:
        return this_machine()
    text = os.fspath(machine)
    if Path(text).is_file():
        return MachineRates.load(text)
    if "/" in text or text.endswith(".json"):
        raise PlanError(f'there is no machine file "{text}". Write one with Machine.measure().save(path).')
    return find_machine(text)


def this_machine() -> MachineRates:
    """This host as it was measured; otherwise common rates with the memory that is free here."""
    if saved_path().is_file():
        return MachineRates.load()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_device, host, disk = budgets.measure(Plan(), device, 1)
    return replace(
        UNMEASURED,
        device_bytes=max(1, on_device),
        host_bytes=max(1, host),
        disk_bytes=disk,
        host_threads=os.cpu_count() or 1,
        is_cpu=device.type == "cpu",
    )


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
    """Bytes a parameter of the optimizer's rule; AdamW's without one."""
    if optimizer is None:
        return FORMATS[precision, state_format]
    book, dtype = RuleBook(optimizer, state_format), DTYPES[precision]
    total, mean = 0, StateBytes(dtype.itemsize, dtype.itemsize, 0.0, 0.0, max(4, dtype.itemsize))
    for index, group in enumerate(optimizer.param_groups):  # each counts by its size
        shapes = [tuple(parameter.shape) for parameter in group["params"]]
        numel = sum(map(math.prod, shapes))
        rule = book.rule(book.member_of(index), dtype, shapes) if numel else None
        if rule is None:
            continue
        held, total = _rule_bytes(rule, dtype), total + numel
        factors = 4 * sum(math.prod(factor) for shape in shapes for factor in rule.factor_shapes(shape).values())
        optimizer_bytes = mean.optimizer + (held.optimizer + factors / numel - mean.optimizer) * numel / total
        remainder = mean.remainder + (held.remainder - mean.remainder) * numel / total
        mean = replace(mean, optimizer=optimizer_bytes, remainder=remainder)
    return mean


def _rule_bytes(rule: UpdateRule, dtype: torch.dtype) -> StateBytes:
    sizes = {spec.name: spec.dtype.itemsize / spec.every for spec in rule.specs}
    remainder = sizes.pop("remainder", 0.0)
    return StateBytes(dtype.itemsize, dtype.itemsize, sum(sizes.values()), remainder, max(4, dtype.itemsize))


def footprint_of_module(model: nn.Module, optimizer: torch.optim.Optimizer | None, asked: Plan) -> Footprint:
    """The units that `shard` would make of `model`, with what each costs a token."""
    sites = find_sites(model)
    lowered = DTYPES[asked.precision] if asked.precision is not None else None
    specs = find_specs(sites, check_optimizer(optimizer, find_members(model)), 1, lowered)
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
    """The shape behind a model's own config, where that is of a known family."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict") or getattr(config, "model_type", None) not in FAMILIES:
        return None
    return shape_of(config.to_dict(), type(model).__name__)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _part(
    spec: UnitSpec, specs: list[UnitSpec], shape: Shape | None, *, is_charged: bool, has_head: bool
) -> UnitFootprint:
    """One unit. What its module costs is charged to the first unit of the module, with what all of them train."""
    numel = sum(slot.numel for slot in spec.layout.slots)
    trained = numel if spec.trainable else 0
    if not is_charged:
        return UnitFootprint(spec.name, numel, trained_numel=trained)
    is_block = bool(spec.site.name) and not _is_leaf(spec.site.module)
    same = [other for other in specs if other.site is spec.site]
    total = sum(slot.numel for other in same for slot in other.layout.slots)
    learnt = sum(slot.numel for other in same if other.trainable for slot in other.layout.slots)
    is_root = not spec.site.name
    cost = Cost() if is_root and has_head else _cost(spec.site.module, shape, is_block=is_block, is_root=is_root)
    cost = replace(cost, trained=cost.products * learnt / max(1, total))
    cost = widen(cost) if spec.dtype == torch.float32 else cost
    largest = max((slot.numel for slot in spec.layout.slots), default=0)
    return UnitFootprint(spec.name, numel, cost=cost, trained_numel=trained, is_block=is_block, largest=largest)


def _cost(module: nn.Module, shape: Shape | None, *, is_block: bool, is_root: bool) -> Cost:
    """Of a known shape its own (the head is in the root unless it is a unit); otherwise counted from the layers."""
    if shape is not None:
        parts = {part.name: part.cost for part in footprint_of(replace(shape, tied=False)).parts}
        if is_block:
            return parts["blocks"]
        return parts["embedding"] if isinstance(module, nn.Embedding) else parts["head"]
    return Cost() if is_root else count_cost(module)


def count_cost(module: nn.Module) -> Cost:
    """From the layers inside: every matrix is a product, every output and norm is kept, each operation is bound by
    what it reads and writes. Attention over positions is taken where a child is named after it."""
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
