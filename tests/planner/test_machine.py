"""Machines: presets with sources, files that load as they were saved, and files that cannot be true."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import unbounded
from unbounded.errors import PlanError
from unbounded.machine import disk, measuring, timing
from unbounded.machine.block import reached_rates
from unbounded.planner.machine import VERSION, MachineRates
from unbounded.planner.presets import NAMES, UNMEASURED, find_machine


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_has_sources_and_survives_its_file(name: str, tmp_path: Path) -> None:
    machine = find_machine(name)
    assert machine.sources
    assert MachineRates.load(machine.save(tmp_path / "machine.json")) == machine


def test_numbers_count_nodes_of_a_node_and_gpus_of_a_gpu() -> None:
    assert find_machine("dgx2:32").num_devices == 512
    assert (find_machine("h200:8").devices, find_machine("h200:8").nodes) == (8, 1)
    assert find_machine("h200:16").nodes == 2
    one, node = find_machine("h200"), find_machine("dgx-h200")
    assert one.devices == 1
    assert one.host_bytes == node.host_bytes // 8
    assert one.device_bytes == node.device_bytes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h201", r"there is no machine 'h201'. Did you mean 'h200'"),
        ("h200:12", r"not a whole number of nodes of 8 devices. Take 8 or 16"),
        ("h200:x", r"'x' after its colon"),
        ("h200:²", r"'²' after its colon"),
        ("laptop:2", r"has no network"),
    ],
)
def test_a_machine_that_is_not_there_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        find_machine(name)


def break_file(path: Path, **changes: Any) -> Path:
    values = json.loads(UNMEASURED.to_json())
    for key, value in changes.items():
        if value is None:
            del values[key]
        else:
            values[key] = value
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": VERSION - 1}, r"has version 2, but this release reads 3. Measure again"),
        ({"version": VERSION + 1}, r"has version 4, but this release reads 3. Measure again"),
        ({"version": None}, r"has no version"),
        ({"matmul_flops": -1}, r"matmul_flops is -1, which is impossible"),
        ({"device_bytes": 0}, r"device_bytes is 0, which is impossible"),
        ({"both_ways": "fast"}, r"both_ways is 'fast', which is not a number"),
        ({"host_bandwidth": float("inf")}, r"host_bandwidth is infinite"),
        ({"host_bandwidth": float("-inf")}, r"host_bandwidth is infinite"),
        ({"host_bandwidth": float("nan")}, r"not a number"),
        ({"disk_write": 0}, r"has disk_bytes but a disk_write of 0"),
        ({"devices": 1.5}, r"must be a whole number"),
        ({"version": float(VERSION)}, r"has version 3.0, but this release reads 3"),
        ({"matmul_flops": 1e-300}, r"matmul_flops is 1e-300, which is impossible"),
        ({"host_bytes": 10**400}, r"host_bytes is more than 10\^30, which is impossible"),
        ({"devices": 10**9}, r"devices is 1000000000, which is impossible. Give 1 to 65536"),
        ({"is_cpu": "no"}, r"is_cpu is 'no', which it cannot be"),
        ({"nodes": 4, "network_bandwidth": 0.0}, r"has 4 nodes but a network_bandwidth of 0"),
        ({"to_host": None}, r"lacks 'to_host'"),
        ({"gpus": 3}, r"unknown key 'gpus'"),
    ],
)
def test_a_file_of_another_version_or_with_impossible_numbers_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=message):
        MachineRates.load(break_file(tmp_path / "machine.json", **changes))


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text("{")
    with pytest.raises(PlanError, match=r"is not a machine file"):
        MachineRates.load(tmp_path / "machine.json")


def test_this_machine_is_measured_saved_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(disk, "FILE_BYTES", 64 << 20)
    monkeypatch.setattr(timing, "SUSTAINED_SECONDS", {"cuda": 0.0, "cpu": 0.0})
    alone: dict[str, float] = {}
    reached: dict[str, float] = {}

    def reach(device: torch.device, rates: dict[str, float], taken: float) -> dict[str, float]:
        alone.update(rates)
        reached.update(reached_rates(device, rates, taken))
        return reached

    flops = measuring._matmul_flops
    monkeypatch.setattr(  # without instructions for them, 16-bit products take seconds
        measuring, "_matmul_flops", lambda device, dtype: flops(device, dtype) if dtype == torch.float32 else 1e9
    )
    monkeypatch.setattr(measuring, "reached_rates", reach)
    monkeypatch.setattr(measuring, "measure_libraries", lambda: {"process_bytes": 7})  # takes a process of its own
    machine = unbounded.Machine.measure(tmp_path)
    for name in ("device_bandwidth", "kernel_seconds"):
        assert getattr(machine, name) == reached[name]
    if machine.is_cpu:  # what a block takes longer than its products is put on the other operations
        assert (machine.matmul_flops, machine.fp32_flops) == (1e9, alone["matmul_flops"])
        moved = alone["device_bandwidth"] * alone["kernel_seconds"]
        assert machine.device_bandwidth * machine.kernel_seconds == pytest.approx(moved)
    assert unbounded.Machine.load() == machine
    assert machine.process_bytes == 7
    assert machine.host_rate > 0
    assert machine.host_add_rate > 0
    assert machine.disk_both > 0
    assert not list(tmp_path.glob("*.tmp"))
    assert not [path for path in tmp_path.iterdir() if path.is_file()]  # the disk's file is gone
    assert unbounded.Machine.preset("h200:8").devices == 8


def test_a_disturbance_at_one_moment_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU computes with is looked at three times; here one time takes ten times as long."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(measuring, "_matmul_flops", lambda device, dtype: 1e9)
    quiet = measuring._Moment({"matmul_flops": 2e11, "device_bandwidth": 2e10, "kernel_seconds": 3e-5}, 0.04)
    fast = measuring._Moment({"matmul_flops": 3e11, "device_bandwidth": 3e10, "kernel_seconds": 2e-5}, 0.03)
    busy = measuring._Moment({"matmul_flops": 2e10, "device_bandwidth": 2e9, "kernel_seconds": 3e-4}, 0.4)
    for moments in ([quiet, busy, quiet], [busy, quiet, quiet], [busy, quiet, fast]):
        assert measuring._device_rates(cpu, moments) == measuring._device_rates(cpu, [quiet])
    assert measuring._device_rates(cpu, [busy]) != measuring._device_rates(cpu, [quiet])


def test_streaming_and_threads_are_bounded_by_the_memory() -> None:
    assert replace(UNMEASURED, host_threads=2).host_rate == 2 * UNMEASURED.host_thread_rate
    assert replace(UNMEASURED, host_threads=64).host_rate == UNMEASURED.host_bandwidth


def test_torchs_default_device_does_not_reach_what_is_measured() -> None:
    """A model is often made, and planned for, under the meta device."""
    cpu = torch.device("cpu")
    with torch.device("meta"):
        assert measuring._kernel_seconds(cpu) > 0
