"""Other ways into autograd: grad, inputs=, hooks, graphs that are walked twice, late, or in parts."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.optim import _apply_optimizer_in_backward

import unbounded
from tests.semantics.programs import ALONE, PLANS, WORLDS, Net, adamw, assert_same, compare, data, make, step, weights
from unbounded.errors import StateError

EVERYWHERE = pytest.mark.parametrize("world", WORLDS, ids=str)


def gradients_asked_for(model: nn.Module, optimizer: Any) -> Any:
    """`torch.autograd.grad` over parameters: nothing is left in `.grad`, and it may be asked twice."""
    loss = model(data()).square().mean()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    edge = torch.autograd.graph.get_gradient_edge(model.blocks[0].up.weight)
    second = torch.autograd.grad(loss, [edge, model.last.bias])
    nothing = all(parameter.grad is None for parameter in parameters)
    losses = [step(model, optimizer, number) for number in range(2)]
    return [grad.clone() for grad in first], [grad.clone() for grad in second], nothing, losses


def twice() -> nn.Module:
    return Net(twice=True)


@EVERYWHERE
@pytest.mark.parametrize("build", [Net, twice])
def test_autograd_grad_over_parameters(ranks: Any, world: tuple[int, str, int], build: Any) -> None:
    compare(ranks, world, gradients_asked_for, build)


def into_some(model: nn.Module, optimizer: Any) -> Any:
    for number in range(3):
        loss = model(data(number)).square().mean()
        loss.backward(inputs=[model.blocks[1].up.weight, model.last.weight], retain_graph=True)
        loss.backward(inputs=list(model.first.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def same_graph_twice(model: nn.Module, optimizer: Any) -> Any:
    for number in range(3):
        loss = model(data(number)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def penalty(model: nn.Module, optimizer: Any) -> Any:
    """A gradient penalty, whose second backward runs after the graph of the first was kept."""
    for number in range(3):
        x = data(number).requires_grad_()
        output = model(x).square().mean()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        output.backward(retain_graph=True)
        (0.1 * slope.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def two_losses(model: nn.Module, optimizer: Any) -> Any:
    """Forwards that wait for their backwards, which come in another order; one loss over two forwards."""
    for number in range(3):
        one, two, three = (model(data(number + other)).square().mean() for other in (0, 10, 20))
        two.backward()
        (one + three).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def derivatives(model: nn.Module, optimizer: Any) -> Any:
    """A physics-informed network: derivatives of the output by the input, in two losses with separate backwards."""
    for number in range(3):
        x = data(number).requires_grad_()
        u = model(x).sum(dim=1)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        (ddu[:, 0] - u).square().mean().backward(retain_graph=True)
        u[:2].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def in_chunks(model: nn.Module, optimizer: Any) -> Any:
    for number in range(3):
        output = model(data(number))
        for row in output:
            row.square().sum().backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def shown_between(model: nn.Module, optimizer: Any) -> Any:
    """Weights that are only looked at between a forward and its backward: the graph is still good."""
    seen = []
    for number in range(3):
        loss = model(data(number)).square().mean()
        with unbounded.full_params(model) if hasattr(optimizer, "engine") else contextlib.nullcontext():
            seen.append([parameter.detach().sum() for parameter in model.parameters()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights(model)


def reordered(rank: int, world_size: int, plan: dict[str, Any], is_frozen: bool) -> None:
    model = make()
    model.blocks[1].requires_grad_(not is_frozen)
    model, optimizer = unbounded.shard(model, adamw(model), plan)
    loss = model(data()).square().mean()
    with unbounded.full_params(model), torch.no_grad():
        model.blocks[1].up.weight.copy_(model.blocks[1].up.weight.flip(0))
    stay = all(unit.resident for unit in optimizer.engine.units)  # then torch itself refuses, without names
    wanted = "modified by an inplace operation" if stay else r"blocks\.1.*were updated 1 times"
    with pytest.raises(RuntimeError, match=wanted):
        loss.backward()


@EVERYWHERE
def test_a_graph_from_before_weights_were_put_in_another_order_is_refused(
    ranks: Any, world: tuple[int, str, int]
) -> None:
    world_size, plan, stage = world
    tiers = {kind: tier for kind, tier in PLANS[plan].items() if stage == 3 or kind != "weights"}
    for is_frozen in (False, True):
        ranks(world_size, reordered, {**tiers, "stage": stage}, is_frozen)


def in_a_thread(model: nn.Module, optimizer: Any) -> Any:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        for number in range(3):
            loss = pool.submit(lambda number=number: model(data(number)).square().mean()).result()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@EVERYWHERE
@pytest.mark.parametrize(
    "program", [into_some, same_graph_twice, penalty, two_losses, derivatives, in_chunks, shown_between, in_a_thread]
)
def test_graphs_are_walked_as_plain_pytorch_walks_them(ranks: Any, world: tuple[int, str, int], program: Any) -> None:
    compare(ranks, world, program)


KEPT: list[Tensor] = []


class Auxiliary(Net):
    """A block's features go to a global list and, from the third forward on, to an attribute; a hook takes more."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.extra = 0, None
        self.seen: list[Tensor] = []
        self.blocks[1].up.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.clear()
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
            KEPT.append(x.square().mean())
            if self.count >= 3:
                self.extra = x.abs().mean()
        return self.last(x)


