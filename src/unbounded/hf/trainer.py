"""`on(Trainer)`: a subclass of any Trainer class that shards the model when it makes the optimizer.

create_optimizer       the optimizer is made as usual, then model and optimizer are sharded
accelerator            attached: backward, clipping and prepare know the engine (`accelerator.py`)
save_model             exported unit by unit, by all ranks together
checkpoints            Trainer's own files, and a folder of ours with the states
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn
from transformers import PreTrainedConfig, Trainer

from unbounded.checkpoint.exporting import export
from unbounded.checkpoint.loading import load
from unbounded.checkpoint.safetensors_writer import refuse_adapters
from unbounded.checkpoint.saving import save
from unbounded.errors import PlanError, StateError
from unbounded.hf.accelerator import STATES, PreparedOptimizer, attach
from unbounded.hf.whole_checkpoints import LAST_FILE, check_whole, find_trainers
from unbounded.hf.whole_weights import whole_weights
from unbounded.optim.recognition import unwrap
from unbounded.planner.plan import Plan, read_data_plan
from unbounded.sharding.block_policies import find_blocks
from unbounded.sharding.placing import expect_weights, shard, unshard
from unbounded.sharding.running import full_params, is_sharded, sharded
from unbounded.weights.adapter_files import describe_adapters
from unbounded.zero.step.optimizer import ShardedOptimizer


def on(kind: Any) -> Any:
    """The Trainer class `kind` with one more argument, `plan`: "auto", a `Plan` or a dict of its fields.

    Works for `transformers.Trainer`, its subclasses, and TRL's trainers. `bf16=True` and `fp16=True` become the plan's
    precision: weights of that dtype with masters completed to fp32, instead of autocast.
    """
    return type(kind.__name__, (ShardingTrainer, kind), {"__module__": "unbounded.hf", "__doc__": kind.__doc__})


class ShardingTrainer:
    """What `on` puts before a Trainer class."""

    # Attributes of the Trainer that this class is mixed into, for type checkers.
    args: Any
    model: Any
    optimizer: Any
    accelerator: Any
    processing_class: Any
    data_collator: Any
    state: Any
    train_dataset: Any

    def __init__(self, *args: Any, plan: str | Plan | dict[str, Any] = "auto", **kwargs: Any) -> None:
        self._open_plan = read_data_plan(plan, "Trainer")
        self._resumed_from: str | None = None
        self._taken: Path | None = None
        self._uses_cache = _uses_cache(args[0] if args else kwargs.get("model"))
        super().__init__(*args, **kwargs)
        self.args._n_gpu = min(1, self.args.n_gpu)  # never DataParallel: start one process per GPU
        self._train_batch_size = self.args.train_batch_size
        self._refuse_cast_evaluations()

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The engine casts, and blocks are compiled one by one, so the accelerator does neither."""
        uncompiled = TorchDynamoPlugin(backend=DynamoBackend.NO)
        given = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        found = {**given, "mixed_precision": "no", "dynamo_plugin": uncompiled}
        if found.get("deepspeed_plugin") is not None or found.get("fsdp_plugin") is not None:
            raise PlanError(
                "the training arguments ask for DeepSpeed or FSDP, but this trainer shards the model itself. Leave out "
                "deepspeed= and fsdp=; unbounded.deepspeed.plan_from_config turns a config into a plan."
            )
        return found

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        attach(self.accelerator, self._plan())

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """`shard` places the model; moving it whole might not fit."""

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> nn.Module:
        """In training, the optimizer has just been made, perhaps by a subclass that did not ask ours."""
        if training:
            self._shard_with_optimizer()
        return model if is_sharded(model) else super()._wrap_model(model, training, *args, **kwargs)  # type: ignore[misc]

    def _prepare_for_training(self, max_steps: int, loader: Any, resume_from_checkpoint: str | None) -> Any:
        self._resumed_from = resume_from_checkpoint
        return super()._prepare_for_training(max_steps, loader, resume_from_checkpoint)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """All ranks must call this. Makes the optimizer, if there is none, and shards the model with it."""
        if is_sharded(self.model) and self.optimizer is None:
            unshard(self.model)
        super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        self._shard_with_optimizer()
        return self.optimizer

    def _shard_with_optimizer(self) -> None:
        """All ranks call this. A model that was sharded with another optimizer becomes whole first."""
        if isinstance(unwrap(self.optimizer), ShardedOptimizer):
            return
        if is_sharded(self.model):
            unshard(self.model)
        self._take_plain_states(self.optimizer)
        self._compile_blocks()
        _, placed = shard(self.model, self.optimizer, self._plan())
        self.optimizer = PreparedOptimizer(placed)

    def _plan(self) -> Plan:
        """The given plan, with the precision and the checkpointing that the training arguments ask for."""
        plan, asked = self._open_plan, "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else None
        if plan.precision is not None and asked not in (None, plan.precision):
            raise PlanError(
                f"the plan has precision={plan.precision!r} and the training arguments {asked}=True. Give one of them."
            )
        keeps = self.args.gradient_checkpointing and plan.activations is None
        return replace(plan, precision=plan.precision or asked, activations="keep" if keeps else plan.activations)

    def _refuse_cast_evaluations(self) -> None:
        """Trainer would cast the model in its first evaluation outside of training, which may be after hours of it."""
        for asked, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            held = self._plan().precision
            fits = held == asked if held is not None else all(p.dtype == dtype for p in self.model.parameters())
            if getattr(self.args, f"{asked}_full_eval") and not fits:
                raise PlanError(
                    f"{asked}_full_eval=True would cast the model for evaluations, but a sharded model has the plan's "
                    f"precision. Leave it out, or train with {asked}=True."
                )

    def _compile_blocks(self) -> None:
        """Graphs of blocks have no breaks; a graph of the whole model would have one wherever weights are gathered."""
        for block in find_blocks(self.model).values() if self.args.torch_compile else ():
            block.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)

    def _take_plain_states(self, optimizer: torch.optim.Optimizer) -> None:
        """A plain Trainer's checkpoint has whole states, which `shard` takes over."""
        if (file := self._plain_states()) is not None:
            saved = torch.load(file, map_location="cpu", weights_only=True)
            optimizer.load_state_dict(saved)
            keys = [key for group in saved["param_groups"] for key in group["params"]]
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for key, parameter in zip(keys, parameters, strict=True):
                if parameter.is_meta:  # where torch has put its states too, without their values
                    optimizer.state[parameter] = dict(saved["state"].get(key, {}))
            self._taken = file

    def _plain_states(self) -> Path | None:
        """The file with a plain Trainer's whole states, if this run resumes from one."""
        if self._resumed_from is None or self._states_in(self._resumed_from):
            return None
        file = Path(self._resumed_from) / "optimizer.pt"
        return file if file.is_file() else None

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """The engine's gradients are not on a mesh of DTensors, and looking at them would not show it."""
        return not is_sharded(model) and super()._has_mixed_mesh_grads(model)  # type: ignore[misc]

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """All ranks must call this. Shards a model that has not trained yet."""
        if not is_sharded(self.model):
            if self.train_dataset is not None:
                self.create_optimizer()
                self._shard_with_optimizer()
            else:
                shard(self.model, None, self._plan())
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """All ranks must call this. True resumes from the newest checkpoint that is whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = find_trainers(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, (str, Path)):
            check_whole(resume_from_checkpoint)
        if not describe_adapters(self.model) and self.args.save_strategy != "no":
            for checkpoint in Path(self.args.output_dir).glob("checkpoint-*"):
                refuse_adapters(checkpoint)  # now, and not in the step that would save there
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """All ranks must call this. Writes a folder for `from_pretrained`; for a peft model, the adapters."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = output_dir if output_dir is not None else self.args.output_dir
        if self.args.should_save and _internal_call:
            (Path(folder) / LAST_FILE).unlink(missing_ok=True)  # a checkpoint that is written again is not whole
        if self._saves_its_own_way():
            with self._cache_as_given(), whole_weights(self.model):
                super().save_model(folder, _internal_call)  # type: ignore[misc]
            return
        with self._cache_as_given():
            self._export(folder)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, Path(folder) / "training_args.bin")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _saves_its_own_way(self) -> bool:
        """Whether the Trainer class, or a subclass of ours, writes files of its own, from whole weights."""
        order = type(self).__mro__
        above = order[: order.index(Trainer)]
        given = above[above.index(ShardingTrainer) + 1 :]
        return any("_save" in vars(kind) for kind in above) or any("save_model" in vars(kind) for kind in given)

    def _export(self, folder: str) -> None:
        """Writes what is trained. What peft computes for its files, such as prompts, it computes from whole weights."""
        if all(about["tensors"] is not None for about in describe_adapters(self.model).values()):
            export(folder, self.model)
            return
        with full_params(self.model):
            if self.args.should_save:
                self.model.save_pretrained(folder)

    @contextmanager
    def _cache_as_given(self) -> Iterator[None]:
        """Training changes `use_cache` in the model's configuration; what is exported has the original value."""
        config = getattr(self.model, "config", None)
        if config is None or self._uses_cache is None:
            yield
            return
        during, config.use_cache = config.use_cache, self._uses_cache
        try:
            yield
        finally:
            config.use_cache = during

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / STATES, self.model, sharded(self.model).optimizer)
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()  # the last file makes the checkpoint whole, so all others come before it

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if self._states_in(checkpoint):
            load(Path(checkpoint) / STATES, self.model, sharded(self.model).optimizer)
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif self._plain_states() != self._taken:
            raise StateError(
                f"{checkpoint} was saved by the plain Trainer, and its optimizer states are taken over when the model "
                "is sharded, which has already happened here. Call train before anything else, in a new trainer."
            )
        elif (Path(checkpoint) / "scheduler.pt").is_file():  # the states were taken before the model was sharded
            saved = torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(saved)  # type: ignore[attr-defined]
            for group, rate in zip(self.optimizer.param_groups, saved.get("_last_lr", ()), strict=False):
                group["lr"] = rate

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if self._states_in(resume_from_checkpoint):
            return
        if not is_sharded(self.model) and any(parameter.is_meta for parameter in self.model.parameters()):
            expect_weights(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self._states_in(best):
            load(Path(best) / STATES, self.model)
        else:
            super()._load_best_model()  # type: ignore[misc]

    @staticmethod
    def _states_in(checkpoint: str) -> bool:
        return (Path(checkpoint) / STATES).is_dir()


def _uses_cache(model: Any) -> bool | None:
    """The `use_cache` of a model, or of a model by name; None if it does not say."""
    if isinstance(model, str):
        found = PreTrainedConfig.get_config_dict(model)[0].get("use_cache")
    else:
        found = getattr(getattr(model, "config", None), "use_cache", None)
    return found if isinstance(found, bool) else None
