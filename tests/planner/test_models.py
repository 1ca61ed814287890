"""Footprints compared with references: parameters and FLOPs with torch, activations with what autograd saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from unbounded.errors import PlanError
from unbounded.machine.block import MeasuredBlock
from unbounded.planner.models.configs import read_model, shape_of
from unbounded.planner.models.footprint import expand, footprint_of
from unbounded.planner.models.rank_parts import find_rank_parts
from unbounded.planner.models.shapes import PRESETS
from unbounded.planner.plan import Plan
from unbounded.planning.module_footprint import footprint_of_module
from unbounded.weights.lora import add_adapters

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4},
    "phi3": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 160, "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 3, "n_head": 4},
    "gpt_neox": {},
    "starcoder2": {},
}


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("qwen3", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}),
    ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", {"word_embed_proj_dim": 32, "enable_bias": False, "tie_word_embeddings": False}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("gpt_neox", {"attention_bias": False}),
    ("starcoder2", {"use_bias": False}),
]
"""Configs that change which layers there are, and which have biases."""


def make_config(family: str, **other: Any) -> Any:
    given = {**SIZES, **FAMILIES[family], **other}
    if family in ("opt", "gpt_neox"):
        del given["num_key_value_heads"]
    if family in ("gpt2", "bloom"):
        given = {key: value for key, value in given.items() if key in FAMILIES[family] or key.endswith("_id")}
        given |= {"vocab_size": 100} | ({"hidden_size": 64} if family == "bloom" else {})
    return transformers.AutoConfig.for_model(family, **given)


@pytest.mark.parametrize(("family", "other"), [*((family, {}) for family in FAMILIES), *OTHERS], ids=str)
def test_a_config_has_as_many_parameters_as_the_model_made_of_it(family: str, other: dict[str, Any]) -> None:
    config = make_config(family, **other)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict(), "config")
    assert shape.numel == sum(parameter.numel() for parameter in model.parameters())
    assert footprint_of(shape).numel == shape.numel


def llama(**more: Any) -> Any:
    sizes = {**SIZES, "num_key_value_heads": 4, "use_cache": False, "attn_implementation": "sdpa", **more}
    return transformers.LlamaConfig(**sizes)


def test_flops_are_those_that_torch_counts() -> None:
    config = llama(attn_implementation="eager")  # whose products torch sees
    model, tokens = transformers.LlamaForCausalLM(config), torch.zeros(2, 32, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens)
    footprint = footprint_of(shape_of(config.to_dict(), "config"))
    ours = 64 * sum(part.cost.flops(32) for part in expand(footprint.parts))
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert footprint.flops(32) * 64 == pytest.approx(3 * ours)


def saved_bytes(block: torch.nn.Module, **given: Any) -> int:
    """What autograd saves of 256 tokens besides parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *block.buffers())}
    x = torch.randn(2, 128, 128, dtype=torch.bfloat16, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(x, **given)
    del out
    return sum(saved.values())


def angles() -> dict[str, Any]:
    values = torch.randn(2, 128, 32, dtype=torch.bfloat16)
    return {"position_embeddings": (values, values), "attention_mask": None}


def test_a_block_keeps_what_autograd_saves() -> None:
    """A block of transformers, and the one that `Machine.measure()` times as such."""
    config = llama(hidden_size=128, intermediate_size=344)
    shape = shape_of(config.to_dict(), "config")
    part = next(part for part in footprint_of(shape).parts if part.is_block)
    block = transformers.models.llama.modeling_llama.LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    assert 256 * part.cost.kept == pytest.approx(saved_bytes(block, **angles()), rel=0.15)
    assert 256 * part.cost.kept == pytest.approx(saved_bytes(MeasuredBlock(shape, 128).to(torch.bfloat16)), rel=0.15)


@pytest.mark.parametrize("trained", [["q_proj", "v_proj"], ["down_proj"], ["layernorm"], []], ids=" ".join)
def test_a_block_with_frozen_weights_keeps_less(trained: list[str]) -> None:
    model = transformers.LlamaForCausalLM(llama(hidden_size=128, intermediate_size=344)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained) or "layers" not in name)
    footprint = footprint_of_module(model, None, Plan())
    kept = next(part.cost.kept for part in footprint.parts if part.is_block and part.cost.kept)
    assert 256 * kept == pytest.approx(saved_bytes(model.model.layers[0], **angles()), rel=0.1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "opt", "starcoder2"])
