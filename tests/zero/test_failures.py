"""A rank that fails ends the job: every process ends by itself, soon, with the culprit's own message in its output."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import process as processes
from tests.ranks import HANG_SECONDS
from tests.warm import warm_python

SCRIPT = """
import os, signal, sys, torch, unbounded
from torch import nn
torch.set_num_threads(1)
rank, where, culprit = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])

class Block(nn.Linear):
    def forward(self, x):
        if where == "forward" and rank == culprit and step == 2:
            raise ValueError(f"deliberate failure of rank {rank}")
        return super().forward(x)

step = 0
model = nn.Sequential(*(nn.Sequential(Block(16, 16), nn.Tanh()) for _ in range(4)))
plan = {"stage": int(sys.argv[3]), "watchdog_seconds": 10}
model, optimizer = unbounded.shard(model, torch.optim.AdamW(model.parameters()), plan)
assert torch.distributed.get_world_size() == 2
for step in range(100000):
    loss = model(torch.randn(2, 16)).sum()
    if rank == culprit and step == 2 and where in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if where == "killed" else signal.SIGSTOP)
    loss.backward()
    if where == "loop" and rank == culprit and step == 2:
        raise ValueError(f"deliberate failure of rank {rank}")
    optimizer.step()
    optimizer.zero_grad()
"""


def start(rank: int, port: int, script: Path, where: str, culprit: int, stage: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [warm_python(), str(script), where, str(culprit), str(stage)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=0
    )


@pytest.mark.parametrize(
    ("where", "culprit", "stage", "message"),
    [
        ("forward", 1, 3, "rank 1 failed: ValueError: deliberate failure of rank 1"),
        ("loop", 0, 2, "rank 0 failed: ValueError: deliberate failure of rank 0"),  # which holds the job's store
        ("killed", 1, 2, "with rank 1, which has not been heard from"),
        ("stopped", 0, 3, "the job's store, which rank 0 or its launcher holds, has not answered"),
    ],
)
def test_a_failing_rank_ends_its_peer_without_a_launchers_help(
    tmp_path: Path, where: str, culprit: int, stage: int, message: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    port = processes.free_port()
    pair = [start(rank, port, script, where, culprit, stage) for rank in (0, 1)]
    try:
        output = pair[1 - culprit].communicate(timeout=HANG_SECONDS)[0]
        assert pair[1 - culprit].returncode != 0, output  # torch may abort at its own end if the store is stopped
        assert message in output
        if where == "stopped":
            pair[culprit].send_signal(signal.SIGKILL)
        own = pair[culprit].communicate(timeout=HANG_SECONDS)[0]
        assert pair[culprit].returncode != 0
        assert where in ("killed", "stopped") or f"deliberate failure of rank {culprit}" in own
    finally:
        for process in pair:
            process.kill()
            process.communicate()


def test_torchrun_ends_the_job_with_the_culprits_message(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(script), "loop", "1", "2"], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert done.returncode != 0
    assert "unbounded: joined 2 ranks started by torchrun, over gloo." in done.stderr
    assert "deliberate failure of rank 1" in done.stderr
