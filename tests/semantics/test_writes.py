"""Writes to weights after `shard`: kept where they are made, or refused; never lost."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import unbounded
from tests.semantics.programs import (
    ALONE,
    PLANS,
    WORLDS,
    Block,
    Net,
    adamw,
    assert_same,
    compare,
    data,
    make,
    step,
    weights,
)
from unbounded.errors import PeerError, StateError, UnboundedError


def tiled() -> nn.Module:
    model = Net(8)
    for block in model.blocks:
        block.up, block.down = nn.Linear(8, 128), nn.Linear(128, 8)
    assert "blocks.0.up.weight" in unbounded.tile(model, 2048)
    return model


def write(how: str, model: nn.Module) -> None:
    weight, other = model.blocks[1].up.weight, model.blocks[2].down.weight
    with torch.no_grad():
        if how == "init":
            nn.init.zeros_(weight)
            nn.init.ones_(other)
            nn.init.eye_(model.last.weight)
            torch.manual_seed(5)
            nn.init.kaiming_normal_(model.first.weight)
            nn.init.orthogonal_(model.blocks[0].up.weight)
        elif how == "reset":
            torch.manual_seed(5)
            model.blocks[1].up.reset_parameters()
        elif how == "item of data":
            weight.data[0].zero_()
            weight.data[1][2] = 3.0
        elif how == "detached":
            weight.detach().mul_(2.0)
        elif how == "foreach":
            torch._foreach_mul_([weight, other], 0.5)
        elif how == "out":
            torch.mul(other, 3.0, out=other)
        elif how == "data":
            weight.data = weight.data * 0.9 + 0.01
            other.data.add_(0.5)
            model.blocks[0].up.weight.data.lerp_(model.blocks[2].up.weight, 0.25)
            model.blocks[0].down.weight.data[0].copy_(other[1])
        elif how == "graph":  # what is written has a graph, as when adapters are merged into a weight
            held = other.data
            with torch.enable_grad():
                weight.data += model.blocks[0].up.weight * 0.5
                weight.data[0] += model.blocks[0].up.weight[1]
                held -= model.blocks[1].down.weight * 0.5
        elif how == "taken with gradients":
            with torch.enable_grad():
                rows, (upper, lower), flat = weight[2:5], other.chunk(2), model.last.weight.view(-1)
            rows.mul_(0.5)
            nn.init.ones_(upper)
            flat[2:4] = lower[0, :2]
        elif how == "inference":
            with torch.inference_mode():
                weight.mul_(0.5)
                other.data[0].zero_()
                model.last.weight.view(-1)[2:4] = 1.0
        elif how == "set":
            weight.set_(weight.detach() * 0.9 + 0.01)
            other.set_(torch.arange(float(other.numel())).untyped_storage(), 0, other.shape)
            model.last.weight.set_(model.last.weight)
        elif how == "copy":
            other.copy_(torch.full_like(other, 0.25))
        elif how == "vector":
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


HOWS = [
    "init",
    "reset",
    "item of data",
    "detached",
    "foreach",
    "out",
    "data",
    "graph",
    "taken with gradients",
    "inference",
    "set",
    "copy",
    "vector",
]


class Write:
    """A program that writes in one way between two steps. (A class, so that it travels to the ranks.)

    A write to what several ranks have parts of may be refused; then it is made inside full_params.
    """

    def __init__(self, how: str, *, inside: bool = False) -> None:
        self.how, self.inside = how, inside

    def __call__(self, model: nn.Module, optimizer: Any) -> Any:
        losses = [step(model, optimizer, 0)]
        if self.inside and hasattr(optimizer, "engine"):
            with unbounded.full_params(model):
                write(self.how, model)
        else:
            try:
                write(self.how, model)
            except StateError:
                if optimizer.engine.ranks.size == 1 or optimizer.plan.stage == 0:
                    raise
                with unbounded.full_params(model):
                    write(self.how, model)
        after = weights(model)
        losses += [step(model, optimizer, number) for number in (1, 2)]
        return losses, after, weights(model)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_a_write_between_passes_is_kept(ranks: Any, world: tuple[int, str, int], how: str) -> None:
    compare(ranks, world, Write(how))


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_a_write_inside_full_params_is_kept(ranks: Any, world: tuple[int, str, int], how: str) -> None:
    compare(ranks, world, Write(how, inside=True))


def held_values(model: nn.Module, optimizer: Any) -> Any:
    """Values that are held over steps are always current, and a write to one changes nothing else."""
    held, row = [parameter.data for parameter in model.parameters()], model.blocks[0].up.weight.detach()[0]
    seen = []
    for number in range(3):
        step(model, optimizer, number)
        seen.append([value.clone() for value in held])
        for value in held[::2]:
            value.clamp_(-0.3, 0.3)
        row.add_(0.1)
        with torch.no_grad():
            model.last.weight.mul_(0.9)
        seen.append([row.clone(), held[-2].sum(), float(held[2][0, 0])])
    return seen, weights(model)


@pytest.mark.parametrize("world", [*ALONE, (2, "host", 0)], ids=str)
def test_values_that_are_held_are_those_of_the_weights(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, held_values)


class OtherData:
    """Averages take the weights' place for an evaluation, as `p.data = average`, and the weights are put back."""

    def __init__(self, *, inside: bool) -> None:
        self.inside = inside

    def __call__(self, model: nn.Module, optimizer: Any) -> Any:
        is_sharded = hasattr(optimizer, "engine")
        seen: list[Any] = []
        averages: dict[str, Tensor] = {}

        def opened() -> Any:
            return unbounded.full_params(model) if is_sharded and self.inside else torch.no_grad()

        for number in range(2):
            step(model, optimizer, number)
            with opened():
                backup = {name: parameter.data for name, parameter in model.named_parameters()}
                rows = [parameter.data[:2] for parameter in model.parameters()]
                for name, parameter in model.named_parameters():
                    averages[name] = (averages.get(name, 0.0) + parameter.data) / 2
                    parameter.data = averages[name]
                seen += [value.clone() for value in [*backup.values(), *([] if self.inside else rows)]]
            with torch.no_grad():
                seen.append(model(data(5)))
            with opened():
                for name, parameter in model.named_parameters():
                    parameter.data = backup[name]
                one, other = model.blocks[2].up.weight, model.blocks[0].up.weight
                one.data, other.data = other.data, one.data
                model.first.weight.data = model.first.weight.data.mul_(0.9)
                parameter = model.last.weight
                kept, parameter.data = parameter.data, parameter.data * 2
                kept.mul_(3)
            seen.append(weights(model))
        return seen, step(model, optimizer, 2)


