"""A soft criterion. Ten minutes, after lesson 2.

ME-LS accepts a newcomer only if its fitness is higher *and* its spread is lower. It never trades. Write
a criterion that does: a policy is better if F − λ·ψ is higher, where the price λ says how much fitness
a metre of spread is worth.

`soft_criterion(price)` returns a function of two `me_ls.Character`s, the new one and the old one, such as
`me_ls.fitter_and_steadier` is. What is the rule with a price of 0? And with a huge one?
"""

from collections.abc import Callable

from jaxtyping import Array, Bool

from me_ls import Character


def soft_criterion(price: float) -> Callable[[Character, Character], Bool[Array, ""]]:
    raise NotImplementedError(
        "return a function of (new, old) that compares fitness − price · spread"
    )
