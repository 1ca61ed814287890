"""`load`: brings a checkpoint into a running model, whatever its number of ranks, stage, tiers and state format.

    rank 0  finds the checkpoint
    all     manifest, files, model and optimizer compared: nothing is changed while anything differs
    all     small values read and verified
    all     states in one pass; every block is verified before it is used
    all     agree; counts, hyper-parameters, random states; gathered copies made stale

Nothing half-loaded can be used. A rank's share up to STAGED_BYTES, and no more than the host's budget has left, is
verified whole before anything is changed, so a damaged checkpoint leaves the model as it was. A larger one is put in
place as it is read, because reading twice would halve the speed and a second copy would double the memory. If anything
fails after the model has begun to change (a damaged block, or the disk tier while it takes what was staged), every unit
is marked, on all ranks, and refuses to be trained, read or saved until a load succeeds.

If another job replaces a checkpoint while it is read, the new one, which is whole too, is read from the start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.extra_states import put_extra_states
from unbounded.checkpoint.format import folder as folders
from unbounded.checkpoint.format.folder import ATTEMPTS
from unbounded.checkpoint.load.counterpart import warn_of_other_ranks
from unbounded.checkpoint.load.opened import OpenedCheckpoint
from unbounded.checkpoint.load.transfer import Transfer
from unbounded.checkpoint.peers import Peers, peers_of
from unbounded.checkpoint.random_states import restore_random_states
from unbounded.checkpoint.saving import check_optimizer, finish_pending
from unbounded.errors import CheckpointError, MissingCheckpointError, StateError
from unbounded.held_interrupts import HeldBack
from unbounded.native.bulk import fill
from unbounded.sharding.running import sharded
from unbounded.tiers.current_device import on_device
from unbounded.zero.setup.assembly import Sharded

STAGED_BYTES = 256 << 20


def load(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """All ranks must call this. Loads the checkpoint in `folder` into the model and returns its `extra`.

    Values that differed between the ranks come back to each; where other ranks load them, a warning names them.

    The folder is the one that the first rank names; what others name is not used.

    With `optimizer`, its states, step counts, hyper-parameters, loss scale, gradients added up so far and the random
    states are loaded too; without it, only weights and buffers. If there is no whole checkpoint, all ranks raise a
    FileNotFoundError; if it is of another model or optimizer, a CheckpointError that lists what differs.
    """
    state = sharded(model)
    state.engine.refuse_inside_full_params("unbounded.load")
    check_optimizer(state, optimizer)
    if optimizer is None:  # which alone would take back what a backward has done to its states
        state.engine.refuse_pending("unbounded.load() without the optimizer")
    with HeldBack(), on_device(state.engine.device):
        return _load(folder, model, state, with_optimizer=optimizer is not None)


def _load(folder: str | os.PathLike[str], model: nn.Module, state: Sharded, *, with_optimizer: bool) -> dict[str, Any]:
    """All ranks must call this. The model's device is the current one."""
    finish_pending(model)
    state.engine.confirm("unbounded.load()" if with_optimizer else "unbounded.load() without the optimizer")
    _put_aside_failures(state)
    peers = peers_of(model, state.engine.axes.world, "unbounded.load()")
    return _Loading(state, model, peers, with_optimizer=with_optimizer).run(folder)


def _put_aside_failures(state: Sharded) -> None:
    """Waits for whatever is running. A failure does not prevent loading, because loading is how to continue.

    A lost gradient stays lost until it is dropped, which a load with the optimizer does.
    """
    engine = state.engine
    for unit in engine.units:
        handles = [unit.weights_ready, unit.states_written, unit.gradient.adding if unit.trainable else None]
        for handle in handles:
            if handle is not None:
                handle.finish()
        if any(handle is not None and handle.failed() for handle in handles[:2]):
            unit.forget_update()
    engine.settle()
    for unit in engine.units:
        engine.gathering.order_stream(unit)  # for a unit that is whole on the device
    engine.failures.forget()
    if engine.device.type == "cuda":
        torch.cuda.current_stream(engine.device).synchronize()