@pytest.mark.parametrize(
    ("world", "inside", "build"),
    [
        *((world, False, Net) for world in ALONE),
        *((world, True, Net) for world in WORLDS),
        (ALONE[1], False, tiled),
        (WORLDS[-1], True, tiled),
    ],
)
def test_values_that_were_held_before_the_weight_got_other_data_stay(
    ranks: Any, world: tuple[int, str, int], inside: bool, build: Any
) -> None:
    compare(ranks, world, OtherData(inside=inside), build)


def evaluated_inside(model: nn.Module, optimizer: Any) -> Any:
    """Averages are evaluated inside `full_params`, where they have taken the weights' place, and trained on once."""
    is_sharded, seen = hasattr(optimizer, "engine"), []
    for number in range(2):
        step(model, optimizer, number)
        with unbounded.full_params(model) if is_sharded else torch.no_grad():
            backup = {name: parameter.data for name, parameter in model.named_parameters()}
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
            seen.append(model(data(5)))
            average = model.last.weight.data
            average.mul_(2)
            seen += [model(data(5)), model.last(model.blocks[0](model.first(data(5))))]
            with torch.inference_mode():
                model.first.weight.data = torch.ones(model.first.out_features, 5)
                seen.append(model(data(5)).clone())
            for name, parameter in model.named_parameters():
                parameter.data = backup[name]
            seen.append(model(data(5)))
            if number:
                model.last.weight.data = average
        seen += [model(data(6)).detach(), average.clone()]
    return seen, step(model, optimizer, 2), weights(model)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("build", [Net, tiled])
def test_a_forward_inside_full_params_has_the_data_that_weights_were_given(
    ranks: Any, world: tuple[int, str, int], build: Any
) -> None:
    compare(ranks, world, evaluated_inside, build)


@pytest.mark.parametrize("plan", list(PLANS))
def test_an_export_inside_full_params_has_what_weights_were_given_there(plan: str, tmp_path: Path) -> None:
    model = make()
    model, _ = unbounded.shard(model, adamw(model), PLANS[plan])
    with unbounded.full_params(model):
        model.first.weight.mul_(2)
        model.last.weight.data = torch.ones(3, 7)
        wanted = weights(model)
        unbounded.export(tmp_path, model)
    found = load_file(tmp_path / "model.safetensors")
    assert_same({name: found[name] for name in wanted}, wanted)
    assert_same(weights(model), wanted)


