"""`load`: a checkpoint into a running model, whatever its number of ranks, stage, tiers and state format.

    all   manifest, files, model and optimizer compared: nothing is changed while anything differs
    all   small values read and verified
    all   states in one pass; every block is verified before it is used
    all   agree; counts, hyper-parameters, random states; gathered copies made stale

Nothing half-loaded can be used. A rank's share up to STAGED_BYTES, and no more than the host's budget has left, is
verified whole before anything is changed, so the model is as it was before. A larger one is put in place as it is
read, because reading twice would halve the speed and a second copy would double the memory; should a block then turn
out to be damaged, every unit is marked, on all ranks, and refuses to be trained, read or saved until a load succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint import differences, values
from unbounded.checkpoint import folder as folders
from unbounded.checkpoint.gradients import StoredGradients
from unbounded.checkpoint.manifest import Manifest, read_manifest
from unbounded.checkpoint.peers import Peers, peers_of
from unbounded.checkpoint.reading import Files
from unbounded.checkpoint.saving import check_optimizer, finish_pending, settle
from unbounded.checkpoint.snapshot import (
    BUFFER,
    LOOSE,
    persistent_buffers,
    restore_random_states,
)
from unbounded.checkpoint.targets import (
    Conversion,
    Copy,
    Source,
    plan_unit,
    wanted_groups,
)
from unbounded.checkpoint.transfer import Transfer
from unbounded.errors import StateError
from unbounded.sharding import Sharded, sharded
from unbounded.tiers.lane import Handle
from unbounded.zero.scaler import LossScale
from unbounded.zero.unit import Unit

STAGED_BYTES = 256 << 20


def load(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """All ranks must call this. Brings the checkpoint in `folder` into the model and gives back its `extra`.

    With `optimizer` its states, step counts, hyper-parameters, loss scale, gradients added up so far and the random
    states come back too; without it only weights and buffers. Raises a FileNotFoundError where there is no whole
    checkpoint, and a CheckpointError that lists what differs where it is another model's.
    """
    state = sharded(model)
    state.engine.refuse_inside_full_params("unbounded.load")
    check_optimizer(state, optimizer)
    finish_pending(model)
    _forget_failures(state.engine.units)
    settle(state)
    state.engine.settle()
    for unit in state.engine.units:
        state.engine.gathering.wait(unit)  # of one that is whole on the device
    peers = peers_of(model, state.engine.ranks)
    loading = _Loading(state, model, peers, with_optimizer=optimizer is not None)
    try:
        return loading.run(folder)
    finally:
        loading.close()


class HalfLoaded(Handle):
    """Stands in a unit's place of an update in flight: whoever needs the unit's states meets the error."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.fail(
            StateError(
                f"a load failed after it had begun to change the model ({reason}), so the model's states are not "
                "usable. Load a whole checkpoint, or build the model anew."
            )
        )


def _forget_failures(units: Sequence[Unit]) -> None:
    """A load that failed, or an update that the disk failed, is no reason not to load: this is how to go on."""
    for unit in units:
        if any(handle is not None and handle.failed() for handle in (unit.update, unit.written)):
            unit.forget_update()


