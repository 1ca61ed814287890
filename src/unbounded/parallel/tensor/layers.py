"""How a cut layer computes: plain operations on its local parameters, with the moves of `scene` before and after.

A layer's `forward` is replaced on the instance, so that hooks of users or of the engine stay around it. Each
`attach_...` returns a function that removes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel import collectives
from unbounded.parallel.attachments import Detach, replace_forward, set_attributes, together
from unbounded.parallel.collectives import LayerSite
from unbounded.parallel.tensor.scene import Hold, Scene
from unbounded.ranks.cut import Cut


def attach_column(module: nn.Module, scene: Scene, site: LayerSite, *, joins: bool, width: int) -> Detach:
    """Outputs are this rank's part of `width`, or made whole again."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def column(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            whole = scene.enter(x, site)
            scene.hold = Hold.COPIES  # an adapter's dropout applies to the whole input
            part = forward(whole, *args, **kwargs)
            if joins:
                scene.hold = Hold.COPIES
                return collectives.join(part, -1, site, width)
            scene.hold = Hold.FEATURES
            return part

        return column

    return replace_forward(module, make)


def attach_row(module: nn.Module, scene: Scene, site: LayerSite, *, splits: bool, inner: nn.Module) -> Detach:
    """Inputs are this rank's part, or are cut here; outputs are summed, and the bias of `inner` is added once."""

    # With one module for both, the layer's own formula without its bias is inside the layer that sums.
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def row(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if splits:
                x = collectives.split(x, -1, site)
            scene.hold = Hold.FEATURES
            whole = scene.leave(forward(x, *args, **kwargs), site)
            return whole if inner.bias is None else whole + inner.bias  # type: ignore[operator]

        return row

    def plain(_: Callable[..., Any]) -> Callable[..., Any]:
        if is_transposed(inner):
            return lambda x: x @ inner.weight
        return lambda x: nn.functional.linear(x, inner.weight)  # type: ignore[arg-type]

    return together(replace_forward(inner, plain), replace_forward(module, make))


def attach_vocabulary(module: nn.Embedding, scene: Scene, site: LayerSite, cut: Cut) -> Detach:
    """Tokens of other ranks give zeros, so the sum over the ranks has every token's row."""
    if module.max_norm is not None:
        raise PlanError(
            "an embedding with max_norm changes rows as it reads them, which cannot be cut over a tensor axis. "
            "Make it without max_norm."
        )
    (start, stop), padding, size = cut.intervals[0], module.padding_idx, cut.shape[cut.dim]

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def vocabulary(tokens: torch.Tensor) -> torch.Tensor:
            check_classes(tokens, size, "tokens")
            is_other = (tokens < start) | (tokens >= stop)
            rows = forward((tokens - start).masked_fill(is_other, 0))
            return scene.leave(rows.masked_fill(is_other.unsqueeze(-1), 0), site)

        return vocabulary

    module.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    detach = replace_forward(module, make)

    def restore() -> None:
        module.padding_idx = padding
        detach()

    return restore


def attach_experts(module: nn.Module, scene: Scene, site: LayerSite) -> Detach:
    """Experts that each hold a part of their features: tokens and routing weights enter, their sum leaves."""

    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def experts(*args: Any, **kwargs: Any) -> torch.Tensor:
            by_sequence = scene.hold is Hold.SEQUENCE

            def move(value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if by_sequence:
                    return collectives.gather(value, 0, site)
                return scene.enter(value, site) if value.is_floating_point() else value

            args = tuple(map(move, args))
            kwargs = {name: move(value) for name, value in kwargs.items()}
            scene.hold = Hold.FEATURES
            return scene.leave(forward(*args, **kwargs), site)

        return experts

    return replace_forward(module, make)


def adjust_sizes(module: nn.Module, cut: Cut, *, is_row: bool) -> Detach:
    """Sets the sizes that a layer reports and computes with to those of this rank's part."""
    names = ("in_features", "nx") if is_row else ("out_features", "nf")
    return set_attributes(module, {name: cut.local_shape[cut.dim] for name in names if hasattr(module, name)})


def attach_loading(module: nn.Module, cuts: Mapping[str, Cut]) -> Detach:
    """Makes `load_state_dict` take this rank's part of whole values."""

    def before(_: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, cut in cuts.items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and tuple(value.shape) == cut.shape:
                state[prefix + name] = cut.take(value)

    return module.register_load_state_dict_pre_hook(before).remove


def check_classes(given: torch.Tensor, size: int, what: str, ignored: int | None = None) -> None:
    """Raises if some of the tokens or labels are not in the vocabulary: no rank would have them in its part.

    A GPU is not waited for. Its kernels fail later, as they do without a tensor axis.
    """
    is_inside = (given >= 0) & (given < size)
    if ignored is not None:
        is_inside |= given == ignored
    if given.device.type != "cpu":
        torch._assert_async(is_inside.all(), f"some {what} are not between 0 and {size - 1}.")
    elif not is_inside.all():
        found = sorted(set(given[~is_inside].tolist()))
        raise PlanError(
            f"some {what} are {', '.join(map(str, found[:4]))}, but the vocabulary has {size} entries. Give {what} "
            f"between 0 and {size - 1}{'' if ignored is None else f', or {ignored} for those that do not count'}."
        )


def is_transposed(module: nn.Module) -> bool:
    """Whether weights are stored (inputs, outputs), as in the Conv1D of GPT-2."""
    return type(module).__name__ == "Conv1D"


def adapted_layers(module: nn.Module) -> tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Module]]:
    """A layer under peft's LoRA as (base layer, A matrices, B matrices); for a plain layer, itself and none."""
    base = getattr(module, "base_layer", None)
    if not isinstance(base, nn.Module):
        return module, {}, {}
    return base, dict(getattr(module, "lora_A", {})), dict(getattr(module, "lora_B", {}))


def check_layer(name: str, module: nn.Module, style: str) -> None:
    """Only layers whose formula is known can be cut."""
    base, down, up = adapted_layers(module)
    if not (type(base).forward is nn.Linear.forward or is_transposed(base)):
        raise PlanError(
            f"{name!r} is a {type(base).__name__}, which the style {style!r} cannot cut: it is for nn.Linear and "
            "Conv1D. Leave it out of styles, or give it another style."
        )
    if base is not module and (not down or any(getattr(layer, "bias", None) is not None for layer in up.values())):
        raise PlanError(
            f"the adapter of {name!r} ({type(module).__name__}) is not plain LoRA without bias, the only kind that can "
            "be cut over a tensor axis. Leave the layer out of styles."
        )
    if any(getattr(module, "use_dora", {}).values()):
        raise PlanError(f"the adapter of {name!r} uses DoRA, which needs whole rows. Make it with use_dora=False.")
