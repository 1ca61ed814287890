"""One save on one rank: the snapshot, the data file, the commit. `saving` decides on which thread each part runs."""

from __future__ import annotations

import datetime
import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.extra_states import take_extra_states
from unbounded.checkpoint.format import folder as folders
from unbounded.checkpoint.format import values
from unbounded.checkpoint.format.data_files import disk_engine
from unbounded.checkpoint.format.manifest import (
    BUFFER,
    FileEntry,
    Manifest,
    TensorEntry,
    join_slices,
    write_text,
)
from unbounded.checkpoint.peers import Peers, peers_of
from unbounded.checkpoint.random_states import take_random_states
from unbounded.checkpoint.save import description
from unbounded.checkpoint.save.readers import Readers
from unbounded.checkpoint.save.segments import lay_out
from unbounded.checkpoint.save.snapshot import Snapshot, checksum
from unbounded.checkpoint.save.writer import Writer
from unbounded.errors import CheckpointError
from unbounded.optim.formats import MASTER_STATES
from unbounded.tiers.current_device import on_device
from unbounded.tiers.driver import unclaimed_bytes
from unbounded.version import __version__
from unbounded.weights.adapter_files import describe_adapters
from unbounded.zero.members import persistent_buffers
from unbounded.zero.setup.assembly import Sharded


@dataclass(frozen=True)
class Survey:
    """What the ranks tell each other before they write, so that equal values are stored once."""

    extra: str
    buffers: dict[str, int]
    backwards: list[str]  # the units that had one
    staging: str | None


@dataclass(frozen=True)
class WrittenPart:
    """What one rank has written."""

    file: FileEntry
    entries: list[TensorEntry]
    random: Any
    extra: Any | None
    scalars: dict[str, dict[str, float]]
    used: list[str]
    parameters: dict[str, Any]
    groups: list[list[str]]


