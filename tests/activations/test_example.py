"""The example runs as it says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.ranks import HANG_SECONDS
from tests.warm import warm_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "activations.py"


@pytest.mark.parametrize(("policy", "on_host"), [("host", "1.0"), ("recompute", "0.0")])
def test_the_example_shows_its_activations_on_the_host(policy: str, on_host: str) -> None:
    command = [warm_python(), str(EXAMPLE), policy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"loss [\d.]+, ([\d.]+) MiB", done.stdout) == [on_host] * 5
