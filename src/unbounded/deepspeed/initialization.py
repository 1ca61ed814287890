"""`initialize`: arguments, config, process group, optimizer, schedule, `shard`, and the engine over them."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from unbounded.deepspeed import comm
from unbounded.deepspeed.batch_sizes import Batches
from unbounded.deepspeed.deepspeed_engine import DeepSpeedEngine
from unbounded.deepspeed.ds_config import DeepSpeedConfig, read_config
from unbounded.deepspeed.lr_schedules import build_schedule
from unbounded.deepspeed.ops.building import build_optimizer
from unbounded.errors import PlanError
from unbounded.sharding.placing import shard

logger = logging.getLogger("unbounded")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config, as DeepSpeed does."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="use DeepSpeed's config")
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed's JSON config file")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """All ranks must call this. Returns the engine, its optimizer, a loader of `training_data` and the schedule."""
    if model is None:
        raise PlanError("initialize was given no model. Give model=.")
    if mpu is not None or mesh_param is not None:
        raise PlanError(
            "initialize was given a model-parallel unit (mpu or mesh_param), which is not supported. Leave it out."
        )
    found = read_config(_find_config(args, config, config_params))
    _refuse_open(found, {"optimizer": optimizer, "scheduler": lr_scheduler})
    if dist_init_required is not False:
        comm.init_distributed()
    batches = Batches.of(found, max(1, comm.get_world_size() // found.plan.tensor))
    if comm.get_rank() == 0:
        logger.info("DeepSpeed config:\n%s", found.report)
    made = _make_optimizer(found, optimizer, model_parameters, model)
    schedule = _make_schedule(found, lr_scheduler, made)
    model, placed = shard(model, made, found.plan)
    engine = DeepSpeedEngine(model, placed, schedule, found, batches)
    loader = engine.deepspeed_io(training_data, collate_fn=collate_fn) if training_data is not None else None
    engine.training_dataloader = loader
    return engine, placed, loader, schedule


def _refuse_open(config: DeepSpeedConfig, given: Mapping[str, Any]) -> None:
    """Raises if values that training needs are "auto", except those of sections that the script replaces."""
    names = [name for name in config.left_open if given.get(name.partition(".")[0]) is None]
    if names:
        raise PlanError(
            f'the DeepSpeed config has "auto" for {", ".join(names)}, which only a Trainer can fill in, from its '
            "arguments. Give initialize the values."
        )


def _make_optimizer(
    config: DeepSpeedConfig, given: Any, parameters: Any, model: nn.Module
) -> torch.optim.Optimizer | None:
    trained = [p for p in model.parameters() if p.requires_grad] if parameters is None else list(parameters)
    if isinstance(given, torch.optim.Optimizer):
        return given
    if callable(given):
        return given(trained)  # type: ignore[no-any-return]
    return build_optimizer(*config.optimizer, trained) if config.optimizer is not None else None


def _make_schedule(config: DeepSpeedConfig, given: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    if given is not None:
        return given(optimizer) if isinstance(given, type) or not hasattr(given, "step") else given
    if config.scheduler is None or optimizer is None:
        return None
    return build_schedule(*config.scheduler, optimizer)


def _find_config(args: Any, config: Any, config_params: Any) -> str | os.PathLike[str] | Mapping[str, Any]:
    """The config that `initialize` was given, in one of the three ways."""
    named = getattr(args, "deepspeed_config", None)
    given = [value for value in (config, config_params, named) if value is not None]
    if not given:
        raise PlanError("initialize was given no config. Give config=, a dict or the path of a JSON file.")
    if len(given) > 1 and any(value != given[0] for value in given[1:]):
        raise PlanError("initialize was given config= and args.deepspeed_config, and they differ. Give one of them.")
    return given[0]  # type: ignore[no-any-return]
