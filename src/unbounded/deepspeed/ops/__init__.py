"""`deepspeed.ops`: optimizers under the names that scripts import them by."""

from unbounded.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
