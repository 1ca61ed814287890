"""Checkpoints that are passed on from mesh to mesh: `python -m tests.parallel.axes.chains FIRST LAST`.

Each chain (one per seed) trains a random model of `programs` on a random mesh, saves it, and loads and saves it again
on other meshes, numbers of ranks, stages and tiers. Every checkpoint must hold the bits of the first, and so must every
rank's `state_dict()`.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

import tests.ranks
import unbounded
from tests.checkpoint.chains import run_chains
from tests.checkpoint.jobs import assert_same, whole
from tests.parallel import models
from tests.parallel.programs import Spec, build, draw_model, draw_plan, optimizer_of
from tests.ranks import run_ranks

HOPS = 4


def draw_chain(seed: int, hops: int) -> Spec:
    draw = random.Random(7000 + seed)
    spec = draw_model(draw)
    if draw.random() < 0.4:
        spec["frozen"] = draw.sample(["words", "embed", "wte", ".0.", ".1.", "head", "norm", "bias", ".3."], 2)
    precision = draw.choice(("fp32", "bf16", "bf16"))
    compact = precision == "bf16" and draw.random() < 0.4
    sizes = [draw.choice((1, 2, 2, 3, 4, 4)) for _ in range(hops + 1)]
    return {
        "seed": seed,
        "model": spec,
        "optimizer": "adamw" if compact else draw.choice(("adamw", "groups", "sgd", "momentum", "amsgrad")),
        "common": {"precision": precision, "optimizer_format": "compact" if compact else "exact"},
        "layouts": [(size, _plan(draw, spec, size)) for size in sizes],
    }


def _plan(draw: random.Random, spec: Spec, size: int) -> Spec:
    plan = draw_plan(draw, spec, 1 if size == 3 else size)
    if plan["stage"] == 0:
        plan["stage"] = 1
    return plan


def start(chain: Spec, plan: Spec, *, is_other: bool) -> tuple[Any, Any]:
    """With `is_other`, the model begins with other values than the chain does."""
    model = build(chain["model"], chain["seed"], drops=False)
    for parameter in model.parameters() if is_other else ():
        parameter.data.mul_(-3.0)
    return unbounded.shard(model, optimizer_of(chain["optimizer"], model), {**chain["common"], **plan})


def begin(rank: int, size: int, chain: Spec, plan: Spec, target: str) -> bool:
    """Whether the model was trained and saved; some styles are refused when it first runs."""
    model, optimizer = start(chain, plan, is_other=False)
    run = unbounded.pipeline(model) if optimizer.engine.axes.pipeline.size > 1 else None
    for step in range(2):
        vocabulary = chain["model"].get("vocabulary", models.VOCABULARY)
        generator = torch.Generator().manual_seed(10 * step + optimizer.engine.axes.data.rank)
        tokens = torch.randint(2, vocabulary, (8, 8), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens}
        try:
            loss = run(**batch) if run is not None else model(**batch)["loss"]
        except unbounded.errors.PlanError:
            return False
        if run is None:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    unbounded.save(target, model, optimizer, seed=chain["seed"])
    return True


def pass_on(rank: int, size: int, chain: Spec, plan: Spec, source: str, target: str) -> list[str]:
    """The names of weights that are not those of the checkpoint in this rank's state dict."""
    model, optimizer = start(chain, plan, is_other=True)
    assert unbounded.load(source, model, optimizer) == {"seed": chain["seed"]}
    unbounded.save(target, model, optimizer, seed=chain["seed"])
    saved = {name: value for (kind, name), value in whole(source).items() if kind == "weight"}
    found = model.state_dict()
    return [name for name, value in saved.items() if name in found and not torch.equal(found[name].to(value), value)]


def comparable(states: dict[tuple[str, str], Any], chain: Spec) -> dict[tuple[str, str], Any]:
    """Compact moments that a tensor axis has torn are stored otherwise, so of compact chains only weights count."""
    is_compact = chain["common"]["optimizer_format"] == "compact"
    return {key: v for key, v in states.items() if not is_compact or key[0] in ("weight", "remainder", "buffer")}


def run_chain(seed: int, folder: Path, hops: int = HOPS) -> Spec:
    """Passes one model on; raises if a checkpoint differs from the first. Returns the chain.

    Styles that the first mesh refuses make no chain.
    """
    chain = draw_chain(seed, hops)
    (size, plan), *others = chain["layouts"]
    if not all(run_ranks(size, begin, chain, plan, str(folder / "0"), timeout=150.0)):
        return chain
    first = comparable(whole(folder / "0"), chain)
    for number, (size, plan) in enumerate(others, 1):
        source, target = folder / str(number - 1), folder / str(number)
        wrong = run_ranks(size, pass_on, chain, plan, str(source), str(target), timeout=150.0)
        assert wrong == [[]] * size, wrong
        assert_same(comparable(whole(target), chain), first)
    return chain


if __name__ == "__main__":
    torch.set_num_threads(1)
    tests.ranks.PRELOAD.append("transformers.modeling_utils")
    sys.exit(run_chains(int(sys.argv[1]), int(sys.argv[2]), run_chain))
