"""A soft criterion.

A price of 0 is ME-Sampling's comparison: fitness alone. A huge one looks at the spread alone: then the
policy that stands still, or falls over at once, has the best chances.
"""

from collections.abc import Callable

from jaxtyping import Array, Bool

from me_ls import Character


def soft_criterion(price: float) -> Callable[[Character, Character], Bool[Array, ""]]:
    def better(new: Character, old: Character) -> Bool[Array, ""]:
        return new.fitness - price * new.spread > old.fitness - price * old.spread

    return better
