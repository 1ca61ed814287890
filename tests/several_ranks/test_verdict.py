"""Whether to go on waiting, decided from what was heard: without processes or clocks."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from unbounded.ranks.watchdog import heartbeat
from unbounded.ranks.watchdog.post import Post
from unbounded.ranks.watchdog.verdict import LATEST_BEAT, Place, Seen, Wait, judge, silence_limit
from unbounded.ranks.watchdog.watch import Watch

LIMIT, BEAT = 60.0, 1.0
BOTH = (0, 1)


def waiting(rank: int, key: str, begun: int, what: str, seconds: float = 10.0, **fields: Any) -> Seen:
    place = {key: Place(begun, True, what, seconds)}
    return Seen(rank, {**fields.pop("places", {}), **place}, "train.py:1 in main", "waiting", seconds, **fields)


def elsewhere(rank: int, **places: int) -> Seen:
    found = {key: Place(begun, False, f"collective {begun} of {key}", 70.0) for key, begun in places.items()}
    return Seen(rank, found, "train.py:41 in evaluate", "running")


def wait(seconds: float, number: int = 5, members: tuple[int, ...] = BOTH) -> Wait:
    return Wait(0, "gather", number, "the gather of unit 'u'", seconds, members)


def seen(*others: Seen) -> dict[int, Seen]:
    own = waiting(0, "gather", 5, "the gather of unit 'u'", places={"reduce": Place(3, False, "", 9.0)})
    return {0: own, **{other.rank: other for other in others}}


def test_a_rank_in_the_users_code_is_waited_for_up_to_the_limit() -> None:
    others = seen(elsewhere(1, gather=4))
    assert judge(wait(59), others, LIMIT, BEAT) is None
    reason = judge(wait(60), others, LIMIT, BEAT)
    assert reason is not None
    assert "rank 0 waited 60 s in the gather of unit 'u' for rank 1" in reason
    assert "at train.py:41 in evaluate" in reason
    assert "collective 4 of gather, 70 s before" in reason


@pytest.mark.parametrize("seconds", [60, 6000])
def test_a_rank_that_compiles_saves_or_reads_is_waited_for_while_its_heart_beats(seconds: float) -> None:
    busy = replace(elsewhere(1, gather=4), doing="working")
    assert judge(wait(seconds), seen(busy), LIMIT, BEAT) is None
    gone = replace(busy, silent_seconds=LIMIT)
    assert "has not been heard from for 60 s" in str(judge(wait(seconds), seen(gone), LIMIT, BEAT))


def test_a_rank_that_was_not_yet_heard_from_is_not_called_alive() -> None:
    unheard = replace(elsewhere(1, gather=4), has_beaten=False, silent_seconds=1.0)
    assert judge(wait(61), seen(unheard), LIMIT, BEAT) is None


def test_nothing_is_claimed_of_a_rank_that_was_gone_before_it_told_of_a_collective() -> None:
    unknown = Seen(1, {}, silent_seconds=61.0)
    reason = judge(wait(61), seen(unknown), LIMIT, BEAT)
    assert reason is not None
    assert reason.endswith(
        "for rank 1, which has not been heard from for 61 s: its process was stopped or killed, or "
        "its machine or the link to it is lost."
    )


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    ended = replace(elsewhere(1, gather=4), has_left=True)
    assert "which has ended its program" in str(judge(wait(1), seen(ended), LIMIT, BEAT))
    present = replace(elsewhere(1, gather=5), has_left=True)  # after this very collective
    assert judge(wait(1), seen(present), LIMIT, BEAT) is None


def test_ranks_that_wait_for_each_other_are_named_as_soon_as_they_do_nothing_else() -> None:
    other = waiting(1, "reduce", 4, "the reduction of unit 'v'", places={"gather": Place(4, False, "", 9.0)})
    reason = judge(wait(3), seen(other), LIMIT, BEAT)
    assert reason is not None
    assert "rank 0 in the gather of unit 'u'; rank 1 in the reduction of unit 'v'" in reason
    reading = replace(other, doing="working")  # its fetch lane reads a disk, and will come
    assert judge(wait(3), seen(reading), LIMIT, BEAT) is None
    just_begun = replace(other, waiting_seconds=0.5)
    assert judge(wait(3), seen(just_begun), LIMIT, BEAT) is None


@pytest.mark.parametrize("silent", [0.0, 5.0])
def test_a_circle_is_none_if_all_in_it_wait_for_somebody_else(silent: float) -> None:
    """A stopped rank has sent its part of a collective to rank 0 and not to 2: 0 is in the next one, for which 2 is
    late; 2 is in a reduction that another thread of 0 will come to. Both wait for rank 1."""
    stopped = replace(elsewhere(1, gather=4, reduce=3), silent_seconds=silent)
    second = waiting(2, "reduce", 4, "the reduction of unit 'v'", places={"gather": Place(4, False, "", 9.0)})
    everyone = wait(3, members=(0, 1, 2))
    assert judge(everyone, seen(stopped, second), LIMIT, BEAT) is None
    waits_too = waiting(1, "reduce", 3, "the reduction of unit 't'", silent_seconds=silent)  # when it was last heard
    reason = judge(everyone, seen(waits_too, second), LIMIT, BEAT)
    assert (reason is None) if silent else ("rank 0 in the gather of unit 'u'" in str(reason))
    gone = replace(stopped, silent_seconds=LIMIT)
    assert "for rank 1, which has not been heard from" in str(judge(everyone, seen(gone, second), LIMIT, BEAT))


def test_who_waits_in_turn_is_not_blamed() -> None:
    """Rank 0 waits for 1, which waits for 2, which is in the user's code."""
    second = waiting(1, "pipe", 2, "the exchange", places={"gather": Place(4, False, "", 9.0)})
    third = elsewhere(2, pipe=1, gather=4)
    reason = judge(wait(60, members=(0, 1)), seen(second, third), LIMIT, BEAT)
    assert reason is not None
    assert "for rank 2, which is alive but elsewhere" in reason


