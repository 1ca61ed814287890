"""Adapters by peft on a model that is streamed in: the values, losses and reports of the model loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.checkpoint.jobs import assert_same
from tests.checkpoint.weights.test_pretrained import TOKENS, Peak, config_of, reports

PRELOAD_IN_RANKS = ["transformers.models.llama.modeling_llama", "peft", "unbounded.weights.pretrained"]
ATTENTION = ["q_proj", "v_proj"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {  # the base model, and peft's settings
    "every linear layer": ("llama", {"target_modules": "all-linear"}),
    "gaussian": ("llama", {"target_modules": ATTENTION, "init_lora_weights": "gaussian"}),
    "biases": ("biased", {"target_modules": ATTENTION, "bias": "lora_only", "lora_bias": True}),
    "tied, embedding": ("tied", {"target_modules": [*ATTENTION, "embed_tokens"]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "experts": ("mixtral", {"target_modules": ["q_proj"]}),
    "parameters of experts": ("mixtral", {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}),
    "ranks by layer": ("llama", {"target_modules": ATTENTION, "rank_pattern": {"v_proj": 5}, "use_rslora": True}),
    "magnitudes": ("llama", {"target_modules": [*ATTENTION, "down_proj"], "use_dora": True}),
    "magnitudes of an embedding": ("tied", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "head in full": ("llama", {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "norm"]}),
    "tied head in full": ("tied", {"target_modules": ATTENTION, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "some tokens": ("tied", {"target_modules": ATTENTION, "trainable_token_indices": [3, 7]}),
    "principal components": ("llama", {"target_modules": ATTENTION, "init_lora_weights": "pissa"}),
    "orthonormal": ("llama", {"target_modules": ATTENTION, "init_lora_weights": "olora"}),
}


def base_config(kind: str) -> Any:
    config = config_of("llama" if kind == "biased" else kind)
    if kind == "biased":
        config.attention_bias = True
    return config


def adapted(base: Any, settings: dict[str, Any], **options: Any) -> Any:
    import peft

    return peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "lora_alpha": 8} | settings), **options)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def loaded(folder: str, settings: dict[str, Any], dtype: torch.dtype, **options: Any) -> Any:
    """The model read whole by transformers, adapted by peft."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.manual_seed(5)
    return adapted(base, settings, **options)


def empty(folder: str, settings: dict[str, Any], dtype: torch.dtype, **options: Any) -> Any:
    """The same without values."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
        if not options:
            return adapted(base, settings)
    return adapted(base, settings, **options)  # inside, peft would leave adapters in fp32 whatever it is asked for


def steps(model: Any, optimizer: Any, rank: int, count: int = 4) -> list[float]:
    found = []
    model.train()
    for index in range(count):
        tokens = TOKENS + 7 * index + rank
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def both(
    rank: int, world_size: int, folder: str, settings: dict[str, Any], dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[float], list[float], list[str]]:
    """The losses of four steps, once loaded whole and once streamed in; first values are compared bit by bit."""
    plan = {"stage": 3} if world_size > 1 else {"weights": "host"}
    whole = loaded(folder, settings, dtype, **options)
    buffers = {name: buffer.clone() for name, buffer in whole.named_buffers()}
    whole, optimizer = unbounded.shard(whole, optimizer_of(whole), plan)
    expected = {name: value.clone() for name, value in whole.state_dict().items()}
    whole_losses = steps(whole, optimizer, rank, 4)

    model = empty(folder, settings, dtype, **options)
    torch.manual_seed(5)
    with reports() as messages:
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan, weights=folder)
    assert_same(dict(model.state_dict()), expected)
    assert_same(dict(model.named_buffers()), buffers)
    return whole_losses, steps(model, optimizer, rank, 4), messages


def save_base(folder: Path, kind: str) -> str:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(base_config(kind)).save_pretrained(folder, max_shard_size="20KB")
    return str(folder)


@pytest.mark.every_second
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_streamed_model_begins_with_pefts_own_values_and_trains_as_one_loaded_whole(
    ranks: Any, tmp_path: Path, name: str
) -> None:
    kind, settings = ADAPTERS[name]
    folder = save_base(tmp_path, kind)
    world_size = 2 if name in ("every linear layer", "tied head in full", "magnitudes", "principal components") else 1
    for whole, streamed, messages in ranks(world_size, both, folder, settings, torch.float32, {}):
        assert streamed == whole
        assert not whole or whole[-1] != whole[0]
        assert messages == []  # adapters that the files lack are not reported


@pytest.mark.parametrize("autocast", [False, True])
def test_a_frozen_base_in_bf16_is_cast_as_it_streams_in(ranks: Any, tmp_path: Path, autocast: bool) -> None:
    folder = save_base(tmp_path, "llama")
    settings = {"target_modules": ATTENTION, "use_dora": True}
    options = {"autocast_adapter_dtype": autocast}
    for whole, streamed, _ in ranks(2, both, folder, settings, torch.bfloat16, options):
        assert streamed == whole


def remove_tensor(folder: Path, key: str) -> None:
    """As if the folder had been written by a model without it."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(path).items() if name != key}, path, {"format": "pt"})


