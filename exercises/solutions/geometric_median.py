"""The geometric median."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def geometric_median(points: Float[Array, "n d"]) -> Float[Array, " d"]:
    def distances(centre: Array) -> Array:
        return jnp.linalg.norm(points - centre, axis=1)

    def step(_: int, centre: Array) -> Array:
        weight = 1 / jnp.maximum(distances(centre), 1e-9)
        return weight @ points / weight.sum()

    found = jax.lax.fori_loop(0, 200, step, points.mean(axis=0))
    candidates = jnp.concatenate([found[None], points])
    total = jax.vmap(lambda centre: distances(centre).sum())(candidates)
    return candidates[jnp.argmin(total)]