def test_nobody_waits_for_itself() -> None:
    other = waiting(
        1, "reduce", 4, "the reduction of unit 'v'", seconds=0.1, places={"gather": Place(4, False, "", 9.0)}
    )
    assert "for rank 1, which is alive" in str(judge(wait(60), seen(other), LIMIT, BEAT))


def test_a_collective_that_all_are_in_may_take_as_long_as_its_bytes() -> None:
    other = waiting(1, "gather", 5, "the gather of unit 'u'")
    large = replace(wait(61), num_bytes=10**9)
    assert judge(large, seen(other), LIMIT, BEAT) is None
    assert "a link between them is lost" in str(judge(wait(61), seen(other), LIMIT, BEAT))


def test_ranks_in_different_collectives_are_named_and_not_the_network() -> None:
    other = waiting(1, "gather", 5, "the sum of layer 'v'")
    assert judge(wait(59), seen(other), LIMIT, BEAT) is None
    reason = str(judge(wait(61), seen(other), LIMIT, BEAT))
    assert "different collectives, which never end: rank 0 in the gather of unit 'u'; rank 1 in the sum of" in reason
    assert "link" not in reason


def test_ranks_of_other_communicators_are_no_concern() -> None:
    stopped = replace(elsewhere(2), silent_seconds=1000.0)
    assert judge(wait(59), seen(elsewhere(1, gather=4), stopped), LIMIT, BEAT) is None


class EndsAfterTheSlice:
    """A collective that ends between the end of a slice of waiting and the question whether it has ended."""

    num_waits = 0

    def wait(self, timeout: Any = None) -> None:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_just_after_a_slice_has_not_failed() -> None:
    watch, post, work = Watch(SimpleNamespace(rank=0, seconds=0.01)), Post("gather", (0, 1)), EndsAfterTheSlice()
    post.begin("the gather", "unit 'a'")
    watch.wait(work, None, post, limit=1.0)
    assert work.num_waits == 2
    assert not post.place().is_inside


