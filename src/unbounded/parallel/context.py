"""Context parallelism: inside the blocks each rank holds a part of every sequence, but attention sees all of it.

    first block   split the hidden states along the sequence
    attention     all-to-all: from a part of the sequence and all heads to the whole sequence and a part of the heads,
                  `scaled_dot_product_attention`, and back
    last block    join the sequence

Everything outside the blocks (masks, positions, the embedding, the head and the loss) is the model's own code on whole
sequences, the same on every rank, and attention, which sees whole sequences too, takes their masks as they are; masks
that a block makes from its part of a mask for tokens are joined. Gradients
of the blocks are parts and are summed, one collective per block. It works for `scaled_dot_product_attention`. A block
with another attention is refused when it first runs, and so is a mask that a block makes from its part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from unbounded.errors import PlanError, StateError
from unbounded.parallel.attachments import Detach, replace_forward, together
from unbounded.parallel.blocks import change_hidden, cut_arguments, find_stacks, unwrap
from unbounded.parallel.collectives import LayerSite, exchange_parts, join_parts
from unbounded.parallel.context_trial import BlockTrial
from unbounded.parallel.partial_gradients import Partial, attach_sum
from unbounded.parallel.tensor.attention import head_width
from unbounded.parallel.tensor.dropout import SlicedDropout, innermost_checkpoint
from unbounded.parallel.tensor.scene import Hold, Scene
from unbounded.ranks.axis import Axis


class _Exchange(torch.autograd.Function):
    """[batch, heads, part of the sequence, width] to [batch, part of the heads, sequence, width], or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, site: LayerSite, to_heads: bool) -> torch.Tensor:
        ctx.site, ctx.to_heads = site, to_heads
        return _exchange(x, site, site.output, to_heads)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchange(gradient, ctx.site, ctx.site.gradient, not ctx.to_heads), None, None


def _exchange(x: torch.Tensor, site: LayerSite, subject: str, to_heads: bool) -> torch.Tensor:
    cut, joined = (1, 2) if to_heads else (2, 1)
    parts = x.unflatten(cut, (site.size, -1)).movedim(cut, 0).contiguous()
    return exchange_parts(parts, site, subject).movedim(0, joined).flatten(joined, joined + 1)


