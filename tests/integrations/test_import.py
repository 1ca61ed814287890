"""Checkpoints of DeepSpeed and of torch become ours: training goes on as if nothing had happened."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import unbounded
from tests.zero.training import Several
from unbounded.checkpoint.foreign.pickles import MetadataUnpickler, load_tensors
from unbounded.cli import main

SIZE = 2  # ranks that wrote the DeepSpeed checkpoint


class Net(nn.Module):
    """Odd sizes, blocks, a buffer, a frozen parameter and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.full((5,), 1.5), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x) * self.scale.mean())


def make(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained.values() if p.dim() < 2], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: Any, first: int, steps: int = 3) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make()
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3, betas=(0.9, 0.95))
    train(model, optimizer, 0)
    return model, optimizer


def resumed_losses(folder: Path) -> list[float]:
    """Training goes on from our checkpoint, in a model with different first values and options."""
    model = make(seed=2)
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(groups(model), lr=1.0))
    unbounded.load(folder, model, optimizer)
    return train(model, optimizer, 3)


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


class ZeroStageEnum(int, Enum):
    weights = 3


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


def deepspeed_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes that DeepSpeed pickles, under the names in its pickles."""
    homes = {ZeroStageEnum: "deepspeed.runtime.zero.config", LossScaler: "deepspeed.runtime.fp16.loss_scaler"}
    for kind, module in homes.items():
        for depth in range(1, module.count(".") + 2):
            name = ".".join(module.split(".")[:depth])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or types.ModuleType(name))
        setattr(sys.modules[module], kind.__name__, kind)
        monkeypatch.setattr(kind, "__module__", module)


def part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    flat = tensor.detach().flatten()
    length = -(-flat.numel() // SIZE)
    return torch.cat([flat, flat.new_zeros(SIZE * length - flat.numel())])[rank * length : (rank + 1) * length]


def save_deepspeed(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, client: Any = ()) -> None:
    """The files of ZeRO-3: every parameter in SIZE padded parts, flat, in sub-groups of two parameters."""
    names = {p: name for name, p in model.named_parameters()}
    ordered = [list(group["params"]) for group in optimizer.param_groups]
    cuts = [group[i : i + 2] for group in ordered for i in range(0, len(group), 2)]
    inner = folder / "global_step3"
    inner.mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    for rank in range(SIZE):
        state = {
            index: {
                "step": 3,
                **{
                    moment: torch.cat([part(optimizer.state[p][moment], rank) for p in cut])
                    for moment in ("exp_avg", "exp_avg_sq")
                },
            }
            for index, cut in enumerate(cuts)
        }
        options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        counts = [-(-len(group) // 2) for group in ordered]
        indices = iter(range(sum(counts)))
        inside = {
            "state": state,
            "param_groups": [
                {**option, "bias_correction": True, "params": [next(indices) for _ in range(count)]}
                for option, count in zip(options, counts, strict=True)
            ],
        }
        zero = {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": SIZE,
            "optimizer_state_dict": inside,
            "fp32_flat_groups": [torch.cat([part(p, rank) for p in cut]) for cut in cuts],
        }
        module = {name: torch.empty(0) for name in names.values()} | dict(model.named_buffers())
        states = {
            "module": OrderedDict(module),
            "buffer_names": [name for name, _ in model.named_buffers()],
            "param_shapes": [OrderedDict((names[p], p.shape) for p in group) for group in ordered],
            "frozen_param_shapes": OrderedDict((name, p.shape) for name, p in frozen.items()),
            "frozen_param_fragments": OrderedDict((name, part(p, rank)) for name, p in frozen.items()),
            "shared_params": {"head.weight": "embed.weight"},
            "global_steps": 3,
            "lr_scheduler": {"last_batch_iteration": 3},
            "ds_version": "0.19.0",
            **dict(client),
        }
        torch.save(states, inner / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        about = {"optimizer_state_dict": zero, "ds_config": {"zero_optimization": {"stage": 3}}, "ds_version": "0.19.0"}
        torch.save(about, inner / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def test_a_zero3_checkpoint_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with monkeypatch.context() as patch:
        deepspeed_classes(patch)
        model, optimizer = trained()
        save_deepspeed(tmp_path / "theirs", model, optimizer, {"epoch": 7})
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert "ZeRO-3 checkpoint of 2 ranks, 10 parameters" in capsys.readouterr().out
    assert resumed_losses(tmp_path / "ours") == pytest.approx(train(model, optimizer, 3), rel=1e-5)
    fresh = make(seed=2)
    fresh, sharded = unbounded.shard(fresh, torch.optim.AdamW(groups(fresh), lr=1.0), {"optimizer": "host"})
    extra = unbounded.load(tmp_path / "ours", fresh, sharded)
    counted = {"global_steps": 3, "lr_scheduler": {"last_batch_iteration": 3}, "ds_version": "0.19.0"}
    assert extra == {**counted, "epoch": 7}  # with the script's client_state, and nothing of the file's structure
    assert [(g["lr"], g["weight_decay"]) for g in sharded.param_groups] == [(3e-3, 0.1), (3e-3, 0.0)]


class Foreign:
    """What a pickle could run on loading."""

    def __reduce__(self) -> Any:
        return print, ("this ran",)


def test_pickled_objects_missing_ranks_and_other_folders_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    deepspeed_classes(monkeypatch)
    model, optimizer = trained()
    save_deepspeed(tmp_path / "object", model, optimizer, {"client": Foreign()})
    assert main(["import", str(tmp_path / "object"), str(tmp_path / "ours")]) == 2
    told = capsys.readouterr()
    assert "print" in told.err
    assert "not a plain value or tensor" in told.err
    assert told.out == ""
    save_deepspeed(tmp_path / "short", model, optimizer)
    next((tmp_path / "short").glob("*/bf16_zero_pp_rank_1_*")).unlink()
    with pytest.raises(unbounded.CheckpointError, match="saved by 2 ranks and has the optimizer states of 1"):
        unbounded.import_checkpoint(tmp_path / "short", tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(unbounded.CheckpointError, match="neither a DeepSpeed checkpoint"):
        unbounded.import_checkpoint(tmp_path / "empty", tmp_path / "ours")
    assert main(["import", "~nobody", str(tmp_path / "ours")]) == 2  # an unknown user's name is a plain one
    assert not (tmp_path / "ours").exists()


def reduce_by_name(member: Enum, _: int) -> Any:
    return getattr, (type(member), member.name)


def reduce_by_value(member: Enum, _: int) -> Any:
    return type(member), (member.value,)


@pytest.mark.parametrize("by_name", [False, True])
def test_members_of_enums_are_read_however_a_python_pickles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    """By value, as most releases do, or by `getattr` and their name, as 3.11.2 does."""
    deepspeed_classes(monkeypatch)
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for kind in (ZeroStageEnum, _MEM_FORMAT_ENCODING):
        monkeypatch.setattr(kind, "__reduce_ex__", reduce_by_name if by_name else reduce_by_value)
    torch.save({"stage": ZeroStageEnum.weights}, tmp_path / "file")
    assert load_tensors(tmp_path / "file") == {"stage": 3}
    assert MetadataUnpickler(io.BytesIO(pickle.dumps(member)), tmp_path).load() is member
    monkeypatch.setattr(LossScaler, "__reduce_ex__", lambda *_: (getattr, (OrderedDict, "fromkeys")))
    torch.save(LossScaler(), tmp_path / "other")
    with pytest.raises(unbounded.CheckpointError, match=r"pickles builtins\.getattr, which is not a plain value"):
        load_tensors(tmp_path / "other")
    with pytest.raises(unbounded.CheckpointError, match=r"pickles builtins\.getattr, which is not a plain value"):
        MetadataUnpickler(io.BytesIO(pickle.dumps(LossScaler())), tmp_path).load()


# -- torch's distributed checkpoint --------------------------------------------------------------------------------


def save_dcp(folder: Path, model: nn.Module, optimizer: Any, form: str) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    weights, states = get_state_dict(model, optimizer, options=options)
    whole = {"model": weights, "optimizer": states}
    dcp.save({"app": whole} if form == "app" else whole, checkpoint_id=folder)


@pytest.mark.parametrize("form", ["nested", "app", "flattened"])
def test_a_distributed_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path: Path, form: str) -> None:
    model, optimizer = trained()
    save_dcp(tmp_path / "theirs", model, optimizer, form)
    unbounded.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert resumed_losses(tmp_path / "ours") == pytest.approx(train(model, optimizer, 3), rel=1e-5)


def make_others(kind: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = groups(model)
    if kind == "Muon + AdamW":
        return [torch.optim.Muon(matrices["params"], lr=1e-2), torch.optim.AdamW(rest["params"], lr=1e-2)]
    if kind == "Adafactor":
        return [torch.optim.Adafactor([matrices, rest], lr=1e-2)]
    return [torch.optim.SGD([matrices, rest], lr=1e-2, momentum=0.9)]


@pytest.mark.parametrize("kind", ["Muon + AdamW", "Adafactor", "SGD"])
def test_states_of_other_optimizers_come_along(tmp_path: Path, kind: str) -> None:
    model = make()
    optimizers = make_others(kind, model)
    train(model, Several(*optimizers), 0)
    save_dcp(tmp_path / "theirs", model, optimizers, "nested")
    unbounded.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    other = make(seed=2)
    others = make_others(kind, other)
    other, optimizer = unbounded.shard(other, others if len(others) > 1 else others[0])
    unbounded.load(tmp_path / "ours", other, optimizer)
    assert train(other, optimizer, 3) == pytest.approx(train(model, Several(*optimizers), 3), rel=1e-5)


def train_fsdp(rank: int, world_size: int, folder: str) -> list[float]:
    """FSDP2 trains, saves, and goes on."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = _train_rows(model, optimizer, rank)
    save_dcp(Path(folder) / "theirs", model, optimizer, "nested")
    return losses + _train_rows(model, optimizer, rank)


