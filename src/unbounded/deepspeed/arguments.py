"""The command-line arguments that DeepSpeed scripts add, and where `initialize` finds the config."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from unbounded.errors import PlanError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config, as DeepSpeed does."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="use DeepSpeed's config")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed's JSON config file")
    return parser


def find_config(args: Any, config: Any = None, config_params: Any = None) -> str | os.PathLike[str] | Mapping[str, Any]:
    """The config that `initialize` was given, in one of the three ways."""
    named = getattr(args, "deepspeed_config", None)
    given = [value for value in (config, config_params, named) if value is not None]
    if not given:
        raise PlanError("initialize was given no config. Give config=, a dict or the path of a JSON file.")
    if len(given) > 1 and any(value != given[0] for value in given[1:]):
        raise PlanError("initialize was given config= and args.deepspeed_config, and they differ. Give one of them.")
    return given[0]  # type: ignore[no-any-return]
