"""New weights come to a forward from their update, and not from their tier."""

from __future__ import annotations

import copy
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from tests.zero.test_memory import WIDTH, Stack
from tests.zero.training import Batch
from unbounded.observe.spans import read_spans
from unbounded.zero.delivery import Delivery
from unbounded.zero.step.update_pass import Piece, UpdatePass


def test_what_is_missing_is_all_that_was_not_put_there() -> None:
    generator = torch.Generator().manual_seed(0)

    def mark(stretches: list[tuple[int, int]]) -> torch.Tensor:
        marked = torch.zeros(40, dtype=torch.bool)
        for low, high in stretches:
            assert low < high
            marked[low:high] = True
        return marked

    for _ in range(300):
        target, values = torch.zeros(40), torch.arange(1.0, 41.0)
        delivery = Delivery(target, None)
        cuts = torch.randperm(39, generator=generator)[:5].add(1).sort().values.tolist()
        stretches = list(pairwise([0, *cuts, 40]))
        for low, high in (stretches[i] for i in torch.randperm(6, generator=generator)[:3]):
            assert delivery.put(values[low:high], low) is None  # nothing is in flight on a CPU
        assert torch.equal(mark(delivery.missing()), target == 0)
        assert torch.equal(target[target != 0], values[target != 0])
        assert all(before[1] < after[0] for before, after in pairwise(delivery.missing()))


def wait_until_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates write nothing before a fetch waits for it."""
    write = UpdatePass._write

    def late(steps: UpdatePass, piece: Piece) -> None:
        deadline = time.monotonic() + 300
        while piece.unit.delivery is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        write(steps, piece)

    monkeypatch.setattr(UpdatePass, "_write", late)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_forward_reads_no_weights_from_disk_that_it_gets_from_their_update(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = Stack()
    plain.layers[3][0].weight.requires_grad_(False)  # type: ignore[index]
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)

    def train(*, is_delivered: bool) -> tuple[int, list[torch.Tensor]]:
        """Bytes that the disk reads for an update and the forward after it."""
        model = copy.deepcopy(plain)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Muon(parameters) if kind == "muon" else torch.optim.AdamW(parameters)
        plan = {"weights": "disk", "optimizer": "disk", "disk_path": str(tmp_path), "prefetch_units": 16}
        model, optimizer = unbounded.shard(model, optimizer, plan)
        outputs = []
        with monkeypatch.context() as patch:
            for step in range(3):
                outputs.append(model(Batch(step, 0, 0).normal(2, WIDTH)))
                outputs[-1].square().mean().backward()
                if step == 2:
                    optimizer.wait()
                    if is_delivered:
                        wait_until_asked(patch)
                    break
                optimizer.step()
                optimizer.zero_grad()
            with unbounded.trace(tmp_path / "trace.json"), torch.no_grad():
                optimizer.step()
                if not is_delivered:
                    optimizer.wait()
                outputs.append(model(Batch(3, 0, 0).normal(2, WIDTH)))
                optimizer.wait()
        spans = read_spans(tmp_path / "trace.json")
        return sum(span.num_bytes for span in spans if span.lane == "disk read"), outputs

    far, expected = train(is_delivered=False)
    near, found = train(is_delivered=True)
    assert all(map(torch.equal, found, expected))
    assert far - near == 4 * trained


def evaluate_in_inference_mode(rank: int, size: int, folder: str) -> bool:
    """Whether a forward that waits for an update gives what it gives later."""
    model = Stack()
    plan = {"weights": "disk", "optimizer": "disk", "disk_path": folder, "prefetch_units": 16}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
    batch = Batch(0, 0, rank).normal(2, WIDTH)
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.wait()
    with pytest.MonkeyPatch.context() as patch:
        wait_until_asked(patch)
        optimizer.step()
        with torch.inference_mode():
            at_once = model(batch)
            optimizer.wait()
            return torch.equal(at_once, model(batch))


def test_an_update_delivers_to_a_forward_in_inference_mode(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, evaluate_in_inference_mode, str(tmp_path)) == [True, True]
