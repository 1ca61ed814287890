"""Host kernels over flat CPU tensors: fused optimizer updates, reductions, conversions.

Everything here checks its arguments and then makes one call into the native core, which releases the GIL and shares
the work among a Pool's threads. Results do not depend, bit for bit, on the number of threads, on the instruction set,
or on how a buffer is cut into calls (for the compact format: at multiples of BLOCK).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_double, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from unbounded.errors import PlanError
from unbounded.native.library import declare
from unbounded.native.states import BLOCK, FORMATS, RULES, ArraySpec, Rule, UpdatePart, has_parts, moments, state_arrays
from unbounded.native.thread_pool import Pool, default_pool, simd
from unbounded.planner.models.packed_size import RECORD_NUMEL, packed_bytes

__all__ = [
    "BLOCK",
    "ArraySpec",
    "Pool",
    "Rule",
    "UpdatePart",
    "add",
    "convert",
    "copy",
    "decode_moment",
    "decode_weight",
    "default_pool",
    "encode_moment",
    "encode_weight",
    "has_parts",
    "join",
    "pack",
    "simd",
    "split",
    "state_arrays",
    "sum_squares",
    "unpack",
    "update",
]

FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
HALVES = (torch.bfloat16, torch.float16)
CODES = {torch.int8: 0, torch.uint8: 1}  # signed: first moments; unsigned: second moments


class UpdateArguments(ctypes.Structure):
    """Mirrors the struct of the same name in native/capi/kernels.cpp."""

    _fields_ = (
        [(name, c_int32) for name in ("rule", "format", "weight_type", "grad_type", "out_type")]
        + [(name, c_int32) for name in ("nesterov", "maximize", "part")]
        + [(name, c_int64) for name in ("numel", "step")]
        + [(name, c_double) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
        + [(name, c_double) for name in ("momentum", "dampening", "lr_decay", "grad_scale")]
        + [(name, c_void_p) for name in ("weight", "grad", "remainder", "first", "first_scale")]
        + [(name, c_void_p) for name in ("second", "second_scale", "out")]
    )


SIGNATURES: dict[str, list[type]] = {
    "update": [c_void_p],
    "update_beside": [c_void_p, c_void_p],
    "sum_squares": [c_void_p, c_int32, c_int64],
    "convert": [c_void_p, c_int32, c_void_p, c_int32, c_int64],
    "add": [c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_int32, c_int64],
    "split": [c_void_p, c_void_p, c_void_p, c_int64],
    "join": [c_void_p, c_void_p, c_void_p, c_int64],
    "encode_weight": [c_void_p, c_void_p, c_int32, c_void_p, c_int64],
    "decode_weight": [c_void_p, c_int32, c_void_p, c_void_p, c_int64],
    "encode_moment": [c_void_p, c_int32, c_void_p, c_void_p, c_int64],
    "decode_moment": [c_int32, c_void_p, c_void_p, c_void_p, c_int64],
    "copy": [c_void_p, c_void_p, c_int64],
    "pack": [c_void_p, c_void_p, c_int64],
    "unpack": [c_void_p, c_void_p, c_int64, c_int64],
}
SUMS = ("sum_squares", "add")  # these return one


@cache
def _function(name: str) -> ctypes._NamedFuncPointer:
    return declare(f"unbounded_{name}", c_double if name in SUMS else None, [c_void_p, *SIGNATURES[name]])


def _call(name: str, pool: Pool | None, *arguments: object) -> float | None:
    with (pool or default_pool()).borrow() as handle:
        return _function(name)(handle, *arguments)


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], numel: int | None = None) -> None:
    """Raises unless `tensor` is a contiguous CPU tensor of one of `dtypes` and, if given, of `numel` elements."""
    if tensor.device.type != "cpu":
        raise PlanError(f"{name} is on {tensor.device}. Host kernels need tensors on the CPU.")
    if tensor.dtype not in dtypes:
        raise PlanError(f"{name} has dtype {tensor.dtype}. It must be {' or '.join(str(d) for d in dtypes)}.")
    if not tensor.is_contiguous():
        raise PlanError(f"{name} of shape {tuple(tensor.shape)} is not contiguous. Pass a flat, contiguous tensor.")
    if numel is not None and tensor.numel() != numel:
        raise PlanError(f"{name} has {tensor.numel()} elements. It must have {numel}.")


def update(
    rule: Rule,
    format: str,
    *,
    weight: Tensor,
    grad: Tensor,
    states: Mapping[str, Tensor] | None,
    grad_scale: float = 1.0,
    out: Tensor | None = None,
    source: Mapping[str, Tensor] | None = None,
    part: UpdatePart = UpdatePart.WHOLE,
    pool: Pool | None = None,
) -> None:
    """One step of `rule` in one pass over memory: gradient times `grad_scale`, update, write back.

    `states` holds the arrays of `state_arrays`, zero before step 1, and is changed in place like `weight`. `out`
    (fp32 format only) receives the new weights in bf16 or fp16. A compact slice begins at a multiple of BLOCK. With
    `source` ("weight" and the states by name), old values are read from there and stay unchanged: `weight` and `states`
    are written without being read. They must not overlap.

    `part` WEIGHTS writes no moments. In place, what completes the weights is written with them, and MOMENTS follow,
    for steps that `has_parts`. With `source` and without `states`, only the new weights are written, to `out` if it is
    given.
    """
    specs = state_arrays(rule.name, format, weight.dtype, momentum=rule.momentum != 0)
    numel = weight.numel()
    _check("weight", weight, (weight.dtype,))
    _check("grad", grad, tuple(FLOATS), numel)
    if states is None and (source is None or part is not UpdatePart.WEIGHTS):
        raise PlanError("no states were given. Pass them, or a source and UpdatePart.WEIGHTS for weights alone.")
    if part is not UpdatePart.WHOLE and states is not None and (source is not None or not has_parts(rule, format)):
        raise PlanError(
            f"{part} was given for {rule.name} with weight_decay={rule.weight_decay} in format {format}"
            f"{' beside its source' if source is not None else ''}, which is one update. Pass UpdatePart.WHOLE."
        )
    if out is not None and format != "fp32":
        raise PlanError(f'out was given in format "{format}", where weight is already the compute copy. Leave it out.')
    if out is not None:
        _check("out", out, HALVES, numel)
    arguments = _arguments(rule, format, weight, grad, grad_scale, out)
    arguments.part = part.value
    if states is not None:
        for name, spec in specs.items():
            if name not in states:
                raise PlanError(
                    f'the state "{name}" is missing. {rule.name} in format {format} needs {", ".join(specs)}.'
                )
            _check(f'state "{name}"', states[name], (spec.dtype,), spec.numel(numel))
        _point(arguments, specs, rule, states)
    if source is None:
        _call("update", pool, ctypes.addressof(arguments))
        return
    _check("source", source["weight"], (weight.dtype,), numel)
    for name, spec in specs.items():
        _check(f'the source of "{name}"', source[name], (spec.dtype,), spec.numel(numel))
    before = UpdateArguments(weight=source["weight"].data_ptr())
    _point(before, specs, rule, source)
    _call("update_beside", pool, ctypes.addressof(arguments), ctypes.addressof(before))


def _point(
    arguments: UpdateArguments, specs: Mapping[str, ArraySpec], rule: Rule, states: Mapping[str, Tensor]
) -> None:
    """Sets the pointers to a rule's states."""
    for slot, moment in zip(("first", "second"), moments(rule.name, momentum=rule.momentum != 0), strict=True):
        scale = f"{moment}_scale"
        setattr(arguments, slot, _pointer(states, moment))
        setattr(arguments, f"{slot}_scale", _pointer(states, scale if scale in specs else None))
    arguments.remainder = _pointer(states, "remainder" if "remainder" in specs else None)


