"""Float buffers of a model whose precision the plan has lowered: kept in fp32, but computing with 16-bit tensors.

`model.to(torch.bfloat16)` rounds buffers too: averages that are updated in place then stop changing. If kept in fp32,
they would turn activations into fp32, which the next layer refuses. So inside forwards modules hold their buffers as
`ComputingBuffer`, over the same memory: with tensors of the lowered dtype it computes in that dtype, and writes to it
are in fp32. A buffer that a forward replaces comes back in the dtype that it had.

Code that was compiled before `shard` was made for plain tensors and gets them: there buffers are fp32 and weights 16
bits, as in a model that was loaded in that dtype, and torch promotes or refuses what mixes them.

The statistics of torch's own norms are not among them: their kernels want the dtype of the weights. Neither are sparse
buffers, of which torch makes no subclass: they have the dtype of the weights, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.zero.placeholder import meets_placeholder

_CASTS = {"to", "float", "double", "half", "bfloat16", "type"}
_NORMS = {"batch_norm", "instance_norm"}  # they write to their statistics, and count no version up
_plain = torch._C.DisableTorchFunctionSubclass


class ComputingBuffer(torch.Tensor):
    """An fp32 buffer inside a forward, or a view or function of only such buffers."""

    @classmethod
    @torch._dynamo.disable
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":  # shape, dtype, device
            return super().__torch_function__(func, types, args, kwargs)
        if meets_placeholder(types):
            return NotImplemented
        own, others = _sort(args, kwargs)
        if _is_written(name, args, kwargs) or name in _NORMS:
            args, kwargs = _cast((args, kwargs), others, torch.float32)
            with _plain():
                result = func(*args, **kwargs)
                return result.to(others[0].dtype) if name in _NORMS else result
        others = [tensor for tensor in others if tensor.dim() > 0]  # a tensor without dims does not affect the dtype
        if (lowered := _lowered(others)) is not None:
            return _compute(func, args, kwargs, own, lowered)
        if others or (name in _CASTS and _names_dtype(name, args, kwargs)):
            with _plain():
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


class ModuleBuffers:
    """The fp32 buffers under each site, which are `ComputingBuffer`s while it runs."""

    def __init__(self, model: nn.Module, sites: Sequence[str], lowered: torch.dtype | None) -> None:
        self._places: list[list[tuple[dict[str, Any], str]]] = [[] for _ in sites]
        self._depths = [0] * len(sites)
        self._swapped: list[set[int]] = [set() for _ in sites]  # which of them are in fp32 outside the running forward
        index = {name: number for number, name in enumerate(sites)}
        for name, module in _not_compiled(model) if lowered is not None else ():
            while name not in index:
                name = name.rpartition(".")[0]
            keeps = not isinstance(module, nn.modules.batchnorm._NormBase)
            self._places[index[name]] += [(module._buffers, key) for key in module._buffers if keeps]

    def swap_in(self, site: int) -> None:
        self._depths[site] += 1
        for index, (held, key) in enumerate(self._places[site]):
            buffer = held.get(key)
            if type(buffer) is torch.Tensor and buffer.dtype == torch.float32 and buffer.layout is torch.strided:
                held[key] = buffer.as_subclass(ComputingBuffer)
                self._swapped[site].add(index)

    def stay(self, site: int) -> None:
        """The same unless they are in."""
        if not self._depths[site]:
            self.swap_in(site)

    def swap_out(self, site: int) -> None:
        self._depths[site] = max(0, self._depths[site] - 1)
        if not self._depths[site]:
            self._put_back(site)

    def reset(self) -> None:
        """No forward is running, whatever became of the last one."""
        self._depths = [0] * len(self._depths)
        for site in range(len(self._places)):
            self._put_back(site)

    def _put_back(self, site: int) -> None:
        swapped, self._swapped[site] = self._swapped[site], set()
        for index, (held, key) in enumerate(self._places[site]):
            buffer = held.get(key)
            if isinstance(buffer, ComputingBuffer):
                with _plain():
                    buffer = held[key] = buffer.as_subclass(torch.Tensor)
            if index in swapped and isinstance(buffer, torch.Tensor) and buffer.is_floating_point():
                held[key] = buffer.to(torch.float32)


def _not_compiled(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules outside compiled ones, whose code was made for plain tensors."""
    if model._compiled_call_impl is not None or isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return
    yield name, model
    for key, child in model.named_children():
        yield from _not_compiled(child, f"{name}.{key}" if name else key)


def _sort(args: Any, kwargs: Any) -> tuple[list[ComputingBuffer], list[torch.Tensor]]:
    """The buffers among the arguments, and the other float tensors."""
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    own = [tensor for tensor in tensors if isinstance(tensor, ComputingBuffer)]
    with _plain():
        others = [t for t in tensors if not isinstance(t, ComputingBuffer) and t.is_floating_point()]
    return own, others


def _is_written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operation writes to a buffer, by its name's form: in place, or into `out`."""
    first = args[0] if args else None
    target = first[0] if isinstance(first, (list, tuple)) and first else first
    in_place = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return isinstance(kwargs.get("out"), ComputingBuffer) or (in_place and isinstance(target, ComputingBuffer))


def _lowered(others: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The 16-bit dtype that all the others have."""
    dtypes = {tensor.dtype for tensor in others}
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16} else None


def _compute(
    func: Callable[..., Any], args: Any, kwargs: Any, own: Sequence[ComputingBuffer], dtype: torch.dtype
) -> Any:
    """Runs `func` with the buffers rounded to `dtype`; what it writes to one of them reaches the buffer."""
    with _plain():
        rounded = {id(buffer): buffer.as_subclass(torch.Tensor).to(dtype) for buffer in own}
        before = {key: value._version for key, value in rounded.items()}
        args, kwargs = pytree.tree_map_only(ComputingBuffer, lambda b: rounded[id(b)], (args, kwargs))
        result = func(*args, **kwargs)
        for buffer in own:
            if rounded[id(buffer)]._version != before[id(buffer)]:
                buffer.copy_(rounded[id(buffer)])
    return result


def _cast(values: Any, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Any:
    with _plain():
        wide = {id(tensor): tensor.to(dtype) for tensor in tensors}
    return pytree.tree_map_only(torch.Tensor, lambda tensor: wide.get(id(tensor), tensor), values)


def _names_dtype(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a cast names its dtype: the result is then what the model wants, and not a buffer."""
    named = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
    return named or name != "to"
