"""Named files through the disk engine, compared with plain reads and writes."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks import HANG_SECONDS
from unbounded.native.disk import DiskEngine, ExtentStore, bindings, crc32c, crc32c_combine
from unbounded.native.host_memory import host_buffer

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def engine() -> Iterator[DiskEngine]:
    with DiskEngine(block_bytes=MIB) as opened:
        yield opened


def random_bytes(nbytes: int, shift: int = 0) -> torch.Tensor:
    """Random bytes whose address is `shift` past a page."""
    return host_buffer(nbytes + shift)[shift:].random_()


@pytest.mark.parametrize(
    ("offset", "nbytes", "shift"),
    [
        (0, 4 * MIB, 0),  # all aligned: direct
        (4096, 3 * MIB + 4096, 64),  # memory not aligned: bounced
        (1, 1, 0),  # inside one page
        (4095, 2, 0),  # across two pages
        (100, 2 * MIB, 100),  # unaligned ends, aligned middle
        (5000, 3 * MIB + 1, 3),  # nothing aligned
    ],
)
def test_any_offset_length_and_address_is_written_and_read_right(
    engine: DiskEngine, tmp_path: Path, offset: int, nbytes: int, shift: int
) -> None:
    path, whole = tmp_path / "file", random_bytes(6 * MIB + 10)
    path.write_bytes(whole.numpy().tobytes())
    data, back = random_bytes(nbytes, shift), random_bytes(nbytes, shift)
    with engine.open(path) as file:
        file.write(offset, data).wait()
        file.read(offset, back).wait()
    whole[offset : offset + nbytes] = data
    assert torch.equal(back, data)
    assert path.read_bytes() == whole.numpy().tobytes()  # the bytes around are untouched


def test_a_file_grows_to_an_odd_size_and_is_cut_by_truncate(engine: DiskEngine, tmp_path: Path) -> None:
    data = random_bytes(2 * MIB + 777)
    with engine.open(tmp_path / "file", create=True) as file:
        file.write(0, data).wait()
        file.sync()
        assert file.size_bytes == data.numel()
        file.truncate(1001)
        assert file.size_bytes == 1001
    assert (tmp_path / "file").read_bytes() == data[:1001].numpy().tobytes()


def test_many_transfers_of_several_threads_in_flight_do_not_mix(engine: DiskEngine, tmp_path: Path) -> None:
    part, parts = 256 * KIB, 64
    data, back = random_bytes(parts * part), host_buffer(parts * part)

    def move(file: object, name: str, buffer: torch.Tensor, which: range) -> None:
        handles = [getattr(file, name)(i * part, buffer[i * part : (i + 1) * part]) for i in which]
        for handle in handles:
            handle.wait()

    with engine.open(tmp_path / "file", create=True, size_bytes=parts * part) as file:
        for name, buffer in (("write", data), ("read", back)):
            threads = [threading.Thread(target=move, args=(file, name, buffer, range(k, parts, 4))) for k in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert torch.equal(data, back)


def test_a_handle_keeps_its_buffer_and_file_alive_until_the_transfer_is_over(
    engine: DiskEngine, tmp_path: Path
) -> None:
    expected = random_bytes(16 * MIB)
    file = engine.open(tmp_path / "file", create=True)
    handle = file.write(0, expected.clone())  # nobody else holds this buffer
    del file
    gc.collect()
    handle.wait()
    file = engine.open(tmp_path / "file")
    file.write(0, expected[:MIB].clone())  # nor this handle: dropping it waits
    file.close()
    assert crc32c(torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.uint8)) == crc32c(expected)


@pytest.mark.parametrize("kind", ["file", "extent"])
def test_a_transfer_that_ctrl_c_interrupts_as_it_starts_is_waited_for_before_its_buffer_is_freed(
    engine: DiskEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    functions, waited = bindings.disk(), []

    def submit_and_interrupt(*arguments: object) -> None:
        code = submit(*arguments)
        raise KeyboardInterrupt(code)

    with engine.open(tmp_path / "file", create=True) as file, ExtentStore(tmp_path, MIB, engine=engine) as store:
        extent, submit, release = store.allocate(MIB), functions.submit, functions.release
        monkeypatch.setattr(functions, "submit", submit_and_interrupt)
        monkeypatch.setattr(functions, "release", lambda started: (release(started), waited.append(started.value)))
        with pytest.raises(KeyboardInterrupt):
            _ = file.write(0, host_buffer(MIB)) if kind == "file" else store.write(extent, host_buffer(MIB))
        gc.collect()
        assert len(waited) == 1
        assert waited[0] is not None


def test_a_handle_may_be_waited_on_by_several_threads_several_times(engine: DiskEngine, tmp_path: Path) -> None:
    with engine.open(tmp_path / "file", create=True) as file:
        handle = file.write(0, random_bytes(8 * MIB))
        results: list[bool] = []
        threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert handle.wait()
        assert handle.done()
        assert results == [True] * 4
        start, end = handle.span_ns()
        assert 0 < start < end


def test_a_wait_with_a_timeout_says_when_it_is_not_over(tmp_path: Path) -> None:
    with DiskEngine(num_threads=1) as engine, engine.open(tmp_path / "file", create=True) as file:
        data = host_buffer(64 * MIB)
        for _ in range(20):  # the writes may be over before this thread has its turn again
            handles = [file.write(0, data) for _ in range(4)]
            was_over = handles[-1].wait(timeout_seconds=0)
            assert handles[-1].wait(timeout_seconds=HANG_SECONDS)
            if not was_over:
                break
        assert not was_over


def test_closing_a_file_finishes_what_is_in_flight(engine: DiskEngine, tmp_path: Path) -> None:
    data = random_bytes(8 * MIB)
    file = engine.open(tmp_path / "file", create=True)
    handle = file.write(0, data)
    file.close()
    assert handle.done()
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


def test_tensors_of_any_dtype_and_shape_are_their_bytes(engine: DiskEngine, tmp_path: Path) -> None:
    data, back = torch.randn(300, 7, dtype=torch.bfloat16), torch.empty(300, 7, dtype=torch.bfloat16)
    with engine.open(tmp_path / "file", create=True) as file:
        file.write(10, data).wait()
        file.read(10, back).wait()
    assert torch.equal(data, back)


def test_without_direct_the_same_bytes_go_through_the_page_cache(tmp_path: Path) -> None:
    data, back = random_bytes(3 * MIB + 5), host_buffer(3 * MIB + 5)
    with DiskEngine(direct=False) as engine, engine.open(tmp_path / "file", create=True) as file:
        assert not file.is_direct
        file.write(3, data).wait()
        file.read(3, back).wait()
    assert torch.equal(data, back)


def test_a_read_only_file_is_read(engine: DiskEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    os.chmod(tmp_path / "file", 0o444)
    back = torch.empty(4, dtype=torch.uint8)
    with engine.open(tmp_path / "file", read_only=True) as file:
        file.read(3, back).wait()
    assert bytes(back.tolist()) == b"3456"


def test_crc32c_is_the_castagnoli_checksum_and_combines() -> None:
    check = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
    assert crc32c(check) == 0xE3069283  # the value of the standard
    data = random_bytes(100_001)
    for cut in (0, 1, 4096, 99_999, 100_001):
        first, second = crc32c(data[:cut]), crc32c(data[cut:])
        assert crc32c(data[cut:], first) == crc32c(data)
        assert crc32c_combine(first, second, data.numel() - cut) == crc32c(data)
