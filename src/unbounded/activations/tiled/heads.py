"""Defers the logits of Hugging Face models, which are found automatically. The model and transformers do not change.

A head is what `get_output_embeddings` gives. In a forward with labels its linear layer returns deferred logits at once,
and its weights are not even gathered. The loss then really calls the layer, including hooks, with the tiled loss in
place of its product. So an engine gathers the weights once, on whichever tier they are, and sees the gradients come.

If each rank holds a part of a head's vocabulary, logits are those of the part, and ranks join the sums of each tile.

The place is `_compiled_call_impl`, around the hooks, as for activation policies (`checkpointed`). Logits that fit into
one tile are made at once: there is nothing to gain, and results are then those of the model bit for bit.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from unbounded.activations.tiled.deferred import defer
from unbounded.activations.tiled.entropy import Entropy, Vocabulary
from unbounded.activations.tiled.logits_recipe import (
    LogitsRecipe,
    Product,
    RecipeProjection,
    map_inputs,
    products_of,
    read_head,
)
from unbounded.activations.tiled.loss import (
    LabelRange,
    LinearProjection,
    choose_tile_rows,
    mean_of,
    sum_of_losses,
    values_of,
)
from unbounded.errors import StateError
from unbounded.own_hook import OwnHook, is_own
from unbounded.planner.step.logits import tile_bytes

USUAL_IGNORED = -100  # in labels of transformers
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_ALL = [getattr(torch_module, f"_global{name}") for name in ("_forward_hooks", *_BACKWARD_HOOKS)]


class CutHead(Vocabulary, Protocol):
    """A part of a head's classes, `width` of them, whose `forward` another owner has replaced."""

    width: int

    def keeps(self) -> bool:
        """Whether the logits of this forward are used only by the loss."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """The input of all parts, whose gradients are added up."""


class DeferredHeads:
    """The heads of a model that defer their logits. `remove` undoes it."""

    def __init__(
        self, model: nn.Module, *, device_bytes: int | None = None, cut: Mapping[nn.Module, CutHead] | None = None
    ) -> None:
        self._handles: list[Callable[[], None]] = []
        for owner, head in find_heads(model):
            layers = [_HeadLayer(linear, device_bytes, (cut or {}).get(linear)) for linear in _layers_of(head)]
            for layer in layers:
                layer.attach()
                self._handles.append(layer.detach)
            if layers:
                self._follow(owner, layers)

    def __len__(self) -> int:
        return len(self._handles)

    def _follow(self, owner: nn.Module, layers: Sequence[_HeadLayer]) -> None:
        """Layers defer inside forwards of their model that have labels."""
        names = list(inspect.signature(type(owner).forward).parameters)[1:]
        position = names.index("labels") if "labels" in names else len(names)

        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return
            labels = kwargs.get("labels", args[position] if position < len(args) else None)
            is_early = isinstance(labels, torch.Tensor) and labels.is_cuda and not labels.is_floating_point()
            early = LabelRange(labels, USUAL_IGNORED) if is_early else None
            for layer in layers:
                layer.depth += labels is not None
                layer.answers.append(labels is not None)
                layer.early = early

        def end(*_: Any) -> None:
            for layer in () if torch.compiler.is_compiling() else layers:
                layer.depth -= layer.answers.pop() if layer.answers else 0
                layer.early = None

        handles = [
            owner.register_forward_pre_hook(OwnHook(begin), with_kwargs=True, prepend=True),
            owner.register_forward_hook(OwnHook(end), always_call=True),
        ]
        self._handles += [handle.remove for handle in handles]

    def remove(self) -> None:
        for remove in self._handles:
            remove()
        self._handles.clear()


def find_heads(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every Hugging Face model inside with its head; if several are around one head, the outermost."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    seen: set[int] = set()
    for module in model.modules():
        if not isinstance(module, library.PreTrainedModel):
            continue
        try:
            head = module.get_output_embeddings()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(head, nn.Module) and id(head) not in seen:
            seen.add(id(head))
            yield module, head


def _layers_of(head: nn.Module) -> list[nn.Linear]:
    """The linear layers that make logits: the head, or under LoRA its parts that are as wide. Not compiled ones."""
    linears = [
        module
        for module in head.modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    ]
    width = max((linear.out_features for linear in linears), default=0)
    return [
        linear
        for linear in linears
        if linear.out_features == width and linear.__dict__.get("_compiled_call_impl") is None
    ]


class _HeadLayer:
    """One linear layer. `depth` counts the forwards with labels that are running."""

    def __init__(self, linear: nn.Linear, device_bytes: int | None, part: CutHead | None) -> None:
        self.linear, self.device_bytes, self.part, self.depth = linear, device_bytes, part, 0
        self.answers: list[bool] = []
        self.early: LabelRange | None = None  # of the running forward's labels
        self._num_hooks = 0
        self._forward = linear.__dict__.get("forward") if part is not None else None
        self._call = partial(_call, self)
        self._parameters = [*linear.parameters()]  # outside forwards, in which the layer may hold something else

    def attach(self) -> None:
        self.linear.__dict__["_compiled_call_impl"] = self._call
        self._num_hooks = sum(map(is_own, self.linear._forward_hooks.values()))

    def detach(self) -> None:
        if self.linear.__dict__.get("_compiled_call_impl") is self._call:
            del self.linear.__dict__["_compiled_call_impl"]

    def may_defer(self, inputs: Any) -> bool:
        """False if one tile is enough, or if a user's hook needs to see the logits."""
        if torch.compiler.is_compiling() or self.depth == 0 or not isinstance(inputs, torch.Tensor):
            return False
        if self.linear.__dict__.get("forward") is not self._forward:
            return False
        if self._is_hooked() or (self.part is not None and not self.part.keeps()):
            return False
        num_rows = inputs.numel() // max(1, inputs.shape[-1])
        return inputs.dim() > 1 and num_rows > self.tile_rows(inputs.dtype, inputs.device)

    def _is_hooked(self) -> bool:
        """Whether a user's hook would see the loss in the place of the logits."""
        own = self.linear.__dict__
        is_followed = any(own[name] for name in _BACKWARD_HOOKS) or any(_HOOKS_OF_ALL)
        return is_followed or len(self.linear._forward_hooks) > self._num_hooks

    def tile_rows(self, dtype: torch.dtype, device: torch.device) -> int:
        width = self.linear.out_features if self.part is None else -(-self.part.size // self.part.num_parts)
        row_bytes = width * dtype.itemsize
        return choose_tile_rows(row_bytes, max(row_bytes, tile_bytes(device.type, self.device_bytes)), device)

    def defer(self, inputs: torch.Tensor) -> torch.Tensor:
        autocast = _autocast_now(inputs.device)
        lowered = torch.get_autocast_dtype(inputs.device.type) if autocast is not None else inputs.dtype
        needs = inputs.requires_grad or any(parameter.requires_grad for parameter in self.linear.parameters())
        width = self.linear.out_features if self.part is None else self.part.width
        like = torch.empty(*inputs.shape[:-1], width, dtype=lowered, device="meta")
        changes = self._changes()

        def make() -> torch.Tensor:
            if self._changes() != changes:
                raise StateError(
                    "nobody looked at the logits of this forward before the weights of its head were changed, so they "
                    "were not made and no longer can be. Read output.logits before optimizer.step()."
                )
            with autocast() if autocast is not None else nullcontext():
                return self.linear._call_impl(inputs)

        like.requires_grad_(needs and torch.is_grad_enabled())
        return defer(Product(self.linear, inputs), like, make, partial(_tiled_loss, self, autocast))

    def _changes(self) -> list[Any]:
        """How often an engine has changed the weights."""
        return [parameter.changes() for parameter in self._parameters if hasattr(parameter, "changes")]


def _call(layer: _HeadLayer, *args: Any, **kwargs: Any) -> Any:
    """The call of a layer that makes logits."""
    if len(args) == 1 and not kwargs and layer.may_defer(args[0]):
        return layer.defer(args[0])
    return layer.linear._call_impl(*args, **kwargs)


def _autocast_now(device: torch.device) -> Callable[[], AbstractContextManager[Any]] | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return partial(torch.autocast, device.type, dtype=torch.get_autocast_dtype(device.type))


def _tiled_loss(
    layer: _HeadLayer,
    autocast: Callable[[], AbstractContextManager[Any]] | None,
    recipe: LogitsRecipe,
    labels: torch.Tensor,
    options: Mapping[str, Any],
) -> torch.Tensor | None:
    """The loss of a recipe, inside calls of all its layers, so that their weights are there and count as used.

    None outside the model's forward: a user's own loss is computed from the logits as usual.
    """
    if layer.depth == 0:
        return None
    products = list(products_of(recipe))
    given: list[torch.Tensor] = []

    def compute() -> torch.Tensor:
        changed = iter(given)
        current = map_inputs(recipe, lambda _: next(changed))
        with autocast() if autocast is not None else nullcontext():
            return _reduce(layer, current, labels, options)

    run: Callable[[], torch.Tensor] = compute
    enter = layer.part.enter if layer.part is not None else None
    for product in reversed(products):
        run = partial(_call_around, product, run, given, enter)
    return run()


def _call_around(
    product: Product,
    run: Callable[[], torch.Tensor],
    given: list[torch.Tensor],
    enter: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Calls a layer, including hooks, with `run` in place of its forward; a hook may have changed the input."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        given.append(inputs if enter is None else enter(inputs))
        return run()

    linear = product.linear
    had = linear.__dict__.get("forward")
    linear.__dict__["forward"] = forward
    try:
        return linear._call_impl(product.inputs)
    finally:
        if had is None:
            del linear.__dict__["forward"]
        else:
            linear.__dict__["forward"] = had


def _reduce(layer: _HeadLayer, recipe: LogitsRecipe, labels: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Inside the layers' calls."""
    products, head = list(products_of(recipe)), read_head(recipe)
    ignore_index = options["ignore_index"]
    weights = [values_of(product.linear.weight, product.linear.bias) for product in products]
    dtype, device = products[0].inputs.dtype, products[0].inputs.device
    if head is not None:
        tensors = [head.product.inputs.reshape(-1, head.product.inputs.shape[-1]), *weights[0]]
        if torch.is_autocast_enabled(device.type):
            tensors = [tensor.to(torch.get_autocast_dtype(device.type)) for tensor in tensors]
        entropy = Entropy(ignore_index, options["label_smoothing"], 0.0, head.softcap, head.scale, layer.part)
        projection: Any = LinearProjection(*tensors)
    else:
        entropy = Entropy(ignore_index, options["label_smoothing"], vocabulary=layer.part)
        projection = RecipeProjection(recipe, weights)
    total = sum_of_losses(projection, labels, entropy, layer.tile_rows(dtype, device), layer.early)
    return total if options["reduction"] == "sum" else mean_of(total, labels, ignore_index)
