"""The command line: `unbounded VERB ...`, one module a verb.

A verb's module has HELP, add_arguments(parser) and run(args) -> exit code, and imports what is heavy (torch, rich)
inside run, so that `unbounded --help` stays instant: only the verb that was typed has its arguments built.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

VERBS = ("train", "plan", "bench", "doctor", "inspect", "export", "report")
EXIT_USER_ERROR, EXIT_INTERRUPTED = 2, 130


def available_verbs() -> list[str]:
    """The verbs whose module is there."""
    return [verb for verb in VERBS if find_spec(f"unbounded.cli.{verb}") is not None]


def build_parser(typed: str | None = None) -> argparse.ArgumentParser:
    """The parser, with the arguments of the verb `typed` and the one-line help of all."""
    import unbounded

    parser = argparse.ArgumentParser(prog="unbounded", description="Trains models that do not fit.")
    parser.add_argument("--version", action="version", version=f"unbounded {unbounded.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in available_verbs():
        module = _verb_module(verb)
        child = verbs.add_parser(verb, help=module.HELP, description=module.HELP)
        if verb == typed:
            module.add_arguments(child)
    return parser


def _verb_module(verb: str) -> ModuleType:
    return import_module(f"unbounded.cli.{verb}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code: its own, 2 for what the user can put right, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = next((word for word in words if not word.startswith("-")), None)
    args = build_parser(verb).parse_args(words)
    try:
        return int(_verb_module(args.verb).run(args) or 0)
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `unbounded ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        from unbounded.errors import UnboundedError

        if not isinstance(error, UnboundedError | FileNotFoundError) or _debugging():
            raise
        _complain(str(error))
        return EXIT_USER_ERROR


def _debugging() -> bool:
    return os.environ.get("UNBOUNDED_DEBUG", "") not in ("", "0")


def _complain(message: str) -> None:
    print(f"unbounded: {' '.join(message.split())}", file=sys.stderr)
