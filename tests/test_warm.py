"""The warm Python of the tests runs programs as `sys.executable` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import warm_python

TELLS = """
import os, sys, threading
print(sys.argv[1:], __name__, os.getcwd(), os.environ["TOLD"], sys.modules["__main__"].TOLD, threading.active_count())
"""


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
def test_a_program_sees_what_it_would_see_in_a_python_of_its_own(tmp_path: Path, how: str) -> None:
    code = f"TOLD = 3\n{TELLS}"
    (tmp_path / "telling.py").write_text(code)
    program = {"-c": ["-c", code], "-m": ["-m", "telling"], "script": [str(tmp_path / "telling.py")]}[how]
    environment = {**os.environ, "TOLD": "yes"}
    said = [
        subprocess.run([python, *program, "a", "b"], cwd=tmp_path, env=environment, capture_output=True, check=True)
        for python in (sys.executable, warm_python())
    ]
    assert said[0].stdout == said[1].stdout
    assert not said[1].stderr


def test_a_program_ends_with_its_own_code_and_output() -> None:
    done = subprocess.run([warm_python(), "-c", "raise SystemExit(7)"], check=False)
    assert done.returncode == 7
    code = "import atexit; atexit.register(print, 'the end'); 1 / 0"
    done = subprocess.run([warm_python(), "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "the end\n")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    done = subprocess.run([warm_python(), "-c", "import os; os.kill(os.getpid(), 9)"], check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_command_reaches_the_program(number: int) -> None:
    code = "import time\nprint('begun', flush=True)\ntime.sleep(1000)"
    with subprocess.Popen([warm_python(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.stdout.read() == ""  # which ends when the program does
        assert process.wait() == -number
