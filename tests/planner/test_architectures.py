"""Configs of `transformers` of any architecture: parameters as the model has them, FLOPs as torch counts them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import unbounded
from unbounded.errors import PlanError
from unbounded.planner.plan import Plan
from unbounded.planning import dry_run, module_footprint
from unbounded.planning.config_model import build_model
from unbounded.planning.module_footprint import footprint_of_description, footprint_of_module
from unbounded.planning.towers import find_towers

transformers = pytest.importorskip("transformers")

IDS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    **IDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TWO_STACKS = {
    **IDS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
}
SOUND = {"num_mel_bins": 16, "max_source_positions": 50}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 48}
T5 = {**IDS, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
CROSS = {"is_decoder": True, "add_cross_attention": True}
SEEN = {"vision_config": VISION}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("ImageTextToText", {"text_config": {**TEXT, "model_type": "llama"}, "image_token_index": 5, **SEEN}),
    "gemma3": ("ImageTextToText", {"text_config": {**TEXT, "head_dim": 16}, **SEEN}),
    "qwen2_vl": (
        "ImageTextToText",
        {"text_config": TEXT, "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}},
    ),
    "blip-2": (
        "ImageTextToText",
        {"text_config": {**TEXT, "model_type": "opt"}, "qformer_config": {**TEXT, "encoder_hidden_size": 32}, **SEEN},
    ),
    "clip": ("", {"text_config": TEXT, "projection_dim": 32, **SEEN}),
    "vit": ("", VISION),
    "whisper": ("SpeechSeq2Seq", {**TWO_STACKS, **SOUND, "max_target_positions": 64}),
    "qwen2_audio": ("MultimodalLM", {"text_config": TEXT, "audio_config": {**TWO_STACKS, **SOUND}}),
    "wav2vec2": ("", TEXT),
    "t5": ("Seq2SeqLM", T5),
    "bart": ("Seq2SeqLM", TWO_STACKS),
    "switch_transformers": ("Seq2SeqLM", {**T5, "num_experts": 4}),
    "encoder-decoder": (
        "Seq2SeqLM",
        {"encoder": {**TEXT, "model_type": "bert"}, "decoder": {**TEXT, **CROSS, "model_type": "bert"}},
    ),
    "mixtral": ("CausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("CausalLM", {**TEXT, **SHARED}),
    "qwen3_moe": ("CausalLM", {**TEXT, **EXPERTS, "head_dim": 16, "mlp_only_layers": [0]}),
    "deepseek_v3": ("CausalLM", {**TEXT, **EXPERTS, **LATENT}),
    "gpt_oss": ("CausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "mamba": ("CausalLM", {**IDS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "falcon": ("CausalLM", TEXT),
    "phi": ("CausalLM", TEXT),
    "olmo2": ("CausalLM", TEXT),
    "llama": ("CausalLM", {**TEXT, "attention_bias": True, "mlp_bias": True}),
    "bert": ("MaskedLM", TEXT),
}


def make_config(kind: str) -> Any:
    return transformers.AutoConfig.for_model(kind, **CONFIGS[kind][1])


@pytest.fixture
def no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what does not follow from one, which takes longer than all else."""
    monkeypatch.setattr(module_footprint, "seen_costs", lambda *_: {})


@pytest.mark.every_second
@pytest.mark.usefixtures("no_dry_run")
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_plan_counts_the_parameters_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    purpose, values = CONFIGS[kind]
    auto = getattr(transformers, f"AutoModelFor{purpose}" if purpose else "AutoModel")
    with torch.device("meta"):
        model = auto.from_config(make_config(kind))
    numel = sum(parameter.numel() for parameter in model.parameters())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **values}))
    for given in (make_config(kind), tmp_path, str(tmp_path / "config.json")):
        assert footprint_of_description(given, torch.bfloat16, 64).numel == numel


