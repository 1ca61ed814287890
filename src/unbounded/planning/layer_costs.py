"""What one token costs in layers of any kind, counted from their parameters.

Roughly: every matrix is a product, every output and norm is kept, and each operation is bound by what it reads and
writes. A module named after attention counts as attention over positions, and of experts those that a token passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unbounded.planner.models.footprint import Cost
from unbounded.zero.setup.sites import Site

_ACTIVE_KEYS = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "top_k")


def active_experts(config: Any) -> int:
    """Of the experts of a block, how many a token passes: what the config says, or one."""
    said = (getattr(config, key, None) for key in _ACTIVE_KEYS)
    return next((value for value in said if isinstance(value, int) and value > 0), 1)


def own_modules(site: Site, sites: list[Site]) -> dict[str, nn.Module]:
    """The modules of a site that are in none of the sites inside it, by their names in the model."""
    inside = {id(other.module) for other in sites if other is not site}
    found: dict[str, nn.Module] = {}

    def walk(name: str, module: nn.Module) -> None:
        found[name] = module
        for key, child in module.named_children():
            if id(child) not in inside:
                walk(f"{name}.{key}" if name else key, child)

    walk(site.name, site.module)
    return found


def count_cost(modules: Mapping[str, nn.Module], active: int) -> Cost:
    """The cost of these modules, by name, each for its own parameters; a token passes `active` experts of a list."""
    products = wide = normed = 0.0
    hidden = widest_input = num_kernels = 0
    for name, module in modules.items():
        num_kernels += next(module.children(), None) is None
        own = list(module.parameters(recurse=False))
        matrices = _matrices(module)
        for matrix in matrices:
            share = _active_share(name, matrix, modules, active)
            rows = matrix.shape[0] if not _is_stacked(name, matrix) else matrix.shape[0] * matrix.shape[1]
            products += matrix.numel() * share
            wide += rows * share
            widest_input = max(widest_input, matrix.shape[-1])
        if own and not matrices and not isinstance(module, nn.Embedding):
            normed += own[0].numel()
            hidden = max(hidden, own[0].numel())
    hidden = hidden or widest_input
    return Cost(
        products=products,
        attention=2 * sum(_attention_widths(modules)),
        moved=8.0 * wide + 36.0 * normed,
        kept=4.0 * wide + 8.0 * normed,
        input=2.0 * hidden,
        back=2.0 * wide,
        exchanged=2.0 * hidden,
        num_kernels=3 * num_kernels,
    )


def _matrices(module: nn.Module) -> list[torch.Tensor]:
    """What a token is multiplied with: no tables of an embedding, and no vectors kept as a matrix of one row."""
    if isinstance(module, nn.Embedding):
        return []
    return [one for one in module.parameters(recurse=False) if one.dim() >= 2 and one.shape[0] > 1]


def _names_experts(part: str) -> bool:
    """Whether a part of a module's name says that tokens are sent there by choice."""
    return "expert" in part and "shared" not in part


def _is_stacked(name: str, matrix: torch.Tensor) -> bool:
    """Whether a parameter is the matrices of all experts of a block."""
    return matrix.dim() == 3 and any(map(_names_experts, name.split(".")))


def _active_share(name: str, matrix: torch.Tensor, modules: Mapping[str, nn.Module], active: int) -> float:
    """The part of a matrix's products that a token takes part in."""
    if _is_stacked(name, matrix):
        return min(1.0, active / matrix.shape[0])
    parts = name.split(".")
    for end, part in enumerate(parts[:-1], 1):
        listed = modules.get(".".join(parts[:end]))
        if _names_experts(part) and isinstance(listed, nn.ModuleList | nn.ModuleDict):
            return min(1.0, active / len(listed))
    return 1.0


def _attention_widths(modules: Mapping[str, nn.Module]) -> list[int]:
    """The width of each attention: what its last matrix takes in."""
    found: dict[str, int] = {}
    for name, module in modules.items():
        last = name.rpartition(".")[2].lower()
        if not ("attn" in last or "attention" in last) or "linear" in last:
            continue
        matrices = [matrix for inner in module.modules() for matrix in _matrices(inner)]
        if matrices and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = matrices[-1].shape[-1]
    return list(found.values())
