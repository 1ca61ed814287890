"""When `unbounded train` compiles blocks without being asked: on GPUs, in long runs, of models known to compile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.train.corpora import save_model
from tests.train.jobs import tiny
from tests.zoo.architectures import ARCHITECTURES
from unbounded.train.job import compiling
from unbounded.train.model import build
from unbounded.train.options.config import Config
from unbounded.train.options.settings import close_length, close_settings


class Machine:
    """A world as the decision sees it: some ranks, of which the last may lack a compiler."""

    def __init__(self, kind: str = "cuda", lacks: bool = False) -> None:
        self.device, self.size, self._lacks = torch.device(kind), 2, lacks

    def collect(self, value: bool) -> list[bool]:
        return [value, value and not self._lacks]


def decide(config: Config, machine: Machine, share: float = 1.0) -> bool:
    """The decision where the run has this many times the least FLOPs."""
    settings = close_length(close_settings(config, kind="cpu", num_ranks=2), config)
    subject: Any = build(settings)
    flops = compiling.LEAST_FLOPS * share * 2 / (settings.batch_tokens * settings.steps)
    counted = SimpleNamespace(model=subject.model, flops_per_token=lambda length: flops)
    return compiling.compiles_by_default(counted, settings, machine)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_has_compilers", lambda: True)


def test_long_runs_on_gpus_compile_unless_the_plan_speaks_of_it(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out", tmp_path)
    assert decide(config, Machine())
    assert not decide(config, Machine(), share=0.9)
    assert not decide(config, Machine("cpu"))
    assert not decide(config, Machine(lacks=True))
    for value, compiles in ((False, False), (True, False), ("auto", True)):  # True: the plan does it
        assert decide(tiny(tmp_path / "out", tmp_path, plan=(("compile", value),)), Machine()) is compiles


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_models_of_transformers_compile_if_they_say_that_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora_rank: int | None
) -> None:
    from transformers import LlamaForCausalLM

    folder = save_model(tmp_path / "model")
    config = Config(
        model=str(folder), data=(str(tmp_path),), sequence_length=32, batch_tokens=256, steps=2, lora_rank=lora_rank
    )
    assert decide(config, Machine())
    monkeypatch.setattr(LlamaForCausalLM, "_can_compile_fullgraph", False)
    assert not decide(config, Machine())


@pytest.mark.parametrize(
    ("name", "compiles"), [("bert", True), ("gpt2", True), ("mixtral", False), ("wav2vec2", False)]
)
def test_experts_and_models_that_say_nothing_stay_plain(name: str, compiles: bool) -> None:
    assert compiling._is_known_to_compile(ARCHITECTURES[name].build()) is compiles
