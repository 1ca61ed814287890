"""Finds the units of a model from its module tree: which parameters move together, and at which module.

A *site* is a module whose forward gathers its units: every repeated block (an element of a ModuleList or
Sequential), every large leaf outside the blocks (an embedding, a head), and the root for what is left. A
parameter belongs to the site nearest above all the modules that hold it, so one shared by two blocks belongs
to their common ancestor. Parameters of one site that differ in dtype or in being trained are separate units,
since they move in separate buffers. Nothing here touches data: a model on the meta device will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

_no_forward = nn.Module.forward
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# A leaf module outside the blocks with at least this many elements is a unit of its own.
SMALL_NUMEL = 2**20
# A block holding more than this part of the model is split into its own repeated blocks, where it has some.
LARGE_PART = 0.25


@dataclass(eq=False)
class Member:
    """One parameter with every place in the module tree that holds it; the first is its name."""

    parameter: nn.Parameter
    names: list[str]
    holders: list[tuple[nn.Module, str]]


@dataclass(eq=False)
class Site:
    """A module whose forward needs its units, and whether other sites lie inside it."""

    name: str
    module: nn.Module
    inner: bool = False
    members: list[Member] = field(default_factory=list)


def find_members(model: nn.Module) -> list[Member]:
    """Every distinct parameter with elements, in the order of registration."""
    members: dict[int, Member] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.numel() == 0:
                continue
            member = members.setdefault(id(parameter), Member(parameter, [], []))
            member.names.append(f"{prefix}.{name}" if prefix else name)
            if not any(holder is module and attribute == name for holder, attribute in member.holders):
                member.holders.append((module, name))
    return list(members.values())


def find_sites(model: nn.Module) -> list[Site]:
    """The sites of the model in the order of the module tree, root first, each with the members it moves."""
    names = _site_names(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    sites = {name: Site(name, modules[name]) for name in names}
    for member in find_members(model):
        sites[_nearest_site(member.names, sites)].members.append(member)
    for name in names:
        above = name
        while above:
            above = _parent(above)
            if above in sites:
                sites[above].inner = True
    return [site for site in sites.values() if site.members or not site.name]


def split_members(site: Site) -> Iterator[tuple[torch.dtype, bool, list[Member]]]:
    """The members of a site that can share one buffer: the same dtype, all trained or all frozen."""
    kinds: dict[tuple[torch.dtype, bool], list[Member]] = {}
    for member in site.members:
        kinds.setdefault((member.parameter.dtype, member.parameter.requires_grad), []).append(member)
    for (dtype, trainable), members in kinds.items():
        yield dtype, trainable, members


def _site_names(model: nn.Module) -> list[str]:
    total = max(1, sum(parameter.numel() for parameter in model.parameters()))
    found, seen = [""], {id(model)}
    _walk("", model, total, found, seen)
    return found


def _walk(prefix: str, module: nn.Module, total: int, found: list[str], seen: set[int]) -> None:
    repeated = isinstance(module, (nn.ModuleList, nn.Sequential)) and _is_repeated(module)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if id(child) in seen:
            continue
        seen.add(id(child))
        numel = sum(parameter.numel() for parameter in child.parameters())
        if not (_can_be_called(child) or isinstance(child, _CONTAINERS)):
            continue  # a list of parameters is never called: they belong to the site above
        is_leaf = next(child.children(), None) is None
        if repeated and numel and (is_leaf or not (numel > LARGE_PART * total and _has_blocks(child))):
            if not is_leaf or numel >= SMALL_NUMEL:
                found.append(path)
        elif is_leaf:
            if numel >= SMALL_NUMEL:
                found.append(path)
        else:
            _walk(path, child, total, found, seen)


def _can_be_called(module: nn.Module) -> bool:
    """Whether a module has a forward, of its class or, as what `torch.compile` returns, of its own."""
    return type(module).forward is not _no_forward or "forward" in module.__dict__


def _is_repeated(container: nn.Module) -> bool:
    """Whether a container holds at least two modules of one class that have parameters."""
    classes = [type(child) for child in container.children() if next(child.parameters(), None) is not None]
    return len(classes) > len(set(classes))


def _has_blocks(module: nn.Module) -> bool:
    """Whether repeated blocks lie inside. Experts do not count: which of them run depends on the data."""
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
