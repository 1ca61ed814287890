"""What the parallel axes do to a model before it is partitioned over the data axis, and after.

    take_parts   checks and cuts: every rank keeps its stages, and its part of each parameter in them
    attach       lets modules compute with the parts, once the engine is in place around them

Whatever cannot work is found by every rank from the same values, or reported to all, before anything is changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError, StateError
from unbounded.native.bulk import dense_parts, fill, flat
from unbounded.optim.formats import DTYPES
from unbounded.parallel.context import ContextParallel
from unbounded.parallel.pipeline.hollow import HollowModel
from unbounded.parallel.pipeline.schedules import check_schedule
from unbounded.parallel.pipeline.stages import Cutting, cut_model
from unbounded.parallel.recorded import RecordCheck
from unbounded.parallel.same_batch import attach_check
from unbounded.parallel.tensor.given import GivenTensors, find_given
from unbounded.parallel.tensor.head.vocabulary import HeadPart
from unbounded.parallel.tensor.layers import attach_loading
from unbounded.parallel.tensor.tensor_parallel import TensorParallel
from unbounded.planner.plan import Plan
from unbounded.ranks.axis import Axis
from unbounded.ranks.cut import Cut
from unbounded.ranks.mesh import Axes
from unbounded.ranks.phases import CopyPhases

# Chunks of layers per rank in the interleaved schedule.
CHUNKS = 2


@dataclass
class Applied:
    """The parallel axes of one model. `cuts` and `uncounted` are by the parameter's id."""

    cuts: dict[int, Cut] = field(default_factory=dict)
    uncounted: frozenset[int] = frozenset()
    hollow: HollowModel | None = None
    copies: list[tuple[list[int], list[nn.Parameter]]] = field(
        default_factory=list
    )  # parameters that several stages hold
    heads: dict[nn.Module, HeadPart] = field(default_factory=dict)  # last layers whose logits stay cut
    replaced: dict[int, nn.Parameter] = field(default_factory=dict)  # what replaces a parameter, by its id
    phases: CopyPhases = field(default_factory=CopyPhases)
    standing: Callable[[], str] = str  # what must be the same on ranks that compute one copy of the model
    attaches: list[Callable[[], None]] = field(default_factory=list)
    detaches: list[Callable[[], None]] = field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> Applied:
        """A copy of a model is plain."""
        return Applied()

    def attach(self) -> None:
        for attach in self.attaches:
            attach()

    def detach(self) -> None:
        for detach in reversed(self.detaches):
            detach()


def take_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, plan: Plan, axes: Axes, device: torch.device
) -> Applied:
    """All ranks must call this. Leaves only this rank's part in the model; the result's `attach` does the rest."""
    applied, error, cutting = Applied(phases=CopyPhases((axes.tensor, axes.context, axes.pipeline))), None, None
    try:
        _check_fields(plan, axes)
        cutting = _find_stages(model, plan, axes)
        _find_tensor(model, plan, axes, None)
        if axes.context.size > 1:
            ContextParallel(model, axes.context, None)
    except PlanError as caught:
        error = caught
    axes.world.agree(error, what="unbounded.shard()")
    for axis in (axes.tensor, axes.pipeline, axes.context):
        if axis.size > 1:
            _match_ranks(model, axis, device)
    uncounted: set[int] = set()
    if cutting is not None:
        lowered = DTYPES[plan.precision] if plan.precision is not None else None
        applied.hollow = HollowModel(model, cutting, axes.pipeline, device, lowered)
        _take_stages(applied, applied.hollow, optimizer, axes.pipeline)
        uncounted |= {id(p) for ranks, held in applied.copies if axes.pipeline.rank > ranks[0] for p in held}
    stacks = applied.hollow.own_stacks() if applied.hollow is not None else None
    tensor = _find_tensor(model, plan, axes, stacks)
    if isinstance(tensor, TensorParallel):
        applied.attaches.append(tensor.attach_trials)
        applied.detaches.append(tensor.detach_trials)
    if axes.context.size > 1:
        context = ContextParallel(model, axes.context, stacks)
        applied.attaches.append(context.attach)
        applied.detaches.append(context.detach)
    if tensor is not None:
        if optimizer is not None:
            _cut_states(optimizer, tensor.cuts)
        tensor.cut()
        if isinstance(tensor, GivenTensors):
            applied.replaced = {key: local for key, (_, local) in tensor.replaced.items()}
            _replace(optimizer, applied.replaced)
        first = axes.tensor.rank == 0
        for parameter in model.parameters():
            cut = tensor.cuts.get(id(parameter))
            if not (cut.is_first if cut is not None else first):
                uncounted.add(id(parameter))
        applied.cuts = tensor.cuts
        if isinstance(tensor, TensorParallel):
            applied.heads = tensor.heads
        applied.attaches.append(tensor.attach)
        for module in model.modules():
            places = {name: tensor.cuts[id(p)] for name, p in module._parameters.items() if id(p) in tensor.cuts}
            if places:
                applied.detaches.append(attach_loading(module, places))
        applied.detaches.append(tensor.detach)
    if axes.data.size < axes.world.size:
        applied.attaches.append(lambda: applied.detaches.append(_refuse_copies(model)))
        records = RecordCheck(model, plan, axes)
        if applied.hollow is not None:
            applied.hollow.check = records.check
        applied.attaches.append(lambda: applied.detaches.append(records.attach(model)))
    sharing = [axis for axis in (axes.tensor, axes.context) if axis.size > 1]
    if sharing and not isinstance(tensor, GivenTensors):  # torch's own layers may take parts of a batch
        applied.attaches.append(
            lambda: applied.detaches.append(attach_check(model, sharing, applied.phases, lambda: applied.standing()))
        )
    applied.uncounted = frozenset(uncounted)
    return applied


