"""First values of tiled layers: the steps of `meta` with a step for every tile, so that no layer is ever whole.

A layer with tiles first fills its bias, with one row in place of its weight. Then, for each tile, a stand-in (a copy of
the layer whose weight is that tile) is filled by the layer's own initialisation.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from unbounded.zero.parameters.tiles import Tile, Tiled, tiled_of
from unbounded.zero.setup.reach import Step

_ROWS = "_unbounded_rows"


def with_tiles(steps: Iterable[Step], prefixes: dict[int, str]) -> Iterator[Step]:
    """The steps of a model on the meta device, its tiled layers tile by tile; `prefixes` get those of the stand-ins."""
    done: set[int] = set()
    for graft, modules in steps:
        layers = [module for module in modules if tiled_of(module) is not None]
        wholes = [_hide_weight(layer) for layer in layers]
        yield graft, modules
        for layer, (whole, padding) in zip(layers, wholes, strict=True):
            layer._parameters["weight"] = whole
            if padding is not None:
                layer.padding_idx = padding  # type: ignore[assignment]
            tiled = tiled_of(layer)
            assert tiled is not None
            if id(tiled) not in done:  # layers that share a weight share its values
                done.add(id(tiled))
                yield from _tile_steps(layer, tiled, prefixes)


def rows_of(module: nn.Module) -> tuple[int, int] | None:
    """The rows of a layer's weight that a stand-in or a tile has, if it is one."""
    return module.__dict__.get(_ROWS)


def is_hidden(tensor: torch.Tensor) -> bool:
    """Whether this is in place of a weight whose tiles come later."""
    return getattr(tensor, "_is_one_row", False)


def _hide_weight(layer: nn.Module) -> tuple[nn.Parameter, int | None]:
    whole = layer._parameters["weight"]
    assert whole is not None
    row = nn.Parameter(torch.zeros(1, *whole.shape[1:], dtype=whole.dtype, device="cpu"), requires_grad=False)
    row._is_one_row = True  # type: ignore[attr-defined]
    layer._parameters["weight"] = row
    padding = getattr(layer, "padding_idx", None)
    if padding is not None:
        layer.padding_idx = None  # type: ignore[assignment]
    return whole, padding


def _tile_steps(layer: nn.Module, tiled: Tiled, prefixes: dict[int, str]) -> Iterator[Step]:
    for (start, stop), tile in zip(tiled.bounds, tiled.tiles, strict=True):
        stand_in = _stand_in(layer, tile, start, stop)
        prefixes[id(stand_in)] = prefixes[id(tile)] = prefixes[id(layer)]
        tile.__dict__[_ROWS] = start, stop
        yield None, [stand_in, tile]


def _stand_in(layer: nn.Module, tile: Tile, start: int, stop: int) -> nn.Module:
    made = copy.copy(layer)
    made.__dict__ = {**layer.__dict__, _ROWS: (start, stop)}
    made._parameters = {key: tile.weight if key == "weight" else None for key in layer._parameters}
    made._buffers = {}
    padding = getattr(layer, "padding_idx", None)
    if padding is not None:
        made.padding_idx = padding - start if start <= padding < stop else None  # type: ignore[assignment]
    return made
