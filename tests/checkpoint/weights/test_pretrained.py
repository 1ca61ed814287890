"""Hugging Face folders both ways: streamed in, exported, and the same logits on both sides."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.checkpoint.jobs import assert_same
from tests.process import Peak

PRELOAD_IN_RANKS = ["transformers", "transformers.models.llama.modeling_llama", "unbounded.weights.pretrained"]
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(kind: str) -> Any:
    import transformers as hf

    if kind == "gpt2":
        return hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    if kind == "mixtral":
        return hf.MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4)
    return hf.LlamaConfig(**TINY, num_key_value_heads=2, tie_word_embeddings=kind == "tied")


def causal(kind: str, *, meta: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    import transformers as hf

    with torch.device("meta" if meta else "cpu"):
        return hf.AutoModelForCausalLM.from_config(config_of(kind), dtype=dtype)


TOKENS = torch.arange(16).reshape(2, 8)


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        return model(TOKENS).logits.clone()


def there_and_back(rank: int, world_size: int, folder: str, kind: str, stage: int) -> tuple[bool, bool, list[str]]:
    """Saved by transformers, streamed in, exported, read by transformers."""
    torch.manual_seed(1)
    reference = causal(kind)
    if rank == 0:
        reference.save_pretrained(f"{folder}/in", max_shard_size="20KB")
    if world_size > 1:
        torch.distributed.barrier()
    torch.manual_seed(2)
    model = causal(kind, meta=True)
    model, optimizer = unbounded.shard(
        model, torch.optim.AdamW(model.parameters()), {"stage": stage}, weights=f"{folder}/in"
    )
    unbounded.export(f"{folder}/out", model, max_shard_bytes=30_000)
    unbounded.save(f"{folder}/checkpoint", model, optimizer)
    same_in = torch.equal(logits(model), logits(reference))
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(f"{folder}/out")
    names = sorted(path.name for path in Path(f"{folder}/out").iterdir())
    return same_in, torch.equal(logits(again), logits(reference)), names


@pytest.mark.parametrize("kind", ["llama", "tied", "mixtral", "gpt2"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 3), (2, 0)])
def test_weights_stream_in_and_out_with_the_same_logits(
    ranks: Any, tmp_path: Path, kind: str, world_size: int, stage: int
) -> None:
    if (world_size, stage) != (2, 3) and kind not in ("tied", "mixtral"):
        pytest.skip("one layout is enough for the others")
    for same_in, same_out, names in ranks(world_size, there_and_back, str(tmp_path), kind, stage):
        assert same_in
        assert same_out
        assert "config.json" in names
        assert "model.safetensors.index.json" in names
        assert not [name for name in names if name.startswith(".")]
    places = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in places) == (kind in ("llama", "mixtral"))  # tied weights are written once


def test_a_checkpoint_is_exported_without_the_model(ranks: Any, tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM

    from unbounded.cli import main

    ranks(2, there_and_back, str(tmp_path), "tied", 3)
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "offline"), "--max-shard", "30KB"]) == 0
    live = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    offline = AutoModelForCausalLM.from_pretrained(tmp_path / "offline")
    assert_same(dict(live.state_dict()), dict(offline.state_dict()))
    (tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json", "old.safetensors"):
        (tmp_path / "base" / name).write_text("{}")
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "o2"), "--config", str(tmp_path / "base")]) == 0
    assert sorted(p.name for p in (tmp_path / "o2").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    capsys.readouterr()
    (tmp_path / "o2" / "config.json").write_text('{"mine": 1}')
    shutil.copytree(tmp_path / "offline", tmp_path / "o2" / "another")
    assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / "o2"), "--config", str(tmp_path / "o2")]) == 0
    assert (tmp_path / "o2" / "config.json").read_text() == '{"mine": 1}'
    assert "in 1 file(s)" in capsys.readouterr().out
    for out, config in (("checkpoint", "base"), ("checkpoint/a/b", "base"), ("o3", "nowhere")):
        assert main(["export", str(tmp_path / "checkpoint"), str(tmp_path / out), "--config", str(tmp_path / config)])
    assert not (tmp_path / "o3").exists()
    assert not (tmp_path / "checkpoint" / "a").exists()
    assert capsys.readouterr().err.count("checkpoint is a checkpoint, which holds nothing else") == 2
    assert main(["inspect", str(tmp_path / "checkpoint"), "--verify", "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown
    assert "exp_avg_sq" in shown
    assert "verified: every byte" in shown


@contextmanager
def reports() -> Iterator[list[str]]:
    """What is reported inside."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unbounded").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("unbounded").removeHandler(handler)


