"""What the ranks of a job tell each other besides their collectives: where each is, and what made the job fail.

It is kept in the job's store, over its own connection, because a blocked call may hold that of the process group.
Every method may block for as long as the store's host does, so one thread of a process, the heartbeat, calls them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unbounded.ranks.watchdog.verdict import Place, Seen

_CONNECT = timedelta(seconds=60)


class Notices:
    """The job's notice board, under keys that only this run uses."""

    def __init__(self, store: dist.Store, run: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store: dist.Store = dist.PrefixStore(f"unbounded/{run}", _own_connection(store))
        self._posted: set[int] = set()

    def post(self, seen: Seen, beat: int) -> None:
        """Tells where this rank is. `beat` is different every time, which shows that the rank is alive."""
        places = {key: (place.begun, place.is_inside, place.what, place.seconds) for key, place in seen.places.items()}
        record = (beat, places, seen.where, seen.doing, seen.waiting_seconds, seen.has_left)
        self._store.set(f"rank/{self.rank}", json.dumps(record))

    def read(self, ranks: Sequence[int]) -> dict[int, tuple[int, Seen]]:
        """The last post of each of `ranks` with its beat, which is 0 for a rank that has posted nothing."""
        for rank in ranks:
            if rank not in self._posted and self._store.check([f"rank/{rank}"]):
                self._posted.add(rank)
        known = [rank for rank in ranks if rank in self._posted]
        values = self._store.multi_get([f"rank/{rank}" for rank in known]) if known else []
        found = {rank: _read(rank, json.loads(value)) for rank, value in zip(known, values, strict=True)}
        return {rank: found.get(rank, (0, Seen(rank, {}))) for rank in ranks}

    def fail(self, text: str) -> None:
        """Tells what made this rank fail. The first failure is the one of the job."""
        self._store.compare_set("failed", "", json.dumps((self.rank, text)))

    def failure(self) -> tuple[int, str] | None:
        """What made the job fail, and on which rank."""
        if not self._store.check(["failed"]):
            return None
        rank, text = json.loads(self._store.get("failed"))
        return int(rank), str(text)

    def say(self, key: str, text: str) -> None:
        """Posts a text of this rank for its peers."""
        self._store.set(f"{key}/{self.rank}", text)

    def hear(self, key: str, ranks: Iterable[int]) -> dict[int, str]:
        """What the ranks have said there so far."""
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        return {rank: self._store.get(name).decode() for rank, name in keys.items() if self._store.check([name])}

    def count(self, key: str, amount: int) -> int:
        """Adds to a number that the ranks share, and returns the new value."""
        return int(self._store.add(key, amount))


def _read(rank: int, record: list[Any]) -> tuple[int, Seen]:
    beat, places, where, doing, waiting_seconds, has_left = record
    found = {key: Place(*place) for key, place in places.items()}
    return beat, Seen(rank, found, where, doing, waiting_seconds, has_left=has_left)


def _own_connection(store: dist.Store) -> dist.Store:
    """Another connection to the same store, if it can be connected to."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
    return store
