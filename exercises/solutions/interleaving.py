"""Interleaving."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def interleave(
    bd: Float[Array, "time width"], o: Float[Array, "time width"], a: Float[Array, "time width"]
) -> Float[Array, "tokens width"]:
    return jnp.stack([bd, o, a], axis=1).reshape(-1, bd.shape[1])


def observation_tokens(tokens: Float[Array, "tokens width"]) -> Float[Array, "time width"]:
    return tokens[1::3]
