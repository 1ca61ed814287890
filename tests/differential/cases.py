"""What a case is, drawn from its seed: a model, a plan, an optimizer and what the loop does in every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.differential.models import ModelSpec

OPTIMIZERS = (
    *("adamw", "adamw", "adamw", "groups", "sgd", "nesterov", "amsgrad", "adagrad", "nadam", "rmsprop", "decayed"),
    *("muon", "adafactor", "lamb", "mixed"),
)
WHOLE = ("muon", "adafactor", "lamb", "mixed")


@dataclass
class Step:
    num_backwards: int = 1
    without_sync: bool = False  # all but the last backward before a step
    hint: bool = False  # last_backward around it
    clip: tuple[str, float] | None = None
    edit: str | None = None  # of gradients, before the step
    saved_before_step: bool = False
    fault: str | None = None  # an exception before the first backward: "forward", "backward", "early backward"
    look: str | None = None  # between the forward and the backward
    action: str = "step"
    zero: str = "optimizer"
    between: list[str] = field(default_factory=list)


@dataclass
class Case:
    seed: int
    world_size: int
    model: ModelSpec
    plan: dict[str, Any]
    optimizer: str
    steps: list[Step]

    @property
    def precision(self) -> str:
        return str(self.plan["precision"])


def draw_case(seed: int) -> Case:
    draw = random.Random(seed)
    world_size = draw.choice((1, 1, 2))
    optimizer = draw.choice(OPTIMIZERS)
    plan = _draw_plan(draw, optimizer)
    steps = [_draw_step(draw, plan, number, world_size) for number in range(draw.choice((3, 4, 5)))]
    model = _draw_model(draw)
    if plan["gradients"] != "none" and draw.random() < 0.4:
        steps = _steady(draw, steps)
    _save_clean(steps)
    return Case(seed, world_size, model, plan, optimizer, steps)


def _draw_model(draw: random.Random) -> ModelSpec:
    blocks = [draw.choice(("mlp", "mlp", "lora", "partly", "nested")) for _ in range(draw.choice((1, 2, 3, 4)))]
    if draw.random() < 0.25:
        blocks.insert(draw.randrange(1, len(blocks) + 1), "again")
    frozen = tuple(name for name in ("embedding", "blocks.0", "blocks.1.", "head", "place") if draw.random() < 0.1)
    return ModelSpec(
        width=draw.choice((8, 11)),
        blocks=tuple(blocks),
        tied=draw.random() < 0.3,
        looped=draw.random() < 0.2,
        borrowed=draw.random() < 0.15,
        frozen=frozen,
        skips=draw.choice(("none", "none", "none", "together", "apart")),
    )


def _draw_plan(draw: random.Random, optimizer: str) -> dict[str, Any]:
    def tier() -> Any:
        one = draw.choice(("device", "host", "host", "disk"))
        return one if draw.random() < 0.8 else (("root*", draw.choice(("device", "host", "disk"))), ("*", one))

    stage = draw.choice((0, 1, 2, 3, 3, 3))
    precision = draw.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
    plan: dict[str, Any] = {"stage": stage, "precision": precision, "unit_numel": draw.choice((None, 64, 200))}
    plan["optimizer"] = tier()
    if stage == 3:
        plan["weights"] = tier()
    if draw.random() < 0.3 and precision != "fp16":
        plan["gradients"] = "none"
    else:
        plan["gradients"] = tier()
        plan["early_units"] = draw.choice((0, 0, 2, 9))
    if precision != "fp32" and optimizer not in WHOLE and optimizer in ("adamw", "groups") and draw.random() < 0.3:
        plan["optimizer_format"] = "compact"
    plan["activations"] = draw.choice(("keep", "keep", "recompute", "host"))
    plan["prefetch_units"] = draw.choice((0, 1, 2, 4))
    if precision == "fp16":
        plan |= {"loss_scale": 256.0, "loss_scale_window": 0}
    return plan


def _draw_step(draw: random.Random, plan: dict[str, Any], number: int, world_size: int) -> Step:
    step = Step()
    keeps = plan["gradients"] != "none"
    step.fault = draw.choice((None,) * 6 + ("forward", "backward" if keeps else "early backward", "early backward"))
    step.look = draw.choice((None,) * 4 + ("eval", "state_dict", "forward"))
    step.between = [op for op in BETWEEN if draw.random() < 0.12]
    if world_size > 1:
        step.between = [op for op in step.between if op != "write"]
    step.zero = draw.choice(("optimizer", "optimizer", "model"))
    step.action = draw.choice(("step", "step", "step", "closure"))
    if not keeps:
        return step
    step.num_backwards = draw.choice((1, 1, 2, 3))
    step.without_sync = draw.random() < 0.2
    step.hint = draw.random() < 0.2
    step.clip = draw.choice((None, None, ("own", 0.1), ("own", 100.0), ("torch", 0.1)))
    step.action = draw.choice(("step",) * 6 + ("closure", "skip", "twice"))
    step.zero = draw.choice(("optimizer", "optimizer", "model", "zeros", "model zeros", "not at all"))
    if not (step.hint and step.clip is None):
        step.edit = draw.choice((None,) * 5 + ("halve", "drop", "read"))
        step.saved_before_step = draw.random() < 0.1
    if step.action == "closure":
        step.clip = step.edit = None
        step.saved_before_step = False
    if plan["precision"] == "fp16":  # a step divides by the scale in place, as torch's GradScaler does
        step.action = "step" if step.action == "twice" else step.action
        step.zero = "zeros" if step.zero == "not at all" else step.zero
    if step.hint and step.clip is None:  # what is promised there
        step.action = "step"
        step.num_backwards = 1
        step.zero = draw.choice(("optimizer", "model"))
    return step


def _steady(draw: random.Random, steps: list[Step]) -> list[Step]:
    """A loop whose steps are alike, as most are, so that the engine's guesses about the next one are good: only what
    happens between them differs, and one step.
    """
    num_backwards = steps[0].num_backwards
    alike = [
        replace(step, num_backwards=num_backwards, hint=False, fault=None, edit=None, action="step", zero="optimizer")
        for step in (*steps, *steps)
    ]
    alike = [replace(step, clip=draw.choice((None, ("own", 100.0))), between=[*step.between]) for step in alike]
    alike[draw.randrange(len(alike))] = replace(draw.choice(steps), saved_before_step=False)
    return alike


def _save_clean(steps: list[Step]) -> None:
    """A checkpoint leaves out gradients that a step has used: nothing is saved where some are left of the last step."""
    is_clean = True
    for step in steps:
        step.saved_before_step = step.saved_before_step and is_clean
        is_clean = step.zero in ("optimizer", "model")
        if not is_clean:
            step.between = [op for op in step.between if op != "save"]


BETWEEN = ("eval", "state_dict", "save", "load", "rate", "freeze", "thaw", "wait", "full_params", "write", "options")