def auxiliary(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for number in range(5):
        KEPT.clear()
        loss = model(data(number)).square().mean()
        loss.backward(retain_graph=True)
        sum(KEPT).backward(retain_graph=True)
        sum(seen.square().mean() for seen in model.seen).backward(retain_graph=model.extra is not None)
        if model.extra is not None:
            model.extra.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, weights(model)


@EVERYWHERE
def test_losses_kept_outside_the_outputs(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, auxiliary, Auxiliary)


class TrainsItself(Net):
    """Backwards and steps inside its own forward, which continues with the new weights."""

    def forward(self, x: Tensor, optimizer: Any = None) -> Tensor:
        for _ in range(2 if optimizer is not None else 0):
            loss = super().forward(x).square().mean() + self.last.bias.square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return super().forward(x)


def steps_inside(model: nn.Module, optimizer: Any) -> Any:
    outputs = [model(data(number), optimizer).detach().clone() for number in range(3)]
    return outputs, step(model, optimizer), weights(model)


@EVERYWHERE
def test_a_step_inside_the_models_own_forward(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, steps_inside, TrainsItself)


class StepsOnce(Net):
    """Its own loss; with an optimizer, one step on it inside the forward."""

    def forward(self, x: Tensor, optimizer: Any = None) -> Tensor:
        loss = super().forward(x).float().square().mean()
        if optimizer is None:
            return loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_step_inside_a_forward_completes_masters_as_one_after_it_does(plan: str) -> None:
    found = []
    for is_inside in (True, False):
        model = make(StepsOnce)
        model, optimizer = unbounded.shard(model, adamw(model), {**PLANS[plan], "precision": "bf16"})
        for number in range(4):
            if is_inside:
                model(data(number), optimizer)
            else:
                model(data(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
        handle = model.register_forward_pre_hook(lambda model, _: unbounded.export("never", model))
        with pytest.raises(StateError, match="cannot be saved or exported inside its own forward"):
            model(data())
        handle.remove()
        with unbounded.full_params(model):
            found.append(weights(model))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def hooked() -> nn.Module:
    model = Net(twice=True)
    model.blocks[0].up.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    model.blocks[1].up.weight.register_hook(lambda grad: print(end=""))
    model.removed = model.last.weight.register_hook(lambda grad: grad * 0)
    return model


def with_hooks(model: nn.Module, optimizer: Any) -> Any:
    seen: list[Tensor] = []
    handle = model.blocks[0].down.bias.register_hook(lambda grad: seen.append(grad.clone()))
    for number in range(3):
        step(model, optimizer, number)
        if number == 0:
            model.removed.remove()
    handle.remove()
    step(model, optimizer, 9)
    return seen, weights(model)


@EVERYWHERE
def test_hooks_on_parameters_see_and_change_gradients(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, with_hooks, hooked)


def hooked_with_gradients() -> nn.Module:
    model = Net()
    model(data(9)).square().mean().backward()
    model.seen = []
    model.last.bias.register_hook(lambda grad: model.seen.append(grad.clone()))
    model.last.weight.register_hook(lambda grad: grad + 1)
    return model


def added_up_with_hooks(model: nn.Module, optimizer: Any) -> Any:
    """Gradients from before `shard`, and backwards that give some parameters of a unit none."""
    model(data()).square().mean().backward()
    for number in range(2):
        torch.tanh(model.first(data(number))).mean().backward()
    optimizer.step()
    return model.seen, weights(model)


@EVERYWHERE
def test_hooks_on_parameters_are_called_once_for_each_gradient(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, added_up_with_hooks, hooked_with_gradients)


def gradients_with_hooks(model: nn.Module, optimizer: Any) -> Any:
    """Hooks from before `shard`, from between passes and from inside `full_params`; in the end the model is plain."""
    is_sharded, seen = hasattr(optimizer, "engine"), []
    parameters = [model.blocks[0].up.weight, model.first.weight, model.last.bias, model.last.weight]
    handle = model.first.weight.register_hook(lambda grad: grad * 3)
    with unbounded.full_params(model) if is_sharded else contextlib.nullcontext():
        model.last.bias.register_hook(lambda grad: seen.append(grad.detach().clone()))
    model.blocks[1].up.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't require grad"):
        model.blocks[1].up.bias.register_hook(lambda grad: None)
    for number in range(2):
        loss = model(data(number)).square().mean() + model(data(number + 5)).square().mean()
        seen += torch.autograd.grad(loss, parameters, retain_graph=True)
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.remove()
    if is_sharded:
        unbounded.unshard(model)
    model.removed.remove()
    loss = model(data(9)).square().mean()
    seen += torch.autograd.grad(loss, parameters, retain_graph=True)
    loss.backward()
    return seen, [p.grad for p in parameters], weights(model)


@EVERYWHERE
def test_hooks_on_parameters_are_called_wherever_gradients_go(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, gradients_with_hooks, hooked)


def accumulate_hook(weight: nn.Parameter) -> None:
    weight.register_post_accumulate_grad_hook(lambda parameter: None)


def backward_step(weight: nn.Parameter) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})


@pytest.mark.parametrize("attach", [accumulate_hook, backward_step])
def test_what_waits_for_accumulated_gradients_is_refused_before_anything_is_touched(attach: Any) -> None:
    model = make()
    attach(model.last.weight)
    with pytest.raises(StateError, match=r"last\.weight.*register_hook"):
        unbounded.shard(model, adamw(model))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("plan", list(PLANS))
def test_transforms_of_torch_func_are_refused_and_work_on_a_copy(plan: str) -> None:
    plain, model = make(), make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])

    def loss(module: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, weights, (x,)).square().mean()

    values = {name: value.detach() for name, value in plain.named_parameters()}
    with pytest.raises(StateError, match=r"functional_call on copy\.deepcopy"):
        torch.func.grad(lambda weights: loss(model, weights, data()))(values)
    with pytest.raises(StateError, match=r"torch\.autograd\.grad"):
        torch.func.grad(lambda x: model(x).square().mean())(data())
    again = copy.deepcopy(model)
    found = torch.func.grad(lambda weights: loss(again, weights, data()))(values)
    assert_same(found, torch.func.grad(lambda weights: loss(plain, weights, data()))(values))
    assert step(model, optimizer) == pytest.approx(step(plain, adamw(plain)))


