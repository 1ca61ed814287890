"""The command line: `unbounded VERB ...`, one module per verb.

A verb's module has HELP, add_arguments(parser) and run(args) -> exit code. It imports heavy packages (torch, rich)
inside run, and arguments are built only for the verb that was typed, so that `unbounded --help` stays instant.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from unbounded.cli.parser import StrictParser

VERBS = ("train", "plan", "bench", "doctor", "inspect", "export", "import", "report")
EXIT_USER_ERROR, EXIT_INTERRUPTED = 2, 130


def available_verbs() -> list[str]:
    """The verbs whose module is there."""
    return [verb for verb in VERBS if find_spec(_module_name(verb)) is not None]


def build_parser(typed: str | None = None) -> argparse.ArgumentParser:
    """The parser, with the arguments of the verb `typed` and the one-line help of all."""
    import unbounded

    parser = StrictParser(prog="unbounded", description="Trains models that do not fit in memory.")
    parser.add_argument("--version", action="version", version=f"unbounded {unbounded.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in available_verbs():
        module = _verb_module(verb)
        child = verbs.add_parser(verb, help=module.HELP, description=module.HELP)
        if verb == typed:
            module.add_arguments(child)
    return parser


def _module_name(verb: str) -> str:
    """The module of a verb. A verb that is a Python keyword needs another name."""
    return f"unbounded.cli.{'import_checkpoint' if verb == 'import' else verb}"


def _verb_module(verb: str) -> ModuleType:
    return import_module(_module_name(verb))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code: its own, 2 for an error that the user can fix, 130 for Ctrl-C."""
    if not _has_output():
        return EXIT_USER_ERROR
    for stream in (sys.stdout, sys.stderr):  # file names may hold bytes that are not text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    verb = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(verb)
    if any("\0" in word for word in words):
        parser.error("an argument contains a zero byte. Remove it.")
    args = parser.parse_args(words)
    try:
        code = int(_verb_module(args.verb).run(args) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `unbounded ... | head`
        _drop_output()
        return 1
    except Exception as error:
        said = describe(error)
        if said is None or _debugging():
            raise
        _complain(said)
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return EXIT_USER_ERROR


def _drop_output() -> None:
    """Discards what could not be written. Otherwise Python would try again at exit, and change the exit code."""
    from unbounded.observe.report.display import discard

    discard(sys.stdout)


def describe(error: Exception) -> str | None:
    """The message for an error that the user can fix; None for a bug in this program."""
    from unbounded.errors import UnboundedError

    if isinstance(error, UnboundedError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f'"{error.filename}" cannot be used: {error.strerror} (errno {error.errno}). Give another path.'
    if isinstance(error, FileNotFoundError) and not _has_folder():
        return "the working folder was removed. Change to another one with cd."
    return str(error) if isinstance(error, OSError) else None


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _has_output() -> bool:
    """Whether there is a standard output. Closed streams are opened on /dev/null, so that no file gets their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    if sys.stdout is None:
        _complain("standard output is closed. Send it to a file, or to /dev/null.")
        return False
    return True


def _debugging() -> bool:
    return os.environ.get("UNBOUNDED_DEBUG", "") not in ("", "0")


def _complain(message: str) -> None:
    print(f"unbounded: {' '.join(message.split())}", file=sys.stderr)
