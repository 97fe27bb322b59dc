"""A deep cell. Twenty minutes, after lesson 2.

Deep-Grid answers luck in another way: a cell holds several policies, and a newcomer always gets in. If
a place is free it takes the first free one; in a full cell it replaces a random inhabitant, whoever
that is. Luck does not last, because nobody does.

`crowd_in` is given the fitness of every place of one cell (−inf: free) and a random number `draw` in 0
... depth − 1; it returns the place that the newcomer takes. Write it without an `if`: it will be
traced.
"""

from jaxtyping import Array, Float, Int


def crowd_in(fitness: Float[Array, " depth"], draw: Int[Array, ""]) -> Int[Array, ""]:
    raise NotImplementedError("jnp.argmax of a boolean array is the first True; jnp.where chooses")
