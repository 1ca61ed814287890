"""Decides whether a waiting rank should go on waiting: a pure function of what it has heard from its peers.

A rank waits in a collective. With every heartbeat, every peer tells where it is: how many collectives it has begun on
each communicator, whether it works in this library, waits in a collective, or runs the user's code. From that:

    a peer failed, or ended its program     raised at once, with the peer's own message
    a peer is silent for the limit          stopped, killed, or its link is lost
    the ranks wait for each other           raised as soon as two heartbeats show the same
    a peer runs the user's code             waited for up to the limit
    a peer compiles, saves, loads, reads    waited for as long as heartbeats come
    all are in the collective               waited for up to the limit and the time that its bytes may take
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The rate of the slowest link worth using: a collective of many bytes may take that long.
LEAST_BYTES_PER_SECOND = 10e6
# A beat that takes longer waits for the job's store, not for its turn on a busy machine.
LATEST_BEAT = 5.0
ADVICE = (
    "Every rank must make the same calls in the same order: forward, backward, clip_grad_norm_, step, save, load, "
    "state_dict and full_params, equally often."
)


@dataclass(frozen=True)
class Place:
    """A rank's place in the sequence of one communicator: `begun` of them, the last one `what`, for `seconds`."""

    begun: int
    is_inside: bool
    what: str
    seconds: float


@dataclass(frozen=True)
class Seen:
    """A rank as it was last heard of."""

    rank: int
    places: Mapping[str, Place]
    where: str = ""
    doing: str = "running"  # "running" the user's code, "working" in the library or a compiler, "waiting"
    waiting_seconds: float = 0.0  # how long it has only waited, without beginning or ending a collective
    silent_seconds: float = 0.0
    has_beaten: bool = True  # whether a heartbeat has come since this rank began to look
    has_left: bool = False

    def begun(self, key: str) -> int:
        """How many collectives it has begun on a communicator."""
        return self.places[key].begun if key in self.places else 0

    def last(self) -> str:
        """Its last collective, in words."""
        if not self.places:
            return "It has not been in any collective yet"
        place = min(self.places.values(), key=lambda place: (not place.is_inside, place.seconds))
        if place.is_inside:
            return f"It is in {place.what}, for {place.seconds:.0f} s"
        return f"Its last collective was {place.what}, {place.seconds:.0f} s before"


@dataclass(frozen=True)
class Wait:
    """What a rank waits for: the `number`th collective of communicator `key`, for `seconds` so far."""

    rank: int
    key: str
    number: int
    what: str
    seconds: float
    members: tuple[int, ...]
    num_bytes: int = 0


def judge(wait: Wait, seen: Mapping[int, Seen], limit: float, beat: float) -> str | None:
    """Why waiting is over; None if it is not. `seen` has every rank that was heard of, and this one."""
    peers = [other for rank, other in sorted(seen.items()) if rank != wait.rank and rank in wait.members]
    absent = [other for other in peers if other.begun(wait.key) < wait.number]
    for other in absent:
        if other.has_left:
            return _waited(wait, other, f"which has ended its program. {other.last()}. {ADVICE}")
    for other in peers:
        if other.silent_seconds >= limit:
            return _waited(wait, other, describe_silence(other))
    if wait.seconds >= 2 * beat:
        circle = _find_circle(wait, seen, beat)
        if circle:
            shown = "; ".join(f"rank {rank} in {what}" for rank, what in sorted(circle.items()))
            return f"the ranks wait for each other: {shown}. {ADVICE}"
    if not all(other.has_beaten and other.silent_seconds <= 3 * beat for other in peers):
        return None  # until it is heard from again, or has been silent for long enough
    return _judge_patience(wait, seen, peers, absent, limit)


def silence_limit(beat: float, gaps: Iterable[float]) -> float:
    """After how long a silent rank counts as gone: three beats, at the pace of this rank's own heartbeat.

    If the machine is so busy that this rank's heartbeats are late, those of others may be too.
    """
    return max(3 * max((beat, *(min(gap, LATEST_BEAT) for gap in gaps))), 1.0)


