"""`unbounded import CKPT OUT`: converts a DeepSpeed ZeRO-3 or torch distributed checkpoint into one of ours."""

from __future__ import annotations

import argparse

HELP = "convert a DeepSpeed ZeRO-3 or torch distributed checkpoint, including optimizer states, for unbounded.load"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder that DeepSpeed or torch saved to")
    parser.add_argument("out", metavar="OUT", help="the folder to write, for unbounded.load")


def run(args: argparse.Namespace) -> int:
    from unbounded.checkpoint.foreign.importing import import_checkpoint

    found = import_checkpoint(args.checkpoint, args.out)
    trained = [stored for stored in found.parameters.values() if stored.moments]
    steps = max((stored.steps for stored in trained), default=0)
    numel = sum(_numel(stored.shape) for stored in found.parameters.values())
    states = f"{', '.join(sorted(trained[0].moments))} after step {steps}" if trained else "no optimizer states"
    print(f"{args.out}: {found.origin}, {len(found.parameters)} parameters ({numel:,} elements), {states}")
    return 0


def _numel(shape: tuple[int, ...]) -> int:
    import math

    return math.prod(shape)
