"""`state_dict` and `load_state_dict`, with whatever hooks users add."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_model_state_dict, set_state_dict

import unbounded
from tests import process
from tests.semantics.programs import PLANS, WORLDS, Net, adamw, compare, make, step, weights
from unbounded.errors import StateError


def wrapped() -> nn.Module:
    model = Net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def renaming() -> nn.Module:
    """One hook renames, another packs, and a third module saves itself in its own way."""

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(prefix + "first.")]:
            state["renamed." + key] = state.pop(key)
        state["packed"] = torch.cat([value.flatten() for key, value in state.items() if "blocks.1" in key])

    model = Net()
    model._register_state_dict_hook(rename)
    return model


def saved(model: nn.Module, optimizer: Any) -> Any:
    """A state dict before and after a step, of a part, and after one that raised."""
    found = [weights(model), weights(model.blocks[1])]
    step(model, optimizer)
    handle = model.blocks[2].register_state_dict_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    handle.remove()
    with torch.inference_mode():
        inferred = model.state_dict()
    found += [weights(model), {key: value.clone() for key, value in inferred.items()}]
    found += [{key: value.clone() for key, value in model.blocks[0].state_dict(prefix="x.").items()}]
    step(model, optimizer, 1)
    return found, weights(model), {value.device.type for value in model.state_dict().values()}


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("build", [Net, wrapped, renaming])
def test_a_state_dict_has_its_values_whatever_is_hooked_onto_it(
    ranks: Any, world: tuple[int, str, int], build: Any
) -> None:
    compare(ranks, world, saved, build)


def loaded(model: nn.Module, optimizer: Any) -> Any:
    """A load, one that raises midway, and training after both."""
    values = {name: value * 0.5 for name, value in weights(model).items()}
    step(model, optimizer)
    model.load_state_dict(values)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**values, "last.weight": torch.zeros(2, 2)})
    handle = model.blocks[1].register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.load_state_dict(values)
    handle.remove()
    model.blocks[0].load_state_dict({name: value * 2 for name, value in weights(model.blocks[0]).items()})
    return [step(model, optimizer, number) for number in range(2)], weights(model)


def assigned(model: nn.Module, optimizer: Any) -> Any:
    """A load that would replace the parameters, of the whole model or of parts, is refused, and nothing changes."""
    before = weights(model)
    values = {name: value * 0.5 for name, value in before.items()}
    for part, prefix in ((model, ""), (model.blocks, "blocks."), (model.blocks[1].up, "blocks.1.up.")):
        own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        if hasattr(optimizer, "engine"):
            with pytest.raises(StateError, match="Leave out `assign`"):
                part.load_state_dict(own, assign=True)
    unchanged = all(torch.equal(value, before[name]) for name, value in weights(model).items())
    model.load_state_dict(values)
    return unchanged, step(model, optimizer), weights(model)


def filled(model: nn.Module, optimizer: Any) -> Any:
    """A state dict whose values are written in place, as torch.distributed.checkpoint.load does, and then loaded."""
    step(model, optimizer)
    state = model.state_dict()
    with torch.no_grad():
        for value in state.values():
            value.mul_(0.5)
    model.load_state_dict(state)
    found = step(model, optimizer), weights(model)
    part = model.blocks[1].state_dict()
    set_model_state_dict(model.blocks[1], {name: value.mul_(2.0) for name, value in part.items()})
    return found, step(model, optimizer), weights(model)


def collected(model: nn.Module, optimizer: Any) -> Any:
    """What torch collects for a checkpoint, between steps: it gives an optimizer without states a step of its own."""
    losses = [step(model, optimizer, number) for number in range(2)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found, _ = get_state_dict(model, optimizer)
    assert hasattr(optimizer, "engine") == any("not the states" in str(warning.message) for warning in told)
    if hasattr(optimizer, "engine"):
        stock = adamw(plain := make())
        step(plain, stock)
        with pytest.raises(StateError, match=r"Load it into .* before `shard`"):
            set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict=get_state_dict(plain, stock)[1])
    found = {name: value.clone() for name, value in found.items()}
    return losses, found, [step(model, optimizer, number) for number in range(2, 4)], weights(model)


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("program", [loaded, assigned, filled, collected])
def test_loading_keeps_what_it_loads_and_survives_what_raises(
    ranks: Any, world: tuple[int, str, int], program: Any
) -> None:
    compare(ranks, world, program)


def changed(model: nn.Module, optimizer: Any) -> Any:
    """Writes to several values, which the next state dict and a look at a parameter show before they are used."""
    state = model.state_dict()
    with torch.no_grad():
        for name in ("last.weight", "last.bias", "blocks.0.up.bias"):
            state[name].mul_(2.0)
    if hasattr(optimizer, "engine") and not all(unit.is_whole for unit in optimizer.engine.units):
        return step(model, optimizer), weights(model)
    seen = model.state_dict()["last.bias"].clone(), model.blocks[0].up.bias.detach().clone()
    with torch.no_grad():
        state["last.weight"].mul_(2.0)
        model.last.weight.mul_(3.0)
        model.state_dict()["last.weight"].add_(1.0)
    return seen, step(model, optimizer), weights(model)


def refused(model: nn.Module, optimizer: Any) -> Any:
    if hasattr(optimizer, "engine"):
        with pytest.raises(StateError, match=r"last\.weight.*copy of a partitioned parameter"):
            changed(model, optimizer)
    return step(model, optimizer), weights(model)


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_what_is_written_to_a_state_dict_is_written_to_the_model_or_refused(
    ranks: Any, world: tuple[int, str, int]
) -> None:
    compare(ranks, world, refused if world[0] > 1 and world[2] > 0 else changed)


def test_a_write_to_an_old_state_dict_is_refused() -> None:
    model = make()
    model, optimizer = unbounded.shard(model, adamw(model), PLANS["host"])
    state = model.state_dict()
    step(model, optimizer)
    with torch.no_grad():
        state["last.weight"].mul_(2.0)
    with pytest.raises(StateError, match=r"last\.weight.*copy from before the last step"):
        step(model, optimizer)
    step(model, optimizer)


def test_a_state_dict_that_nobody_holds_takes_no_memory() -> None:
    model, optimizer = unbounded.shard(built := make(), adamw(built), PLANS["host"])

    def kept() -> list[int]:
        taken = optimizer.engine.lending.copies._taken.values()
        return [held.index for copies in taken for held in copies if held.alias is not None]

    state = model.state_dict()
    assert len(kept()) == len(state)
    del state
    assert not kept()
    with torch.no_grad():
        model.state_dict()["last.weight"].mul_(2.0)
    assert len(kept()) == 1
    step(model, optimizer)
    assert not kept()


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_unshard_gives_a_plain_model_back(ranks: Any, world: tuple[int, str, int]) -> None:
    compare(ranks, world, unsharded)


def unsharded(model: nn.Module, optimizer: Any) -> Any:
    step(model, optimizer)
    if hasattr(optimizer, "engine"):
        tiers = weakref.ref(optimizer.tiers)
        model = unbounded.unshard(model)
        assert process.is_freed(tiers, collects=False)  # although the optimizer is still held
        with pytest.raises(StateError, match=r"no longer sharded.*new optimizer"):
            optimizer.step()
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step(model, plain, number) for number in range(2)]
    return losses, weights(model), {type(parameter).__name__ for parameter in model.parameters()}
