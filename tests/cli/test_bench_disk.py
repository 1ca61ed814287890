"""`unbounded bench disk`: that loop and engine move the same bytes, and what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unbounded.cli import bench, main
from unbounded.cli.bench import disk_engine
from unbounded.errors import DiskError
from unbounded.native.disk import DiskEngine
from unbounded.native.disk.bindings import READ, WRITE
from unbounded.native.host_memory import host_buffer

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_engine, "BUFFER_BYTES", 32 * MIB)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_reference_loop_and_the_engine_read_and_write_the_same_bytes(tmp_path: Path, num_threads: int) -> None:
    size = 32 * MIB
    with DiskEngine() as engine, engine.open(tmp_path / "f", create=True, size_bytes=2 * size) as file:
        under_test = disk_engine.Bench(file, file._fd, size, (host_buffer(size), host_buffer(size).random_()))
        source = under_test.buffers[WRITE]
        disk_engine.raw_loop(under_test, WRITE, num_threads)
        written = torch.frombuffer(bytearray((tmp_path / "f").read_bytes()), dtype=torch.uint8)
        assert torch.equal(written[size:], source)
        file.write(0, source).wait()
        disk_engine.raw_loop(under_test, READ, num_threads)
        assert torch.equal(under_test.buffers[READ], source)
        under_test.buffers[READ].zero_()
        source.random_()
        disk_engine.engine_loop(under_test, (READ, WRITE), 16 * MIB)
        written = torch.frombuffer(bytearray((tmp_path / "f").read_bytes()), dtype=torch.uint8)
        assert torch.equal(written[size:], source)
        assert torch.equal(under_test.buffers[READ], written[:size])


def test_every_line_holds_a_reference_and_a_ratio_and_nothing_is_left(tmp_path: Path) -> None:
    results = bench.disk(tmp_path, size_bytes=32 * MIB, transfers=(16 * MIB,), repetitions=1)
    assert [line.what for line in results] == ["read", "write", "read and write"]
    assert all(line.ratio == pytest.approx(line.ours / line.raw) and line.raw > 0 for line in results)
    assert all(line.raw_threads in disk_engine.THREAD_COUNTS for line in results)
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "disk", "--path", str(tmp_path), "--size", "32", "--repetitions", "1"]) == 0
    shown = capsys.readouterr().out
    assert "ratio" in shown
    assert "read and write" in shown


def test_a_missing_path_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="does not exist"):
        bench.disk(tmp_path / "gone")
    assert main(["bench", "disk", "--path", str(tmp_path / "gone")]) == 2
