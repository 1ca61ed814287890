"""The machine that a plan is for: memories, rates and links, as one frozen value that can be saved and read again.

Rates are what work reaches, not what a datasheet says; `sources` names where each comes from. `unbounded.machine`
measures one; `presets` has some to plan ahead with. Units are bytes, seconds and floating-point operations.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from unbounded.errors import PlanError

VERSION = 3
_M = TypeVar("_M", bound="MachineRates")
_OPTIONAL = (
    "fp32_flops", "kernel_seconds", "host_compact_rate", "host_add_rate", "peer_bandwidth", "network_bandwidth",
    "disk_bytes", "disk_read", "disk_write", "disk_both", "process_bytes",
)  # fmt: skip
_WORDS: dict[str, type] = {"name": str, "sources": Mapping, "is_cpu": bool}
# What numbers can be true of some machine; others are bytes, bytes per second and FLOP/s.
_BOUNDS = {"devices": (1, 2**16), "nodes": (1, 2**20), "host_threads": (1, 2**20), "kernel_seconds": (1e-12, 60)}


@dataclass(frozen=True)
class MachineRates:
    """`nodes` nodes of one kind. What is "of a device" holds for each device; the devices of a node share the rest.

    `device_bytes`, `host_bytes` and `disk_bytes` are what a job may use. `host_bandwidth` is what the optimizer's mix
    of reads and writes reaches, `host_thread_rate` what one thread of it does. `link_bandwidth` bounds the sum over
    all devices of a node of what crosses to the host each way.
    """

    name: str
    matmul_flops: float  # of a device, 16-bit matrix products inside a transformer block
    device_bytes: int  # of a device
    device_bandwidth: float  # of a device's memory, operations bound by it inside a block
    to_device: float  # of a device, from pinned host memory, alone
    to_host: float
    both_ways: float  # of a device, each way while both run
    link_bandwidth: float  # of a node, each way
    host_bytes: int
    host_bandwidth: float
    host_threads: int
    host_thread_rate: float
    fp32_flops: float = 0.0  # of a device, the same products in fp32; 0: as in 16 bits
    host_compact_rate: float = 0.0  # of one thread with `compact` states; 0: as with others
    host_add_rate: float = 0.0  # of a node: gradients added up in fp32; 0: as updates
    disk_bytes: int = 0
    disk_read: float = 0.0
    disk_write: float = 0.0
    disk_both: float = 0.0  # the sum of both ways at once
    devices: int = 1  # of a node
    nodes: int = 1
    peer_bandwidth: float = 0.0  # of a device, into collectives inside a node; 0: through the host
    network_bandwidth: float = 0.0  # of a node, into collectives between nodes
    kernel_seconds: float = 0.0  # the least time of one eager operation
    process_bytes: int = 0  # of host memory that a process takes before it has a model; 0: not known
    is_cpu: bool = False  # the device is the host itself
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_number(item.name, getattr(self, item.name))
        if self.nodes > 1 and not self.network_bandwidth:
            raise PlanError(
                f"the machine {self.name!r} has {self.nodes} nodes but a network_bandwidth of 0. "
                "Give what one node's links reach, in bytes per second."
            )
        for name in ("disk_read", "disk_write", "disk_both"):
            if self.disk_bytes and not getattr(self, name):
                raise PlanError(
                    f"the machine {self.name!r} has disk_bytes but a {name} of 0. Give what its disks reach, in bytes "
                    "per second, or disk_bytes 0."
                )

    @property
    def num_devices(self) -> int:
        return self.devices * self.nodes

    def for_weights(self: _M, num_bytes: float) -> _M:
        """The machine as a model finds it whose weights take so many bytes each."""
        return dataclasses.replace(self, matmul_flops=self.fp32_flops) if num_bytes > 2 and self.fp32_flops else self

    @property
    def peer_rate(self) -> float:
        """What a device gets into collectives with others of its node."""
        return self.peer_bandwidth or self.up()

    @property
    def host_rate(self) -> float:
        """What the host optimizers of a node move together, in bytes of memory traffic per second."""
        return min(self.host_bandwidth, self.host_threads * self.host_thread_rate)

    def update_rate(self, state_format: str) -> float:
        """The same for one format of states: smaller ones need more computing per byte."""
        if state_format != "compact" or not self.host_compact_rate:
            return self.host_rate
        return min(self.host_bandwidth, self.host_threads * self.host_compact_rate)

    @property
    def addition_rate(self) -> float:
        """What the ranks of a node move together while they add gradients up, in bytes of memory traffic per second."""
        return self.host_add_rate or self.host_rate

    def up(self, *, both: bool = True) -> float:
        """To one device while all devices of its node are served, in bytes per second."""
        return min(self.both_ways if both else self.to_device, self.link_bandwidth / self.devices)

    def down(self, *, both: bool = True) -> float:
        return min(self.both_ways if both else self.to_host, self.link_bandwidth / self.devices)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=2, default=str) + "\n"

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes the machine to `path`, by default where `load` and `shard` look for this host's."""
        target = Path(path) if path is not None else saved_path()
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.with_name(f"{target.name}.{os.getpid()}")
        staging.write_text(self.to_json())
        staging.replace(target)
        return target

    @classmethod
    def load(cls: type[_M], path: str | os.PathLike[str] | None = None) -> _M:
        """The machine saved at `path`, by default this host's own. A file that is not there is FileNotFoundError."""
        source = Path(path) if path is not None else saved_path()
        try:
            values = json.loads(source.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise PlanError(
                f'"{source}" is not a machine file: {error}. Measure again with Machine.measure().'
            ) from None
        return cls.from_values(values, f'the machine file "{source}"')

    @classmethod
    def from_values(cls: type[_M], values: Any, what: str) -> _M:
        """A machine from plain values, each checked."""
        if not isinstance(values, Mapping) or "version" not in values:
            raise PlanError(
                f"{what} has no version, so it is not a machine file. Measure again with Machine.measure()."
            )
        if values["version"] != VERSION or not isinstance(values["version"], int):
            raise PlanError(
                f"{what} has version {values['version']!r}, but this release reads {VERSION}. "
                "Measure again with Machine.measure()."
            )
        known = {item.name for item in fields(cls)}
        given = {key: value for key, value in values.items() if key != "version"}
        unknown = sorted(given.keys() - known)
        required = [f.name for f in fields(cls) if f.default is dataclasses.MISSING and f.name != "sources"]
        missing = [name for name in required if name not in given]
        if unknown or missing:
            fault = f"has the unknown key {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
            raise PlanError(f"{what} {fault}. Measure again with Machine.measure().")
        return cls(**given)


def saved_path() -> Path:
    """Where this host's machine is kept."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "unbounded" / f"machine-{os.uname().nodename}.json"


def saved_machine() -> MachineRates | None:
    """This host as it was measured; None if it was not, or by another version. `unbounded plan` says what is wrong."""
    try:
        return MachineRates.load()
    except (OSError, PlanError):
        return None


def _check_number(name: str, value: Any) -> None:
    if name in _WORDS:
        if not isinstance(value, _WORDS[name]):
            raise PlanError(f"the machine's {name} is {value!r}, which it cannot be. Measure again.")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise PlanError(
            f"the machine's {name} is {value!r}, which is not a number. Give it in bytes, seconds or FLOP/s."
        )
    if abs(value) == math.inf:
        raise PlanError(f"the machine's {name} is infinite, which is impossible. Give what was measured.")
    if value == 0 and name in _OPTIONAL:
        return
    least, most = _BOUNDS.get(name, (1, 10**24))
    if not least <= value <= most:
        shown = value if abs(value) < 10**30 else "more than 10^30"
        raise PlanError(f"the machine's {name} is {shown}, which is impossible. Give {least:g} to {most:g}.")
    if name in ("devices", "nodes", "host_threads") and value != int(value):
        raise PlanError(f"the machine's {name} is {value}, but it must be a whole number.")
