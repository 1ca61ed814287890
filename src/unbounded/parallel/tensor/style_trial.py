"""Styles that somebody gave are tried once: a module around cut layers must compute what it computes whole.

Code that is right for whole layers may be silently wrong for parts of them: a view with a fixed number of heads makes
them narrower, a softmax between a column and a row layer sees some of the features. So one module of each class runs
twice in the first forward, cut and as a whole copy, with random weights and inputs. No values are kept for this: the
copy is made on the meta device before the layers are cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from unbounded.errors import PlanError
from unbounded.parallel.attachments import Detach, replace_forward
from unbounded.parallel.blocks import change_hidden
from unbounded.parallel.collectives import take_part
from unbounded.parallel.tensor.scene import Hold, Scene
from unbounded.parallel.trials import evaluating, first_tensor, is_cache
from unbounded.ranks.cut import Cut

# Far above what rounding does to the sum of parts, far below what a wrong head or softmax does.
TOLERANCE = 1e-2


_OF_SEQUENCE = (
    " With sequence=True a block sees a part of the sequence: put code that mixes tokens into a module of its own, or "
    "leave sequence out of the plan."
)


class Trial:
    """One module around cut layers, and a whole copy of it without values. Made before the layers are cut."""

    def __init__(self, name: str, module: nn.Module, scene: Scene) -> None:
        self.name, self.module, self.scene = name, module, scene
        self.places = [(prefix, inner) for prefix, inner in module.named_modules()]
        shells = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), False) for p in module.parameters()}
        self.whole = copy.deepcopy(module, dict(shells)).eval()

    def attach(self, cuts: Mapping[int, Cut]) -> Detach:
        """Makes the module's next forward a trial first. `cuts` are by the parameter's id."""
        by_place = {
            (inner, name): cuts.get(id(parameter))
            for _, inner in self.places
            for name, parameter in inner._parameters.items()
            if parameter is not None
        }
        is_done = False

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def trying(*args: Any, **kwargs: Any) -> Any:
                nonlocal is_done
                if not is_done and self.scene.is_cut:
                    is_done = True
                    self._run(forward, args, kwargs, by_place)
                return forward(*args, **kwargs)

            return trying

        return replace_forward(self.module, make)

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any, cuts: dict[Any, Cut | None]) -> None:
        """All ranks of the axis must call this. Raises on all of them if parts give something else than the whole."""
        if not any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            return  # a model whose batch is inside something else
        site, seen = self.scene.at(self.name), self.scene.hold is Hold.SEQUENCE
        hidden: list[torch.Tensor] = []
        change_hidden(self.module, args, kwargs, lambda x: hidden.append(x) or x)  # type: ignore[func-returns-value]
        (given,) = hidden
        shape = list(given.shape)
        if seen:
            shape[1] *= site.size
        generator = torch.Generator(given.device).manual_seed(0)
        whole = given.detach()  # of tokens there are no others
        if given.is_floating_point():
            whole = torch.randn(shape, generator=generator, dtype=torch.float32, device=given.device)
        part = take_part(whole, 1, site) if seen else whole
        args, kwargs = pytree.tree_map(_for_trial, (args, kwargs), is_leaf=is_cache)
        with torch.no_grad(), torch.autocast(given.device.type, enabled=False), evaluating(self.module):
            values = self._draw(generator)
            given_args, given_kwargs = change_hidden(self.module, args, kwargs, lambda _: whole)
            wanted = first_tensor(torch.func.functional_call(self.whole, values, given_args, given_kwargs))
            given_args, given_kwargs = change_hidden(self.module, args, kwargs, lambda _: part)
            with self.scene.undone(), self._holding(values, cuts):
                try:
                    found = first_tensor(forward(*given_args, **given_kwargs))
                except (RuntimeError, ValueError) as error:
                    raise self._refusal(f"cannot run ({error})") from error
        if seen and found.shape != wanted.shape and wanted.dim() > 1:
            wanted = take_part(wanted, 1, site)
        difference = float((found - wanted).norm() / wanted.norm()) if found.shape == wanted.shape else float("inf")
        is_wrong = bool(wanted.isfinite().all()) and not difference < TOLERANCE
        found_wrong = self._refusal(f"gives something else (a relative difference of {difference:.2g})")
        site.axis.agree(found_wrong if is_wrong else None, what="the trial of styles")

    def _refusal(self, what: str) -> PlanError:
        place = f"{self.name!r} ({type(self.module).__name__})" if self.name else f"{type(self.module).__name__}"
        return PlanError(
            f"{place} {what} if its layers are cut by the plan's styles. Its code "
            "must be right for a part of the features: let views find the number of heads, as in view(batch, tokens, "
            "-1, width), and have a row layer after every column layer with nothing between them that looks at all "
            "features. Otherwise leave these layers out of styles." + (_OF_SEQUENCE if self.scene.by_sequence else "")
        )

    def _draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Whole values for all parameters, the same on every rank, and the buffers as they are."""
        values: dict[str, torch.Tensor] = {}
        for name, shell in self.whole.named_parameters():
            drawn = torch.randn(shell.shape, generator=generator, dtype=torch.float32, device=generator.device)
            values[name] = drawn / max(shell.shape) ** 0.5 if shell.dim() > 1 else 1 + 0.3 * drawn
        return values | dict(self.module.named_buffers())

    @contextmanager
    def _holding(self, values: Mapping[str, torch.Tensor], cuts: Mapping[Any, Cut | None]) -> Iterator[None]:
        """Inside, the module's parameters are this rank's parts of `values`."""
        before = [(inner, dict(inner._parameters)) for _, inner in self.places]
        names = {id(shell): name for name, shell in self.whole.named_parameters()}
        for prefix, inner in self.places:
            shells = self.whole.get_submodule(prefix)._parameters
            for name, shell in shells.items():
                if shell is not None:
                    value, cut = values[names[id(shell)]], cuts.get((inner, name))
                    inner._parameters[name] = value if cut is None else cut.take(value)  # type: ignore[assignment]
        try:
            yield
        finally:
            for inner, parameters in before:
                inner._parameters.update(parameters)


def _for_trial(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().float() if value.is_floating_point() else value
    return None if is_cache(value) else value
