"""One checkpoint opened for one rank of a running model: compares it, reads small values, and plans the rest.

This does not change the model. It finds whatever cannot be loaded, so that afterwards only reading and writing the
states themselves can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unbounded.checkpoint.extra_states import pop_extra_states
from unbounded.checkpoint.format import values
from unbounded.checkpoint.format.data_files import Files
from unbounded.checkpoint.format.manifest import BUFFER, LOOSE, Manifest
from unbounded.checkpoint.format.parsing import read_manifest
from unbounded.checkpoint.load import differences
from unbounded.checkpoint.load.counterpart import find_counterpart
from unbounded.checkpoint.load.load_plan import (
    Conversion,
    Copy,
    StoredTensors,
    plan_factors,
    plan_unit,
    wanted_groups,
)
from unbounded.checkpoint.load.stored_gradients import StoredGradients
from unbounded.checkpoint.peers import Peers
from unbounded.checkpoint.random_states import check_random_states
from unbounded.errors import CheckpointError
from unbounded.zero.members import persistent_buffers
from unbounded.zero.setup.assembly import Sharded
from unbounded.zero.step.loss_scale import LossScale
from unbounded.zero.step.step_progress import StepProgress


class OpenedCheckpoint:
    """What a load brings in. Call `open`, then `prepare`; afterwards every attribute is there."""

    def __init__(self, state: Sharded, model: nn.Module, folder: Path, peers: Peers, *, with_optimizer: bool) -> None:
        self.state, self.model, self.folder, self.peers = state, model, folder, peers
        self.with_optimizer = with_optimizer
        self.files: Files | None = None
        self.extra: dict[str, Any] = {}
        self.extra_states: dict[str, Any] = {}
        self.random: Any = None
        self.options: list[dict[str, Any]] = []
        self.counts: dict[str, tuple[int, dict[str, float]]] = {}  # steps and scalars of every parameter
        self.progress: StepProgress
        self.factor: float | None = None  # which older checkpoints keep with clipped gradients
        self.copies: list[Copy] = []
        self.conversions: list[Conversion] = []
        self.gradients: StoredGradients | None = None

    def close(self) -> None:
        if self.files is not None:
            self.files.close()

    def open(self) -> int:
        """Reads the manifest and compares it with files, model and optimizer; returns a mark that identifies it."""
        self.manifest: Manifest = read_manifest(self.folder)
        self.files = Files(self.folder, self.manifest)
        self.files.check_present()
        self.source = StoredTensors(self.manifest)
        self.counterpart = find_counterpart(self.manifest.values, self.state.engine.axes)
        self.buffers = persistent_buffers(self.model)
        units = self.state.engine.units
        found = differences.of_model(self.model, units, self.source, elsewhere=self.state.engine.axes.pipeline.size > 1)
        if self.with_optimizer and not found:
            found = differences.of_optimizer(self.model, self.state, self.source, self.peers.size)
        differences.refuse(found, self.folder, self.manifest)
        return self.manifest.mark

    def prepare(self) -> int:
        """Reads and verifies what is small, plans the rest, and returns how many bytes this rank will load."""
        extras, own = self.manifest.values["extra"], self.counterpart.rank
        taken = own if own is not None and str(own) in extras else 0
        self.extra = self._decode(extras[str(taken)], "extra", taken)
        self.extra_states = pop_extra_states(self.extra, self.folder)
        self.new_buffers = {name: self._read_buffer(name) for name in self.buffers}
        self._plan()
        if not self.with_optimizer:
            return self._num_bytes()
        self._read_optimizer()
        self.gradients = StoredGradients(self.manifest, self.source, self.peers.rank)
        return self._num_bytes() + self.gradients.num_bytes

    def put_gradients(self, later: Callable[[Callable[[], None]], None]) -> None:
        """Reads the gradients that no step had used, and gives `later` the actions that put them in place."""
        assert self.files is not None
        assert self.gradients is not None
        self.gradients.put(self.state.engine.units, self.files, self.state.engine.reduction, later)

    def _plan(self) -> None:
        for unit in self.state.engine.units:
            for part in plan_unit(unit, self.source, wanted_groups(unit, with_states=self.with_optimizer)):
                if isinstance(part, Copy):
                    self.copies.append(part)
                else:
                    self.conversions.append(part)
            if self.with_optimizer:
                self.copies += plan_factors(unit, self.source)

    def _num_bytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies) + sum((c.stop - c.start) * 4 for c in self.conversions)

    def _read_optimizer(self) -> None:
        saved, rank = self.manifest.values["optimizer"], self.counterpart.rank
        assert self.state.optimizer is not None
        groups = zip(self.state.optimizer.param_groups, saved["groups"], strict=True)
        for index, (group, stored) in enumerate(groups):
            options = self._decode(stored["options"], f"param group {index}", 0)
            differences.check_options(options, group, index, self.folder)
            self.options.append(options)
        described = self.manifest.values["parameters"]
        for unit in self.state.engine.units:
            for slot in unit.layout.slots:
                entry = described[self.source.names[slot.name]]
                self.counts[slot.name] = entry.get("step", 0), self._decode_scalars(entry.get("scalars", {}), slot.name)
        self.factor = self._decode(saved["clip"], "clip", 0)
        if self.factor is not None and not isinstance(self.factor, float):
            raise CheckpointError(f"the clip factor of the checkpoint in {self.folder} is not a number. Load another.")
        scale = None if saved["loss_scale"] is None else LossScale(**saved["loss_scale"])
        self.progress = StepProgress(scale, saved["skipped_steps"], saved["scaled"])
        if rank is not None and rank < len(self.manifest.values["random"]):
            self.random = self._read_random(rank)

    def _read_random(self, rank: int) -> Any:
        states = self._decode(self.manifest.values["random"][rank], "the random states", rank)
        try:
            check_random_states(states, self.state.engine.device)
        except Exception as error:
            raise CheckpointError(
                f"the random states of rank {rank} in {self.folder} are not usable here ({str(error)[:200]}). "
                "Load another checkpoint, or load this one without the optimizer."
            ) from None
        return states

    def _decode_scalars(self, stored: dict[str, Any], name: str) -> dict[str, float]:
        held = self._decode(stored, f"the scalars of {name}", 0)
        if not isinstance(held, dict) or not all(type(v) in (int, float) for v in held.values()):
            raise CheckpointError(f"the scalars of {name} in {self.folder} are not numbers. Load another checkpoint.")
        return held

    def _decode(self, stored: Any, what: str, rank: int) -> Any:
        """A value that `rank` stored, with the tensors in it."""

        def get(name: str) -> torch.Tensor:
            assert self.files is not None
            return self.files.read_tensor(self.manifest.tensors[LOOSE, name, rank])

        return values.decode(stored, get, what)

    def _read_buffer(self, name: str) -> torch.Tensor:
        assert self.files is not None
        tensors = self.manifest.tensors
        own = tensors.get((BUFFER, name, self.peers.rank))
        if own is None or not self.counterpart.is_itself:
            own = tensors[BUFFER, name, None]
        if own.shape != tuple(self.buffers[name].shape):
            raise CheckpointError(
                f"the buffer {name} has the shape {list(self.buffers[name].shape)} here and {list(own.shape)} in "
                f"{self.folder}. Build the model that it was saved from."
            )
        return self.files.read_tensor(own)
