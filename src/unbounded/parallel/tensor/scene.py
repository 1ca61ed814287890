"""Where a forward is between regions of parts and regions of copies, and the moves between them.

    COPIES    every rank holds the same activations
    SEQUENCE  each rank holds its part of the sequence (inside the blocks, with sequence parallelism)
    FEATURES  each rank holds its part of the heads or of the hidden features

    COPIES   --column layer: enter-->   FEATURES --row layer: leave-->    COPIES
    SEQUENCE --column layer: gather-->  FEATURES --row layer: scatter-->  SEQUENCE
    COPIES   --first block: split-->    SEQUENCE --last block: join-->    COPIES

A sequence that does not divide is not cut in a forward without gradients, as in generation: every rank computes all
of it. In training it is refused. So is one of a single token for each rank, where that would be wrong.

Layers that read the same input (queries, keys and values) enter it once, so that the backward sums once. What was
entered is remembered by the identity of the input until the region is left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from unbounded.errors import StateError
from unbounded.parallel import collectives
from unbounded.parallel.collectives import LayerSite
from unbounded.ranks.axis import Axis

# How many inputs' entered forms are kept: those of a self- and of a cross-attention.
KEPT_INPUTS = 2


class Hold(Enum):
    """What a rank holds of the activations."""

    COPIES = "copies"
    SEQUENCE = "sequence"
    FEATURES = "features"


class Scene:
    """One model's forward on one rank of the tensor axis."""

    def __init__(self, axis: Axis, *, by_sequence: bool, takes_single: bool = True) -> None:
        self.axis, self.by_sequence = axis, by_sequence
        self._takes_single = takes_single  # whether a part of a sequence may be one token
        self.hold = Hold.COPIES
        self.is_dropping = False  # whether dropout on parts is that of the whole
        self.checkpoint: Any = None  # around the innermost module that drops the same when it runs again
        self.num_rows = 0  # of the batch that is cut along its sequence
        self._divides = True  # the sequence, over the ranks
        self._is_inside = False  # the blocks, where the sequence is cut
        self._entered: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    def at(self, layer: str) -> LayerSite:
        """Where the collectives of a layer happen."""
        return LayerSite(self.axis, layer)

    # -- regions of parts of the weights -----------------------------------------------------------------------------

    def enter(self, x: torch.Tensor, site: LayerSite) -> torch.Tensor:
        """`x` for a layer that holds a part of its outputs; entered once for all layers that read it."""
        for reference, entered in self._entered:
            if reference() is x:
                return entered
        if self.hold is Hold.SEQUENCE:
            entered = collectives.gather(x, sequence_dim(x), site)
        else:
            entered = collectives.enter(x, site)
        self._remember(x, entered)
        return entered

    def gather_sequence(self, x: torch.Tensor, site: LayerSite) -> torch.Tensor:
        """`x`, whole, for a module whose layers all read it; they need not enter it again."""
        gathered = collectives.gather(x, sequence_dim(x), site)
        self._remember(gathered, gathered)
        self.hold = Hold.COPIES
        return gathered

    def leave(self, partial: torch.Tensor, site: LayerSite) -> torch.Tensor:
        """The sum over the ranks of what each made from its part: whole, or this rank's part of the sequence."""
        self._entered = []
        self.hold = self.outside
        if self.hold is Hold.SEQUENCE:
            return collectives.scatter(partial, sequence_dim(partial), site)
        return collectives.leave(partial, site)

    @property
    def outside(self) -> Hold:
        """What is held between the regions."""
        return Hold.SEQUENCE if self._is_inside else Hold.COPIES

    def _remember(self, x: torch.Tensor, entered: torch.Tensor) -> None:
        self._entered = [*self._entered[-(KEPT_INPUTS - 1) :], (weakref.ref(x), entered)]

    # -- modules that are not cut, and may mix tokens ------------------------------------------------------------------

    def begin_whole(self, x: torch.Tensor, site: LayerSite) -> torch.Tensor:
        """The whole sequence, for a module that every rank runs alike."""
        self._entered = []
        self._is_inside, self.hold = False, Hold.COPIES
        return self._by_rows(x, lambda rows: collectives.join(rows, 1, site))

    def end_whole(self, output: Any, site: LayerSite) -> Any:
        """This rank's part of what such a module returned; of several values, of the first."""
        self._entered = []
        self._is_inside, self.hold = True, Hold.SEQUENCE
        first, *rest = output if isinstance(output, tuple) else (output,)
        part = self._by_rows(first, lambda rows: collectives.split(rows, 1, site))
        return (part, *rest) if isinstance(output, tuple) else part

    def _by_rows(self, x: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Tokens of all rows in one dim are taken apart for the move, and put together again."""
        if x.dim() > 2:
            return move(x)
        return move(x.unflatten(0, (self.num_rows, -1))).flatten(0, 1)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A forward of the model begins: forgets whatever an interrupted one left."""
        self._entered = []
        self._is_inside, self.hold = False, Hold.COPIES

    @contextmanager
    def undone(self) -> Iterator[None]:
        """What happens inside leaves no trace."""
        before = self.hold, self._is_inside, self._entered
        try:
            yield
        finally:
            self.hold, self._is_inside, self._entered = before

    def begin_block(self, hidden: torch.Tensor, site: LayerSite, *, is_first: bool) -> torch.Tensor:
        """A block's forward begins, or is recomputed; the first one cuts the sequence."""
        if is_first:
            length, size = hidden.shape[1], self.axis.size
            self._divides = length % size == 0 and (self._takes_single or length > size)
            if not self._divides and torch.is_grad_enabled():
                which = "which do not divide over" if length % size else "too few for two on a rank of"
                raise StateError(
                    f"the sequence has {length} tokens, {which} {self.axis.name}={size}. Pad the batch to a multiple "
                    f"of that, or leave {self._field} out of the plan."
                )
        self._entered = []
        if not self.is_cut:
            return hidden
        self._is_inside, self.hold, self.num_rows = True, Hold.SEQUENCE, hidden.shape[0]
        return collectives.split(hidden, 1, site) if is_first else hidden

    @property
    def is_cut(self) -> bool:
        """Whether blocks hold parts of the sequence. A block that is recomputed does, whatever ran before."""
        return self._divides or torch.is_grad_enabled()

    @property
    def _field(self) -> str:
        return "sequence" if self.axis.name == "tensor" else self.axis.name

    def end_block(self, output: Any, site: LayerSite, *, is_last: bool) -> Any:
        """A block's forward is over; the last one joins the sequence again.

        There is no output after an exception, which also ends a recomputed block as soon as all is there.
        """
        self._is_inside, self.hold = False, Hold.COPIES
        self._entered = []
        if output is None or not is_last or not self.is_cut:
            return output
        if isinstance(output, tuple):
            return (collectives.join(output[0], 1, site), *output[1:])
        return collectives.join(output, 1, site)


def sequence_dim(x: torch.Tensor) -> int:
    """The dim of the sequence: the one after the batch. If both are flattened, the order of tokens does not matter."""
    return 0 if x.dim() == 2 else 1
