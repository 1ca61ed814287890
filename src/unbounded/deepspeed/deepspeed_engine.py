"""The engine that `initialize` returns: DeepSpeed's calls over a sharded model.

engine(batch) | engine.backward(loss) | engine.step()      for every micro-batch; every
gradient_accumulation_steps-th step clips, updates, zeroes the gradients and advances the schedule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from unbounded.checkpoint.loading import load
from unbounded.checkpoint.saving import save
from unbounded.deepspeed.batch_sizes import Batches
from unbounded.deepspeed.checkpoints import COUNTERS, find_tag, name_latest, sort_extra, write_weights
from unbounded.deepspeed.ds_config import DeepSpeedConfig
from unbounded.deepspeed.engine_facts import EngineFacts
from unbounded.errors import PlanError, StateError
from unbounded.sharding.running import sharded
from unbounded.zero.step.loss_scale import LossScale

logger = logging.getLogger("unbounded")


class DeepSpeedEngine(EngineFacts):
    """A sharded model with DeepSpeed's methods. `module` is the model itself."""

    def __init__(
        self, model: nn.Module, optimizer: Any, schedule: Any, config: DeepSpeedConfig, batches: Batches
    ) -> None:
        super().__init__(model, optimizer, schedule, config, batches)
        self._boundary: bool | None = None
        self._norm: float | None = None
        self._was_applied = False
        self._num_scaled = 0  # losses since the last update

    # -- the training loop -----------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **unused: Any
    ) -> torch.Tensor:
        """Adds the gradient of `loss`, divided by the number of micro-batches of a step; returns what was divided."""
        self._refuse_without_optimizer("backward")
        part = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        self._num_scaled += 1
        self.optimizer.scale(part).backward(retain_graph=retain_graph)
        return part

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """What the script itself is to call `backward()` on, in place of `engine.backward(loss)`."""
        self._refuse_without_optimizer("scale")
        self._num_scaled += 1
        return self.optimizer.scale(loss / self.gradient_accumulation_steps())  # type: ignore[no-any-return]

    def step(self, lr_kwargs: Mapping[str, Any] | None = None, **unused: Any) -> None:
        """All ranks must call this, after every backward. Updates at the end of an accumulation.

        The schedule's step is given `lr_kwargs`.
        """
        self._refuse_without_optimizer("step")
        self._was_applied = False
        if self.is_gradient_accumulation_boundary():
            self._refuse_undivided()
            self._update(lr_kwargs or {})
        self.micro_steps += 1

    def _refuse_without_optimizer(self, call: str) -> None:
        if self.optimizer is None:
            raise StateError(f"{call} was called on an engine without an optimizer. Give initialize one.")

    def _refuse_undivided(self) -> None:
        """Raises if only the script's own backwards made the gradients of several micro-batches."""
        num_backwards = sharded(self.module).engine.taking.num_backwards
        if self.gradient_accumulation_steps() > 1 and num_backwards and not self._num_scaled:
            raise StateError(
                f"the gradients come from loss.backward(), so they were not divided by gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps()}. Call engine.backward(loss), or engine.scale(loss).backward()."
            )

    def _update(self, lr_kwargs: Mapping[str, Any]) -> None:
        before = self.optimizer.loss_scale
        limit = self.config.clipping or math.inf
        self._norm = float(self.optimizer.clip_grad_norm_(limit))
        if self.config.skips_nonfinite and not math.isfinite(self._norm):
            self.optimizer.skipped_steps += 1
        else:
            self.optimizer.step()
            self._was_applied = not self.optimizer.step_was_skipped
        self.optimizer.zero_grad()
        self._num_scaled = 0
        if self.lr_scheduler is not None and self._was_applied:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._report(before)

    def _report(self, scale: LossScale | None) -> None:
        """What became of a step that began with this `scale`. Raises if no step to come can do better."""
        is_first = self.global_rank == 0
        if not self._was_applied and is_first:
            logger.info("step=%d was skipped: its gradients are not finite", self.global_steps)
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and is_first:
            logger.info("step=%d, skipped=%d, lr=%s", self.global_steps, self.skipped_steps, self.get_lr())
        if not self._was_applied and scale is not None and scale.is_exhausted:
            raise StateError(
                f"the gradients of step {self.global_steps} are not finite, and the loss scale {scale.value:g} is "
                "fp16.min_loss_scale already. Look for what is not finite in the data or the model, or train in bf16."
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Overrides the engine's decision: the next steps update, or do not."""
        self._boundary = is_boundary

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients are added up on each rank and not reduced."""
        return self.optimizer.no_sync()  # type: ignore[no-any-return]

    def get_global_grad_norm(self) -> float | None:
        """The norm over all ranks before clipping, of the last update; None before the first."""
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none)

    def was_step_applied(self) -> bool:
        """Whether the last `step` updated: not inside an accumulation, nor after an overflow."""
        return self._was_applied

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """All ranks must call this. One checkpoint in save_dir/tag; `client_state` comes back from the load."""
        _check_folder(save_dir)
        if exclude_frozen_parameters and self.global_rank == 0:
            logger.warning("Checkpoints have all parameters, so exclude_frozen_parameters has no effect.")
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        counters = {key: getattr(self, key) for key in COUNTERS}
        client = dict(client_state or {})
        folder = Path(save_dir) / name
        save(folder, self.module, self.optimizer, client_state=client, lr_scheduler=schedule, counters=counters)
        if save_latest:
            self._write(lambda: name_latest(Path(save_dir), name))
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """All ranks must call this. The path and the client state, or (None, None) if nothing was saved."""
        if custom_load_fn is not None:
            raise PlanError(
                "load_checkpoint was given custom_load_fn, but checkpoints are not read as one state dict. Write to "
                "the weights inside `with unbounded.full_params(engine.module):` after the load."
            )
        try:
            folder = find_tag(Path(load_dir), None if tag is None else str(tag))
        except FileNotFoundError as error:
            logger.warning("%s Nothing was loaded.", error)
            return None, None
        with_states = load_optimizer_states and not load_module_only
        extra = load(folder, self.module, self.optimizer if with_states else None)
        counters, schedule, client = sort_extra(extra)
        if load_lr_scheduler_states and not load_module_only and self.lr_scheduler is not None and schedule:
            self.lr_scheduler.load_state_dict(schedule)
        for key, value in counters.items() if not load_module_only else ():
            setattr(self, key, value)
        return str(folder), client

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """All ranks must call this. The whole weights in one file, which the first rank writes."""
        _check_folder(save_dir)
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        self._write(lambda: write_weights(state, Path(save_dir) / save_filename))
        return True

    def _write(self, write: Callable[[], None]) -> None:
        """All ranks must call this. The first one writes; if it cannot, every rank raises what went wrong."""
        error = None
        if self.global_rank == 0:
            try:
                write()
            except Exception as caught:
                error = caught
        sharded(self.module).engine.axes.world.agree(error, what="the first rank's writing of a file")

    save_fp16_model = save_16bit_model

    # -- the model and its data ------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of micro-batches of `dataset`. For training, every rank gets its own, in random order.

        Ranks of one tensor axis get the same. With another `route` ("eval", "predict") every rank gets all, in order.
        """
        ranks = sharded(self.module).engine.axes.data
        if data_sampler is None and route == "train":
            data_sampler = DistributedSampler(dataset, ranks.size, ranks.rank)  # type: ignore[arg-type]
        return DataLoader(
            dataset,
            batch_size or self.batches.micro,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=self.config.drops_last,
        )

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False, **unused: Any) -> dict[str, Any]:
        """All ranks must call this. Whole weights by name."""
        frozen = {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        return {name: value for name, value in self.module.state_dict().items() if name not in left_out}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole weights under the model's own names, as `state_dict` gives them."""
        return self.module.load_state_dict(*args, **kwargs)

    def empty_partition_cache(self) -> None:
        """Nothing stays gathered between passes."""

    def destroy(self) -> None:
        """There is nothing to tear down: the process group belongs to the job."""

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have comes from the model, such as `engine.generate`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _check_folder(save_dir: Any) -> None:
    if not save_dir:
        raise PlanError(f"save_dir is {save_dir!r}, as from a variable that is not set. Give the folder to write to.")
