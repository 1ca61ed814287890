"""A backend for `torch.compile`: torch's own, after operations that it makes slow on a GPU were replaced in the graph.

The replacements are what the graph says, to the last bits of its dtype; what dropout drops is random, as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from unbounded.compiled.attention_with_dropout import attention
from unbounded.compiled.gelu import gelu
from unbounded.compiled.hashed_dropout import dropout

# Each takes the arguments of what it replaces. Random ones get their place in the graph, too: the compiler takes two
# calls with the same arguments for one.
_RANDOM: dict[Any, Callable[..., Tensor]] = {
    nn.functional.dropout: dropout,
    nn.functional.scaled_dot_product_attention: attention,
}
_CERTAIN: dict[Any, Callable[..., Tensor]] = {nn.functional.gelu: gelu}


def inductor(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """By itself torch chooses how a kernel adds up by timing some ways, so a resumed run could get other last bits."""
    from torch._inductor.compile_fx import compile_fx  # takes seconds

    rewrite(graph)
    return compile_fx(graph, inputs, config_patches={"deterministic": True})  # type: ignore[no-any-return]


def rewrite(graph: fx.GraphModule, device_type: str = "cuda") -> None:
    """Replaces operations on such a device, in place."""
    for place, node in enumerate(graph.graph.nodes):
        value = node.meta.get("example_value")
        if node.op != "call_function" or not isinstance(value, Tensor) or value.device.type != device_type:
            continue
        if node.target in _RANDOM:
            node.target, node.kwargs = _RANDOM[node.target], {**node.kwargs, "place": place}
        else:
            node.target = _CERTAIN.get(node.target, node.target)
    graph.recompile()
