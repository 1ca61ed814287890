"""Compares plan="auto" with plans made by hand: seconds per step on the same model, batch and budget.

    python benchmarks/planner/hand_plans.py          # on a GPU: 1.3B, 3.1B in 15 GiB, the same with compact states
    python benchmarks/planner/hand_plans.py --cpu    # tiny models, to try it out

Everything runs in one process, one plan after another, and "auto" first and last in its group. A plan that is faster by
no more than the steps of "auto" are apart counts as equally fast. The machine is measured first, unless it was already.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planner_check import HOST, Case, build, train, warmed

LEAST_NOISE = 0.03
AUTO = "auto"


@dataclass(frozen=True)
class Group:
    """A training with what is given to "auto" too (`case.plan`), and what hands add to that."""

    title: str
    case: Case
    plans: dict[str, dict[str, Any]]


def first_blocks(last: int, tier: str, rest: str) -> tuple[tuple[str, str], ...]:
    return (f"model.layers.[0-{last}]", tier), ("*", rest)


def make_groups(whole: Case, part: Case) -> list[Group]:
    """One model that fits the device, and one that does not."""
    some = first_blocks(2, "device", "host")
    compact = replace(part, plan={**part.plan, "optimizer_format": "compact"})
    weights_stay = {"weights": "device", "optimizer": "host"}
    return [
        Group(
            f"{whole.size}, the whole device",
            whole,
            {
                "all states on the host": HOST,
                "weights on the device": weights_stay,
                "states of 3 blocks on disk": {"optimizer": first_blocks(2, "disk", "device")},
                "every block recomputed": {"activations": "recompute"},
                "inputs of blocks on the host": {"activations": "host"},
                "stage 1, every block kept": {"stage": 1, "activations": "keep"},
            },
        ),
        Group(
            f"{part.size} in {part.plan['device_bytes']}",
            part,
            {
                "all states on the host": HOST,
                "weights on the device": weights_stay,
                "3 blocks on the device": {"weights": some, "optimizer": some},
                "the same, 1 unit ahead": {"weights": some, "optimizer": some, "prefetch_units": 1},
                "all on the host, 4 units ahead": {**HOST, "prefetch_units": 4},
                "inputs of blocks on the host": {"activations": "host"},
            },
        ),
        Group(
            f"{part.size} in {part.plan['device_bytes']}, compact states",
            compact,
            {"all states on the host": HOST, "weights on the device": weights_stay},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--steps", type=int, default=5, help="of each plan; the first two are not timed")
    parser.add_argument("--disk-path", default=".", help="where the disk tier is")
    parser.add_argument("--out", type=Path, default=Path("build/hand_plans.json"))
    options = parser.parse_args()
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        whole, part = Case("small", 2, 64), Case("deep", 2, 64, plan={"device_bytes": "40MiB"})
    else:
        whole, part = Case("1.3b", 4), Case("3b", 4, plan={"device_bytes": "15GiB"})
    use_measured(options.disk_path)
    rows: list[dict[str, Any]] = []
    for group in make_groups(whole, part):
        rows += compare(group, options)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    ran = [row for row in rows if "seconds" in row]
    good = sum(row["holds"] for row in ran)
    print(f'"auto" is at least as fast as {good} of {len(ran)} plans made by hand')
    sys.exit(good < len(ran))


def use_measured(disk_path: str) -> None:
    """ "auto" then decides by this machine's own rates."""
    import unbounded
    from unbounded.planner.machine import saved_machine

    if saved_machine() is None:
        began = time.perf_counter()
        unbounded.Machine.measure(disk_path)
        print(f"measured the machine in {time.perf_counter() - began:.1f} s", flush=True)


def compare(group: Group, options: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"\n{group.title}, {group.case.rows * group.case.sequence:,} tokens per step", flush=True)
    order = [AUTO, *group.plans, AUTO]
    runs = [(name, run(group, name, group.plans.get(name, {}), options)) for name in order]
    auto = [second for name, taken in runs if name == AUTO for second in taken]
    seconds, noise = statistics.median(auto), max(LEAST_NOISE, (max(auto) - min(auto)) / statistics.median(auto))
    print(f"  {AUTO:<32}{seconds:9.3f} s   its steps are within {noise:.1%}")
    rows = []
    for name, taken in runs:
        row: dict[str, Any] = {"group": group.title, "plan": name, "given": group.plans.get(name), "steps": taken}
        if name != AUTO and taken:
            row |= {"seconds": statistics.median(taken), "auto": seconds, "noise": noise}
            row["holds"] = seconds <= row["seconds"] * (1 + noise)
            verdict = "auto is at least as fast" if row["holds"] else "AUTO IS SLOWER"
            print(
                f"  {name:<32}{row['seconds']:9.3f} s   {row['seconds'] / seconds:6.2f} x auto   {verdict}", flush=True
            )
        rows.append(row)
    return rows


def run(group: Group, name: str, plan: dict[str, Any], options: argparse.Namespace) -> list[float]:
    """The timed steps of one plan, whose memory is free again afterwards; none if it does not fit."""
    from unbounded.errors import UnboundedError

    case = replace(group.case, plan={**group.case.plan, **plan}, steps=options.steps)
    try:
        return measure(case, options.disk_path)
    except UnboundedError as error:
        print(f"  {name:<32} refused: {error}", flush=True)
        return []
    finally:
        free()


def measure(case: Case, disk_path: str) -> list[float]:
    model, optimizer = build(case, disk_path)
    times, _ = train(case, model, optimizer)
    optimizer.wait()
    return warmed(times)


def free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
