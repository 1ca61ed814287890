"""Checkpoints of models on a GPU: every tier, in the foreground and in the background, and from GPU to CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.checkpoint.jobs import assert_same, whole

pytestmark = pytest.mark.gpu


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build(tier: str, seed: int, device: str = "cuda", precision: str = "bf16", **plan: Any) -> Any:
    torch.manual_seed(seed)
    model = Blocks().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return unbounded.shard(
        model, optimizer, {"precision": precision, "weights": tier, "optimizer": tier, "gradients": "host", **plan}
    )


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for index in range(first, last):
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(index)).cuda()
        noise = torch.rand((), device="cuda")  # the GPU's random state matters
        loss = (model(x).float() * (1 + noise)).square().mean()
        optimizer.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("background", [False, True], ids=["now", "background"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_training_on_a_gpu_goes_on_bit_for_bit(tmp_path: Path, tier: str, precision: str, background: bool) -> None:
    model, optimizer = build(tier, 1, precision=precision)
    train(model, optimizer, 0, 2)
    handle = unbounded.save(tmp_path / "c", model, optimizer, wait=not background)
    expected = train(model, optimizer, 2, 5)
    handle.wait()
    model, optimizer = build(tier, 2, precision=precision)
    train(model, optimizer, 7, 8)
    unbounded.load(tmp_path / "c", model, optimizer)
    assert train(model, optimizer, 2, 5) == expected


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_states_pass_between_the_tiers_of_a_gpu_bit_for_bit(tmp_path: Path, tier: str) -> None:
    model, optimizer = build("device", 1)
    train(model, optimizer, 0, 2)
    unbounded.save(tmp_path / "gpu", model, optimizer)
    model, optimizer = build(tier, 2)
    unbounded.load(tmp_path / "gpu", model, optimizer)
    unbounded.save(tmp_path / "again", model, optimizer)
    assert_same(whole(tmp_path / "again"), whole(tmp_path / "gpu"))


CHILD = """
import sys, torch, unbounded
from tests.checkpoint import test_gpu as case

assert not torch.cuda.is_available()
model, optimizer = case.build("host", 2, "cpu")
unbounded.load(sys.argv[1], model, optimizer)
unbounded.save(sys.argv[2], model, optimizer)
"""


def test_states_pass_from_a_gpu_to_a_machine_without_one_and_back(tmp_path: Path) -> None:
    model, optimizer = build("device", 1)
    train(model, optimizer, 0, 2)
    unbounded.save(tmp_path / "gpu", model, optimizer)
    expected = train(model, optimizer, 2, 4)
    random = torch.cuda.get_rng_state()
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    command = [sys.executable, "-c", CHILD, str(tmp_path / "gpu"), str(tmp_path / "cpu")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert_same(whole(tmp_path / "cpu"), whole(tmp_path / "gpu"))
    other, optimizer = build("host", 2)
    unbounded.load(tmp_path / "gpu", other, optimizer)  # for the GPU's random state, which the other did not use
    unbounded.load(tmp_path / "cpu", other, optimizer)
    resumed = train(other, optimizer, 2, 4)
    assert resumed == pytest.approx(expected, rel=1e-2)  # host and device round differently
    assert torch.equal(torch.cuda.get_rng_state(), random)
