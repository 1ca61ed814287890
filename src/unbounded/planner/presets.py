"""Machines to plan ahead with, by name: "h200", "h200:8", "dgx2:32", "rtx4090", "laptop".

A number after the name of a node counts nodes; after the name of a GPU it counts GPUs with their part of a node. A rate
that is not measured is the datasheet's times the share of it that work is expected to reach (`REACHED`), the same for
every preset. Each constant has its source next to it, and says if it is assumed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unbounded.errors import PlanError
from unbounded.planner.machine import MachineRates
from unbounded.planner.spelling import find_closest

GB, TB, GIB, TFLOP = 10**9, 10**12, 2**30, 1e12
REACHED = {
    "matmul": 0.67,  # H200: 785 TFLOP/s measured of 989 in the largest products; 660 fits recorded steps best
    "fp32": 0.67,  # assumed, of what a GPU does in fp32 without TF32, which torch uses only if it is told to
    "device memory": 0.85,  # assumed
    "link": 0.86,  # H200: PCIe 5.0 x16, 55 GB/s measured of 64
    "both ways": 0.85,  # H200: 47 GB/s each way measured of 55 alone
    "host memory": 0.45,  # assumed: 110 GB/s was measured on a host whose own limit is not known
    "collectives": 0.75,  # assumed, of NVLink each way
    "network": 0.85,  # assumed, of InfiniBand
}
THREAD = 9.1 * GB  # one thread of the host's AdamW: 0.35 Gparam/s of 26 bytes, measured on Xeon cores with AVX-512


def _node(name: str, **values: object) -> MachineRates:
    return MachineRates(name=name, **values)  # type: ignore[arg-type]


def _modern(
    name: str, *, tflops: float, fp32: float, memory: float, bandwidth: float, nvlink: float, network: float
) -> MachineRates:
    """A node of eight: PCIe 5.0 x16 for each, two sockets with 8 channels of DDR5-4800, 8 data disks."""
    return _node(
        name,
        matmul_flops=tflops * REACHED["matmul"] * TFLOP,
        device_bytes=int(memory * GB),
        device_bandwidth=bandwidth * REACHED["device memory"] * TB,
        to_device=64 * REACHED["link"] * GB,
        to_host=64 * REACHED["link"] * GB,
        both_ways=64 * REACHED["link"] * REACHED["both ways"] * GB,
        link_bandwidth=8 * 64 * REACHED["link"] * GB * 0.5,  # what the memory of both sockets takes at the same time
        host_bytes=2 * TB,
        host_bandwidth=614 * REACHED["host memory"] * GB,
        host_threads=112,
        host_thread_rate=THREAD,
        disk_bytes=30 * TB,
        disk_read=8 * 6.5 * GB,
        disk_write=8 * 3.5 * GB,
        disk_both=8 * 5.0 * GB,
        devices=8,
        peer_bandwidth=nvlink / 2 * REACHED["collectives"] * GB,
        network_bandwidth=network / 8 * REACHED["network"] * GB,
        kernel_seconds=8e-6,
        fp32_flops=fp32 * REACHED["fp32"] * TFLOP,
        sources={
            "matmul_flops": f"{tflops} TFLOP/s bf16 dense (datasheet) x {REACHED['matmul']}",
            "fp32_flops": f"{fp32} TFLOP/s fp32 (datasheet) x {REACHED['fp32']}",
            "device_bytes, device_bandwidth": f"datasheet: {memory:g} GB at {bandwidth:g} TB/s",
            "to_device": "PCIe 5.0 x16, 64 GB/s each way; 55 measured on an H200 machine",
            "host": "datasheet: 2 TB, 2 x 8 channels DDR5-4800 = 614 GB/s, 2 x 56 cores",
            "disk": "datasheet: 8 x 3.84 TB U.2 NVMe; 6.5 and 3.5 GB/s each assumed",
            "peer_bandwidth": f"NVLink {nvlink:g} GB/s both ways (datasheet), half of it each way",
            "network_bandwidth": f"{network:g} Gbit/s of InfiniBand per node (datasheet)",
        },
    )


def _consumer(
    name: str, *, tflops: float, fp32: float, memory: float, bandwidth: float, host: float, link: float
) -> MachineRates:
    return _node(
        name,
        matmul_flops=tflops * REACHED["matmul"] * TFLOP,
        device_bytes=int(memory * GIB),
        device_bandwidth=bandwidth * REACHED["device memory"] * TB,
        to_device=link * REACHED["link"] * GB,
        to_host=link * REACHED["link"] * GB,
        both_ways=link * REACHED["link"] * REACHED["both ways"] * GB,
        link_bandwidth=link * REACHED["link"] * GB,
        host_bytes=int(host * GIB),
        host_bandwidth=83 * REACHED["host memory"] * GB,
        host_threads=16,
        host_thread_rate=THREAD,
        disk_bytes=2 * TB,
        disk_read=6.0 * GB,
        disk_write=4.0 * GB,
        disk_both=5.0 * GB,
        kernel_seconds=8e-6,
        fp32_flops=fp32 * REACHED["fp32"] * TFLOP,
        sources={
            "matmul_flops": f"{tflops} TFLOP/s bf16 dense (datasheet) x {REACHED['matmul']}",
            "fp32_flops": f"{fp32} TFLOP/s fp32 (datasheet) x {REACHED['fp32']}",
            "device_bytes, device_bandwidth": f"datasheet: {memory:g} GB at {bandwidth:g} TB/s",
            "to_device": f"PCIe, {link:g} GB/s each way (specification) x {REACHED['link']}",
            "host": f"{host:g} GiB in 2 channels of DDR5-5200 = 83 GB/s",
            "disk": "a PCIe 4.0 NVMe disk of 2 TB, rates assumed",
        },
    )


DGX2 = _node(
    "dgx2",
    matmul_flops=60 * TFLOP,
    device_bytes=32 * GIB,
    device_bandwidth=0.78 * TB,
    to_device=12 * GB,
    to_host=12 * GB,
    both_ways=10 * GB,
    link_bandwidth=48 * GB,
    host_bytes=int(1.5 * 2**40),
    host_bandwidth=100 * GB,
    host_threads=48,
    host_thread_rate=THREAD / 2,
    disk_bytes=28 * TB,
    disk_read=25.6 * GB,
    disk_write=25.6 * GB,
    disk_both=25.6 * GB,
    devices=16,
    peer_bandwidth=120 * GB,
    network_bandwidth=60 * GB,
    kernel_seconds=10e-6,
    fp32_flops=15.7 * REACHED["fp32"] * TFLOP,
    sources={
        "fp32_flops": f"15.7 TFLOP/s (datasheet) x {REACHED['fp32']}",
        "matmul_flops": "chosen to fit the table of throughputs, one number for all rows: 60 of 125 TFLOP/s. "
        "ZeRO-Infinity takes 70 as what V100 reach in large products alone",
        "device_bandwidth": "V100's 900 GB/s (datasheet); ZeRO-Infinity figure 2b has 600 to 900",
        "link_bandwidth, disk": "ZeRO-Infinity figure 2b: 3.0 GB/s per GPU to the CPU and 1.6 to NVMe when "
        "all 16 work at once; 12 GB/s for one alone",
        "host_bytes, disk_bytes": "ZeRO-Infinity figure 2b: 1.5 TB of host memory, 28 TB of NVMe",
        "peer_bandwidth": "NVSwitch, 150 GB/s each way per GPU (datasheet), 0.8 of it assumed",
        "network_bandwidth": "the lower end of the 60 to 100 GB/s in ZeRO-Infinity figure 2b",
    },
)
DGX_A100 = _node(
    "dgx-a100",
    matmul_flops=225 * TFLOP,
    device_bytes=80 * GB,
    device_bandwidth=1.65 * TB,
    to_device=25 * GB,
    to_host=25 * GB,
    both_ways=21 * GB,
    link_bandwidth=100 * GB,
    host_bytes=2 * TB,
    host_bandwidth=180 * GB,
    host_threads=128,
    host_thread_rate=THREAD / 2,
    disk_bytes=30 * TB,
    disk_read=25 * GB,
    disk_write=20 * GB,
    disk_both=25 * GB,
    devices=8,
    peer_bandwidth=225 * GB,
    network_bandwidth=160 * GB,
    kernel_seconds=8e-6,
    fp32_flops=19.5 * REACHED["fp32"] * TFLOP,
    sources={
        "matmul_flops": "chosen to fit the table of throughputs, one number for all rows: 0.72 of 312 TFLOP/s",
        "fp32_flops": f"19.5 TFLOP/s (datasheet) x {REACHED['fp32']}",
        "device_bytes, device_bandwidth": "datasheet: 80 GB at 2.0 TB/s, 0.82 of it assumed",
        "peer_bandwidth": "NVLink 600 GB/s both ways (datasheet), 0.75 of one way assumed",
        "network_bandwidth": "8 x 200 Gbit/s of InfiniBand per node (Megatron section 5), 0.8 of it assumed",
        "host, disk": "datasheet: 2 x 64 cores, 2 TB, 8 x 3.84 TB NVMe; rates assumed",
    },
)
_NODES = {
    "dgx2": DGX2,
    "dgx-a100": DGX_A100,
    "dgx-h100": _modern("dgx-h100", tflops=989, fp32=67, memory=80, bandwidth=3.35, nvlink=900, network=3200),
    "dgx-h200": _modern("dgx-h200", tflops=989, fp32=67, memory=141, bandwidth=4.8, nvlink=900, network=3200),
    "dgx-b200": _modern("dgx-b200", tflops=2250, fp32=75, memory=180, bandwidth=8.0, nvlink=1800, network=3200),
    "rtx4090": _consumer("rtx4090", tflops=165, fp32=82.6, memory=24, bandwidth=1.008, host=128, link=32),
    "rtx4080": _consumer("rtx4080", tflops=97, fp32=48.7, memory=16, bandwidth=0.717, host=64, link=32),
    "laptop": replace(
        _consumer("laptop", tflops=60, fp32=30, memory=8, bandwidth=0.256, host=32, link=16),
        host_threads=8,
        disk_bytes=1 * TB,
    ),
}
_GPUS = {"v100": "dgx2", "a100": "dgx-a100", "h100": "dgx-h100", "h200": "dgx-h200", "b200": "dgx-b200"}
NAMES = (*_NODES, *_GPUS)


def read_machine(text: str) -> MachineRates:
    """The machine that a file has, or a preset."""
    if Path(text).is_file():
        return MachineRates.load(text)
    if "/" in text or text.endswith(".json"):
        raise PlanError(f'there is no machine file "{text}". Write one with Machine.measure().save(path).')
    return find_machine(text)


def find_machine(name: str) -> MachineRates:
    """The preset `name`. After a node's name a number counts nodes ("dgx2:32"), after a GPU's GPUs ("h200:8")."""
    base, colon, count = name.partition(":")
    if base not in NAMES:
        closest = find_closest(base, NAMES)
        hint = f"Did you mean {closest!r}?" if closest else f"The presets are {', '.join(NAMES)}."
        raise PlanError(f"there is no machine {name!r}. {hint} A file that Machine.save wrote works too.")
    if colon and (not count.isdecimal() or len(count) > 9 or int(count) < 1):
        raise PlanError(
            f"the machine {name!r} has {count!r} after its colon, which is not a number of them. Try {base}:8."
        )
    number = int(count or 1)
    if base in _GPUS:
        return _with_devices(_NODES[_GPUS[base]], number, name)
    if number > 1 and not _NODES[base].network_bandwidth:
        raise PlanError(f"{base!r} has no network, so there is no {name!r}. Plan for one machine, or for DGX nodes.")
    return replace(_NODES[base], nodes=number, name=name)


def _with_devices(node: MachineRates, count: int, name: str) -> MachineRates:
    """`count` devices: whole nodes, or a part of one node with its share of common resources."""
    if count % node.devices == 0:
        return replace(node, nodes=count // node.devices, name=name)
    if count > node.devices:
        fits = count // node.devices * node.devices
        raise PlanError(
            f"{name!r} is not a whole number of nodes of {node.devices} devices. Take {fits} or {fits + node.devices}."
        )
    shares = {
        key: type(getattr(node, key))(getattr(node, key) * count / node.devices)
        for key in ("host_bytes", "host_threads", "disk_bytes", "link_bandwidth", "host_bandwidth")
        + ("disk_read", "disk_write", "disk_both")
    }
    return replace(node, devices=count, name=name, **shares)


# What `shard` assumes for a machine that nobody has measured: the rates of the H200 machine of docs/results.md.
UNMEASURED = MachineRates(
    name="unmeasured",
    matmul_flops=650 * TFLOP,
    device_bytes=24 * GIB,
    device_bandwidth=4.0 * TB,
    to_device=50 * GB,
    to_host=50 * GB,
    both_ways=42 * GB,
    link_bandwidth=42 * GB,
    host_bytes=128 * GIB,
    host_bandwidth=104 * GB,
    host_threads=16,
    host_thread_rate=THREAD,
    disk_bytes=TB,
    disk_read=3.5 * GB,
    disk_write=3.0 * GB,
    disk_both=3.2 * GB,
    peer_bandwidth=100 * GB,
    network_bandwidth=25 * GB,
    kernel_seconds=8e-6,
    fp32_flops=45 * TFLOP,
    sources={
        "all": "links, host and disk: measured on one H200 machine, rounded down; memory, products, collectives assumed"
    },
)