class _Loading:
    """One load on one rank."""

    def __init__(self, state: Sharded, model: nn.Module, peers: Peers, *, with_optimizer: bool) -> None:
        self.state, self.model, self.peers, self.with_optimizer = state, model, peers, with_optimizer
        self.units: Sequence[Unit] = state.engine.units
        self.files: Files | None = None

    def close(self) -> None:
        if self.files is not None:
            self.files.close()

    def run(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        found = self.peers.agree(lambda: self._find(folder))
        self.folder = Path(found[0])
        self.peers.agree(self._open)
        needs = self.peers.agree(self._prepare)
        rooms = self.peers.agree(self._room)
        staged = all(need <= room for need, room in zip(needs, rooms, strict=True))
        transfer = Transfer(self.files, self.source, self.state.rules, self.state.tiers.staging, staged=staged)  # type: ignore[arg-type]
        try:
            self.peers.agree(lambda: self._transfer(transfer))
            self.peers.agree(transfer.install)
        except BaseException as error:
            if not staged:
                self._mark(str(error))
            raise
        self._finish()
        return dict(self.extra)

    # -- before anything is changed --------------------------------------------------------------------------------

    def _find(self, folder: str | os.PathLike[str]) -> str:
        return str(folders.find(folder)) if self.peers.rank == 0 else ""

    def _open(self) -> None:
        self.manifest: Manifest = read_manifest(self.folder)
        self.files = Files(self.folder, self.manifest)
        self.files.check_present()
        self.source = Source(self.manifest)
        self.buffers = persistent_buffers(self.model)
        found = differences.of_model(self.model, self.units, self.source)
        if self.with_optimizer and not found:
            found = differences.of_optimizer(self.model, self.state, self.source, self.peers.size)
        differences.refuse(found, self.folder, self.manifest)

    def _prepare(self) -> int:
        """Reads and verifies what is small, plans the rest; how many bytes this rank will put in place."""
        stored = self.manifest.values
        extras = stored["extra"]
        rank = self.peers.rank
        taken = rank if str(rank) in extras else 0
        self.extra = values.decode(extras[str(taken)], self._getter(taken))
        self.random = None
        if self.with_optimizer and rank < len(stored["random"]):
            self.random = values.decode(stored["random"][rank], self._getter(rank))
        if self.with_optimizer:
            self.options = [values.decode(g["options"], self._getter(0)) for g in stored["optimizer"]["groups"]]
        self.new_buffers = {name: self._read_buffer(name) for name in self.buffers}
        self.copies: list[Copy] = []
        self.conversions: list[Conversion] = []
        for unit in self.units:
            rule = self.state.rules.get(unit.dtype) if unit.trainable else None
            every = {spec.name: spec.every for spec in rule.specs} if rule is not None else {}
            for part in plan_unit(unit, self.source, every, wanted_groups(unit, rule, with_states=self.with_optimizer)):
                if isinstance(part, Copy):
                    self.copies.append(part)
                else:
                    self.conversions.append(part)
        self.gradients = StoredGradients(self.manifest, self.source, self.peers.rank) if self.with_optimizer else None
        gradients = self.gradients.num_bytes if self.gradients is not None else 0
        converted = sum((c.stop - c.start) * 4 for c in self.conversions)
        return sum(copy.nbytes for copy in self.copies) + converted + gradients

    def _room(self) -> int:
        """How much this rank may hold in memory until all of it is verified."""
        tiers = self.state.tiers
        budget, pool = tiers.budgets["host"], tiers.staging
        if budget is None:
            return STAGED_BYTES
        return min(STAGED_BYTES, budget - tiers.arena.used_bytes - pool.count * pool.buffer_bytes)

    def _getter(self, rank: int) -> values.Get:
        def get(name: str) -> torch.Tensor:
            assert self.files is not None
            return self.files.read_tensor(self.manifest.tensors[LOOSE, name, rank])

        return get

    def _read_buffer(self, name: str) -> torch.Tensor:
        assert self.files is not None
        tensors = self.manifest.tensors
        own = tensors.get((BUFFER, name, self.peers.rank))
        if own is None or self.manifest.values["world_size"] != self.peers.size:
            own = tensors[BUFFER, name, None]
        return self.files.read_tensor(own)

    # -- states ----------------------------------------------------------------------------------------------------

    def _transfer(self, transfer: Transfer) -> None:
        with torch.no_grad():
            transfer.copy(self.copies)
            transfer.convert(self.conversions)
            if self.with_optimizer:
                assert self.state.optimizer is not None
                transfer.later(self.state.optimizer.zero_grad)
                assert self.files is not None
                assert self.gradients is not None
                self.gradients.put(self.units, self.files, self.state.engine.reduction, transfer.later)

    def _mark(self, reason: str) -> None:
        for unit in self.units:
            unit.update = HalfLoaded(reason)
            self.state.engine.gathering.invalidate(unit)

    # -- values ----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Nothing here can fail: everything was read before."""
        with torch.no_grad():
            for name, value in self.new_buffers.items():
                self.buffers[name].copy_(value)
        for unit in self.units:
            unit.forget_update()
            if unit.resident and not unit.is_whole:
                self.state.engine.gathering.invalidate(unit)
        if self.state.engine.device.type == "cuda":
            torch.cuda.current_stream(self.state.engine.device).synchronize()
        if self.with_optimizer:
            self._finish_optimizer()
        if self.random is not None:
            restore_random_states(self.random, self.state.engine.device)

    def _finish_optimizer(self) -> None:
        saved, optimizer = self.manifest.values["optimizer"], self.state.optimizer
        assert optimizer is not None
        described = self.manifest.values["parameters"]
        for unit in self.units:
            for index, slot in enumerate(unit.layout.slots):
                entry = described[self.source.names[slot.name]]
                unit.steps[index] = entry.get("step", 0)
                unit.scalars[index] = values.decode(entry.get("scalars", {}), self._getter(0))
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)
        if optimizer.loss_scale is not None and saved["loss_scale"] is not None:
            optimizer.loss_scale = LossScale(**saved["loss_scale"])
        optimizer.skipped_steps = saved["skipped_steps"]
        optimizer._scaled = saved["scaled"]
        optimizer._clip = values.decode(saved["clip"], self._getter(0))