def batch(kind: str, tokens: int) -> dict[str, Any]:
    text = torch.randint(6, 100, (1, tokens))
    image = torch.randn(1, 3, 28, 28)
    if kind == "llava":
        text[0, :4] = 5  # as many as there are patches
        return {"input_ids": text, "pixel_values": image}
    if kind == "clip":
        return {"input_ids": text, "pixel_values": image}
    if kind in ("vit", "convnext"):
        return {"pixel_values": image if kind == "vit" else torch.randn(1, 3, 32, 32)}
    if kind == "wav2vec2":
        return {"input_values": torch.randn(1, ((tokens * 2 + 2) * 4 + 4) * 5 + 5)}
    if kind == "speech_to_text":
        return {"input_features": torch.randn(1, 4 * tokens, 16), "decoder_input_ids": text}
    if kind == "whisper":
        return {"input_features": torch.randn(1, 16, 100), "decoder_input_ids": text}
    if kind in ("t5", "bart", "encoder-decoder", "switch_transformers", "led", "m2m_100"):
        return {"input_ids": text, "decoder_input_ids": text}
    return {"input_ids": text}


COUNTED = [
    *("llava", "clip", "whisper", "t5", "bart", "switch_transformers", "encoder-decoder", "mixtral", "qwen2_moe"),
    *("qwen3_moe", "deepseek_v3", "gpt_oss", "mamba", "falcon", "phi", "olmo2", "bert"),
]


@pytest.mark.every_second
@pytest.mark.usefixtures("no_dry_run")
@pytest.mark.parametrize("kind", COUNTED)
def test_flops_are_close_to_what_torch_counts(kind: str) -> None:
    """With experts that run one by one and attention in plain products, which torch's counter sees."""
    config = make_config(kind)
    config._attn_implementation = config._experts_implementation = "eager"
    model = build_model({"model_type": kind, **CONFIGS[kind][1]}, kind, torch.float32)
    footprint = footprint_of_module(model, None, Plan(), 32)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        type(model)(config).eval()(**batch(kind, 32))
    ours = 32 * sum(part.cost.flops(32) for part in footprint.parts)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_both_stacks_of_an_encoder_decoder_keep_activations() -> None:
    config = make_config("bart")
    model = transformers.BartForConditionalGeneration(config).to(torch.bfloat16)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = 0 if storage.data_ptr() in own else storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(**batch("bart", 64))
    del out
    blocks = [part for part in footprint_of_module(model, None, Plan(), 64).parts if part.is_block]
    ours = [sum(part.cost.kept for part in blocks if stack in part.name) for stack in ("encoder", "decoder")]
    assert 64 * sum(ours) == pytest.approx(sum(saved.values()), rel=0.5)  # counted roughly, from layers
    assert ours[1] > 1.2 * ours[0]  # it attends twice


