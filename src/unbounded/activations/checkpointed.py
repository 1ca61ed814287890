"""A block under an activation policy: its calls run through `torch.utils.checkpoint`, including hooks.

The call of a module goes through `_compiled_call_impl` if that is set: `Module.compile` uses it, and so do we. It is
around every hook, so what runs again in the backward is exactly what ran first: an engine's hooks gather the block's
weights both times, and a user's hook that changes inputs does so both times. `state_dict`, names,
copies and pickles do not see it.

Note: recomputing twice. If the block already runs inside the user's own checkpoint, it is left to that one.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from unbounded.activations.first_run import FirstRun, Habits, copy_generator
from unbounded.activations.headroom import Headroom
from unbounded.activations.offload.shelf import Shelf
from unbounded.activations.structure import ArgumentTemplate, take_tensors
from unbounded.activations.tiled.feedforward import FeedForward
from unbounded.errors import StateError

_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Checkpointed]] = weakref.WeakKeyDictionary()
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_MAYBE_CACHES = ("cache", "cache_params")  # names that other arguments have as well
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class Checkpointed:
    """One block. With the policy "host" its inputs go to the shelf; with "auto" the headroom decides for each call.

    Its `feed_forwards` may run over tiles if the block is recomputed.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        policy: str,
        shelf: Shelf,
        headroom: Headroom | None = None,
        feed_forwards: Sequence[FeedForward] = (),
    ) -> None:
        self.name, self.policy, self.shelf, self.headroom = name, policy, shelf, headroom
        self.feed_forwards, self.habits = feed_forwards, Habits()
        self._module = weakref.ref(module)  # which has this
        self._compiled: Callable[..., Any] | None = None
        self._outer = partial(_call, self)
        self._marker: Any = None
        self._is_attached = False

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    @property
    def inner(self) -> Callable[..., Any]:
        """The call inside the policy."""
        return self._compiled or self.module._call_impl

    def attach(self) -> None:
        """Puts the block under its policy, around its present call."""
        self._compiled = self.module.__dict__.get("_compiled_call_impl")
        self.module.__dict__["_compiled_call_impl"] = self._outer
        if self._marker is None:  # torch.compile of the whole model calls a module without hooks by its forward
            self._marker = self.module.register_forward_pre_hook(_no_change)
        for layer in self.feed_forwards:
            layer.attach()
        _attached[self.module] = weakref.ref(self)
        self._is_attached = True

    def detach(self) -> None:
        """Removes the policy. Calls between their forward and their backward are still recomputed."""
        if self._module() is None or not self._is_attached:
            return
        if self._is_wrapped():
            del self.module.__dict__["_compiled_call_impl"]
            if self._compiled is not None:
                self.module.__dict__["_compiled_call_impl"] = self._compiled
        if self._marker is not None:
            self._marker.remove()
            self._marker = None
        for layer in self.feed_forwards:
            layer.detach()
        _attached.pop(self.module, None)
        self._is_attached = False

    def renew(self) -> None:
        """Takes the call back if `Module.compile` replaced it."""
        if self._is_attached and self._module() is not None and not self._is_wrapped():
            self.attach()

    @property
    def is_compiled(self) -> bool:
        """Whether the call inside the policy is that of `Module.compile`."""
        return self._compiled is not None

    def _is_wrapped(self) -> bool:
        return self.module.__dict__.get("_compiled_call_impl") is self._outer

    @torch.compiler.disable
    def choose(self, args: Any, kwargs: Any) -> str | None:
        """The policy of this call; None if there is no backward of ours to come."""
        if not torch.is_grad_enabled() or self._is_checkpointed_already():
            return None
        return self.policy if self.headroom is None else self.headroom.choose((args, kwargs))

    @torch.compiler.disable
    def run(self, policy: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the block so that only its inputs are kept, here or on the host; it runs again in the backward."""
        places = self._cache_places(args)
        keys = [key for key, value in kwargs.items() if _is_cache(key, value)]
        caches = [args[place] for place in places] + [kwargs[key] for key in keys]
        if caches:
            if not self._leaves_out(caches):
                return self.inner(*args, **kwargs)
            args = tuple(None if place in places else value for place, value in enumerate(args))
            kwargs |= dict.fromkeys(keys)
            kwargs |= {"use_cache": False} if kwargs.get("use_cache") else {}
        tensors, template = take_tensors((args, kwargs))
        # A parameter itself may hold no values, and torch keeps what is at its address.
        tensors = [tensor.view_as(tensor) if isinstance(tensor, nn.Parameter) else tensor for tensor in tensors]
        run = _BlockCall(self, args, kwargs, template)
        if policy == "recompute":
            return checkpoint(run, *tensors, use_reentrant=False)
        inputs = self.shelf.hold(self.name, tensors)
        # `checkpoint` saves its inputs under these hooks, and what the block saves under its own.
        with saved_tensors_hooks(inputs.pack, inputs.unpack):
            outputs = checkpoint(run, *tensors, use_reentrant=False)
        if _may_run_again(outputs):
            inputs.leave()
        return outputs

    def _is_checkpointed_already(self) -> bool:
        """Whether the model itself or its caller recomputes the block. With the policy "host", that is a warning."""
        is_switched = self.module.training and is_switched_on(self.module)
        if is_switched and self.policy == "host":
            raise StateError(
                f'block {self.name!r} has the activation policy "host", but the gradient checkpointing of the model '
                "itself was turned on, which keeps inputs on the device. Call model.gradient_checkpointing_disable()."
            )
        is_inside = is_switched or _is_inside_checkpoint()
        if is_inside and self.policy == "host":
            message = (
                "blocks that run inside the caller's own checkpoint are left to it, with their inputs on the device."
            )
            warnings.warn(message, UserWarning, stacklevel=2)
        return is_inside

    def _cache_places(self, args: Any) -> list[int]:
        """Which positional arguments are caches of keys and values."""
        if not any(hasattr(value, "get_seq_length") or isinstance(value, tuple) for value in args):
            return []
        names = list(inspect.signature(type(self.module).forward).parameters)[1:]
        pairs = zip(names, args, strict=False)
        return [place for place, (name, value) in enumerate(pairs) if _is_cache(name, value)]

    def _leaves_out(self, caches: Sequence[Any]) -> bool:
        """Whether caches of keys and values are left out: empty ones, which two runs would fill twice."""
        filled = any(_is_filled(cache, self.module) for cache in caches)
        drop = self.module.training and not filled
        if self.module.training:
            what = "they are left out" if drop else "blocks that get one with values keep their activations"
            message = f"caches of keys and values cannot be filled twice, so {what}. Pass use_cache=False in training."
            warnings.warn(message, UserWarning, stacklevel=2)
        return drop


# Not recursive: if the whole model is compiled, a block that keeps its activations still is.
@torch.compiler.disable(recursive=False)
def _call(block: Checkpointed, *args: Any, **kwargs: Any) -> Any:
    """The call of a block under a policy."""
    policy = block.choose(args, kwargs)
    if policy is None:
        return block.inner(*args, **kwargs)
    outputs = block.inner(*args, **kwargs) if policy == "keep" else block.run(policy, args, kwargs)
    if block.headroom is not None:
        block.headroom.note(outputs, kept=policy == "keep")
    return outputs


class _BlockCall:
    """The block's call: first with what the caller gave, then, in the backward, with what was kept of it."""

    def __init__(self, block: Checkpointed, args: Any, kwargs: Any, template: ArgumentTemplate) -> None:
        self._inner, self._feed_forwards = block.inner, block.feed_forwards
        self._template = template.map(copy_generator)
        self._given: tuple[Any, Any] | None = (args, kwargs)
        self._first_run = FirstRun(block.name, block.module, block.habits)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._given is None:
            with self._first_run.again():
                return self._run(*self._template.map(copy_generator).fill(tensors))
        given, self._given = self._given, None
        outputs = self._run(*given)
        self._first_run.end()
        return outputs

    def _run(self, args: Any, kwargs: Any) -> Any:
        for layer in self._feed_forwards:
            layer.is_active = True
        try:
            return self._inner(*args, **kwargs)
        finally:
            for layer in self._feed_forwards:
                layer.is_active = False


def attached_to(model: nn.Module) -> list[Checkpointed]:
    """The blocks of a model that are under a policy."""
    found = (_attached.get(module) for module in model.modules())
    return [block for reference in found if reference is not None and (block := reference()) is not None]


def is_switched_on(module: nn.Module) -> bool:
    """Whether a module has Hugging Face's switch for gradient checkpointing, turned on."""
    return getattr(module, "gradient_checkpointing", False) is True


def _is_inside_checkpoint() -> bool:
    """Whether a checkpoint around this call saves or recomputes what it computes."""
    if _top_hooks is None:  # an older torch: then one is inside the other, which only costs time
        return False
    if torch._C._current_graph_task_id() != -1:
        return True  # our own recomputation does not come here: it calls what is inside
    hooks = _top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == checkpoint.__module__


def _may_run_again(outputs: Any) -> bool:
    """Whether a backward can reach the block: through a tensor that it returned, or through what we cannot see."""
    if isinstance(outputs, torch.Tensor):
        return outputs.requires_grad
    tensors, _ = take_tensors(outputs)
    return not tensors or any(tensor.requires_grad for tensor in tensors)


def _is_cache(name: str, value: Any) -> bool:
    """Whether an argument of a block is where it keeps keys and values, or states, for later calls."""
    if name in _MAYBE_CACHES:
        return hasattr(value, "get_seq_length")
    return name in _CACHES and value is not None


def _is_filled(cache: Any, module: nn.Module) -> bool:
    if not hasattr(cache, "get_seq_length"):
        return True
    layer = next((inner.layer_idx for inner in module.modules() if hasattr(inner, "layer_idx")), 0)
    try:
        return int(cache.get_seq_length(layer)) > 0
    except ValueError:  # a layer that has states, or nothing, instead of keys and values
        states = getattr(cache.layers[layer], "has_previous_state", False)
        return any(states.values()) if isinstance(states, dict) else bool(states)


def _no_change(module: nn.Module, args: Any) -> None:
    return None
