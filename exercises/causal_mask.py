"""The causal mask. Twenty minutes, after lesson 4.

1. `visible(n)`: a matrix of booleans, row i says which tokens the i-th token may see: itself and those
   before.
2. `attention(q, k, v)`: softmax attention of one head under that mask,

       yᵢ = Σ_{j ≤ i} wᵢⱼ vⱼ,   wᵢⱼ = exp(qᵢ·kⱼ / √d) / Σ_{l ≤ i} exp(qᵢ·kₗ / √d) .

Hidden scores become −inf before the softmax. (What would go wrong with 0 instead?)
"""

from jaxtyping import Array, Bool, Float


def visible(tokens: int) -> Bool[Array, "tokens tokens"]:
    raise NotImplementedError("jnp.tril, or compare jnp.arange with itself")


def attention(
    q: Float[Array, "tokens d"], k: Float[Array, "tokens d"], v: Float[Array, "tokens d"]
) -> Float[Array, "tokens d"]:
    raise NotImplementedError("scores = q @ k.T / √d; jnp.where with the mask; jax.nn.softmax; @ v")
