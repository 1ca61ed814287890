"""Inputs that a model of `transformers` can read, made of what its forward takes and of its config.

There is no word for what a model needs together: a model of images and text may want both, or text alone, which then
holds no image. So there are several ways, the likeliest first, and whoever asks tries them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_ID = 7  # of a token that means nothing special in most models
_FEATURES = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size", "input_dim")


def find_configs(config: Any) -> Iterator[Any]:
    """A config of `transformers` and those inside it."""
    yield config
    for part in vars(config).values():
        if hasattr(part, "model_type") and hasattr(part, "to_dict"):
            yield from find_configs(part)


def sample_inputs(model: nn.Module, length: int) -> list[dict[str, torch.Tensor]]:
    """Ways to call a model with one input of `length` positions, or of the size that its config fixes: with what it
    reads mainly, or with all that it may read."""
    main: Any = getattr(model, "main_input_name", None)
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    ways: dict[Any, dict[str, torch.Tensor]] = {}
    for known in _known_inputs(model, length):
        given = {name: one.to(dtype) if one.is_floating_point() else one for name, one in known.items()}
        mainly = {name: one for name, one in given.items() if name in (main, "decoder_input_ids") or main not in given}
        for way in (mainly, given):
            ways.setdefault(tuple((name, one.shape) for name, one in way.items()), way)
    return list(ways.values())


def _known_inputs(model: nn.Module, length: int) -> Iterator[dict[str, torch.Tensor]]:
    taken, config = inspect.signature(model.forward).parameters, model.config
    if "grid_thw" in taken:
        yield _patches(next(iter(taken)), config, length)
        return
    texts = ("input_ids", "decoder_input_ids") if getattr(config, "is_encoder_decoder", False) else ("input_ids",)
    ids = torch.full((1, length), _ID, dtype=torch.int64, device="meta")
    image = {"pixel_values": _image(config)} if "pixel_values" in taken else {}
    for sound in _sounds(config, length) if {"input_features", "input_values"} & taken.keys() else ({},):
        known = {**dict.fromkeys(texts, ids), **image, **sound}
        yield {name: value for name, value in known.items() if name in taken}


def _image(config: Any) -> torch.Tensor:
    size = _find(config, "image_size") or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return _empty(1, _find(config, "num_channels", "in_channels") or 3, height, width)


def _patches(name: str, config: Any, length: int) -> dict[str, torch.Tensor]:
    """Patches of one image, and how many there are in time, height and width."""
    channels, frames = _find(config, "in_channels", "in_chans") or 3, _find(config, "temporal_patch_size") or 1
    height, width = 4, max(4, length // 8 * 2)  # even, as patches are merged
    grid = torch.tensor([[1, height, width]], dtype=torch.int64, device="cpu").to("meta")
    return {name: _empty(height * width, channels * frames * _find(config, "patch_size") ** 2), "grid_thw": grid}


def _sounds(config: Any, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """Waves and spectra. In most spectra time comes last, as long as positions are fixed; in others it comes first."""
    num_features, samples = _find(config, *_FEATURES) or 80, length
    strides = zip(_find(config, "conv_kernel") or (), _find(config, "conv_stride") or (), strict=False)
    for kernel, stride in reversed(list(strides)):
        samples = (samples - 1) * stride + kernel  # so that as many positions are left
    frames = 2 * (_find(config, "max_source_positions") or length)
    yield {
        "input_features": _empty(1, num_features, frames),
        "input_features_mask": torch.ones(1, frames, dtype=torch.bool, device="meta"),
        "input_values": _empty(1, samples),
    }
    yield {
        "input_features": _empty(1, length * 2 ** (_find(config, "num_conv_layers") or 0), num_features),
        "input_values": _empty(1, _find(config, "max_length") or length, num_features),
    }


def _find(config: Any, *names: str) -> Any:
    """The first of these that a config or one inside it has."""
    found = (getattr(one, name, None) for name in names for one in find_configs(config))
    return next((value for value in found if value), None)


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")
