"""`unbounded train` without arguments on a GPU: the job of the README's second command, for a few steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_the_default_job_trains_over_three_tiers_within_its_budgets(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unbounded", "train", "--steps", "3", "--output", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for tier in ("device", "host", "disk"):
        assert re.search(rf"^(memory)?\s+{tier}\s+[1-9]", ended.stdout, re.MULTILINE), ended.stdout
