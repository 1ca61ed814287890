"""One forward of a model on the meta device, watched: what its blocks keep for the backward, read and write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from unbounded.planning.alike_blocks import Repeats
from unbounded.planning.known_values import KnownValues, WrittenValues, find_tensors
from unbounded.zero.setup.sites import Site, find_sites

# Bound by computing and not by memory.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm"})


@dataclass
class SeenBlock:
    """Bytes of one module in one forward."""

    kept: int = 0
    moved: int = 0
    num_kernels: int = 0
    input: int = 0

    def done(self) -> tuple[int, int, int]:
        return self.kept, self.moved, self.num_kernels


class WatchedForward:
    """One forward of a model or of a model inside it, with what happened at its sites, by name; not at those that did
    not run. Blocks that are `alike` run once."""

    def __init__(self, model: nn.Module, values: KnownValues, alike: Mapping[str, Hashable]) -> None:
        self.seen: dict[str, SeenBlock] = {}
        self._model, self._values, self._repeats = model, values, Repeats(alike)
        self._inside = [SeenBlock()]  # the innermost last
        self._known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._alive: list[torch.Tensor] = []  # so that no storage is taken for another one

    def run(self, call: Callable[[], Any]) -> None:
        with contextlib.ExitStack() as stack:
            for site in find_sites(self._model):
                if site.name:
                    site.module.forward = partial(self._run_site, site, site.module.forward)
                    stack.callback(site.module.__dict__.pop, "forward")
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor))
            stack.enter_context(_FusedAttention())
            stack.enter_context(WrittenValues())
            stack.enter_context(self._values)
            stack.enter_context(_Moves(self._inside))
            call()

    def _run_site(self, site: Site, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        block = self.seen.setdefault(site.name, SeenBlock())
        block.input = next((one.nbytes for one in find_tensors((args, kwargs))), 0)
        before, taken = block.done(), (args, kwargs)
        self._inside.append(block)
        try:
            recalled = self._repeats.recall(site.name, taken)
            found = recalled[0] if recalled is not None else forward(*args, **kwargs)
        finally:
            self._inside.pop()
        if recalled is None:
            did = tuple(after - start for after, start in zip(block.done(), before, strict=True))
            is_kept = [one.untyped_storage()._cdata in self._known for one in find_tensors(found)]
            self._repeats.remember(site.name, taken, found, (did, is_kept))
        else:
            did, is_kept = recalled[1]
            block.kept, block.moved, block.num_kernels = (start + more for start, more in zip(before, did, strict=True))
            self._alive += (kept := [one for one, is_one in zip(find_tensors(found), is_kept, strict=True) if is_one])
            self._known.update(one.untyped_storage()._cdata for one in kept)
        return found

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)
            self._inside[-1].kept += storage.nbytes()
        return tensor


class _Moves(TorchDispatchMode):
    """Counts operations, and what those read and write that are no products."""

    def __init__(self, inside: list[SeenBlock]) -> None:
        super().__init__()
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        found = func(*args, **(kwargs or {}))
        made = list(find_tensors(found))
        if not made or func.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            return found
        inside = self._inside[-1]
        inside.num_kernels += 1
        if name not in _PRODUCTS:
            used = (*find_tensors((args, kwargs)), *made)
            inside.moved += sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in used)
        return found


class _FusedAttention(TorchFunctionMode):
    """Attention as fused kernels do it: they keep no score for a pair of positions, only what is added to scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FUSED.get(func, func)(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *more: Any,
    **options: Any,
) -> Any:
    is_fused = query.shape[-3] == key.shape[-3] or options.get("enable_gqa")  # other kernels have none for this
    if not is_fused:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, *more, **options)
    return _UnscoredAttention.apply(query, key, value, attn_mask.to(query.dtype) if attn_mask is not None else None)


class _UnscoredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        order = sorted(range(query.dim()), key=query.stride, reverse=True)
        sizes = (*query.shape[:-1], value.shape[-1])
        out = torch.empty_permuted(sizes, order, dtype=query.dtype, device=query.device)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32), bias)
        return out


def _with_global(function: Any, name: str, value: Any) -> Any:
    """The same code, in which a name means something else: a mode does not see what torch calls inside."""
    changed = FunctionType(function.__code__, {**function.__globals__, name: value}, function.__name__)
    changed.__defaults__, changed.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return changed


_FUSED = {
    nn.functional.scaled_dot_product_attention: _attend,
    nn.functional.multi_head_attention_forward: _with_global(
        nn.functional.multi_head_attention_forward, "scaled_dot_product_attention", _attend
    ),
}