class Leaving:
    """A heartbeat that hears why a rank failed, and that it has left, after it was asked for the one."""

    rank, seconds, gaps, is_cut = 0, 0.01, (), False

    def __init__(self) -> None:
        self.failure: tuple[int, str] | None = None
        self.contact = time.monotonic()

    def seen(self) -> dict[int, Seen]:
        self.failure = 1, "ValueError: deliberate"
        return seen(replace(elsewhere(1, gather=4), has_left=True))

    def looking(self) -> Any:
        return nullcontext()


def test_a_rank_that_failed_and_left_is_told_with_its_own_message() -> None:
    told = "rank 1 failed: ValueError: deliberate (rank 0 was in the gather of unit 'u')"
    assert Watch(Leaving())._judge(wait(1), LIMIT) == told  # type: ignore[arg-type]
    post = Post("gather", BOTH)
    post.begin("the gather", "unit 'u'")
    assert Watch(Leaving())._find_reason(RuntimeError("the connection broke"), post) == told  # type: ignore[arg-type]


class Unheard(Leaving):
    """A heartbeat whose store has gone with the rank that held it."""

    def __init__(self, silent_seconds: float = 60.0, *, is_cut: bool = False) -> None:
        self.failure, self.contact, self.is_cut = None, time.monotonic() - silent_seconds, is_cut

    def seen(self) -> dict[int, Seen]:
        return {}


def test_a_broken_connection_without_a_store_is_told_with_the_ranks_at_its_other_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Watch, "_farewell_seconds", lambda _: 0.0)
    post = Post("gather", (0, 1, 3))
    post.begin("the gather", "unit 'u'")
    told = Watch(Unheard())._find_reason(RuntimeError("it broke."), post)  # type: ignore[arg-type]
    assert told.startswith(
        "rank 0 lost the connection to rank 1 or 3 in the gather of unit 'u': it broke. The job's store"
    )
    assert "has not answered for 60 s either: that process has probably ended" in told
    monkeypatch.undo()  # nothing is waited for where the connection to the store is broken, too
    told = Watch(Unheard(0.0, is_cut=True))._find_reason(RuntimeError("it broke."), post)  # type: ignore[arg-type]
    assert "cannot be reached either: that process has probably ended" in told


class Severed:
    """A store whose host is gone: every use of it fails, and torch prints a page."""

    rank, size, num_tries = 0, 2, 0

    def post(self, *_: Any) -> None:
        self.num_tries += 1
        raise dist.DistNetworkError("Broken pipe")


def test_a_store_whose_connection_is_broken_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(heartbeat.Heartbeat, "_is_current", lambda _: True)
    notices = Severed()
    beating = heartbeat.Heartbeat(notices, notices)  # type: ignore[arg-type]
    while not beating.is_cut:
        time.sleep(0.01)
    assert beating.ask(lambda notices: notices.post(), 1.0) is None  # type: ignore[call-arg]
    beating.end(10.0)
    assert not beating.is_alive()
    assert notices.num_tries == 1


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_that_cannot_show_itself_is_told_by_its_name() -> None:
    told: list[str] = []
    heartbeat = SimpleNamespace(
        rank=0,
        size=2,
        seconds=0.01,
        failure=None,
        is_alive=lambda: True,
        end=told.append,
        fail=lambda *a: told.extend(a),
    )
    Watch(heartbeat).close(Unreadable())  # type: ignore[arg-type]
    assert told[0] == "Unreadable, whose text cannot be shown"
    assert len(told) == 3  # with two limits: the heartbeat was ended, too


def test_a_rank_is_missing_after_three_beats_at_the_pace_of_this_ones_own() -> None:
    assert silence_limit(1.0, []) == silence_limit(1.0, [0.25, 1.0]) == 3.0
    assert silence_limit(0.1, [0.1]) == 1.0  # never sooner
    assert silence_limit(1.0, [1.0, 4.0, 1.0]) == 12.0  # a machine on which this rank's own beats come late
    assert silence_limit(1.0, [60.0]) == 3 * LATEST_BEAT
