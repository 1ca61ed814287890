"""Update rules, and the optimizers that torch does not have."""

from unbounded.optim.lamb import LAMB

__all__ = ["LAMB"]
