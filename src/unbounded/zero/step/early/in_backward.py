"""What the update lane writes of a unit inside a backward."""

from enum import Enum


class InBackward(Enum):
    """A draft for the next step, or what the last one has left: the moments of a unit whose weights it has updated."""

    NOTHING = "nothing"
    WEIGHTS = "draft of the weights"
    ALL = "draft of weights and states"
    MOMENTS = "moments"
