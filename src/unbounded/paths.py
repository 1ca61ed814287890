"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(path: str | os.PathLike[str]) -> Path:
    """The path with a leading ~ or ~user replaced by that home folder.

    The ~name of an unknown user is a plain name, as it is for shells; `Path.expanduser` would raise a RuntimeError.
    """
    return Path(os.path.expanduser(path))
