"""What cannot be done to a gradient that an update inside the backward has used up, and what to do instead."""

from __future__ import annotations

from typing import NoReturn

from unbounded.errors import StateError

KEEPING = 'gradients="host" instead of "none" in the plan, and no last_backward()'


def refuse_use(name: str) -> NoReturn:
    """The gradient of the unit that has the parameter `name` is gone."""
    raise StateError(
        f"the gradient of {name!r} and of others in its unit was used up by an update inside the backward, so it can "
        f"no longer be read, clipped, scaled or zeroed. Keep gradients until the step: {KEEPING}; clear them with "
        "zero_grad(set_to_none=True)."
    )


def refuse_drop(name: str) -> NoReturn:
    """A step without a gradient would have updated nothing."""
    raise StateError(
        f"the gradient of {name!r} and of others in its unit cannot be dropped: the backward has updated the unit with "
        f"it already. Call optimizer.step() before zero_grad(). To leave steps out, keep gradients: {KEEPING}."
    )


def refuse_new(name: str) -> NoReturn:
    """No gradient is stored, so none can be given."""
    raise StateError(
        f'the gradient of {name!r} cannot be set: the plan says gradients="none". Use gradients="host" or "device".'
    )


def refuse_norm(what: str) -> NoReturn:
    """`what` needs all gradients at once, but they are never there at once."""
    raise StateError(
        f'{what} needs the gradients of all units at once, but the plan says gradients="none": each is used up inside '
        'the backward. Use gradients="host" or "device", or change single gradients in hooks (p.register_hook).'
    )


def refuse_sums(what: str) -> NoReturn:
    """`what` adds up the gradients of several backwards."""
    raise StateError(
        f'{what} adds up the gradients of several backwards, but the plan says gradients="none". Use gradients="host" '
        'or "device", or one backward per step.'
    )


def refuse_again(unit: str) -> NoReturn:
    """A step would use what the last one has used up."""
    raise StateError(
        f"optimizer.step() would use the gradient of unit {unit!r} again, but an update inside an earlier backward has "
        f"used it up. Call optimizer.zero_grad() after each step, or keep gradients: {KEEPING}."
    )
