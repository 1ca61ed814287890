"""`unbounded export CKPT OUT`: a saved checkpoint as a folder that from_pretrained reads."""

from __future__ import annotations

import argparse
import os

HELP = "write a checkpoint's weights (or its adapters) as a safetensors folder that from_pretrained reads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder of a checkpoint")
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--config", metavar="DIR", help="a folder whose configuration and tokenizer are copied too")
    parser.add_argument("--max-shard", default="5GB", metavar="BYTES", help='largest file, such as "5GB" (the default)')


def run(args: argparse.Namespace) -> int:
    from unbounded.checkpoint.conversion import export_checkpoint
    from unbounded.paths import expand_home

    out, config = (path and os.path.abspath(expand_home(path)) for path in (args.out, args.config))
    folder = export_checkpoint(args.checkpoint, out, config=config, max_shard_bytes=args.max_shard)
    files = [*folder.glob("*.safetensors"), *folder.glob("*/adapter_model.safetensors")]
    print(f"{folder}: {sum(path.stat().st_size for path in files):,} bytes in {len(files)} file(s) of weights")
    if not (folder / "config.json").exists() and not any(path.name == "adapter_model.safetensors" for path in files):
        print("There is no config.json, because the checkpoint has none. Give --config DIR to copy one.")
    return 0
