"""Optimizers that see whole tensors, and those that users declare, against their own classes in plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.zero.training import Batch, Run, Several, Task, assert_parity, average_gradients, shard, train
from unbounded.optim import LAMB


class PaperLAMB(torch.optim.Optimizer):
    """Algorithm 2 of You et al., 2020, written out."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for x in group["params"]:
                if x.grad is None:
                    continue
                t, m, v = self.state[x].get("all", (0, torch.zeros_like(x), torch.zeros_like(x)))
                t, m, v = t + 1, beta1 * m + (1 - beta1) * x.grad, beta2 * v + (1 - beta2) * x.grad**2
                r = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"]) + group["weight_decay"] * x
                ratio = x.norm() / r.norm() if x.norm() > 0 and r.norm() > 0 else 1.0
                x -= group["lr"] * ratio * r
                self.state[x]["all"] = (t, m, v)


class Own(torch.optim.Optimizer):
    """A user's own optimizer: momentum of signs, with a state that begins above zero and a running number."""

    unbounded_rule = "elementwise"

    def __init__(self, params: Any, speed: float = 1e-2) -> None:
        super().__init__(params, {"lr": speed})
        self.decay = 0.9  # outside the groups, as people do

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["scale"], state["warmth"] = torch.full_like(p, 0.5), 0.1
                state["scale"] = self.decay * state["scale"] + (1 - self.decay) * p.grad.abs()
                state["warmth"] = min(1.0, state["warmth"] * 1.7)
                p.sub_(p.grad / (state["scale"] + 0.1), alpha=group["lr"] * state["warmth"])


class Liar(Own):
    """Scales by the norm of the tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm(), alpha=1e-2)


class GlobalLiar(Own):
    """Scales by the norm of all tensors."""

    unbounded_rule = "tensor"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            p.sub_(p.grad / norm, alpha=1e-2)


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What people give to Muon, and the rest."""
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    return inner, [p for p in model.parameters() if all(p is not other for other in inner)]


def make(kind: str, model: nn.Module) -> Any:
    inner, rest = matrices(model)
    if kind == "Muon + AdamW":
        muon = torch.optim.Muon(inner, lr=0.02, weight_decay=0.1)
        return Several(muon, torch.optim.AdamW(rest, lr=1e-2, eps=1e-5))
    if kind == "Muon alike + SGD":
        muon = torch.optim.Muon(inner, lr=1e-2, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3)
        return Several(muon, torch.optim.SGD(rest, lr=0.1, momentum=0.9))
    if kind == "Adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=2e-2, weight_decay=0.1)
    if kind == "transformers' Adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    if kind == "transformers' Adafactor, momentum":
        from transformers.optimization import Adafactor

        return Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9)
    if kind == "LAMB":
        return PaperLAMB(model.parameters(), lr=1e-2, weight_decay=0.1)
    return Own(model.parameters())


KINDS = (
    "Muon + AdamW",
    "Muon alike + SGD",
    "Adafactor",
    "transformers' Adafactor",
    "transformers' Adafactor, momentum",
    "LAMB",
    "a user's own",
)


class Clipped(Task):
    steps = 3
    max_norm = 0.7


