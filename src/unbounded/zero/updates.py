"""The optimizer step over all units: what is updated, in which order, and who waits for it.

States on the GPU are updated on the compute stream at once. Everything else goes through the update lane behind
the next forward, in the order in which that forward needs the units; each unit carries a handle that whoever
needs its new weights waits on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unbounded.native import kernels
from unbounded.optim.rules import UpdateRule
from unbounded.tiers.lane import Handle, Lane
from unbounded.tiers.pool import BufferPool
from unbounded.zero.engine import Engine
from unbounded.zero.unit import Unit
from unbounded.zero.update import Piece, UpdatePass, cut_pieces, kernel_device, plan_jobs

Scale = float | torch.Tensor


class Updates:
    """Runs the rule over units; one pass a step, or one a unit inside `last_backward`."""

    def __init__(
        self, engine: Engine, rules: dict[torch.dtype, UpdateRule], lane: Lane, pool: kernels.Pool, buffers: BufferPool
    ) -> None:
        self.engine, self.rules, self.lane = engine, rules, lane
        self._piece_numel = buffers.buffer_bytes // 4
        self._passes = {dtype: UpdatePass(rule, pool, buffers, depth=2) for dtype, rule in rules.items()}

    def run(self, units: Sequence[Unit], groups: Sequence[dict[str, Any]], scale: Scale) -> None:
        """Updates `units` in order; returns before the update lane has done its part."""
        behind: list[tuple[Unit, list[Piece], Handle]] = []
        for unit in units:
            unit.gradient.wait()
            pieces = cut_pieces(unit, plan_jobs(unit, self.rules[unit.dtype], groups), self._piece_numel)
            # Gradients stay until zero_grad, as ever; but ones that this step scaled must not be added to.
            unit.gradient.consumed = not (isinstance(scale, float) and scale == 1.0)
            if not pieces:
                continue
            if kernel_device(unit).type == "cuda":
                self._run_now(unit, pieces, scale)
            else:
                unit.update = Handle()
                behind.append((unit, pieces, unit.update))
                self.engine.invalidate(unit)
        if behind:
            ready = None
            if self.lane.stream is not None:
                ready = torch.cuda.Event()
                ready.record()
            self.lane.submit(self._run_behind, behind, scale, ready)

    def _run_now(self, unit: Unit, pieces: list[Piece], scale: Scale) -> None:
        for _ in self._passes[unit.dtype].run(pieces, scale):
            pass
        if unit.owned != (0, unit.layout.numel) or not unit.resident:
            self.engine.invalidate(unit)

    def _run_behind(
        self,
        work: list[tuple[Unit, list[Piece], Handle]],
        scale: Scale,
        ready: torch.cuda.Event | None,
    ) -> None:
        """Runs in the update lane."""
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        waiting = {id(unit): handle for unit, _, handle in work}
        try:
            scale = float(scale)
            for dtype, update_pass in self._passes.items():
                pieces = (piece for unit, parts, _ in work if unit.dtype == dtype for piece in parts)
                for unit in update_pass.run(pieces, scale):
                    waiting.pop(id(unit)).complete(event=self.lane.mark())
        except BaseException as error:
            for handle in waiting.values():
                handle.fail(error)
            raise

    def wait(self) -> None:
        """Returns when every update has been applied; raises what went wrong in one."""
        for unit in self.engine.units:
            if unit.update is not None:
                unit.update.synchronize()