def transforms_without_gradients(model: nn.Module, optimizer: Any) -> Any:
    step(model, optimizer)
    with torch.no_grad():
        found = torch.func.vmap(model)(torch.stack([data(1), data(2)])), torch.func.jvp(model, (data(),), (data(3),))
    return found, step(model, optimizer, 1), weights(model)


@EVERYWHERE
def test_transforms_of_torch_func_without_gradients(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, transforms_without_gradients)


def through_tangents(model: nn.Module, optimizer: Any) -> Any:
    """A loss of the directional derivative, which forward-mode autograd gives, with the backward inside its level."""
    losses = []
    for number in range(3):
        with forward_ad.dual_level():
            dual = model(forward_ad.make_dual(data(number), torch.ones(4, 5)))
            output, slope = forward_ad.unpack_dual(dual)
            loss = output.square().mean() + slope.square().mean()
            loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(model)


@EVERYWHERE
def test_a_backward_inside_forward_mode_autograd(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, through_tangents)


def gradients_with_a_graph(model: nn.Module, optimizer: Any) -> Any:
    """A penalty on `p.grad` would be a constant, because units keep values."""
    if hasattr(optimizer, "engine"):
        with pytest.raises(StateError, match=r"torch\.autograd\.grad\(loss, parameters, create_graph=True\)"):
            model(data()).square().mean().backward(create_graph=True)
        optimizer.zero_grad()
    return [step(model, optimizer, number) for number in range(3)], weights(model)