def test_a_shape_with_adapters_has_the_parts_and_costs_of_the_model_that_peft_makes(family: str) -> None:
    """Its embedding and head are counted alike as well, but are units of other names."""
    pytest.importorskip("peft")
    config = make_config(family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    built = footprint_of_module(add_adapters(model, 4), None, Plan(), sequence=64)
    by_hand = footprint_of(shape_of(config.to_dict(), "config"), lora_rank=4)
    assert by_hand.trained_numel == built.trained_numel
    assert by_hand.numel == built.numel
    blocks = [part for part in expand(by_hand.parts) if part.is_block], [part for part in built.parts if part.is_block]
    assert len(blocks[0]) == len(blocks[1]) == 3
    assert by_hand.flops(64) == pytest.approx(built.flops(64), rel=0.1)
    inside = {part.module_name for part in expand(by_hand.parts) if part.name.startswith("adapters")}
    assert inside == {part.name for part in blocks[0]}


@pytest.mark.parametrize("what", ["kept", "moved"])
def test_a_shape_with_adapters_keeps_and_moves_what_the_dry_run_of_the_model_sees(what: str) -> None:
    pytest.importorskip("peft")
    config = llama(hidden_size=256, intermediate_size=688)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    built = footprint_of_module(add_adapters(model, 8), None, Plan(), sequence=64)
    by_hand = footprint_of(shape_of(config.to_dict(), "config"), lora_rank=8)
    of_block = [next(getattr(p.cost, what) for p in each.parts if p.is_block) for each in (by_hand, built)]
    assert of_block[0] == pytest.approx(of_block[1], rel=0.1)


@pytest.mark.parametrize("pipeline", [1, 2, 3])
def test_the_adapters_of_a_block_are_on_its_stage(pipeline: int) -> None:
    parts = find_rank_parts(footprint_of(PRESETS["gpt2"], lora_rank=4).parts, Plan(), pipeline).parts
    blocks = {part.name for part in parts if part.is_block}
    assert len(blocks) == 12 // pipeline
    assert {part.module_name for part in parts if part.name.startswith("adapters")} == blocks


def test_a_module_has_the_units_that_shard_makes_and_the_costs_of_its_config() -> None:
    config = llama()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    footprint = footprint_of_module(model, None, Plan())
    by_hand = footprint_of(shape_of(config.to_dict(), "config"))
    assert footprint.numel == by_hand.numel
    assert footprint.layers == 3
    assert footprint.flops(64) == pytest.approx(by_hand.flops(64))
    model.model.layers.requires_grad_(False)
    frozen = footprint_of_module(model, None, Plan())
    assert frozen.trained_numel < footprint.trained_numel
    assert frozen.flops(64) < footprint.flops(64)  # no gradients of frozen weights


def test_a_module_of_no_known_family_is_counted_from_its_layers() -> None:
    block = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    with torch.device("meta"):
        model = torch.nn.TransformerEncoder(block, 3)
    footprint = footprint_of_module(model, None, Plan())
    cost = next(part.cost for part in footprint.parts if part.is_block)
    assert cost.products == 3 * 32 * 32 + 32 * 32 + 2 * 32 * 64
    assert cost.attention > 0
    assert cost.kept > 0


def test_presets_have_the_sizes_they_are_named_after() -> None:
    for name, billions in {
        "llama-7b": 6.74,
        "llama-8b": 8.03,
        "llama-70b": 70.6,
        "gpt3-175b": 174.6,
        "gpt-1t": 1008,
    }.items():
        assert PRESETS[name].numel / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lama-7b", r"not a config folder, a config.json or a preset. Did you mean 'llama-7b'"),
        ("layers=2", r"leaves out hidden"),
        ("layers=2,hiden=64", r"has no 'hiden'. Did you mean 'hidden'"),
        ("layers=two,hidden=64", r"must be a whole number"),
        ("layers=0,hidden=64", r"layers is 0"),
        ("layers=1000000,hidden=64", r"layers is more than any model has"),
        ("layers=2,hidden=8,heads=16", r"there are 16 heads for a width of 8"),
        ("nowhere/config.json", r'there is no "nowhere/config.json"'),
    ],
)
def test_a_model_that_cannot_be_read_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_model(text)


TINY = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 100}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "lama"}, r"model_type 'lama', whose bytes are not known here. The nearest known is 'llama'"),
        ({"model_type": "llama", "hidden_size": 64}, r"has no 'num_hidden_layers'"),
        ({"model_type": "llama", "num_hidden_layers": -1}, r"num_hidden_layers=-1"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\], whose bytes are not known here"),
        ({"model_type": "llama", **TINY, "intermediate_size": "x"}, r"intermediate_size='x'"),
        ({"model_type": "gpt2", **TINY, "add_cross_attention": True}, r"has cross-attention in its blocks"),
        ([1], r"is not the config of a model"),
    ],
)
def test_a_config_of_an_unknown_architecture_is_one_clear_error(config: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=message):
        read_model(str(tmp_path))
    with pytest.raises(PlanError, match=r"has no config.json"):
        read_model(str(tmp_path.parent))
