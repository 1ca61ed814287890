"""The three tiers of one rank: makes arrays on them and counts what each holds."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from unbounded.errors import BudgetError
from unbounded.native.bulk import new_tensor
from unbounded.native.disk import ExtentStore
from unbounded.native.host_memory import available_bytes
from unbounded.planner.models.packed_size import packed_bytes
from unbounded.planner.sizes import format_bytes
from unbounded.tiers.arena import HostArena
from unbounded.tiers.array import PAGE, Array, DiskArray, MemoryArray
from unbounded.tiers.driver import resident_bytes
from unbounded.tiers.packed.packed_array import PackedArray
from unbounded.tiers.pool import BufferPool
from unbounded.tiers.staging import size_staging


@dataclass(frozen=True)
class TierUse:
    """What one tier holds, the budget it was given (None: no limit was set), and how much of it activations take."""

    used_bytes: int
    budget_bytes: int | None
    activation_bytes: int = 0


class Tiers:
    """Device, host and disk. The disk store is fully reserved at the start, so the disk cannot run full later."""

    def __init__(
        self,
        device: torch.device,
        *,
        budgets: dict[str, int | None],
        disk_bytes: int,
        disk_path: tuple[str, ...] | None,
        num_threads: int,
        disk_checksums: bool = True,
    ) -> None:
        self.device, self.budgets = device, budgets
        self.arena = HostArena(pin=device.type == "cuda", num_threads=num_threads)
        self._used = {"device": 0, "disk": 0}
        self.planned_host_bytes = 0  # for states and buffers, whether they are allocated yet or not
        self.activation_bytes = 0  # part of the host's, for activations
        # Frees what the host holds only to make steps shorter. (Returns the function, or None once its owner is gone.)
        self.give_up: Callable[[], Callable[[], None] | None] = lambda: None
        # If a GPU computes, the host's budget is for the process: what it had before is not ours.
        self._resident_before = resident_bytes() if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._paths, self._checksums = disk_path or (tempfile.gettempdir(),), disk_checksums
        self._stores: list[ExtentStore] = []
        if disk_bytes:
            self._reserve_disk(disk_bytes)

    def pool(self, count: int, buffer_bytes: int) -> BufferPool:
        return BufferPool(self.arena, buffer_bytes, count)

    @cached_property
    def staging(self) -> BufferPool:
        """The buffers of checkpoints; one save or load at a time leases them."""
        count, buffer_bytes = size_staging(self.budgets["host"])
        return self.pool(count, buffer_bytes)

    def allocate(
        self,
        tier: str,
        dtype: torch.dtype,
        numel: int,
        bounce: BufferPool,
        *,
        initial: float = 0.0,
        pin: bool | None = None,
        unplanned_bytes: int = 0,
        store: ExtentStore | None = None,
    ) -> Array:
        """An array on `tier` filled with `initial`. A new extent on disk reads as zeros without being written.

        `unplanned_bytes` of it were not planned when the states were placed, so the host's budget may have no room.
        `store` is what `extend` returned; without it, an array on disk is in what was reserved at the start.
        """
        num_bytes = numel * dtype.itemsize
        if tier == "host" and unplanned_bytes:
            self._plan_more(
                unplanned_bytes,
                "adding up the gradients of several backwards takes {} more host memory for this unit",
                'Raise host_bytes, add up in bf16 with accumulate_dtype="bf16", or place gradients or optimizer states '
                'on "disk".',
            )
        array: Array
        if tier == "device":
            array = MemoryArray(new_tensor(numel, dtype, self.device).fill_(initial), tier)
        elif tier == "host":
            array = self._take_host(dtype, numel, pin=pin, planned_bytes=unplanned_bytes)
            if initial:
                array.tensor.fill_(initial)
        else:
            array = DiskArray(store or self._stores[0], bounce, dtype, numel)
            if initial or not array.is_zero:
                try:
                    array.evict(new_tensor(numel, dtype, torch.device("cpu")).fill_(initial)).wait()
                except Exception:
                    array.free()
                    raise
        if tier != "host":
            self.count(tier, num_bytes)
        return array

    def allocate_packed(self, tier: str, numel: int, bounce: BufferPool) -> PackedArray:
        """An array of bf16 zeros on host or disk, for weights that do not change, or seldom."""
        inner = self.allocate(tier, torch.uint8, packed_bytes(numel), bounce)
        return PackedArray(inner, numel, self._allocate_loose)

    def _allocate_loose(self, numel: int) -> Array:
        """Host memory for frozen weights that do not pack, which was not planned."""
        num_bytes = numel * torch.bfloat16.itemsize
        self._plan_more(
            num_bytes,
            "frozen weights of this unit do not pack, because their exponents differ too much. They take {} more host "
            "memory",
            "Raise host_bytes, or keep frozen weights as they are: pack_frozen=False.",
        )
        return self._take_host(torch.bfloat16, numel, pin=False, planned_bytes=num_bytes)

    def _take_host(self, dtype: torch.dtype, numel: int, *, pin: bool | None, planned_bytes: int) -> MemoryArray:
        """Memory of the arena. If the system refuses it, or once it is freed, `planned_bytes` are planned no more."""

        def release(tensor: torch.Tensor) -> None:
            self.arena.release(tensor)
            self.return_host(planned_bytes)

        try:
            return MemoryArray(self.arena.allocate(dtype, numel, pin=pin), "host", release)
        except BaseException:
            self.return_host(planned_bytes)
            raise

    def extend(self, *, host_bytes: int, disk_bytes: int) -> ExtentStore | None:
        """Takes room for states that were not there when the others were placed; returns a store if any go to disk."""
        store = self._reserve_disk(disk_bytes) if disk_bytes else None
        with self._lock:
            self.planned_host_bytes += host_bytes
        return store

    def shrink(self, *, host_bytes: int, store: ExtentStore | None) -> None:
        """Gives back what `extend` took."""
        with self._lock:
            self.planned_host_bytes -= host_bytes
        if store is not None:
            self._stores.remove(store)
            self.arena.count(-store.checksum_bytes)
            store.close()

    def _reserve_disk(self, num_bytes: int) -> ExtentStore:
        engine = self._stores[0].engine if self._stores else None
        store = ExtentStore(self._paths, num_bytes, checksum=self._checksums, engine=engine)
        self._stores.append(store)
        self.arena.count(store.checksum_bytes)
        return store

    def spare_bytes(self) -> dict[str, int]:
        """What is left of each tier's budget."""
        reserved = {"device": self._used["device"], "disk": sum(store.capacity_bytes for store in self._stores)}
        spare = {tier: (self.budgets[tier] or 0) - taken for tier, taken in reserved.items()}
        return {tier: 2**62 if self.budgets[tier] is None else left for tier, left in spare.items()} | {
            "host": self.spare_host_bytes()
        }

    def spare_host_bytes(self) -> int:
        """The part of the host's budget that neither states and buffers nor activations use or will use."""
        budget, states = self.budgets["host"], self.held_host_bytes()
        return 2**62 if budget is None else budget - states - self.activation_bytes - self.other_host_bytes()

    def make_spare(self, num_bytes: int) -> int:
        """What is spare of the host's budget. If that is less than `num_bytes`, what only makes steps shorter goes."""
        if self.spare_host_bytes() < num_bytes and (give_up := self.give_up()) is not None:
            give_up()
        return self.spare_host_bytes()

    def other_host_bytes(self) -> int:
        """What the process has come to take of the host besides states, buffers and activations."""
        if self._resident_before is None:
            return 0
        return max(0, resident_bytes() - self._resident_before - self.arena.used_bytes)

    def held_host_bytes(self) -> int:
        """What states and buffers take of the host, or will take."""
        return max(self.planned_host_bytes, self.arena.used_bytes - self.activation_bytes)

    def borrow_host(self, num_bytes: int) -> bool:
        """Takes `num_bytes` of spare memory for a while, if the budget and the machine have them."""
        with self._lock:
            if num_bytes > min(self.spare_host_bytes(), available_bytes() // 2):
                return False
            self.planned_host_bytes += num_bytes
            return True

    def return_host(self, num_bytes: int) -> None:
        """Gives back what `borrow_host` took, or what was planned for memory that is not taken."""
        with self._lock:
            self.planned_host_bytes -= num_bytes

    @contextmanager
    def planned_on_host(self, num_bytes: int) -> Iterator[None]:
        """States move to the host (or from it, if negative). If the block succeeds, their bytes are counted."""
        self.make_spare(num_bytes)
        with self._lock:
            spare = self.spare_host_bytes()
            if num_bytes > spare:
                raise BudgetError(
                    f"moving {format_bytes(num_bytes)} of states from the device takes more than the "
                    f"{format_bytes(max(0, spare))} that are left of host_bytes="
                    f"{format_bytes(self.budgets['host'] or 0)}. Raise host_bytes, or run fewer tokens at once."
                )
            self.planned_host_bytes += max(0, num_bytes)
        try:
            yield
        except BaseException:
            self.return_host(max(0, num_bytes))
            raise
        self.return_host(max(0, -num_bytes))

    @contextmanager
    def all_or_none(self) -> Iterator[dict[str, Array]]:
        """Gives a dict for new arrays. If the block raises, the arrays in it are freed."""
        made: dict[str, Array] = {}
        try:
            yield made
        except BaseException:
            for array in made.values():
                self.free(array)
            raise

    def free(self, array: Array) -> None:
        """Gives back an array of `allocate`."""
        num_bytes = array.held_bytes
        array.free()
        if array.tier != "host":
            self.count(array.tier, -num_bytes)

    def _plan_more(self, num_bytes: int, what: str, remedy: str) -> None:
        """Plans host memory for `what`, a sentence with a place for the bytes; if it is not left, says the remedy."""
        with self._lock:
            spare = self.spare_host_bytes()
            if spare < num_bytes:
                raise BudgetError(
                    f"{what.format(format_bytes(num_bytes))}, but only {format_bytes(max(0, spare))} of "
                    f"{format_bytes(self.budgets['host'] or 0)} are left. {remedy}"
                )
            self.planned_host_bytes += num_bytes

    def count(self, tier: str, num_bytes: int) -> None:
        """Counts bytes on a tier that were allocated elsewhere (negative: freed)."""
        with self._lock:
            self._used[tier] += num_bytes

    def use(self) -> dict[str, TierUse]:
        used = {"device": self._used["device"], "host": self.arena.used_bytes, "disk": self._used["disk"]}
        activations = {"host": self.activation_bytes}
        return {tier: TierUse(count, self.budgets[tier], activations.get(tier, 0)) for tier, count in used.items()}

    def close(self) -> None:
        self.arena.close()
        for store in reversed(self._stores):
            store.close()


def disk_size(num_bytes: int) -> int:
    """What an array of `num_bytes` takes on disk."""
    return max(PAGE, -(-num_bytes // PAGE) * PAGE)
