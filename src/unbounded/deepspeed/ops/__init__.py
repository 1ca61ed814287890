"""`deepspeed.ops`: optimizers under the names that scripts import them by."""

from unbounded.deepspeed.ops import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
