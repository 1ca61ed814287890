"""One save on one rank: the snapshot, the data file, the commit. When each part runs is `saving`'s business."""

from __future__ import annotations

import datetime
import json
import os
import threading
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint import folder as folders
from unbounded.checkpoint import snapshot as snapshots
from unbounded.checkpoint import values
from unbounded.checkpoint.adapters import describe_adapters
from unbounded.checkpoint.manifest import FileEntry, Manifest, TensorEntry, join_slices, write_text
from unbounded.checkpoint.peers import Peers, peers_of
from unbounded.checkpoint.readers import Readers
from unbounded.checkpoint.reading import disk_engine
from unbounded.checkpoint.snapshot import BUFFER, COMPLETING, Snapshot
from unbounded.checkpoint.stream import Writer, lay_out
from unbounded.errors import CheckpointError
from unbounded.sharding import Sharded


@dataclass(frozen=True)
class _Survey:
    """What the ranks tell each other before they write, to store what is the same everywhere once."""

    extra: str
    buffers: dict[str, int]
    backwards: list[bool]
    staging: str | None


@dataclass(frozen=True)
class _Part:
    """What one rank has written."""

    file: FileEntry
    entries: list[TensorEntry]
    random: Any
    extra: Any | None
    scalars: dict[str, dict[str, float]]
    used: list[str]


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
        self.peers: Peers = peers_of(model, state.engine.ranks)
        self.snapshot = Snapshot(self.peers.rank, self.peers.size)
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

    def _survey(self) -> _Survey:
        self.encoded = values.encode(self.extra, "extra", self.snapshot.put)
        self.text = json.dumps(self.encoded)
        if self.peers.rank == 0:
            self.claim = folders.claim(self.folder)
        self.buffers = snapshots.persistent_buffers(self.model)
        sums = {name: snapshots.checksum(buffer) for name, buffer in self.buffers.items()}
        backwards = [self.with_optimizer and unit.fires > 0 for unit in self.state.engine.units]
        return _Survey(self.text, sums, backwards, str(self.claim.staging) if self.claim else None)

    def _take(self, surveys: list[_Survey]) -> None:
        if not self.staging.is_dir():
            raise CheckpointError(
                f"rank {self.peers.rank} does not see {self.staging}, which rank 0 has made. "
                "Save to a folder on a filesystem that all ranks share."
            )
        own = surveys[self.peers.rank].buffers
        for name, buffer in self.buffers.items():
            if self.peers.rank == 0 or own[name] != surveys[0].buffers.get(name):
                copied = buffer.detach().to("cpu", copy=self.copy)
                self.snapshot.add_tensor(name, BUFFER, copied, None if self.peers.rank == 0 else self.peers.rank)
        state = self.state
        self.random = values.encode(snapshots.random_states(state.engine.device), "random", self.snapshot.put)
        self.scalars = snapshots.owned_scalars(state.engine.units)
        self.used = snapshots.used_names(state.engine.units) if self.with_optimizer else []
        self.described = self._describe()
        backwards = [any(survey.backwards[i] for survey in surveys) for i in range(len(state.engine.units))]
        self._take_units(backwards)

    def _take_units(self, backwards: list[bool]) -> None:
        units = list(enumerate(self.state.engine.units))
        for number, unit in units:
            if backwards[number]:
                self.snapshot.add_gradient(unit, number, self.gradients)
        order = {site: place for place, site in reversed(list(enumerate(self.state.engine.forward.expected)))}
        ranked = {id(u): order.get(s.index, len(order)) for s in self.state.engine.stops for u in s.units}
        copy = self.copy and self._has_room_to_copy()
        for number, unit in sorted(units, key=lambda entry: ranked[id(entry[1])]):
            rule = self.state.rules.get(unit.dtype)
            every = {spec.name: spec.every for spec in rule.specs} if rule is not None else {}
            kinds = [kind for kind in unit.states if self.with_optimizer or kind in COMPLETING]
            unit.reader = self.readers.new(may_copy=self.copy)
            self.snapshot.add_unit(unit, number, every, kinds, unit.reader, copy=copy)
        self.readers.watch(self.snapshot.segments)
        if self.state.engine.device.type == "cuda":
            self.ready = torch.cuda.Event()
            self.ready.record()

    def _has_room_to_copy(self) -> bool:
        """Whether a GPU has room for a copy of the states it holds, which costs milliseconds; steps then never wait."""
        device = self.state.engine.device
        if device.type != "cuda":
            return False
        arrays = [array for unit in self.state.engine.units for array in (unit.weights, *unit.states.values())]
        needed = sum(array.numel * array.dtype.itemsize for array in arrays if array.tier == "device")
        return needed < torch.cuda.mem_get_info(device)[0] // 2

    def _describe(self) -> dict[str, Any]:
        """What is the same on all ranks and kept once; the snapshot's own tensors are rank 0's."""
        state, model = self.state, self.model
        return {
            "library": metadata.version("unbounded"),
            "saved_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "world_size": self.peers.size,
            "plan": repr(state.plan),
            "precision": state.plan.precision,
            "model": f"{type(model).__module__}.{type(model).__qualname__}",
            **snapshots.describe_config(model),
            "adapters": describe_adapters(model),
            "parameters": snapshots.describe_parameters(model, state.engine.units),
            "optimizer": snapshots.describe_optimizer(state.optimizer, model, self.snapshot.put)
            if self.with_optimizer
            else None,
        }

    # -- on any thread ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """All ranks must call this. Writes, agrees and commits."""
        copier = threading.Thread(target=self.readers.copy_ahead, name="unbounded-copy")
        try:
            if self._copies_ahead():
                copier.start()
            parts = self.peers.agree(self._write)
            self.peers.agree(lambda: self._commit(parts))
        finally:
            if copier.ident is not None:
                copier.join()
            self._let_go()

    def _copies_ahead(self) -> bool:
        """Whether training leaves cores idle that can bring states out of its way."""
        return self.copy and self.state.engine.device.type == "cuda"

    def _write(self) -> _Part:
        device = self.state.engine.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            with torch.cuda.stream(torch.cuda.Stream(device)):
                torch.cuda.current_stream().wait_event(self.ready)  # type: ignore[arg-type]
                file = self._write_file()
        else:
            file = self._write_file()
        return _Part(file, self.snapshot.entries(), self.random, self.own_extra, self.scalars, self.used)

    def _write_file(self) -> FileEntry:
        name = folders.data_name(self.peers.rank)
        size = max(1, lay_out(self.snapshot.segments).nbytes)
        with disk_engine(behind=self.copy).open(self.staging / name, create=True, size_bytes=size) as file:
            entry = Writer(file, self.state.tiers.staging, self.readers).write(name, self.snapshot.segments)
            file.truncate(entry.nbytes)
            file.sync()
        folders.sync_folder(self.staging)
        return entry

    def _commit(self, parts: list[_Part]) -> None:
        if self.claim is None:
            return
        scalars: dict[str, dict[str, float]] = {}
        for part in parts:
            scalars |= part.scalars
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

    def _let_go(self) -> None:
        """Whatever happened, updates may go on and the folder is free."""
        self.readers.close()
        if self.claim is not None:
            self.claim.release()
