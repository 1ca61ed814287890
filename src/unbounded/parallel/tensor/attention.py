"""Heads of attention modules: how many there are, whether they divide, and what a module must know of its part.

Attention code reads counts such as `num_heads` while it runs. On a rank that holds a part of the heads they are set on
the instance to what it holds, and set back when the module is whole again.
"""

from __future__ import annotations

from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel.attachments import Detach, set_attributes
from unbounded.ranks.cut import Cut, cut_heads

_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "d_kv", "head_size")
_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "num_query_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_LENGTHS = ("split_size", "inner_dim", "all_head_size")


def head_width(module: nn.Module | None) -> int | None:
    """Features of one head, if the module is an attention."""
    for name in _WIDTHS:
        value = getattr(module, name, None)
        if type(value) is int and value > 0:
            return value
    return None


def cut_by_heads(name: str, shape: tuple[int, ...], dim: int, rank: int, size: int, width: int) -> Cut:
    """Whole heads of a layer for each rank, or the same head for several ranks if there are fewer."""
    num_heads = shape[dim] // width
    if num_heads * width == shape[dim] and (num_heads % size == 0 or (num_heads and size % num_heads == 0)):
        return cut_heads(shape, dim, rank, size, num_heads=num_heads)
    fitting = [number for number in range(1, num_heads + 1) if num_heads % number == 0]
    raise PlanError(
        f"the {num_heads} heads of {name!r} do not divide over tensor={size}. "
        f"Use a tensor axis of {' or '.join(map(str, fitting))}."
    )


def check_query_heads(name: str, module: nn.Module, size: int) -> None:
    """Query heads must divide; only those of keys and values may be on several ranks."""
    for attribute in _COUNTS:
        count = getattr(module, attribute, None)
        if type(count) is int and count % size:
            fitting = [number for number in range(1, count + 1) if count % number == 0]
            raise PlanError(
                f"the {count} heads of {name!r} do not divide over tensor={size}. "
                f"Use a tensor axis of {' or '.join(map(str, fitting))}."
            )


def adjust_counts(module: nn.Module, size: int, key_heads: tuple[int, int]) -> Detach:
    """Sets the counts that an attention reads from itself to this rank's part; the returned function sets them back.

    `key_heads` are the heads of the keys: of the whole layer, and those held here.
    """
    whole, held = key_heads
    parts: dict[str, int] = {}
    for name in (*_COUNTS, *_LENGTHS):
        value = getattr(module, name, None)
        if type(value) is int and value % size == 0:
            parts[name] = value // size
    for name in _KEY_COUNTS:
        if getattr(module, name, None) == whole:
            parts[name] = held
    groups = getattr(module, "num_key_value_groups", None)
    if type(groups) is int:
        parts["num_key_value_groups"] = groups * whole // size // held
    return set_attributes(module, parts)
