"""What the blocks of a model of text keep and move, seen by running it without any memory.

Models differ in what their forwards do between products: what norms keep, masks of dropout, scans, attention that keeps
a score for every pair of positions. So a model like the planned one is built from its config on the meta device, and
one sequence runs through it, whose tensors have sizes and nothing else. Two lengths tell what grows with the sequence.
Models that decide by values (which experts a token goes to) may not run so; their costs are counted otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unbounded.planner.models.footprint import Cost
from unbounded.zero.setup.sites import find_sites

# Positions of the longer sequence. Few, because some models run through a sequence step by step.
MOST_POSITIONS = 96
# What of a cost it sees.
SEEN = ("moved", "attention_moved", "kept", "attention_kept", "input", "num_kernels")
# Bound by computing and not by memory.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm"})


def seen_costs(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Cost]:
    """By module, what a token keeps and moves in it, with parameters of these dtypes; empty if the model cannot run so,
    or is not one of `transformers`, with or without adapters of `peft`, as its config says."""
    whole: Any = model
    is_adapted = type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model")
    base = whole.get_base_model() if is_adapted else whole
    reads_text = getattr(base, "main_input_name", None) == "input_ids"  # parts of models say nothing
    if not type(base).__module__.startswith("transformers.") or not reads_text:
        return {}
    adapters = dict(whole.peft_config) if is_adapted else {}
    parameters = tuple((name, one.requires_grad, dtypes.get(name, one.dtype)) for name, one in model.named_parameters())
    try:
        described = [config.to_dict() for config in (base.config, *adapters.values())]
        text = json.dumps(described, sort_keys=True, default=str)
        return _run(_Model(type(base), text, parameters, base.config, adapters))
    except Exception:  # a model's code may need values, and then fails in any way
        return {}


@dataclass(frozen=True)
class _Model:
    """What decides what a model does in a forward."""

    kind: Any
    text: str  # of its configs
    parameters: tuple[tuple[str, bool, torch.dtype], ...]  # their names, and whether they get gradients
    config: Any = field(compare=False)
    adapters: dict[str, Any] = field(compare=False)  # configs of `peft` by name

    def build(self) -> nn.Module:
        config = copy.deepcopy(self.config)
        config.use_cache = False
        if str(config._attn_implementation).startswith(("flash", "flex", "kernels")):
            config._attn_implementation = "sdpa"  # fused as well
        with torch.device("meta"):
            model: Any = self.kind(config)
            for index, (name, adapter) in enumerate(copy.deepcopy(self.adapters).items()):
                if index == 0:
                    import peft

                    model = peft.get_peft_model(model, adapter, adapter_name=name)
                else:
                    model.add_adapter(name, adapter)
        for (name, parameter), (expected, is_trained, dtype) in zip(
            model.named_parameters(), self.parameters, strict=True
        ):
            if name != expected:
                raise ValueError(f"the model has {expected}, which its config does not describe")
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(is_trained)
        return model.train()  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _run(described: _Model) -> dict[str, Cost]:
    with _quietly():
        model = described.build()
        longer = min(MOST_POSITIONS, getattr(described.config, "max_position_embeddings", None) or MOST_POSITIONS)
        lengths = longer // 2, longer
        short, long = (_forward(model, length) for length in lengths)
    return {name: _cost(short[name], seen, lengths) for name, seen in long.items() if name in short}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Leaves no trace: random numbers of the program are as they were, and nothing is said twice."""
    from transformers.utils import logging

    before, verbosity = random.getstate(), logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(0)
            random.seed(0)
            yield
    finally:
        random.setstate(before)
        logging.set_verbosity(verbosity)


@dataclass
class _SeenBlock:
    """Bytes of one module in one forward."""

    kept: int = 0
    moved: int = 0
    input: int = 0
    num_kernels: int = 0


def _cost(short: _SeenBlock, long: _SeenBlock, lengths: tuple[int, int]) -> Cost:
    kept, attention_kept = _by_length(short.kept, long.kept, lengths)
    moved, attention_moved = _by_length(short.moved, long.moved, lengths)
    return Cost(
        moved=moved,
        attention_moved=attention_moved,
        kept=kept,
        attention_kept=attention_kept,
        input=long.input / lengths[1],
        num_kernels=long.num_kernels,
    )


def _by_length(short: int, long: int, lengths: tuple[int, int]) -> tuple[float, float]:
    """Bytes per token, and per token and position of its sequence."""
    first, second = lengths
    paired = max(0.0, (long / second - short / first) / (second - first))
    return max(0.0, long / second - paired * second), paired


def _forward(model: nn.Module, length: int) -> dict[str, _SeenBlock]:
    """What the modules saw that the engine would gather, by name, but for those that did not run."""
    seen: dict[str, _SeenBlock] = {}
    inside = [_SeenBlock()]  # the innermost last
    known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    alive: list[torch.Tensor] = []  # so that no storage is taken for another one

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            alive.append(tensor)
            inside[-1].kept += storage.nbytes()
        return tensor

    def enter(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        inside.append(seen.setdefault(name, _SeenBlock()))
        inside[-1].input = next((one.nbytes for one in _tensors((args, kwargs))), 0)

    def leave(*_: Any) -> None:
        inside.pop()

    ids = torch.zeros(1, length, dtype=torch.int64, device="meta")
    given = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    with contextlib.ExitStack() as stack:
        for name, module in ((site.name, site.module) for site in find_sites(model) if site.name):
            stack.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        stack.enter_context(_FusedAttention())
        stack.enter_context(_Moves(inside))
        model(**given)
    return seen


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class _Moves(TorchDispatchMode):
    """Counts operations, and what those read and write that are no products."""

    def __init__(self, inside: list[_SeenBlock]) -> None:
        super().__init__()
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense" and args[0].dtype == torch.bool:
            return True  # what models ask of masks is whether all tokens count
        found = func(*args, **(kwargs or {}))
        made = list(_tensors(found))
        if not made or func.is_view or name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            return found
        inside = self._inside[-1]
        inside.num_kernels += 1
        if name not in _PRODUCTS:
            used = (*_tensors((args, kwargs)), *made)
            inside.moved += sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in used)
        return found


class _FusedAttention(TorchFunctionMode):
    """Attention as fused kernels do it: they keep no score for a pair of positions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = (*args, *kwargs.values())[:3]
            if query.shape[1] == key.shape[1] or kwargs.get("enable_gqa"):  # other kernels have none for this
                return _UnscoredAttention.apply(query, key, value)
        return func(*args, **kwargs)


class _UnscoredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)[..., : value.shape[-1]]  # with the strides of the query
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out
