"""TRL's trainers with a plan: fine-tuning with packing, preferences with a reference, generation in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.integrations.launched import launched
from tests.integrations.test_trainer import assert_close, history, make_model
from unbounded.sharding.running import is_sharded

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PRELOAD_IN_RANKS = ["transformers.models.llama.modeling_llama", "unbounded.hf.trainer", "trl.trainer.grpo_trainer"]


def tokenizer() -> Any:
    """The words w0 to w39, and the special tokens that a language model needs."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(40))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def rewards(completions: list[str], **unused: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def build(name: str, wrap: Any, folder: str) -> Any:
    options: dict[str, Any] = {
        "output_dir": f"{folder}/run", "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no",
        "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    common: dict[str, Any] = {"processing_class": tokenizer()}
    if name == "sft":
        rows = [{"text": " ".join(f"w{i * j % 40}" for j in range(3 + i % 7))} for i in range(24)]
        args = trl.SFTConfig(packing=True, max_length=16, **options)
        kind, common = trl.SFTTrainer, {**common, "model": make_model()}
    elif name == "dpo":
        rows = [{"prompt": f"w{i}", "chosen": f" w{i + 2} w1", "rejected": f" w{i + 3} w2"} for i in range(24)]
        args = trl.DPOConfig(max_length=16, **options)
        kind, common = trl.DPOTrainer, {**common, "model": make_model(), "ref_model": make_model()}
    else:
        rows = [{"prompt": f"w{i} w{i + 1}"} for i in range(24)]
        args = trl.GRPOConfig(num_generations=2, max_completion_length=5, beta=0.1, **options)
        model = type(make_model()).from_pretrained(f"{folder}/model")
        kind, common = trl.GRPOTrainer, {**common, "model": model, "reward_funcs": rewards}
    return wrap(kind)(args=args, train_dataset=datasets.Dataset.from_list(rows), **common)


def train(rank: int, world_size: int, name: str, folder: str) -> Any:
    with launched(rank, world_size):
        found = []
        for wrap in (lambda kind: kind, unbounded.hf.on):
            torch.manual_seed(0)
            trainer = build(name, wrap, folder)
            torch.manual_seed(rank)
            trainer.train()
            found.append(history(trainer))
        assert name == "sft" or is_sharded(trainer.ref_model)  # as large as the model, so placed like it
        return found


@pytest.mark.parametrize(("name", "world_size"), [("sft", 1), ("dpo", 2), ("grpo", 1), ("grpo", 2)])
def test_trl_trainers_log_what_they_log_without_us(ranks: Any, tmp_path: Path, name: str, world_size: int) -> None:
    make_model().save_pretrained(tmp_path / "model")
    for plain, ours in ranks(world_size, train, name, str(tmp_path)):
        assert len(plain) == 9
        assert_close(ours, plain, tolerance=1e-4)
