"""Defaults, then the TOML file, then the flags: the `Config` that the user asked for, or one line on what is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from unbounded.train.config import GROUPS, Config
from unbounded.train.errors import InputError
from unbounded.train.similar import did_you_mean

_HINTS = get_type_hints(Config)
_FIELDS = {one.name: one for one in fields(Config)}
_EXCLUSIVE = (("model", "from_config"), ("steps", "epochs"), ("eval_fraction", "eval_data"))
_POSITIVE = (
    *("layers", "width", "heads", "lora_rank", "sequence_length", "batch_tokens", "micro_batch", "steps", "epochs"),
    *("lr", "eps", "keep_last", "eval_tokens", "log_every", "trace_steps", "checkpoint_minutes"),
)
_NOT_NEGATIVE = ("warmup", "clip", "eval_every", "checkpoint_every", "final_lr", "weight_decay", "sample_tokens")
_SHARES = ("eval_fraction", "lora_dropout", "beta1", "beta2")


class StrictParser(argparse.ArgumentParser):
    """A parser whose complaints are one line, with a suggestion for a misspelt flag."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but nothing is left over for a caller to report."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            what = "flag" if unknown[0].startswith("-") else "argument"
            self.error(f'there is no {what} "{unknown[0]}".{did_you_mean(unknown[0], self._option_string_actions)}')
        return found, []

    def error(self, message: str) -> NoReturn:
        """End the command with exit code 2."""
        self.exit(2, f"unbounded: {message}\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` one flag a key, grouped; a flag that is not typed leaves no value behind."""
    parser.__class__ = StrictParser  # the parser of a verb is made before the verb is asked
    parser.argument_default = argparse.SUPPRESS
    parser.allow_abbrev = False
    parser.description = (
        "Train a model beyond its memory. Without arguments: a GPT over bytes, on the sources of Python's standard "
        "library, with its states spread over device, host and disk."
    )
    parser.epilog = (
        "Every flag is also a key of the TOML file, with _ for -; plan is a table there. A flag beats the file. "
        "Exit code: 0 done, 1 failed, 2 bad input, 130 or 143 interrupted (Ctrl-C, SIGTERM) after saving."
    )
    parser.add_argument("file", nargs="?", default=None, metavar="run.toml", help="settings to start from")
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for one in fields(Config):
        groups[one.metadata["group"]].add_argument(_flag(one.name), **_argument(one))


def read_config(arguments: Sequence[str]) -> Config:
    """The settings of a command line."""
    parser = argparse.ArgumentParser(prog="unbounded train")
    add_arguments(parser)
    return make_config(vars(parser.parse_args(arguments)))


def make_config(given: dict[str, Any]) -> Config:
    """The settings of the flags `given` over those of their file; unknown keys and contradictions are refused."""
    flags = {key: value for key, value in given.items() if key in _FIELDS}
    settings = read_toml(Path(given["file"])) if given.get("file") else {}
    plan = {**dict(settings.pop("plan", ())), **dict(flags.pop("plan", ()))}
    flags = {key: _fit(key, value, _flag(key)) for key, value in flags.items()}
    for pair in _EXCLUSIVE:  # a flag beats the file, also where the file says it in the other way
        for mine, other in (pair, pair[::-1]):
            if mine in flags and other not in flags:
                settings.pop(other, None)
    config = Config(**{**settings, **flags}, plan=tuple(plan.items()))
    check(config)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file, each of the type its key wants."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f'settings file "{path}" does not exist.') from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f'settings file "{path}" cannot be read: {error}') from None
    for key in table:
        if key not in _FIELDS:
            raise InputError(f'"{path}" has the unknown key "{key}".{did_you_mean(key, _FIELDS)}')
    return {key: _fit(key, value, f'"{key}" in "{path}"') for key, value in table.items()}


def check(config: Config) -> None:
    """Refuse settings that contradict each other or cannot be meant."""
    for one, other in (*_EXCLUSIVE, ("from_config", "lora_rank")):
        if getattr(config, one) is not None and getattr(config, other) is not None:
            raise InputError(f"{_flag(one)} and {_flag(other)} contradict each other. Give one of them.")
    ours = config.model is None and config.from_config is None
    for key in ("layers", "width", "heads"):
        if not ours and getattr(config, key) is not None:
            raise InputError(f"{_flag(key)} shapes the built-in GPT, but a Hugging Face model was given. Leave it out.")
    for key in ("tokenizer", "lora_rank", "export"):
        if ours and getattr(config, key) is not None:
            raise InputError(
                f"{_flag(key)} takes a Hugging Face model, but none was given. Give --model or --from-config."
            )
    if config.lora_rank is None and (config.lora_alpha, config.lora_targets) != (None, None):
        raise InputError("--lora-alpha and --lora-targets mean nothing without --lora-rank. Give it too.")
    if not ours and config.data is None:
        raise InputError("a Hugging Face model needs data to train on. Give --data.")
    for key in ("precision", "activations", "device_bytes", "host_bytes", "disk_bytes", "disk_path"):
        if getattr(config, key) is not None and key in dict(config.plan):
            raise InputError(f"{_flag(key)} and --plan {key}=... contradict each other. Give one of them.")
    _check_numbers(config)


def _check_numbers(config: Config) -> None:
    for key in _POSITIVE:
        value = getattr(config, key)
        if value is not None and not value > 0:
            raise InputError(f"{_flag(key)} is {value}, but it must be more than 0.")
    for key in _NOT_NEGATIVE:
        value = getattr(config, key)
        if value is not None and not value >= 0:
            raise InputError(f"{_flag(key)} is {value}, but it must be 0 or more.")
    for key in _SHARES:
        value = getattr(config, key)
        if value is not None and not 0 <= value < 1:
            raise InputError(f"{_flag(key)} is {value}, but it must be at least 0 and less than 1.")
    if config.steps is not None and config.warmup is not None and config.warmup > config.steps:
        raise InputError(f"--warmup {config.warmup} is longer than the run of --steps {config.steps}. Shorten it.")


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _kind(key: str) -> Any:
    """The type that a key's value has when it is given: `str | None` is str."""
    hint = _HINTS[key]
    if get_origin(hint) is UnionType:
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    return hint


def _argument(one: Field[Any]) -> dict[str, Any]:
    kind, about = _kind(one.name), one.metadata["help"]
    default = one.default if one.default is not MISSING else None
    if default not in (None, (), False):
        about += f" ({default})"
    if one.metadata.get("keyed"):
        return {"help": about, "action": "extend", "nargs": "+", "type": _pair, "metavar": "KEY=VALUE"}
    if kind is bool:
        return {"help": about, "action": argparse.BooleanOptionalAction}
    if get_origin(kind) is tuple:
        return {"help": about, "nargs": "+", "metavar": one.name.rpartition("_")[2].upper()}
    if one.metadata.get("choices"):
        return {"help": about, "choices": one.metadata["choices"]}
    metavar = {int: "N", float: "X"}.get(kind, one.metadata.get("metavar", "NAME"))
    return {"help": about.replace("%", "%%"), "type": kind, "metavar": metavar}


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f'"{text}" is not key=value')
    return key.strip(), int(value) if value.strip().isdigit() else value.strip()


def _fit(key: str, value: Any, where: str) -> Any:
    """`value` as the type of its key, whichever way it was given."""
    kind = _kind(key)
    if _FIELDS[key].metadata.get("keyed"):
        if not isinstance(value, (dict, list, tuple)):
            raise InputError(f"{where} is {value!r}, but it must be a table of the plan's fields.")
        return tuple(dict(value).items())
    if get_origin(kind) is tuple:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif key.endswith("_bytes") and isinstance(value, (int, str)) and not isinstance(value, bool):
        return str(value)
    elif type(value) is kind:
        choices = _FIELDS[key].metadata.get("choices")
        if choices and value not in choices:
            raise InputError(
                f"{where} is {value!r}, but it must be one of {', '.join(choices)}.{did_you_mean(value, choices)}"
            )
        return value
    raise InputError(f"{where} is {value!r}, but it must be {_describe(kind)}.")


def _describe(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return names.get(kind, "a text or a list of texts")