def num_chunks(plan: Plan) -> int:
    return CHUNKS if plan.schedule == "interleaved" else 1


def _check_fields(plan: Plan, axes: Axes) -> None:
    for name in ("sequence", "styles"):
        if getattr(plan, name) and axes.tensor.size == 1:
            raise PlanError(f"the plan has {name} without a tensor axis. Add tensor=2 or more, or leave it out.")
    if axes.context.size > 1 and plan.sequence:
        raise PlanError("sequence=True and a context axis both cut the sequence. Leave sequence out of the plan.")
    for name in ("schedule", "microbatches"):
        if getattr(plan, name) is not None and axes.pipeline.size == 1:
            raise PlanError(f"the plan has {name} without a pipeline axis. Add pipeline=2 or more, or leave it out.")


def _find_stages(model: nn.Module, plan: Plan, axes: Axes) -> Cutting | None:
    if axes.pipeline.size == 1:
        return None
    if plan.microbatches is not None:
        check_schedule(plan.schedule or "1f1b", axes.pipeline.size, plan.microbatches)
    policies = plan.activations if isinstance(plan.activations, tuple) else (("*", plan.activations or "keep"),)
    if plan.schedule == "zero_bubble" and any(policy != "keep" for _, policy in policies):
        raise PlanError(
            "the schedule 'zero_bubble' splits backwards, which blocks that are recomputed cannot do. "
            "Use activations='keep', or another schedule."
        )
    return cut_model(model, axes.pipeline.size, num_chunks(plan))


def _take_stages(applied: Applied, hollow: HollowModel, optimizer: torch.optim.Optimizer | None, axis: Axis) -> None:
    copies = hollow.copies()
    gone = {id(parameter) for parameter in hollow.take_out()}
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
    for ranks, parameters in copies.items():
        if axis.rank in ranks:
            applied.copies.append((sorted(ranks), parameters))
    applied.attaches.append(hollow.attach)
    applied.detaches.append(hollow.detach)


def _find_tensor(
    model: nn.Module, plan: Plan, axes: Axes, stacks: Sequence[Sequence[nn.Module]] | None
) -> TensorParallel | GivenTensors | None:
    given = find_given(model)
    if axes.tensor.size == 1:
        if given:
            raise PlanError(
                f"the parameter {next(iter(given))!r} is a DTensor, but the job has no tensor axis. "
                "Pass the mesh it was made on, as shard(..., mesh=mesh) with an axis named tensor or tp."
            )
        return None
    if given:
        return GivenTensors(model, given, axes.tensor)
    return TensorParallel(model, axes.tensor, plan.styles, sequence=plan.sequence, stacks=stacks)


def _match_ranks(model: nn.Module, axis: Axis, device: torch.device) -> None:
    """Every rank of the axis gets the first one's values, its buffers among them, and its random state."""
    state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    cpu, cuda = axis.objects(state)[0]
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    for parameter in model.parameters():
        if not parameter.is_meta and not hasattr(parameter, "device_mesh"):
            value = axis.broadcast(parameter.detach().to(device).contiguous())
            with torch.no_grad():
                parameter.data.copy_(value)
    for part in itertools.chain.from_iterable(map(dense_parts, model.buffers())):
        if not part.is_meta and part.numel():
            whole = flat(part.to(device))
            axis.broadcast(whole.view(torch.uint8), "the broadcast of buffers")
            fill(part, whole)


def _refuse_copies(model: nn.Module) -> Callable[[], None]:
    """Makes `copy.deepcopy` of the model raise: the copy would run blocks of the original. Returns how to undo it."""

    def refuse(_: Any) -> Any:
        raise StateError(
            "this model is cut over a tensor, context or pipeline axis, so it cannot be copied. Build a second model "
            "and load model.state_dict() into it. For an average of weights, average state dicts."
        )

    model.__dict__["__deepcopy__"] = refuse
    return lambda: model.__dict__.pop("__deepcopy__", None)


def _replace(optimizer: torch.optim.Optimizer | None, replaced: dict[int, nn.Parameter]) -> None:
    """Makes the optimizer hold the parameters that are now in the model."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in replaced]:
        optimizer.state[replaced[id(parameter)]] = optimizer.state.pop(parameter)


def _cut_states(optimizer: torch.optim.Optimizer, cuts: dict[int, Cut]) -> None:
    """The states of an optimizer that has stepped, cut like their parameters."""
    for parameter, states in optimizer.state.items():
        cut = cuts.get(id(parameter))
        for name, value in states.items() if cut is not None else ():
            if isinstance(value, torch.Tensor) and tuple(value.shape) == cut.shape:  # type: ignore[union-attr]
                states[name] = cut.take(value)  # type: ignore[union-attr]
