"""Runs a case twice: on `unbounded.shard`, and on plain PyTorch in one process that goes through all ranks' batches."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import unbounded
from tests.differential.cases import Case, Step
from tests.differential.models import Net, loss_of
from tests.zero.training import shard
from unbounded.optim import LAMB

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Fault(Exception):
    """Of the model's own code."""


def make_optimizers(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    every = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() == 2 and "blocks" in n]
    others = [p for p in every if not any(p is m for m in matrices)]
    adam: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3}
    if kind == "muon" or kind == "mixed":
        first = torch.optim.Muon(matrices, lr=1e-2) if kind == "muon" else torch.optim.Adafactor(matrices, lr=1e-2)
        second = torch.optim.AdamW(others, **adam) if kind == "muon" else LAMB(others, lr=1e-2, eps=1e-3)
        return [o for o, params in ((first, matrices), (second, others)) if params] if matrices else [second]
    if kind == "groups":
        groups = [{"params": every[::2], "weight_decay": 0.3}, {"params": every[1::2], "lr": 3e-3}]
        return [torch.optim.AdamW([g for g in groups if g["params"]], **adam)]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "adamw": lambda: torch.optim.AdamW(every, **adam),
        "sgd": lambda: torch.optim.SGD(every, lr=0.1),
        "nesterov": lambda: torch.optim.SGD(every, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        "amsgrad": lambda: torch.optim.Adam(every, amsgrad=True, **adam),
        "adagrad": lambda: torch.optim.Adagrad(every, lr=1e-2, eps=1e-3),
        "nadam": lambda: torch.optim.NAdam(every, **adam),
        "rmsprop": lambda: torch.optim.RMSprop(every, lr=1e-3, eps=1e-3, momentum=0.5),
        "decayed": lambda: torch.optim.AdamW(every, weight_decay=0.1, **adam),
        "adafactor": lambda: torch.optim.Adafactor(every, lr=1e-2),
        "lamb": lambda: LAMB(every, lr=1e-2, eps=1e-3),
    }
    return [makers[kind]()]


class Subject:
    """One of the two runs. The program of a case is written once, here; what differs is in the subclasses."""

    def __init__(self, case: Case) -> None:
        self.case, self.seen = case, []
        torch.manual_seed(case.seed)
        self.model: nn.Module = Net(case.model)

    def run(self) -> list[tuple[str, Any]]:
        for number, step in enumerate(self.case.steps):
            self.step(step, number)
            for op in step.between:
                self.between(op, number)
        self.seen.append(("at the end: weights", self.weights()))
        return self.seen

    def step(self, step: Step, number: int) -> None:
        if step.fault is not None:
            self.fail(step.fault, number)
        if step.action == "closure":
            self.optimizer_step(lambda: self.backwards(step, number))
        else:
            self.backwards(step, number)
            self.before_step(step, number)
            for _ in range({"step": 1, "skip": 0, "twice": 2}[step.action]):
                self.optimizer_step(None)
        self.clear(step.zero)

    def before_step(self, step: Step, number: int) -> None:
        if step.saved_before_step:
            self.save()
        if step.edit is not None:
            self.edit(step.edit)
        if step.clip is not None:
            self.seen.append((f"step {number}: norm", self.clip(*step.clip)))
        if step.saved_before_step and step.edit is None:
            self.load()

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def edit(self, kind: str) -> None:
        for p in self.trained()[:: 2 if kind == "halve" else 3]:
            if kind == "drop":
                p.grad = None
            elif kind == "halve" and p.grad is not None:
                p.grad.mul_(0.5)

    def between(self, op: str, number: int) -> None:
        if op == "eval":
            self.model.eval()
            with torch.no_grad():
                self.seen.append((f"after step {number}: eval", float(loss_of(self.model, number, 9, 0))))
            self.model.train()
        elif op == "state_dict":
            self.seen.append((f"after step {number}: weights", self.weights()))
        elif op in ("save", "load", "wait", "full_params", "write"):
            getattr(self, op)()
        elif op in ("freeze", "thaw"):
            for model in self.models():
                for name, parameter in model.named_parameters():
                    is_meant = name.startswith(("blocks.0.", "head.")) and "base" not in name
                    if is_meant and not name.startswith(self.case.model.frozen):
                        parameter.requires_grad_(op == "thaw")
        elif op in ("rate", "options"):
            for group in self.groups():
                group["lr"] *= 0.5
                if op == "options" and "weight_decay" in group:
                    group["weight_decay"] = 0.02

    def full_params(self) -> None:
        self.write()

    def wait(self) -> None:
        pass


