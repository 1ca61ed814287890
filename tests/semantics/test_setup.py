"""What is given to `shard`, and what users do to the optimizer and to buffers afterwards."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import spectral_norm

import unbounded
from tests.semantics.programs import ALONE, PLANS, WORLDS, Net, adamw, assert_same, compare, data, make, step, weights
from unbounded.errors import PlanError, StateError
from unbounded.sharding import running
from unbounded.tiers import budget
from unbounded.zero.step.updates import Updates


def regrouped(model: nn.Module, optimizer: Any) -> None:
    """Parameters that change their group."""
    groups = optimizer.param_groups
    groups[0]["params"].append(moved := groups[1]["params"].pop(0))
    with pytest.raises(StateError, match="between groups"):
        optimizer.step()
    groups[0]["params"].pop()
    groups[1]["params"].insert(0, moved)


def old_optimizer(model: nn.Module, optimizer: Any) -> None:
    for foreach in (True, False):
        optimizer._given.param_groups[0]["foreach"] = foreach
        with pytest.raises(StateError, match=r"optimizer that `shard` returned"):
            optimizer._given.step()


def states(model: nn.Module, optimizer: Any) -> None:
    """States that are read, and a new beginning."""

    def begin_anew() -> None:
        optimizer.state = defaultdict(dict)

    for use in (lambda: optimizer.state[model.last.weight]["exp_avg"], lambda: optimizer.state.clear(), begin_anew):
        with pytest.raises(StateError, match=r"optimizer\.state is empty.*unbounded\.save"):
            use()
    assert len(optimizer.state) == 0
    optimizer.load_state_dict(optimizer.state_dict())


def traced(model: nn.Module, optimizer: Any) -> None:
    for trace in (lambda: torch.jit.trace(model, data()), lambda: torch.export.export(model, (data(),))):
        with pytest.raises(StateError, match=r"cannot be traced or exported.*copy\.deepcopy"):
            trace()
    with pytest.raises(StateError, match=r"cannot be scripted.*copy\.deepcopy"):
        torch.jit.script(model)


def in_ddp(model: nn.Module, optimizer: Any) -> None:
    if optimizer.engine.ranks.size > 1:
        wrapped = nn.parallel.DistributedDataParallel(model)

        def train() -> None:
            wrapped(data()).square().mean().backward()
            optimizer.step()  # DDP gives its gradients after everything else

        with pytest.raises(StateError, match="Leave out DistributedDataParallel"):
            train()
        optimizer.zero_grad()


def late_hook(model: nn.Module, optimizer: Any) -> None:
    with pytest.raises(StateError, match=r"last\.weight.*post-accumulate-grad hook"):
        model.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(StateError, match=r"last\.weight.*an optimizer that steps in the backward"):
        _apply_optimizer_in_backward(torch.optim.SGD, [model.last.weight], {"lr": 0.1})
    with pytest.raises(StateError, match=r"register_multi_grad_hook.*last\.weight.*Use register_hook"):
        torch.autograd.graph.register_multi_grad_hook([model.last.weight], lambda gradients: None)
    with pytest.raises(StateError, match=r"last\.weight.*never be called. Use register_hook"):
        model.last.weight.expand_as(model.last.weight)  # for the node after it, and hooks on that
    assert torch.equal(model.last.weight.view_as(model.last.weight), model.last.weight)


def pickled(model: nn.Module, optimizer: Any) -> None:
    for what in (model, model.last.weight, optimizer):
        with pytest.raises(StateError, match=r"unbounded\.save"):
            pickle.dumps(what)
    with pytest.raises(StateError, match=r"cannot be copied.*copy\.deepcopy\(model\)"):
        copy.deepcopy((model, optimizer))


def all_refused(model: nn.Module, optimizer: Any) -> Any:
    """What would go wrong raises at once, and training goes on as if nothing had happened."""
    losses = []
    for number, use in enumerate((regrouped, old_optimizer, states, traced, in_ddp, late_hook, pickled)):
        is_sharded, is_before = hasattr(optimizer, "engine"), use in (traced, in_ddp)
        if is_sharded and is_before:  # export reads gradients that are there
            use(model, optimizer)
        loss = model(data(number)).square().mean()
        loss.backward()
        if is_sharded and not is_before:
            use(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, weights(model)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    others = [*model.last.parameters(), *model.blocks.parameters()]
    return torch.optim.AdamW([{"params": list(model.first.parameters())}, {"params": others}], lr=1e-2, eps=1e-3)


@pytest.mark.every_second
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_what_would_go_wrong_is_refused_and_changes_nothing(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, all_refused, Net, in_groups)


def test_two_parameters_over_one_memory_are_refused() -> None:
    model = make()
    model.blocks[1].up.weight = nn.Parameter(model.blocks[0].up.weight.data)
    with pytest.raises(PlanError, match=r"blocks\.0\.up\.weight.*blocks\.1\.up\.weight"):
        unbounded.shard(model, adamw(model))


def test_a_tensor_over_the_memory_of_a_parameter_is_refused() -> None:
    model = make()
    spectral_norm(model.first)  # has one until its first forward
    model.register_buffer("one", torch.zeros(7))
    model.blocks[0].register_buffer("same", model.one)  # buffers may share theirs
    model.blocks[1].register_buffer("row", model.blocks[0].up.weight.data[2])
    model.blocks[1].norm.row = model.blocks[0].up.weight.data[3]
    model.blocks[1].norm.register_buffer("whole", model.blocks[0].up.weight)
    for module, name in ((model.blocks[1], "row"), (model.blocks[1].norm, "row"), (model.blocks[1].norm, "whole")):
        with pytest.raises(PlanError, match=r"'blocks\.[01].*' and 'blocks\.[01].*', a parameter and another tensor"):
            unbounded.shard(model, adamw(model))
        delattr(module, name)
    vars(model.blocks[1])["same"] = model.blocks[0].up.weight
    model, optimizer = unbounded.shard(model, adamw(model))
    step(model, optimizer)


def test_lazy_and_scripted_modules_are_refused_with_what_to_do() -> None:
    for lazy in (nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False)):
        with pytest.raises(PlanError, match="Run a batch through the model"):
            unbounded.shard(nn.Sequential(nn.Linear(3, 3), lazy), None)
    with pytest.raises(PlanError, match=r"torch\.jit\.script"):
        unbounded.shard(torch.jit.script(nn.Linear(3, 3)), None)
    for made in (torch.jit.script(nn.Tanh()), torch.jit.trace(make().blocks[0], torch.zeros(2, 7))):
        model = make()
        model.blocks[1] = made
        with pytest.raises(PlanError, match=r"blocks\.1.*torch\.jit\.script"):
            unbounded.shard(model, adamw(model))


class Halved(torch.Tensor):
    """Computes with half of what it holds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found / 2 if func is nn.functional.linear else found


