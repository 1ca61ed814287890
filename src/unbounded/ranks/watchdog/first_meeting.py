"""The first call to this library on every rank, before anybody watches: who has made it is in the job's store.

A rank may prepare data for a long time before it comes, so the others wait as long as torch allows. If that ends, or
a connection breaks, they name the ranks that did not come.

A store may outlive a job: torchrun's has the keys of workers that it has restarted since. How often it has is no name
for those that are there now, because the launchers of two nodes count for themselves. So ranks that are about to make a
group call each other by names that nobody has had (`RollCall`).
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Sequence

import torch
import torch.distributed as dist

from unbounded.errors import PeerError

TOLD_AFTER_SECONDS = 60.0


class Arrivals:
    """The ranks that have come to a meeting, by the keys that they set in a store: each time another one."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = dist.PrefixStore("unbounded-arrivals", store), rank, size
        self._began, self._is_told = time.monotonic(), False
        self._enter()

    def _enter(self) -> None:
        self._meeting = str(self._store.add(f"number/{self.rank}", 1))
        self._store.set(self._key(self.rank), "")

    @property
    def seconds(self) -> float:
        """Since this rank came."""
        return time.monotonic() - self._began

    def is_complete(self) -> bool:
        """Whether every rank has come."""
        return self._store.check([self._key(rank) for rank in range(self.size)])

    def absent(self) -> list[int]:
        """The ranks that have not come."""
        return [rank for rank in range(self.size) if not self._store.check([self._key(rank)])]

    def tell(self) -> None:
        """Prints, once and after a while, whom this rank waits for."""
        if not self._is_told and self.seconds > TOLD_AFTER_SECONDS:
            self._is_told = True
            print(
                f"unbounded: rank {self.rank} has waited {self.seconds:.0f} s for {name_ranks(self.absent())} to make "
                "the first call to unbounded. Every rank must make it.",
                file=sys.stderr,
            )

    def _key(self, rank: int) -> str:
        return f"{rank}/{self._meeting}"


class RollCall(Arrivals):
    """A meeting of the ranks that are there now, in a store that may have the keys of others before them.

    The first rank calls under a name that nobody has had. Each of the others answers by a name of its own. Once all
    have, the first rank repeats the answers: who finds its own among them was called by this one, not by an earlier.
    """

    def _enter(self) -> None:
        self._own, self._meeting = uuid.uuid4().hex, ""
        if self.rank == 0:
            self._store.set("call", self._own)

    def is_complete(self) -> bool:
        """Whether every rank has come. Each must ask until it is so."""
        self._answer()
        answers = _answers(self._meeting)
        if self.rank == 0 and super().is_complete():
            found = [self._store.get(self._key(rank)).decode() for rank in range(self.size)]
            self._store.set(answers, json.dumps(found))
        return self._store.check([answers]) and self._own in json.loads(self._store.get(answers))

    @property
    def name(self) -> str:
        """Of this meeting: no other has it."""
        return self._meeting

    def absent(self) -> list[int]:
        """The ranks that have not come."""
        return super().absent() if self._meeting else [0]

    def _answer(self) -> None:
        call = self._store.get("call").decode() if self._store.check(["call"]) else ""
        if call != self._meeting and not self._store.check([_answers(call)]):  # those of an old one are there already
            self._meeting = call
            self._store.set(self._key(self.rank), self._own)


def _answers(call: str) -> str:
    return f"answers/{call}"


def name_ranks(ranks: Sequence[int], link: str = "and") -> str:
    """Some ranks, in words."""
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else "the other ranks"
    shown = [*map(str, ranks[:8]), f"{len(ranks) - 8} more"] if len(ranks) > 8 else [*map(str, ranks)]
    return f"rank{'s' * (link == 'and')} {', '.join(shown[:-1])} {link} {shown[-1]}"


def name_run(group: dist.ProcessGroup) -> str:
    """All ranks must call this. Returns a name that only this job has, once every rank has come."""
    arrivals = Arrivals(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    config = str(dist.get_backend_config(group))
    device = "cuda" if "nccl" in config and "gloo" not in config else "cpu"
    name = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=device)
    names = [torch.empty_like(name) for _ in range(arrivals.size)]
    try:
        # Not a broadcast, which some ranks would leave although one is gone.
        work = dist.all_gather(names, name, async_op=True)
        assert work is not None
        while not work.is_completed():
            time.sleep(0.001)
            arrivals.tell()
        work.wait()
    except RuntimeError as error:
        raise PeerError(_describe(arrivals, error)) from error
    return bytes(names[0].tolist()).hex()


def _describe(arrivals: Arrivals, error: RuntimeError) -> str:
    waited = f"rank {arrivals.rank} waited {arrivals.seconds:.0f} s for every rank to make its first call to unbounded"
    try:
        absent = arrivals.absent()
    except RuntimeError:
        who = "the job's store is gone with its host, which is rank 0 or its launcher"
    else:
        who = f"{name_ranks(absent)} did not" if absent else "one that did has ended"
    return f"{waited}, but {who}: {error}. Look for the first error in the output of the ranks."
