"""A cache of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from qdt import Layer


class Cache(NamedTuple):
    keys: Float[Array, "head d tokens"]
    values: Float[Array, "head d tokens"]
    count: Int[Array, ""]


def start(layer: Layer, tokens: int, width: int) -> Cache:
    room = jnp.zeros((layer.heads, width // layer.heads, tokens))
    return Cache(room, room, jnp.zeros((), int))


def step(
    layer: Layer, cache: Cache, token: Float[Array, " width"]
) -> tuple[Float[Array, " width"], Cache]:
    q, k, v = layer.project(token[None])
    keys = jax.lax.dynamic_update_index_in_dim(cache.keys, k[..., 0], cache.count, 2)
    values = jax.lax.dynamic_update_index_in_dim(cache.values, v[..., 0], cache.count, 2)
    scores = jnp.einsum("hqd,hdk->hqk", q, keys) / jnp.sqrt(q.shape[2])
    seen = jnp.arange(keys.shape[2]) <= cache.count
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    attended = jnp.einsum("hqk,hdk->hqd", weights, values)
    return layer.finish(token[None], attended)[0], Cache(keys, values, cache.count + 1)
