"""`unbounded train`: the training job from the command line, its closing summary and its exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unbounded.train.job.summary import Summary

HELP = "train a model that does not fit in memory; without arguments, run a small real job"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for every setting."""
    from unbounded.train.options.flags import add_arguments as add

    add(parser)


def run(args: argparse.Namespace) -> int:
    """Train; 0: done, 1: failed, 2: bad input, 128 + n: saved after signal n (Ctrl-C, SIGTERM, SIGHUP)."""
    from unbounded.errors import CheckpointError, InputError, PlanError, UnboundedError
    from unbounded.launcher import read_numbers
    from unbounded.train.job.interrupts import exit_code
    from unbounded.train.options.flags import make_config

    read_numbers(os.environ)  # refuses numbers that make no sense before torch is imported
    config = make_config(vars(args))
    from unbounded.train.training import run as train

    try:
        summary = train(config)
    except UnboundedError as error:
        if isinstance(error, (InputError, PlanError, CheckpointError)):
            raise  # the command line prints it and exits with code 2
        print(f"unbounded: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if summary.speaks:
        _print(summary)
    return 0 if summary.signal is None else exit_code(summary.signal)


def _print(summary: Summary) -> None:
    from unbounded.train.job.summary import describe_summary

    if summary.sample:
        print(f"\n--- a sample ---\n{summary.sample}\n----------------")
    print()
    for line in describe_summary(summary):
        print(line)
    if summary.signal is not None:
        print(f"\ninterrupted after step {summary.step} and saved. The same command continues from there.")
