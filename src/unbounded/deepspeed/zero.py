"""`deepspeed.zero`: building models, looking at whole parameters, and linear layers in tiles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unbounded.sharding.running import find_model, full_params


@contextmanager
def Init(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Does nothing: models are built in host memory, and `initialize` partitions them.

    For one that the host cannot hold, build it under `torch.device("meta")` and call `unbounded.shard(weights=...)`.
    """
    yield


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """All ranks must enter this. Inside, parameters hold their full values; what `modifier_rank` writes is kept."""
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    models = dict.fromkeys(map(find_model, given)) if enabled else {}
    with ExitStack() as gathered:
        for model in filter(None, models):  # None: not sharded yet, so all values are there
            gathered.enter_context(full_params(model))
        yield
        if enabled:
            _broadcast(given, modifier_rank)


def _broadcast(parameters: list[nn.Parameter], source: int | None) -> None:
    """Every rank keeps its part of what it holds, so all must hold what the modifier wrote."""
    if source is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with torch.no_grad():
            for parameter in parameters:
                value = parameter.detach()
                dist.broadcast(value, source)
                parameter.copy_(value)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Does nothing: parameters that a module uses without owning them are found as they are used."""


class TiledLinear(nn.Module):
    """A linear layer as a grid of smaller ones, each its own unit, so that no whole weight is ever gathered."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: type[nn.Linear] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.columns, self.rows = _cuts(in_features, in_splits), _cuts(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(column[1] - column[0], row[1] - row[0], bias=bias and column[0] == 0, **kwargs)
                for column in self.columns
            )
            for row in self.rows
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, x: Any) -> Any:
        parts = x if self.input_is_already_split else [x[..., a:b] for a, b in self.columns]
        outputs = []
        for tiles in self.linears:
            total = tiles[0](parts[0])  # type: ignore[index]
            for tile, part in zip(list(tiles)[1:], parts[1:], strict=True):  # type: ignore[call-overload]
                total = total + tile(part)
            outputs.append(total)
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Takes the values of a whole linear layer."""
        for tiles, (top, bottom) in zip(self.linears, self.rows, strict=True):
            for tile, (left, right) in zip(tiles, self.columns, strict=True):  # type: ignore[call-overload]
                tile.weight.copy_(other.weight[top:bottom, left:right])
                if tile.bias is not None:
                    tile.bias.copy_(other.bias[top:bottom])


def _cuts(size: int, parts: int) -> list[tuple[int, int]]:
    return [(size * part // parts, size * (part + 1) // parts) for part in range(parts)]
