"""What the driver counts, with made-up numbers."""

from __future__ import annotations

from unbounded.tiers.driver import left_over

GIB = 2**30


def test_what_is_left_over_is_within_the_device_and_the_allocators_limit() -> None:
    assert left_over(100 * GIB, 140 * GIB, 20 * GIB, 20 * GIB) == 100 * GIB
    assert left_over(100 * GIB, 24 * GIB, 20 * GIB, 20 * GIB) == 4 * GIB  # a budget, or a fraction that the user set
    assert left_over(10 * GIB, 140 * GIB, 20 * GIB, 20 * GIB) == 10 * GIB  # others have the rest


def test_memory_that_was_given_back_is_needed_again() -> None:
    assert left_over(30 * GIB, 24 * GIB, 4 * GIB, 22 * GIB) == 2 * GIB
    assert left_over(16 * GIB, 140 * GIB, 4 * GIB, 22 * GIB) == 0
