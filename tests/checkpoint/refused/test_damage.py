"""What can be wrong with a checkpoint that is loaded: found, named, and nothing half-loaded."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.checkpoint.jobs import Odd, assert_same, build, train, whole
from unbounded.checkpoint import loading
from unbounded.checkpoint.load import opened
from unbounded.cli import main
from unbounded.errors import CheckpointError

FLIPS = int(os.environ.get("UNBOUNDED_FLIPS", "25"))  # of each file; `python -m tests.faults` asks for more
PRELOAD_IN_RANKS = ["unbounded.checkpoint.loading", "tests.checkpoint.jobs"]


def flip(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0] ^ (1 << bit)
        file.seek(position)
        file.write(bytes([byte]))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = build({"precision": "bf16"})
    train(model, optimizer, 0, 2, 0)
    unbounded.save(tmp_path / "c", model, optimizer, note=[1, 2], tensor=torch.arange(4))
    return tmp_path / "c"


def everything(model: nn.Module, optimizer: Any, folder: Path) -> dict[Any, torch.Tensor]:
    unbounded.save(folder, model, optimizer)
    return whole(folder)


def test_a_flipped_bit_anywhere_is_found_and_named_and_changes_nothing(saved: Path, tmp_path: Path) -> None:
    generator = random.Random(0)
    model, optimizer = build({"precision": "bf16"}, seed=99)
    train(model, optimizer, 0, 1, 0)
    before = everything(model, optimizer, tmp_path / "before")
    for path in sorted(saved.iterdir()):
        size = path.stat().st_size
        places = {0, 1, size // 2, size - 2, *(generator.randrange(size) for _ in range(FLIPS))}
        for position in places:
            bit = generator.randrange(8)
            flip(path, position, bit)
            with pytest.raises(CheckpointError, match=path.name):
                unbounded.load(saved, model, optimizer)
            flip(path, position, bit)
    assert_same(everything(model, optimizer, tmp_path / "after"), before)
    assert unbounded.load(saved, model, optimizer)["note"] == [1, 2]


def test_a_flipped_bit_names_the_tensors_it_hit_and_inspect_finds_it_too(saved: Path, capsys: Any) -> None:
    from unbounded.checkpoint.format.parsing import read_manifest

    entry = read_manifest(saved).tensors["exp_avg", "body.blocks.1.up.weight", None]
    flip(saved / "data-00000.bin", entry.slices[0].offset + 10, 3)
    with pytest.raises(CheckpointError, match=r"data-00000\.bin is damaged: the CRC32C of its bytes \d+ to \d+"):
        unbounded.load(saved, *build({"precision": "bf16"}))
    assert main(["inspect", str(saved)]) == 0
    assert main(["inspect", str(saved), "--verify"]) == 2
    assert "data-00000.bin is damaged" in capsys.readouterr().err


def damaged_in_place(rank: int, world_size: int, folder: str) -> tuple[list[str], bool]:
    """Too large to be staged: the damage shows after the model has begun to change."""
    model, optimizer = build({"precision": "bf16", "weights": "host"})
    train(model, optimizer, 0, 2, rank)
    unbounded.save(f"{folder}/c", model, optimizer)
    expected = train(model, optimizer, 2, 4, rank)
    if world_size > 1:
        torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(f"{folder}/c", f"{folder}/bad")
        size = Path(f"{folder}/bad/data-00000.bin").stat().st_size
        flip(Path(f"{folder}/bad/data-00000.bin"), size - 5000, 1)
    if world_size > 1:
        torch.distributed.barrier()
    before = loading.STAGED_BYTES, opened.OpenedCheckpoint.prepare
    prepare = before[1]
    loading.STAGED_BYTES = 0

    def skip_small(self: Any) -> int:
        """As if the small values had their own blocks, as they do in a large checkpoint."""
        files = self.files
        kept, files.verify, files.expected = (files.verify, files.expected), lambda *_: None, lambda *_: None
        try:
            return prepare(self)
        finally:
            files.verify, files.expected = kept

    opened.OpenedCheckpoint.prepare = skip_small
    messages = []
    try:
        for action in (
            lambda: unbounded.load(f"{folder}/bad", model, optimizer),
            lambda: train(model, optimizer, 2, 4, rank),
            lambda: unbounded.save(f"{folder}/worse", model, optimizer),
        ):
            with pytest.raises((CheckpointError, unbounded.StateError)) as caught:
                action()
            messages.append(str(caught.value))
        unbounded.load(f"{folder}/c", model, optimizer)
    finally:
        loading.STAGED_BYTES, opened.OpenedCheckpoint.prepare = before
    return messages, train(model, optimizer, 2, 4, rank) == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_that_was_half_loaded_refuses_everything_until_a_load_succeeds(
    ranks: Any, tmp_path: Path, world_size: int
) -> None:
    for messages, resumed in ranks(world_size, damaged_in_place, str(tmp_path)):
        assert "data-00000.bin is damaged" in messages[0]
        assert all("a load failed after it had begun to change the model" in text for text in messages[1:])
        assert resumed
    assert not (tmp_path / "worse").exists()


def test_where_there_is_no_whole_checkpoint_it_is_a_file_not_found(saved: Path, tmp_path: Path) -> None:
    model, optimizer = build({"precision": "bf16"})
    (tmp_path / "empty").mkdir()
    torn = tmp_path / "torn"
    shutil.copytree(saved, torn)
    (torn / "manifest.json").unlink()
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "none", tmp_path / "empty", torn, tmp_path / "file"):
        with pytest.raises(FileNotFoundError, match="there is no whole checkpoint in") as caught:
            unbounded.load(folder, model, optimizer)
        assert isinstance(caught.value, CheckpointError)
    with pytest.raises(FileNotFoundError, match=rf'Give one of those inside it, such as "{saved.name}"'):
        unbounded.load(saved.parent, model, optimizer)
    # What a save was writing when it was killed has no manifest yet, or no name that anyone would load.
    os.rename(saved, saved.parent / ".c.saving-0123456789ab")
    with pytest.raises(FileNotFoundError):
        unbounded.load(saved, model, optimizer)
    with pytest.raises(FileNotFoundError, match="Give the folder that a save was finished in"):
        unbounded.load(saved.parent, model, optimizer)


def test_a_missing_or_short_file_is_named(saved: Path) -> None:
    data = saved / "data-00000.bin"
    held = data.read_bytes()
    for change, match in (
        (lambda: data.unlink(), r"data-00000\.bin cannot be read \(No such file"),
        (lambda: data.write_bytes(held[:-1]), rf"data-00000\.bin has {len(held) - 1:,} bytes instead of {len(held):,}"),
        (lambda: data.write_bytes(held + b"x"), r"data-00000\.bin has"),
    ):
        change()
        with pytest.raises(CheckpointError, match=match):
            unbounded.load(saved, *build({"precision": "bf16"}))


def test_a_newer_version_is_refused_with_both_numbers(saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 7', 1))
    with pytest.raises(CheckpointError, match="version 7, written by a newer release; this one reads up to 1"):
        unbounded.load(saved, *build({"precision": "bf16"}))


def test_a_manifest_of_something_else_is_refused(saved: Path) -> None:
    for text in ("", "{}", "not json", json.dumps({"format": "other", "version": 1})):
        (saved / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            unbounded.load(saved, *build({"precision": "bf16"}))


class Wider(Odd):
    def __init__(self) -> None:
        super().__init__(width=12)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(2))


class Deeper(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("kind", "optimizer", "named"),
    [
        (
            Wider,
            "adamw",
            [r"0\.up\.weight has the shape \[25, 12\] here and \[23, 11\] in the checkpoint", r"and \d+ more"],
        ),
        (Other, "adamw", ["one.weight is not in the checkpoint", "tests.checkpoint.jobs.Odd", "and .. more"]),
        (Deeper, "adamw", ["more.weight is not in the checkpoint; more.bias is not in the checkpoint"]),
        (Odd, "sgd", [r"it has no momentum_buffer of .* \(saved from AdamW, here SGD\)"]),
    ],
)
def test_another_models_checkpoint_is_refused_with_what_differs(
    saved: Path, kind: type[nn.Module], optimizer: str, named: list[str]
) -> None:
    import re

    model, other = build({"precision": "bf16"}, kind=kind, optimizer=optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        unbounded.load(saved, model, other)
    for pattern in ["does not fit", *named]:
        assert re.search(pattern, str(caught.value)), str(caught.value)
    assert_same(dict(model.state_dict()), before)


def test_other_param_groups_are_refused(saved: Path) -> None:
    torch.manual_seed(0)
    model = Odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained[:3]}, {"params": trained[3:]}])
    model, optimizer = unbounded.shard(model, optimizer, {"precision": "bf16"})
    with pytest.raises(
        CheckpointError, match=r"param groups have \[3, \d+\] parameters here and \[\d+\] in the checkpoint"
    ):
        unbounded.load(saved, model, optimizer)


def test_groups_that_hold_each_others_parameters_are_refused(tmp_path: Path) -> None:
    def grouped(order: list[int]) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        groups = [{"params": model[index].parameters(), "lr": 0.1 * (index + 1)} for index in order]
        return unbounded.shard(model, torch.optim.AdamW(groups))

    unbounded.save(tmp_path / "c", *grouped([0, 1]))
    unbounded.load(tmp_path / "c", *grouped([0, 1]))
    with pytest.raises(
        CheckpointError, match=r"group 0 has 1\.weight, 1\.bias here, which are in another group in the"
    ):
        unbounded.load(tmp_path / "c", *grouped([1, 0]))


def disagree(rank: int, world_size: int, folder: str) -> str:
    """One rank cannot read what the others can."""
    from unbounded.checkpoint.format.data_files import Files

    model, optimizer = build({})
    unbounded.save(f"{folder}/c", model, optimizer)
    read = Files.read

    def broken(self: Any, *arguments: Any) -> Any:
        raise unbounded.DiskError("read failed: Input/output error (errno 5).")

    if rank == 1:
        Files.read = broken  # type: ignore[method-assign]
    try:
        with pytest.raises(Exception, match="Input/output error") as caught:
            unbounded.load(f"{folder}/c", model, optimizer)
    finally:
        Files.read = read  # type: ignore[method-assign]
    train(model, optimizer, 0, 1, rank)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_rank_that_cannot_read_fails_all_with_its_message(ranks: Any, tmp_path: Path) -> None:
    messages = ranks(2, disagree, str(tmp_path))
    assert messages[1].startswith("DiskError: read failed")
    assert messages[0].startswith("DiskError: rank 1 failed: read failed")