NO_DROPOUT = dict.fromkeys(
    [
        *("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "dropout_rate", "attn_pdrop"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "embd_pdrop"),
    ],
    0.0,
)
WIDE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
RUNNABLE = {
    **{kind: CONFIGS[kind][1] for kind in ("bart", "mamba", "falcon", "phi", "olmo2", "bert")},
    "llama": {**WIDE, "intermediate_size": 256, "num_key_value_heads": 2},
    "gpt2": {**IDS, "n_embd": 128, "n_layer": 2, "n_head": 4},
    "opt": {**WIDE, "ffn_dim": 512, "word_embed_proj_dim": 128},
    "gpt_neox": {**WIDE, "intermediate_size": 512},
    "gemma2": {**WIDE, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32},
}
# Their forwards ask for values: which experts run, which positions count, whether a block is skipped (`m2m_100`). Or
# they pad to chunks (`mamba2`).
BY_VALUES = {
    **{kind: CONFIGS[kind][1] for kind in ("mixtral", "qwen2_moe", "gpt_oss", "switch_transformers", "t5")},
    "deepseek_v3": {**CONFIGS["deepseek_v3"][1], "v_head_dim": 24},  # as wide as keys: the CPU has a kernel for it
    "led": {**TWO_STACKS, "attention_window": 32, "max_encoder_position_embeddings": 64},
    "m2m_100": {**TWO_STACKS, "encoder_layerdrop": 0.0, "decoder_layerdrop": 1e-9},
    "mamba2": {**CONFIGS["mamba"][1], "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 32},
}


@pytest.mark.every_second
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, how) for kind in RUNNABLE for how in ("trained", "half frozen")),
        *((kind, "with adapters") for kind in ("llama", "gpt2", "gemma2", "gpt_neox")),
        *((kind, "trained") for kind in BY_VALUES),
    ],
)
def test_blocks_keep_what_autograd_saves_in_them(kind: str, how: str) -> None:
    """Whatever the family: also scores of attention in plain products, and states of scans."""
    described = {**(RUNNABLE | BY_VALUES)[kind], **NO_DROPOUT, "max_position_embeddings": 64}
    built = build_model({"model_type": kind, **described}, kind, torch.float32)
    model = type(built)(built.config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(how != "half frozen" or not any(part in name for part in ("mlp", "fc", "norm")))
    if how == "with adapters":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0), adapter_name="first")
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear"))
        assert dry_run.seen_costs(model, {}, 32)
    parts = [part for part in footprint_of_module(model, None, Plan(), 64).parts if part.is_block]
    lengths = (32, 64) if kind in RUNNABLE else (64,)
    saved = [saved_in(model, {part.module_name for part in parts}, batch(kind, length)) for length in lengths]
    for length, real in zip(lengths, saved, strict=True):
        ours = length * sum(part.cost.kept_bytes(length) for part in parts)
        assert ours == pytest.approx(real, rel=0.05)


SEEN_AND_HEARD: dict[str, dict[str, Any]] = {
    **{kind: CONFIGS[kind][1] for kind in ("llava", "clip", "vit", "whisper")},
    "wav2vec2": {**TEXT, "conv_dim": [16] * 3, "conv_kernel": [10, 8, 4], "conv_stride": [5, 4, 2]},
    "speech_to_text": {**TWO_STACKS, "input_feat_per_channel": 16, "max_target_positions": 64},
    "convnext": {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "image_size": 32, "patch_size": 4},
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
}


@pytest.mark.every_second
@pytest.mark.parametrize("kind", SEEN_AND_HEARD)
def test_blocks_of_images_and_sound_keep_what_autograd_saves_in_them(kind: str) -> None:
    """Of a fixed size, beside a text or alone, and of any size."""
    built = build_model({"model_type": kind, **_calm(SEEN_AND_HEARD[kind])}, kind, torch.float32)
    model = type(built)(built.config).train()
    footprint = footprint_of_module(model, None, Plan(), 64)
    parts = [part for part in footprint.parts if part.is_block]
    names = {part.module_name for part in parts}
    if kind == "qwen3_vl":  # its image alone, which is as large as the text
        parts = [part for part in parts if "visual" in part.name]
        given = {"hidden_states": torch.randn(64, 3 * 2 * 16**2), "grid_thw": torch.tensor([[1, 4, 16]])}
        real = saved_in(model.model.visual, {part.module_name.removeprefix("model.visual.") for part in parts}, given)
    else:
        real = saved_in(model, names, batch(kind, 64))
    tokens = 4 if kind == "vit" else 64  # positions of an image, if there is nothing else
    assert dry_run.seen_costs(model, {}, 64).keys() >= names
    assert tokens * sum(part.cost.kept_bytes(64) for part in parts) == pytest.approx(real, rel=0.05)