def test_a_weight_that_the_base_model_lacks_is_reported_by_its_own_name(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(tmp_path)
    remove_tensor(tmp_path, "model.layers.1.self_attn.q_proj.weight")
    model = empty(str(tmp_path), {"target_modules": ATTENTION}, torch.float32)
    with reports() as messages:
        model, _ = unbounded.shard(model, optimizer_of(model), weights=tmp_path)
    (message,) = messages
    assert "LlamaForCausalLM" in message
    assert message.endswith("newly initialised: model.layers.1.self_attn.q_proj.weight")
    made = model.state_dict()["base_model.model.model.layers.1.self_attn.q_proj.base_layer.weight"]
    assert 0.01 < float(made.std()) < 0.03  # as the model's own `_init_weights` draws it


def test_a_head_that_the_files_lack_is_drawn_once_and_its_copy_begins_with_the_same_values(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(tmp_path)
    remove_tensor(tmp_path, "lm_head.weight")
    model = empty(str(tmp_path), {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}, torch.float32)
    model, _ = unbounded.shard(model, optimizer_of(model), weights=tmp_path)
    values = model.state_dict()
    copied = values["base_model.model.lm_head.modules_to_save.default.weight"]
    assert float(copied.std()) > 0.01
    assert torch.equal(copied, values["base_model.model.lm_head.original_module.weight"])


@pytest.mark.parametrize("inside", [True, False])
def test_adapters_on_a_model_without_weights_begin_as_nothing(inside: bool) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config_of("llama"))
        model = adapted(base, {"target_modules": ATTENTION}) if inside else None
    model = adapted(base, {"target_modules": ATTENTION}) if model is None else model
    model, _ = unbounded.shard(model, optimizer_of(model))
    for name, value in model.state_dict().items():
        if "lora_" in name:
            assert bool(value.any()) == ("lora_A" in name), name


METHODS: dict[str, dict[str, Any]] = {
    "IA3Config": {"target_modules": ATTENTION, "feedforward_modules": []},
    "LoHaConfig": {"target_modules": ATTENTION},
    "LoKrConfig": {"target_modules": ATTENTION},
    "OFTConfig": {"target_modules": ATTENTION},
    "AdaLoraConfig": {"target_modules": ATTENTION, "init_r": 4, "total_step": 10},
    "PromptTuningConfig": {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3},
    "PromptEncoderConfig": {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "encoder_hidden_size": 16},
}


@pytest.mark.parametrize("kind", METHODS)
def test_other_methods_of_peft_stream_in_too(tmp_path: Path, kind: str) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    folder = save_base(tmp_path, "llama")
    config = getattr(peft, kind)(**METHODS[kind])
    base = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(5)
    expected = peft.get_peft_model(base, config).state_dict()
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config_of("llama"))
    model = peft.get_peft_model(base, config)
    torch.manual_seed(5)
    model, _ = unbounded.shard(model, optimizer_of(model), weights=folder)
    assert_same(dict(model.state_dict()), dict(expected))


class Picture(torch.nn.Module):
    """Not a Hugging Face model: a convolution, buffers in the file, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.head = torch.nn.Linear(8, 4)


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_plain_model_with_a_convolution_streams_in_too(tmp_path: Path, use_dora: bool) -> None:
    from safetensors.torch import save_file

    settings = {"target_modules": ["conv", "head"], "use_dora": use_dora}
    whole = Picture()
    whole.norm.running_mean.fill_(3.0)
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    torch.manual_seed(5)
    expected = adapted(whole, settings).state_dict()
    with torch.device("meta"):
        model = adapted(Picture(), settings)
    torch.manual_seed(5)
    model, _ = unbounded.shard(model, optimizer_of(model), weights=tmp_path)
    assert_same(dict(model.state_dict()), dict(expected))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("VeraConfig", {"r": 2, "target_modules": ["q_proj"]}, "it needs 'vera_A'"),
    ("LilyConfig", {"r": 2, "stride_A": 2, "target_modules": ["q_proj"]}, "it shares parameters with others"),
    ("OSFConfig", {"target_modules": ["q_proj"]}, "'<=' not supported"),  # peft says what its code lacks
    (
        "PromptTuningConfig",
        {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, "prompt_tuning_init": "SAMPLE_VOCAB"},
        "begin as embeddings of the base model, which has none",
    ),
]


@pytest.mark.parametrize(("kind", "settings", "why"), REFUSED, ids=[kind for kind, *_ in REFUSED])
def test_a_method_that_cannot_be_made_layer_by_layer_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], why: str
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    if not hasattr(peft, kind):
        pytest.skip(f"this peft has no {kind}")
    folder = save_base(tmp_path, "llama")
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config_of("llama"))
    model = peft.get_peft_model(base, getattr(peft, kind)(**settings))
    with pytest.raises(unbounded.PlanError, match=rf"{why}.*Build the model with real parameters"):
        unbounded.shard(model, optimizer_of(model), weights=folder)


def held(rank: int, world_size: int, folder: str, settings: dict[str, Any], streams: bool) -> float:
    """How much memory grows at most until a model in bf16 is sharded, relative to its bytes; the files are in fp32."""
    make = empty if streams else loaded
    with Peak() as peak:
        model = make(folder, settings, torch.bfloat16, autocast_adapter_dtype=False)
        plan = {"stage": 3, "weights": "disk", "optimizer": "host"}
        unbounded.shard(model, optimizer_of(model), plan, weights=folder if streams else None)
    return peak.grown_bytes / (2 * sum(p.numel() for p in model.parameters()))


def test_no_rank_holds_the_base_model_while_it_streams_in(ranks: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=2048, num_hidden_layers=24, num_attention_heads=4
    )  # 24 units of 8 MiB in bf16
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = {"target_modules": "all-linear", "r": 1}
    assert min(ranks(2, held, str(tmp_path), settings, False)) > 0.9
    assert max(ranks(2, held, str(tmp_path), settings, True)) < 0.5  # a few units on their way, buffers of the tiers
