"""A rank that fails ends the job: every process within 30 seconds, the culprit's own message in the output."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch, unbounded, unbounded.zero.collectives
from torch import nn
torch.set_num_threads(1)
rank, where = int(os.environ["RANK"]), sys.argv[1]
torch.distributed.init_process_group("gloo")
unbounded.zero.collectives.MEETING_SECONDS = 2

class Block(nn.Linear):
    def forward(self, x):
        if where == "forward" and rank == 1 and step == 2:
            raise ValueError("deliberate failure of rank 1")
        return super().forward(x)

step = 0
model = nn.Sequential(*(nn.Sequential(Block(16, 16), nn.Tanh()) for _ in range(4)))
model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), {"stage": int(sys.argv[2])})
for step in range(1000):
    x = model(torch.randn(2, 16))
    if where == "again" and rank == 1 and step == 2:
        x = model[1](x)
    loss = x.sum()
    if where == "backward" and rank == 1 and step == 2:
        loss.register_hook(lambda g: 1 / 0)
    if where == "killed" and rank == 1 and step == 2:
        os.kill(os.getpid(), 9)
    loss.backward()
    if where == "loop" and rank == 1 and step == 2:
        raise ValueError("deliberate failure of rank 1")
    optimizer.step()
    optimizer.zero_grad()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(rank: int, port: int, script: Path, where: str, stage: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(script), where, str(stage)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_pair(script: Path, where: str, stage: int) -> tuple[list[int], list[str], float]:
    """Exit codes, outputs, and how long the other rank lived on after rank 1 had ended. No launcher helps."""
    port = free_port()
    pair = [start(rank, port, script, where, stage) for rank in (0, 1)]
    try:
        pair[1].wait(timeout=60)
        ended = time.monotonic()
        pair[0].wait(timeout=60)
        return [p.returncode for p in pair], [p.stdout.read() for p in pair if p.stdout], time.monotonic() - ended
    finally:
        for process in pair:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("forward", "deliberate failure of rank 1"),
        ("backward", "ZeroDivisionError"),
        ("killed", ""),
        ("again", "rank 1 needs the parameters of unit '1'"),  # which nobody else gathers again
    ],
)
def test_a_failing_rank_ends_its_peers_without_a_launchers_help(tmp_path: Path, where: str, message: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    codes, outputs, seconds = run_pair(script, where, stage=3)
    assert codes[0] != 0
    assert codes[1] != 0
    assert message in outputs[1]
    assert seconds < 30


def test_torchrun_ends_the_job_with_the_culprits_message(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start_time = time.monotonic()
    done = subprocess.run(
        [*launcher, str(script), "loop", "2"], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode != 0
    assert "deliberate failure of rank 1" in done.stderr
    assert time.monotonic() - start_time < 60  # starting the ranks included
