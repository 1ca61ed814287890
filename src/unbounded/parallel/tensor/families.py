"""Which layers of a model are cut: read from a transformers model's own plan, or from a plan in this file.

A plan is (pattern, style) pairs over the names of modules and parameters. Models with a `tp_plan` bring their own;
GPT-2, BERT, T5, OPT, BART, ViT and others have none and are listed here by the type in their configuration. The
embedding and the head are cut by vocabulary in all of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from unbounded.errors import PlanError
from unbounded.parallel.blocks import unwrap
from unbounded.parallel.tensor.styles import Pairs

_GPT2 = {
    "transformer.h.*.attn.c_attn": "column_of_3",
    "transformer.h.*.attn.c_proj": "row",
    "transformer.h.*.crossattention.c_attn": "column_of_2",
    "transformer.h.*.crossattention.q_attn": "column",
    "transformer.h.*.crossattention.c_proj": "row",
    "transformer.h.*.mlp.c_fc": "column",
    "transformer.h.*.mlp.c_proj": "row",
}
_BERT = {
    f"encoder.layer.*.{name}": style
    for attention in ("attention", "crossattention")
    for name, style in {
        f"{attention}.self.query": "column",
        f"{attention}.self.key": "column",
        f"{attention}.self.value": "column",
        f"{attention}.output.dense": "row",
        "intermediate.dense": "column",
        "output.dense": "row",
    }.items()
}
_T5 = {
    f"{stack}.block.*.layer.*.{name}": style
    for stack in ("encoder", "decoder")
    for name, style in {
        **{f"{attention}.{part}": "column" for attention in ("SelfAttention", "EncDecAttention") for part in "qkv"},
        "SelfAttention.o": "row",
        "EncDecAttention.o": "row",
        "SelfAttention.relative_attention_bias": "table",
        "DenseReluDense.wi": "column",
        "DenseReluDense.wi_0": "column",
        "DenseReluDense.wi_1": "column",
        "DenseReluDense.wo": "row",
    }.items()
}
_OPT = {
    **{f"model.decoder.layers.*.self_attn.{part}_proj": "column" for part in "qkv"},
    "model.decoder.layers.*.self_attn.out_proj": "row",
    "model.decoder.layers.*.fc1": "column",
    "model.decoder.layers.*.fc2": "row",
}


def _under(prefix: str, plan: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}.{pattern}": style for pattern, style in plan.items()}


def _attention(name: str, out: str = "out_proj") -> dict[str, str]:
    return {**{f"{name}.{part}_proj": "column" for part in "qkv"}, f"{name}.{out}": "row"}


_BART = {
    f"{stack}.layers.*.{name}": style
    for stack in ("encoder", "decoder")
    for name, style in {**_attention("self_attn"), **_attention("encoder_attn"), "fc1": "column", "fc2": "row"}.items()
}
_DISTILBERT = {
    **{f"transformer.layer.*.attention.{part}_lin": "column" for part in "qkv"},
    "transformer.layer.*.attention.out_lin": "row",
    "transformer.layer.*.ffn.lin1": "column",
    "transformer.layer.*.ffn.lin2": "row",
}
_GPTJ = _under("h.*", {**_attention("attn"), "mlp.fc_in": "column", "mlp.fc_out": "row"})
_GPT_NEO = _under("h.*", {**_attention("attn.attention"), "mlp.c_fc": "column", "mlp.c_proj": "row"})
_STABLELM = _under(
    "layers.*",
    {
        **_attention("self_attn", "o_proj"),
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    },
)
_VIT = _under("layers.*", {**_attention("attention", "o_proj"), "mlp.fc1": "column", "mlp.fc2": "row"})


FAMILIES: dict[str, dict[str, str]] = {
    "gpt2": _GPT2 | {pattern.removeprefix("transformer."): style for pattern, style in _GPT2.items()},
    "bert": _BERT | _under("bert", _BERT),
    "roberta": _BERT | _under("roberta", _BERT),
    "xlm-roberta": _BERT | _under("roberta", _BERT),
    "electra": _BERT | _under("electra", _BERT),
    "t5": _T5 | _under("transformer", _T5),
    "mt5": _T5 | _under("transformer", _T5),
    **{name: _BART | _under("model", _BART) for name in ("bart", "mbart", "pegasus", "marian", "whisper")},
    "distilbert": _DISTILBERT | _under("distilbert", _DISTILBERT),
    "gptj": _GPTJ | _under("transformer", _GPTJ),
    "gpt_neo": _GPT_NEO | _under("transformer", _GPT_NEO),
    "stablelm": _STABLELM | _under("model", _STABLELM),
    "vit": _VIT | _under("vit", _VIT),
    "deit": _VIT | _under("deit", _VIT),
    "opt": _OPT | {pattern.removeprefix("model."): style for pattern, style in _OPT.items()},
}
"""Plans by `config.model_type`, with and without the prefix that a model with a head puts before its base."""


def find_pairs(model: nn.Module, chosen: Pairs | None) -> Pairs:
    """The pairs for a model: those of the plan, or the model's own, with its embedding and head."""
    base = unwrap(model)
    if chosen is not None:
        return chosen
    config: Any = getattr(base, "config", None)
    own = dict(getattr(base, "_tp_plan", None) or getattr(base, "tp_plan", None) or {})
    plan = own or FAMILIES.get(getattr(config, "model_type", ""), {})
    if not plan:
        raise PlanError(
            f"{type(base).__name__} has no tensor-parallel plan, and none comes with this library. Give its layers as "
            'styles=(("blocks.*.up", "column"), ("blocks.*.down", "row"), ...) in the plan.'
        )
    return (*plan.items(), *_vocabulary(base))


def _vocabulary(base: nn.Module) -> Pairs:
    """The embedding and the head of a transformers model, by name."""
    pairs = []
    names = {id(module): name for name, module in base.named_modules()}
    for getter, style, kind in (
        ("get_input_embeddings", "vocabulary", nn.Embedding),  # that of an image model is none
        ("get_output_embeddings", "head", nn.Module),
    ):
        module = getattr(base, getter, lambda: None)()
        if isinstance(module, kind) and id(module) in names:
            pairs.append((names[id(module)], style))
    return tuple(pairs)