def _pointer(states: Mapping[str, Tensor], name: str | None) -> int | None:
    return None if name is None else states[name].data_ptr()


def _arguments(
    rule: Rule, format: str, weight: Tensor, grad: Tensor, grad_scale: float, out: Tensor | None
) -> UpdateArguments:
    arguments = UpdateArguments(
        rule=RULES.index(rule.name),
        format=FORMATS.index(format),
        weight_type=FLOATS[weight.dtype],
        grad_type=FLOATS[grad.dtype],
        numel=weight.numel(),
        grad_scale=grad_scale,
        weight=weight.data_ptr(),
        grad=grad.data_ptr(),
    )
    for name in ("step", "lr", "beta1", "beta2", "eps", "weight_decay"):
        setattr(arguments, name, getattr(rule, name))
    for name in ("momentum", "dampening", "lr_decay", "nesterov", "maximize"):
        setattr(arguments, name, getattr(rule, name))
    if out is not None:
        arguments.out_type, arguments.out = FLOATS[out.dtype], out.data_ptr()
    return arguments


def sum_squares(tensor: Tensor, pool: Pool | None = None) -> float:
    """The sum of squares in float64; inf or nan if the tensor has one."""
    _check("tensor", tensor, tuple(FLOATS))
    total = _call("sum_squares", pool, tensor.data_ptr(), FLOATS[tensor.dtype], tensor.numel())
    assert total is not None
    return total


def convert(src: Tensor, dst: Tensor, pool: Pool | None = None) -> None:
    """dst = src in dst's dtype, rounded to nearest even; they must not overlap."""
    _check("src", src, tuple(FLOATS))
    _check("dst", dst, tuple(FLOATS), src.numel())
    _call("convert", pool, src.data_ptr(), FLOATS[src.dtype], dst.data_ptr(), FLOATS[dst.dtype], src.numel())


