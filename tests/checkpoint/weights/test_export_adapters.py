"""Adapters exported for peft: from a running model on any number of ranks, and from a checkpoint without the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.checkpoint.jobs import assert_same
from tests.checkpoint.weights.test_pretrained import config_of, logits, reports
from tests.checkpoint.weights.test_pretrained_adapters import (
    ADAPTERS,
    PRELOAD_IN_RANKS,
    adapted,
    empty,
    optimizer_of,
    save_base,
    steps,
)

__all__ = ["PRELOAD_IN_RANKS"]
EXPORTED = ["every linear layer", "tied, embedding", "transposed", "magnitudes", "head in full", "some tokens"]


def read(folder: str, base: str) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


def trained(rank: int, world_size: int, folder: str, base: str, settings: dict[str, Any]) -> bool:
    """Trains a little, exports and saves; returns whether peft reads the export and gets the same logits."""
    model = empty(base, settings, torch.float32)
    plan = {"weights": "host"} if world_size == 1 else {"stage": 3}
    model, optimizer = unbounded.shard(model, optimizer_of(model), plan, weights=base)
    before = logits(model)
    steps(model, optimizer, rank)
    unbounded.export(f"{folder}/live", model)
    unbounded.save(f"{folder}/checkpoint", model, optimizer)
    after = logits(model)
    return torch.equal(logits(read(f"{folder}/live", base)), after) and not torch.equal(after, before)


@pytest.mark.parametrize("name", EXPORTED)
def test_peft_reads_an_export_with_the_same_logits_and_a_checkpoint_gives_the_same_files(
    ranks: Any, tmp_path: Path, name: str
) -> None:
    from safetensors.torch import load_file

    from unbounded.cli import main

    kind, settings = ADAPTERS[name]
    base = save_base(tmp_path / "base", kind)
    world_size = 2 if name in ("every linear layer", "head in full") else 1
    assert all(ranks(world_size, trained, str(tmp_path), base, settings))
    live, offline = tmp_path / "live", tmp_path / "offline"
    assert main(["export", str(tmp_path / "checkpoint"), str(offline)]) == 0
    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(path.name for path in live.iterdir()) == names  # nothing of the base model
    assert sorted(path.name for path in offline.iterdir()) == names
    assert_same(load_file(live / names[1]), load_file(offline / names[1]))
    assert (live / names[0]).read_bytes() == (offline / names[0]).read_bytes()


def test_an_export_is_what_peft_itself_would_have_written(tmp_path: Path) -> None:
    from peft import LoraConfig
    from safetensors.torch import load_file

    base = save_base(tmp_path / "base", "llama")
    model = empty(base, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, torch.float32)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model, _ = unbounded.shard(model, optimizer_of(model), weights=base)
    unbounded.export(tmp_path / "ours", model)
    with unbounded.full_params(model):
        model.save_pretrained(tmp_path / "theirs")
    for place in ("", "other"):
        ours, theirs = tmp_path / "ours" / place, tmp_path / "theirs" / place
        name = "adapter_model.safetensors"
        assert_same(load_file(ours / name), load_file(theirs / name))
        one, other = (json.loads((f / "adapter_config.json").read_text()) for f in (ours, theirs))
        assert one == other
        assert one["base_model_name_or_path"] == base


def test_projections_that_all_layers_share_are_saved_and_exported_as_peft_would(tmp_path: Path) -> None:
    from peft import VeraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from unbounded.cli import main

    base = AutoModelForCausalLM.from_pretrained(save_base(tmp_path / "base", "llama"))
    model: Any = get_peft_model(base, VeraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model, optimizer = unbounded.shard(model, optimizer_of(model))
    unbounded.export(tmp_path / "ours", model)
    unbounded.save(tmp_path / "checkpoint", model, optimizer)
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "offline")]) == 0
    with unbounded.full_params(model):
        model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    for ours in ("ours", "offline"):
        assert_same(load_file(tmp_path / ours / "adapter_model.safetensors"), theirs)


def test_adapters_are_exported_beside_the_base_model_without_touching_it(tmp_path: Path) -> None:
    base = save_base(tmp_path, "llama")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = empty(base, {"target_modules": ["q_proj"]}, torch.float32)
    model, _ = unbounded.shard(model, optimizer_of(model), weights=base)
    unbounded.export(base, model)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"adapter_config.json", "adapter_model.safetensors"}


def test_an_adapter_that_transformers_itself_has_added_is_exported_for_peft(tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    base = save_base(tmp_path / "base", "llama")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("llama"))
    model.add_adapter(LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model, optimizer = unbounded.shard(model, optimizer_of(model), weights=base)
    steps(model, optimizer, 0)
    unbounded.export(tmp_path / "adapter", model)
    assert torch.equal(logits(read(str(tmp_path / "adapter"), base)), logits(model))


def test_a_trained_weight_that_no_adapter_holds_is_named(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = adapted(AutoModelForCausalLM.from_config(config_of("llama")), {"target_modules": ["q_proj"]})
    model.base_model.model.lm_head.requires_grad_(True)
    model, _ = unbounded.shard(model, optimizer_of(model))
    with reports() as messages:
        unbounded.export(tmp_path, model)
    (message,) = messages
    assert "belong to no adapter" in message
    assert message.endswith(": base_model.model.lm_head.weight")


def test_prompts_that_peft_computes_are_refused_with_what_to_call(tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_config(config_of("llama"))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(base, config)
    model, optimizer = unbounded.shard(model, optimizer_of(model))
    unbounded.save(tmp_path / "checkpoint", model, optimizer)
    with pytest.raises(unbounded.CheckpointError, match=r"PROMPT_TUNING.*full_params"):
        unbounded.export(tmp_path / "out", model)
    with unbounded.full_params(model):
        model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("name", ["magnitudes", "head in full", "some tokens", "tied, embedding"])
def test_an_exported_adapter_is_streamed_in_again_upon_its_base_model(tmp_path: Path, name: str) -> None:
    kind, settings = ADAPTERS[name]
    base = save_base(tmp_path / "base", kind)
    assert trained(0, 1, str(tmp_path), base, settings)
    expected = logits(read(f"{tmp_path}/live", base))
    model = empty(base, settings, torch.float32)
    with reports() as messages:
        model, _ = unbounded.shard(model, optimizer_of(model), weights=tmp_path / "live")
    assert messages == []
    assert torch.equal(logits(model), expected)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama")
    trained(0, 1, str(tmp_path), base, {"target_modules": ["q_proj"]})
    for settings, match in (
        (
            {"target_modules": ["q_proj"], "r": 2},
            r"lora_A.default.weight has the shape \[2, 32\], but \[4,",
        ),
        ({"target_modules": ["v_proj"]}, r"it lacks .*v_proj.lora_A.weight.* and has .*q_proj.lora_A.weight.* besides"),
    ):
        model = empty(base, settings, torch.float32)
        with pytest.raises(unbounded.CheckpointError, match=match):
            unbounded.shard(model, optimizer_of(model), weights=tmp_path / "live")
    config = tmp_path / "live" / "adapter_config.json"
    config.write_text(config.read_text().replace(base, "someone/model"))
    model = empty(base, {"target_modules": ["q_proj"]}, torch.float32)
    with pytest.raises(unbounded.CheckpointError, match="for the base model 'someone/model', which is not a folder"):
        unbounded.shard(model, optimizer_of(model), weights=tmp_path / "live")
