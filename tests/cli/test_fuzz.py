"""Whatever is typed: one line and exit code 2, or it works. Never a traceback, and it always ends.

`make fuzz` runs many more of them, from another seed each time.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.cli.fuzz import Fuzz
from tests.train.corpora import write_texts
from unbounded.cli import main
from unbounded.train.training import TrainingJob

NUM_CASES = int(os.environ.get("UNBOUNDED_FUZZ_CASES", "250"))
SEED = int(os.environ.get("UNBOUNDED_FUZZ_SEED", "1"))
SECONDS = 300  # of one case: only what never ends takes so long, however busy the machine is


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs begin and end as usual, but nothing is trained, since 2**31 steps are a wish and not a mistake."""
    monkeypatch.setattr(TrainingJob, "_train", lambda job, step, interrupts: (step, None))


def run_case(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def never_ends(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {SECONDS} s")

    former = signal.signal(signal.SIGALRM, never_ends)
    signal.alarm(SECONDS)
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("unbounded: ")]
    assert code in (0, 1, 2), said
    assert "Traceback" not in said
    if code == 2:
        assert len(lines) == 1, said
        assert said.endswith(lines[0] + "\n"), said


@pytest.mark.usefixtures("few_steps")
def test_no_command_line_or_file_ends_in_a_traceback_or_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    data = write_texts(tmp_path / "data.jsonl", 30)
    small = "--layers 1 --width 8 --heads 1 --sequence-length 8 --batch-tokens 8 --device cpu --eval-every 0"
    base = [*small.split(), "--steps", "1", "--sample", "", "--data", str(data)]
    fuzz = Fuzz(SEED, tmp_path, base)
    for case in range(NUM_CASES):
        words, environment = fuzz.command(), fuzz.environment()
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                run_case(words, capsys)
            except BaseException:
                sys.stderr.write(f"case {case} of seed {SEED}: {environment} {[word[:60] for word in words]}\n")
                raise
    assert (tmp_path / "file").read_text() == "not yours"
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
