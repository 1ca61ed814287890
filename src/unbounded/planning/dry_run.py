"""What the blocks of a model keep and move, seen by running it without any memory.

Models differ in what their forwards do between products: what norms keep, masks of dropout, scans, attention that keeps
a score for every pair of positions, which experts run. So a model like the planned one is built from its config on the
meta device, and sequences run through it, whose tensors have sizes and nothing else. Three lengths tell what grows with
the sequence. Images and sounds of fixed sizes do not, and are there once per sequence. Where a whole model cannot run,
or does not reach its encoder of images, models inside it run alone. What cannot run so is counted otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import random
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from unbounded.planner.models.footprint import Cost
from unbounded.planning.alike_blocks import find_alike
from unbounded.planning.known_values import KnownValues
from unbounded.planning.sample_inputs import find_configs, sample_inputs
from unbounded.planning.watched_forward import SeenBlock, WatchedForward
from unbounded.zero.setup.sites import find_sites

# Positions of the shortest sequence. Few, because some models run through a sequence step by step.
FIRST_POSITIONS = 16
# Positions of the longest one, of models that do not. Many, because some models pad to chunks of hundreds.
LONGEST = 2048
# What of a cost it sees.
SEEN = ("moved", "attention_moved", "kept", "attention_kept", "input", "num_kernels")


def seen_costs(model: nn.Module, dtypes: Mapping[str, torch.dtype], sequence: int) -> dict[str, Cost]:
    """By module, what a token of such sequences keeps and moves in it, with parameters of these dtypes; empty if the
    model cannot run so, or is not one of `transformers`, with or without adapters of `peft`, as its config says."""
    whole: Any = model
    is_adapted = type(model).__module__.startswith("peft.") and hasattr(model, "get_base_model")
    base = whole.get_base_model() if is_adapted else whole
    is_model = hasattr(base, "main_input_name")  # parts of models say nothing
    if not type(base).__module__.startswith("transformers.") or not is_model:
        return {}
    adapters = dict(whole.peft_config) if is_adapted else {}
    parameters = tuple((name, one.requires_grad, dtypes.get(name, one.dtype)) for name, one in model.named_parameters())
    try:
        described = [config.to_dict() for config in (base.config, *adapters.values())]
        text = json.dumps(described, sort_keys=True, default=str)
        return _run(_Model(type(base), text, parameters, base.config, adapters), sequence)
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
        for part in find_configs(config):
            for name in [name for name in vars(part) if name.endswith("layerdrop")]:
                setattr(part, name, 0.0)  # every block is to be seen
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
def _run(described: _Model, sequence: int) -> dict[str, Cost]:
    with quietly():
        model = described.build()
        sites = {site.name: site.module for site in find_sites(model) if site.name and not site.is_outer}
        found: dict[str, Cost] = {}
        for name, inner in _runnables(model):
            inside = [site for site in sites if not name or site.startswith(f"{name}.")]
            if inside and found.keys().isdisjoint(inside):
                with contextlib.suppress(
                    Exception
                ):  # a model's code may need more than it is given, and fail in any way
                    found = {**_Runnable(model, inner, sites).costs(sequence), **found}
    return found


def _runnables(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A model, then the models inside it, which may run where the whole does not, or does not reach them. Decoders that
    read a source do not run alone."""
    for name, module in model.named_modules():
        is_model = hasattr(module, "main_input_name") and hasattr(module, "config")
        takes = inspect.signature(module.forward).parameters if is_model else {}
        if not name or (is_model and ("encoder_hidden_states" not in takes or not _has_source(module.config))):
            yield name, module


def _has_source(config: Any) -> bool:
    return getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)