class _Loading:
    """One load on one rank."""

    def __init__(self, state: Sharded, model: nn.Module, peers: Peers, *, with_optimizer: bool) -> None:
        self.state, self.model, self.peers, self.with_optimizer = state, model, peers, with_optimizer
        self._folder = Path()
        self._identity: tuple[int, ...] | None = None
        self._is_over = False

    def run(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._load(folder)
            except Exception:
                if self._is_over or attempt == ATTEMPTS or not self._was_replaced():
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        self._find(folder)
        opened = OpenedCheckpoint(self.state, self.model, self._folder, self.peers, with_optimizer=self.with_optimizer)
        try:
            marks = self.peers.agree(opened.open)
            if len(set(marks)) > 1:
                raise CheckpointError(
                    f"the ranks see different checkpoints in {self._folder}. Load from a shared disk."
                )
            needs = self.peers.agree(opened.prepare)
            rooms = self.peers.agree(self._room)
            staged = all(need <= room for need, room in zip(needs, rooms, strict=True))
            self._bring_in(opened, staged=staged)
            warn_of_other_ranks(opened.manifest.values, self._folder, self.state.engine.axes)
        finally:
            opened.close()
        put_extra_states(self.model, opened.extra_states, self._folder)
        return dict(opened.extra)

    def _find(self, folder: str | os.PathLike[str]) -> None:
        """Only the first rank looks, and all of them get its answer."""

        def look() -> tuple[str, str, tuple[int, ...] | None]:
            if self.peers.rank > 0:
                return "", "", None
            try:
                found = folders.find(folder)
            except MissingCheckpointError as error:
                return "", str(error), None
            return str(found), "", folders.identify(found)

        found, missing, self._identity = self.peers.agree(look)[0]
        if missing:
            raise MissingCheckpointError(missing)
        self._folder = Path(found)

    def _was_replaced(self) -> bool:
        """All ranks must call this. Whether the checkpoint was replaced since it was read."""
        if self._identity is None:
            return False
        return bool(self.peers.agree(lambda: folders.identify(self._folder) != self._identity)[0])

    def _room(self) -> int:
        """How much this rank may hold in memory until all of it is verified."""
        tiers = self.state.tiers
        budget, pool = tiers.budgets["host"], tiers.staging
        if budget is None:
            return STAGED_BYTES
        return min(STAGED_BYTES, budget - tiers.arena.used_bytes - pool.count * pool.buffer_bytes)

    def _bring_in(self, opened: OpenedCheckpoint, *, staged: bool) -> None:
        assert opened.files is not None
        staging = self.state.tiers.staging
        transfer = Transfer(opened.files, opened.source, staging, staged=staged)
        has_begun = not staged
        try:
            self.peers.agree(lambda: self._transfer(opened, transfer))
            has_begun = True
            self.peers.agree(transfer.install)
            self._is_over = True  # the others may be done from here on
            self._finish(opened)
        except BaseException as error:
            if has_begun:
                self._mark(str(error) or type(error).__name__)
            raise

    def _transfer(self, opened: OpenedCheckpoint, transfer: Transfer) -> None:
        with torch.no_grad():
            transfer.copy(opened.copies)
            transfer.convert(opened.conversions)
            if self.with_optimizer:
                assert self.state.optimizer is not None
                transfer.later(self.state.optimizer.forget_gradients)
                opened.put_gradients(transfer.later)

    def _mark(self, reason: str) -> None:
        """Makes every use of the model's states raise, until a load succeeds."""
        for unit in self.state.engine.units:
            unit.spoil(
                StateError(
                    f"a load failed after it had begun to change the model ({reason}), so the model's states are not "
                    "usable. Load a whole checkpoint, or build the model again."
                )
            )
            self.state.engine.gathering.invalidate(unit)

    def _finish(self, opened: OpenedCheckpoint) -> None:
        """Nothing here can fail, because everything was read and checked before."""
        engine = self.state.engine
        with torch.no_grad():
            for name, value in opened.new_buffers.items():
                fill(opened.buffers[name], value)
        for unit in engine.units:
            unit.forget_update()
            if unit.resident and not unit.is_whole:
                engine.gathering.invalidate(unit)
        if engine.device.type == "cuda":
            torch.cuda.current_stream(engine.device).synchronize()
        if self.with_optimizer:
            self._finish_optimizer(opened)
        if opened.random is not None:
            restore_random_states(opened.random, engine.device)

    def _finish_optimizer(self, opened: OpenedCheckpoint) -> None:
        optimizer = self.state.optimizer
        assert optimizer is not None
        for unit in self.state.engine.units:
            for index, slot in enumerate(unit.layout.slots):
                unit.steps[index], unit.scalars[index] = opened.counts[slot.name]
        for group, options in zip(optimizer.param_groups, opened.options, strict=True):
            group.update(options)
        optimizer.resume(opened.progress)
        if opened.factor is not None:
            for unit in self.state.engine.units:
                unit.gradient.scale(opened.factor)