class ContextAttention(SlicedDropout):
    """Inside, attention sees the whole sequence, and what is dropped is what the one-rank model drops."""

    def __init__(self, scene: Scene, site: LayerSite) -> None:
        super().__init__(scene)
        self.site, self.num_attentions = site, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        self.num_attentions += 1
        axis, groups = self.scene.axis, query.shape[1] // key.shape[1]
        if query.shape[1] % axis.size:
            raise StateError(
                f"attention has {query.shape[1]} heads here, which do not divide over context={axis.size}. "
                "Use a context axis that divides them."
            )
        if groups > 1 and key.shape[1] % axis.size:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        query, key, value = (_Exchange.apply(part, self.site, True) for part in (query, key, value))
        mask = self._own_heads(attn_mask, query, key) if attn_mask is not None else None
        self.scene.hold = Hold.FEATURES
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": query.shape[1] > key.shape[1]}
        result = self._attention(query, key, value, mask, dropout_p, **options)
        self.scene.hold = Hold.SEQUENCE
        return _Exchange.apply(result, self.site, False)  # type: ignore[no-any-return]

    def _own_heads(self, mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """This rank's heads of a mask of whole sequences; most masks have only one head.

        A block was given a part of [rows, tokens] and [tokens, tokens], like positions, and so of [rows, tokens,
        tokens]. If it made the mask from that, the parts of all ranks are the mask.
        """
        length, others, given = query.shape[2], key.shape[2], tuple(mask.shape)
        cut = [dim for dim, count in ((-1, others), (-2, length)) if given[dim:][:1] == (count // self.site.size,)]
        if len(cut) == 1 and not mask.requires_grad:
            mask = join_parts(mask, cut[0], self.site, f"the mask of {self.site.output}")
        if mask.dim() < 2 or mask.shape[-1] not in (1, others) or mask.shape[-2] not in (1, length):
            raise StateError(
                f"attention has a mask of {given} for sequences of {length} tokens, of which a block is given "
                f"{length // self.site.size} on each rank: it was made inside a block, from its part. Make the mask "
                "outside the blocks, or leave context out of the plan."
            )
        heads = query.shape[1]
        if mask.dim() == 4 and mask.shape[1] == heads * self.scene.axis.size:
            return mask.narrow(1, self.scene.axis.rank * heads, heads)
        return mask


# Besides attention, modules that compute a token's output from others too. (The other kinds work on channels alone.)
_MIXING = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.modules.batchnorm._NormBase)


_CROSS = (
    "attends to another sequence, whose gradients come from every rank's part. Context parallelism is for attention "
    "inside one sequence: leave context out of the plan."
)


class ContextParallel:
    """The blocks of a model over the ranks of a context axis."""

    def __init__(self, model: nn.Module, axis: Axis, stacks: Sequence[Sequence[nn.Module]] | None) -> None:
        base = unwrap(model)
        self.model, self.axis = model, axis
        self.stacks = [list(stack) for stack in (find_stacks(base) if stacks is None else stacks)]
        if not self.stacks:
            raise PlanError(
                f"{type(base).__name__} has no list of repeated blocks to cut sequences in. "
                "Leave context out of the plan."
            )
        config = getattr(base, "config", None)
        if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
            raise PlanError(f"{type(base).__name__} {_CROSS}")
        kind = getattr(config, "_attn_implementation", "sdpa")
        if kind != "sdpa":
            raise PlanError(
                f"the model's attention is {kind!r}, but context parallelism needs scaled_dot_product_attention. "
                "Build it with attn_implementation='sdpa', or leave context out of the plan."
            )
        inner = (lists for stack in self.stacks for block in stack for lists in find_stacks(block))
        if any(head_width(module) is not None for lists in inner for module in lists.modules()):
            raise PlanError(
                f"the blocks of {type(base).__name__} have blocks with attention of their own, as in models which "
                "change the sequence from stage to stage, but a context axis cuts one sequence for all. Leave context "
                "out of the plan."
            )
        for module in {module for stack in self.stacks for block in stack for module in block.modules()}:
            if isinstance(module, _MIXING):
                raise PlanError(
                    f"the blocks have a {type(module).__name__}, which mixes tokens besides attention and would see a "
                    "part of each sequence. Leave context out of the plan."
                )
        # Models take a single token for the next one of a cache, which sees all others: their attention is not causal.
        self.scene = Scene(axis, by_sequence=True, takes_single=False)
        self._detaches: list[Detach] = []

    def attach(self) -> None:
        """Makes the blocks hold parts of the sequence."""
        names = {module: name for name, module in unwrap(self.model).named_modules()}
        for stack in self.stacks:
            for block in stack:
                site = self.scene.at(names[block])
                partials = [Partial(module, name, None) for module in block.modules() for name in module._parameters]
                self._detaches.append(attach_sum(block, partials, site))
                trial = BlockTrial(names[block], block, self.axis)
                self._detaches.append(replace_forward(block, self._make_attending(block, site)))
                trial.cut = block.forward
                is_first, is_last = block is stack[0], block is stack[-1]
                self._detaches.append(self._attach_block(block, site, trial, is_first=is_first, is_last=is_last))

    def detach(self) -> None:
        together(*self._detaches)()
        self._detaches.clear()

    def _make_attending(self, block: nn.Module, site: LayerSite) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def attending(*args: Any, **kwargs: Any) -> Any:
                if not self.scene.is_cut:
                    return forward(*args, **kwargs)
                mode = ContextAttention(self.scene, site)
                self.scene.checkpoint = innermost_checkpoint()
                with mode:
                    result = forward(*args, **kwargs)
                if not mode.num_attentions:
                    raise StateError(
                        f"the block {type(block).__name__} did not call scaled_dot_product_attention, so its tokens "
                        "would not see the other ranks' part of the sequence. Leave context out of the plan."
                    )
                return result

            return attending

        return make

    def _attach_block(
        self, block: nn.Module, site: LayerSite, trial: BlockTrial, *, is_first: bool, is_last: bool
    ) -> Detach:
        scene, axis = self.scene, self.axis

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            parts: list[torch.Tensor] = []

            def begin(hidden: torch.Tensor) -> torch.Tensor:
                parts.append(scene.begin_block(hidden, site, is_first=is_first))
                return parts[0]

            args, kwargs = change_hidden(block, args, kwargs, begin)
            if not scene.is_cut:
                return args, kwargs
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.requires_grad and value is not parts[0]:
                    raise StateError(f"{type(block).__name__} is given hidden states twice: it {_CROSS}")
            if not trial.is_done:
                trial.run(parts[0], args, kwargs)
            return cut_arguments(block, args, kwargs, parts[0], axis)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return scene.end_block(output, site, is_last=is_last)

        handles = [
            block.register_forward_pre_hook(before, with_kwargs=True),
            block.register_forward_hook(after, prepend=True, always_call=True),
        ]
        return together(*(handle.remove for handle in handles))
