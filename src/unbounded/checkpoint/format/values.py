"""Turns the user's values into JSON and back, exactly: no pickle, no guessing.

What JSON can express is plain JSON. Everything else (tuples, keys that are not strings, inf and nan, bytes, counters,
tensors) is an object with one key that begins with "~". A value that would not come back exactly is refused, with the
path to it.
"""

from __future__ import annotations

import base64
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

from unbounded.checkpoint.format.field_checks import items, text
from unbounded.errors import CheckpointError, UnboundedError, UnsavableError

# Stores a tensor and returns the name to find it by.
Put = Callable[[torch.Tensor], str]
Get = Callable[[str], torch.Tensor]
_LARGEST = 2**63
MAX_NESTING = 200  # lists and objects inside one another: every Python can go as deep


def encode(value: Any, path: str, put: Put) -> Any:
    """`value` as JSON; `path` names it in errors; tensors go to `put`."""
    try:
        encoded = _encode(value, path, put)
        _check_nesting(encoded)
        return encoded
    except RecursionError:
        raise UnsavableError(f"{path} contains itself, or is nested too deeply. Save a flat copy of it.") from None


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        inside = [held.values() if isinstance(held, dict) else held for held in level if isinstance(held, dict | list)]
        level = [item for held in inside for item in held]
        if not level:
            return
    raise RecursionError(f"it is nested more than {MAX_NESTING} times")


def _encode(value: Any, path: str, put: Put) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_LARGEST <= value < _LARGEST else {"~int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"~float": repr(value)}
    if kind is complex:
        return {"~complex": [_encode(value.real, path, put), _encode(value.imag, path, put)]}
    if kind in (bytes, bytearray):
        return {f"~{kind.__name__}": base64.b64encode(value).decode()}
    if kind is list:
        return [_encode(item, f"{path}[{i}]", put) for i, item in enumerate(value)]
    if kind is deque and value.maxlen is not None:
        return {"~bounded": [value.maxlen, *(_encode(item, f"{path}[{i}]", put) for i, item in enumerate(value))]}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [_encode(item, f"{path}[{i}]", put) for i, item in enumerate(value)]}
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, put)
    return _encode_array(value, path, put)


_SEQUENCES: dict[type, str] = {tuple: "~tuple", set: "~set", frozenset: "~frozenset", deque: "~deque"}
_SEQUENCES[torch.Size] = "~size"
_MAPPINGS: dict[type, str] = {dict: "~dict", OrderedDict: "~ordered", Counter: "~counter"}


def _encode_mapping(value: Any, path: str, put: Put) -> Any:
    plain = all(type(key) is str and not key.startswith("~") for key in value)
    if type(value) is dict and plain:
        return {key: _encode(item, f"{path}[{key!r}]", put) for key, item in value.items()}
    pairs = [
        [_encode(key, f"the key {key!r} of {path}", put), _encode(item, f"{path}[{key!r}]", put)]
        for key, item in value.items()
    ]
    return {_MAPPINGS[type(value)]: pairs}


def _encode_array(value: Any, path: str, put: Put) -> Any:
    import numpy

    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise UnsavableError(f"{path} is a tensor that is not dense ({value.layout}, {value.device}). Save a copy.")
        return {"~tensor": put(value.detach())}
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biufc":
        array = numpy.ascontiguousarray(value)
        tag = "~scalar" if isinstance(value, numpy.generic) else "~array"
        raw = torch.from_numpy(array.reshape(-1).view(numpy.uint8).copy())
        return {tag: [value.dtype.str, list(value.shape), put(raw)]}
    if isinstance(value, torch.dtype):
        return {"~dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"~device": str(value)}
    remedy = "numbers, strings, lists, tuples, dicts, bytes or tensors, such as the object's state_dict()"
    if isinstance(value, torch.Tensor):  # such as a sharded weight, whose copy is a plain tensor
        remedy = "a plain tensor, such as its .detach().clone()"
    raise UnsavableError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot represent. "
        f"Save {remedy}."
    )


def decode(value: Any, get: Get, path: str = "a value") -> Any:
    """The value that `encode` was given. What `encode` would not have written is refused; `path` names it in errors.

    Each tensor may be read only once with `get`, so that a hand-written manifest cannot have one read a million times.
    """
    taken: set[str] = set()

    def get_once(name: str) -> torch.Tensor:
        if type(name) is not str or name in taken:
            raise ValueError("a tensor is referred to twice, or not by name")
        taken.add(name)
        return get(name)

    try:
        _check_nesting(value)
        return _decode(value, get_once)
    except UnboundedError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        reason = str(error)[:200] or type(error).__name__
        raise CheckpointError(
            f"{path} in the checkpoint cannot be what it was saved as ({reason}). Load another checkpoint."
        ) from None


def _decode(value: Any, get: Get) -> Any:
    if isinstance(value, list):
        return [_decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, inner = next(iter(value.items()))
        if tag in _DECODERS:
            return _DECODERS[tag](inner, get)
    return {key: _decode(item, get) for key, item in value.items()}


def _sequence(make: Callable[[Any], Any]) -> Callable[[Any, Get], Any]:
    return lambda inner, get: make([_decode(item, get) for item in items(inner, "a sequence")])


def _mapping(make: Callable[[], Any]) -> Callable[[Any, Get], Any]:
    def build(pairs: Any, get: Get) -> Any:
        result = make()
        for key, item in items(pairs, "a mapping"):
            result[_decode(key, get)] = _decode(item, get)
        return result

    return build


def _decode_bounded(inner: Any, get: Get) -> deque[Any]:
    most, *held = items(inner, "a bounded sequence")
    if type(most) is not int or len(held) > most:
        raise ValueError("a bounded sequence is longer than it may be")
    return deque((_decode(item, get) for item in held), most)


def _decode_array(inner: Any, get: Get) -> Any:
    import numpy

    dtype, shape, name = inner
    if not _NUMBERS.fullmatch(text(dtype, "the dtype of an array")):
        raise ValueError(f"{dtype[:20]!r} is not a dtype of numbers")
    return numpy.frombuffer(get(name).numpy().tobytes(), dtype=dtype).reshape(shape).copy()


def _decode_dtype(name: Any, get: Get) -> torch.dtype:
    dtype = getattr(torch, text(name, "a dtype"), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name[:40]!r} is not a dtype")
    return dtype


_NUMBERS = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248]|f16|c8|c16|c32)")
_DECODERS: dict[str, Callable[[Any, Get], Any]] = {
    "~int": lambda inner, get: int(text(inner, "a number"), 16),
    "~float": lambda inner, get: float(text(inner, "a number")),
    "~complex": lambda parts, get: complex(*(_decode(part, get) for part in parts)),
    "~bytes": lambda inner, get: base64.b64decode(inner),
    "~bytearray": lambda inner, get: bytearray(base64.b64decode(inner)),
    "~tensor": lambda name, get: get(name),
    "~bounded": _decode_bounded,
    "~array": _decode_array,
    "~scalar": lambda inner, get: _decode_array(inner, get)[()],
    "~dtype": _decode_dtype,
    "~device": lambda inner, get: torch.device(text(inner, "a device")),
    **{tag: _sequence(kind) for kind, tag in _SEQUENCES.items()},
    **{tag: _mapping(kind) for kind, tag in _MAPPINGS.items()},
}
