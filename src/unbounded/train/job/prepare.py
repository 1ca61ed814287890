"""What a run needs before its first step: its data, its placement, its schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import unbounded
from unbounded.errors import DataError, InputError
from unbounded.native.host_memory import available_bytes
from unbounded.optim.formats import DTYPES
from unbounded.tiers.budget import HOST_ACTIVATION_PART, outside_bytes
from unbounded.train.data.corpus import Corpus, count_tokens, explain_no_documents
from unbounded.train.data.document import Split, open_reader
from unbounded.train.data.sample import Masking
from unbounded.train.data.source import open_source
from unbounded.train.data.tokenizer import Tokenizer
from unbounded.train.job.compiling import compiles_by_default
from unbounded.train.model import Subject
from unbounded.train.options.settings import Settings
from unbounded.train.step.learning_rate import lr_factor, make_scheduler
from unbounded.train.step.optimizer_choice import make_optimizer
from unbounded.train.world import World

_SHOWN_SHARES = {
    "cpu": {"device_bytes": 0.35, "host_bytes": 0.7, "disk_bytes": 1.0},
    "cuda": {"device_bytes": 0.85, "host_bytes": 0.95, "disk_bytes": 1.0},
}
"""Budgets of the demonstration job, as parts of its states: neither device nor host can hold all of them. Of a GPU's
part half is for activations, and what is outside the allocator comes on top of it."""
_LEAST_BUFFERS = 16 << 20
"""What buffers take of the host's budget, however small the model is."""


def open_data(settings: Settings, tokenizer: Tokenizer, *, asked: bool) -> tuple[Corpus, Corpus | None]:
    """The training data and, if there is an evaluation, its data. An evaluation that nobody asked for takes no document
    where none would be left to train on."""
    masking = _masking(settings, tokenizer) if settings.objective == "masked" else None

    def corpus(paths: tuple[str, ...], split: Split) -> Corpus:
        source = open_source(paths, settings.data_format)
        reader = open_reader(source, settings.data_format, settings.text_field, settings.messages_field)
        return Corpus(
            reader,
            tokenizer,
            split,
            settings.sequence_length,
            settings.seed,
            separated=settings.packing == "separated",
            overlap=settings.sequence_overlap,
            masking=masking,
        )

    train = corpus(settings.data, Split(settings.eval_fraction))
    if settings.eval_data is not None:
        return train, corpus(settings.eval_data, Split())
    if not asked and train.is_empty():
        return replace(train, split=Split()), None
    if settings.eval_fraction > 0.0:
        return train, replace(train, split=Split(settings.eval_fraction, held_out=True))
    return train, None


def _masking(settings: Settings, tokenizer: Tokenizer) -> Masking:
    inner = getattr(tokenizer, "inner", None)
    mask = getattr(inner, "mask_token_id", None)
    if mask is None:
        raise InputError(
            f'tokenizer "{tokenizer.name}" has no mask token, but --objective masked needs one. '
            'Set "mask_token" in its tokenizer_config.json.'
        )
    special = tuple(sorted(inner.all_special_ids))  # type: ignore[union-attr]
    return Masking(mask, special, tokenizer.vocabulary_size, settings.mask_fraction)


def count_epoch(corpus: Corpus, world: World) -> int:
    """All ranks must call this. The tokens of one pass over the data, which the ranks count together."""
    mine = list(corpus.reader.source.blocks)[world.data.rank :: world.data.size]
    total = int(world.sum([count_tokens(corpus, mine)])[0])
    if not total:
        raise DataError(explain_no_documents(corpus))
    return total


def shard_subject(subject: Subject, settings: Settings, world: World) -> tuple[nn.Module, Any, Any]:
    """All ranks must call this. Returns the model on its tiers, its optimizer and its scheduler."""
    optimizer = make_optimizer(subject.model, settings)
    plan = plan_of(subject, settings)
    if compiles_by_default(subject, settings, world):
        plan |= {"compile": True}
    torch.manual_seed(settings.seed)  # every rank draws the same first weights, however many there are
    model, sharded = unbounded.shard(subject.model, optimizer, plan, weights=subject.weights)
    factor = lr_factor(
        steps=settings.steps, warmup=settings.warmup, decay=settings.decay, final=settings.final_lr / settings.lr
    )
    return model, sharded, make_scheduler(sharded, factor)


def plan_of(subject: Subject, settings: Settings) -> dict[str, Any]:
    """The plan to ask for. Without budgets, the built-in model gets some that are too small for its states."""
    plan = settings.shard_plan
    if settings.model is None and settings.from_config is None and set(plan) <= {"precision", "activations", "compile"}:
        states = subject.num_parameters * (16 if settings.precision == "fp32" else 14)
        if states > available_bytes() // 2:
            return plan  # no demonstration, because this machine could not keep the budgets
        device = torch.device(settings.device)
        plan |= {key: int(share * states) for key, share in _SHOWN_SHARES[device.type].items()}
        plan["host_bytes"] += _LEAST_BUFFERS
        if device.type == "cuda":
            plan["device_bytes"] += outside_bytes(device)
        if settings.activations == "host":  # besides the states, within the part that a plan keeps for activations
            inputs = _input_bytes(subject, settings)
            plan["host_bytes"] = max(plan["host_bytes"] + inputs, int(inputs / HOST_ACTIVATION_PART))
    return plan


def _input_bytes(subject: Subject, settings: Settings) -> int:
    """Bytes of the inputs of all blocks, for the sequences that a rank runs at once."""
    tokens = settings.micro_batch * settings.sequence_length
    return subject.layers * tokens * subject.width * DTYPES[settings.precision].itemsize


def set_schedule(scheduler: Any, optimizer: Any, num_updates: int) -> None:
    """Move the schedule to where it is after `num_updates` updates, for a resumed run."""
    scheduler.last_epoch = num_updates
    for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(num_updates)