@pytest.mark.parametrize("plan", list(PLANS))
def test_values_that_are_held_can_be_used_inside_full_params_and_after_unshard(plan: str) -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    step(model, optimizer)
    held, row = model.last.weight.data, model.last.weight.data[1]
    with unbounded.full_params(model):
        model.last.weight.mul_(2)
        assert_same(held + 0, model.last.weight + 0)
        row.zero_()
        assert_same(model.last.weight[1], torch.zeros(7))
    step(model, optimizer)
    assert_same(held + 0, model.state_dict()["last.weight"])
    unbounded.unshard(model)
    held.mul_(2)
    assert_same(model.last.weight, held)
    assert_same(model.last.weight[1], row)


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_write_that_autograd_refuses_changes_nothing(plan: str) -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    weight, before = model.last.weight, weights(model)
    for write in (
        lambda: weight.mul_(2.0),
        lambda: weight.__setitem__(0, 1.0),
        lambda: torch.mul(weight, 2.0, out=weight),
        lambda: torch._foreach_add_([weight, model.last.bias], 1.0),
        lambda: nn.functional.relu_(weight),
        lambda: weight.view(-1)[2:4].zero_(),
        lambda: weight.copy_(torch.zeros(3, 7)),
    ):
        with pytest.raises(RuntimeError, match=r"in-place operation|modified inplace|out=\.\.\."):
            write()
        assert_same(weights(model), before)
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(3, 7)))
    plain = make()
    assert step(model, optimizer) == pytest.approx(step(plain, adamw(plain)))


