"""Reads a model's `config.json` as a shape: which keys say what, by family, and what each family has besides them.

Only values are read: no code of the model runs, and `transformers` is not needed. With it, the model itself is counted
(`unbounded.planning`), and a shape only says what its blocks cost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unbounded.errors import PlanError
from unbounded.planner.models.shapes import Shape, read_shape
from unbounded.planner.spelling import find_closest


@dataclass(frozen=True)
class Family:
    """What a family of architectures has besides the sizes in its config."""

    gated: bool = True
    biased: bool = False
    qkv_biased: bool = False
    layer_norm: bool = False  # norms have a bias
    norms: int = 2
    learned_positions: int | None = None  # rows beyond the config's; None: no table
    tied: bool = False  # unless the config says otherwise
    query_key_norm: bool = False
    embedding_norm: bool = False
    attention_bias_key: str = ""  # what says that all layers of the attention have biases; "": they do if `biased`
    ffn_bias_key: str = ""


_GPT = Family(gated=False, biased=True, layer_norm=True, learned_positions=0, tied=True)
FAMILIES = {
    "llama": Family(attention_bias_key="attention_bias", ffn_bias_key="mlp_bias"),
    "mistral": Family(),
    "mixtral": Family(),
    "qwen2": Family(qkv_biased=True),
    "qwen3": Family(query_key_norm=True, attention_bias_key="attention_bias"),
    "qwen3_moe": Family(query_key_norm=True, attention_bias_key="attention_bias"),
    "phi3": Family(),
    "gemma": Family(tied=True, attention_bias_key="attention_bias"),
    "gemma2": Family(tied=True, norms=4, attention_bias_key="attention_bias"),
    "gpt2": _GPT,
    "opt": replace(_GPT, learned_positions=2, attention_bias_key="enable_bias", ffn_bias_key="enable_bias"),
    "bloom": Family(gated=False, biased=True, layer_norm=True, tied=True, embedding_norm=True),
    "gpt_neox": Family(gated=False, biased=True, layer_norm=True, attention_bias_key="attention_bias"),
    "starcoder2": Family(
        gated=False, biased=True, layer_norm=True, tied=True, attention_bias_key="use_bias", ffn_bias_key="use_bias"
    ),
}
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd", "n_embed"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}


def read_model(text: str) -> Shape:
    """A config folder, a `config.json`, a preset's name, or `layers=..,hidden=..`."""
    path = find_config(text)
    return read_shape(text) if path is None else shape_of(read_config(path), str(path))


def find_config(text: str) -> Path | None:
    """The `config.json` that a MODEL is or has; None if it is a preset or sizes."""
    path = Path(text)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PlanError(f'the folder "{path}" has no config.json. Give the folder of a model, or a preset.')
        return path / "config.json"
    if path.is_file():
        return path
    if text.endswith(".json") or "/" in text:
        raise PlanError(f'there is no "{text}". Give a config folder, a config.json, a preset, or layers=..,hidden=..')
    return None


def read_config(path: Path) -> Any:
    """The values of a `config.json`."""
    try:
        return json.loads(path.read_text(), object_hook=_as_float)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f'"{path}" is not JSON: {error}. Give the config.json of a model.') from None


def _as_float(found: dict[str, Any]) -> Any:
    """What JSON has no number for, as transformers writes it: {"__float__": "Infinity"}."""
    special = found.get("__float__")
    return float(special) if len(found) == 1 and special in ("Infinity", "-Infinity", "NaN") else found


def shape_of(config: Any, what: str) -> Shape:
    """The shape that a config's values describe."""
    if not isinstance(config, Mapping):
        raise PlanError(f"{what} is not the config of a model. Give an object with a model_type.")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        closest = find_closest(str(kind), FAMILIES)
        hint = f"The nearest known is {closest!r}. " if closest else ""
        raise PlanError(
            f"{what} has the model_type {kind!r}, whose bytes are not known here. {hint}Install transformers, which "
            f"knows more than {', '.join(sorted(FAMILIES))}; or give layers=..,hidden=..,ffn=.. by hand, or the model "
            "itself to unbounded.plan."
        )
    return _build(config, FAMILIES[kind], what)


def _build(config: Mapping[str, Any], family: Family, what: str) -> Shape:
    sizes = {name: _read(config, keys, what) for name, keys in _KEYS.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    head_dim = _read_optional(config, ("head_dim",), what, 0)
    experts = _read_optional(config, ("num_local_experts", "num_experts"), what, 1)
    if experts > 1 and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise PlanError(f"{what} has experts in some blocks only. Install transformers, which can count them.")
    if config.get("add_cross_attention"):
        raise PlanError(f"{what} has cross-attention in its blocks. Install transformers, which can count it.")
    ffn_keys = ("intermediate_size", "ffn_dim", "n_inner")
    ffn = _read_optional(config, ("moe_intermediate_size",) * (experts > 1) + ffn_keys, what, 4 * hidden)
    token_width = _read_optional(config, ("word_embed_proj_dim",), what, hidden)
    positions = 0
    if family.learned_positions is not None:
        keys = ("max_position_embeddings", "n_positions")
        positions = family.learned_positions + _read_optional(config, keys, what, 0)
    attention_biased = bool(config.get(family.attention_bias_key, family.biased))
    ffn_biased = bool(config.get(family.ffn_bias_key, family.biased))
    shape = Shape(
        name=str(config.get("_name_or_path") or config.get("model_type")),
        **sizes,
        kv_heads=_read_optional(config, ("num_key_value_heads",), what, heads),
        ffn=ffn,
        gated=family.gated,
        biased=attention_biased and ffn_biased,
        qkv_biased=family.qkv_biased,
        norms=family.norms,
        norm_vectors=(2 if family.layer_norm else 1) if config.get("layer_norm_elementwise_affine", True) else 0,
        head_dim=head_dim,
        positions=positions,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        experts=experts,
        active=_read_optional(config, ("num_experts_per_tok",), what, 1) if experts > 1 else 1,
        outside=2 * hidden if family.embedding_norm else 0,
        extra=2 * (head_dim or hidden // heads) if family.query_key_norm else 0,
        token_width=0 if token_width == hidden else token_width,
        last_norm=bool(config.get("do_layer_norm_before", True)) and not config.get("_remove_final_layer_norm"),
    )
    only = attention_biased * shape.attention_bias_numel + ffn_biased * shape.ffn_bias_numel
    return shape if shape.biased else replace(shape, extra=shape.extra + only)


def _read(config: Mapping[str, Any], keys: tuple[str, ...], what: str) -> int:
    for key in keys:
        if key in config:
            return _check_size(config[key], key, what)
    raise PlanError(f"{what} has no {keys[0]!r}, so the size of the model is not known. Add it, or give it by hand.")


def _read_optional(config: Mapping[str, Any], keys: tuple[str, ...], what: str, default: int) -> int:
    """The first of the keys that has a value; null and 0 are none."""
    for key in keys:
        if config.get(key) not in (None, 0):
            return _check_size(config[key], key, what)
    return default


def _check_size(value: Any, key: str, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{what} has {key}={value!r}, but it must be a whole number of at least 1.")
    return value