def go_on(rank: int, world_size: int, folder: str) -> list[float]:
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)))
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), {"stage": 3})
    unbounded.load(Path(folder) / "ours", model, optimizer)
    return _train_rows(model, optimizer, rank)


def _train_rows(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    for step in range(3):
        rows = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def import_apart(rank: int, world_size: int, folder: str) -> str:
    """One rank is given a different folder, which is empty."""
    with pytest.raises(unbounded.CheckpointError) as caught:
        unbounded.import_checkpoint(Path(folder) / ("theirs", "nowhere")[rank], Path(folder) / "apart")
    return str(caught.value)


def test_what_fsdp2_saved_on_two_ranks_goes_on_here(ranks: Any, tmp_path: Path) -> None:
    theirs = ranks(2, train_fsdp, str(tmp_path))
    assert all("nowhere is not a folder" in told for told in ranks(2, import_apart, str(tmp_path)))
    unbounded.import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    for rank, losses in enumerate(ranks(2, go_on, str(tmp_path))):
        assert losses == pytest.approx(theirs[rank][3:], rel=1e-5)


def test_a_metadata_file_that_would_run_something_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Foreign()))
    with pytest.raises(unbounded.CheckpointError, match=r"pickles builtins\.print"):
        unbounded.import_checkpoint(tmp_path, tmp_path / "ours")
    assert capsys.readouterr().out == ""
