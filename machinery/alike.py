"""Policies that resemble their neighbours: how `dataset.alike` selects.

Many policies reach the same zone, each with a gait of its own. Selected zone by zone, neighbouring
demonstrators have little in common: a model has to learn each of them by itself, and what it does between
two of them is a mixture that neither has shown. So of those that end nearly equally close to the middle of
a zone, the one is selected whose actions are most like those of the policies next to it.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

NEIGHBOURS = 4  # zones with which a zone is compared


@eqx.filter_jit
def action_differences(
    policies: Callable[[Float[Array, " observation"]], Float[Array, " action"]],
    visited: Float[Array, "n state observation"],
) -> Float[Array, "n n"]:
    """Mean squared difference of the actions of every two policies, in the states that either visited."""
    own = jax.vmap(lambda policy, states: jax.vmap(policy)(states))(policies, visited)

    def from_all(policy):
        actions = jax.vmap(jax.vmap(policy))(visited)
        return jnp.mean((actions - own) ** 2, axis=(1, 2))

    difference = jax.lax.map(from_all, policies)
    return (difference + difference.T) / 2


def neighbours(centroids: Float[np.ndarray, "zones d"]) -> Bool[np.ndarray, "zones zones"]:
    """Whether one of two zones is among the nearest of the other."""
    apart = np.linalg.norm(centroids[:, None] - centroids[None], axis=-1)
    np.fill_diagonal(apart, np.inf)
    nearest = np.argsort(apart, axis=1, kind="stable")[:, : min(NEIGHBOURS, len(centroids) - 1)]
    near = np.zeros(apart.shape, dtype=bool)
    np.put_along_axis(near, nearest, True, axis=1)
    return near | near.T


def most_alike(
    selected: Int[np.ndarray, " zones"],
    candidate: Bool[np.ndarray, "n zones"],
    near: Bool[np.ndarray, "zones zones"],
    difference: Float[np.ndarray, "n n"],
) -> Int[np.ndarray, " zones"]:
    """Another policy for each zone, such that no other one would be more like those of the zones around.

    `selected` are different policies to begin with; `candidate` says who may be selected for which zone.
    Nobody is selected twice. Every exchange lowers the sum of all differences between neighbours, so there
    is a last one. Who has diverged (NaN) is like nobody.
    """
    difference = np.where(np.isnan(difference), np.inf, difference).astype(np.float64)
    selected, exchanged = selected.copy(), True
    while exchanged:
        exchanged = False
        for zone, around in enumerate(near):
            free = candidate[:, zone].copy()
            free[np.delete(selected, zone)] = False
            unlike = difference[:, selected[around]].sum(axis=1)
            best = np.where(free, unlike, np.inf).argmin()
            if unlike[best] < unlike[selected[zone]]:
                selected[zone], exchanged = best, True
    return selected
