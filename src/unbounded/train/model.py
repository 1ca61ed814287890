"""The model to train and its tokenizer: the built-in GPT, or a Hugging Face folder or configuration.

Models are built on the meta device, where they cost no memory; `unbounded.shard` makes them real unit by unit.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass

import torch
from torch import nn

from unbounded.errors import InputError
from unbounded.native.host_memory import available_bytes
from unbounded.observe.amounts import show_count
from unbounded.optim.formats import DTYPES
from unbounded.planner.sizes import format_bytes
from unbounded.train.data.tokenizer import ByteTokenizer, Tokenizer
from unbounded.train.gpt import GPT, GPTShape
from unbounded.train.huggingface import build_pretrained
from unbounded.train.options.settings import Settings


@dataclass(frozen=True)
class Subject:
    """A model to shard. `weights` is the folder to stream into it; `layers` and `width` are for counting attention."""

    model: nn.Module
    tokenizer: Tokenizer
    weights: str | None
    layers: int
    width: int

    @property
    def num_parameters(self) -> int:
        """All parameters, trained or not; shared ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_trained(self) -> int:
        """Parameters that are updated."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of a step without recomputation: 6 per parameter (4 if it is frozen), plus attention."""
        frozen = self.num_parameters - self.num_trained
        return 6.0 * self.num_trained + 4.0 * frozen + 12.0 * self.layers * self.width * sequence_length


def build(settings: Settings) -> Subject:
    """The model and tokenizer that the settings name."""
    if settings.model is None and settings.from_config is None:
        return _build_gpt(settings)
    model, tokenizer, weights, shape = build_pretrained(settings, DTYPES[settings.precision])
    return Subject(model, tokenizer, weights, *shape)


def _build_gpt(settings: Settings) -> Subject:
    if settings.width % settings.heads:
        raise InputError(f"--width {settings.width} is not a multiple of --heads {settings.heads}. Choose one that is.")
    tokenizer = ByteTokenizer()
    _check_size(settings, tokenizer.vocabulary_size)
    shape = GPTShape(
        settings.layers, settings.width, settings.heads, settings.sequence_length, tokenizer.vocabulary_size
    )
    with torch.device("meta"):
        model = GPT(shape).to(DTYPES[settings.precision])
    return Subject(model, tokenizer, None, settings.layers, settings.width)


def _check_size(settings: Settings, vocabulary: int) -> None:
    """Refuse a GPT whose states this machine could not hold, before its blocks are built."""
    width = settings.width
    numel = settings.layers * (12 * width + 4) * width + (2 * vocabulary + settings.sequence_length + 2) * width
    needed = numel * (16 if settings.precision == "fp32" else 14)
    paths = settings.disk_path or (tempfile.gettempdir(),)
    room = available_bytes() + sum(shutil.disk_usage(path).free for path in paths if os.path.isdir(path))
    if torch.device(settings.device).type == "cuda":
        room += torch.cuda.mem_get_info()[0]
    if needed > room:
        raise InputError(
            f"a GPT of {settings.layers} blocks of width {width} for {settings.sequence_length} positions has "
            f"{show_count(numel)} parameters, whose states take {format_bytes(needed)}, but memory and disk here have "
            f"only {format_bytes(room)}. Choose a smaller --layers, --width or --sequence-length."
        )
