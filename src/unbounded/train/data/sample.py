"""One packed sample and its targets: the next token everywhere, or tokens that are masked.

Masked tokens are the masked-language objective (Devlin et al., 2018). Which tokens are masked, and what replaces them,
depends only on the seed and the number of the sample. So it is the same on any number of ranks, in batches of any
size, and in a resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unbounded.train.data.tokenizer import IGNORED

_MASKED, _RANDOM = 0.8, 0.1  # of the tokens to predict; the rest of them stay as they are


class Sequence(NamedTuple):
    """`targets[i]` is what is to be predicted at `inputs[i]`; `starts[i]` marks the first token of a document."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    starts: NDArray[np.bool_]


def ask_next(
    tokens: NDArray[np.int32], targets: NDArray[np.int32], starts: NDArray[np.bool_], *, separated: bool
) -> Sequence:
    """A sample of one token less, in which each token predicts the next, but never across separated documents."""
    wanted = np.where(starts[1:], np.int32(IGNORED), targets[1:]) if separated else targets[1:]
    return Sequence(tokens[:-1], wanted, starts[:-1])


@dataclass(frozen=True)
class Masking:
    """Masks `fraction` of the tokens of a sequence that have a target and are not `special`."""

    mask: int
    special: tuple[int, ...]
    vocabulary_size: int
    fraction: float

    def hide(self, sequence: Sequence, *draw_from: int) -> Sequence:
        """The sequence with masked tokens, and targets only there; at least one, if there is any to mask."""
        open_places = np.flatnonzero((sequence.targets != IGNORED) & ~np.isin(sequence.inputs, self.special))
        if not len(open_places):
            return sequence._replace(targets=np.full_like(sequence.targets, IGNORED))
        draw = np.random.default_rng(draw_from)
        count = max(round(self.fraction * len(open_places)), 1)
        chosen = draw.choice(open_places, count, replace=False)
        targets = np.full_like(sequence.targets, IGNORED)
        targets[chosen] = sequence.targets[chosen]
        return sequence._replace(inputs=self._replace(sequence.inputs, chosen, draw), targets=targets)

    def _replace(
        self, inputs: NDArray[np.int32], chosen: NDArray[np.int64], draw: np.random.Generator
    ) -> NDArray[np.int32]:
        lot = draw.random(len(chosen))
        others = draw.integers(0, self.vocabulary_size, len(chosen), dtype=np.int32)
        hidden = inputs.copy()
        hidden[chosen] = np.where(lot < _MASKED, np.int32(self.mask), hidden[chosen])
        hidden[chosen] = np.where(lot >= 1 - _RANDOM, others, hidden[chosen])
        return hidden