def add(dst: Tensor, held: Tensor, fresh: Tensor, pool: Pool | None = None) -> float:
    """dst = held + fresh, computed in fp32; `dst` may be `held`. Returns the sum of squares of `dst`."""
    arguments: list[int] = []
    for name, tensor in (("dst", dst), ("held", held), ("fresh", fresh)):
        _check(name, tensor, tuple(FLOATS), fresh.numel())
        arguments += [tensor.data_ptr(), FLOATS[tensor.dtype]]
    total = _call("add", pool, *arguments, fresh.numel())
    assert total is not None
    return total


def split(master: Tensor, weight: Tensor, remainder: Tensor, pool: Pool | None = None) -> None:
    """The exact format of an fp32 master: bf16 `weight` and int16 `remainder`."""
    _check_exact(master, weight, remainder)
    _call("split", pool, master.data_ptr(), weight.data_ptr(), remainder.data_ptr(), master.numel())


def join(weight: Tensor, remainder: Tensor, master: Tensor, pool: Pool | None = None) -> None:
    """The fp32 master of the exact format, bit for bit."""
    _check_exact(master, weight, remainder)
    _call("join", pool, weight.data_ptr(), remainder.data_ptr(), master.data_ptr(), master.numel())


def _check_exact(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    _check("master", master, (torch.float32,))
    _check("weight", weight, (torch.bfloat16,), master.numel())
    _check("remainder", remainder, (torch.int16,), master.numel())


def encode_weight(master: Tensor, weight: Tensor, remainder: Tensor, pool: Pool | None = None) -> None:
    """The compact format of an fp32 master, rounded to nearest: bf16 or fp16 `weight` and int8 `remainder`."""
    _check_compact(master, weight, remainder)
    types = FLOATS[weight.dtype]
    _call("encode_weight", pool, master.data_ptr(), weight.data_ptr(), types, remainder.data_ptr(), master.numel())


def decode_weight(weight: Tensor, remainder: Tensor, master: Tensor, pool: Pool | None = None) -> None:
    """The fp32 master that a compact `weight` and `remainder` stand for."""
    _check_compact(master, weight, remainder)
    types = FLOATS[weight.dtype]
    _call("decode_weight", pool, weight.data_ptr(), types, remainder.data_ptr(), master.data_ptr(), master.numel())


def _check_compact(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    _check("master", master, (torch.float32,))
    _check("weight", weight, HALVES, master.numel())
    _check("remainder", remainder, (torch.int8,), master.numel())


def encode_moment(values: Tensor, codes: Tensor, scale: Tensor, pool: Pool | None = None) -> None:
    """The compact format of fp32 moments, rounded to nearest: int8 `codes` for first moments, uint8 for second ones."""
    _check_moment(values, codes, scale)
    kind = CODES[codes.dtype]
    _call("encode_moment", pool, values.data_ptr(), kind, codes.data_ptr(), scale.data_ptr(), values.numel())


def decode_moment(codes: Tensor, scale: Tensor, values: Tensor, pool: Pool | None = None) -> None:
    """The fp32 moments that compact `codes` and their block scales stand for."""
    _check_moment(values, codes, scale)
    kind = CODES[codes.dtype]
    _call("decode_moment", pool, kind, codes.data_ptr(), scale.data_ptr(), values.data_ptr(), values.numel())


def _check_moment(values: Tensor, codes: Tensor, scale: Tensor) -> None:
    _check("values", values, (torch.float32,))
    _check("codes", codes, tuple(CODES), values.numel())
    _check("scale", scale, (torch.float32,), -(-values.numel() // BLOCK))


def copy(src: Tensor, dst: Tensor, pool: Pool | None = None) -> None:
    """dst = src, of the same dtype and number of elements; they must not overlap."""
    _check("src", src, (src.dtype,))
    _check("dst", dst, (src.dtype,), src.numel())
    _call("copy", pool, src.data_ptr(), dst.data_ptr(), src.numel() * src.element_size())


def pack(weights: Tensor, records: Tensor, pool: Pool | None = None) -> None:
    """Packs bf16 `weights` into `records` (native/kernels/packed.h), which say themselves if they cannot hold them."""
    _check("weights", weights, (torch.bfloat16,))
    _check("records", records, (torch.uint8,), packed_bytes(weights.numel()))
    _call("pack", pool, weights.data_ptr(), records.data_ptr(), weights.numel())


def unpack(records: Tensor, weights: Tensor, skip: int = 0, pool: Pool | None = None) -> None:
    """Fills bf16 `weights` with those in `records` after the first `skip` ones, which are less than a record."""
    if not 0 <= skip < RECORD_NUMEL:
        raise PlanError(f"{skip} weights are to be skipped, but a record has {RECORD_NUMEL}. Pass later records.")
    _check("weights", weights, (torch.bfloat16,))
    _check("records", records, (torch.uint8,), packed_bytes(skip + weights.numel()))
    _call("unpack", pool, records.data_ptr(), weights.data_ptr(), skip, weights.numel())
