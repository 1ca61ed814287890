"""Collectives of tensors on a GPU: over gloo the host waits, otherwise the device does, and its events are followed."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from unbounded.ranks.watchdog.device_waits import DeviceWaits
from unbounded.ranks.watchdog.post import Post

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_collective_is_waited_in_from_when_the_stream_reaches_it() -> None:
    waits, post = DeviceWaits(), Post("key", (0, 1))
    spin = 200_000_000  # cycles: a tenth of a second or more
    torch.cuda.synchronize()
    torch.cuda._sleep(spin)  # computation before it
    for name in ("first", "second"):
        post.begin("the gather", name)
        start = torch.cuda.Event()
        start.record()
        torch.cuda._sleep(spin)
        waits.follow(post, 60.0, start)
    assert waits.waits(0) == []  # the stream has not come to it
    seen = []
    while post.ended < 2:
        seen += [(wait.number, wait.what) for wait, _ in waits.waits(0)]
        time.sleep(0.005)
    assert list(dict.fromkeys(seen)) == [(1, "the gather of first"), (2, "the gather of second")]


def train(rank: int, world_size: int, stage: int, out_of_step: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).cuda()
    plan = {"stage": stage, "watchdog_seconds": 2.0}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
    losses = []
    try:
        for step in range(4):
            if out_of_step and step == 2 and rank == 0:
                with torch.no_grad():
                    model(torch.ones(2, 8, device="cuda"))
            loss = model(torch.full((2, 8), float(rank), device="cuda")).square().sum()
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    except unbounded.errors.PeerError as error:
        return str(error)
    return losses


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_on_a_gpu_train_and_say_where_they_differ(ranks: Any, stage: int) -> None:
    assert all(len(losses) == 4 for losses in ranks(2, train, stage, False))
    first, second = ranks(2, train, stage, True)
    assert first == second
    assert "rank 0 is in a forward without gradients; rank 1 is in a forward with gradients" in first
