"""Whose own values a rank takes: random states, buffers and parts of `extra` that were not the same on all ranks.

On the mesh that saved it, every rank takes its own. On another one, all ranks at one place of the data axis take those
of the first rank that was at that place: they compute one copy of the model, so they must draw the same random numbers
and read the same data.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unbounded.ranks.mesh import ORDER, Axes


class Counterpart(NamedTuple):
    """The rank of a checkpoint that a rank goes on from; None if nobody was at its place of the data axis."""

    rank: int | None
    is_itself: bool  # the mesh is the one that saved it, with every rank at its place


def find_counterpart(saved: Mapping[str, Any], axes: Axes) -> Counterpart:
    """The counterpart of this rank in a checkpoint with the values `saved`."""
    places, data = saved.get("places"), axes.data.rank
    if places is not None:
        if places == axes.places:
            return Counterpart(axes.world.rank, is_itself=True)
        there = (rank for rank, place in enumerate(places) if place[ORDER.index("data")] == data)
        return Counterpart(next(there, None), is_itself=False)
    # Checkpoints of before, which do not say in which order the axes were.
    has_as_many = saved["world_size"] == axes.world.size
    mesh = saved.get("mesh", axes.sizes if has_as_many else {"data": saved["world_size"]})
    if has_as_many and mesh == axes.sizes:
        return Counterpart(axes.world.rank, is_itself=True)
    if data >= mesh.get("data", 1):
        return Counterpart(None, is_itself=False)
    return Counterpart(data * mesh.get("context", 1) * mesh.get("tensor", 1), is_itself=False)


def warn_of_other_ranks(saved: Mapping[str, Any], folder: Path, axes: Axes) -> None:
    """The first rank says it if `extra` has values of each rank's own and ranks on another mesh load it."""
    extras = saved["extra"]
    if axes.world.rank > 0 or len(extras) == 1 or find_counterpart(saved, axes).is_itself:
        return
    names = sorted({name for extra in extras.values() for name in extra})
    differing = [name for name in names if any(e.get(name) != extras["0"].get(name) for e in extras.values())]
    warnings.warn(
        f"the extra values {', '.join(differing)} differ between the {saved['world_size']} ranks that saved {folder} "
        f"(mesh {saved.get('mesh')}), and {axes.world.size} load it (mesh {axes.sizes}): each gets those of the first "
        "rank at its place on the data axis, or of rank 0. Divide anew what they divide over ranks.",
        stacklevel=5,
    )
