"""A deep cell."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def crowd_in(fitness: Float[Array, " depth"], draw: Int[Array, ""]) -> Int[Array, ""]:
    free = fitness == -jnp.inf
    return jnp.where(free.any(), jnp.argmax(free), draw)