class Marked(nn.Parameter):
    """Says something about itself."""


def test_parameters_with_operations_of_their_own_are_refused_and_marked_ones_train() -> None:
    model, plain = make(), make()
    weight = model.last.weight
    model.last.weight = nn.Parameter(weight.detach().as_subclass(Halved))
    with pytest.raises(PlanError, match=r"'last\.weight' is a Halved.*parametrize"):
        unbounded.shard(model, adamw(model))
    model.last.weight = Marked(weight.detach())
    model, optimizer = unbounded.shard(model, adamw(model))
    assert step(model, optimizer) == pytest.approx(step(plain, adamw(plain)))


@pytest.mark.parametrize("plan", list(PLANS))
def test_parameters_that_came_after_shard_are_not_left_out_of_a_checkpoint(plan: str, tmp_path: Path) -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS[plan])
    step(model, optimizer)
    model.last.register_parameter("scale", nn.Parameter(torch.ones(3)))
    for write in (lambda: unbounded.save(tmp_path / "c", model, optimizer), lambda: unbounded.export(tmp_path, model)):
        with pytest.raises(StateError, match=r"last\.scale.*after `shard`"):
            write()
    del model.last.scale
    last = model.last
    del model.last
    with pytest.raises(StateError, match=r"removed from the model after `shard`"):
        unbounded.save(tmp_path / "c", model, optimizer)
    model.last = last
    unbounded.save(tmp_path / "c", model, optimizer)
    step(model, optimizer)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.last = Net(), nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.net(x)))


