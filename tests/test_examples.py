"""The examples run as they say, under plain python and under torchrun."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.warm import warm_python

MINIMAL = Path(__file__).parent.parent / "examples" / "minimal.py"


@pytest.mark.parametrize("num_ranks", [None, 2], ids=["python", "torchrun, 2 ranks"])
def test_the_minimal_example_learns(num_ranks: int | None) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks else []
    command = [warm_python(), *launcher, str(MINIMAL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 20 * (num_ranks or 1)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_minimal_example_is_at_most_40_lines() -> None:
    assert len(MINIMAL.read_text().splitlines()) <= 40
