"""The ways in which a layer can be cut over the tensor axis, by name, and what of its parameters each rank gets.

The names are those of `tp_plan` in transformers, and short ones of ours. Nothing here touches a model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from unbounded.errors import PlanError
from unbounded.planner.spelling import find_closest

Pairs = tuple[tuple[str, str], ...]


class Kind(Enum):
    """What a style does with a layer."""

    COLUMN = "column"  # cut its outputs
    ROW = "row"  # cut its inputs, sum its outputs
    VOCABULARY = "vocabulary"  # cut the rows of an embedding
    HEAD = "head"  # cut the classes of the last layer
    TABLE = "table"  # cut the features of an embedding, one for each head
    EXPERTS = "experts"  # a module that holds cut parameters and is entered and left as a whole
    SUM = "sum"  # whole, but used on parts: its gradient is summed


@dataclass(frozen=True)
class Style:
    """One way to cut a layer. `sections` equal stretches are each cut: queries, keys and values in one matrix."""

    kind: Kind
    sections: int = 1
    joins: bool = False  # outputs of a column layer are made whole again
    splits: bool = False  # inputs of a row layer are whole and must be cut first


STYLES = {
    "column": Style(Kind.COLUMN),
    "row": Style(Kind.ROW),
    "vocabulary": Style(Kind.VOCABULARY),
    "head": Style(Kind.HEAD),
    "table": Style(Kind.TABLE),
    "experts": Style(Kind.EXPERTS),
    "sum": Style(Kind.SUM),
    "column_joined": Style(Kind.COLUMN, joins=True),
    "row_split": Style(Kind.ROW, splits=True),
    "column_of_2": Style(Kind.COLUMN, sections=2),
    "column_of_3": Style(Kind.COLUMN, sections=3),
    "row_of_2": Style(Kind.ROW, sections=2),
}
_TRANSFORMERS = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "column_joined",
    "colwise_gather_output": "column_joined",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
    "packed_colwise": "column_of_2",
    "packed_rowwise": "row_of_2",
    "embedding_rowwise": "vocabulary",
    "moe_tp_experts": "experts",
    "replicated_with_grad_allreduce": "sum",
}


def read_style(name: str, pattern: str) -> Style:
    """The style of that name, ours or of transformers."""
    style = STYLES.get(_TRANSFORMERS.get(name, name))
    if style is None:
        closest = find_closest(name, [*STYLES, *_TRANSFORMERS])
        hint = f"Did you mean {closest!r}?" if closest else f"The styles are {', '.join(STYLES)}."
        raise PlanError(f"the tensor style of {pattern!r} is {name!r}, which is not known. {hint}")
    return style


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name matches the pattern; a star stands for one part of it, as in `tp_plan`."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def find_style(name: str, pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """The last pair whose pattern matches `name`: later ones are more specific."""
    return next((pair for pair in reversed(pairs) if matches(pair[0], name)), None)
