"""`deepspeed.utils`: the logger, and weights from checkpoints."""

import logging

from unbounded.deepspeed.utils import zero_to_fp32

logger = logging.getLogger("unbounded")

__all__ = ["logger", "zero_to_fp32"]
