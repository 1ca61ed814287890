"""Exit codes of whole programs: each case is a process, so they are few."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.corpora import write_texts
from tests.warm import warm_python
from unbounded.cli import main
from unbounded.observe.trace import span, trace


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, text=True, capture_output=True, check=False, timeout=600, **options)  # type: ignore[call-overload]


CLOSED = "unbounded: standard output is closed. Send it to a file, or to /dev/null.\n"
FULL = "unbounded: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(("redirect", "said"), [(">&-", CLOSED), (">&- 2>&-", ""), (">/dev/full", FULL)])
def test_closed_and_full_standard_outputs_are_told_in_one_line(tmp_path: Path, redirect: str, said: str) -> None:
    with trace(tmp_path / "t.json"), span("compute", "a unit"):
        pass
    done = run("sh", "-c", f"{sys.executable} -m unbounded report {tmp_path}/t.json {redirect}")
    assert (done.returncode, done.stderr) == (2, said)


WAITS = """
import os, sys, time
from unbounded.cli import main
from unbounded.train.step.loop import Trainer
seed = Trainer._seed
def wait(*arguments):
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    seed(*arguments)
Trainer._seed = wait
sys.exit(main(sys.argv[2:]))
"""


def test_a_run_whose_reader_goes_away_goes_on_to_its_end(tmp_path: Path) -> None:
    data, gone = write_texts(tmp_path / "a.jsonl", 50), tmp_path / "gone"
    (tmp_path / "waits.py").write_text(WAITS)  # with its first step, until the reader is gone
    small = (
        "--layers 1 --width 16 --heads 2 --sequence-length 16 --batch-tokens 64 --steps 5 --device cpu --eval-every 0"
    )
    command = (
        f"{warm_python()} {tmp_path}/waits.py {gone} train {small} --log-every 1 --data {data} --output {tmp_path}/out "
        "--sample ''"
    )
    done = run("sh", "-c", f"({command}; echo $? > {tmp_path}/code) | (head -n 1; exec <&-; touch {gone})")
    assert done.stdout.startswith("training a GPT")
    assert "the output is gone" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "code").read_text() == "0\n"
    assert (tmp_path / "out" / "step-00000005" / "manifest.json").exists()


def test_a_run_whose_terminal_is_closed_saves_and_ends(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "a.jsonl", 50)
    small = "--layers 1 --width 16 --heads 2 --sequence-length 16 --batch-tokens 64 --device cpu --eval-every 0"
    command = f"setsid --ctty {warm_python()} -m unbounded train {small} --steps 1000000 --data {data}"
    screen, terminal = os.openpty()
    with subprocess.Popen(
        [*command.split(), "--output", f"{tmp_path}/out"], stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        seen = b""
        while b"step " not in seen:
            seen = seen[-4:] + os.read(screen, 1024)
        os.close(screen)
        assert process.wait(timeout=600) == 128 + signal.SIGHUP
    (saved,) = (tmp_path / "out").glob("step-*")
    assert (saved / "manifest.json").exists()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', but it must be a whole number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK is 2, but WORLD_SIZE is 2. Number the ranks from 0 to 1, as torchrun does",
        ),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        (
            {"WORLD_SIZE": "2", "RANK": "0"},
            "this is one of 2 processes that torchrun started, but MASTER_ADDR is not set",
        ),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "99999999"}, "MASTER_PORT is '99999999', but it must be"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_one_line_and_exit_code_2(
    variables: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"unbounded: {said}")
    assert error.count("\n") == 1
    assert not os.listdir(tmp_path)
