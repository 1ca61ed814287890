"""Recipes that people write around a training loop, each as papers and tutorials have it."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import unbounded
from tests.semantics.programs import ALONE, Block, Net, adamw, compare, data, step, weights


def backward(model: nn.Module, number: int = 0) -> Tensor:
    loss = model(data(number)).square().mean()
    loss.backward()
    return loss.detach().clone()


def whole(model: nn.Module) -> Any:
    """For where a recipe reads or changes weights or gradients of which several ranks have parts."""
    is_shared = dist.is_initialized() and dist.get_world_size() > 1
    return unbounded.full_params(model) if is_shared else contextlib.nullcontext()


def averaged_model(model: nn.Module, optimizer: Any) -> Any:
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for number in range(3):
        step(model, optimizer, number)
        average.update_parameters(model)
    return average(data(7)), weights(average)


def stochastic_averaging(model: nn.Module, optimizer: Any) -> Any:
    average = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-3, anneal_epochs=2)
    for number in range(3):
        step(model, optimizer, number)
        average.update_parameters(model)
        scheduler.step()
    torch.optim.swa_utils.update_bn([data(number) for number in range(3)], average)
    return average(data(7)), weights(average), [group["lr"] for group in optimizer.param_groups]


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def gradient_surgery(model: nn.Module, optimizer: Any) -> Any:
    """PCGrad: a gradient per task, each projected off those it conflicts with, and written to `.grad`."""
    parameters = list(model.parameters())
    for number in range(3):
        output = model(data(number))
        losses = [output[:, 0].square().mean(), (output[:, 1] - 1).square().mean(), -output[:, 2].mean()]
        tasks = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        flat = [torch.cat([grad.reshape(-1) for grad in grads]) for grads in tasks]
        projected = []
        for one in flat:
            kept = one.clone()
            for other in flat:
                if (dot := torch.dot(kept, other)) < 0:
                    kept -= dot / other.square().sum() * other
            projected.append(kept)
        total, position = sum(projected), 0
        with whole(model):
            for parameter in parameters:
                parameter.grad = total[position : position + parameter.numel()].view_as(parameter).clone()
                position += parameter.numel()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def sharpness_aware(model: nn.Module, optimizer: Any) -> Any:
    """SAM: up the slope, a second forward and backward there, and back."""
    for number in range(3):
        backward(model, number)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad(), whole(model):
            old = {p: p.data.clone() for p in model.parameters()}
            for p in model.parameters():
                p.add_(p.grad * (0.05 / norm))
        optimizer.zero_grad()
        backward(model, number)
        with whole(model):
            for p in model.parameters():
                p.data = old[p]
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def lookahead(model: nn.Module, optimizer: Any) -> Any:
    with whole(model):
        slow = [p.detach().clone() for p in model.parameters()]
    for number in range(4):
        step(model, optimizer, number)
        with whole(model):
            for kept, p in zip(slow, model.parameters(), strict=True):
                kept += 0.5 * (p.data - kept)
                p.data.copy_(kept)
    return weights(model)


def centralize(model: nn.Module, optimizer: Any) -> Any:
    """Gradient centralization, gradient noise and clipping by value, all by writing to `.grad`."""
    torch.manual_seed(1)
    for number in range(3):
        backward(model, number)
        with whole(model):
            for p in model.parameters():
                if p.grad.dim() > 1:
                    p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))
                p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weight_clipping(model: nn.Module, optimizer: Any) -> Any:
    """The critic of a Wasserstein GAN; weight decay by hand; a norm constraint on rows."""
    for number in range(3):
        step(model, optimizer, number)
        with torch.no_grad(), whole(model):
            for p in model.parameters():
                p.data.clamp_(-0.2, 0.2)
            for p in model.blocks.parameters():
                p.mul_(0.99)
            model.last.weight.div_(model.last.weight.norm(dim=1, keepdim=True).clamp(min=1.0))
            torch.renorm(model.first.weight, 2, 0, 0.3, out=model.first.weight)
    return weights(model)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    model = Net()
    parametrizations.weight_norm(model.blocks[0].up)
    parametrizations.spectral_norm(model.blocks[1].up)
    parametrizations.orthogonal(model.blocks[2].down)
    model.square = nn.Linear(7, 7)
    parametrize.register_parametrization(model.square, "weight", Symmetric())
    torch.nn.utils.weight_norm(model.last)
    torch.nn.utils.spectral_norm(model.first)
    return model


def train(model: nn.Module, optimizer: Any) -> Any:
    losses = [step(model, optimizer, number) for number in range(3)]
    with torch.no_grad():
        losses.append(float(model(data(9)).sum()))
    return losses, weights(model)


def layer_wise(model: nn.Module) -> torch.optim.Optimizer:
    """Layer-wise decay of the learning rate, without weight decay of biases and norms."""
    groups = [{"params": model.first.parameters(), "lr": 1e-3}, {"params": model.last.parameters()}]
    for depth, block in enumerate(model.blocks):
        some = [p for p in block.parameters() if p.dim() > 1]
        rest = [p for p in block.parameters() if p.dim() < 2]
        groups += [{"params": some, "lr": 1e-2 * 0.5**depth}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def scheduled(model: nn.Module, optimizer: Any) -> Any:
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
    losses = []
    for number in range(4):
        losses.append(step(model, optimizer, number))
        scheduler.step()
    return losses, [group["lr"] for group in optimizer.param_groups], weights(model)


def tensor_rate(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), eps=1e-3)


def _hook(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Hooks that count steps and change the rate; one is removed again by its handle."""

    def before(stepped: Any, *_: Any) -> None:
        stepped.param_groups[0].update(lr=stepped.param_groups[0]["lr"] * 0.5)
        stepped.param_groups[0]["seen"] += "b"

    def after(stepped: Any, *_: Any) -> None:
        stepped.param_groups[0]["seen"] += "a"

    def loaded(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        first, *rest = state_dict["param_groups"]
        return {**state_dict, "param_groups": [{**first, "seen": first["seen"] + "l"}, *rest]}

    optimizer.param_groups[0]["seen"] = ""
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.register_load_state_dict_pre_hook(loaded)
    optimizer.register_load_state_dict_post_hook(after)
    return optimizer


def hooked_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return _hook(adamw(model))


def hooked_nadam(model: nn.Module) -> torch.optim.Optimizer:
    return _hook(torch.optim.NAdam(model.parameters(), lr=1e-2, eps=1e-3))


def with_step_hooks(model: nn.Module, optimizer: Any) -> Any:
    """Hooks of one optimizer from before `shard`, and one of all optimizers: each is called once per step."""
    steps: list[int] = []
    all_optimizers = register_optimizer_step_pre_hook(lambda *_: steps.append(len(steps)))
    removed = optimizer.register_step_pre_hook(lambda *_: steps.append(-1))
    removed.remove()
    losses = [step(model, optimizer, number) for number in range(3)]
    all_optimizers.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    return losses, steps, optimizer.param_groups[0]["seen"], weights(model)


def rates_as_tensors(model: nn.Module, optimizer: Any) -> Any:
    for number in range(3):
        step(model, optimizer, number)
        optimizer.param_groups[0]["lr"].mul_(0.5)
    optimizer.param_groups[0]["lr"] = 0.001
    step(model, optimizer, 3)
    return weights(model)


def freezing_schedule(model: nn.Module, optimizer: Any) -> Any:
    for number in range(5):
        model.blocks[number % 3].requires_grad_(False)
        model.first.weight.requires_grad = number % 2 == 0
        step(model, optimizer, number)
        model.blocks[number % 3].requires_grad_(True)
    return weights(model)


class Stochastic(Net):
    """Blocks that are skipped depending on the batch, and at random."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            if x.mean() > 0 or torch.rand(()) < 0.5:
                x = block(x)
        return self.last(x)


def skipping(model: nn.Module, optimizer: Any) -> Any:
    torch.manual_seed(2)
    losses = []
    for number in range(6):
        loss = backward(model, number)
        losses.append((float(loss), [p.grad is not None for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(model)


def by_closure(model: nn.Module, optimizer: Any) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(data()).square().mean()
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(3)], weights(model)


class Shared(nn.Module):
    """Modules that are in a ModuleDict twice, one of them also outside it, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        one, two = Block(7), Block(7)
        self.table = nn.ModuleDict({"a": one, "b": two, "c": one, "deep": nn.ModuleDict({"d": two})})
        self.alias = one
        self.table["b"].down.bias = one.down.bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for key in ("a", "b", "c"):
            x = self.table[key](x)
        return self.last(self.alias(self.table["deep"]["d"](x)))


def initialised(model: nn.Module, optimizer: Any) -> Any:
    """`model.apply(init)`, vectors of parameters and a deep copy as a teacher."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.constant_(module.bias, 0.01)

    torch.manual_seed(4)
    with whole(model):
        model.apply(init)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    with whole(model):
        vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for number in range(3):
        loss = F.mse_loss(model(data(number)), teacher(data(number)) + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with whole(model):
        moved = nn.utils.parameters_to_vector(model.parameters()) - vector
    return float(moved.norm()), weights(model), weights(teacher)


def functional(model: nn.Module, optimizer: Any) -> Any:
    """`functional_call` and an ensemble by `vmap`, on copies, during training."""
    plain = [copy.deepcopy(model) for _ in range(2)]
    step(model, optimizer)
    plain.append(copy.deepcopy(model))
    stacked, buffers = torch.func.stack_module_state(plain)
    base = copy.deepcopy(plain[0])
    found = torch.func.vmap(lambda p, b, x: torch.func.functional_call(base, (p, b), (x,)), (0, 0, None))(
        stacked, buffers, data()
    )
    values = {name: p.detach() * 0.5 for name, p in plain[2].named_parameters()}
    return found, torch.func.functional_call(base, values, (data(),)), step(model, optimizer, 1)


def loaded_between(model: nn.Module, optimizer: Any) -> Any:
    """State dicts are taken and loaded between steps, with a missing key and an unexpected one."""
    step(model, optimizer)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, optimizer, 1)
    part = {name: value for name, value in kept.items() if not name.startswith("blocks.1")}
    answer = model.load_state_dict({**part, "nobody": torch.zeros(1)}, strict=False)
    losses = [step(model, optimizer, 2)]
    model.blocks[2].load_state_dict(model.blocks[0].state_dict())
    losses.append(step(model, optimizer, 3))
    return sorted(answer.missing_keys), answer.unexpected_keys, losses, weights(model)


def later_buffers(model: nn.Module, optimizer: Any) -> Any:
    """A buffer that is registered after the first step, a constant, and hooks on modules that come and go."""
    step(model, optimizer)
    model.blocks[0].register_buffer("scale", torch.tensor(0.5))
    model.blocks[1].register_buffer("hidden", torch.ones(7), persistent=False)
    handle = model.blocks[0].register_forward_hook(lambda module, args, output: output * module.scale)
    losses = [step(model, optimizer, 1)]
    model.blocks[0].scale.fill_(2.0)
    losses.append(step(model, optimizer, 2))
    handle.remove()
    losses.append(step(model, optimizer, 3))
    return losses, weights(model), [name for name, _ in model.named_buffers()]


def hooks_after(model: nn.Module, optimizer: Any) -> Any:
    """Hooks on parameters, on outputs and on modules' backwards, and anomaly detection."""
    norms: list[float] = []
    model.first.weight.register_hook(lambda grad: grad / (1 + grad.norm()))
    model.blocks[1].register_full_backward_hook(lambda module, gi, go: norms.append(float(go[0].norm())))
    model.blocks[2].register_full_backward_pre_hook(lambda module, go: (go[0] * 0.5,))
    with torch.autograd.set_detect_anomaly(True):
        for number in range(3):
            output = model(data(number))
            output.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(model)


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Reentrant(Checkpointed):
    reentrant = True


class Selective(Net):
    """Products are kept and the rest is computed again: torch counts operations, and the engine's must not count."""

    def forward(self, x: Tensor) -> Tensor:
        kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
        selective = functools.partial(create_selective_checkpoint_contexts, kept)
        x = torch.tanh(self.first(x))
        x = checkpoint(self._two, x, use_reentrant=False, context_fn=selective)
        return self.last(checkpoint(self.blocks[2], x, use_reentrant=False, context_fn=selective))

    def _two(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)) + F.linear(x, self.blocks[2].up.weight).mean()


