"""Checkpoints of parallel jobs load under any other mesh, and each mesh gives full values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import unbounded
from tests.checkpoint.jobs import whole
from tests.parallel import models
from tests.parallel.comparing import MAX_NORM, optimizer_of, train_plain, without_dropout, worst_error
from unbounded.checkpoint.format.data_files import Files
from unbounded.optim import formats

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)


def advance(model: Any, optimizer: Any, family: str, steps: range) -> list[float]:
    """Every rank has the same batches, so that the mesh makes no difference to the result."""
    run = unbounded.pipeline(model) if optimizer.engine.axes.pipeline.size > 1 else lambda **b: model(**b).loss
    losses = []
    for step in steps:
        loss = run(**models.batch(family, step))
        if loss.requires_grad:
            loss.backward()
        optimizer.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def fresh(family: str, plan: dict[str, Any]) -> tuple[Any, Any]:
    model = without_dropout(models.build(family))
    return unbounded.shard(model, optimizer_of(model), plan)


def travel(rank: int, size: int, family: str, plans: list[dict[str, Any]], folder: str) -> Any:
    """Trains a step under each plan, saving after each and loading under the next."""
    reference = without_dropout(models.build(family))
    wanted = train_plain(reference, family, steps=len(plans))[::2]
    losses = []
    for number, plan in enumerate(plans):
        model, optimizer = fresh(family, plan)
        if number:
            assert unbounded.load(f"{folder}/{number - 1}", model, optimizer) == {"number": number - 1}
        losses += advance(model, optimizer, family, range(number, number + 1))
        unbounded.save(f"{folder}/{number}", model, optimizer, number=number)
    unbounded.export(f"{folder}/export", model)
    return losses, wanted, worst_error(model.state_dict(), reference.state_dict()), reference.state_dict()


def resume_factored(rank: int, size: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of a model with tied embeddings on two stages, as they go on and as they are resumed from one of them."""
    jobs = []
    for _ in range(2):
        model = without_dropout(models.build("gpt2", n_layer=2))
        jobs.append(unbounded.shard(model, torch.optim.Adafactor(model.parameters(), lr=0.01), {"pipeline": 2}))
    advance(*jobs[0], "gpt2", range(1))
    unbounded.save(folder, *jobs[0])
    unbounded.load(folder, *jobs[1])
    first, second = (advance(*job, "gpt2", range(1, 3)) for job in jobs)
    return first, second


def test_factored_states_of_tied_embeddings_are_stored_once(ranks: Any, tmp_path: Path) -> None:
    for first, second in ranks(2, resume_factored, str(tmp_path / "checkpoint")):
        assert first == second


def pass_on_ones_own(rank: int, size: int, folder: str) -> list[Any]:
    """What ranks with dropout and seeds of their own get on other meshes."""
    got = []
    for number, plan in enumerate([{}, {"tensor": 2}, {}]):
        model = models.build("gpt2", n_layer=1)
        model, optimizer = unbounded.shard(model, optimizer_of(model), plan)
        place = optimizer.engine.axes.data.rank
        if number:
            got.append(unbounded.load(f"{folder}/{number - 1}", model, optimizer)["position"])
            got.append(int(torch.get_rng_state().sum()))
        else:
            torch.manual_seed(place)
        advance(model, optimizer, "gpt2", range(1))
        unbounded.save(f"{folder}/{number}", model, optimizer, position=10 * number + place)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    model = models.build("gpt2", n_layer=1)
    model, optimizer = unbounded.shard(model, optimizer_of(model), mesh=mesh)
    got += [unbounded.load(f"{folder}/1", model, optimizer)["position"], int(torch.get_rng_state().sum())]
    return got


def test_ranks_of_one_copy_go_on_with_the_same_random_state_and_place_in_the_data(ranks: Any, tmp_path: Path) -> None:
    positions, states, later, states_later, turned, states_turned = zip(
        *ranks(4, pass_on_ones_own, str(tmp_path)), strict=True
    )
    assert positions == (0, 0, 1, 1)
    assert [state == states[0] for state in states] == [True, True, False, False]
    assert states[2] == states[3]
    assert later == (10, 11, 10, 10)  # two had nobody at their place
    assert states_later[0] != states_later[1]
    assert turned == (10, 11, 10, 11)  # the same axes, the tensor axis outermost
    assert [state == states_turned[0] for state in states_turned] == [True, False, True, False]


