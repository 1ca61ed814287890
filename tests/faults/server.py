"""Runs scenarios with faults at their calls, each in a fork of this process, which has torch imported and no threads.

    python -m tests.faults.server FOLDER MOST FAULT,FAULT SCENARIO...      with the shim preloaded

FAULT is "kill" or the name of an errno. At most MOST calls of a scenario get each fault, evenly spread; 0 is all of
them. Prints one line of JSON for every case, with the number of the call, what it was, and what is wrong, if anything.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports, and would take seconds in every fork

import unbounded.checkpoint.exporting
import unbounded.checkpoint.loading
import unbounded.checkpoint.saving
import unbounded.sharding.placing
import unbounded.zero.streamed_values  # noqa: F401
from tests.faults.scenarios import SCENARIOS, Outcome
from tests.faults.shim import KILL, Fault

TIMEOUT_SECONDS = 600


def in_fork(work: Callable[[], Any]) -> tuple[Any, str]:
    """What `work` returns in a fork of this process, as JSON has it; or how that ended instead."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            text = json.dumps(["done", work()])
        except BaseException:
            text = json.dumps(["raised", traceback.format_exc()])
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], TIMEOUT_SECONDS)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    with open(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if text:
        how, value = json.loads(text)
        return (value, "") if how == "done" else (None, value)
    return None, "killed" if ready else "hung"


def run_case(scenario: str, template: Path, root: Path, fault: Fault) -> dict[str, Any]:
    """Makes one fault at one call; returns what happened."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    parts = SCENARIOS[scenario]
    acted, ended = in_fork(lambda: asdict(parts.act(root, fault)))
    outcome = Outcome(**acted) if acted else Outcome(0, "", ended, "" if ended == "killed" else ended)
    problem = outcome.problem
    if fault.code == KILL and not problem:
        problem, ended = in_fork(lambda: parts.check(root))
        problem = ended or problem
    elif not acted and not problem:
        problem = f"the process ended: {ended}"
    return {"at": fault.at, "call": outcome.failed, "error": outcome.error, "problem": problem or ""}


def spread(calls: int, most: int) -> list[int]:
    """The numbers of the calls to fail: all, or `most` of them, evenly spread, including the first and the last."""
    if not most or calls <= most:
        return list(range(1, calls + 1))
    return sorted({1 + index * (calls - 1) // (most - 1) for index in range(most)})


def run_scenario(scenario: str, folder: Path, faults: Sequence[str], most: int) -> None:
    template, root = folder / "template", folder / "root"
    template.mkdir(parents=True)
    parts = SCENARIOS[scenario]
    _, failed = in_fork(lambda: parts.prepare(template))
    shutil.copytree(template, root)
    counted, also = in_fork(lambda: asdict(parts.act(root, None)))
    if failed or also or counted["error"] or counted["problem"]:
        raise SystemExit(f"{scenario} fails without a fault: {failed}{also}{counted}")
    for name in faults:
        code = KILL if name == "kill" else getattr(errno, name)
        for at in spread(counted["calls"], most):
            # A disk that is full stays so; other errors may come once.
            fault = Fault(at, code, calls=10**6 if name == "ENOSPC" else 1)
            case = run_case(scenario, template, root, fault)
            print(json.dumps({"scenario": scenario, "fault": name, **case}), flush=True)


def main(folder: str, most: str, faults: str, *scenarios: str) -> None:
    torch.set_num_threads(1)
    for number, scenario in enumerate(scenarios):
        run_scenario(scenario, Path(folder) / str(number), faults.split(","), int(most))


if __name__ == "__main__":
    main(*sys.argv[1:])
