"""`unbounded inspect CKPT`: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unbounded.checkpoint.format.manifest import Manifest

HELP = "show what is in a checkpoint; with --verify, check every byte of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder of a checkpoint")
    parser.add_argument("--verify", action="store_true", help="read every file and check its checksums")
    parser.add_argument("--tensors", action="store_true", help="list every parameter")


def run(args: argparse.Namespace) -> int:
    from unbounded.checkpoint.format import folder as folders
    from unbounded.checkpoint.format.data_files import Files
    from unbounded.checkpoint.format.parsing import read_manifest

    folder = folders.find(args.checkpoint)
    manifest = read_manifest(folder)
    show(folder, manifest, tensors=args.tensors)
    with Files(folder, manifest) as files:
        files.check_present()
        if args.verify:
            files.verify_all()
    print("verified: every byte is as it was written" if args.verify else "complete; --verify checks every byte")
    return 0


def show(folder: Path, manifest: Manifest, *, tensors: bool = False) -> None:
    """Prints what was saved, and a table of bytes by kind."""
    from rich.console import Console
    from rich.table import Table

    from unbounded.planner.sizes import format_bytes

    console = Console(markup=False)  # names may hold brackets
    about = Table(show_header=False, title=str(folder))
    for name, value in describe(manifest):
        about.add_row(name, value)
    console.print(about)
    kinds = Table("kind", "dtype", "tensors", "bytes")
    for (kind, dtype), (count, nbytes) in sorted(sum_kinds(manifest).items()):
        kinds.add_row(kind, dtype, f"{count:,}", format_bytes(nbytes))
    console.print(kinds)
    if tensors:
        table = Table("parameter", "shape", "step", "slices")
        for name, entry in manifest.values["parameters"].items():
            stored = manifest.tensors.get(("weight", name, None))
            slices = str(len(stored.slices)) if stored else "-"
            table.add_row(name, "x".join(map(str, entry["shape"])) or "scalar", str(entry.get("step", 0)), slices)
        console.print(table)


def describe(manifest: Manifest) -> list[tuple[str, str]]:
    """The first table: what was saved, when and by whom."""
    import math

    values: dict[str, Any] = manifest.values
    optimizer = values["optimizer"]
    numel = sum(math.prod(entry["shape"]) for entry in values["parameters"].values())
    steps = {entry.get("step", 0) for entry in values["parameters"].values() if entry["trainable"]}
    rows = [
        ("model", values["model"]),
        ("parameters", f"{numel:,} in {len(values['parameters']):,} tensors"),
        ("saved", f"{values['saved_at']} by unbounded {values['library']}, {values['world_size']} rank(s)"),
        ("precision", values["precision"]),
        ("optimizer", "none" if optimizer is None else f"{optimizer['kind']}, {len(optimizer['groups'])} group(s)"),
    ]
    if steps:
        rows.append(("steps", str(max(steps)) if len(steps) == 1 else f"{min(steps)} to {max(steps)}"))
    if values["extra"].get("0"):
        rows.append(("extra", ", ".join(values["extra"]["0"])))
    return rows


def sum_kinds(manifest: Manifest) -> dict[tuple[str, str], tuple[int, int]]:
    """Tensors and bytes by kind and dtype."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in manifest.tensors.values():
        key = entry.kind, str(entry.dtype).removeprefix("torch.")
        count, nbytes = sums.get(key, (0, 0))
        sums[key] = count + 1, nbytes + sum(piece.nbytes for piece in entry.slices)
    return sums