MESHES: list[dict[str, Any]] = [
    {"tensor": 2, "stage": 3},
    {"tensor": 4, "sequence": True},
    {"pipeline": 2, "tensor": 2, "optimizer": "host"},
    {"pipeline": 4, "optimizer": "disk"},
    {"stage": 2},
    {"tensor": 2, "pipeline": 2, "schedule": "interleaved", "microbatches": 2},
]


@pytest.mark.parametrize("family", ["gpt2"])  # matrices of three sections, tied embeddings
def test_a_checkpoint_goes_from_mesh_to_mesh(ranks: Any, tmp_path: Path, family: str) -> None:
    results = ranks(4, travel, family, MESHES, str(tmp_path))
    for losses, wanted, worst, _ in results:
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert worst[0] < 1e-4, worst
    weights = results[0][3]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for name, value in exported.items():
        assert (value - weights[name]).norm() <= 1e-4 * weights[name].norm() + 1e-6
    assert set(weights) - set(exported) <= {"lm_head.weight"}  # tied to the embedding in GPT-2


# One key head of width 64 on each of two ranks, so that only a bias of keys has a block of 128 that is on both.
WIDE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
}
COMPACT = {"precision": "bf16", "optimizer_format": "compact"}


def pass_on(rank: int, size: int, plans: list[dict[str, Any]], folder: str) -> list[float]:
    """Trains two steps under the first plan. Each other plan loads what the last one saved, and saves it again."""
    losses: list[float] = []
    for number, plan in enumerate(plans):
        model = without_dropout(models.build("llama", **WIDE))
        model, optimizer = unbounded.shard(model, optimizer_of(model), COMPACT | plan)
        if number:
            unbounded.load(f"{folder}/{number - 1}", model, optimizer)
        else:
            losses = advance(model, optimizer, "llama", range(2))
        unbounded.save(f"{folder}/{number}", model, optimizer)
    return losses


def test_compact_states_over_a_tensor_axis_are_those_of_one_rank(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = {"tensor": 2, "weights": "disk", "optimizer": "disk"}
    one, cut = tmp_path / "one", tmp_path / "cut"
    (expected,) = ranks(1, pass_on, [{}], str(one))
    assert (
        ranks(2, pass_on, [tensor, {"stage": 1}, {"tensor": 2}, {}], str(cut))
        == [pytest.approx(expected, rel=1e-3)] * 2
    )
    reads, read = [], Files.read
    monkeypatch.setattr(Files, "read", lambda *place: reads.append(place[1:3]) or read(*place))
    first, second, third, last = (whole(cut / str(number)) for number in range(4))
    num_rows = 2 * WIDE["hidden_size"]  # of each kind of state, half in each of two files
    assert len(reads) < 4 * num_rows, len(reads)
    torn = {name for kind, name in first if kind == "exp_avg" and (f"{kind}_scale", name) not in first}
    assert torn == {f"model.layers.0.self_attn.{name}_proj.bias" for name in "kv"}
    for key, value in second.items():
        if key[1] not in torn or key[0] in ("weight", "remainder"):
            assert torch.equal(first[key].flatten(), value.flatten()), key
            assert torch.equal(third[key].flatten(), value.flatten()), key
            assert torch.equal(last[key].flatten(), value.flatten()), key
    plain = whole(one / "0")
    for kind, name in plain:
        if kind == "exp_avg":
            error = (decoded(second, name) - decoded(plain, name)).norm() / decoded(plain, name).norm()
            assert error < 0.1, (name, error)
    for name in torn:  # encoded in other blocks on the way
        assert (decoded(first, name) - decoded(last, name)).norm() < 0.05 * decoded(first, name).norm(), name


def decoded(states: dict[tuple[str, str], torch.Tensor], name: str) -> torch.Tensor:
    kinds = ("exp_avg", "exp_avg_scale")
    return formats.decode_moment({k: states[k, name].flatten() for k in kinds if (k, name) in states}, "exp_avg")
