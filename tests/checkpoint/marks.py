"""Checkpoints with a number in every element, so that a mix of two saves shows, and processes that write them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unbounded
from tests import ranks as pool
from tests.checkpoint.jobs import whole
from unbounded.checkpoint.format import folder as folders
from unbounded.checkpoint.format.parsing import read_manifest


class Marked(nn.Module):
    """Every weight of one save has the same value, so a mix of two saves shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))


def marked(number: int, plan: Any = "auto") -> Any:
    """A model full of `number`, and its optimizer."""
    model = Marked()
    model, optimizer = unbounded.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    mark(model, number)
    return model, optimizer


def mark(model: nn.Module, number: int) -> None:
    with unbounded.full_params(model):
        for parameter in model.parameters():
            parameter.fill_(number)


def read_mark(folder: Path) -> int:
    """The number that everything in the checkpoint agrees on; every byte is verified."""
    manifest = read_manifest(folders.find(folder))
    values = {float(v) for tensor in whole(folders.find(folder)).values() for v in tensor.unique()}
    number = manifest.values["extra"]["0"]["number"]
    assert values == {float(number)}
    return int(number)


def start(target: Callable[..., None], *arguments: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(pool.PRELOAD))
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process
