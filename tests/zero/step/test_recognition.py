"""Which update an optimizer stands for, what its state dict gives back, and the loss scale that the plan asks for."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.training import Batch, TinyGPT
from unbounded import shard
from unbounded.planner.plan import Plan
from unbounded.zero.step.loss_scale import LossScale


class Named(torch.optim.AdamW):
    """A subclass that leaves the update alone, as frameworks make them."""


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Lion(torch.optim.Optimizer):
    """The published update, written out."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                first, second = group["betas"]
                p.add_(m.lerp(p.grad, 1 - first).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - second)


class DeclaredLion(Lion):
    unbounded_rule = "lion"


class Cautious(DeclaredLion):
    """Another published update, under the same name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                sign = m.lerp(p.grad, 1 - group["betas"][0]).sign()
                p.sub_(sign * (sign * p.grad > 0), alpha=group["lr"])
                m.lerp_(p.grad, 1 - group["betas"][1])


class Decaying(torch.optim.Optimizer):
    """Descent whose rate falls with a count that is kept in the param group, the optimizer or the states."""

    unbounded_rule = "elementwise"

    def __init__(self, params: Any, place: str, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.place, self.count = place, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += self.place == "attribute"
        for group in self.param_groups:
            if self.place == "group":
                group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                if self.place == "late" and state["count"] > 2:
                    state["more"] = state.get("more", 0) + 1
                more = {"attribute": self.count, "group": group.get("count"), "late": state.get("more", 0) + 1}
                norm = p.grad.norm() if self.place == "norm" else 1
                p.sub_(p.grad / norm, alpha=group["lr"] / more.get(self.place, state["count"]))


class ScheduleFree(DeclaredLion):
    def eval(self) -> None:
        """Where a class like this puts averages into the weights."""


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, scheduler: Any = None) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model.loss(Batch(step, 0, 0).tokens())
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def tiny() -> nn.Module:
    torch.manual_seed(3)
    return TinyGPT()


@pytest.mark.parametrize("kind", [Named, DeclaredLion])
def test_a_class_is_recognised_by_its_base_or_by_what_it_declares(kind: Any) -> None:
    plain, ours = tiny(), tiny()
    reference = train(plain, kind(plain.parameters(), lr=1e-3, weight_decay=0.1))
    assert train(*shard(ours, kind(ours.parameters(), lr=1e-3, weight_decay=0.1))) == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lion, r'test_recognition\.Lion cannot be run exactly.*declare it: `unbounded_rule = "lion"`'),
        (OwnStep, r"OwnStep has its own step, which would not run.*Give a torch\.optim\.AdamW"),
        (ScheduleFree, r"ScheduleFree has an eval\(\).*would not run"),
        (torch.optim.LBFGS, r"LBFGS cannot be run exactly"),
    ],
)
def test_a_class_that_only_looks_like_a_known_one_is_refused(kind: Any, message: str) -> None:
    model = tiny()
    with pytest.raises(unbounded.PlanError, match=message):
        shard(model, kind(model.parameters()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Cautious, r"Cautious declares unbounded_rule = 'lion'.*updates differ by .* from those of Lion"),
        (lambda p: Decaying(p, "group"), r"changes the option 'count', which no step would keep.*state of each param"),
        (lambda p: Decaying(p, "attribute"), r"changes the attribute 'count', which no step would keep"),
        (lambda p: Decaying(p, "norm", lr=0.0), r"differ by .* when a tensor is cut in two"),  # as a warm-up begins
        (lambda p: Decaying(p, "norm", lr=torch.tensor(1e-7)), r"differ by .* when a tensor is cut in two"),
    ],
)
def test_a_class_that_does_not_update_as_it_declares_is_refused(make: Any, message: str) -> None:
    model = tiny()
    with pytest.raises(unbounded.PlanError, match=message):
        shard(model, make(model.parameters()))


def test_counts_in_the_states_go_on_and_a_state_that_begins_late_is_refused() -> None:
    plain, ours, late = tiny(), tiny(), tiny()
    reference = train(plain, Decaying(plain.parameters(), "state"))
    assert train(*shard(ours, Decaying(ours.parameters(), "state"))) == pytest.approx(reference, rel=1e-5)
    with pytest.raises(unbounded.StateError, match=r"Decaying began to keep more in update 3.*in the first update"):
        train(*shard(late, Decaying(late.parameters(), "late")), steps=4)


def test_a_step_that_was_put_on_the_object_is_refused_but_for_a_schedulers() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(unbounded.PlanError, match=r"the step of this SGD object was replaced.*register_step_pre_hook"):
        shard(model, optimizer)
    del optimizer.step
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert len(train(*shard(model, optimizer))) == 3


def test_transparent_wrappers_of_frameworks_are_looked_through() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    wrapped = accelerate.Accelerator(cpu=True).prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    _, optimizer = shard(model, wrapped)
    assert optimizer.kind == "SGD"


def test_momentum_that_a_scheduler_brings_works_before_shard_and_is_refused_clearly_after_it() -> None:
    def cycle(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)

    plain, ours, late = tiny(), tiny(), tiny()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    reference = train(plain, optimizer, scheduler=cycle(optimizer))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scheduler = cycle(optimizer)
    assert train(*shard(ours, optimizer), scheduler=scheduler) == pytest.approx(reference, rel=1e-5)
    _, optimizer = shard(late, torch.optim.SGD(late.parameters(), lr=0.1))
    with pytest.raises(unbounded.StateError, match=r"momentum=0\.\d+, but had 0 in `shard`.*cycle_momentum=False"):
        train(late, optimizer, scheduler=cycle(optimizer))
    damped = tiny()
    _, optimizer = shard(damped, torch.optim.SGD(damped.parameters(), lr=0.1, momentum=0.9, dampening=0.5))
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(unbounded.StateError, match=r"begins with momentum=0 and dampening=0\.5.*Leave dampening at 0"):
        train(damped, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    assert len(train(damped, optimizer)) == 3


# -- the state dict ------------------------------------------------------------------------------------------------


def test_the_state_dict_gives_groups_and_counters_back_through_torch_save(tmp_path: Any) -> None:
    model = tiny()
    _, optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()  # nothing is missing yet
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    file = io.BytesIO()
    with pytest.warns(UserWarning, match=r"not the states of 3 steps .* unbounded\.save") as told:
        torch.save(optimizer.state_dict(), file)
    assert told[0].filename == __file__
    unbounded.save(tmp_path / "states", model, optimizer)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert saved["state"] == {}
    assert "unbounded.save(folder, model, optimizer)" in saved["unbounded"]["states"]

    fresh = tiny()
    _, other = shard(fresh, torch.optim.AdamW(fresh.parameters(), lr=1e-3))
    with pytest.raises(unbounded.StateError, match=r"taken after step 3.*after step 0.*unbounded\.load"):
        other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 1e-3  # nothing was changed
    unbounded.load(tmp_path / "states", fresh, other)
    other.param_groups[0]["lr"] = 1.0
    saved["param_groups"][0]["betas"] = [0.9, 0.999]
    other.load_state_dict(saved)
    saved["param_groups"][0]["betas"][0] = 0.5  # what was loaded is the optimizer's own
    assert other.param_groups[0]["lr"] == 0.25
    assert train(fresh, other) == train(model, optimizer)  # usable, and the same


def test_state_dicts_of_other_optimizers_are_refused_and_leave_this_one_usable() -> None:
    plain, model = tiny(), tiny()
    stock = torch.optim.AdamW(plain.parameters())
    train(plain, stock)
    _, optimizer = shard(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(unbounded.StateError, match=r"not sharded and holds its states whole.*before `shard`"):
        optimizer.load_state_dict(stock.state_dict())
    groups = optimizer.state_dict()
    groups["param_groups"].append({"params": [0], "lr": 7.0})
    with pytest.raises(unbounded.StateError, match="groups of"):
        optimizer.load_state_dict(groups)
    with pytest.raises(unbounded.StateError, match="no param_groups"):
        optimizer.load_state_dict({})
    plain = tiny()
    assert train(model, optimizer) == pytest.approx(train(plain, _adamw(plain)), rel=1e-5)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


# -- the loss scale ------------------------------------------------------------------------------------------------


def scales(scale: LossScale, overflows: str) -> list[float]:
    """The value after each step: "x" overflows, "." does not."""
    values = []
    for mark in overflows:
        scale = scale.after_step(overflow=mark == "x")
        values.append(scale.value)
    return values


@pytest.mark.parametrize(
    ("fields", "overflows", "values"),
    [
        ({}, ".x.....", [16, 8, 8, 8, 16, 16, 16]),
        ({"loss_scale_hysteresis": 2}, "xx...x", [16, 8, 8, 8, 16, 16]),
        ({"loss_scale_minimum": 8}, "xxx", [8, 8, 8]),
        ({"loss_scale_window": 0}, "x....", [16] * 5),
    ],
)
def test_the_loss_scale_follows_the_fields_of_the_plan(fields: Any, overflows: str, values: list[float]) -> None:
    plan = Plan(**{"precision": "fp16", "loss_scale": 16, "loss_scale_window": 3, **fields})
    scale = LossScale.of_plan(plan)
    assert scale is not None
    assert scales(scale, overflows) == values


def test_a_loss_in_fp16_that_was_not_scaled_is_refused_at_the_step() -> None:
    model = tiny()
    _, optimizer = shard(model, torch.optim.SGD(model.parameters(), lr=0.1), {"precision": "fp16"})
    with pytest.raises(unbounded.StateError, match=r"not scaled.*optimizer\.scale\(loss\)\.backward.*loss_scale=1"):
        train(model, optimizer, 1)
    optimizer.zero_grad()
    (optimizer.scale(model.loss(Batch(0, 0, 0).tokens())) * float("inf")).backward()
    optimizer.step()
    assert (optimizer.step_was_skipped, optimizer.skipped_steps) == (True, 1)
    optimizer.zero_grad()
    optimizer.scale(model.loss(Batch(0, 0, 0).tokens())).backward()
    optimizer.step()
    optimizer.step()  # the same gradients again
    assert not optimizer.step_was_skipped
    plain = tiny()
    fields = {"precision": "fp16", "loss_scale": 1, "loss_scale_window": 0}
    _, optimizer = shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1), fields)
    assert len(train(plain, optimizer)) == 3
    assert not optimizer.step_was_skipped


def test_adapters_after_shard_are_refused_with_the_right_order() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    shard(model, _adamw(model))
    late = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM"))
    with pytest.raises(unbounded.StateError, match=r"after `shard`.*get_peft_model first"):
        late(input_ids=torch.zeros(1, 4, dtype=torch.long))
