"""The small layers of which the models are made: linear, layer normalisation, embedding."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from machinery.attention import multiply


class Linear(eqx.Module):
    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(self, size_in: int, size_out: int, *, scale: float = 0.02, key: Key[Array, ""]):
        self.weight = scale * jax.random.normal(key, (size_in, size_out))
        self.bias = jnp.zeros(size_out)

    def __call__(self, x: Float[Array, "*token in"]) -> Float[Array, "*token out"]:
        return multiply(x.astype(self.weight.dtype), self.weight) + self.bias


class LayerNorm(eqx.Module):
    weight: Float[Array, " width"]
    bias: Float[Array, " width"]

    def __init__(self, width: int):
        self.weight, self.bias = jnp.ones(width), jnp.zeros(width)

    def __call__(self, x: Float[Array, "*token width"]) -> Float[Array, "*token width"]:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        deviation = jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return (centred / deviation).astype(x.dtype) * self.weight + self.bias


class Embedding(eqx.Module):
    """A linear layer, then layer normalisation: one for each modality."""

    linear: Linear
    norm: LayerNorm

    def __init__(self, size: int, width: int, *, key: Key[Array, ""]):
        keys = jax.random.split(key)
        linear = Linear(size, width, scale=1 / math.sqrt(size), key=keys[0])
        # Normalisation forgets how long a vector is: with no bias, a target (0.1, 0.1) would look
        # like (0.9, 0.9) until one is learned.
        self.linear = eqx.tree_at(lambda x: x.bias, linear, jax.random.normal(keys[1], (width,)))
        self.norm = LayerNorm(width)

    def __call__(self, x: Float[Array, "*token in"]) -> Float[Array, "*token width"]:
        return self.norm(self.linear(x))
