"""What may be read ahead, from the memory of a device that the test counts."""

from __future__ import annotations

from tests.activations.test_headroom import Device
from unbounded.activations.read_room import ReadRoom

UNIT, INPUT, DEPTH = 10, 3, 8


class Passes:
    """Forwards that keep an input for each block, and backwards that take `work` more while they run a block again."""

    def __init__(self, limit: int) -> None:
        self.device, self.gathered = Device(states=1), 0
        self.room = ReadRoom(self.device, limit=lambda: limit, gathered=lambda: self.gathered)

    def forward(self, size: int = INPUT) -> list[int]:
        """The blocks before which a unit might be read."""
        return [block for block in range(DEPTH) if self.visit(size, is_backward=False)]

    def backward(self, size: int = INPUT, work: int = 20) -> list[int]:
        self.room.begin_backward()
        allowed = []
        for block in reversed(range(DEPTH)):
            if self.visit(-size, is_backward=True):
                allowed.append(block)
            self.device.take(work)
            self.device.take(-work)
        self.room.end_backward()
        return allowed

    def visit(self, grows: int, *, is_backward: bool) -> bool:
        self.gathered = UNIT - self.gathered  # which comes and goes, and must not matter
        self.device.now += self.gathered
        allowed = self.room.allows(UNIT, is_backward=is_backward)
        self.device.now -= self.gathered
        self.device.take(grows)
        return allowed


def test_a_full_device_has_room_for_what_a_backward_has_freed_and_for_what_a_pass_before_survived() -> None:
    passes = Passes(limit=0)
    assert passes.forward() == []
    assert passes.backward() == [3, 2, 1, 0]  # after four inputs of 3
    assert passes.forward() == [0, 1, 2, 3, 4]  # up to the 24 that the backward began with
    assert passes.backward() == [3, 2, 1, 0]


def test_a_device_with_room_to_spare_has_it_everywhere_once_a_pass_has_shown_that() -> None:
    passes = Passes(limit=10_000)
    assert passes.forward() == []
    assert passes.backward() == [3, 2, 1, 0]
    assert passes.forward() == list(range(DEPTH))
    assert passes.backward() == list(reversed(range(DEPTH)))


def test_a_larger_batch_shows_it_again() -> None:
    passes = Passes(limit=10_000)
    passes.forward()
    passes.backward()
    assert passes.forward(2 * INPUT) == [0, 1, 2, 3, 4]  # more than any pass has held
    assert passes.backward(2 * INPUT) == [5, 4, 3, 2, 1, 0]
    assert passes.forward(2 * INPUT) == list(range(DEPTH))
