"""Hugging Face's Trainer with a plan has the plain Trainer's losses, norms, evaluations, checkpoints and exports."""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import unbounded
from tests.integrations.launched import launched
from tests.parallel import models
from tests.ranks import RankError
from unbounded.sharding.running import is_sharded

PRELOAD_IN_RANKS = ["transformers.trainer", "transformers.models.llama.modeling_llama", "unbounded.hf.trainer"]

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TOKENS = torch.arange(8)[None]


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.generation_config.max_new_tokens = 5
    return model


def make_data(number: int = 24) -> list[dict[str, torch.Tensor]]:
    """Rows with some labels to ignore, so that the number of items differs from micro-batch to micro-batch."""
    generator, rows = torch.Generator().manual_seed(1), []
    for index in range(number):
        tokens = torch.randint(0, 48, (10,), generator=generator)
        labels = tokens.clone()
        labels[: index % 5] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def arguments(folder: str, **options: Any) -> Any:
    given = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.8,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    return transformers.TrainingArguments(output_dir=folder, **given)


def history(trainer: Any) -> list[tuple[str, float]]:
    """What was logged and can be compared."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [(key, float(entry[key])) for entry in trainer.state.log_history for key in keys if key in entry]


def build(kind: Any, folder: str, model: Any = None, data: Any = None, **options: Any) -> Any:
    extra = {key: options.pop(key) for key in ("plan", "callbacks", "compute_metrics") if key in options}
    rows = data or make_data()
    args = arguments(folder, **options)
    return kind(model=model or make_model(), args=args, train_dataset=rows, eval_dataset=rows[:6], **extra)


def assert_close(ours: list[tuple[str, float]], plain: list[tuple[str, float]], tolerance: float = 2e-5) -> None:
    assert [key for key, _ in ours] == [key for key, _ in plain]
    assert [value for _, value in ours] == pytest.approx([value for _, value in plain], rel=tolerance, abs=1e-7)


def compare(rank: int, world_size: int, folder: str, tiers: list[str]) -> Any:
    """The plain run, and for each tier ours, ours resumed half way in new objects, and the exported model."""
    with launched(rank, world_size):
        plain = build(transformers.Trainer, f"{folder}/plain")
        plain.train()
        return history(plain), [compare_tier(tier, f"{folder}/{tier}") for tier in tiers]


def compare_tier(tier: str, folder: str) -> Any:
    plan = {"weights": tier, "optimizer": tier, "gradients": tier, "disk_path": folder}
    Path(folder).mkdir(exist_ok=True)
    ours = build(unbounded.hf.Trainer, f"{folder}/ours", plan=plan)
    ours.train()
    ours.save_model(f"{folder}/export")
    resumed = build(unbounded.hf.Trainer, f"{folder}/ours", plan=plan)
    resumed.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-3")
    tokens = make_data(1)[0]["input_ids"][None]
    exported = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/export", dtype="auto")
    live = [float(value) for value in ours.model.eval()(tokens).logits.flatten()[:50]]
    read = [float(value) for value in exported(tokens).logits.flatten()[:50]]
    kept = exported.config.use_cache, exported.generation_config.use_cache, exported.generation_config.max_new_tokens
    return history(ours), history(resumed), live, read, kept


@pytest.mark.parametrize(("world_size", "tiers"), [(1, ["device", "disk"]), (2, ["device", "disk"])])
def test_trainer_logs_resumes_and_exports_as_the_plain_one(
    ranks: Any, tmp_path: Path, world_size: int, tiers: list[str]
) -> None:
    for plain, of_tiers in ranks(world_size, compare, str(tmp_path), tiers):
        for ours, resumed, live, read, kept in of_tiers:
            assert_close(ours, plain)
            assert_close(resumed, ours, tolerance=1e-6)
            assert live == read
            assert kept == (True, make_model().generation_config.use_cache, 5)  # the model's own, not the training's


def train_with_dropout(rank: int, world_size: int, folder: str, dies: bool, resume: bool) -> Any:
    """What is logged, and the weights. One that dies is killed in its second save, before the checkpoint is whole."""
    with launched(rank, world_size):
        model = make_model()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.2
        plan = {"weights": "host", "optimizer": "host", "gradients": "host"}
        trainer = build(unbounded.hf.Trainer, folder, model, plan=plan, save_total_limit=2)
        if dies:
            trainer._save_scaler = kill_in_save
        trainer.train(resume_from_checkpoint=resume)
        return history(trainer), trainer.model.state_dict()


def kill_in_save(output_dir: str) -> None:
    if output_dir.endswith("checkpoint-6"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_is_killed_while_it_saves_resumes_as_if_it_had_not_been(ranks: Any, tmp_path: Path) -> None:
    whole = ranks(2, train_with_dropout, f"{tmp_path}/whole", False, False)
    with pytest.raises(RankError, match="exit code -9"):
        ranks(2, train_with_dropout, f"{tmp_path}/killed", True, False)
    assert (tmp_path / "killed" / "checkpoint-6" / "unbounded").is_dir()
    resumed = ranks(2, train_with_dropout, f"{tmp_path}/killed", False, True)
    for (log, weights), (its_log, its_weights) in zip(whole, resumed, strict=True):
        assert its_log == log
        assert all(torch.equal(weights[name], value) for name, value in its_weights.items())
    for step in (3, 6):
        (tmp_path / "killed" / f"checkpoint-{step}" / "trainer_state.json").write_text('{"epoch": 1')
    with launched(0, 1):
        trainer = build(unbounded.hf.Trainer, f"{tmp_path}/killed")
        with pytest.raises(unbounded.CheckpointError, match="no whole checkpoint: checkpoint-6 was cut short"):
            trainer.train(resume_from_checkpoint=True)
        with pytest.raises(unbounded.CheckpointError, match="checkpoint-3 was cut short"):
            trainer.train(resume_from_checkpoint=f"{tmp_path}/killed/checkpoint-3")


@pytest.mark.parametrize("flag", ["bf16", "fp16"])
def test_precision_flags_become_the_plans(tmp_path: Path, flag: str) -> None:
    with launched(0, 1):
        plain = build(transformers.Trainer, f"{tmp_path}/plain", **({"bf16": True} if flag == "bf16" else {}))
        plain.train()
        ours = build(unbounded.hf.Trainer, f"{tmp_path}/ours", **{flag: True})
        ours.train()
    assert ours.model.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[flag]
    assert ours.accelerator.optimizer_step_was_skipped is False
    losses = [[value for key, value in history(trainer) if key == "loss"] for trainer in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


class Count(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert kwargs["optimizer"].param_groups[0]["lr"] >= 0
        self.calls.append("step")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append("save")


def test_rotation_the_best_model_callbacks_and_evaluation_before_training(tmp_path: Path) -> None:
    with launched(0, 1):
        counted, folder = Count(), str(tmp_path / "run")
        best = {"load_best_model_at_end": True, "save_total_limit": 1, "eval_steps": 2, "save_steps": 2}
        trainer = build(unbounded.hf.Trainer, folder, callbacks=[counted], learning_rate=0.3, **best)
        before = trainer.evaluate()["eval_loss"]
        plain = build(transformers.Trainer, str(tmp_path / "plain"), learning_rate=0.3, **best)
        assert before == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
        trainer.train()
        plain.train()
        assert counted.calls == ["step", "step", "save"] * 3
        assert trainer.state.best_global_step == plain.state.best_global_step
        kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        assert kept == sorted({"checkpoint-6", f"checkpoint-{trainer.state.best_global_step}"})
        assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)
        assert trainer.predict(make_data(4)).metrics["test_loss"] > 0
        trainer.train()  # once more, with the same optimizer
        again = build(unbounded.hf.Trainer, str(tmp_path / "second"), trainer.model, max_steps=2)
        plain_again = build(
            transformers.Trainer, str(tmp_path / "second_plain"), copy.deepcopy(trainer.model), max_steps=2
        )
        again.train()  # another trainer makes another optimizer
        plain_again.train()
        assert_close(history(again), history(plain_again))


def test_a_checkpoint_of_the_plain_trainer_is_taken_over(tmp_path: Path) -> None:
    with launched(0, 1):
        plain = build(transformers.Trainer, str(tmp_path))
        plain.train()
        ours = build(unbounded.hf.Trainer, str(tmp_path))
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert_close(history(ours), history(plain))
        make_model().save_pretrained(tmp_path / "model")
        streamed = unbounded.hf.from_pretrained(tmp_path / "model", transformers.LlamaForCausalLM)
        ours = build(unbounded.hf.Trainer, str(tmp_path), streamed)
        ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert_close(history(ours), history(plain))
        ours = build(unbounded.hf.Trainer, str(tmp_path))
        ours.evaluate()
        with pytest.raises(unbounded.StateError, match=r"saved by the plain Trainer.*already happened"):
            ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def generate(rank: int, world_size: int, folder: str) -> Any:
    """predict_with_generate over ranks whose answers have different lengths."""
    with launched(rank, world_size):
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
        generator = torch.Generator().manual_seed(3)
        rows = [
            {"input_ids": (row := torch.randint(2, 32, (6,), generator=generator)), "labels": row[:4]} for _ in range(8)
        ]
        args = transformers.Seq2SeqTrainingArguments(
            folder, use_cpu=True, report_to=[], predict_with_generate=True, generation_max_length=7, max_steps=2,
            per_device_train_batch_size=2, per_device_eval_batch_size=2, disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        found = []
        for kind in (transformers.Seq2SeqTrainer, unbounded.hf.Seq2SeqTrainer):
            torch.manual_seed(0)
            trainer = kind(
                model=transformers.T5ForConditionalGeneration(config), args=args, train_dataset=rows, eval_dataset=rows
            )
            trainer.train()
            output = trainer.predict(rows)
            found.append((output.predictions.tolist(), output.metrics["test_loss"]))
        return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_predict_with_generate_gives_the_plain_answers(ranks: Any, tmp_path: Path, world_size: int) -> None:
    for (plain, plain_loss), (ours, loss) in ranks(world_size, generate, str(tmp_path)):
        assert ours == plain
        assert loss == pytest.approx(plain_loss, rel=1e-5)


def test_adapters_train_save_and_reload(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    found = []
    with launched(0, 1):
        for kind in (transformers.Trainer, unbounded.hf.Trainer):
            model = make_model()
            torch.manual_seed(4)
            config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            trainer = build(kind, str(tmp_path / "run"), peft.get_peft_model(model, config))
            trainer.train()
            found.append(history(trainer))
        trainer.save_model(str(tmp_path / "adapters"))
        tokens = make_data(1)[0]["input_ids"][None]
        live = trainer.model.eval()(tokens).logits
        again = peft.PeftModel.from_pretrained(make_model(), str(tmp_path / "adapters")).eval()
        assert_close(found[1], found[0])
        torch.testing.assert_close(again(tokens).logits, live)
        resumed = build(unbounded.hf.Trainer, str(tmp_path / "run"), peft.get_peft_model(make_model(), config))
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
        assert_close(history(resumed), found[1], tolerance=1e-6)


def train_computed(rank: int, world_size: int, folder: str, method: str) -> Any:
    """The plain run and ours, which saves on its way, with what peft reads of the last save."""
    import peft

    found = []
    with launched(rank, world_size):
        for kind, plan in ((transformers.Trainer, {}), (unbounded.hf.Trainer, {"plan": {"stage": 3}})):
            model = make_model()
            torch.manual_seed(4)
            sizes = {"num_virtual_tokens": 3} if method == "PromptTuning" else {"r": 2, "target_modules": ["q_proj"]}
            config = getattr(peft, f"{method}Config")(task_type="CAUSAL_LM", **sizes)
            place = f"{folder}/{len(found)}"
            trainer = build(kind, place, peft.get_peft_model(model, config), load_best_model_at_end=True, **plan)
            trainer.train()
            trainer.accelerator.wait_for_everyone()
            read = peft.PeftModel.from_pretrained(make_model(), f"{place}/checkpoint-6")
            found.append(
                [*history(trainer), ("read", float(read.eval()(make_data(1)[0]["input_ids"][None]).logits.sum()))]
            )
    return found


@pytest.mark.parametrize(("world_size", "method"), [(1, "PromptTuning"), (2, "PromptTuning"), (1, "Shira")])
def test_what_peft_computes_for_its_files_is_saved_on_the_way(
    ranks: Any, tmp_path: Path, world_size: int, method: str
) -> None:
    pytest.importorskip("peft")
    for plain, ours in ranks(world_size, train_computed, str(tmp_path), method):
        assert_close(ours, plain)


class OwnOptimizer(transformers.Trainer):
    """Makes its optimizer and writes its files in its own way."""

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), self.args.learning_rate, momentum=0.9)

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        if self.args.should_save:
            write_head(self.model, output_dir)


class OwnFolder(OwnOptimizer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        if self.args.should_save:
            write_head(self.model, output_dir)


def write_head(model: Any, folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_model(model.lm_head, f"{folder}/head.safetensors")


def train_own_ways(rank: int, world_size: int, folder: str) -> Any:
    """The plain run, and ours: of such classes, and of a subclass of ours. Each with the head that it saved last."""
    own = {name: vars(OwnOptimizer)[name] for name in ("create_optimizer", "_save")}
    ours = [unbounded.hf.on(OwnOptimizer), unbounded.hf.on(OwnFolder), type("Own", (unbounded.hf.Trainer,), own)]
    found = []
    with launched(rank, world_size):
        for kind in (OwnOptimizer, *ours):
            place = f"{folder}/{len(found)}"
            trainer = build(kind, place, **({} if kind is OwnOptimizer else {"plan": {"stage": 3}}))
            if kind is ours[-1]:
                trainer.evaluate()  # shards with an optimizer that train replaces
            trainer.train()
            trainer.accelerator.wait_for_everyone()
            assert kind is OwnOptimizer or is_sharded(trainer.model)
            head = safetensors.torch.load_file(f"{place}/checkpoint-6/head.safetensors")["weight"]
            found.append([*history(trainer)[-20:], ("head", float(head.square().sum()))])
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_with_an_optimizer_and_files_of_its_own_keeps_to_them(
    ranks: Any, tmp_path: Path, world_size: int
) -> None:
    for plain, *ours in ranks(world_size, train_own_ways, str(tmp_path)):
        for one in ours:
            assert_close(one, plain)


def test_a_model_is_streamed_in_and_its_blocks_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # TrainingArguments changes both
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")
    make_model().save_pretrained(tmp_path / "model")
    model = unbounded.hf.from_pretrained(tmp_path / "model", transformers.AutoModelForCausalLM)
    assert all(parameter.is_meta for parameter in model.parameters())
    with launched(0, 1):
        few = {"max_steps": 3, "save_strategy": "no", "eval_steps": 2}
        compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
        plain = build(transformers.Trainer, str(tmp_path / "a"), **few)
        plan = {"weights": "host", "optimizer": "host"}
        ours = build(unbounded.hf.Trainer, str(tmp_path / "b"), model, plan=plan, **few, **compiled)
        plain.train()
        torch._dynamo.utils.counters.clear()
        ours.train()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert_close(history(ours), history(plain))
    with pytest.raises(unbounded.PlanError, match="no safetensors"):
        unbounded.hf.from_pretrained(tmp_path)
    asked: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda _, **given: asked.update(given) or tmp_path)
    hub = {"revision": "v1", "subfolder": "model", "device_map": "auto", "num_hidden_layers": 1}
    assert len(unbounded.hf.from_pretrained("org/model", transformers.AutoModelForCausalLM, **hub).model.layers) == 1
    assert asked["revision"] == "v1"
    with pytest.raises(unbounded.PlanError, match="was given load_in_4bit, which LlamaConfig does not have"):
        unbounded.hf.from_pretrained(tmp_path / "model", load_in_4bit=True)
    with pytest.raises(unbounded.PlanError, match=r"dtype is .*lm_head.*, but .* have one dtype\. Give one"):
        unbounded.hf.from_pretrained(tmp_path / "model", dtype={"": "bfloat16", "lm_head": "float32"})
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    eager = unbounded.hf.from_pretrained(tmp_path / "model", config=config, attn_implementation="eager")
    assert (eager.config._attn_implementation, config._attn_implementation) == ("eager", None)


CODE = {
    "configuration.py": (
        "from transformers import LlamaConfig\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    ),
    "modeling.py": (
        "from transformers import LlamaForCausalLM\n\nfrom .configuration import OwnConfig\n\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    ),
}


def test_a_model_with_code_of_its_own_is_streamed_in_if_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    for name, text in CODE.items():
        (tmp_path / "model" / name).write_text(text)
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"model_type": "own"}
    config["auto_map"] = {"AutoConfig": "configuration.OwnConfig", "AutoModelForCausalLM": "modeling.OwnModel"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda _, **given: asked.update(given) or tmp_path / "model"
    )
    own = unbounded.hf.from_pretrained("org/model", trust_remote_code=True)
    assert "*.py" in asked["allow_patterns"]
    assert type(own).__name__ == "OwnModel"
    unbounded.shard(own)
    assert torch.equal(own(TOKENS).logits, model.eval()(TOKENS).logits)


@pytest.mark.parametrize(("family", "dtype"), [("deepseek_v3", torch.bfloat16), ("t5", torch.float16)])
def test_what_transformers_keeps_in_fp32_beside_16_bits_streams_in_so(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    model = models.build(family)
    for buffer in model.buffers():
        buffer.uniform_(5.0, 5.01)  # in bf16, the corrections of all experts would be the same
    model.save_pretrained(tmp_path / "fp32")
    kind = type(model)
    loaded = kind.from_pretrained(tmp_path / "fp32", dtype=dtype)
    loaded.save_pretrained(tmp_path / "low")
    settings = json.loads((tmp_path / "low" / "config.json").read_text()) | {"dtype": None}
    (tmp_path / "low" / "config.json").write_text(json.dumps(settings))
    expected = loaded.state_dict()
    assert {value.dtype for value in expected.values()} == {dtype, torch.float32}
    for folder, given in (("fp32", {"dtype": dtype}), ("low", {})):  # which has the dtype of its files
        found = unbounded.shard(unbounded.hf.from_pretrained(tmp_path / folder, kind, **given))[0].state_dict()
        assert all(found[name].dtype == value.dtype for name, value in expected.items())
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_adapters_that_are_loaded_before_there_are_values_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    make_model().save_pretrained(tmp_path / "model")
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"), settings)
    adapted.save_pretrained(tmp_path / "adapters")
    for low in (False, True):
        base = unbounded.hf.from_pretrained(tmp_path / "model")
        with pytest.raises(unbounded.StateError, match=r"would be lost\. Load them after `shard`; .*weights="):
            peft.PeftModel.from_pretrained(base, tmp_path / "adapters", low_cpu_mem_usage=low)
    base = unbounded.hf.from_pretrained(tmp_path / "model")
    model = peft.get_peft_model(base, peft.PeftConfig.from_pretrained(tmp_path / "adapters"))
    unbounded.shard(model, weights=tmp_path / "adapters")
    assert torch.equal(model.eval()(TOKENS).logits, adapted.eval()(TOKENS).logits)
    model.load_state_dict(adapted.state_dict())  # now there is something to keep them in


def test_what_cannot_be_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with launched(0, 1), pytest.raises(unbounded.PlanError, match=r"precision='fp16' and the training arguments bf16"):
        build(unbounded.hf.Trainer, str(tmp_path), plan={"precision": "fp16"}, bf16=True)
    with launched(0, 1), pytest.raises(unbounded.PlanError, match=r"bf16_full_eval=True would cast .* with bf16=True"):
        build(unbounded.hf.Trainer, str(tmp_path), bf16_full_eval=True)
    with launched(0, 1):
        build(unbounded.hf.Trainer, str(tmp_path), bf16_full_eval=True, bf16=True)
        build(unbounded.hf.Trainer, str(tmp_path), make_model(torch.float16), fp16_full_eval=True)
    with launched(0, 1), pytest.raises(unbounded.PlanError, match="tensor=2, but Trainer gives every rank other rows"):
        build(unbounded.hf.Trainer, str(tmp_path), plan={"tensor": 2})
    adapters = tmp_path / "run" / "checkpoint-3" / "adapter_config.json"
    adapters.parent.mkdir(parents=True)
    adapters.write_text("{}")
    with launched(0, 1):
        trainer = build(unbounded.hf.Trainer, str(tmp_path / "run"))
        with pytest.raises(unbounded.CheckpointError, match=r"checkpoint-3 holds adapters .* Choose another folder"):
            trainer.train()
        assert trainer.state.global_step == 0
    for name in [name for name in sys.modules if name.startswith("unbounded.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r'not installed\. Install it: pip install "unbounded\[hf\]"'):
        importlib.import_module("unbounded.hf").Trainer  # noqa: B018
