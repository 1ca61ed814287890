"""Memory-centric tiling: a linear layer or embedding too large for its room runs as a sequence of tiles of its rows.

A tile is its own module that holds some rows of the weight, so that `sites` makes it a site and the engine fetches and
releases it in turn, in the forward and in the backward. The layer keeps its place, name and parameters: its weight is a
`TiledParameter`, which has the shape of the whole and is read and written through its tiles. Bias and whatever else the
layer has stay with it. Layers that share a weight share its tiles.

    tile(model, max_bytes)      marks layers, which compute by rows from then on
    find_sites(with_tiles=True) makes the tiles: separate parameters over the rows
    hide_wholes(model, ...)     the tiles are the weight now
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from unbounded.errors import PlanError
from unbounded.planner.sizes import format_bytes, parse_bytes
from unbounded.zero.layout import ALIGN, round_up
from unbounded.zero.parameters.parameter import ManagedParameter, ShownParameter, name_of, refuse_replaced
from unbounded.zero.parameters.tiled_parameter import TiledParameter, refuse_hooks

_MARK = "_unbounded_tiled"


class Tile(nn.Module):
    """Some rows of a weight. It computes whatever the layer asks of them."""

    def __init__(self, weight: torch.Tensor, *, trainable: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trainable)

    def forward(self, compute: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        return compute(self.weight, *inputs)


@dataclass(eq=False)
class Tiled:
    """A weight that is used by rows `bounds`; `tiles` hold them once the model is sharded."""

    bounds: list[tuple[int, int]]
    tiles: list[Tile] = field(default_factory=list)
    is_open: bool = False  # the tiles are the weight
    is_automatic: bool = False  # for a budget, not because the user asked for it

    def make_tiles(self, parameter: nn.Parameter) -> list[Tile]:
        """Tiles over the rows of `parameter` as it is now."""
        trainable = parameter.requires_grad
        with torch.no_grad():
            self.tiles = [Tile(parameter.detach()[start:stop], trainable=trainable) for start, stop in self.bounds]
            for (start, stop), tile in zip(self.bounds, self.tiles, strict=True):
                tile.weight.grad = None if parameter.grad is None else parameter.grad[start:stop]
        return self.tiles

    def __deepcopy__(self, memo: Any) -> Tiled:
        """A copy of a sharded model is plain, and computes from its whole weight."""
        return Tiled(list(self.bounds))

    def run(self, weight: torch.Tensor, compute: Callable[..., torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """`compute` of the rows that begin at `start`."""
        if not self.is_open:
            return compute(weight[start:stop])
        if getattr(weight, "_tiled", None) is not self:
            refuse_replaced(name_of(self.tiles[0].weight))
        tile = self.tiles[[low for low, _ in self.bounds].index(start)]
        return tile(compute)


def tile(model: nn.Module, max_bytes: int | str) -> dict[str, int]:
    """Runs linear layers and embeddings whose weight takes more than `max_bytes` as tiles; returns how many of each.

    Call it before `shard`. Results are those of the whole layers: values exactly, gradients of inputs up to the dtype's
    rounding, since parts are added up. Names, `state_dict()` and checkpoints do not change.
    """
    limit = parse_bytes(max_bytes, "max_bytes")
    holders = _holders(model)
    found: dict[str, int] = {}
    for name, parameter, users in _large_weights(holders, limit):
        refusal = next((reason for module, key in users if (reason := _why_not(module, key)) is not None), None)
        if refusal is not None:
            raise PlanError(
                f"{name} takes {format_bytes(parameter.nbytes)}, more than max_bytes={format_bytes(limit)}, but "
                f"{refusal}, so it cannot be tiled. Raise max_bytes to {parameter.nbytes}, or split the layer."
            )
        found[name] = _attach(name, parameter, users, limit)
    return found


def tile_to_fit(model: nn.Module, device_bytes: int | None) -> None:
    """Tiles layers that a device with so little memory cannot hold while the next ones are being fetched.

    A layer of more than a quarter of the budget becomes tiles of a sixteenth. What cannot be tiled is left to the check
    that units fit.
    """
    for module in model.modules():  # for another budget, with which `shard` has failed
        tiled = tiled_of(module)
        if tiled is not None and tiled.is_automatic and not tiled.is_open:
            del module.__dict__[_MARK], module.__dict__["forward"]
    if device_bytes is None:
        return
    max_bytes = device_bytes // 16
    for name, parameter, users in _large_weights(_holders(model), device_bytes // 4):
        row_bytes = _step(parameter) * parameter.nbytes // len(parameter)
        if row_bytes <= max_bytes and all(_why_not(module, key) is None for module, key in users):
            _attach(name, parameter, users, max_bytes, is_automatic=True)


def tiled_of(module: nn.Module) -> Tiled | None:
    """How a layer is tiled, if it is."""
    return module.__dict__.get(_MARK)


def has_tiles(module: nn.Module) -> bool:
    return any(tiled_of(inner) is not None for inner in module.modules())


def hide_wholes(
    model: nn.Module, states: dict[Any, Any] | None, device: torch.device, lowered: torch.dtype | None
) -> None:
    """From now on the tiles are the weights; optimizer `states` of wholes become those of their tiles.

    What the user sees of a whole is on `device` and, if the plan has lowered the precision, in its dtype.
    """
    for tiled, parameter in _tiled_parameters(model):
        if parameter._backward_hooks:
            refuse_hooks(f"a weight of shape {tuple(parameter.shape)}")
        if states is not None and parameter in states:
            _split_states(states, parameter, tiled)
        dtype = lowered if lowered is not None and parameter.is_floating_point() else parameter.dtype
        TiledParameter.adopt(parameter, tiled, dtype, device)
        tiled.is_open = True


def _tiled_parameters(model: nn.Module) -> Iterator[tuple[Tiled, nn.Parameter]]:
    seen: set[int] = set()
    for module in model.modules():
        tiled = tiled_of(module)
        if tiled is not None and id(tiled) not in seen:
            seen.add(id(tiled))
            yield tiled, module._parameters["weight"]  # type: ignore[misc]


def _split_states(states: dict[Any, Any], parameter: nn.Parameter, tiled: Tiled) -> None:
    held = states.pop(parameter)
    for (start, stop), part in zip(tiled.bounds, tiled.tiles, strict=True):
        states[part.weight] = {
            key: value[start:stop] if getattr(value, "shape", None) == parameter.shape else value
            for key, value in held.items()
        }


Users = list[tuple[nn.Module, str]]


def _holders(model: nn.Module) -> dict[int, tuple[str, nn.Parameter, Users]]:
    found: dict[int, tuple[str, nn.Parameter, Users]] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{path}.{key}" if path else key
                found.setdefault(id(parameter), (name, parameter, []))[2].append((module, key))
    return found


def _large_weights(
    holders: dict[int, tuple[str, nn.Parameter, Users]], limit: int
) -> Iterable[tuple[str, nn.Parameter, Users]]:
    for name, parameter, users in holders.values():
        if isinstance(parameter, (ManagedParameter, ShownParameter, TiledParameter)):
            raise PlanError("this model is already sharded. Call unbounded.tile before shard.")
        if parameter.nbytes > limit and all(tiled_of(module) is None for module, _ in users):
            yield name, parameter, users


def _why_not(module: nn.Module, key: str) -> str | None:
    """Why the rows of a parameter cannot be used one after another; None if they can."""
    parameter = module._parameters[key]
    if parameter is not None and parameter._backward_hooks:
        return "a gradient hook of it expects the whole gradient"
    if key != "weight" or "forward" in module.__dict__:
        return f"{type(module).__name__} uses its {key} in its own way"
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return None
    if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
        if module.max_norm is not None or module.scale_grad_by_freq:
            return "an embedding with max_norm or scale_grad_by_freq looks at all of its rows together"
        return None
    return f"{type(module).__name__} is neither nn.Linear nor nn.Embedding"


def _step(parameter: nn.Parameter) -> int:
    """Rows that begin on a block of the formats of states, wherever the weight is cut."""
    width = math.prod(parameter.shape[1:])
    return ALIGN // math.gcd(width, ALIGN)


def _attach(name: str, parameter: nn.Parameter, users: Users, limit: int, *, is_automatic: bool = False) -> int:
    num_rows = parameter.shape[0]
    step = min(_step(parameter), num_rows)
    row_bytes = parameter.nbytes // num_rows
    if step * row_bytes > limit:
        raise PlanError(
            f"max_bytes is {format_bytes(limit)}, but the smallest tile of {name} ({step} of its {num_rows} rows) "
            f"takes {format_bytes(step * row_bytes)}. Raise max_bytes to at least {step * row_bytes}."
        )
    count = -(-num_rows // (limit // (step * row_bytes) * step))
    rows = round_up(-(-num_rows // count), step)
    bounds = [(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]
    tiled = Tiled(bounds, is_automatic=is_automatic)
    for module, _ in users:
        module.__dict__[_MARK] = tiled
        run: Any = _run_linear if isinstance(module, nn.Linear) else _run_embedding
        module.__dict__["forward"] = partial(run, module, tiled)
    return len(bounds)


def _run_linear(module: nn.Linear, tiled: Tiled, inputs: torch.Tensor) -> torch.Tensor:
    bias = module.bias
    outputs = []
    for start, stop in tiled.bounds:
        part = None if bias is None else bias[start:stop]

        def compute(weight: torch.Tensor, part: torch.Tensor | None = part) -> torch.Tensor:
            return functional.linear(inputs, weight, part)

        outputs.append(tiled.run(module.weight, compute, start, stop))
    return torch.cat(outputs, -1)


def _run_embedding(module: nn.Embedding, tiled: Tiled, indices: torch.Tensor) -> torch.Tensor:
    """Every tile gives its rows, and zeros for the others, which can be added without changing anything."""
    _check_indices(indices, module.num_embeddings)
    total: torch.Tensor | None = None
    for start, stop in tiled.bounds:
        padding = module.padding_idx
        inside = padding - start if padding is not None and start <= padding < stop else None

        def compute(
            weight: torch.Tensor, start: int = start, stop: int = stop, inside: int | None = inside
        ) -> torch.Tensor:
            here = (indices >= start) & (indices < stop)
            rows = functional.embedding(torch.where(here, indices - start, 0), weight, inside)
            return rows.masked_fill(~here.unsqueeze(-1), 0)

        rows = tiled.run(module.weight, compute, start, stop)
        total = rows if total is None else total + rows
    assert total is not None
    return total


def _check_indices(indices: torch.Tensor, num_rows: int) -> None:
    if indices.numel() == 0:
        return
    is_good = ((indices >= 0) & (indices < num_rows)).all()
    if indices.is_cuda:
        torch._assert_async(is_good)
    elif not is_good:
        raise IndexError(f"index out of range: an index is outside the {num_rows} rows of the embedding.")
