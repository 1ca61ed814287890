"""Which block gets which policy: pure functions over names.

A policy is one for all blocks, or (pattern, policy) pairs. The first pair whose pattern matches a block's name counts;
a block that none matches keeps its activations.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from torch import nn

from unbounded.errors import PlanError
from unbounded.planner.plan import Placement, read_activations

Blocks = str | nn.Module | Iterable[str | nn.Module]


def choose_policies(policy: Placement, names: Sequence[str]) -> dict[str, str]:
    """The policy of every block; a pattern that matches none is an error."""
    policy = read_activations(policy)
    if isinstance(policy, str):
        return dict.fromkeys(names, policy)
    for pattern, _ in policy:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            known = f"The blocks are {_show(names)}" if names else "The model has no repeated blocks"
            raise PlanError(f"the pattern {pattern!r} in activations matches no block. {known}.")
    return {
        name: next((chosen for pattern, chosen in policy if fnmatch.fnmatchcase(name, pattern)), "keep")
        for name in names
    }


def pick_blocks(model: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    """The submodules that `blocks` gives, by pattern or as modules. If one is inside another, the outer is taken."""
    modules = {name: module for name, module in model.named_modules() if name}
    names = {id(module): name for name, module in modules.items()}
    picked: set[str] = set()
    for wanted in [blocks] if isinstance(blocks, (str, nn.Module)) else blocks:
        found = _find(wanted, modules, names)
        if not found:
            shown = repr(wanted) if isinstance(wanted, str) else type(wanted).__name__
            raise PlanError(f"blocks has {shown}, which is not a submodule of the model. {_suggest(modules)}")
        picked.update(found)
    return {name: module for name, module in modules.items() if name in picked and not _has_parent(name, picked)}


def _find(wanted: str | nn.Module, modules: dict[str, nn.Module], names: dict[int, str]) -> list[str]:
    if isinstance(wanted, nn.Module):
        return [names[id(wanted)]] if id(wanted) in names else []
    called = [name for name, module in modules.items() if type(module).forward is not nn.Module.forward]
    return [name for name in called if fnmatch.fnmatchcase(name, wanted)]


def _has_parent(name: str, picked: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in picked for count in range(1, len(parts)))


def _suggest(modules: dict[str, nn.Module]) -> str:
    return f"Its submodules are {_show(list(modules))}." if modules else "It has none."


def _show(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
