"""The strategy of Lightning's Trainer: the module is sharded when its optimizer is set up.

Steps of the LightningModule run inside its own forward, so that weights outside repeated blocks are gathered once for
the whole step. A checkpoint is one of our folders; what else Lightning needs is in it as plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn

from unbounded.checkpoint.loading import load
from unbounded.checkpoint.saving import save
from unbounded.errors import CheckpointError
from unbounded.lightning.plain_values import as_plain
from unbounded.lightning.precision import only_optimizer, refuse_clipping_by_value, with_precision
from unbounded.optim.recognition import unwrap
from unbounded.planner.plan import Plan, read_data_plan
from unbounded.sharding.placing import shard, unshard
from unbounded.sharding.running import is_sharded, sharded


class EnginePrecision(Precision):
    """What is left to a precision plugin: fp16's loss scale and clipping, over ranks and tiers."""

    def __init__(self, precision: Any) -> None:
        super().__init__()
        self.precision = precision

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:  # type: ignore[override]
        scaled = super().pre_backward(tensor, module)
        optimizer = sharded(module).optimizer
        return optimizer.scale(scaled) if optimizer is not None else scaled  # type: ignore[return-value]

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        unwrap(optimizer).clip_grad_norm_(clip_val)  # type: ignore[attr-defined]

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        refuse_clipping_by_value()


class _Streamed(MutableMapping[str, Any]):
    """Stands for the weights in Lightning's checkpoint: they go from their tiers into the checkpoint's folder.

    They are gathered if a hook looks at them, on all ranks then. What it puts there is kept, as in a plain checkpoint.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._before: dict[str, Any] | None = None
        self._values: dict[str, Any] = {}

    def _gathered(self) -> dict[str, Any]:
        if self._before is None:
            self._before = dict(self._module.state_dict())
            self._values = dict(self._before)
        return self._values

    @property
    def is_changed(self) -> bool:
        """Whether a hook has put in other values. What it has left out is in the folder all the same."""
        before = self._before or {}
        return any(key not in before or value is not before[key] for key, value in self._values.items())

    def __getitem__(self, key: str) -> Any:
        return self._gathered()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._gathered()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._gathered()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gathered())

    def __len__(self) -> int:
        return len(self._gathered())


class UnboundedStrategy(DDPStrategy):
    """`strategy="unbounded"`, or this with a plan: "auto", a `Plan` or a dict of its fields."""

    strategy_name = "unbounded"

    def __init__(self, plan: str | Plan | dict[str, Any] = "auto", **kwargs: Any) -> None:
        self.open_plan = read_data_plan(plan, "Lightning")
        super().__init__(**kwargs)
        self._inside = _ForwardRedirection()
        self._resumes_from_file = False

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """The engine casts, so only the precision is taken from the plugin."""
        self._precision_plugin = None if plugin is None else EnginePrecision(plugin.precision)

    # -- set-up ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """All ranks call this. Shards the module, with its optimizer if it is to be trained.

        Every fit makes a new optimizer, so between fits a trained module is whole.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.world_size == 1:  # rows that Lightning divides among ranks are shuffled, whatever the loader says
            trainer._accelerator_connector.use_distributed_sampler = False
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            if is_sharded(module):
                unshard(module)
            if self._layer_sync is not None:
                self._layer_sync.apply(module)
            self.setup_optimizers(trainer)
            self._made = only_optimizer(self.optimizers)  # type: ignore[has-type]
            self._shard_with_optimizer()
        elif not is_sharded(module):
            shard(module, None, self._plan())
        self.setup_precision_plugin()

    def _plan(self) -> Plan:
        return with_precision(self.open_plan, self.precision_plugin.precision)

    def _shard_with_optimizer(self) -> None:
        assert self.lightning_module is not None
        self.optimizers = [shard(self.lightning_module, self._made, self._plan())[1]]

    def model_to_device(self) -> None:
        """`shard` places the module; moving it whole might not fit."""

    def configure_ddp(self) -> None:
        """The engine reduces gradients."""

    def teardown(self) -> None:
        """Leaves the sharded module where it is."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step("predict_step", *args, **kwargs)

    def _step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        return self._inside(module, module, name, *args, **kwargs)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return _Streamed(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The small part: the states go from their tiers into the checkpoint's folder."""
        return getattr(optimizer, "_optimizer", optimizer).groups_and_counters()  # type: ignore[no-any-return]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """All ranks call this. Writes a folder that Lightning resumes from; `unbounded export` extracts the weights.

        A callback that keeps an average puts it in the place of the weights, and reads them elsewhere: there, they are
        whole.
        """
        module = self.lightning_module
        assert module is not None
        with_states = "optimizer_states" in checkpoint
        streamed = {key: value for key, value in checkpoint.items() if isinstance(value, _Streamed)}
        whole = {key: value for key, value in streamed.items() if key != "state_dict" or value.is_changed}
        rest = as_plain(checkpoint | {key: {} for key in streamed} | whole)
        save(filepath, module, sharded(module).optimizer if with_states else None, lightning=rest)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """All ranks call this. Loads weights and states; a file that another strategy saved can be read too."""
        module = self.lightning_module
        self._resumes_from_file = not Path(checkpoint_path).is_dir()
        if self._resumes_from_file:
            return super().load_checkpoint(checkpoint_path, weights_only)
        assert module is not None
        optimizer = sharded(module).optimizer
        fits = optimizer is not None and module.trainer.state.fn == TrainerFn.FITTING
        found = load(checkpoint_path, module, optimizer if fits else None).get("lightning")
        if found is None:
            raise CheckpointError(
                f"{checkpoint_path} was not saved by Lightning's Trainer, so it does not say where a fit was. Leave "
                "out ckpt_path, and call unbounded.load(folder, self, self.trainer.strategy.optimizers[0]) in the "
                "module's on_fit_start."
            )
        return found | {"state_dict": found.get("state_dict") or _Streamed(module)}  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        values = checkpoint["state_dict"]
        if not isinstance(values, _Streamed) or values.is_changed:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """All ranks call this. States that another strategy saved are whole: `shard` takes them over."""
        if self._resumes_from_file:
            self._take_whole_states(checkpoint)
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _take_whole_states(self, checkpoint: Any) -> None:
        """Shards the module once more, with its weights as the file has them, in its precision."""
        module, (states,) = self.lightning_module, checkpoint["optimizer_states"]
        assert module is not None
        unshard(module)
        for name, parameter in module.named_parameters():
            parameter.data = checkpoint["state_dict"].get(name, parameter).detach().to(parameter.device)
        self._made.load_state_dict(states)
        self._shard_with_optimizer()
