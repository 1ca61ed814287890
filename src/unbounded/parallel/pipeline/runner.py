"""One call for all micro-batches of a batch: the pipeline as the training loop sees it.

    pipeline = unbounded.pipeline(model)
    for batch in loader:
        loss = pipeline(**batch)        # forwards and backwards of all micro-batches, over all stages
        optimizer.step()
        optimizer.zero_grad()

Every rank gets the loss of the batch. Gradients are added up on each rank and reduced once, by the step. Under
`torch.no_grad()` only the forwards run, and calling the model itself gives its output on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from unbounded.errors import StateError, UnboundedError
from unbounded.parallel.blocks import unwrap
from unbounded.parallel.pipeline import batches
from unbounded.parallel.pipeline.batches import Micro
from unbounded.parallel.pipeline.draws import Draws
from unbounded.parallel.pipeline.hollow import HollowModel
from unbounded.parallel.pipeline.schedules import Action, PassKind, check_schedule, make_schedule
from unbounded.parallel.pipeline.split_backward import Deferring, WeightWork
from unbounded.parallel.pipeline.stage_exchange import StageExchange, Template, TensorSpec, take_apart
from unbounded.parallel.same_batch import check_same_batch, describe_shapes
from unbounded.ranks.axis import Axis

Loss = Callable[[Any, dict[str, Any]], torch.Tensor]


class PipelineOptimizer(Protocol):
    """The optimizer as a pipeline needs it."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor: ...

    def no_sync(self) -> AbstractContextManager[None]: ...


@dataclass
class _MicroState:
    """One micro-batch between its forward and its backward in one stage."""

    received: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    parts: list[TensorSpec] = field(default_factory=list)
    work: WeightWork = field(default_factory=WeightWork)