@EVERYWHERE
def test_a_backward_that_creates_a_graph_of_gradients_is_refused(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, gradients_with_a_graph)


def old_graph(model: nn.Module, optimizer: Any) -> Any:
    late = model(data(1)).square().mean()
    outside = (model.last.weight * model.first.weight.sum()).square().sum()
    step(model, optimizer)
    # A weight that is not resident is a copy when it is used outside forwards: its graph is whole, with the values that
    # it was built from.
    is_resident = not hasattr(optimizer, "engine") or optimizer.engine.units[0].resident
    for loss in (late, outside) if is_resident else (late,):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been modified inplace"):
            loss.backward()
    optimizer.zero_grad()
    return step(model, optimizer, 1), weights(model)


@EVERYWHERE
def test_a_graph_from_before_a_step_is_refused(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, old_graph)


def graph_of_a_hook(model: nn.Module, optimizer: Any) -> Any:
    """A forward inside a backward, whose graph outlives a step."""
    late: list[Tensor] = []

    def hook(_: Tensor) -> None:
        with torch.enable_grad():
            late.append(model(data(1)).square().mean())

    out = model(data())
    out.register_hook(hook)
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late[0].backward()
    optimizer.zero_grad()
    return step(model, optimizer, 1), weights(model)


@EVERYWHERE
def test_a_graph_that_was_made_inside_a_backward_is_refused_after_a_step(
    ranks: Any, world: tuple[int, str, int]
) -> None:
    compare(ranks, world, graph_of_a_hook)


class Written(Net):
    """Its forward writes to weights in place, before or after it uses them."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.write()
        x = super().forward(x)
        if self.late:
            self.write()
        return x

    @torch.no_grad()
    def write(self) -> None:
        self.blocks[1].up.weight.mul_(0.9)
        self.last.bias.add_(0.1)  # which no backward reads


def written_after_use(model: nn.Module, optimizer: Any) -> Any:
    losses = [step(model, optimizer, 0)]
    first, second = model(data(0)).square().mean(), model(data(1)).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # the second forward wrote
        first.backward()
    optimizer.zero_grad()
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.late = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(data(2)).square().mean().backward()
    optimizer.zero_grad()
    model.late = False
    return losses, step(model, optimizer, 3), weights(model)


@pytest.mark.parametrize("world", ALONE, ids=str)
def test_a_weight_that_a_forward_writes_to_after_its_use_has_no_backward(
    ranks: Any, world: tuple[int, str, int]
) -> None:
    compare(ranks, world, written_after_use, Written)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class Held(Net):
    """Uses a weight by a reference to it, which is not the tensor that its module has inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.held = [self.blocks[1].up.weight]
        self.is_direct = False

    def forward(self, x: Tensor) -> Tensor:
        held = self.held[0] if self.is_direct else self.held[0].view_as(self.held[0])
        return super().forward(x) + Double.apply(held).sum()


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_gradient_that_would_go_past_the_engine_is_refused(plan: str) -> None:
    plain, model = make(Held), make(Held)
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    reference = adamw(plain)
    assert step(model, optimizer) == pytest.approx(step(plain, reference))
    model.is_direct = True
    with pytest.raises(StateError, match=r"blocks\.1\.up\.weight.*view_as"):
        model(data()).square().mean().backward()
    Double.apply(model.held[0]).sum().backward()  # outside the model
    with pytest.raises(StateError, match=r"blocks\.1\.up\.weight.*view_as"):
        optimizer.step()
    with unbounded.full_params(model), torch.enable_grad():
        model.last.weight.square().sum().backward()
    with pytest.raises(StateError, match=r"last\.weight.*inside full_params: make it outside"):
        optimizer.step()
    model.is_direct = False
    optimizer.zero_grad()
    assert step(model, optimizer, 1) == pytest.approx(step(plain, reference, 1))


