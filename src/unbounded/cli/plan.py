"""`unbounded plan MODEL --machine M --tokens N`: what lives where, how long a step takes, and what sets the pace."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unbounded.planner.evaluation import Candidate, Request
    from unbounded.planner.machine import MachineRates
    from unbounded.planner.models.footprint import Footprint

HELP = "predict the memory, step time and bottleneck of a model on a machine"
_BUDGETS = ("device_bytes", "host_bytes", "disk_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a config folder, a config.json, a preset, or layers=..,hidden=.."
    )
    parser.add_argument(
        "--machine", metavar="M", help="a preset (h200:8, dgx2:32, rtx4090) or a saved file (default: this machine)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help="tokens per step over all devices (default: sequences of about 4,096 per device)",
    )
    parser.add_argument("--sequence", type=int, default=2048, metavar="N", help="tokens per sequence (default: 2048)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: the fastest of 1 to 3)")
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="number format (default: bf16)"
    )
    parser.add_argument(
        "--format",
        choices=("exact", "compact", "any"),
        default="exact",
        help="format of optimizer states (default: exact)",
    )
    parser.add_argument(
        "--gradients",
        choices=("device", "host", "disk", "none"),
        help="where gradients live, otherwise chosen; none: each is used up inside the backward, without clipping",
    )
    parser.add_argument(
        "--activations",
        choices=("keep", "recompute", "host"),
        help="policy for all blocks (default: chosen for each block)",
    )
    parser.add_argument(
        "--lora-rank",
        type=int,
        metavar="R",
        help="train adapters of this rank at every linear layer of a block, and nothing else (in a model given by its "
        "sizes, experts have none)",
    )
    parser.add_argument("--compiled", action="store_true", help="assume that blocks are compiled")
    for name in _BUDGETS:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="SIZE",
            help=f"bytes of {name.split('_')[0]} that a rank may use, such as 24GiB",
        )
    parser.add_argument("--compare", action="store_true", help="rank the alternatives")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the plan as one page")
    parser.add_argument(
        "--measure", action="store_true", help="measure this machine first (under 30 s) and keep the result"
    )
    parser.add_argument("--papers", action="store_true", help="print the tables of the papers next to our figures")


def run(args: argparse.Namespace) -> int:
    if args.papers:
        return _print_papers(as_json=args.json)
    if args.measure:
        _measure()
        if args.model is None:
            return 0
    if not args.model:
        from unbounded.errors import PlanError

        raise PlanError("no MODEL was given. Give a config folder, a preset such as llama-7b, or layers=..,hidden=..")
    return _plan(args)


def _plan(args: argparse.Namespace) -> int:
    from unbounded.cli import plan_page
    from unbounded.observe.replacing import check_replaceable, write_file
    from unbounded.planner.explanation import as_values, describe
    from unbounded.planner.search import compare_ways, search

    page = None
    if args.html is not None:
        page = check_replaceable(args.html, "the page", plan_page.BEGINNING.encode())
    footprint, machine, request = _read(args)
    best = search(footprint, machine, request)
    if page is not None:
        write_file(page, plan_page.render(best, scaling(footprint, machine, request)))
    if args.json:
        values = as_values(best)
        if args.compare:
            values["alternatives"] = [as_values(way) for way in compare_ways(footprint, machine, request)]
        print(json.dumps(values, indent=2))
        return 0
    print("\n".join(describe(best)))
    if args.compare:
        print()
        print("\n".join(_rank(compare_ways(footprint, machine, request))))
    if args.html is not None:
        print(f"page         {args.html}")
    return 0


def _read(args: argparse.Namespace) -> tuple[Footprint, MachineRates, Request]:
    from unbounded.planner.evaluation import Request, assumed_tokens
    from unbounded.planner.models.footprint import STATE_BYTES
    from unbounded.planner.plan import read_plan

    machine = _read_machine(args.machine)
    names = ("exact", "compact") if args.format == "any" else (args.format,)
    fixed = {name: getattr(args, name) for name in _BUDGETS if getattr(args, name) is not None}
    fixed["precision"] = args.precision
    for name in ("activations", "gradients"):
        if getattr(args, name):
            fixed[name] = getattr(args, name)
    request = Request(
        args.tokens if args.tokens is not None else assumed_tokens(machine, args.sequence),
        args.sequence,
        plan=read_plan(fixed),
        formats={name: STATE_BYTES[args.precision, name] for name in names},
        stages=(1, 2, 3) if args.stage is None else (args.stage,),
    )
    return _read_model(args), machine, request


def _read_model(args: argparse.Namespace) -> Footprint:
    """A preset and sizes need no torch; the model of a config is built, without its bytes."""
    from unbounded.errors import PlanError
    from unbounded.planner.models.configs import find_config
    from unbounded.planner.models.footprint import COMPILED, EAGER, footprint_of
    from unbounded.planner.models.shapes import MOST_RANK, read_shape

    if args.lora_rank is not None and not 1 <= args.lora_rank <= MOST_RANK:
        raise PlanError(f"--lora-rank is {args.lora_rank}, but it must be from 1 to {MOST_RANK:,}.")
    kernels, is_fp32 = COMPILED if args.compiled else EAGER, args.precision == "fp32"
    if find_config(args.model) is None:
        return footprint_of(read_shape(args.model), kernels=kernels, is_fp32=is_fp32, lora_rank=args.lora_rank)
    from unbounded.optim.formats import DTYPES
    from unbounded.planning.module_footprint import footprint_of_description

    return footprint_of_description(args.model, DTYPES[args.precision], args.sequence, kernels, args.lora_rank)


def _read_machine(text: str | None) -> MachineRates:
    """A preset or a file, by default this machine. Only what is free on an unmeasured machine takes torch to find."""
    from unbounded.planner.machine import saved_path
    from unbounded.planner.presets import read_machine

    if text is not None or saved_path().is_file():
        return read_machine(str(saved_path()) if text is None else text)
    from unbounded.planning.choosing import this_machine

    return this_machine()


def scaling(footprint: Footprint, machine: MachineRates, request: Request) -> list[Candidate]:
    """The same model and tokens per device on half, twice, ... as many nodes."""
    from dataclasses import replace

    from unbounded.errors import UnboundedError
    from unbounded.planner.search import search

    found = []
    counts = sorted({max(1, machine.nodes * step // 4) for step in (1, 2, 4, 8, 16)})
    for nodes in counts:
        if nodes > 1 and not machine.network_bandwidth:
            continue
        tokens = max(request.sequence, request.tokens * nodes // machine.nodes // request.sequence * request.sequence)
        try:
            found.append(search(footprint, replace(machine, nodes=nodes), replace(request, tokens=tokens)))
        except UnboundedError:  # too few nodes: the curve begins where the model fits
            continue
    return found


def _rank(ways: list[Candidate]) -> list[str]:
    from unbounded.planner.explanation import number_of, seconds
    from unbounded.planner.step.prediction import NAMES

    lines = [f"{'step':>10}{'TFLOP/s':>9}  way"]
    for way in ways:
        setup, prediction = way.setup, way.prediction
        lines.append(
            f"{seconds(way.seconds):>10}{prediction.tflops:>9.3g}  stage {setup.stage}, {way.axes}, {way.format}, "
            f"{number_of(setup.tokens, 'token')} x {setup.accumulate}; {NAMES[prediction.bottleneck]}"
        )
    return lines


def _measure() -> None:
    from unbounded.machine import Machine
    from unbounded.planner.machine import saved_path

    machine = Machine.measure()
    print(machine.to_json(), end="")
    print(f'saved to "{saved_path()}"')


def _print_papers(*, as_json: bool) -> int:
    from unbounded.planner.papers import all_rows
    from unbounded.planner.papers.table import count_hits

    rows = all_rows()
    if as_json:
        print(json.dumps([{**vars(row), "error": row.error, "hits": row.hits} for row in rows], indent=2))
        return 0
    table = ""
    for row in rows:
        if row.table != table:
            table = row.table
            print(f"\n{table} ({row.unit}, within {row.tolerance:.3g})")
        verdict = "" if row.hits else "  MISS"
        note = f"  {row.note}" if row.note else ""
        print(f"  {row.what:<36}{row.paper:>10.4g}{row.ours:>10.4g}{row.error:>+9.1%}{verdict}{note}")
    hits, total = count_hits(rows)
    print(f"\n{hits} of {total} figures are within their tolerance.")
    return 0
