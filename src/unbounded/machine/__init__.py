"""Measures this machine: `unbounded.Machine.measure()`.

`planner.machine` is the pure value that plans are made with; this package fills it in.
"""

from __future__ import annotations

import os
from typing import Any

from unbounded.planner.machine import MachineRates
from unbounded.planner.presets import find_machine


class Machine(MachineRates):
    """The machine that a plan is for. See `MachineRates` for its fields."""

    @classmethod
    def measure(cls, disk_path: str | os.PathLike[str] | None = None, *, save: bool = True) -> Machine:
        """Measures this machine in under 30 seconds, and keeps the result where `shard` and `plan` look for it.

        Nothing else should run meanwhile. `disk_path` is a folder on the disk to measure, by default that of
        temporary files.
        """
        from unbounded.machine.measuring import measure

        found = cls(**measure(disk_path))
        if save:
            found.save()
        return found

    @classmethod
    def preset(cls, name: str) -> Machine:
        """A machine to plan ahead with: "h200:8", "dgx2:32", "rtx4090"."""
        values: dict[str, Any] = dict(vars(find_machine(name)))
        return cls(**values)
