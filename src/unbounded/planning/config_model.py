"""Builds the model that a `transformers` config describes, on the meta device, so that what is counted is the model.

Only code of `transformers` itself runs, never code that comes with a config. Nothing is downloaded.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from unbounded.errors import MissingFrameworkError, PlanError
from unbounded.planner.models.shapes import MOST, MOST_LAYERS
from unbounded.planner.spelling import find_closest

# What a config without `architectures` is a model for: the first of these that knows it. Those at the top know models
# of several parts; a causal language model may be the text part alone.
_PURPOSES = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_MAPPING",
)
_REPEATED = re.compile(r"(layers?|depths?|blocks)$")  # so many are built one after another
_MOST_EXPERTS = 100_000
_SHOWN_CHARS = 300


def build_model(values: Any, what: str, dtype: torch.dtype) -> nn.Module:
    """The model of a config's values, without any bytes. `what` names the config in errors."""
    try:
        import transformers
    except ImportError:
        raise MissingFrameworkError(
            f'{what} can be counted only with transformers. Install it: pip install "unbounded[hf]".'
        ) from None
    if not isinstance(values, Mapping):
        raise PlanError(f"{what} is not the config of a model. Give an object with a model_type.")
    _check_sizes(values, what)
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        closest = find_closest(str(kind), kinds)
        hint = f"The nearest known is {closest!r}. " if closest else ""
        raise PlanError(
            f"{what} has the model_type {kind!r}, which transformers {transformers.__version__} does not know. {hint}"
            "Give layers=..,hidden=..,ffn=.. by hand, or the model itself to unbounded.plan."
        )
    try:
        config = kinds[kind].from_dict(dict(values))
        with torch.device("meta"):
            return _find_class(transformers, config)(config).to(dtype)
    except Exception as error:  # a model's code may fail in any way on an odd config
        said = " ".join(str(error).split())[:_SHOWN_CHARS] or type(error).__name__
        raise PlanError(f"{what} describes no model that can be built: {said}{_place(error)}") from None


def _place(error: Exception) -> str:
    """The line of a model's code that stumbled over a value, which says what the value was for."""
    if not isinstance(error, TypeError | AttributeError | LookupError | ArithmeticError):
        return ""  # it was raised on purpose, with words
    lines = [frame.line for frame in traceback.extract_tb(error.__traceback__) if "transformers" in frame.filename]
    return f" (at `{lines[-1]}`)" if lines and lines[-1] else ""


def _find_class(transformers: Any, config: Any) -> Any:
    """The class that the config names, or the one for its purpose."""
    for name in config.architectures or ():
        named = getattr(transformers, str(name), None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return named
    others = (name for name in dir(transformers) if re.fullmatch("MODEL_FOR_.*_MAPPING", name))
    known = (getattr(transformers, purpose, {}) for purpose in (*_PURPOSES, *others))
    found = next((mapping[type(config)] for mapping in known if type(config) in mapping), None)
    if found is None:
        raise PlanError(
            f"transformers has no model for a {type(config).__name__}, which is perhaps a part of another one. Give "
            'the config of the whole model, or name its class in "architectures".'
        )
    return found[0] if isinstance(found, tuple) else found


def _check_sizes(values: Mapping[str, Any], what: str) -> None:
    """Refuses impossible sizes before anything is built of them."""
    for key, value in _numbers(values):
        most = MOST_LAYERS if _REPEATED.search(key) else _MOST_EXPERTS if key.endswith("experts") else MOST
        if abs(value) > most and "token" not in key:
            raise PlanError(f"{what} has {key}={value}, but no model has more than {most:,}.")


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield str(key), value
