"""What a checkpoint costs: bytes read and written once, no copy where none is needed, buffers that are bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import unbounded
from tests.checkpoint.jobs import assert_same, whole
from unbounded.checkpoint import loading, stream
from unbounded.checkpoint.manifest import read_manifest
from unbounded.checkpoint.reading import Files
from unbounded.native.disk import DiskFile
from unbounded.sharding import sharded

MIB = 1 << 20


def build(tier: str, seed: int = 0) -> Any:
    """48 MiB of states in four units."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = unbounded.shard(
        model, optimizer, {"precision": "bf16", "weights": tier, "optimizer": tier, "gradients": "host"}
    )
    model(torch.randn(2, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.wait()
    return model, optimizer


def test_a_save_writes_and_a_load_reads_every_byte_once(tmp_path: Path, monkeypatch: Any) -> None:
    moved = {"read": 0, "write": 0}
    for name in moved:
        move = getattr(DiskFile, name)

        def counted(self: Any, offset: int, tensor: torch.Tensor, name: str = name, move: Any = move) -> Any:
            moved[name] += tensor.numel() * tensor.element_size()
            return move(self, offset, tensor)

        monkeypatch.setattr(DiskFile, name, counted)
    monkeypatch.setattr(loading, "STAGED_BYTES", 0)
    model, optimizer = build("host")
    unbounded.save(tmp_path / "c", model, optimizer)
    total = read_manifest(tmp_path / "c").num_bytes
    assert 48 * MIB < total < 49 * MIB
    assert moved == {"read": 0, "write": total}
    unbounded.load(tmp_path / "c", model, optimizer)
    assert total * 0.98 < moved["read"] < total * 1.02


def test_states_in_host_memory_are_written_and_read_without_a_copy(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(loading, "STAGED_BYTES", 0)
    staged: list[int] = []
    stage = stream.Writer._buffer
    monkeypatch.setattr(stream.Writer, "_buffer", lambda self: (staged.append(1), stage(self))[1])
    model, optimizer = build("host")
    unbounded.save(tmp_path / "c", model, optimizer)
    assert len(staged) == 1  # what is small: the random states
    addresses = {
        (array.direct.data_ptr(), array.direct.data_ptr() + array.direct.nbytes)
        for unit in sharded(model).engine.units
        for array in (unit.weights, *unit.states.values())
    }
    read = Files.read
    inside: list[int] = []

    def watched(self: Any, number: int, offset: int, target: torch.Tensor) -> Any:
        if any(start <= target.data_ptr() < stop for start, stop in addresses):
            inside.append(target.numel())
        return read(self, number, offset, target)

    monkeypatch.setattr(Files, "read", watched)
    unbounded.load(tmp_path / "c", model, optimizer)
    assert sum(inside) > 0.9 * 48 * MIB


def test_states_on_disk_pass_through_bounded_buffers(tmp_path: Path, monkeypatch: Any) -> None:
    from unbounded.checkpoint import reading, targets, transfer

    monkeypatch.setattr(loading, "STAGED_BYTES", 0)
    for module in (stream, reading, targets, transfer):
        monkeypatch.setattr(module, "CHUNK_BYTES", MIB)
    model, optimizer = build("disk")
    arena = sharded(model).tiers.arena
    before, peak = arena.used_bytes, [0]
    allocate = type(arena).allocate

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        made = allocate(self, *arguments, **options)
        peak[0] = max(peak[0], self.used_bytes - before)
        return made

    monkeypatch.setattr(type(arena), "allocate", watched)
    unbounded.save(tmp_path / "c", model, optimizer)
    assert 0 < peak[0] <= (stream.NUM_BUFFERS + 1) * MIB
    other, optimizer = build("disk", seed=1)
    arena = sharded(other).tiers.arena
    before, peak[0] = arena.used_bytes, 0
    unbounded.load(tmp_path / "c", other, optimizer)
    assert 0 < peak[0] <= (2 * transfer.DEPTH + 2) * MIB
    assert arena.used_bytes == before
    unbounded.save(tmp_path / "again", other, optimizer)
    assert_same(whole(tmp_path / "again"), whole(tmp_path / "c"))