def other_head(rank: int, world_size: int, folder: str, direction: str) -> tuple[bool, list[str]]:
    """A base model's weights for a model with a head, and the other way round."""
    import transformers as hf

    torch.manual_seed(1)
    config = config_of("llama")
    headed = hf.AutoModelForCausalLM.from_config(config)
    source = headed.model if direction == "base to head" else headed
    if rank == 0:
        source.save_pretrained(folder)
    make = hf.AutoModelForCausalLM if direction == "base to head" else hf.AutoModel
    with torch.device("meta"):
        model = make.from_config(config)
    if world_size > 1:
        torch.distributed.barrier()
    with reports() as messages:
        model, _ = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=folder)
    inner = model.model if direction == "base to head" else model
    expected, state = headed.model.state_dict(), dict(model.state_dict())
    prefix = "model." if direction == "base to head" else ""
    same = all(torch.equal(state[prefix + name], value) for name, value in expected.items())
    if direction == "base to head":
        head = state["lm_head.weight"]
        same = same and bool(head.abs().sum() > 0) and bool(head.isfinite().all())
    assert torch.isfinite(inner.rotary_emb.inv_freq).all()
    same = same and torch.equal(inner.rotary_emb.inv_freq, headed.model.rotary_emb.inv_freq)
    return same, messages


@pytest.mark.parametrize("direction", ["base to head", "head to base"])
def test_a_base_models_prefix_may_differ_and_keys_are_reported(ranks: Any, tmp_path: Path, direction: str) -> None:
    results = ranks(2, other_head, str(tmp_path), direction)
    assert all(same for same, _ in results)
    assert results[1][1] == []  # reported once, by the first rank
    (message,) = results[0][1]
    assert "lm_head.weight" in message
    assert ("newly initialised" if direction == "base to head" else "does not use") in message


def cast(rank: int, world_size: int, folder: str) -> tuple[bool, bool]:
    torch.manual_seed(1)
    reference = causal("llama")
    if rank == 0:
        reference.save_pretrained(folder)
    if world_size > 1:
        torch.distributed.barrier()
    values = reference.state_dict()
    model = causal("llama", meta=True)
    model, optimizer = unbounded.shard(
        model, torch.optim.AdamW(model.parameters()), {"precision": "bf16"}, weights=folder
    )
    low = {name: torch.equal(value, values[name].bfloat16()) for name, value in model.state_dict().items()}
    unbounded.save(f"{folder}-c", model, optimizer)
    model, optimizer = unbounded.shard(
        (again := causal("llama")), torch.optim.AdamW(again.parameters()), {"precision": "fp32"}
    )
    unbounded.load(f"{folder}-c", model, optimizer)
    whole = {name: torch.equal(value, values[name]) for name, value in model.state_dict().items()}
    return all(low.values()), all(whole.values())


def test_a_dtype_is_cast_and_the_master_keeps_every_bit_of_the_file(ranks: Any, tmp_path: Path) -> None:
    for low, whole in ranks(2, cast, str(tmp_path / "w")):
        assert low
        assert whole


