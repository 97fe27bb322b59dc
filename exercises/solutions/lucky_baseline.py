"""A lucky baseline.

More chances to be lucky are more luck, not more skill: what is promised rises, what is found again does
not.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from me_ls import Character, Rule, fitter, spread


def characterise_by_best(
    fitness: Float[Array, " episodes"],
    descriptors: Float[Array, "episodes d"],
    centroids: Float[Array, "cells d"],
) -> Character:
    best = jnp.argmax(fitness)
    return Character(fitness[best], descriptors[best], spread(descriptors))


def lucky() -> Rule:
    return Rule("ME-Lucky", "the best of several episodes", "#888888", characterise_by_best, fitter)
