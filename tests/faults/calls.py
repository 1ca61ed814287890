"""Runs the server of faults in a process with the shim preloaded, and gives what it finds, case by case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_calls(shim: Path, scenarios: Sequence[str], faults: Sequence[str], most: int) -> Iterator[dict[str, Any]]:
    """Every case of these scenarios with these faults: see `server`."""
    paths = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    environment = {**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "tests.faults.server", folder, str(most), ",".join(faults), *scenarios]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT
        ) as server:
            assert server.stdout is not None
            for line in server.stdout:
                yield json.loads(line)
        if server.returncode:
            errors.seek(0)
            raise RuntimeError(f"the server of faults ended with {server.returncode}: {errors.read()[-3000:]}")
