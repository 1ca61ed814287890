"""What single operations reach inside a transformer block.

In a block, products, attention and memory-bound operations follow each other without a pause, forwards and backwards,
with the layouts and at the clocks that steps have. The same operations alone are faster. So a whole block is timed, and
compared with the time that the planner would predict from the rates alone. On a GPU all of them are slower by the same
part, as its clock is. On a CPU products are as fast as if they go on alone; what is left of the block's time is that of
the others, some of which compute more than they move (the exponentials of attention and SiLU).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from unbounded.machine.timing import sustained_seconds
from unbounded.planner.models.footprint import EAGER, footprint_of, widen
from unbounded.planner.models.shapes import Shape
from unbounded.planner.presets import UNMEASURED
from unbounded.planner.step.loads import Setup, backward_seconds, forward_seconds

# Blocks of a 7B and of a tiny model, and sequences in a pass.
_GPU, _CPU = Shape("7B", 1, 4096, 1, 32, 32, 11008), Shape("tiny", 1, 256, 1, 4, 4, 704)
_GPU_ROWS, _CPU_ROWS = (4, 2048), (4, 256)
# On a busy machine, a block may seem to take less than its products.
LEAST_TIMES = 0.5


def block_seconds(device: torch.device) -> float:
    """What the forward and backward of a block take."""
    return _measured(*_sizes(device), device)


def reached_rates(device: torch.device, alone: dict[str, float], taken: float) -> dict[str, float]:
    """The "matmul_flops", "device_bandwidth" and "kernel_seconds" of a block that took so many seconds, from those of
    operations `alone`."""
    is_gpu, (shape, rows, sequence) = device.type == "cuda", _sizes(device)
    whole = _modelled(shape, rows, sequence, alone, is_cpu=not is_gpu)
    if is_gpu:
        return {**alone, **{name: alone[name] * whole / taken for name in ("matmul_flops", "device_bandwidth")}}
    products = 2 * _modelled(shape, rows, sequence, _slowed(alone, 0.5), is_cpu=True) - whole
    return _slowed(alone, max(LEAST_TIMES, (taken - products) / (whole - products)))


def _sizes(device: torch.device) -> tuple[Shape, int, int]:
    """The block that is timed on such a device, and how many sequences of which length."""
    return (_GPU, *_GPU_ROWS) if device.type == "cuda" else (_CPU, *_CPU_ROWS)


def _slowed(rates: dict[str, float], times: float) -> dict[str, float]:
    """The rates if everything except products takes so many times as long."""
    slower = {"device_bandwidth": rates["device_bandwidth"] / times, "kernel_seconds": rates["kernel_seconds"] * times}
    return {**rates, **slower}


def _modelled(shape: Shape, rows: int, sequence: int, rates: dict[str, Any], *, is_cpu: bool) -> float:
    """What the planner predicts for the forward and backward of the block."""
    (cost,) = (part.cost for part in footprint_of(shape, kernels=EAGER).parts if part.is_block)
    cost = widen(cost) if is_cpu else cost
    machine, setup = replace(UNMEASURED, **rates), Setup(tokens=rows * sequence, sequence=sequence)
    launches = 3 * cost.num_kernels * machine.kernel_seconds if is_cpu else 0.0  # a GPU computes meanwhile
    return forward_seconds(cost, machine, setup) + backward_seconds(cost, machine, setup) + launches


def _measured(shape: Shape, rows: int, sequence: int, device: torch.device) -> float:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        block = MeasuredBlock(shape, sequence).to(dtype)
        x = torch.randn(rows, sequence, shape.hidden, dtype=dtype, requires_grad=True)
        upstream = torch.randn(rows, sequence, shape.hidden, dtype=dtype)
    wanted = [x, *block.parameters()]
    return sustained_seconds(lambda: torch.autograd.grad(block(x), wanted, upstream), device)


class MeasuredBlock(nn.Module):
    """A block of a Llama, operation by operation as eager models run it, which is what `EAGER` counts."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, sequence: int) -> None:
        super().__init__()
        hidden, ffn = shape.hidden, shape.ffn
        self.heads, self.width = shape.heads, hidden // shape.heads
        self.norms = nn.ParameterList(torch.ones(hidden) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.register_buffer("cos", torch.ones(sequence, self.width))
        self.register_buffer("sin", torch.zeros(sequence, self.width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(_normed(x, self.norms[0]))
        inside = _normed(x, self.norms[1])
        return x + self.down(functional.silu(self.gate(inside)) * self.up(inside))

    def _attend(self, x: Tensor) -> Tensor:
        rows, sequence, hidden = x.shape
        split = (rows, sequence, self.heads, self.width)
        query, key, value = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        found = functional.scaled_dot_product_attention(self._turned(query), self._turned(key), value, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(rows, sequence, hidden))

    def _turned(self, x: Tensor) -> Tensor:
        """With the rotary embedding of positions."""
        low, high = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-high, low), dim=-1) * self.sin


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm through fp32."""
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