class SaveJob:
    """One save on one rank, from `begin` (on the caller's thread) to `finish` (on any)."""

    def __init__(
        self,
        state: Sharded,
        model: nn.Module,
        folder: str | os.PathLike[str],
        with_optimizer: bool,
        extra: dict[str, Any],
        *,
        copy: bool,
    ) -> None:
        self.state, self.model, self.folder, self.extra, self.copy = state, model, folder, extra, copy
        self.with_optimizer = with_optimizer and state.optimizer is not None
        self.peers: Peers = peers_of(model, state.engine.axes.world, "unbounded.save()")
        self.snapshot = Snapshot(self.peers.rank, state.engine.axes.data)
        self.readers = Readers(state.tiers)
        self.gradients = self.readers.new(may_copy=False)
        self.claim: folders.Claim | None = None
        self.ready: torch.cuda.Event | None = None

    # -- on the caller's thread ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All ranks must call this. Takes the snapshot and claims the folder."""
        try:
            surveys = self.peers.agree(self._survey)
            self.staging = Path(surveys[0].staging or "")
            self.own_extra = self.encoded if self.peers.rank == 0 or surveys[0].extra != self.text else None
            if self.own_extra is None:
                self.snapshot.drop_loose()
            self.peers.agree(lambda: self._take(surveys))
        except BaseException:
            self._let_go()
            raise

    def wait_for_gradients(self) -> None:
        self.gradients.wait()

    def _survey(self) -> Survey:
        extra = {**self.extra, **take_extra_states(self.model)}
        self.encoded = values.encode(extra, "extra", self.snapshot.put)
        self.text = json.dumps(self.encoded)
        if self.peers.rank == 0:
            self.claim = folders.claim(self.folder)
        self.buffers = persistent_buffers(self.model)
        sums = {name: checksum(buffer) for name, buffer in self.buffers.items()}
        units = self.state.engine.units if self.with_optimizer else []
        backwards = [unit.name for unit in units if unit.gradient.is_new]
        return Survey(self.text, sums, backwards, str(self.claim.staging) if self.claim else None)

    def _take(self, surveys: list[Survey]) -> None:
        if not self.staging.is_dir():
            raise CheckpointError(
                f"rank {self.peers.rank} does not see {self.staging}, which rank 0 made. "
                "Save to a folder on a filesystem that all ranks share."
            )
        own = surveys[self.peers.rank].buffers
        for name, buffer in self.buffers.items():
            if self.peers.rank == 0 or own[name] != surveys[0].buffers.get(name):
                copied = buffer.detach().to("cpu", copy=self.copy)
                self.snapshot.add_tensor(name, BUFFER, copied, None if self.peers.rank == 0 else self.peers.rank)
        state = self.state
        self.random = values.encode(take_random_states(state.engine.device), "random", self.snapshot.put)
        self.scalars = description.owned_scalars(state.engine.units)
        self.used = description.used_names(state.engine.units) if self.with_optimizer else []
        self.described = self._describe()
        self._take_units({name for survey in surveys for name in survey.backwards})

    def _take_units(self, backwards: set[str]) -> None:
        numbers = {id(unit): number for number, unit in enumerate(self.state.engine.units)}
        # Ranks of a context axis hold the same states: the first writes them.
        writes = self.state.engine.axes.context.rank == 0
        for unit in self.state.engine.units if writes else ():
            if unit.name in backwards:
                self.snapshot.add_gradient(unit, numbers[id(unit)], self.gradients)
        self.is_copied = copy = self.copy and self._has_room_to_copy()
        for unit in self.state.engine.forward_order() if writes else ():
            kinds = [kind for kind in unit.states if self.with_optimizer or kind in MASTER_STATES]
            reader = self.readers.new(may_copy=self.copy)
            unit.be_read_by(reader)
            self.snapshot.add_unit(unit, numbers[id(unit)], kinds, reader, copy=copy)
            if self.with_optimizer:
                self.snapshot.add_factors(unit, numbers[id(unit)], reader, copy=copy)
        self.readers.watch(self.snapshot.segments)
        if self.state.engine.device.type == "cuda":
            self.ready = torch.cuda.Event()
            self.ready.record()

    def _has_room_to_copy(self) -> bool:
        """Whether a GPU has room to copy its states besides what steps need; copying takes milliseconds, and then steps
        never wait.
        """
        device = self.state.engine.device
        if device.type != "cuda":
            return False
        arrays = [array for unit in self.state.engine.units for array in (unit.weights, *unit.states.values())]
        needed = sum(array.numel * array.dtype.itemsize for array in arrays if array.tier == "device")
        return needed < unclaimed_bytes(device) // 2

    def _describe(self) -> dict[str, Any]:
        """Values that are the same on all ranks and kept once; tensors in them are those of rank 0."""
        state, model = self.state, self.model
        return {
            "library": __version__,
            "saved_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "world_size": self.peers.size,
            "mesh": state.engine.axes.sizes,
            "places": state.engine.axes.places,
            "plan": repr(state.plan),
            "precision": state.plan.precision,
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            **description.describe_config(model),
            "adapters": describe_adapters(model),
            "parameters": description.describe_parameters(model, state.engine.units),
            "optimizer": description.describe_optimizer(state.optimizer, model, self.snapshot.put)
            if self.with_optimizer and state.optimizer is not None
            else None,
        }

    # -- on any thread ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All ranks must call this. Writes, agrees and commits."""
        copier = threading.Thread(target=self.readers.copy_ahead, name="unbounded-copy")
        try:
            if self._copies_ahead():
                with suppress(RuntimeError):  # no thread is left: updates then wait, or copy for themselves
                    copier.start()
            parts = self.peers.agree(self._write)
            self.peers.agree(lambda: self._commit(parts))
        finally:
            if copier.ident is not None:
                copier.join()
            self._let_go()

    def _copies_ahead(self) -> bool:
        """Whether training leaves cores idle that can copy states aside."""
        return self.copy and self.state.engine.device.type == "cuda"

    def _write(self) -> WrittenPart:
        device = self.state.engine.device
        if device.type == "cuda":
            with on_device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                torch.cuda.current_stream().wait_event(self.ready)  # type: ignore[arg-type]
                file = self._write_file()
        else:
            file = self._write_file()
        if not self.is_copied:
            self.readers.refuse_spoiled()
        optimizer = self.described["optimizer"]
        groups = [] if optimizer is None else [group["names"] for group in optimizer["groups"]]
        parameters = self.described["parameters"]
        entries = self.snapshot.entries()
        return WrittenPart(file, entries, self.random, self.own_extra, self.scalars, self.used, parameters, groups)

    def _write_file(self) -> FileEntry:
        name = folders.data_name(self.peers.rank)
        size = max(1, lay_out(self.snapshot.segments).nbytes)
        with folders.told(folders.real(self.folder)):
            with disk_engine(in_background=self.copy).open(self.staging / name, create=True, size_bytes=size) as file:
                entry = Writer(file, self.state.tiers.staging, self.readers).write(name, self.snapshot.segments)
                file.truncate(entry.nbytes)
                file.sync()
            folders.sync_folder(self.staging)
        return entry

    def _commit(self, parts: list[WrittenPart]) -> None:
        if self.claim is None:
            return
        scalars: dict[str, dict[str, float]] = {}
        for part in parts:
            scalars |= part.scalars
            self._add_stage(part)
        for name, held in scalars.items():
            self.described["parameters"][name]["scalars"] = values.encode(held, name, self.snapshot.put)
        described = {
            **self.described,
            "used": sorted({name for part in parts for name in part.used}),
            "random": [part.random for part in parts],
            "extra": {str(rank): part.extra for rank, part in enumerate(parts) if part.extra is not None},
        }
        entries = join_slices([entry for part in parts for entry in part.entries])
        self.claim.commit(write_text(Manifest(entries, [part.file for part in parts], described)))

    def _add_stage(self, part: WrittenPart) -> None:
        """Adds the parameters of other pipeline stages, which this rank does not have."""
        for name, entry in part.parameters.items():
            self.described["parameters"].setdefault(name, entry)
        for group, names in zip(self.described["optimizer"]["groups"] if part.groups else (), part.groups, strict=True):
            group["names"] += [name for name in names if name not in group["names"]]

    def _let_go(self) -> None:
        """Whatever happened, lets updates continue and releases the folder."""
        self.readers.close()
        if self.claim is not None:
            self.claim.release()
