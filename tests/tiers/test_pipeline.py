"""The pipeline of read, work and write: its order, its bounds, and what it leaves after a failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.ranks import HANG_SECONDS
from unbounded.tiers.arena import HostArena
from unbounded.tiers.item_pipeline import ItemPipeline
from unbounded.tiers.pool import BufferPool, Lease


class Recorder:
    """Stages that record what happens. `fails` is the event that raises."""

    def __init__(self, fails: str = "") -> None:
        self.events: list[str] = []
        self._fails = fails

    def _note(self, what: str, item: int) -> None:
        self.events.append(f"{what}{item}")
        if self.events[-1] == self._fails:
            raise OSError(self._fails)

    def read(self, item: int) -> None:
        self._note("r", item)

    def work(self, item: int) -> None:
        self._note("w", item)

    def finish(self, item: int) -> None:
        self._note("f", item)

    def abandon(self, item: int) -> None:
        self._note("a", item)
        raise ValueError("what is raised here is not told")


def test_items_are_read_ahead_worked_on_in_order_and_finished_later() -> None:
    stages = Recorder()

    def items() -> Iterator[int]:
        for item in range(4):
            stages.events.append(f"i{item}")  # an item is asked for only when there is room for it
            yield item

    ItemPipeline(stages, num_ahead=2, num_unfinished=1).run(items())
    expected = "i0 r0 i1 r1 w0 i2 r2 w1 f0 i3 r3 w2 f1 w3 f2 f3"
    assert stages.events == expected.split()


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ("r1", "r0 r1 a0 a1"),
        ("w1", "r0 r1 w0 r2 w1 a0 a1 a2"),
        ("f0", "r0 r1 w0 r2 w1 f0 a0 a1 a2"),
        ("f3", "r0 r1 w0 r2 w1 f0 r3 w2 f1 w3 f2 f3 a3"),
    ],
)
def test_after_a_failure_everything_in_flight_is_abandoned_and_the_first_error_is_raised(
    fails: str, expected: str
) -> None:
    stages = Recorder(fails)
    with pytest.raises(OSError, match=fails):
        ItemPipeline(stages, num_ahead=2, num_unfinished=1).run(range(4))
    assert stages.events == expected.split()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_pipeline_never_waits_for_buffers_of_its_own(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more may be in flight than there are buffers, so the pool would block forever. Failed ones do not count."""
    pool, held, most = BufferPool(HostArena(pin=False, num_threads=1), 4096, count), dict[int, Lease](), [0]

    class Stages(Recorder):
        def read(self, item: int) -> None:
            held[item] = pipeline.lease()
            most[0] = max(most[0], len(held))

        def finish(self, item: int) -> None:
            held.pop(item).release()

    pipeline = ItemPipeline(Stages(), num_ahead=8, num_unfinished=8, pool=pool)
    with monkeypatch.context() as patched:
        patched.setattr(HostArena, "allocate", _fail)
        with pytest.raises(MemoryError):
            pipeline.run(range(1))
    pipeline.run(range(20))
    assert not held
    assert most[0] == count


def test_two_pipelines_of_one_pool_do_not_wait_for_each_other() -> None:
    """Each holds a buffer, and asks for one more."""
    pool, meeting = BufferPool(HostArena(pin=False, num_threads=1), 4096, 2), threading.Barrier(2)

    class Stages(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.held: dict[int, Lease] = {}
            self.pipeline = ItemPipeline(self, num_ahead=2, num_unfinished=2, pool=pool)

        def read(self, item: int) -> None:
            self.held[item] = self.pipeline.lease()
            if item == 0:
                meeting.wait(HANG_SECONDS)

        def finish(self, item: int) -> None:
            self.held.pop(item).release()

    pipelines = [Stages().pipeline for _ in range(2)]
    threads = [threading.Thread(target=pipeline.run, args=(range(8),), daemon=True) for pipeline in pipelines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def _fail(*_: object) -> None:
    raise MemoryError