class Plain(nn.Module):
    """Not a Hugging Face model, with a buffer in the file and one that is recomputed."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)


def test_a_plain_model_takes_its_buffers_from_the_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    reference = Plain()
    reference.norm.running_mean.fill_(3.0)
    save_file(reference.state_dict(), tmp_path / "weights.safetensors")
    with torch.device("meta"):
        model = Plain()
    model, _ = unbounded.shard(model, weights=tmp_path)
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))


def test_a_parameter_that_heeds_no_device_streams_in_too(tmp_path: Path) -> None:
    """Wav2Vec2 makes its mask with torch.Tensor(...), also under torch.device("meta")."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    convolutions = {"conv_dim": (8,), "conv_kernel": (3,), "conv_stride": (2,), "num_conv_pos_embeddings": 4}
    config = Wav2Vec2Config(vocab_size=8, num_conv_pos_embedding_groups=2, **sizes, **convolutions)
    reference = Wav2Vec2ForCTC(config)
    reference.save_pretrained(tmp_path)
    model = unbounded.hf.from_pretrained(tmp_path, Wav2Vec2ForCTC)
    assert all(parameter.is_meta for parameter in model.parameters())
    model, _ = unbounded.shard(model)
    assert_same(dict(model.state_dict()), dict(reference.state_dict()))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_a_buffer_of_any_dtype_that_safetensors_has_is_exported(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file

    model = Plain()
    model.register_buffer("table", torch.tensor([1, 2], dtype=dtype))
    unbounded.export(tmp_path, unbounded.shard(model)[0])
    assert_same(load_file(tmp_path / "model.safetensors"), dict(model.state_dict()))


def test_weights_that_do_not_fit_are_an_error_that_lists_them(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(Plain(6).state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(unbounded.CheckpointError, match=r"layers\.0\.weight has the shape \[8, 8\], but \[6, 6"):
        unbounded.shard(model, weights=tmp_path)


def test_weights_that_this_user_may_not_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read everything
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(unbounded.CheckpointError, match=r"model\.safetensors is not readable by this user"):
        unbounded.shard(model, weights=tmp_path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, None], ids=str)
def test_a_quantized_model_is_refused_and_not_trained_on_its_codes(tmp_path: Path, dtype: torch.dtype | None) -> None:
    from safetensors.torch import save_file

    held = Plain().state_dict()
    if dtype is None:
        (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    else:
        held |= {"layers.0.weight": held["layers.0.weight"].to(dtype), "layers.0.weight_scale": torch.ones(1)}
    save_file(held, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(unbounded.CheckpointError, match=r"holds a quantized model .*dequantize"):
        unbounded.shard(model, weights=tmp_path)


@pytest.mark.parametrize("difference", [0.0, 1e-3])
def test_several_values_of_one_parameter_are_refused_unless_they_are_equal(
    tmp_path: Path, difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr("unbounded.weights.safetensors_reader._PIECE_NUMEL", 20)  # two rows
    held = Plain().state_dict()
    held["layers.1.weight"] = held["layers.0.weight"].double()
    held["layers.1.weight"][-1, -1] += difference
    save_file(held, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Plain()
        model.layers[1].weight = model.layers[0].weight
    if not difference:
        unbounded.shard(model, weights=tmp_path)
        return
    with pytest.raises(unbounded.CheckpointError, match=r"different values of layers\.0\.weight and layers\.1\.weight"):
        unbounded.shard(model, weights=tmp_path)


def test_an_index_that_places_a_tensor_in_another_file_is_told(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    held = Plain().state_dict()
    save_file(held, tmp_path / "a.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "b.safetensors")
    places = dict.fromkeys(held, "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(unbounded.CheckpointError, match=r"b\.safetensors has no layers\.0\.weight"):
        unbounded.shard(model, weights=tmp_path)


def test_a_folder_without_weights_is_a_file_not_found(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for folder, match in ((tmp_path, "has no .safetensors files"), (tmp_path / "none", "does not exist")):
        with torch.device("meta"):
            model = Plain()
        with pytest.raises(FileNotFoundError, match=match):
            unbounded.shard(model, weights=folder)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        unbounded.shard(model, weights=tmp_path)


class Wide(nn.Module):
    """24 units of 16 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(24))


def streamed(rank: int, world_size: int, folder: str) -> None:
    """Streams in and out with everything on disk, each in less memory than half of the model's bytes."""
    from safetensors.torch import save_file

    save_file({f"layers.{i}.weight": torch.full((2048, 2048), float(i)) for i in range(24)}, f"{folder}/w.safetensors")
    with torch.device("meta"):
        model = Wide()
    half = 24 * 2048 * 2048 * 4 // 2
    with Peak() as coming:
        model, _ = unbounded.shard(model, plan={"weights": "disk", "host_bytes": "64MiB"}, weights=folder)
    with Peak() as going:
        unbounded.export(f"{folder}/out", model)
    assert coming.grown_bytes < half
    assert going.grown_bytes < half


def test_streaming_in_and_out_holds_a_few_units_and_not_the_model(ranks: Any, tmp_path: Path) -> None:
    ranks(1, streamed, str(tmp_path))
