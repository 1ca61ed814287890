"""The parts of a model that do not read its text: encoders of images and sound, and of a source.

Costs are per token of the text. An encoder of images or sound has its own number of positions, however long the text
is, so its cost is spread over a sequence. In a model without text, tokens are the positions of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from unbounded.planner.models.footprint import Cost


@dataclass(frozen=True)
class Tower:
    """An encoder inside a model of text, or a whole model without text. `positions` are those of one input; None if its
    size is not fixed."""

    name: str
    reads: str
    positions: int | None

    def holds(self, name: str) -> bool:
        return not self.name or name == self.name or name.startswith(f"{self.name}.")

    def spread(self, cost: Cost, sequence: int) -> Cost:
        """The cost per token of the text, of which `sequence` come with one input, or of a token of its own."""
        length = (self.positions or sequence) / sequence
        share = length if self.name else 1.0
        each = ("products", "trained", "moved", "kept", "input", "back", "exchanged")
        paired = ("attention", "attention_moved", "attention_kept")  # multiplied by the text's length later
        return replace(
            cost,
            **{name: getattr(cost, name) * share for name in each},
            **{name: getattr(cost, name) * share * length for name in paired},
        )


def find_towers(model: nn.Module) -> tuple[Tower, ...]:
    """The encoders of images and sound inside a model that also reads text; one that does not is such a one itself."""
    whole = _reads(model)
    if whole is not None:
        return (Tower("", whole, _positions(getattr(model, "config", None))),)
    found: list[Tower] = []
    for name, module in model.named_modules():
        reads = _reads(module, name)
        if name and reads and hasattr(module, "config") and not any(tower.holds(name) for tower in found):
            found.append(Tower(name, reads, _positions(getattr(module, "config", None))))
    return tuple(found)


def split_by_tower(
    modules: Mapping[str, nn.Module], towers: tuple[Tower, ...]
) -> list[tuple[Tower | None, dict[str, nn.Module]]]:
    """Modules by the tower that they are in, first those in none."""
    groups: dict[Tower | None, dict[str, nn.Module]] = {None: {}}
    for name, module in modules.items():
        tower = next((one for one in towers if one.holds(name)), None)
        groups.setdefault(tower, {})[name] = module
    return list(groups.items())


def text_config(model: nn.Module) -> Any:
    """The config of a model's text part, or of the model."""
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return find() if find is not None else config


def describe_parts(model: nn.Module, towers: tuple[Tower, ...]) -> tuple[str, ...]:
    """What is taken for granted about the inputs of a model of several parts."""
    said = []
    for tower in towers:
        if tower.name:
            size = f"of {tower.positions:,} positions" if tower.positions else "with as many positions as the text"
            said.append(f"one {tower.reads} {size} per sequence")
        elif tower.positions:
            said.append(f"tokens are positions of inputs, {tower.positions:,} in each {tower.reads}")
        else:
            said.append(f"one {tower.reads} per sequence")
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and not towers:
        said.append("a source with as many tokens as its target")
    return tuple(dict.fromkeys(said))


def _reads(module: nn.Module, name: str = "") -> str | None:
    """What a part of a model reads if that is not text: what its class says, or its name."""
    last = name.rpartition(".")[2]
    if "vision" in last or "visual" in last:
        return "image"
    if "audio" in last:
        return "sound"
    if "text" in _said(module, "input_modalities", "text"):
        return None
    inputs = {"pixel_values": "image", "input_features": "sound", "input_values": "sound"}
    return next((inputs[main] for main in _said(module, "main_input_name", "") if main in inputs), None)


def _said(module: nn.Module, attribute: str, otherwise: str) -> tuple[str, ...]:
    """What a class of transformers says of itself, in one word or several."""
    said = getattr(module, attribute, None) or otherwise
    return (said,) if isinstance(said, str) else tuple(said)


def _positions(config: Any) -> int | None:
    """How many positions one input of an encoder has, if its config fixes that."""
    sizes = [getattr(config, name, None) for name in ("image_size", "patch_size")]
    image, patch = (size if isinstance(size, list | tuple) else (size, size) for size in sizes)
    if all(isinstance(number, int) and number > 0 for number in (*image, *patch)) and len(image) == len(patch) == 2:
        return max(1, image[0] // patch[0] * (image[1] // patch[1]))
    frames = getattr(config, "max_source_positions", None)
    return frames if isinstance(frames, int) and frames > 0 else None
