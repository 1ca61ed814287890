"""The frame of the command line: verbs, exit codes, one line for what the user can fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from unbounded import cli
from unbounded.errors import PlanError


def with_verb(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, code: int = 0) -> None:
    """Has `unbounded doctor` run something else."""

    def run(args: object) -> int:
        if error is not None:
            raise error
        return code

    module = SimpleNamespace(HELP="a verb", add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(cli, "available_verbs", lambda: ["doctor"])
    monkeypatch.setattr(cli, "_verb_module", lambda verb: module)


def test_help_names_every_verb_that_is_there_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom unbounded.cli import main\n"
        "try:\n    main(['--help'])\nfinally:\n"
        "    print('HEAVY', sorted({'torch', 'rich', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    for verb in cli.available_verbs():
        assert f"\n    {verb} " in done.stdout


def test_only_verbs_whose_module_is_there_are_offered() -> None:
    found = cli.available_verbs()
    assert {"bench", "doctor"} <= set(found) <= set(cli.VERBS)
    assert found == [verb for verb in cli.VERBS if verb in found]


@pytest.mark.parametrize("verb", cli.available_verbs())
def test_every_verb_has_a_help_of_its_own(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"unbounded {verb}" in capsys.readouterr().out


def test_an_unknown_verb_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["trian"])
    assert caught.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_a_verbs_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verb(monkeypatch, None, code=7)
    assert cli.main(["doctor"]) == 7


def test_an_error_of_the_package_is_one_line_and_exit_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_verb(monkeypatch, PlanError("stage is 7.\nChoose 0 to 3."))
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "unbounded: stage is 7. Choose 0 to 3.\n"


def test_a_working_folder_that_was_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as raised:
        Path("checkpoint").resolve()
    assert cli.describe(raised.value) == "the working folder was removed. Change to another one with cd."


def test_an_interrupt_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_verb(monkeypatch, KeyboardInterrupt())
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "unbounded: interrupted\n"


def test_with_debugging_on_the_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verb(monkeypatch, PlanError("stage is 7"))
    monkeypatch.setenv("UNBOUNDED_DEBUG", "1")
    with pytest.raises(PlanError, match="stage is 7"):
        cli.main(["doctor"])


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with_verb(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])
