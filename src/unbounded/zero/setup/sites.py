"""Finds the units of a model from its module tree: which parameters move together, and at which module.

A *site* is a module whose forward gathers its units: every repeated block (an element of a ModuleList or
Sequential), every large leaf outside the blocks (an embedding, a head), and the root for what is left. A
parameter belongs to the site nearest above all the modules that hold it, so one shared by two blocks belongs
to their common ancestor. Parameters of one site that differ in dtype or in being trained are separate units,
since they move in separate buffers. Every tile of a tiled weight (`tiles`) is a site; a block with such a layer inside
is not a site, so its other layers come and go like the tiles. Nothing here touches data: a model on the meta device
works too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from unbounded.zero.members import Member, find_members
from unbounded.zero.parameters.tiles import has_tiles, tiled_of

_no_forward = nn.Module.forward
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# A leaf module outside the blocks with at least this many elements is its own unit.
SMALL_NUMEL = 2**20
# A block with more than this part of the model is split into its own repeated blocks, if it has any.
LARGE_PART = 0.25


@dataclass(eq=False)
class Site:
    """A module whose forward needs its units, and whether other sites lie inside it."""

    name: str
    module: nn.Module
    is_outer: bool = False  # other sites lie inside it
    members: list[Member] = field(default_factory=list)


def find_sites(model: nn.Module, *, with_tiles: bool = False) -> list[Site]:
    """The sites of the model in the order of the module tree, root first, each with the members it moves.

    `with_tiles` makes the tiles of tiled weights; without it, the sites are those of the untiled model.
    """
    members = find_members(model)
    tile_sites = {id(member.parameter): _tile_sites(member) for member in members} if with_tiles else {}
    names = _site_names(model, with_tiles=with_tiles)
    sites: dict[str, Site] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in names:
            sites[name] = Site(name, module)
        for tile in tile_sites.pop(id(module._parameters.get("weight")), ()):  # wherever a tiled layer is
            sites[tile.name] = tile
    is_tiled = {id(site.members[0].whole) for site in sites.values() if site.members}
    for member in members:
        if id(member.parameter) not in is_tiled:
            sites[_nearest_site(member.names, sites)].members.append(member)
    for name in list(sites):
        above = name
        while above:
            above = _parent(above)
            if above in sites:
                sites[above].is_outer = True
    return [site for site in sites.values() if site.members or not site.name]


def _tile_sites(member: Member) -> list[Site]:
    """A site for every tile of a parameter; none if it is not tiled."""
    module, key = member.holders[0]
    tiled = tiled_of(module) if key == "weight" else None
    if tiled is None:
        return []
    width = member.parameter.numel() // member.parameter.shape[0]
    return [
        Site(
            f"{member.names[0]}[{start}:{stop}]",
            tile,
            members=[Member(tile.weight, member.names, [(tile, "weight")], member.parameter, start * width)],
        )
        for (start, stop), tile in zip(tiled.bounds, tiled.make_tiles(member.parameter), strict=True)
    ]


def split_members(
    site: Site, optimizer_of: Callable[[Member], int]
) -> Iterator[tuple[torch.dtype, bool, int, list[Member]]]:
    """The members of a site that can share one buffer: the same dtype, all trained by one optimizer or all frozen."""
    kinds: dict[tuple[torch.dtype, bool, int], list[Member]] = {}
    for member in site.members:
        key = (member.parameter.dtype, member.parameter.requires_grad, optimizer_of(member))
        kinds.setdefault(key, []).append(member)
    for (dtype, trainable, optimizer), members in kinds.items():
        yield dtype, trainable, optimizer, members


def _site_names(model: nn.Module, *, with_tiles: bool) -> set[str]:
    """The names of the modules that are sites. Tiled layers are none: their tiles are."""
    total = max(1, sum(parameter.numel() for parameter in model.parameters()))
    found, seen = {""}, {id(model)}
    _walk("", model, total, found, seen, with_tiles)
    return found


def _walk(prefix: str, module: nn.Module, total: int, found: set[str], seen: set[int], with_tiles: bool) -> None:
    repeated = isinstance(module, (nn.ModuleList, nn.Sequential)) and _is_repeated(module)
    if isinstance(module, nn.TransformerEncoder) and _is_repeated(module.layers):
        seen.add(id(module.layers[0]))  # the encoder itself looks at its first layer's parameters
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if id(child) in seen:
            continue
        seen.add(id(child))
        numel = sum(parameter.numel() for parameter in child.parameters())
        if not (_can_be_called(child) or isinstance(child, _CONTAINERS)):
            continue  # a list of parameters is never called, so they belong to the site above
        is_leaf = next(child.children(), None) is None
        if with_tiles and has_tiles(child):
            _walk(path, child, total, found, seen, with_tiles)
        elif repeated and numel and (is_leaf or not (numel > LARGE_PART * total and _has_blocks(child))):
            if not is_leaf or numel >= SMALL_NUMEL:
                found.add(path)
        elif is_leaf:
            if numel >= SMALL_NUMEL:
                found.add(path)
        else:
            _walk(path, child, total, found, seen, with_tiles)


def _can_be_called(module: nn.Module) -> bool:
    """Whether a module has a forward, in its class or, like what `torch.compile` returns, on the instance."""
    return type(module).forward is not _no_forward or "forward" in module.__dict__


def _is_repeated(container: nn.Module) -> bool:
    """Whether a container holds at least two modules of one class that have parameters."""
    classes = [type(child) for child in container.children() if next(child.parameters(), None) is not None]
    return len(classes) > len(set(classes))


def _has_blocks(module: nn.Module) -> bool:
    """Whether there are repeated blocks inside. Experts do not count, because which of them run depends on the data."""
    return any(
        isinstance(inner, (nn.ModuleList, nn.Sequential))
        and "expert" not in name.lower()
        and _is_repeated(inner)
        and any(next(child.children(), None) is not None for child in inner.children())
        for name, inner in module.named_modules()
    )


def _nearest_site(names: list[str], sites: dict[str, Site]) -> str:
    """The deepest site above every module that holds the parameter."""
    common = _parent(names[0])
    for name in names[1:]:
        while common and not (name == common or name.startswith(f"{common}.")):
            common = _parent(common)
    while common not in sites:
        common = _parent(common)
    return common


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