class Sparse(nn.Module):
    """Looks rows of a weight up by a function that gives it a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.rows, sparse=True)


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_sparse_gradient_is_refused(plan: str) -> None:
    model = make(Sparse)
    model, _ = unbounded.shard(model, adamw(model), PLANS[plan])
    with pytest.raises(StateError, match=r"'rows' is sparse.*Leave out sparse=True"):
        model(torch.tensor([1, 3])).sum().backward()


class RunsAgain(torch.autograd.Function):
    """A checkpoint as diffusion models and solvers of differential equations have it: it is given the weights."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: Tensor, *given: Tensor) -> Tensor:
        ctx.block, ctx.given = block, given
        ctx.save_for_backward(x)
        return block(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.block.inner(x)
            if ctx.block.how == "backward":
                torch.autograd.backward(y, grad)
                return None, x.grad, *(None for _ in ctx.given)
            asked = ctx.given if ctx.block.how == "given" else ctx.block.inner.parameters()
            return None, *torch.autograd.grad(y, (x, *asked), grad, allow_unused=True)


class Again(nn.Module):
    """A block that runs again in the backward of a function, and the way in which that one asks for gradients."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.how, self.is_inside = inner, "given", False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_inside:
            return self.inner(x)  # type: ignore[no-any-return]
        self.is_inside = True
        try:
            return RunsAgain.apply(self, x, *self.inner.parameters())  # type: ignore[no-any-return]
        finally:
            self.is_inside = False


def running_again() -> nn.Module:
    model = Net()
    model.blocks = nn.ModuleList(map(Again, model.blocks))
    return model


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_a_function_that_runs_modules_again_without_their_gradients_is_refused(plan: str, activations: str) -> None:
    plain, model = make(running_again), make(running_again)
    model, optimizer = unbounded.shard(model, adamw(model), {**PLANS[plan], "activations": activations})
    reference = adamw(plain)
    with pytest.raises(StateError, match=r"blocks\.0\.inner\.norm\.weight.*runs the module again"):
        model(data()).square().mean().backward()
    optimizer.zero_grad()
    for number, how in enumerate(("parameters", "backward")):
        for block in (*plain.blocks, *model.blocks):
            block.how = how
        assert step(model, optimizer, number) == pytest.approx(step(plain, reference, number))
    assert_same(weights(model), weights(plain))


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_model_without_an_optimizer_adds_up_gradients_on_every_tier(plan: str) -> None:
    plain, model = make(), make()
    unbounded.shard(model, None, PLANS[plan])
    for number in range(2):
        for one in (plain, model):
            one(data(number)).square().mean().backward()
    assert_same([p.grad.clone() for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_placeholder_answers_what_needs_no_values() -> None:
    model = make()
    model, _ = unbounded.shard(model, adamw(model), PLANS["host"])
    model(data()).sum().backward()
    weight = model.first.weight
    for tensor in (weight, weight.grad):
        assert tensor.is_contiguous()
        assert tensor.stride() == (5, 1)
        with pytest.warns(UserWarning, match="copy construct"):  # torch does not ask the tensor for its values
            assert torch.tensor(tensor).isnan().all()
    parameters = list(model.parameters())  # each with its own address, which tells tied weights from others
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == len(parameters)
    with pytest.raises(StateError, match=r"detach\(\)\.clone\(\)"):
        nn.Parameter(weight)
    with pytest.raises(StateError, match=r"safetensors was given the sharded parameter 'first.weight'"):
        safetensors.torch.save({"weight": weight})
    unbounded.unshard(model)
    model, _ = unbounded.shard(model, adamw(model), PLANS["device"])
    written = safetensors.torch.load(safetensors.torch.save(dict(model.named_parameters())))
    assert_same(list(written.values()), [model.state_dict()[name] for name in written])