@dataclass(frozen=True)
class _Runnable:
    """A model, alone or inside another one, that can be called with inputs of its own."""

    model: nn.Module
    inner: Any
    sites: Mapping[str, nn.Module]

    def costs(self, sequence: int) -> dict[str, Cost]:
        try:
            return self._costs(sequence, find_alike(self.sites))
        except Exception:  # blocks may do more than give something, such as filling a cache, so that all have to run
            return self._costs(sequence, {})

    def _costs(self, sequence: int, alike: Mapping[str, Hashable]) -> dict[str, Cost]:
        most = min([sequence, LONGEST, *_most_positions(self._base.config)])
        first = max(1, min(FIRST_POSITIONS, most // 3))
        way, short = self._find_way(first, alike)
        middle = self._forward(2 * first, way, alike)
        longest, long = most, None
        if longest > 3 * first and not _goes_step_by_step(short, middle):
            with contextlib.suppress(Exception):  # tables of positions may be shorter than configs say
                long = self._forward(longest, way, alike)
        if long is None:
            longest = 3 * first
            long = self._forward(longest, way, alike)
        lengths = first, 2 * first, longest
        seen = ((name, [run.get(name) for run in (short, middle, long)]) for name in long)
        return {name: _cost(blocks, lengths, sequence) for name, blocks in seen if None not in blocks}

    @property
    def _base(self) -> Any:
        return self.inner.get_base_model() if hasattr(self.inner, "get_base_model") else self.inner

    def _find_way(self, length: int, alike: Mapping[str, Hashable]) -> tuple[int, dict[str, SeenBlock]]:
        """The first of the inputs that it can read, and what it did."""
        failed: Exception | None = None
        for way in range(len(sample_inputs(self._base, length))):
            try:
                return way, self._forward(length, way, alike)
            except Exception as error:
                failed = error
        raise failed or ValueError(f"{type(self._base).__name__} reads nothing that is known")

    def _forward(self, length: int, way: int, alike: Mapping[str, Hashable]) -> dict[str, SeenBlock]:
        values = KnownValues()
        with values:
            given = sample_inputs(self._base, length)[way]
        watched = WatchedForward(self.model, values, alike)
        watched.run(partial(self.inner, **given))
        return watched.seen


def _most_positions(config: Any) -> list[int]:
    """How long a text may be, by its tables of positions."""
    names = ("max_position_embeddings", "max_target_positions", "n_positions")
    said = (getattr(one, name, None) for one in find_configs(config) for name in names)
    return [number for number in said if isinstance(number, int) and number > 0]


def _goes_step_by_step(short: dict[str, SeenBlock], long: dict[str, SeenBlock]) -> bool:
    """Whether a longer sequence takes more operations, as a scan does that is written in Python."""
    return sum(seen.num_kernels for seen in long.values()) > sum(seen.num_kernels for seen in short.values())


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Leaves no trace: random numbers of the program are as they were, and nothing is said twice."""
    logging = getattr(sys.modules.get("transformers"), "logging", None)
    before, verbosity = random.getstate(), logging.get_verbosity() if logging is not None else 0
    if logging is not None:
        logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.default_generator.manual_seed(0)
            random.seed(0)
            yield
    finally:
        random.setstate(before)
        if logging is not None:
            logging.set_verbosity(verbosity)


@dataclass(frozen=True)
class _Growth:
    """Bytes of a sequence: once, per token, and per token and position of its sequence."""

    once: float
    token: float
    pair: float


def _cost(seen: list[Any], lengths: tuple[int, int, int], sequence: int) -> Cost:
    kept, moved, given = (
        _growth([getattr(block, name) for block in seen], lengths) for name in ("kept", "moved", "input")
    )
    return Cost(
        moved=moved.token + moved.once / sequence,
        attention_moved=moved.pair,
        kept=kept.token + kept.once / sequence,
        attention_kept=kept.pair,
        input=given.token + given.once / sequence,
        num_kernels=seen[-1].num_kernels,
    )


def _growth(found: list[int], lengths: tuple[int, int, int]) -> _Growth:
    """The parabola through three lengths; less than nothing is nothing, and the longest sequence stays as it was."""
    first, second, third = lengths
    early, late = (found[1] - found[0]) / (second - first), (found[2] - found[1]) / (third - second)
    pair = max(0.0, (late - early) / (third - first))
    once = max(0.0, found[0] - early * first + pair * first * second)
    token = (found[2] - once) / third - pair * third
    return _Growth(once, token, pair) if token >= 0 else _Growth(0.0, found[2] / third, 0.0)
