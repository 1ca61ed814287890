"""`unbounded train --objective masked`: what is hidden, its loss, and a tiny version of the BERT-Large recipe."""

from __future__ import annotations

import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.corpora import make_corpus, sentences
from tests.train.jobs import losses, train, train_on_rank
from unbounded.cli import main
from unbounded.train.data.loader import Loader
from unbounded.train.data.sample import Masking
from unbounded.train.data.tokenizer import IGNORED, FolderTokenizer
from unbounded.train.options.config import Config

PRELOAD_IN_RANKS = ["transformers.models.bert.modeling_bert", "unbounded.train.training"]
EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--vocabulary", "200"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "some.txt"
    path.write_text("\n".join(sentences(600)))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """The folder that the example makes, but tiny."""
    made = tmp_path_factory.mktemp("bert")
    arguments, sys.argv = sys.argv, ["bert_folder.py", str(made), str(texts), *SMALL]
    try:
        runpy.run_path(str(EXAMPLES / "bert_folder.py"))
    finally:
        sys.argv = arguments
    return made


def masked_corpus(texts: Path, folder: Path, **options: Any) -> Any:
    tokenizer = FolderTokenizer(folder)
    special = tuple(tokenizer.inner.all_special_ids)
    masking = Masking(tokenizer.inner.mask_token_id, special, tokenizer.vocabulary_size, 0.15)
    return make_corpus(texts, tokenizer=tokenizer, masking=masking, **options)


def batches(corpus: Any, count: int, **options: Any) -> list[Any]:
    loader = Loader(corpus, **options)
    found = [loader.next() for _ in range(count)]
    loader.close()
    return found


def test_hidden_tokens_are_asked_for_and_nothing_else_is_changed(texts: Path, folder: Path) -> None:
    corpus = masked_corpus(texts, folder, sequence_length=64)
    (found,) = batches(corpus, 1, rows=64)
    (plain,) = batches(make_corpus(texts, tokenizer=corpus.tokenizer, sequence_length=64), 1, rows=64)
    asked, special = found.targets != IGNORED, np.isin(plain.inputs, corpus.masking.special)
    assert (found.inputs == plain.inputs)[~asked].all()
    assert (found.targets == plain.inputs)[asked].all()
    assert not (asked & special).any()
    assert special.any()
    assert found.num_targets == asked.sum() == sum(max(round(0.15 * (~row).sum()), 1) for row in special)
    shares = np.mean(found.inputs[asked] == corpus.masking.mask), np.mean((found.inputs == plain.inputs)[asked])
    assert shares == pytest.approx((0.8, 0.1), abs=0.06)


def test_what_is_hidden_depends_on_the_seed_and_the_sample_alone(texts: Path, folder: Path) -> None:
    corpus = masked_corpus(texts, folder)
    alone = np.concatenate([batch.inputs for batch in batches(corpus, 3, rows=8)])
    for world_size, rows in ((1, 24), (2, 12)):
        ranks = [batches(corpus, 24 // rows, rows=rows, rank=r, num_ranks=world_size) for r in range(world_size)]
        mine = [np.concatenate([batch.inputs for batch in rank]) for rank in ranks]
        assert all((mine[row % world_size][row // world_size] == alone[row]).all() for row in range(24))
    (other,) = batches(masked_corpus(texts, folder, seed=1), 1, rows=8)
    assert (other.inputs != alone[:8]).any()


def settings(output: Path, texts: Path, **given: Any) -> Config:
    common = {"sequence_length": 32, "batch_tokens": 256, "steps": 5, "lr": 1e-2, "eval_fraction": 0.0, "device": "cpu"}
    placed = {"plan": (("weights", "host"), ("optimizer", "disk")), "objective": "masked"}
    return Config(output=str(output), data=(str(texts),), **common | placed | given)


def test_losses_are_transformers_own_on_any_number_of_ranks(
    tmp_path: Path, texts: Path, folder: Path, ranks: Callable[..., list[Any]]
) -> None:
    from transformers import BertConfig, BertForMaskedLM

    still = BertConfig.from_pretrained(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    model = BertForMaskedLM(still)
    shutil.copytree(folder, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    alone, together = (settings(tmp_path / name, texts, model=str(tmp_path / "model")) for name in ("1", "2"))
    train(alone)
    ranks(2, train_on_rank, together)
    found = {world_size: losses(tmp_path / str(world_size)) for world_size in (1, 2)}
    (batch,) = batches(masked_corpus(texts, tmp_path / "model"), 1, rows=8)
    own = model(torch.from_numpy(batch.inputs), labels=torch.from_numpy(batch.targets)).loss.item()
    assert found[1][0] == pytest.approx(own, rel=1e-5)
    assert found[2] == pytest.approx(found[1], rel=2e-5)
    assert found[1][-1] < found[1][0] - 0.3


def test_the_recipe_runs_whole_with_dropout_and_resumes_where_it_was(
    tmp_path: Path, texts: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForMaskedLM

    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "models/bert-large")
    Path("data").mkdir()
    shutil.copy(texts, "data/some.txt")
    small = "--batch-tokens 1024 --steps 4 --warmup 1 --lr 1e-2 --final-lr 1e-3 --device cpu --eval-tokens 2048"
    small += " --checkpoint-every 2"
    assert main(["train", str(EXAMPLES / "bert-128.toml"), *small.split()]) == 0
    assert main(["train", str(EXAMPLES / "bert-512.toml"), *small.split()]) == 0
    whole = losses(Path("runs/bert-512"))
    assert whole[-1] < losses(Path("runs/bert-128"))[0] - 0.3
    assert AutoModelForMaskedLM.from_pretrained("models/bert-512").config.hidden_dropout_prob == 0.1
    shutil.rmtree("runs/bert-512/step-00000004")
    assert main(["train", str(EXAMPLES / "bert-512.toml"), *small.split()]) == 0
    assert losses(Path("runs/bert-512")) == whole
