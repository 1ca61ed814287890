"""Random faults of the disk tier: every call of a step may fail, fall short or return a flipped bit.

Each round trains a few steps with faults drawn from its seed, on one rank and on two. Whatever happens, a round ends in
one of two ways: with the losses of a run without faults, or with one DiskError on all ranks. After such an error the
last checkpoint is whole, and training goes on from it bit for bit. A few rounds are part of the tests. For a longer
storm:

    UNBOUNDED_STORM_ROUNDS=500 python -m pytest tests/tiers/test_disk_storm.py
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import unbounded
from tests.native.faults import build_shim, flip_bit
from tests.ranks import HANG_SECONDS
from tests.tiers.test_disk_faults_in_a_step import FailedTransfer, describe, make, train
from unbounded.native.disk import ExtentStore
from unbounded.native.disk.striping import Extent

ROUNDS = int(os.environ.get("UNBOUNDED_STORM_ROUNDS", "6"))
STEPS = 2
CALLS = {"read": 170, "write": 110}  # about what STEPS steps of one rank make
CODES = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EBADMSG": errno.EBADMSG}


@contextmanager
def faults(seed: int, *, here: bool) -> Iterator[list[str]]:
    """Draws one fault: which call of which kind, and how it fails. Yields a list that gets what happened."""
    chance = random.Random(seed)
    kind = chance.choice(["EIO on read", "EIO on write", "ENOSPC on write", "flipped bit"])
    operation = "write" if "write" in kind else "read"
    number, bit = chance.randrange(CALLS[operation]), chance.random()
    real, seen, met = getattr(ExtentStore, operation), [0], []

    def transfer(store: ExtentStore, extent: Extent, tensor: Any, offset: int = 0) -> Any:
        seen[0] += 1
        if not here or seen[0] - 1 != number:
            return real(store, extent, tensor, offset)
        met.append(kind)
        if kind == "flipped bit":
            flip_bit(store, extent, offset + int(bit * tensor.nbytes))
            return real(store, extent, tensor, offset)
        return FailedTransfer(operation, CODES[kind.split()[0]], str(store.folders[0]))

    setattr(ExtentStore, operation, transfer)
    try:
        yield met
    finally:
        setattr(ExtentStore, operation, real)


def storm(rank: int, world_size: int, folder: str, seeds: list[int]) -> list[tuple[str, str]]:
    """The faults of each round, and how it ended: "unharmed", or the error's type and errno and a good resume."""
    model, optimizer = make(folder)
    train(model, optimizer, rank, 0, 1)
    unbounded.save(f"{folder}/good", model, optimizer)
    expected = train(model, optimizer, rank, 1, STEPS)
    rounds = []
    for seed in seeds:
        unbounded.load(f"{folder}/good", model, optimizer)
        with faults(seed, here=rank == seed % world_size) as met:
            try:
                ended = "unharmed" if train(model, optimizer, rank, 1, STEPS) == expected else "other losses"
            except Exception as error:
                told = describe(error)
                ended = f"{told['type']} {told['errno']}"
        optimizer.zero_grad()
        if ended != "unharmed":
            unbounded.load(f"{folder}/good", model, optimizer)
            ended += "" if train(model, optimizer, rank, 1, STEPS) == expected else ", and a resume with other losses"
        rounds.append((met[0] if met else "", ended))
    return rounds


EXPECTED = {
    "": {"unharmed"},
    "EIO on read": {f"DiskError {errno.EIO}"},
    "EIO on write": {f"DiskError {errno.EIO}"},
    "ENOSPC on write": {f"DiskError {errno.ENOSPC}"},
    "flipped bit": {f"DiskError {errno.EBADMSG}"},
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fault_anywhere_in_a_step_is_told_by_all_ranks_and_nothing_is_lost(
    ranks: Any, tmp_path: Path, world_size: int
) -> None:
    seeds = list(range(world_size * 1000, world_size * 1000 + ROUNDS))
    found = ranks(world_size, storm, str(tmp_path), seeds, timeout=HANG_SECONDS + 5 * ROUNDS)
    for seed, outcomes in zip(seeds, zip(*found, strict=True), strict=True):
        met = next((kind for kind, _ in outcomes if kind), "")
        assert {ended for _, ended in outcomes} == EXPECTED[met], f"seed {seed}: {outcomes}"


SHORT = """
import ctypes, random, sys
from tests.tiers import test_disk_faults_in_a_step as case
shim = ctypes.CDLL(sys.argv[2])
count, size = ctypes.c_int.in_dll(shim, "fault_count"), ctypes.c_long.in_dll(shim, "fault_bytes")
chance = random.Random(int(sys.argv[3]))
losses = []
for shortens in (False, True):  # O_DIRECT moves whole pages, except at the end of a file
    model, optimizer = case.make(sys.argv[1])
    for step in range(3):
        if shortens:
            size.value, count.value = chance.choice([4096, 5000, 8192]), chance.randrange(1, 40)
        losses.append(case.train(model, optimizer, 0, step, 1))
    count.value = 0
assert losses[:3] == losses[3:], losses
"""


def test_transfers_that_fall_short_in_a_step_are_carried_on(tmp_path: Path) -> None:
    shim = build_shim(tmp_path)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "LD_PRELOAD": str(shim)}
    command = [sys.executable, "-c", SHORT, str(tmp_path), str(shim), str(ROUNDS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
