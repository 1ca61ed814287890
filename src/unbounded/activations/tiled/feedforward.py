"""Feed-forward layers over tiles of the sequence, inside blocks that are recomputed in the backward.

With 64k tokens, the inner values of a gated feed-forward layer (two or three tensors of tokens times several widths)
are the largest part of a block's recomputation. Every token goes through it alone, so it runs over tiles of tokens.
Each tile keeps its input and is computed once more when the backward reaches it. Attention is left whole: its own
kernels are linear in memory. This costs one more forward of the layer, so it is done only if a layer would take a large
part of the device (`Sizes`), and never in blocks that keep their activations.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unbounded.errors import PlanError

# The shares of a device's budget that a whole layer may take, and that one tile takes otherwise.
WHOLE_PARTS, TILE_PARTS = 8, 24
LEAST_TILE_ROWS = 128


@dataclass(frozen=True)
class Sizes:
    """Bytes that the inner values of a feed-forward layer may take: as a whole, and otherwise in a tile."""

    whole_bytes: int
    tile_bytes: int

    @staticmethod
    def within(device_bytes: int) -> Sizes:
        return Sizes(device_bytes // WHOLE_PARTS, device_bytes // TILE_PARTS)


class FeedForward:
    """One layer of a block. It is tiled while `is_active`: its block runs, and will run again in the backward."""

    def __init__(self, module: nn.Module, sizes: Sizes) -> None:
        self._module = weakref.ref(module)  # which has this
        self.sizes, self.is_active = sizes, False
        self._width = sum(_out_width(inner) for inner in module.modules())
        self._call = partial(_call, self)

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    def attach(self) -> None:
        module = self._module()  # None if the user has put another layer in its place
        if module is not None and module.__dict__.get("_compiled_call_impl") is None:  # compiled by itself: left alone
            module.__dict__["_compiled_call_impl"] = self._call

    def detach(self) -> None:
        module = self._module()
        if module is not None and module.__dict__.get("_compiled_call_impl") is self._call:
            del module.__dict__["_compiled_call_impl"]

    def tile_rows(self, inputs: torch.Tensor) -> int | None:
        """Rows of a tile; None if the layer is small enough as it is. Each output counts twice."""
        row_bytes = max(1, 2 * self._width * inputs.element_size())
        num_rows = inputs.numel() // max(1, inputs.shape[-1])
        if num_rows * row_bytes <= self.sizes.whole_bytes:
            return None
        rows = max(LEAST_TILE_ROWS, self.sizes.tile_bytes // row_bytes)
        return rows if rows < num_rows else None

    def can_run_apart(self) -> bool:
        """False if random numbers are drawn, because tiles would draw different ones."""
        return not (self.module.training and any(_is_random(inner) for inner in self.module.modules()))


def _call(layer: FeedForward, *args: Any, **kwargs: Any) -> Any:
    """The call of a layer. Its size is looked at first, so that compiled code does not depend on the rest."""
    if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].dim() > 1:
        rows = layer.tile_rows(args[0])
        if rows is not None and layer.is_active and layer.can_run_apart():
            return _run_tiles(layer, args[0], rows)
    return layer.module._call_impl(*args, **kwargs)


@torch.compiler.disable
def _run_tiles(layer: FeedForward, inputs: torch.Tensor, num_rows: int) -> torch.Tensor:
    run = layer.module._call_impl
    tiles = inputs.reshape(-1, inputs.shape[-1]).split(num_rows)
    first = _compute(run, tiles[0])
    if not isinstance(first, torch.Tensor) or first.shape[:-1] != tiles[0].shape[:-1]:
        raise PlanError(
            f"the layer {type(layer.module).__name__} was given {tuple(tiles[0].shape)} and returned "
            f"{_describe(first)}, so it cannot run over tiles of the sequence. Leave it out of tiled=."
        )
    outputs = [first, *(_compute(run, tile) for tile in tiles[1:])]
    return torch.cat(outputs).view(*inputs.shape[:-1], first.shape[-1])


def _compute(run: Any, tile: torch.Tensor) -> Any:
    if not torch.is_grad_enabled():
        return run(tile)
    return checkpoint(run, tile, use_reentrant=False, preserve_rng_state=False)


def _describe(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def find_feed_forwards(block: nn.Module) -> list[nn.Module]:
    """The feed-forward layers of a Hugging Face block: linear layers and activations, each token alone."""
    return [
        module
        for module in block.modules()
        if type(module).__module__.startswith("transformers.")
        and type(module).__name__.lower().endswith("mlp")
        and _is_tokenwise(module)
    ]


def pick_feed_forwards(
    blocks: Iterable[tuple[str, nn.Module]], patterns: tuple[str, ...]
) -> dict[str, list[nn.Module]]:
    """The modules inside blocks whose names match; every pattern must match some."""
    found: dict[str, list[nn.Module]] = {}
    unmatched, names = set(patterns), []
    for block_name, block in blocks:
        for name, module in block.named_modules():
            path = f"{block_name}.{name}"
            matching = [pattern for pattern in patterns if name and fnmatch.fnmatchcase(path, pattern)]
            names += [path] if name else []
            unmatched -= set(matching)
            if matching:
                found.setdefault(block_name, []).append(module)
    if unmatched:
        shown = ", ".join(names[:8])
        raise PlanError(
            f"the pattern {sorted(unmatched)[0]!r} in tiled matches no module inside the blocks, which are {shown}"
            f"{' and more' if len(names) > 8 else ''}. Give patterns of those, or leave tiled out."
        )
    return found


def _is_tokenwise(module: nn.Module) -> bool:
    leaves = [inner for inner in module.modules() if next(inner.children(), None) is None]
    linears = [leaf for leaf in leaves if _out_width(leaf)]
    others = [leaf for leaf in leaves if not _out_width(leaf)]
    return len(linears) >= 2 and not any(next(other.parameters(), None) is not None for other in others)


def _out_width(module: nn.Module) -> int:
    if isinstance(module, nn.Linear):
        return module.out_features
    return int(getattr(module, "nf", 0)) if type(module).__name__ == "Conv1D" else 0


def _is_random(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0
