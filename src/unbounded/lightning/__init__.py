"""Lightning: `strategy="unbounded"` for Trainer and Fabric, once this module is imported.

import unbounded.lightning
trainer = Trainer(strategy="unbounded", precision="bf16-mixed")
trainer = Trainer(strategy=unbounded.lightning.UnboundedStrategy(plan={"device_bytes": "24GiB"}))
"""

# What is imported after the check needs lightning.

from __future__ import annotations

from unbounded.errors import MissingFrameworkError

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise MissingFrameworkError(
        'unbounded.lightning needs lightning, which is not installed. Install it: pip install "unbounded[lightning]".'
    ) from None

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from unbounded.lightning.fabric_strategy import UnboundedFabricStrategy
from unbounded.lightning.trainer_strategy import UnboundedStrategy

__all__ = ["UnboundedFabricStrategy", "UnboundedStrategy"]

_ABOUT = "Spreads weights, gradients and optimizer states over ranks, host memory and disk."
StrategyRegistry.register("unbounded", UnboundedStrategy, description=_ABOUT, override=True)
STRATEGY_REGISTRY.register("unbounded", UnboundedFabricStrategy, description=_ABOUT, override=True)
