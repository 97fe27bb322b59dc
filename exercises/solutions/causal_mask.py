"""The causal mask.

A score of 0 is not "unseen": exp(0) = 1 is a full share of the softmax.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def visible(tokens: int) -> Bool[Array, "tokens tokens"]:
    return jnp.tril(jnp.ones((tokens, tokens), bool))


def attention(
    q: Float[Array, "tokens d"], k: Float[Array, "tokens d"], v: Float[Array, "tokens d"]
) -> Float[Array, "tokens d"]:
    scores = q @ k.T / jnp.sqrt(q.shape[1])
    weights = jax.nn.softmax(jnp.where(visible(len(q)), scores, -jnp.inf), axis=1)
    return weights @ v