def describe_silence(other: Seen) -> str:
    """Describes a rank that sends no heartbeat."""
    fact = (
        f"which has not been heard from for {other.silent_seconds:.0f} s: its process was stopped or killed, or its "
        "machine or the link to it is lost."
    )
    if not other.places:  # it had only just begun to be heard, and may have done much since
        return fact
    return f"{fact} It was last at {other.where or 'an unknown place'}. {other.last()}."


def _judge_patience(
    wait: Wait, seen: Mapping[int, Seen], peers: list[Seen], absent: list[Seen], limit: float
) -> str | None:
    if not absent:
        if wait.seconds < limit + wait.num_bytes / LEAST_BYTES_PER_SECOND:
            return None
        places = {other.rank: other.places[wait.key] for other in peers if other.begun(wait.key) == wait.number}
        inside = {wait.rank: wait.what, **{rank: place.what for rank, place in places.items()}}
        if len(set(inside.values())) > 1:
            shown = "; ".join(f"rank {rank} in {what}" for rank, what in sorted(inside.items()))
            return f"the ranks are in different collectives, which never end: {shown}. {ADVICE}"
        fact = f"rank {wait.rank} has been in {wait.what} for {wait.seconds:.0f} s, and so has every other rank"
        return f"{fact}: a link between them is lost. Check the network between the machines."
    if wait.seconds < limit:
        return None
    culprit = _follow(absent[0], seen)
    if culprit.rank == wait.rank:  # who waits for this one in turn
        culprit = absent[0]
    if culprit.doing == "working":
        return None
    elsewhere = (
        f"which is alive but elsewhere: at {culprit.where or 'an unknown place'}. {culprit.last()}. {ADVICE} If one "
        f"rank may take longer than {limit:g} s by itself, raise watchdog_seconds in the plan."
    )
    return _waited(wait, culprit, elsewhere)


def _waited(wait: Wait, other: Seen, why: str) -> str:
    return f"rank {wait.rank} waited {wait.seconds:.0f} s in {wait.what} for rank {other.rank}, {why}"


def _waits_for(other: Seen, seen: Mapping[int, Seen]) -> dict[int, str]:
    """The ranks that a waiting rank waits for, and in what."""
    found: dict[int, str] = {}
    for key, place in other.places.items():
        if place.is_inside:
            late = [peer.rank for peer in seen.values() if key in peer.places and peer.begun(key) < place.begun]
            found.update(dict.fromkeys(late, place.what))
    return found


def _follow(other: Seen, seen: Mapping[int, Seen]) -> Seen:
    """The rank at the end of a chain of waiting ranks: the one that all wait for."""
    passed: set[int] = set()
    while other.doing == "waiting" and other.rank not in passed:
        passed.add(other.rank)
        late = [rank for rank in _waits_for(other, seen) if rank not in passed]
        if not late:
            break
        other = seen[min(late)]
    return other


def _find_circle(wait: Wait, seen: Mapping[int, Seen], beat: float) -> dict[int, str]:
    """The ranks that only wait for each other in a circle, and what each is in; empty if there is no circle.

    A rank waits in several threads. If one of those in the circle also waits for a rank that does anything else, or was
    not heard from, all of them may wait for that one.
    """
    path: dict[int, str] = {}

    def search(rank: int) -> bool:
        for late, what in sorted(_waits_for(seen[rank], seen).items()):
            path[rank] = what
            if late == wait.rank or (late not in path and search(late)):
                return True
        path.pop(rank, None)
        return False

    if wait.rank not in seen or not all(_only_waits(seen[rank], beat) for rank in _waited_for(wait.rank, seen)):
        return {}
    return dict(path) if search(wait.rank) else {}


def _waited_for(rank: int, seen: Mapping[int, Seen]) -> list[int]:
    """This rank, those that it waits for, those that they wait for, and so on."""
    found = [rank]
    for each in found:  # which grows
        found += [late for late in _waits_for(seen[each], seen) if late not in found]
    return found


def _only_waits(other: Seen, beat: float) -> bool:
    is_heard = other.has_beaten and other.silent_seconds <= 3 * beat
    return is_heard and other.doing == "waiting" and other.waiting_seconds >= 2 * beat
