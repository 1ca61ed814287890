"""What a unit's draft holds."""

from enum import Enum


class Drafted(Enum):
    """What of a unit is written inside the backward."""

    NOTHING = "nothing"
    WEIGHTS = "weights"
    ALL = "weights and states"
