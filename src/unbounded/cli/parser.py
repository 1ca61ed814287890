"""The parser of every verb: an error is one line and exit code 2, and a misspelt flag gets a suggestion."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from unbounded.planner.spelling import did_you_mean


class StrictParser(argparse.ArgumentParser):
    """argparse's parser, without abbreviations, without usage above its errors, and with no unknown arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but unknown arguments are an error here and not in the caller."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            what = "flag" if unknown[0].startswith("-") else "argument"
            self.error(f'there is no {what} "{unknown[0]}".{did_you_mean(unknown[0], self._option_string_actions)}')
        return found, []

    def error(self, message: str) -> NoReturn:
        """End the command with exit code 2."""
        self.exit(2, f"unbounded: {' '.join(message.split())}\n")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """A type for arguments: a whole number from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from {least} to {most}")
        return value

    return read