def test_where_a_whole_model_cannot_run_models_inside_it_do() -> None:
    model = build_model({"model_type": "blip-2", **CONFIGS["blip-2"][1]}, "blip-2", torch.bfloat16)
    seen = dry_run.seen_costs(model, {}, 64)
    for stack in ("vision_model.encoder", "language_model.model.decoder"):
        assert {f"{stack}.layers.{index}" for index in range(2)} <= seen.keys()
    assert seen["vision_model.encoder.layers.1"].attention_kept == 0


def test_a_decoder_does_not_run_without_its_source() -> None:
    model = build_model({"model_type": "bart", **CONFIGS["bart"][1]}, "bart", torch.bfloat16)
    assert [name for name, _ in dry_run._runnables(model)] == ["", "model", "model.encoder"]


def _calm(values: dict[str, Any]) -> dict[str, Any]:
    """Without dropout, also inside."""
    inner = {key: _calm(value) for key, value in values.items() if key.endswith("_config")}
    quiet = dict.fromkeys(("layerdrop", "feat_proj_dropout", "mask_time_prob"), 0.0)
    return {**values, **NO_DROPOUT, **quiet, **inner}


def saved_in(model: torch.nn.Module, blocks: set[str], given: dict[str, torch.Tensor]) -> int:
    """Bytes that autograd saves while one of these modules runs."""
    seen = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    alive, inside, total = [], [0], [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            alive.append(tensor)
            total[0] += storage.nbytes() if inside[0] else 0
        return tensor

    for name in blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, inside[0] + 1))
        block.register_forward_hook(lambda *_: inside.__setitem__(0, inside[0] - 1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(**given, **({"use_cache": False} if "input_ids" in given else {}))
    return total[0]


def test_blocks_that_are_alike_are_seen_like_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with experts and without, and blocks whose attention differs, each several times; the first of a model
    also keeps what all share."""
    values = {**TEXT, **EXPERTS, "head_dim": 16, "num_hidden_layers": 8, "mlp_only_layers": [0, 2, 4, 6]}
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"] * 2
    model = build_model({"model_type": "qwen3_moe", **values}, "qwen3_moe", torch.float32)
    other = build_model(
        {"model_type": "gemma2", **TEXT, "num_hidden_layers": 8, "layer_types": kinds}, "", torch.float32
    )
    ran: list[str] = []
    for one, attention in ((model, "Qwen3MoeAttention"), (other, "Gemma2Attention")):
        forward = type(one.model.layers[0].self_attn).forward

        def run(self: Any, *args: Any, forward: Any = forward, **kwargs: Any) -> Any:
            ran.append(type(self).__name__)
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(type(one.model.layers[0].self_attn), "forward", run)
        seen = dry_run.seen_costs(one, {}, 256)
        assert 3 * 2 * 2 <= ran.count(attention) <= 3 * 6  # two or three of each kind, for three lengths
        with monkeypatch.context() as patch:
            patch.setattr(dry_run, "find_alike", lambda *_: {})
            dry_run._run.cache_clear()
            assert dry_run.seen_costs(one, {}, 256) == seen
        assert len(seen) == 8


def test_a_dry_run_leaves_random_numbers_and_the_model_alone() -> None:
    model = build_model({"model_type": "bart", **CONFIGS["bart"][1], "encoder_layerdrop": 0.5}, "bart", torch.float32)
    model.eval()
    before = torch.get_rng_state()
    first = footprint_of_module(model, None, Plan(), 32)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    dry_run._run.cache_clear()
    assert footprint_of_module(model, None, Plan(), 32) == first


def test_a_model_that_its_config_does_not_describe_is_counted_from_its_layers() -> None:
    model = build_model({"model_type": "falcon", **CONFIGS["falcon"][1]}, "falcon", torch.float32)
    assert dry_run.seen_costs(model, {}, 32)
    model.transformer.h[0].more = torch.nn.Linear(64, 64)
    assert dry_run.seen_costs(model, {}, 32) == {}
    parts = footprint_of_module(model, None, Plan(), 32).parts
    assert all(part.cost.kept > 0 for part in parts if part.is_block)
    part = model.transformer.h[1]  # no model, though it comes from `transformers`
    assert footprint_of_module(part, None, Plan(), 32).numel == sum(
        parameter.numel() for parameter in part.parameters()
    )


@pytest.mark.usefixtures("no_dry_run")
@pytest.mark.parametrize(
    ("kind", "assumed"),
    [
        ("llava", ["one image of 4 positions per sequence"]),
        ("qwen2_vl", ["one image with as many positions as the text per sequence"]),
        ("whisper", ["one sound of 50 positions per sequence"]),
        ("vit", ["tokens are positions of inputs, 4 in each image"]),
        ("wav2vec2", ["one sound per sequence"]),
        ("bart", ["a source with as many tokens as its target"]),
        ("llama", []),
    ],
)
def test_a_plan_says_what_it_assumes_of_the_inputs(kind: str, assumed: list[str]) -> None:
    reasons = unbounded.plan(make_config(kind), machine="h200:1", sequence=64).reasons
    lines = [line.partition("assumed")[2].strip() for line in reasons.splitlines() if line.startswith("assumed")]
    assert lines == assumed


def test_a_part_may_have_several_main_inputs() -> None:
    model = torch.nn.ModuleDict({"eye": torch.nn.Linear(4, 4), "text": torch.nn.Linear(4, 4)})
    eye: Any = model["eye"]
    eye.main_input_name, eye.input_modalities, eye.config = ["task_inputs", "pixel_values"], "image", None
    assert [(tower.name, tower.reads) for tower in find_towers(model)] == [("eye", "image")]


def test_a_number_that_json_lacks_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "n_groups": 1}
    config = transformers.Mamba2Config(**IDS, **sizes, time_step_limit=(0.0, float("inf")))
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    with torch.device("meta"):
        model = transformers.Mamba2ForCausalLM(config)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert footprint_of_description(tmp_path, torch.bfloat16, 64).numel == numel


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "lama"}, r"which transformers .* does not know. The nearest known is 'llama'"),
        ({}, "has the model_type None"),
        ({"model_type": "llama", "num_hidden_layers": 2**31}, "num_hidden_layers=2147483648, but no model has more"),
        ({"model_type": "llama", "hidden_size": "x"}, "describes no model that can be built: .*hidden_size"),
        ({"model_type": "mamba", "hidden_size": {"a": 1}}, "describes no model that can be built"),
        ({"model_type": "llama", "num_key_value_heads": 0}, r"by zero \(at `.*num_key_value_heads`\)"),
        ({"model_type": "blip_text_model"}, 'or name its class in "architectures"'),
        ([1], "is not the config of a model"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_clear_line(values: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(PlanError, match=message) as raised:
        footprint_of_description(tmp_path, torch.bfloat16, 64)
    assert "\n" not in str(raised.value)


def test_a_name_in_a_config_calls_nothing_but_a_model() -> None:
    model = build_model({"model_type": "llama", "architectures": ["pipeline"], **TEXT}, "it", torch.bfloat16)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_a_config_of_one_purpose_that_is_not_listed_is_the_model_for_it() -> None:
    sizes = {"neck_hidden_sizes": [8, 8, 8, 8], "backbone_config": {"model_type": "dinov2", **VISION}}
    model = build_model({"model_type": "depth_anything", **sizes}, "it", torch.bfloat16)
    assert type(model).__name__ == "DepthAnythingForDepthEstimation"


@pytest.mark.parametrize("kind", ["llava", "qwen3_moe", "t5"])
def test_without_transformers_only_what_is_known_whole_is_counted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, known = make_config(kind), transformers.AutoConfig.for_model("mistral", **TEXT)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="Install transformers"):
        footprint_of_description(config, torch.bfloat16, 64)
    assert footprint_of_description(known, torch.bfloat16, 64).layers == 2
