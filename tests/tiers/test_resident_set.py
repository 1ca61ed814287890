"""Whatever allocator torch has, the resident set is what `optimizer.memory()` counts, and what is in flight."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import HANG_SECONDS

WIDTH, DEPTH = 1024, 12  # units of 4 MiB
IN_FLIGHT = 10 * WIDTH * WIDTH * 4
"""Gradients on their way to their tier, torch's own of a layer before they are collected, stacks and heaps."""

CHILD = """
import sys, tempfile, threading
import torch, unbounded
from tests.process import resident_bytes
from tests.tiers.test_resident_set import DEPTH, WIDTH

def train(width, depth, look=lambda: None):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(width, width)) for _ in range(depth)))
    weights, gradients, states = sys.argv[1:]
    plan = {"weights": weights, "gradients": gradients, "optimizer": states, "host_bytes": "1GiB"}
    model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
    for _ in range(4):
        model(torch.randn(2, width)).square().mean().backward()
        look(optimizer)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        look(optimizer)
        optimizer.zero_grad()
    optimizer.wait()
    look(optimizer)

def look(optimizer):
    use = optimizer.memory()
    counted[0] = max(counted[0], use["device"].used_bytes + use["host"].used_bytes)

def watch(first):
    while not over.wait(0.001):
        grown[0] = max(grown[0], resident_bytes() - first)

torch.set_num_threads(1)
train(32, 2, look=lambda _: None)
counted, grown, over = [0], [0], threading.Event()
watcher = threading.Thread(target=watch, args=(resident_bytes(),))
watcher.start()
train(WIDTH, DEPTH, look)
over.set()
watcher.join()
print(counted[0], grown[0])
"""


@pytest.mark.every_second
@pytest.mark.parametrize("tiers", ["host host host", "disk host disk", "disk disk disk"])
def test_the_resident_set_is_what_is_counted(tiers: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment.pop("MIMALLOC_PURGE_DELAY", None)  # as users run it
    command = [sys.executable, "-c", CHILD, *tiers.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    counted, grown = map(int, done.stdout.split())
    assert grown <= counted + IN_FLIGHT, f"grew by {grown >> 20} MiB, of which {counted >> 20} are counted"
