"""The `Config` that the user asked for: defaults, then the TOML file, then the flags. Mistakes give one line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import Any, get_origin

from unbounded.errors import InputError
from unbounded.planner.spelling import did_you_mean
from unbounded.train.options.config import GROUPS, Config
from unbounded.train.options.contradictions import EXCLUSIVE, check
from unbounded.train.options.fitting import FIELDS, fit, flag_of, kind_of, show

_LARGEST_FILE = 1 << 20  # of settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag per key, in groups; a flag that is not typed leaves no value."""
    parser.argument_default = argparse.SUPPRESS
    parser.description = (
        "Train a model that does not fit in memory. Without arguments, this trains a GPT over bytes on the sources of "
        "Python's standard library, with its states spread over device, host and disk."
    )
    parser.epilog = (
        "Every flag is also a key of the TOML file, with _ instead of -; plan is a table there. A flag overrides the "
        "file. Exit codes: 0 done, 1 failed, 2 bad input, 130, 143 or 129 interrupted (Ctrl-C, SIGTERM, a closed "
        "terminal) after saving."
    )
    parser.add_argument("file", nargs="?", default=None, metavar="run.toml", help="TOML file of settings")
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for one in FIELDS.values():
        groups[one.metadata["group"]].add_argument(flag_of(one.name), **_argument(one))


def make_config(given: dict[str, Any]) -> Config:
    """The flags in `given`, on top of the settings in their file. Unknown keys and contradictions are refused."""
    flags = {key: value for key, value in given.items() if key in FIELDS}
    file = given.get("file")
    if file == "":  # as from a variable that is not set: without a file, it would train something else
        raise InputError("the settings file has an empty name. Give the path of a TOML file, or leave it out.")
    settings = read_toml(Path(file)) if file is not None else {}
    plan = {**dict(settings.pop("plan", ())), **dict(flags.pop("plan", ()))}
    flags = {key: fit(key, value, flag_of(key)) for key, value in flags.items()}
    for pair in EXCLUSIVE:  # a flag overrides the file, even if the file says the same thing with the other key
        for mine, other in (pair, pair[::-1]):
            if mine in flags and other not in flags:
                settings.pop(other, None)
    config = Config(**{**settings, **flags}, plan=tuple(plan.items()))
    check(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, each with the type of its key."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(_read_text(path))
    except InputError:
        raise  # it says what is wrong
    except (OSError, ValueError, RecursionError) as error:  # also if it is not UTF-8 or not TOML
        raise InputError(f'settings file "{path}" cannot be read: {error}') from None
    for key in table:
        if key not in FIELDS:
            raise InputError(f'"{path}" has the unknown key {show(key)}.{did_you_mean(key, FIELDS)}')
    return {key: fit(key, value, f'"{key}" in "{path}"') for key, value in table.items()}


def _read_text(path: Path) -> str:
    if not path.exists():
        raise InputError(f'settings file "{path}" does not exist. Give the path of a TOML file.')
    if not path.is_file():
        raise InputError(f'settings file "{path}" is not a file. Give a TOML file.')
    with path.open("rb") as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise InputError(f'settings file "{path}" is larger than a megabyte. Give a TOML file of settings.')
    return content.decode("utf-8-sig")


def _argument(one: Field[Any]) -> dict[str, Any]:
    """What argparse needs to know about a key."""
    kind = kind_of(one.name)
    about = f"{one.metadata['help']} (default: {one.metadata['shown']})".replace("%", "%%")
    if one.metadata.get("keyed"):
        return {"help": about, "action": "extend", "nargs": "+", "type": _pair, "metavar": "KEY=VALUE"}
    if kind is bool:
        return {"help": about, "action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        return {"help": about, "nargs": "+", "metavar": one.name.rpartition("_")[2].upper()}
    if one.metadata.get("choices"):
        return {"help": about, "metavar": "{" + ",".join(one.metadata["choices"]) + "}"}
    metavar = {int: "N", float: "X"}.get(kind, one.metadata.get("metavar", "NAME"))
    return {"help": about, "type": _number(kind) if kind in (int, float) else kind, "metavar": metavar}


def _number(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that reads a text as `kind`, with a plain error message."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{show(text)} is not {wanted}") from None

    return read


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{show(text)} is not key=value")
    return key.strip(), _read_value(value.strip())


def _read_value(text: str) -> Any:
    """A number or true or false if it looks like one, as in TOML or in Python; otherwise the text."""
    if text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]{1,18}\.[0-9]{0,18}", text) else text
