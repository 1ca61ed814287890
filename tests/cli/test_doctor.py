"""`unbounded doctor`: what it finds here, and that every problem comes with its remedy and the right exit code."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.native.faults import mounted_tmpfs
from unbounded.cli import main
from unbounded.cli.doctor import BROKEN, NOTE, OK, Finding, checks, examine
from unbounded.errors import UnboundedError
from unbounded.native import library


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_it_reports_every_part_of_this_machine_and_exits_with_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = by_name(examine(tmp_path))
    assert {"python", "native core", "simd", "disk path", "O_DIRECT", "disk free"} <= set(found)
    assert {"host memory", "huge pages", "memory lock limit"} <= set(found)
    assert any(name.startswith("gpu") for name in found)
    assert found["native core"].status == OK
    assert main(["doctor", "--path", str(tmp_path)]) == 0
    assert "native core" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_missing_path_is_broken_with_a_remedy_and_exit_code_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--path", str(tmp_path / "gone")]) == 1
    assert "broken: disk path: Create it, or choose another disk_path." in capsys.readouterr().out


def test_a_path_that_takes_no_files_is_broken_and_the_remedy_is_another_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--path", "/proc"]) == 1
    assert "broken: disk path: Choose another folder." in capsys.readouterr().out


def test_a_path_on_tmpfs_is_a_note(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "memory", "size=8m") as folder:
        found = by_name(checks.disk_path(str(folder)))
    assert found["disk path"].status == NOTE
    assert "is on tmpfs" in found["disk path"].value
    assert found["disk path"].remedy.startswith("Choose a path on a block device")
    assert found["disk free"].status == NOTE  # 8 MiB


def test_a_missing_core_is_broken_and_ends_what_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> None:
        raise UnboundedError("the compiled core was not found")

    monkeypatch.setattr(library, "core", missing)
    found = by_name(examine(tmp_path))
    assert found["native core"].status == BROKEN
    assert "pip install ." in found["native core"].remedy
    assert "disk path" not in found
    assert "host memory" in found


@pytest.mark.parametrize(("limit", "status"), [(resource.RLIM_INFINITY, OK), (8 << 20, OK), (64 << 10, NOTE)])
def test_a_small_memory_lock_limit_is_a_note(monkeypatch: pytest.MonkeyPatch, limit: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    finding = checks.memory_lock()
    assert finding.status == status
    assert bool(finding.remedy) == (status == NOTE)


@pytest.mark.parametrize(("text", "status"), [("always [madvise] never", OK), ("always madvise [never]", NOTE)])
def test_huge_pages_switched_off_is_a_note(tmp_path: Path, text: str, status: str) -> None:
    (tmp_path / "enabled").write_text(text)
    finding = checks.huge_pages(tmp_path / "enabled")
    assert finding.status == status
    assert bool(finding.remedy) == (status == NOTE)


def test_a_torch_too_old_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    assert checks.python_and_torch().status == BROKEN
