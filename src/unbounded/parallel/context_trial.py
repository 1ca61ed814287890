"""Blocks are tried once: over parts of the sequence they must compute what they compute over the whole.

Code beside attention that mixes tokens (a shift, a mean over the sequence, a recurrence), or counts positions in what
it is given, is silently wrong for a part. So each block runs twice more in its first forward, with random tokens: whole
and cut. It does so in fp32 with its own weights, except that zeros and vectors, which may hide a branch, become random.
Of a long sequence each rank takes `SHORT` tokens. Only if they come out otherwise is the whole length tried, so that
what is refused is wrong for the sequence at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import PlanError, UnboundedError
from unbounded.parallel.blocks import cut_arguments, replace_hidden, take_tokens
from unbounded.parallel.trials import evaluating, first_tensor, is_cache
from unbounded.ranks.axis import Axis

# Tokens of each rank. A power of two, so that code which takes tokens in chunks gets whole ones.
SHORT = 64

# Of what a block adds to a token. Far above what rounding does in fp32, far below what another token does.
TOLERANCE = 1e-3

# A router may give a token to other experts because it is rounded otherwise, but not some token in every draw. In 16
# bits it may: those of several draws are at different places, and not most of them.
DRAWS = 4
MOST = 0.5

# Buffers with more elements are tables and masks, which forwards do not change.
SMALL_NUMEL = 1 << 20

Forward = Callable[..., Any]


class BlockTrial:
    """One block. `whole` and `cut` are its forward without and with the exchanges of the context axis."""

    def __init__(self, name: str, block: nn.Module, axis: Axis) -> None:
        self.name, self.block, self.axis = name, block, axis
        self.whole: Forward = block.forward
        self.cut: Forward = block.forward
        self.is_done = False

    @torch.compiler.disable
    def run(self, part: torch.Tensor, args: Any, kwargs: Any) -> None:
        """All ranks of the axis must call this. Raises on all of them if parts give something else than the whole.

        `part` has the shape of this rank's hidden states. `args` and `kwargs` are those of the whole sequence.
        """
        self.is_done = True
        count, size = part.shape[1], self.axis.size
        short = math.gcd(count, SHORT)
        short = short if short >= 16 else min(count, SHORT)
        problem: str | None = None
        for tokens in dict.fromkeys((short, count)):
            given = _take_first((args, kwargs), count * size, tokens * size)
            for dtype in dict.fromkeys((torch.float32, part.dtype)):
                try:
                    problem = self._compare(part, tokens * size, dtype, *_in_float32(given, dtype))
                except _WholeError:
                    continue
                if problem is None:
                    return
                break  # what is seen in fp32 counts
        if problem is not None:
            raise PlanError(
                f"{self.name!r} ({type(self.block).__name__}) {problem} if each rank of {self.axis.name}={size} has a "
                "part of the sequence. Its code beside attention mixes tokens, or counts positions in what it is "
                f"given: do that outside the blocks, or leave {self.axis.name} out of the plan."
            )

    def _compare(self, like: torch.Tensor, length: int, dtype: torch.dtype, args: Any, kwargs: Any) -> str | None:
        """What is wrong, the same on every rank; None if nothing is."""
        suspects, problem = torch.tensor(True, dtype=torch.bool, device=like.device), None
        for seed in range(DRAWS):
            generator = torch.Generator(like.device).manual_seed(seed)
            shape = like.shape[0], length, *like.shape[2:]
            hidden = torch.randn(shape, generator=generator, dtype=torch.float32, device=like.device).to(dtype)
            part = take_tokens(hidden, self.axis)
            with torch.no_grad(), evaluating(self.block), _holding(self.block, generator, dtype):
                wanted = _run(self.whole, hidden, replace_hidden(self.block, args, kwargs, hidden))
                if isinstance(wanted, str) or wanted.dim() < 3 or wanted.shape[:2] != hidden.shape[:2]:
                    raise _WholeError
                found = _run(self.cut, hidden, cut_arguments(self.block, args, kwargs, part, self.axis))
            if isinstance(found, str):
                problem = found
            else:
                wrong, difference = _find_wrong(part, found, take_tokens(wanted, self.axis))
                suspects = suspects & wrong.all(0)
                is_wrong = suspects.any() or wrong.double().mean() > (0 if dtype is torch.float32 else MOST)
                problem = f"gives something else (a relative difference of {difference:.2g} at a token)"
                problem = problem if is_wrong else None
            told = self.axis.objects(problem, f"the trial of block {self.name!r}")
            problem = next((text for text in told if text is not None), None)
            if problem is None:
                return None
        return problem


class _WholeError(Exception):
    """A block does not run whole, or returns no hidden states, so there is nothing to compare with."""


def _run(forward: Forward, hidden: torch.Tensor, call: tuple[Any, Any]) -> torch.Tensor | str:
    """What a block returns first, or why it returns nothing. It may draw numbers: they are the same each time."""
    args, kwargs = call
    devices = [hidden.device] if hidden.device.type == "cuda" else []
    has_casts = hidden.dtype is not torch.float32 and torch.is_autocast_enabled(hidden.device.type)
    try:
        with torch.random.fork_rng(devices), torch.autocast(hidden.device.type, enabled=has_casts):
            return first_tensor(forward(*args, **kwargs))
    except UnboundedError:
        raise
    except Exception as error:
        return f"cannot run ({type(error).__name__}: {error})"


def _find_wrong(given: torch.Tensor, found: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Which tokens of which rows are wrong, and the largest difference, relative to what the block adds to a token."""
    if found.shape != wanted.shape:
        return torch.ones(wanted.shape[:2], dtype=torch.bool, device=wanted.device), math.inf
    change = wanted - given if given.shape == wanted.shape else wanted
    size, added, error = (x.double().flatten(2).norm(dim=2) for x in (wanted, change, found - wanted))
    rounding = 4 * torch.finfo(given.dtype).eps
    wrong = ~(error <= TOLERANCE * added + rounding * size) & size.isfinite()  # attention to nothing may be NaN
    return wrong, float((error / added)[wrong].nan_to_num(math.inf).max()) if wrong.any() else 0.0


