"""A rule of one's own: believe the worst third.

A policy is known by the mean of its least fit third of episodes and by the medoid of its descriptors,
the one with the least total distance to the others: a place where it really was.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from me_ls import Character, Rule, fitter, spread


def characterise_by_medoid(
    fitness: Float[Array, " episodes"],
    descriptors: Float[Array, "episodes d"],
    centroids: Float[Array, "cells d"],
) -> Character:
    worst = jnp.sort(fitness)[: max(1, len(fitness) // 3)]
    distance = jnp.linalg.norm(descriptors[:, None] - descriptors[None], axis=-1)
    medoid = descriptors[jnp.argmin(distance.sum(axis=1))]
    return Character(worst.mean(), medoid, spread(descriptors))


def rule() -> Rule:
    about = "the worst third and the medoid"
    return Rule("ME-Sceptic", about, "#8a6d3b", characterise_by_medoid, fitter)
