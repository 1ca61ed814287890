"""Several documents in one sequence, kept apart: each has its own losses. And sequences that grow or overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.train.corpora import make_corpus, save_model, save_tokenizer, write_jsonl, write_texts
from tests.train.jobs import losses, tiny, train
from unbounded.errors import InputError
from unbounded.observe.metrics import read_metrics
from unbounded.train.data.corpus import Stream
from unbounded.train.data.loader import Loader, stack
from unbounded.train.data.tokenizer import IGNORED
from unbounded.train.gpt import GPT, GPTShape
from unbounded.train.options.config import Config
from unbounded.train.step.loop import count_positions
from unbounded.train.step.objective import MicroBatch, summed_loss


def make_model(kind: str, folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt":
        return GPT(GPTShape(layers=2, width=32, heads=2, context=64, vocabulary=320))
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(save_model(folder), dtype=torch.float32)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_packed_documents_have_the_losses_and_gradients_of_each_by_itself(tmp_path: Path, kind: str) -> None:
    texts = [f"{i} " + "ab" * (3 + i) for i in range(12)]
    corpus = make_corpus(
        write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts]), sequence_length=64, separated=True
    )
    batch = stack([stream_of(corpus).next()])
    model = make_model(kind, tmp_path / "model")
    packed = summed_loss(model, to_part(batch))
    packed_gradients = torch.autograd.grad(packed, list(model.parameters()))
    alone = torch.zeros(())
    (row,), (targets,), (starts,) = batch.inputs, batch.targets, batch.starts
    begins = [i for i in range(len(row)) if starts[i] or i == 0]
    assert len(begins) > 2
    for begin, end in zip(begins, [*begins[1:], len(row)], strict=True):
        part = MicroBatch(torch.from_numpy(row[None, begin:end]), torch.from_numpy(targets[None, begin:end]))
        assert end == len(row) or targets[end - 1] == IGNORED  # nothing predicts the next document's first token
        alone = alone + summed_loss(model, part)
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(packed_gradients, torch.autograd.grad(alone, list(model.parameters())))
    joined = summed_loss(model, replace(to_part(batch), positions=None))
    assert abs(float(joined - packed)) > 1e-3  # across documents it is another loss


def stream_of(corpus: object) -> Stream:
    return Stream(corpus, 0)  # type: ignore[arg-type]


def to_part(batch: object) -> MicroBatch:
    positions = torch.from_numpy(count_positions(batch.starts))  # type: ignore[attr-defined]
    return MicroBatch(torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets), positions)  # type: ignore[attr-defined]


def test_positions_begin_anew_with_rows_and_documents() -> None:
    starts = np.array([[0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0]], bool)
    assert count_positions(starts).tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]


def test_a_run_on_separated_documents_learns_and_its_evaluation_is_separated_too(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "a.jsonl", 300)
    config = tiny(tmp_path / "out", data, steps=8, packing="separated", eval_fraction=0.1, eval_every=8)
    assert train(config).step == 8
    found = losses(tmp_path / "out")
    assert found[-1] < found[0] - 0.5
    assert read_metrics(tmp_path / "out" / "metrics.jsonl", "eval")[0]["loss"] < found[0]


def test_a_model_that_cannot_keep_documents_apart_is_refused(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    folder = tmp_path / "mamba"
    MambaForCausalLM(
        MambaConfig(vocab_size=320, hidden_size=16, state_size=4, num_hidden_layers=1, intermediate_size=32)
    ).save_pretrained(folder)
    save_tokenizer(folder)
    data = write_texts(tmp_path / "a.jsonl", 50)
    config = Config(model=str(folder), data=(str(data),), output=str(tmp_path / "out"), sequence_length=16)
    config = replace(config, batch_tokens=32, steps=1, device="cpu", packing="separated", eval_every=0)
    with pytest.raises(InputError, match=r"--packing separated does not work with this model.* Use --packing joined\."):
        train(config)


def test_sequences_slide_up_to_their_full_length_over_the_same_tokens(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "a.jsonl", 300)
    config = tiny(tmp_path / "out", data, steps=6, sequence_start=8, sequence_steps=4)
    train(config)
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["sequence_length"] for line in lines] == [8, 8, 16, 16, 32, 32]
    assert len({line["num_targets"] for line in lines}) == 1
    train(tiny(tmp_path / "full", data, steps=6))
    assert losses(tmp_path / "full")[0] == pytest.approx(losses(tmp_path / "out")[0], abs=0.1)  # of equal weights
    with pytest.raises(InputError, match="cannot be doubled to reach --sequence-length 32"):
        train(replace(config, sequence_start=12))


@pytest.mark.parametrize("resumed_after", [0, 1, 3, 5])
def test_overlapping_sequences_repeat_context_and_ask_for_every_token_once(tmp_path: Path, resumed_after: int) -> None:
    texts = ["".join(chr(97 + (i + j) % 26) for j in range(40 + 7 * i)) for i in range(3)]
    corpus = make_corpus(write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts]), sequence_length=16, overlap=5)
    loader = Loader(corpus, rows=1)
    batches = [loader.next() for _ in range(8)]
    loader.close()
    asked = [token for batch in batches for token in batch.targets[0].tolist() if token != IGNORED]
    plain = make_corpus(tmp_path / "a.jsonl", sequence_length=16)
    stream = stream_of(plain)
    expected = [token for _ in range(12) for token in stream.next().targets.tolist()]
    assert asked == expected[: len(asked)]
    repeated = [int((batch.targets[0] == IGNORED).sum()) for batch in batches]
    assert max(repeated) == 5
    for before, after, count in zip(batches, batches[1:], repeated[1:], strict=False):
        assert after.inputs[0][: count + 1].tolist() == [*before.inputs[0][16 - count :], before.targets[0][-1]]
    resumed = Loader(corpus, rows=1)
    if resumed_after:
        resumed.load_state_dict(batches[resumed_after - 1].state)
    assert resumed.next().inputs.tolist() == batches[resumed_after].inputs.tolist()
    resumed.close()