def ours_of(kind: str, model: nn.Module) -> Any:
    if kind == "LAMB":
        return LAMB(model.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = make(kind, model)
    return optimizer.members if isinstance(optimizer, Several) else optimizer


def compare(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[Run, Run]]:
    """The plain and the sharded run of every case."""
    done, plain_runs = [], {}
    for kind, plan in cases:
        task = Clipped()
        torch.manual_seed(3)
        model = task.model()
        if kind not in plain_runs:
            plain_runs[kind] = train_plain(task, kind, copy.deepcopy(model), rank, world_size)
        model, optimizer = shard(model, ours_of(kind, model), plan)
        run = train(task, model, optimizer, rank=rank, finish=lambda: optimizer.clip_grad_norm_(0.7))  # noqa: B023
        run.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        done.append((plain_runs[kind], run))
    return done


def train_plain(task: Task, kind: str, model: nn.Module, rank: int, world_size: int) -> Run:
    def finish() -> float:
        average_gradients(model, world_size)
        return float(nn.utils.clip_grad_norm_(model.parameters(), 0.7))

    run = train(task, model, make(kind, model), rank=rank, finish=finish)
    run.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


PLACES = (
    {"stage": 3, "optimizer": "disk", "weights": "host"},
    {"stage": 0},
    {"stage": 3, "optimizer": "host"},
    {"stage": 1, "optimizer": "disk", "gradients": "disk"},
    {"stage": 2, "optimizer": "host"},
    {"stage": 3, "weights": "disk", "optimizer": "device"},
)


@pytest.mark.every_second
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_updates_of_whole_tensors_equal_the_optimizers_own_on_every_stage_and_tier(
    ranks: Any, world_size: int, tmp_path: Path
) -> None:
    cases = [(kind, dict(PLACES[(i + shift) % len(PLACES)])) for i, kind in enumerate(KINDS) for shift in (0, 1)]
    cases = [(kind, {**plan, "disk_path": str(tmp_path)}) for kind, plan in cases]
    results = ranks(world_size, compare, cases)
    for number, case in enumerate(cases):
        # Muon rounds gradients to bf16. One in the middle of two such numbers may go either way, for a difference in
        # its last bit: that changes a matrix by 6e-4 of its norm.
        tolerance = 2e-3 if "Muon" in case[0] else 3e-6
        try:
            assert_parity([result[number] for result in results], tolerance=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


# -- going on ----------------------------------------------------------------------------------------------------------


def go_on(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    """Steps on the same batches whatever the rank, so that any number of ranks has the same mean."""
    for step in range(first, last):
        model.loss(Batch(step, 0, 0).tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()


def first_half(rank: int, world_size: int, folder: Path) -> None:
    for number, kind in enumerate(KINDS):
        torch.manual_seed(3)
        model = Task().model()
        model, optimizer = shard(model, ours_of(kind, model), {"optimizer": "disk", "disk_path": str(folder)})
        go_on(model, optimizer, 0, 2)
        unbounded.save(folder / str(number), model, optimizer)


def second_half(rank: int, world_size: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    found = []
    for number, kind in enumerate(KINDS):
        model = Task().model()
        model, optimizer = shard(model, ours_of(kind, model), {"stage": 1 if number % 2 else 3, "optimizer": "host"})
        unbounded.load(folder / str(number), model, optimizer)
        go_on(model, optimizer, 2, 4)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def stepped(kind: str, count: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = Task().model()
    optimizer = make(kind, model)
    go_on(model, optimizer, 0, count)
    return model, optimizer


def test_checkpoints_go_on_under_another_number_of_ranks_and_another_plan(ranks: Any, tmp_path: Path) -> None:
    ranks(2, first_half, tmp_path)
    for world_size in (1, 4):
        for number, weights in enumerate(ranks(world_size, second_half, tmp_path)[0]):
            plain, _ = stepped(KINDS[number], 4)
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=3e-6, msg=f"{KINDS[number]}: {name}")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "LAMB"])
def test_an_optimizer_that_has_stepped_goes_on_from_its_states(kind: str) -> None:
    reference, _ = stepped(kind, 4)
    model, optimizer = stepped(kind, 2)
    model, optimizer = shard(model, optimizer.members if isinstance(optimizer, Several) else optimizer, {})
    go_on(model, optimizer, 2, 4)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=3e-6)


def half(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for kind, plan in cases:
        torch.manual_seed(3)
        model = Task().model()
        model, optimizer = shard(model, ours_of(kind, model), {"precision": "bf16", **plan})
        go_on(model, optimizer, 0, 3)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def test_bf16_weights_are_rounded_masters_with_the_same_bits_on_any_number_of_ranks_and_tiers(
    ranks: Any, tmp_path: Path
) -> None:
    kinds = ("Muon + AdamW", "Adafactor", "a user's own")
    place = {**PLACES[3], "disk_path": str(tmp_path)}
    one = ranks(1, half, [(kind, {}) for kind in kinds])[0]
    two = ranks(2, half, [(kind, place) for kind in kinds])
    for number, kind in enumerate(kinds):
        for name, value in one[number].items():
            assert torch.equal(value, two[0][number][name]), (kind, name)
        reference = masters(kind)
        for name, value in reference.items():
            torch.testing.assert_close(one[number][name].float(), value, rtol=1e-2, atol=1e-3)


def masters(kind: str) -> dict[str, torch.Tensor]:
    """Plain mixed precision: fp32 masters, with forwards and gradients in bf16."""
    torch.manual_seed(3)
    master = Task().model()
    optimizer, low = make(kind, master), copy.deepcopy(master).to(torch.bfloat16)
    for step in range(3):
        with torch.no_grad():
            for p, q in zip(low.parameters(), master.parameters(), strict=True):
                p.copy_(q)
        low.zero_grad()
        low.loss(Batch(step, 0, 0).tokens()).backward()
        for p, q in zip(low.parameters(), master.parameters(), strict=True):
            q.grad = p.grad.float()
        optimizer.step()
    return {name: value.detach().clone() for name, value in master.state_dict().items()}


class Matrices(torch.optim.Optimizer):
    """A user's own optimizer that refuses all other shapes, but for groups of others."""

    unbounded_rule = "tensor"

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02, "others": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if p.ndim != 2 and not group["others"]:
                    raise ValueError("not a matrix")
                kept = self.state[p].setdefault("speed" if group["others"] else "momentum", torch.zeros_like(p))
                kept.lerp_(p.grad, 0.3)
                p.sub_(kept if group["others"] else kept / (kept.norm() + 0.1), alpha=0.02)


def test_groups_of_a_class_that_take_other_shapes_are_tried_with_those_that_they_have() -> None:
    found = []
    for plan in (None, {}, {"weights": "disk", "optimizer": "disk", "gradients": "disk"}):
        torch.manual_seed(3)
        model = Task().model()
        inner, rest = matrices(model)
        optimizer: Any = Matrices([{"params": inner}, {"params": rest, "others": True}])
        if plan is not None:
            model, optimizer = shard(model, optimizer, plan)
        for step in range(3):
            model.loss(Batch(step, 0, 0).tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    for ours in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(ours[name], value, rtol=2e-5, atol=2e-6)
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(unbounded.PlanError, match=r"Matrices cannot update .* 1 dims \(not a matrix\)"):
        shard(pair, Matrices([{"params": pair[0].parameters(), "others": True}, {"params": pair[1].parameters()}]), {})


@pytest.mark.parametrize("kind", [torch.optim.Muon, Matrices])
@pytest.mark.parametrize("plan", [{}, {"weights": "disk", "optimizer": "disk", "gradients": "disk"}], ids=str)
def test_matrices_are_trained_among_frozen_parameters_that_are_none(plan: dict[str, Any], kind: Any) -> None:
    """LoRA with Muon: frozen norms and biases are in units with frozen matrices, some of which the optimizer has."""
    found = []
    for chosen in (None, plan):
        torch.manual_seed(3)
        task = Task()
        model = task.model()
        optimizer: Any = kind(matrices(model)[0])
        for parameter in matrices(model)[1]:
            parameter.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        if chosen is not None:
            model, optimizer = shard(model, optimizer, chosen)
        for step in range(3):
            model.loss(Batch(step, 0, 0).tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=2e-5, atol=2e-6)
    with pytest.raises(unbounded.StateError, match=r"frozen at `shard`, so it is not laid out for its optimizer"):
        model.blocks[0].requires_grad_(True)
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    _, optimizer = shard(pair, kind([pair[0].weight.requires_grad_(True)]), plan)
    pair[1].weight.requires_grad_(True)
    with pytest.raises(unbounded.StateError, match=r"frozen at `shard`, with parameters that \S* cannot update"):
        optimizer.add_param_group({"params": [pair[1].weight]})


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_a_rule_cannot_do_is_refused_with_what_to_do_instead() -> None:
    def refused(optimizer: Any, model: nn.Module, message: str, **plan: Any) -> None:
        with pytest.raises(unbounded.PlanError, match=message):
            unbounded.shard(model, optimizer, plan)

    model = Task().model()
    inner, rest = matrices(model)
    pair = [torch.optim.Muon(inner), torch.optim.AdamW(rest)]
    refused(pair, model, r'Muon has no "compact" format.*"exact"', precision="bf16", optimizer_format="compact")
    refused(Liar(model.parameters()), model, r"Liar declares.*differ by .* when a tensor is cut in two.*tensor")
    refused(GlobalLiar(model.parameters()), model, r"GlobalLiar declares.*when tensors are updated one by one")
    refused([], model, "a list of nothing")
    refused(pair[:1], model, "does not have the trainable parameters")
    large = nn.Sequential(nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False))
    unbounded.tile(large, 16 * 2**10)
    refused(torch.optim.Muon(large.parameters()), large, r"Muon needs the parameter '0.weight' whole.*in tiles")


def test_schedulers_of_joined_optimizers_and_unused_parameters_work_as_in_plain_training() -> None:
    runs = []
    for is_sharded in (False, True):
        torch.manual_seed(3)
        model = Task().model()
        pair = make("Muon + AdamW", model)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(member, 0.5) for member in pair.members]
        optimizer: Any = pair
        if is_sharded:
            model, optimizer = shard(model, pair.members, {})
            assert optimizer.kind == "Muon + AdamW"
        for step in range(3):
            blocks = model.blocks
            if step == 1:
                model.blocks = nn.ModuleList([blocks[0], blocks[2]])  # the middle one has no gradient
            model.loss(Batch(step, 0, 0).tokens()).backward()
            model.blocks = blocks
            optimizer.step()
            optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
        runs.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, rtol=1e-4, atol=3e-6)