def _in_float32(tree: Any, dtype: torch.dtype) -> Any:
    """Tensors of floats in fp32, if that is what `dtype` is."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().float() if tensor.is_floating_point() and dtype is torch.float32 else tensor

    return pytree.tree_map_only(torch.Tensor, convert, tree)


def _take_first(arguments: Any, length: int, count: int) -> Any:
    """The first `count` of `length` tokens of positions, tables and masks; without caches."""

    def take(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return None if is_cache(value) else value
        for dim in (1,) if value.dim() == 3 else (-2, -1):  # [rows, tokens, width], [rows, tokens] or a mask
            value = value.narrow(dim, 0, count) if value.shape[dim] == length else value
        return value

    return pytree.tree_map(take, arguments, is_leaf=is_cache)


@contextmanager
def _holding(block: nn.Module, generator: torch.Generator, dtype: torch.dtype) -> Iterator[None]:
    """Inside, a block is in fp32 if `dtype` is, zeros and vectors are random, and changes of small buffers are lost."""
    before = [(inner, dict(inner._parameters), dict(inner._buffers)) for inner in block.modules()]
    try:
        for inner, parameters, buffers in before:
            for name, value in parameters.items():
                if value is not None and value.is_floating_point():
                    inner._parameters[name] = _vary(_in_float32(value, dtype), generator)
            for name, buffer in buffers.items():
                if buffer is not None and buffer.numel() <= SMALL_NUMEL:
                    inner._buffers[name] = _in_float32(buffer.clone(), dtype)
        yield
    finally:
        for inner, parameters, buffers in before:
            inner._parameters.update(parameters)
            inner._buffers.update(buffers)


def _vary(value: torch.Tensor, generator: torch.Generator) -> Any:
    """Random numbers in place of zeros, and added to those of a vector."""
    if value.dim() > 1 and value.any():
        return value
    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float32, device=generator.device)
    return value + (drawn * (0.3 if value.dim() < 2 else max(value.shape) ** -0.5)).to(value.dtype)
