"""`unbounded.plan`: what "auto" would choose for a model on a machine, and why.

The shell around the planner: it reads a module's units and an optimizer's states, finds the machine, asks the pure
search, and closes a `Plan` with what it found.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from unbounded.errors import PlanError
from unbounded.optim.recognition import unwrap
from unbounded.planner.evaluation import Candidate, Request, assumed_tokens
from unbounded.planner.explanation import describe
from unbounded.planner.machine import MachineRates, saved_path
from unbounded.planner.plan import Plan, read_plan
from unbounded.planner.presets import UNMEASURED, read_machine
from unbounded.planner.search import search
from unbounded.planning.module_footprint import read_footprint
from unbounded.tiers import budget as budgets


def plan(
    model: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    machine: MachineRates | str | os.PathLike[str] | None = None,
    tokens_per_step: int | None = None,
    sequence: int = 2048,
    inputs: Any = None,
    **budgets: Any,
) -> Plan:
    """What "auto" would choose, closed, with the predicted step time and why (`plan.reasons`).

    `model` is a module (also on the meta device), a `transformers` config, or what `unbounded plan` takes: a config
    folder, a preset's name, `layers=..,hidden=..`. `machine` is a Machine, a preset's name or a saved file; by
    default it is this machine as it was measured. `inputs` is what a module's forward takes for one sequence: a dict, a
    tuple, or a tensor. Only modules that are no models of `transformers` need it, to see what their blocks keep.
    `budgets` are any fields of a Plan, which are kept as given.
    """
    found = this_machine() if machine is None else _read(machine)
    asked = read_plan(budgets)
    if asked.context > 1:
        raise PlanError("plan does not know what a context axis costs. Leave context out, and give it to `shard`.")
    if isinstance(optimizer, str):
        raise PlanError(
            f"optimizer is {optimizer!r}, but plan takes the optimizer itself. Where its states live is said to "
            f'`shard`: plan={{"optimizer": {optimizer!r}}}.'
        )
    joined = unwrap(optimizer) if optimizer is not None else None
    footprint, precision, formats = read_footprint(model, joined, asked, sequence, inputs)
    tokens = assumed_tokens(found, sequence) if tokens_per_step is None else tokens_per_step
    request = Request(
        tokens,
        sequence,
        plan=replace(asked, precision=precision),
        formats=formats,
        stages=(asked.stage,),
        tensors=(asked.tensor,),
        pipelines=(asked.pipeline,),
        accumulate=asked.microbatches,
    )
    return close(search(footprint, found, request), asked, precision)


def _read(machine: MachineRates | str | os.PathLike[str]) -> MachineRates:
    if isinstance(machine, MachineRates):
        return machine
    if not isinstance(machine, str | os.PathLike):
        raise PlanError(f"machine is a {type(machine).__name__}. Give a Machine, a preset's name, or a saved file.")
    return read_machine(os.fspath(machine))


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
        pack_frozen=candidate.packs or asked.pack_frozen,
        predicted_seconds=candidate.seconds,
        reasons="\n".join(describe(candidate)),
        **named,  # type: ignore[arg-type]
    )


def this_machine() -> MachineRates:
    """This host as it was measured; otherwise typical rates with the memory that is free here."""
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