class Plain(Subject):
    """Weights in fp32 and, for 16 bits, a rounded copy that computes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.master = self.model
        self.is_low = case.precision != "fp32"
        self.model = copy.deepcopy(self.master).to(DTYPES[case.precision]) if self.is_low else self.master
        self.scale = float(case.plan.get("loss_scale", 1.0))
        self.optimizers = make_optimizers(case.optimizer, self.master)
        self.saved: Any = None
        if self.is_low:
            with torch.no_grad():
                for p, q in zip(self.master.parameters(), self.model.parameters(), strict=True):
                    p.copy_(q)

    def models(self) -> list[nn.Module]:
        return [self.model, self.master] if self.is_low else [self.model]

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.master.parameters() if p.requires_grad]

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def fail(self, kind: str, number: int) -> None:
        if kind != "forward":
            self.clear("optimizer")

    def backwards(self, step: Step, number: int) -> None:
        for micro in range(step.num_backwards):
            losses = []
            for rank in range(self.case.world_size):
                loss = loss_of(self.model, number, micro, rank)
                losses.append(float(loss.detach()))
                (loss * self.scale / self.case.world_size).backward()
                for low, high in zip(self.model.parameters(), self.master.parameters(), strict=True):
                    if self.is_low and low.grad is not None:
                        added = low.grad.float() / self.scale
                        high.grad = added if high.grad is None else high.grad + added
                        low.grad = None
            self.seen.append((f"step {number}, backward {micro}: loss", losses))
        if step.look == "eval":
            self.seen.append((f"step {number}: look", float(loss_of(self.model, number, 8, 0).detach())))

    def clip(self, how: str, most: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.master.parameters(), most))

    def optimizer_step(self, closure: Any) -> None:
        if closure is not None:
            closure()
        for optimizer in self.optimizers:
            optimizer.step()
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        if self.is_low:
            for p, q in zip(self.master.parameters(), self.model.parameters(), strict=True):
                q.copy_(p)

    def clear(self, how: str) -> None:
        for p in self.master.parameters():
            if how in ("optimizer", "model"):
                p.grad = None
            elif how != "not at all" and p.grad is not None:
                p.grad = torch.zeros_like(p.grad)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().float().clone() for name, value in self.model.state_dict().items()}

    def save(self) -> None:
        grads = [None if p.grad is None else p.grad.clone() for p in self.master.parameters()]
        states = copy.deepcopy([o.state_dict() for o in self.optimizers])
        self.saved = copy.deepcopy(self.master.state_dict()), states, grads

    def load(self) -> None:
        if self.saved is None:
            return
        weights, states, grads = copy.deepcopy(self.saved)
        self.master.load_state_dict(weights)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        for p, grad in zip(self.master.parameters(), grads, strict=True):
            p.grad = grad
        self.round()

    @torch.no_grad()
    def write(self) -> None:
        for model in self.models():
            for p in list(model.parameters())[::3]:
                p.mul_(0.5)


class Ours(Subject):
    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        super().__init__(case)
        self.rank, self.folder, self.has_saved = rank, folder, False
        if case.precision != "fp32":
            self.model = self.model.to(DTYPES[case.precision])
        optimizers = make_optimizers(case.optimizer, self.model)
        given = optimizers[0] if len(optimizers) == 1 else optimizers
        self.model, self.optimizer = shard(self.model, given, case.plan)

    def models(self) -> list[nn.Module]:
        return [self.model]

    def groups(self) -> list[dict[str, Any]]:
        return list(self.optimizer.param_groups)

    def fail(self, kind: str, number: int) -> None:
        def broken(*_: Any) -> None:
            raise Fault

        block = self.model.blocks[-1]
        if kind == "forward":
            handle = block.register_forward_pre_hook(broken)
            with contextlib.suppress(Fault):
                loss_of(self.model, number, 7, self.rank)
        elif kind == "backward":
            handle = block.register_full_backward_hook(broken)
            with contextlib.suppress(Fault):
                self.optimizer.scale(loss_of(self.model, number, 7, self.rank)).backward()
        else:
            loss = loss_of(self.model, number, 7, self.rank)
            handle = loss.register_hook(broken)
            with contextlib.suppress(Fault):
                self.optimizer.scale(loss).backward()
        handle.remove()
        if kind != "forward":
            self.optimizer.zero_grad()

    def backwards(self, step: Step, number: int) -> None:
        for micro in range(step.num_backwards):
            is_last = micro == step.num_backwards - 1
            loss = loss_of(self.model, number, micro, self.rank)
            self.seen.append((f"step {number}, backward {micro}: loss", float(loss.detach())))
            if step.look == "forward":
                loss_of(self.model, number, 6, self.rank)
            elif step.look == "state_dict":
                self.model.state_dict()
            elif step.look == "eval":
                with torch.no_grad():
                    seen = float(loss_of(self.model, number, 8, 0))
            with contextlib.ExitStack() as stack:
                if step.without_sync and (not is_last or step.action == "skip"):
                    stack.enter_context(self.optimizer.no_sync())
                if step.hint and is_last:
                    stack.enter_context(self.optimizer.last_backward(max_norm=step.clip[1] if step.clip else None))
                self.optimizer.scale(loss).backward()
        if step.look == "eval":
            self.seen.append((f"step {number}: look", seen))

    def clip(self, how: str, most: float) -> float:
        if how == "own" or self.case.precision == "fp16":
            return float(self.optimizer.clip_grad_norm_(most))
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), most))

    def optimizer_step(self, closure: Any) -> None:
        self.optimizer.step(closure)

    def clear(self, how: str) -> None:
        if how in ("optimizer", "zeros"):
            self.optimizer.zero_grad(set_to_none=how == "optimizer")
        elif how in ("model", "model zeros"):
            self.model.zero_grad(set_to_none=how == "model")

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().float().clone() for name, value in self.model.state_dict().items()}

    def save(self) -> None:
        self.folder.mkdir(exist_ok=True)
        unbounded.save(self.folder / "saved", self.model, self.optimizer)
        self.has_saved = True

    def load(self) -> None:
        if self.has_saved:
            unbounded.load(self.folder / "saved", self.model, self.optimizer)

    def wait(self) -> None:
        self.optimizer.wait()

    @torch.no_grad()
    def full_params(self) -> None:
        with unbounded.full_params(self.model):
            for p in list(self.model.parameters())[::3]:
                p.mul_(0.5)

    @torch.no_grad()
    def write(self) -> None:
        for p in list(self.model.parameters())[::3]:
            p.mul_(0.5)


def run_ours(rank: int, world_size: int, case: Case, folder: str) -> tuple[str, Any]:
    """What the sharded run saw, or how it was refused."""
    try:
        ours = Ours(case, rank, Path(folder))
        return "seen", ours.run()
    except unbounded.UnboundedError as error:
        where = [f for f in traceback.extract_tb(error.__traceback__) if "differential" in f.filename][-1]
        return "refused", f"{type(error).__name__} at {where.name}: {error}"


def run_plain(case: Case) -> list[tuple[str, Any]]:
    return Plain(case).run()