class WhollySelective(Net):
    def forward(self, x: Tensor) -> Tensor:
        kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=kept)


def autocast(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for number in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data(number)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, weights(model)


def double_backward(model: nn.Module, optimizer: Any) -> Any:
    """The norm of the gradient by the weights as a penalty, and a product with the Hessian."""
    parameters = list(model.parameters())
    for number in range(3):
        loss = model(data(number)).square().mean()
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        (loss + 0.1 * sum(grad.square().sum() for grad in grads)).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(data(8)).square().mean()
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    product = torch.autograd.grad(sum(grad.sum() for grad in grads), parameters)
    return [value.clone() for value in product], weights(model)


def accumulate(model: nn.Module, optimizer: Any) -> Any:
    """Micro-batches whose mean the loss takes, and norms read on the way."""
    seen = []
    for number in range(2):
        for part in range(3):
            (model(data(10 * number + part)).square().mean() / 3).backward()
            seen.append(float(model.last.weight.grad.norm()))
        seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights(model)


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Net(), Net(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(F.pad(self.generator(x), (0, 2)))


class PaddedEncoder(nn.Module):
    """Evaluated, torch's encoder looks at its first layer's parameters and then leaves padding out of its layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.first, self.encoder, self.last = nn.Linear(5, 8), nn.TransformerEncoder(layer, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.last(self.encoder(self.first(x).unsqueeze(0), src_key_padding_mask=padding))


def evaluate_padded(model: nn.Module, optimizer: Any) -> Any:
    padding, found = torch.tensor([[False, False, False, True]]), []
    for number in range(2):
        found.append(step(model.train(), optimizer, number))
        with torch.no_grad():
            found.append(model.eval()(data(number), padding))
        with torch.inference_mode():
            found.append(model(data(number), padding).clone())
    return found, weights(model)


def adversarial(model: nn.Module, optimizer: Any) -> Any:
    """Turns of a critic and a generator over parts of one model."""
    for number in range(4):
        with torch.no_grad():
            fake = F.pad(model.generator(data(number)), (0, 2))
        (model.critic(fake).mean() - model.critic(data(number + 20)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.critic.parameters():
            p.requires_grad_(False)
        model(data(number)).mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in model.critic.parameters():
            p.requires_grad_(True)
    return weights(model)


RECIPES: list[tuple[Any, Any, Any]] = [
    (averaged_model, Net, adamw),
    (stochastic_averaging, Normed, adamw),
    (gradient_surgery, Net, adamw),
    (sharpness_aware, Net, adamw),
    (lookahead, Net, adamw),
    (centralize, Net, adamw),
    (weight_clipping, Net, adamw),
    (train, parametrized, adamw),
    (scheduled, Net, layer_wise),
    (rates_as_tensors, Net, tensor_rate),
    (with_step_hooks, Net, hooked_adamw),
    (with_step_hooks, Net, hooked_nadam),
    (freezing_schedule, Net, adamw),
    (skipping, Stochastic, adamw),
    (by_closure, Net, adamw),
    (train, Shared, adamw),
    (initialised, Net, adamw),
    (functional, Net, adamw),
    (loaded_between, Net, adamw),
    (later_buffers, Net, adamw),
    (hooks_after, Net, adamw),
    (train, Checkpointed, adamw),
    (train, Reentrant, adamw),
    (train, Selective, adamw),
    (train, WhollySelective, adamw),
    (autocast, Net, adamw),
    (double_backward, Net, adamw),
    (accumulate, Net, adamw),
    (evaluate_padded, PaddedEncoder, adamw),
    (adversarial, Adversarial, adamw),
]


@pytest.mark.parametrize("world", [*ALONE, (2, "device", 1), (2, "disk", 3)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "-".join(part.__name__ for part in r))
def test_a_recipe_gives_what_it_gives_in_plain_pytorch(ranks: Any, world: tuple[int, str, int], recipe: Any) -> None:
    program, build, optimizer = recipe
    compare(ranks, world, program, build, optimizer)
