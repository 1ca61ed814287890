"""Hugging Face models in `unbounded train`: a folder, a configuration, adapters; and what makes no sense."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import models
from tests.train.corpora import save_model, save_tokenizer, sentences, write_jsonl, write_texts
from tests.train.jobs import losses, train
from unbounded.cli import main
from unbounded.errors import CheckpointError, DiskError, InputError
from unbounded.train.options.config import Config

CHAT_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), chat_template=CHAT_TEMPLATE)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts.jsonl", 300)


def fine_tune(output: Path, data: Path, **settings: Any) -> Config:
    given = {
        "sequence_length": 32,
        "batch_tokens": 256,
        "steps": 8,
        "lr": 5e-3,
        "eval_fraction": 0.0,
        "device": "cpu",
        "plan": (("weights", "host"), ("optimizer", "disk")),
    }
    return Config(output=str(output), data=(str(data),), **given | settings)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(12).view(1, -1)).logits.float()


def test_a_model_begins_with_its_own_weights_and_its_export_is_what_was_trained(
    tmp_path: Path, folder: Path, texts: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export = tmp_path / "export"
    summary = train(fine_tune(tmp_path / "out", texts, model=str(folder), export=str(export)))
    found = losses(tmp_path / "out")
    assert found[0] == pytest.approx(_plain_loss(folder, texts), rel=1e-4)
    assert found[-1] < found[0] - 0.3
    assert summary.exported == export
    loaded = AutoModelForCausalLM.from_pretrained(export)
    assert AutoTokenizer.from_pretrained(export).get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    again = fine_tune(tmp_path / "again", texts, model=str(export), steps=1, lr=1e-9, export=str(tmp_path / "same"))
    train(again)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "same")), logits(loaded))


def test_what_happens_to_activations_changes_no_loss(tmp_path: Path, folder: Path, texts: Path) -> None:
    for kind, more in (("whole", {}), ("adapters", {"lora_rank": 2})):
        for policy in ("keep", "host"):  # which also recomputes
            output = tmp_path / f"{kind}-{policy}"
            train(fine_tune(output, texts, model=str(folder), activations=policy, steps=3, **more))
            assert losses(output) == losses(tmp_path / f"{kind}-keep")


def test_a_model_starts_from_nothing_with_a_configuration(tmp_path: Path, folder: Path, texts: Path) -> None:
    train(fine_tune(tmp_path / "out", texts, from_config=str(folder / "config.json"), lr=1e-2))
    found = losses(tmp_path / "out")
    assert found[0] == pytest.approx(torch.log(torch.tensor(320.0)).item(), abs=0.3)
    assert found[-1] < found[0] - 0.3


def test_corrections_of_experts_stay_in_fp32_beside_16_bits(tmp_path: Path, texts: Path) -> None:
    from safetensors.torch import load_file

    name, model = "model.layers.1.mlp.gate.e_score_correction_bias", models.build("deepseek_v3", vocab_size=320)
    model.get_buffer(name).uniform_(5.0, 5.01)  # in bf16, all would be the same
    model.save_pretrained(save_tokenizer(tmp_path / "model"))
    given = {"model": str(tmp_path / "model"), "precision": "bf16", "steps": 1, "export": str(tmp_path / "exported")}
    train(fine_tune(tmp_path / "out", texts, **given))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported[name], model.get_buffer(name))


def test_adapters_train_while_the_rest_stays_and_are_exported_alone(tmp_path: Path, folder: Path, texts: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    export = tmp_path / "adapters"
    summary = train(fine_tune(tmp_path / "out", texts, model=str(folder), lora_rank=4, lr=2e-2, export=str(export)))
    found = losses(tmp_path / "out")
    assert 0 < summary.num_trained < summary.num_parameters / 2
    assert found[0] == pytest.approx(_plain_loss(folder, texts), rel=1e-4)  # adapters begin at zero
    assert found[-1] < found[0] - 0.1
    assert not (export / "model.safetensors").exists()
    before = logits(AutoModelForCausalLM.from_pretrained(folder))
    adapted = AutoPeftModelForCausalLM.from_pretrained(export)  # the export knows its base model
    assert (logits(adapted) - before).abs().max() > 1e-3
    same = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), export)
    assert torch.equal(logits(same), logits(adapted))


def test_a_model_is_not_exported_to_a_folder_of_adapters(tmp_path: Path, folder: Path, texts: Path) -> None:
    config = fine_tune(tmp_path / "a", texts, model=str(folder), steps=1, export=str(tmp_path / "tuned"))
    train(replace(config, lora_rank=2))
    said = "tuned holds adapters .adapter_config.json., which from_pretrained would put on the model exported there"
    with pytest.raises(CheckpointError, match=said):  # before the first step
        train(replace(config, output=str(tmp_path / "b")))
    assert not (tmp_path / "b").exists()
    train(replace(config, output=str(tmp_path / "b"), export=None))
    assert main(["export", str(tmp_path / "b" / "step-00000001"), str(tmp_path / "tuned")]) == 2
    assert not (tmp_path / "tuned" / "model.safetensors").exists()


def test_adapters_do_not_continue_with_another_scale(tmp_path: Path, folder: Path, texts: Path) -> None:
    config = fine_tune(tmp_path / "out", texts, model=str(folder), lora_rank=2, steps=1)
    train(config)
    assert train(replace(config, lora_alpha=4.0, steps=2)).step == 2  # twice the rank, as before
    with pytest.raises(InputError, match=r"holds another run: its lora_alpha is 4\.0, not 32\.0"):
        train(replace(config, lora_alpha=32.0, steps=3))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_on_a_model_that_streams_in_train_as_on_one_loaded_whole(
    tmp_path: Path, folder: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    settings = {"model": str(folder), "lora_rank": 3, "steps": 4, "precision": precision}
    train(fine_tune(tmp_path / "streamed", texts, **settings))
    dtypes = []

    def load(path: Path, config: Any, dtype: torch.dtype, objective: str) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
        dtypes.append(dtype)
        torch.manual_seed(Config().seed)  # peft draws the adapters next
        return model

    monkeypatch.setattr("unbounded.train.huggingface._build_empty", load)
    train(fine_tune(tmp_path / "whole", texts, **settings))
    assert dtypes == [torch.bfloat16 if precision == "bf16" else torch.float32]
    assert losses(tmp_path / "streamed") == losses(tmp_path / "whole")


def test_chats_are_rendered_by_the_models_template(tmp_path: Path, folder: Path) -> None:
    said = sentences(100)
    records = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in zip(said[::2], said[1::2], strict=True)
    ]
    train(fine_tune(tmp_path / "out", write_jsonl(tmp_path / "chat.jsonl", records), model=str(folder)))
    found = losses(tmp_path / "out")
    assert found[-1] < found[0]


def test_what_cannot_be_meant_is_refused_before_anything_is_allocated(
    tmp_path: Path, folder: Path, texts: Path
) -> None:
    other = save_tokenizer(tmp_path / "larger", vocabulary=400)
    for settings, said in (
        ({"model": str(tmp_path / "none")}, "does not exist"),
        ({"model": str(other)}, "has no safetensors file"),
        ({"from_config": str(tmp_path)}, "no model configuration can be read"),
        (
            {"model": str(folder), "tokenizer": str(other)},
            "does not match the model: it has 400 tokens and the model embeds 320",
        ),
        ({"model": str(folder), "sequence_length": 256}, "more than the 128 positions"),
        (
            {"model": str(folder), "batch_tokens": 100},
            "not a multiple of --sequence-length 32. The nearest multiple is 96",
        ),
        ({"model": str(folder), "micro_batch": 3}, "does not divide the 8 sequences"),
        ({"model": str(folder), "objective": "masked"}, "not a language model that --objective masked can train"),
        ({"model": str(folder), "lora_rank": 4, "lora_targets": ("nothing",)}, "the adapters do not fit this model"),
    ):
        with pytest.raises(InputError, match=said) as caught:
            train(fine_tune(tmp_path / "out", texts, **settings))
        assert "\n" not in str(caught.value)


def test_the_configuration_of_a_quantized_model_is_not_trained_from_scratch(
    tmp_path: Path, folder: Path, texts: Path
) -> None:
    shutil.copytree(folder, tmp_path / "quantized")
    path = tmp_path / "quantized" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    for given in (path.parent, path):
        with pytest.raises(InputError, match=r'configuration of a quantized model.*Remove "quantization_config"'):
            train(fine_tune(tmp_path / "out", texts, from_config=str(given)))


def test_a_model_whose_experts_are_to_be_balanced_by_its_loss_is_refused(tmp_path: Path, texts: Path) -> None:
    from transformers import MixtralConfig

    save_tokenizer(tmp_path)
    MixtralConfig(output_router_logits=True, router_aux_loss_coef=0.02).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"says output_router_logits = true, which adds a loss that balances"):
        train(fine_tune(tmp_path / "out", texts, from_config=str(tmp_path)))


def test_a_model_folder_that_may_not_be_read_is_not_called_empty(
    tmp_path: Path, folder: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Any = ".") -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    for given in ({"model": str(folder)}, {"from_config": str(folder)}):
        with pytest.raises(PermissionError, match=re.escape(str(folder))):
            train(fine_tune(tmp_path / "out", texts, **given))


@pytest.mark.parametrize("is_decoder", [False, True])
def test_a_model_that_sees_the_next_token_is_not_trained_to_predict_it(
    tmp_path: Path, texts: Path, is_decoder: bool
) -> None:
    from transformers import BertConfig

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertConfig(vocab_size=320, is_decoder=is_decoder, **shape).save_pretrained(save_tokenizer(tmp_path / "bert"))
    config = fine_tune(tmp_path / "out", texts, from_config=str(tmp_path / "bert"), steps=1)
    if is_decoder:
        assert train(config).step == 1
        return
    with pytest.raises(InputError, match=r"sees the tokens that --objective next has it predict\. Train it with --obj"):
        train(config)


def _plain_loss(folder: Path, texts: Path) -> float:
    """The loss of the first batch by transformers alone."""
    from transformers import AutoModelForCausalLM

    from tests.train.corpora import make_corpus
    from unbounded.train.data.loader import Loader
    from unbounded.train.data.tokenizer import FolderTokenizer

    loader = Loader(make_corpus(texts, tokenizer=FolderTokenizer(folder)), rows=8)
    batch = loader.next()
    loader.close()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        scores = model(torch.from_numpy(batch.inputs)).logits.float()
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(batch.targets).flatten()).item()


def test_an_export_keeps_the_models_own_settings_of_generation(tmp_path: Path, folder: Path, texts: Path) -> None:
    base = shutil.copytree(folder, tmp_path / "base")
    (base / "generation_config.json").write_text('{"max_new_tokens": 77, "temperature": 0.6, "eos_token_id": [1, 2]}')
    export = tmp_path / "export"
    train(fine_tune(tmp_path / "out", texts, model=str(base), export=str(export), steps=1))
    found, before = (json.loads((place / "config.json").read_text()) for place in (export, base))
    assert {key: found[key] for key in found if key not in ("dtype", "transformers_version")} == {
        key: before[key] for key in before if key not in ("dtype", "transformers_version")
    }
    assert before["use_cache"]
    generation = json.loads((export / "generation_config.json").read_text())
    assert (generation["max_new_tokens"], generation["temperature"], generation["eos_token_id"]) == (77, 0.6, [1, 2])
    assert main(["export", str(tmp_path / "out" / "step-00000001"), str(tmp_path / "later")]) == 0
    assert json.loads((tmp_path / "later" / "config.json").read_text())["use_cache"]
    assert json.loads((tmp_path / "later" / "generation_config.json").read_text())["max_new_tokens"] == 77


@pytest.mark.parametrize("where", ["base", "base/tuned", ".", "link", "out"])
def test_an_export_that_would_overwrite_the_base_model_or_the_run_is_refused(
    tmp_path: Path, folder: Path, texts: Path, where: str
) -> None:
    base = shutil.copytree(folder, tmp_path / "base")
    (tmp_path / "link").symlink_to(base)
    held = {path.name: path.read_bytes() for path in base.iterdir()}
    config = fine_tune(tmp_path / "out", texts, model=str(base), export=str(tmp_path / where), steps=1)
    with pytest.raises(InputError, match=r"--export .* would overwrite what --(model|output) .* Choose another folder"):
        train(config)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == held


def test_an_export_into_what_is_no_folder_is_refused_before_the_first_step(
    tmp_path: Path, folder: Path, texts: Path
) -> None:
    (tmp_path / "file").touch()
    for where in ("file", "file/in/it"):
        config = fine_tune(tmp_path / "out", texts, model=str(folder), export=str(tmp_path / where), steps=1)
        with pytest.raises(InputError, match=r"--export .* is not a folder"):
            train(config)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_names_the_last_checkpoint(tmp_path: Path, folder: Path, texts: Path) -> None:
    config = fine_tune(tmp_path / "out", texts, model=str(folder), export="/proc/nowhere", steps=1)
    with pytest.raises(DiskError, match=r"exporting to /proc/nowhere failed.* The last checkpoint is .*step-00000001"):
        train(config)
