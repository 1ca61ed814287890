"""Memory of what moves in bulk: the system has it back, it is reused, and nobody reads it while it is gone."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest
import torch

from tests.process import resident_bytes
from unbounded.errors import BudgetError
from unbounded.native import bulk
from unbounded.native.bulk import KEPT_BLOCKS, Backing, convert, new_tensor
from unbounded.native.host_memory import unmap_pages

CPU = torch.device("cpu")
SMALL, LARGE = 300 * 1024, 8 << 20  # below a huge page: kept; above: not
BLOCKS = 12


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    gc.collect()
    while bulk._kept:
        size, address = bulk._kept.popleft()
        unmap_pages(address, size)


def bytes_of(backing: Backing) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(backing.storage, 0, (backing.num_bytes,), (1,))  # type: ignore[call-overload]


def in_a_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_one_thread_takes_and_another_frees_is_the_systems_again(size: int) -> None:
    before, held = resident_bytes(), []
    for _ in range(3):
        in_a_thread(lambda: held.extend(new_tensor(size, torch.uint8, CPU).fill_(1) for _ in range(2 * BLOCKS)))
        assert resident_bytes() - before > 1.5 * BLOCKS * size
        held.clear()
    assert resident_bytes() - before < KEPT_BLOCKS * SMALL + (1 << 20)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_bytes_under_a_storage_come_and_go(size: int) -> None:
    backings = [Backing(size, CPU) for _ in range(2 * BLOCKS)]
    views = [bytes_of(backing) for backing in backings]
    before = resident_bytes()
    for _ in range(3):
        for number, (backing, view) in enumerate(zip(backings, views, strict=True)):
            backing.take()
            backing.take()  # once is enough
            view.fill_(number)
            assert (int(view[0]), int(view[-1])) == (number, number)
        assert resident_bytes() - before > 1.5 * BLOCKS * size
        for backing in backings:
            backing.give_back()
            backing.give_back()
        assert resident_bytes() - before < KEPT_BLOCKS * SMALL + (1 << 20)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_reading_bytes_that_are_gone_ends_the_process(size: int) -> None:
    """Zeros would be trained on."""
    backing = Backing(size, CPU)
    view = bytes_of(backing)
    for is_there in (False, True, False):
        if is_there:
            backing.take()
        else:
            backing.give_back()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os._exit(int(view[size // 2]) * 0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) == (not is_there)


def test_small_blocks_are_reused_as_they_are_and_under_a_storage() -> None:
    tensor = new_tensor(SMALL, torch.uint8, CPU).fill_(5)
    address = tensor.data_ptr()
    del tensor
    again = new_tensor(SMALL, torch.uint8, CPU)
    assert again.data_ptr() == address
    again.fill_(6)
    del again
    backing = Backing(SMALL, CPU)
    view = bytes_of(backing)
    backing.take()
    assert int(view.min()) == 6  # the same pages
    backing.give_back()
    assert int(new_tensor(SMALL, torch.uint8, CPU).max()) == 6
    assert int(new_tensor(SMALL // 2, torch.uint8, CPU).max()) == 0  # another size: new pages


def test_if_pages_cannot_be_moved_they_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "move_pages", lambda *_, **__: False)
    backing = Backing(SMALL, CPU)
    view, before = bytes_of(backing), resident_bytes()
    for _ in range(3):
        kept = new_tensor(SMALL, torch.uint8, CPU).fill_(8)
        del kept
        backing.take()
        assert not view.any()
        assert not bulk._kept
        view.fill_(9)
        backing.give_back()
    assert resident_bytes() - before < SMALL // 2


def test_bytes_are_given_back_also_where_no_new_mapping_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    backing = Backing(SMALL, CPU)
    view = bytes_of(backing)
    backing.take()
    view.fill_(9)
    with monkeypatch.context() as patch:  # as with a limit on address space (ulimit -v)
        patch.setattr(bulk, "map_pages", lambda size: (_ for _ in ()).throw(BudgetError("no memory")))
        backing.give_back()
    backing.take()
    assert not view.any()


def test_only_a_few_blocks_are_kept() -> None:
    held = [new_tensor(SMALL, torch.uint8, CPU) for _ in range(3 * KEPT_BLOCKS)]
    held += [new_tensor(LARGE, torch.uint8, CPU) for _ in range(2)]
    held.clear()
    assert len(bulk._kept) == KEPT_BLOCKS
    assert {size for size, _ in bulk._kept} == {-(-SMALL // 4096) * 4096}


def test_threads_never_share_a_block() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        backing = Backing(SMALL, CPU)
        view = bytes_of(backing)
        for turn in range(100):
            tensor = new_tensor(SMALL, torch.uint8, CPU).fill_(number)
            backing.take()
            view.fill_(number + 100)
            if int(tensor.min()) != number or int(tensor.max()) != number or int(view.min()) != number + 100:
                wrong.append(turn)
            backing.give_back()
            del tensor

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_conversion_is_the_tensor_itself_unless_something_changes() -> None:
    tensor = new_tensor(1000, torch.float32, CPU).copy_(torch.arange(1000.0))
    assert convert(tensor, torch.float32) is tensor
    copy = convert(tensor, torch.float32, copy=True)
    assert copy.data_ptr() != tensor.data_ptr()
    assert torch.equal(copy, tensor)
    assert torch.equal(convert(tensor, torch.bfloat16), tensor.to(torch.bfloat16))
    assert new_tensor(0, torch.float32, CPU).numel() == 0
    empty = Backing(0, CPU)
    empty.give_back()
    empty.take()