def normed_outputs(rank: int, world_size: int, plan: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model, _ = unbounded.shard(make(Normed), None, {**plan, "loss_scale": 1, "loss_scale_window": 0})
    outputs = [model(data(number)).detach() for number in range(2)]
    return outputs, {name: buffer.dtype for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("world", [*ALONE, (2, "device", 1), (2, "disk", 3)], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_statistics_of_batch_norms_follow_the_precision_as_model_to_has_it(
    ranks: Any, world: tuple[int, str, int], precision: str
) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    plain = make(Normed).to(dtype)
    expected = [plain(data(number).to(dtype)).detach() for number in range(2)]
    plan = {**PLANS[world[1]], "stage": world[2], "precision": precision}
    for outputs, dtypes in ranks(world[0], normed_outputs, plan):
        torch.testing.assert_close(outputs, expected)
        assert dtypes == {name: buffer.dtype for name, buffer in plain.named_buffers()}


class Linked(nn.Module):
    """Rows that follow links, as in a graph: their weights are a sparse buffer."""

    def __init__(self, layout: torch.layout = torch.sparse_coo, *, scale: float = 0.5, kept: bool = False) -> None:
        super().__init__()
        self.net = Net()
        links = scale * torch.eye(4) + scale * torch.eye(4).roll(1, 0)
        self.register_buffer("links", links.to_sparse(layout=layout), persistent=kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.links, self.net(x.to(self.links.dtype)))


LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


def train_linked(layout: torch.layout, scale: float, plan: dict[str, Any] | None) -> Any:
    model: Any = make(lambda: Linked(layout, scale=scale))
    optimizer: Any = adamw(model)
    if plan is not None:
        model, optimizer = unbounded.shard(model, optimizer, plan)
    return [step(model, optimizer, number) for number in range(2)], model.links.to_dense()


def linked(rank: int, world_size: int, plan: dict[str, Any]) -> Any:
    return [train_linked(layout, 0.5 + rank, plan) for layout in LAYOUTS]


@pytest.mark.parametrize("world", [(1, "host", 3), (2, "device", 1), (2, "disk", 3)], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta state")
def test_sparse_buffers_are_those_of_the_first_rank(ranks: Any, world: tuple[int, str, int]) -> None:
    expected = [train_linked(layout, 0.5, None) for layout in LAYOUTS]
    for found in ranks(world[0], linked, {**PLANS[world[1]], "stage": world[2]}):
        assert_same(found, expected)


def other_links(rank: int, world_size: int) -> str:
    model = Linked(scale=0.5) if rank == 0 else Linked(scale=0)
    with pytest.raises(PlanError) as caught:
        unbounded.shard(model)
    return str(caught.value)


def test_a_sparse_buffer_follows_the_precision_and_is_refused_where_it_cannot_be(ranks: Any, tmp_path: Path) -> None:
    plain = make(Linked).to(torch.bfloat16)
    model, _ = unbounded.shard(make(Linked), None, {"precision": "bf16"})
    torch.testing.assert_close(model(data()), plain(data()))
    for message in ranks(2, other_links):
        assert "buffer links (4, 4) torch.float32 torch.sparse_coo of 0 values instead of" in message
    model, _ = unbounded.shard(Linked(kept=True), None)
    with pytest.raises(unbounded.UnboundedError, match=r"'links' is a tensor of layout torch.sparse_coo"):
        unbounded.save(tmp_path / "c", model)


class Tabled(nn.Module):
    """A buffer that is meant to be fp32, as in rotary embeddings, and one that is mixed with activations."""

    def __init__(self, mixed: str) -> None:
        super().__init__()
        self.mixed = mixed
        self.up, self.norm = nn.Linear(7, 7), nn.LayerNorm(7)
        self.register_buffer("table", torch.linspace(0, 3, 7))
        self.register_buffer("seen", torch.zeros(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = (torch.arange(len(x))[:, None].float() * self.table.float()).sin().to(x.dtype)
        self.seen.lerp_(x.detach().float().mean(0), 0.1)
        if self.mixed == "promoted":
            return self.up(x + angles) + self.table
        return self.up(x + self.table) if self.mixed == "refused" else self.up(self.norm(x + angles))


def tabled(compiled: str, mixed: str) -> nn.Module:
    torch.manual_seed(3)
    block: Any = Tabled(mixed)
    if compiled == "in place":
        block.compile(backend="aot_eager")
    else:
        block = torch.compile(block, backend="aot_eager")
    return nn.Sequential(nn.Linear(5, 7), block)


@pytest.mark.parametrize(("plan", "compiled"), [("device", "in place"), ("disk", "wrapped")])
def test_buffers_in_compiled_code_are_those_of_a_model_whose_parameters_are_in_the_precision(
    plan: str, compiled: str
) -> None:
    for mixed in ("cast", "promoted", "refused"):
        torch._dynamo.reset()
        plain, model = tabled(compiled, mixed), tabled(compiled, mixed)
        for parameter in plain.parameters():
            parameter.data = parameter.data.bfloat16()
        model, _ = unbounded.shard(model, None, {**PLANS[plan], "precision": "bf16"})
        if mixed == "refused":
            for net in (plain, model):
                with pytest.raises(RuntimeError, match="dtype"):
                    net(data().bfloat16())
            continue
        for number in range(3):
            torch.testing.assert_close(model(data(number)), plain(data(number).bfloat16()))
        for (name, found), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(found, expected, msg=lambda m, name=name: f"{name}: {m}")
    torch._dynamo.reset()


class Empty(nn.Module):
    """Parameters without elements: one that tells where the model is, and those of a layer without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mark, self.none = Net(), nn.Parameter(torch.empty(0)), nn.Linear(0, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.mark.device, self.mark.dtype)
        return self.net(x) + self.none(x[:, :0])


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_without_elements_follow_the_others(device: str) -> None:
    with torch.device(device):
        model = Empty()
    model, optimizer = unbounded.shard(model, adamw(model), {"precision": "bf16"})
    step(model, optimizer)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.bfloat16)}
    plain = Empty().bfloat16()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(data()), plain(data()))


class Averages(nn.Module):
    """Float buffers as modules use them: added, looked up, concatenated, averaged in place, replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 7)
        self.register_buffer("shift", torch.linspace(0, 1, 7))
        self.register_buffer("table", torch.linspace(0, 1, 28).view(4, 7))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("wide", torch.zeros(7))
        self.register_buffer("var", torch.ones(7))
        self.register_buffer("scale", torch.tensor(0.0))
        self.register_buffer("last", torch.zeros(7))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("exact", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("low", torch.ones(7, dtype=torch.bfloat16))
        self.register_buffer("later", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.later = self.table[0] if self.later is None else self.later
        seen = x.detach().mean(0)
        self.mean.lerp_(seen, 0.01)
        self.wide.lerp_(seen.float(), 0.01)
        self.scale += 0.001
        self.count += 1
        self.last = seen
        x = nn.functional.batch_norm(x, None, None, training=True) + self.shift[:7] * (1 + self.scale)
        nn.functional.batch_norm(x.detach(), self.wide.clone(), self.var, training=True)
        x = torch.cat([x, self.table[torch.arange(len(x))].sqrt()], dim=1)[:, :7] - self.mean
        return self.up(torch.where(x > 0, x, self.shift))


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList(Averages() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("plan", "precision", "activations"), [("device", "bf16", "recompute"), ("disk", "fp16", "keep")]
)
def test_float_buffers_compute_in_the_precision_and_stay_accurate(plan: str, precision: str, activations: str) -> None:
    """Against a plain model in fp32: an average over many steps in 16 bits would stand still half way."""
    plain, model = make(Averaging), make(Averaging)
    options = {**PLANS[plan], "precision": precision, "activations": activations}
    model, optimizer = unbounded.shard(model, adamw(model), {**options, "loss_scale": 1, "loss_scale_window": 0})
    reference = adamw(plain)
    for number in range(3):
        assert step(model, optimizer, number) == pytest.approx(step(plain, reference, number), rel=0.05)
    plain.load_state_dict(model.state_dict())
    times = 100
    with torch.no_grad():
        for _ in range(times):
            model(data())
            plain(data())
    for (name, found), (_, expected) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02, msg=lambda m, name=name: f"{name}: {m}")
    assert float(model.blocks[0].scale) == pytest.approx(float(plain.blocks[0].scale), rel=1e-6)
    assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}


def test_a_model_that_was_dropped_during_its_update_is_free_before_the_next_is_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "NEGLIGIBLE_BYTES", 0)
    may_go_on, held, measure = threading.Event(), [], budget.measure
    update = Updates._take_drafts

    def late(self: Updates, *arguments: Any) -> Any:
        may_go_on.wait()
        return update(self, *arguments)

    monkeypatch.setattr(Updates, "_take_drafts", late)

    def train() -> weakref.ref[Any]:
        model = make()
        model, optimizer = unbounded.shard(model, adamw(model), {"weights": "host", "optimizer": "host"})
        step(model, optimizer)
        return weakref.ref(optimizer.tiers)

    tiers = train()
    gc.collect()
    assert tiers() is not None  # its update goes on

    def look(*arguments: Any) -> Any:
        held.append(tiers() is not None)
        return measure(*arguments)

    monkeypatch.setattr(budget, "measure", look)
    threading.Timer(0.2, may_go_on.set).start()
    train()
    assert held == [False]


def train_between_inference(model: nn.Module, optimizer: Any) -> Any:
    """Everything around the steps is in inference mode, as a loop that mostly generates may have it."""
    losses = [step(model, optimizer)]
    with torch.inference_mode():
        model.first.requires_grad_(False)
        model.load_state_dict(model.state_dict())
    losses.append(step(model, optimizer, 1))
    with torch.inference_mode():
        model.first.requires_grad_(True)
    losses.append(step(model, optimizer, 2))
    return losses, weights(model)


def shard_and_unshard_in_inference(rank: int, world_size: int, plan: str, stage: int) -> Any:
    model = make()
    with torch.inference_mode():
        model, optimizer = unbounded.shard(model, adamw(model), {**PLANS[plan], "stage": stage})
    found = train_between_inference(model, optimizer)
    with torch.inference_mode():
        model = unbounded.unshard(model)
    optimizer = adamw(model)
    return found, step(model, optimizer, 3)


@pytest.mark.parametrize("world", [*ALONE, (2, "device", 1), (2, "disk", 3)], ids=str)
def test_what_is_made_in_inference_mode_trains(ranks: Any, world: tuple[int, str, int]) -> None:
    plain = make()
    expected = train_between_inference(plain, adamw(plain)), step(plain, adamw(plain), 3)
    for found in ranks(world[0], shard_and_unshard_in_inference, *world[1:]):
        assert_same(found, expected)


def test_a_model_of_tensors_of_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = make()
    with pytest.raises(PlanError, match=r"'first\.weight' was made inside torch\.inference_mode.*torch\.no_grad"):
        unbounded.shard(model, None)


@contextmanager
def defaults(kind: str) -> Iterator[None]:
    """torch's defaults for new tensors. The meta device is in place of a GPU, on which a host's buffer must not be."""
    try:
        if kind == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, kind))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def begun(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A plain model whose optimizer has states."""
    model = make()
    makers = {"AdamW": {"lr": 1e-2, "eps": 1e-3}, "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1}}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **makers[kind])
    step(model, optimizer)
    return model, optimizer


def train_under(
    rank: int, world_size: int, default: str, kind: str, plan: dict[str, Any], folder: Path
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = begun(kind)
    batches, seen = [data(number) for number in range(6)], []

    def train(number: int) -> None:
        loss = model(batches[number]).float().square().mean()
        loss.backward()
        norm = optimizer.clip_grad_norm_(0.1)
        assert norm.dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
        seen.extend((loss.item(), norm.item()))

    with defaults(default):
        model, optimizer = unbounded.shard(model, optimizer, plan)
        train(0)
        unbounded.save(folder, model, optimizer)
        train(1)
        unbounded.load(folder, model, optimizer)
        train(2)
        with unbounded.full_params(model), torch.no_grad():
            model.last.weight.mul_(0.9)
        train(3)
        model.load_state_dict(model.state_dict())
        model.first.requires_grad_(False)
        train(4)
        model.first.requires_grad_(True)
        train(5)
        return seen, {name: value.clone() for name, value in unbounded.unshard(model).state_dict().items()}


@pytest.mark.parametrize("world", [*ALONE, (2, "device", 1), (2, "disk", 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "optimizer_format": "compact"}], ids=str)
@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_defaults_of_torch_for_new_tensors_change_nothing(
    ranks: Any, world: tuple[int, str, int], kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    world_size, plan, stage = world
    chosen = {**PLANS[plan], "stage": stage, **options}
    expected = ranks(world_size, train_under, "float32", kind, chosen, tmp_path / "float32")
    for default in ("bfloat16", "float64", "meta"):
        found = ranks(world_size, train_under, default, kind, chosen, tmp_path / default)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