def written_in(rank: int, world_size: int, plan: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if plan["stage"] < 3 and world_size > 1:
        plan.pop("weights", None)
    model = make()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = unbounded.shard(model, optimizer, {**plan, "loss_scale": 1, "loss_scale_window": 0})
    step(model, optimizer)
    with torch.no_grad(), unbounded.full_params(model) if world_size > 1 else contextlib.nullcontext():
        model.last.weight.fill_(0.75)
        with torch.enable_grad():
            view = model.first.weight.view(-1)
        view.fill_(0.75)
    step(model, optimizer)  # with a learning rate of 0 the master says what the weight is
    held = model.state_dict()
    return held["last.weight"].float(), held["first.weight"].float()


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_write_reaches_what_completes_a_half_precision_weight(
    ranks: Any, world: tuple[int, str, int], precision: str
) -> None:
    for last, first in ranks(world[0], written_in, {**PLANS[world[1]], "stage": world[2], "precision": precision}):
        assert torch.equal(last, torch.full((3, 7), 0.75))
        assert torch.equal(first, torch.full((7, 5), 0.75))


def written_by_collectives(rank: int, world_size: int, plan: dict[str, Any]) -> list[Tensor]:
    """What a weight is after each sum over the ranks, and after a step with a learning rate of 0."""
    model = make()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = unbounded.shard(model, optimizer, plan)
    bias, held = model.first.bias, model.first.bias.data
    found = [held.clone()]
    with torch.no_grad():
        for written in (bias, bias.data, held):
            dist.all_reduce(written)
            found.append(bias.detach().clone())
    dist.all_reduce(held, async_op=True).wait()
    sent, received = dist.isend(held, 1 - rank), torch.empty(7, dtype=held.dtype)
    dist.recv(received, 1 - rank)
    sent.wait()
    assert torch.equal(received, held)
    with pytest.raises(StateError, match="Receive into a tensor of your own"):
        dist.irecv(held, 1 - rank)
    model(data()).sum().backward()
    with pytest.raises(StateError, match=r"all_to_all_single .* Receive into a tensor of your own"):
        dist.all_to_all_single(model.blocks[0].up.weight.grad, torch.zeros(13, 7, dtype=held.dtype))
    optimizer.zero_grad()
    step(model, optimizer)
    return [*found, model.state_dict()["first.bias"]]


@pytest.mark.parametrize("plan", [{}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("stage", [0, 2])
def test_what_a_collective_writes_to_a_weight_is_kept(ranks: Any, stage: int, plan: dict[str, Any]) -> None:
    for first, *others in ranks(2, written_by_collectives, {**plan, "stage": stage}):
        assert_same(others, [first * 2**times for times in range(1, 5)])


def seen_by_graphs(model: nn.Module, optimizer: Any) -> Any:
    """A write to a view that has a graph makes the graph that needs its old values unusable; other data does not."""
    view = model.first.weight[:2]
    loss = view.square().sum()
    with torch.no_grad():
        view.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been modified inplace"):
        loss.backward()
    kept = model.last.weight[0]
    model.last.weight.data = torch.ones(3, 7)
    (model.first.weight.t()[1] * model.last.weight[0, 0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return kept.detach().clone(), step(model, optimizer), weights(model)


@pytest.mark.parametrize("world", ALONE, ids=str)
def test_views_that_were_taken_with_gradients_follow_writes_and_other_data(
    ranks: Any, world: tuple[int, str, int]
) -> None:
    compare(ranks, world, seen_by_graphs)


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_graph_of_a_view_from_before_a_write_is_refused(plan: str) -> None:
    model = make()
    model, _ = unbounded.shard(model, adamw(model), PLANS[plan])
    view = model.first.weight[:2]
    with torch.no_grad():
        view.mul_(2)
    with pytest.raises(StateError, match="Take it again from the parameter"):
        view.square().sum().backward()
    model.first.weight[:2].square().sum().backward()


@pytest.mark.parametrize("plan", list(PLANS))
def test_a_view_that_was_taken_with_gradients_goes_into_compiled_code(plan: str) -> None:
    model = make()
    model, _ = unbounded.shard(model, adamw(model), PLANS[plan])
    square = torch.compile(lambda weight: weight.square().sum(), backend="eager")
    square(model.first.weight.t()).backward()
    torch.testing.assert_close(model.first.weight.grad, 2 * model.first.weight.detach())


class Momentum(nn.Module):
    """MoCo: a second encoder follows the first inside the forward, by new data."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Net(), Net()
        for parameter in self.key.parameters():
            parameter.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for one, other in zip(self.query.parameters(), self.key.parameters(), strict=True):
                other.data = other.data * 0.9 + one.data * 0.1
            target = self.key(x)
        return self.query(x) - target


class Codebook(nn.Module):
    """A codebook that a forward updates by `.data`, inside the module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.codes = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        self.codes.data.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.codes


def three_steps(model: nn.Module, optimizer: Any) -> Any:
    return [step(model, optimizer, number) for number in range(4)], weights(model)


def refused_steps(model: nn.Module, optimizer: Any) -> Any:
    """Partitioned weights are gathered again for every pass: if a rank sees its own part change, all ranks raise."""
    if hasattr(optimizer, "engine"):
        with pytest.raises((StateError, PeerError), match=r"the forward has changed the parameter|has ended"):
            three_steps(model, optimizer)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("build", [Momentum, Codebook])
def test_weights_that_a_forward_writes_are_kept_or_refused(ranks: Any, world: tuple[int, str, int], build: Any) -> None:
    compare(ranks, world, refused_steps if world[0] > 1 and world[2] == 3 else three_steps, build)


class Renormalised(nn.Module):
    """An embedding whose forward shortens the rows that it looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(64, 8, max_norm=0.5)
        with torch.no_grad():
            self.rows.weight.fill_(0.1)
            self.rows.weight[:4] = 1.0  # too long

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x).square().sum()


def shorten_rows_of_a_peer(rank: int, world_size: int) -> str:
    """The rows that are too long belong to the first rank, and only the last one looks them up."""
    model = Renormalised()
    model, optimizer = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.0))
    first = 0 if rank == world_size - 1 else 40
    try:
        for _ in range(3):
            model(torch.arange(first, first + 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except UnboundedError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def test_a_write_to_a_peers_part_of_a_weight_is_refused(ranks: Any) -> None:
    other, writer = ranks(2, shorten_rows_of_a_peer)
    assert writer.startswith("StateError: the forward has changed the parameter 'rows.weight'")
    assert other.startswith("PeerError")


def held_while_written(model: nn.Module, optimizer: Any) -> Any:
    held, seen = model.codes.data, []
    for number in range(3):
        model(data(number))
        seen.append(held.clone())
        held.add_(1)
        seen.append(model.codes.detach().clone())
    return seen


@pytest.mark.parametrize("world", ALONE, ids=str)
def test_values_that_are_held_follow_what_forwards_write(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, held_while_written, Codebook)


class Started(Net):
    """Glow: a batch sets weights, in place by `.data` and by new data."""

    is_set = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.first.bias.data.copy_(-x.mean())
            self.last.bias.data = x.std().expand(3).clone()
        self.is_set = True
        return super().forward(x)


def start_without_gradients(model: nn.Module, optimizer: Any) -> Any:
    seen = []
    for mode in (torch.no_grad, torch.inference_mode):
        model.is_set = False
        whole = unbounded.full_params(model) if dist.is_initialized() else contextlib.nullcontext()
        with whole, mode():
            seen.append(model(data()).clone())
        seen.append(three_steps(model, optimizer))
    return seen


@pytest.mark.parametrize("world", [(1, "device", 3), (1, "host", 3), (2, "device", 1), (2, "disk", 3)], ids=str)
def test_data_that_a_forward_without_gradients_writes_is_kept(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, start_without_gradients, Started)


class Late(Codebook):
    """Begins to write only after some forwards."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) if self.count > 4 else self.net(x)


@pytest.mark.parametrize("plan", list(PLANS))
def test_data_that_a_forward_begins_to_write_late_is_kept_or_refused(plan: str) -> None:
    plain, model = make(Late), make(Late)
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    reference = adamw(plain)
    if plan == "device":
        assert [step(model, optimizer) for _ in range(9)] == pytest.approx([step(plain, reference) for _ in range(9)])
        return
    turns = range(8 * len(optimizer.engine.units) + 2)  # every unit has had its own
    with pytest.raises(StateError, match=r"through `\.data`.*began only after its first"):
        print([step(model, optimizer) for _ in turns])


class Replacing(Net):
    """Does something to itself at the end of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.change is not None:
            self.change()
        return y


@pytest.mark.parametrize("plan", ["device", "disk"])
def test_a_forward_that_replaces_a_parameter_is_refused_and_changes_nothing(plan: str) -> None:
    def replace(module: nn.Module) -> None:
        module.weight = nn.Parameter(module.weight.detach().clamp(-0.1, 0.1))

    def remove(module: nn.Module) -> None:
        del module.weight

    model = make(Replacing)
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    for change in (replace, remove):
        model.change = lambda change=change: change(model.last)
        with torch.set_grad_enabled(change is remove), pytest.raises(StateError, match=r"last\.weight' was replaced"):
            model(data())
    model.change = None
    handle = model.blocks[1].norm.register_forward_hook(lambda *_: replace(model.blocks[1].up))
    with pytest.raises(StateError, match=r"blocks\.1\.up\.weight' was replaced"):
        model(data())
    handle.remove()
    plain = make(Net)
    assert step(model, optimizer) == pytest.approx(step(plain, adamw(plain)))
    assert_same(dict(sorted(weights(model).items())), dict(sorted(weights(plain).items())))


def average(model: nn.Module, optimizer: Any) -> Any:
    """A deep copy as an exponential average, evaluated and saved as a plain model."""
    ema = copy.deepcopy(model)
    for number in range(3):
        step(model, optimizer, number)
        values = model.state_dict()
        with torch.no_grad():
            for name, value in ema.state_dict().items():
                value.lerp_(values[name], 0.5)
    return ema(data(5)), weights(ema), type(next(ema.parameters())).__name__


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_deep_copy_is_a_plain_model_with_the_values(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, average)


class KeepingBlock(Block):
    """Keeps its weights from the last forward, and returns one, as models do with codebooks and temperatures."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.up.weight, self.norm.bias, self.down.weight.t()]
        return super().forward(x)


class Keeping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepingBlock(7) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.last.weight


def keep_from_forwards(model: nn.Module, optimizer: Any) -> Any:
    output, weight = model(data())
    (output.square().mean() + weight.norm()).backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = []
    for mode in (torch.no_grad(), torch.inference_mode(), contextlib.nullcontext()):
        with mode:
            _, weight = model(data(1))
            kept = [weight, *(held for block in model.blocks for held in block.kept)]  # type: ignore[union-attr, operator]
            model(data(2))  # takes and frees the memory again
            seen += [held.detach().clone() for held in kept]
    return seen


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_weights_that_a_forward_keeps_or_returns_can_be_read_after_it(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, keep_from_forwards, build=Keeping)


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_deep_copy_can_be_pickled_and_takes_adapters(plan: str, activations: str) -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), {**PLANS[plan], "activations": activations})
    step(model, optimizer)
    twin = copy.deepcopy(model)
    read = pickle.loads(pickle.dumps(twin))
    assert_same(weights(read), weights(model))
    for plain in (twin, read):
        plain.peft_config = {}  # as `get_peft_model` leaves it
        assert_same(plain(data()), model(data()))
        assert all(type(parameter) is nn.Parameter for parameter in plain.parameters())


def test_moves_that_change_nothing_are_nothing_and_others_are_refused() -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS["host"])
    assert model.to("cpu") is model
    assert model.float() is model
    assert model.to(torch.float32).cpu() is model
    step(model, optimizer)
    for move in (model.half, model.double, lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(StateError, match="before `shard`"):
            move()
    step(model, optimizer)
    with pytest.raises(StateError, match=r"unbounded\.save"):
        torch.save(model, "/dev/null")
