"""`unbounded train` on a GPU: the job of the README's second command, for a few steps, and compiled blocks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.corpora import save_model, write_texts
from tests.train.jobs import losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_default_job_trains_over_three_tiers_within_its_budgets(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unbounded", "train", "--steps", "3", "--output", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for tier in ("device", "host", "disk"):
        assert re.search(rf"^(memory)?\s+{tier}\s+[1-9]", ended.stdout, re.MULTILINE), ended.stdout


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_long_run_compiles_its_blocks_and_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lora_rank: int | None
) -> None:
    from unbounded.train.job import compiling
    from unbounded.train.options.config import Config
    from unbounded.train.training import run

    monkeypatch.setattr(compiling, "LEAST_FLOPS", 0.0)
    folder = save_model(tmp_path / "model")
    texts = write_texts(tmp_path / "texts.jsonl", 300)

    def train(name: str, steps: int, **more: Any) -> list[float]:
        output = tmp_path / name
        run(
            Config(
                model=str(folder), data=(str(texts),), output=str(output), sequence_length=32, batch_tokens=256,
                steps=steps, warmup=1, lr=1e-3, final_lr=1e-3, precision="fp32", eval_fraction=0.0,
                lora_rank=lora_rank, **more,
            )
        )  # fmt: skip
        return losses(output)

    plain = train("plain", 4, plan=(("compile", False),))
    assert "compile=" not in capsys.readouterr().out
    compiled = train("compiled", 4)
    assert "compile=True" in capsys.readouterr().out
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain))
    train("resumed", 2)
    assert train("resumed", 4) == compiled
