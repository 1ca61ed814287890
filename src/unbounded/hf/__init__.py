"""Hugging Face: Trainer and TRL's trainers with one more argument, `plan`; Accelerate; models larger than memory.

    trainer = unbounded.hf.Trainer(model=model, args=args, train_dataset=data, plan={"device_bytes": "24GiB"})
    trainer = unbounded.hf.on(trl.SFTTrainer)(model=model, ...)             any Trainer class
    model = unbounded.hf.from_pretrained(folder, AutoModelForCausalLM)      streamed in by `shard`
    unbounded.hf.attach(accelerator)                                        a loop with Accelerate

Nothing in transformers or accelerate changes globally: a trainer is a subclass, and only the given accelerator changes.
"""

# The names are exported by __getattr__, so that what is not used is not imported; type checkers read the imports.
# ruff: noqa: F401

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unbounded.errors import MissingFrameworkError

_HOMES = {
    "on": "unbounded.hf.trainer",
    "attach": "unbounded.hf.accelerator",
    "from_pretrained": "unbounded.hf.meta_models",
}
__all__ = ["Seq2SeqTrainer", "Trainer", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'unbounded.hf' has no attribute {name!r}")
    try:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        value = import_module("unbounded.hf.trainer").on(getattr(import_module("transformers"), name))
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "accelerate"):
            raise
        raise MissingFrameworkError(
            f'unbounded.hf needs {error.name}, which is not installed. Install it: pip install "unbounded[hf]".'
        ) from None
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from unbounded.hf.accelerator import attach
    from unbounded.hf.meta_models import from_pretrained
    from unbounded.hf.trainer import on

    Trainer: Any
    Seq2SeqTrainer: Any