class Pipeline:
    """See the module's docstring. All ranks must call it alike; ranks of one pipeline with the same batch."""

    def __init__(
        self,
        model: nn.Module,
        hollow: HollowModel,
        axis: Axis,
        device: torch.device,
        *,
        schedule: str,
        num_micros: int | None,
        trainer: PipelineOptimizer | None,
        summed: Callable[[], AbstractContextManager[None]],
        confirm: Callable[[str], None],
        holds: Callable[[], bool],
        loss: Loss | None = None,
        targets: Sequence[str] = (),
        reduction: str = "mean",
    ) -> None:
        self.model, self.hollow, self.axis, self.device = model, hollow, axis, device
        self.schedule, self.num_micros, self.loss = schedule, num_micros, loss
        self.targets, self.reduction = frozenset(targets), reduction
        self.trainer, self.summed = trainer, summed  # around the passes of a batch: adds up what several stages hold
        self.confirm = confirm  # returns when all stages are about to do the same
        self.holds, self._has_held = holds, False  # gradients of earlier batches; a stage may train nothing
        self.chunks, self.num_stages = hollow.cutting.chunks, axis.size * hollow.cutting.chunks
        self.exchange = StageExchange(axis, device) if axis.size > 1 else None
        self._talk = axis.lane("batches", "gloo")  # what every rank is about to run
        self._base = unwrap(model)
        self._shifts = batches.shifts_labels(model)
        self._without_cache = batches.find_argument(self._base, "use_cache") is not None
        self._place = batches.find_argument(self._base, "labels")
        self._templates: dict[tuple[Any, ...], Template] = {}
        self._told: set[tuple[Any, ...]] = set()
        self._trained: tuple[int, ...] = ()  # for every rank, a mark of the parameters that it trains
        self._draws = Draws(axis, hollow, device)
        if axis.size > 1:
            hollow.answer = self.answer

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """All ranks must call this. The batch's loss; if gradients are enabled, its backward has run."""
        if self._without_cache:
            kwargs.setdefault("use_cache", False)
        self.hollow.check(kwargs)
        count = self.num_micros or batches.choose_count((args, kwargs), self.axis.size)
        # Labels are counted before they go to a GPU, where counting would wait for all queued work.
        is_own = self.loss is None
        cut = batches.cut_batch(args, kwargs, count, shifts=self._shifts, is_own=is_own, place=self._place)
        micros = [Micro(self._on_device(micro.args), self._on_device(micro.kwargs), micro.weight) for micro in cut]
        trains = torch.is_grad_enabled()
        order = [action for action in self.order(count) if trains or action.work is PassKind.FORWARD]
        self._losses = torch.zeros((), dtype=torch.float64, device=self.device)
        self._passes: dict[tuple[int, int], _MicroState] = {}
        self._trained = self._compare(micros[0], count)
        self._rehearse(micros[0])
        if self._draws_matter():
            self._draws.lay_out(batches.signature(micros[0]), count)
        deferring = self.trainer.no_sync() if self.trainer is not None and trains else nullcontext()
        with self.hollow.shared_buffers(), deferring, self.summed() if trains else nullcontext():
            for action in order:
                self._do(action, micros[action.micro])
        self._has_held = self._has_held or self.holds()
        if self.exchange is not None:
            self.exchange.finish()
        self._draws.finish()
        return self.axis.sum(self._losses).float()

    def order(self, num_micros: int) -> list[Action]:
        """What this rank does with a batch of so many micro-batches."""
        check_schedule(self.schedule, self.axis.size, num_micros)
        return make_schedule(self.schedule, self.axis.rank, self.axis.size, num_micros, self.chunks)

    def answer(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """All ranks must call the model. Gives its output on every rank; nothing is kept for a backward."""
        if torch.is_grad_enabled():
            raise StateError(
                "the model is cut into pipeline stages, so calling it cannot be followed by a backward. Train with "
                "pipeline = unbounded.pipeline(model) and loss = pipeline(**batch); call the model under no_grad()."
            )
        if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
            raise StateError(
                "the model is cut into pipeline stages, each of which would cache the keys and values of its own "
                "layers only. Call the model, or model.generate, with use_cache=False."
            )
        self.confirm("a call of the model")
        args, kwargs = self._on_device(args), self._on_device(kwargs)
        if self._without_cache:
            kwargs.setdefault("use_cache", False)
        micro, result = Micro(args, kwargs, 1.0), None
        for chunk in range(self.chunks):
            stage, state = self._stage(Action(PassKind.FORWARD, chunk, 0)), _MicroState()
            payload = self._receive(stage, micro, state) if stage else {}
            result, kept = self.hollow.run(chunk, payload, args, kwargs, forward)
            if stage < self.num_stages - 1:
                self._send(stage, micro, kept, state)
        self._wire().finish()
        is_last = self.axis.rank == self.axis.size - 1
        host = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, result) if is_last else None
        told = self.axis.objects(host, "the output of a pipeline")[-1]
        return result if is_last else self._on_device(told)

    # -- one piece of work -------------------------------------------------------------------------------------------

    def _do(self, action: Action, micro: Micro) -> None:
        if action.work is PassKind.FORWARD:
            self._forward(action, micro)
        elif action.work is PassKind.WEIGHTS:
            self._passes.pop((action.chunk, action.micro)).work.run()
        else:
            self._backward(action, keep=action.work is PassKind.INPUTS)

    def _forward(self, action: Action, micro: Micro) -> None:
        stage, state = self._stage(action), _MicroState()
        payload = self._receive(stage, micro, state) if stage else {}
        halves = Deferring(state.work) if self.schedule == "zero_bubble" and torch.is_grad_enabled() else nullcontext()
        with self._draws.at(stage, action.micro), halves:
            given = {name: value for name, value in micro.kwargs.items() if name not in self.targets}
            result, kept = self.hollow.run(action.chunk, payload, micro.args, given)
            if stage == self.num_stages - 1:
                self._keep_loss(result, micro, state)
        if stage < self.num_stages - 1:
            self._send(stage, micro, kept, state)
        if torch.is_grad_enabled():
            self._passes[action.chunk, action.micro] = state

    def _keep_loss(self, result: Any, micro: Micro, state: _MicroState) -> None:
        loss = batches.read_loss(result) if self.loss is None else self.loss(result, micro.kwargs)
        weighted = loss * micro.weight if self.reduction == "mean" else loss
        self._losses += weighted.detach().double()
        state.outputs = [self.trainer.scale(weighted) if self.trainer is not None else weighted]

    def _backward(self, action: Action, *, keep: bool) -> None:
        stage = self._stage(action)
        state = self._passes[action.chunk, action.micro]
        gradients: list[torch.Tensor] | None = None
        if stage < self.num_stages - 1:
            gradients = self._wire().receive(state.parts, (stage + 1) % self.axis.size, stage=stage + 1, back=True)
            if self.trainer is not None:
                self.trainer.scale(
                    self._losses
                )  # the gradient that came is already scaled; this stage's step must know
        torch.autograd.backward(state.outputs, gradients)  # type: ignore[arg-type]
        if stage:
            back = [t.grad if t.grad is not None else torch.zeros_like(t) for t in state.received if t.requires_grad]
            self._wire().send(back, (stage - 1) % self.axis.size, stage=stage, back=True)
        state.outputs, state.received = [], []
        if not keep:
            del self._passes[action.chunk, action.micro]

    # -- payloads ------------------------------------------------------------------------------------------------------

    def _compare(self, micro: Micro, count: int) -> tuple[int, ...]:
        """All ranks must call this. Raises on all of them if their batches differ in shape, or what they did before.

        Returns which parameters the ranks train, as a mark for each: what is sent back between stages depends on that.
        """
        self.confirm("a batch of the pipeline")
        trained = zlib.crc32(bytes(parameter.requires_grad for parameter in self.model.parameters()))
        given = f"{count} micro-batches, each {describe_shapes((micro.args, micro.kwargs))}"
        kind = "" if torch.is_grad_enabled() else ", without gradients"
        mode = "" if self.model.training else ", in model.eval()"
        text = f"{given}{kind}{mode}"
        held = self.holds() if self._has_held and torch.is_grad_enabled() else None
        told = self._talk.objects((text, batches.signature(micro), trained, held), "the comparison of batches")
        first, *others = zip(self.axis.members(), told, strict=True)
        for rank, said in others:
            if said[:2] != first[1][:2]:
                raise StateError(
                    f"ranks of the pipeline axis run different batches: rank {first[0]}: {first[1][0]}; rank {rank}: "
                    f"{said[0]}. Give them the same batch, divided by optimizer.engine.axes.data alone, and make the "
                    "same calls on every rank."
                )
        if {True, False} <= {held for *_, held in told}:
            has = [rank for rank, (*_, held) in zip(self.axis.members(), told, strict=True) if held]
            raise StateError(
                f"before this batch only ranks {has} of the pipeline axis have gradients of an earlier one. Call "
                "optimizer.zero_grad() on every rank alike."
            )
        return tuple(mark for _, _, mark, _ in told)

    def _receive(self, stage: int, micro: Micro, state: _MicroState) -> Any:
        wire, source = self._wire(), (stage - 1) % self.axis.size
        key = stage, *batches.signature(micro), self._trained
        if key not in self._templates:
            self._templates[key] = wire.receive_template(source, stage=stage - 1)
        template = self._templates[key]
        state.received = wire.receive(template.parts, source, stage=stage - 1, back=False)
        for tensor, part in zip(state.received, template.parts, strict=True):
            tensor.requires_grad_(part.wants_gradient and torch.is_grad_enabled())
        return template.fill(state.received)

    def _send(self, stage: int, micro: Micro, kept: Any, state: _MicroState) -> None:
        wire, to = self._wire(), (stage + 1) % self.axis.size
        tensors, template = take_apart(kept)
        key = stage, *batches.signature(micro), self._trained
        if key not in self._told:
            self._told.add(key)
            wire.send_template(template, to, stage=stage)
        wire.send(tensors, to, stage=stage, back=False)
        state.outputs = [tensor for tensor in tensors if tensor.requires_grad]
        state.parts = [part for part in template.parts if part.wants_gradient]

    def _draws_matter(self) -> bool:
        return self.model.training and self._draws.is_needed()

    def _rehearse(self, micro: Micro) -> None:
        """Once, runs a micro-batch through the stages one after another: if one cannot run, all ranks raise.

        If dropout is on, this also finds out what each stage draws, once for every kind of batch.
        """
        key = batches.signature(micro)
        is_noted = self._draws_matter() and not self._draws.knows(key)
        if self.axis.size == 1 or (self.hollow.is_rehearsed and not is_noted):
            return
        check_same_batch([self.axis], (micro.args, micro.kwargs))
        noting = self._draws.recording(key) if is_noted else nullcontext()
        with torch.no_grad(), self.hollow.unchanged_buffers(), noting:
            for stage in range(self.num_stages):
                error = self._try(stage // self.axis.size, micro) if stage % self.axis.size == self.axis.rank else None
                self.axis.agree(error, what="the first batch of a pipeline")
        self.hollow.is_rehearsed = True
        self._wire().finish()
        self._losses.zero_()

    def _try(self, chunk: int, micro: Micro) -> UnboundedError | None:
        try:
            self._forward(Action(PassKind.FORWARD, chunk, 0), micro)
        except UnboundedError as error:
            return error
        return None

    def _stage(self, action: Action) -> int:
        return action.chunk * self.axis.size + self.axis.rank

    def _wire(self) -> StageExchange:
        assert self.exchange is not None
        return self.exchange

    def _on_device(self, value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(self.device, non_blocking=True), value)
