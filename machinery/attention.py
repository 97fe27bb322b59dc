"""The costly parts of a causal Transformer: products, dropout, attention, and attention to the past.

The mathematics is GPT-2's; what is done here changes speed and memory, not results. Attention goes over
blocks of queries, so that its tokens × tokens matrix never exists at once and the half behind the causal
mask is not computed. Dropout draws its noise from a hash inside the loop that uses it. When an episode is
played, keys and values are kept in blocks of which a step reads those that have begun.

Reads in this order: products, dropout, attention (training), blocks of keys and values (playing).
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from machinery.fast_attention import fast_attention
from machinery.streams import Seed, bits, numbers

# --- products ---------------------------------------------------------------------------------------


def multiply(
    x: Float[Array, "*token in"], weight: Float[Array, "in out"]
) -> Float[Array, "*token out"]:
    """`x @ weight`, written so that its gradient is fast, too.

    A gradient by a weight is a product over all tokens. XLA on a CPU would compute it with both factors
    turned, at 40 % of the machine's peak. The barrier keeps it from turning the result into that form.
    """
    turned = jax.lax.optimization_barrier(weight.T)
    return jnp.einsum("...i,oi->...o", x, turned)


# --- dropout ----------------------------------------------------------------------------------------


def kept(seed: Seed, number: UInt32[Array, "..."], rate: float) -> Bool[Array, "..."]:
    """Bernoulli(1 - rate) for every element, by its number.

    `jax.random.bernoulli` would cost about as much as the attention that it disturbs.
    """
    return bits(seed, number) < jnp.uint32((1 - rate) * 2**32)


def dropout(x: Float[Array, "..."], seed: Seed | None, rate: float) -> Float[Array, "..."]:
    if seed is None:
        return x
    return jnp.where(kept(seed, numbers(x.shape), rate), x / (1 - rate), 0)


# --- attention --------------------------------------------------------------------------------------

# Queries whose scores exist at once: 128 rows against 750 tokens, some heads, fill a core's cache.
BLOCK = 128


def attend(
    q: Float[Array, "head query d"],
    k: Float[Array, "head d token"],
    v: Float[Array, "head d token"],
    visible: Bool[Array, "query token"],
    seed: Seed | None = None,
    rate: float = 0.0,
    block: tuple[int, int, int] = (0, 0, 0),
) -> Float[Array, "head query d"]:
    """Softmax attention of some queries to the tokens that each may see, with dropout.

    `block`: which of all queries the first one is, how many queries there are, and how many tokens.
    """
    weights, total = weigh(jnp.einsum("hqd,hdk->hqk", q / math.sqrt(q.shape[2]), k), visible)
    if seed is not None:
        first, queries, tokens = block
        head, query, token = (
            jax.lax.broadcasted_iota(jnp.uint32, weights.shape, i) for i in range(3)
        )
        number = (head * queries + query + first) * tokens + token
        weights = jnp.where(kept(seed, number, rate), weights / (1 - rate), 0)
    output = jnp.einsum("hqk,hdk->hqd", weights.astype(v.dtype), v)
    return (output / total).astype(v.dtype)


def weigh(
    scores: Float[Array, "head query token"], visible: Bool[Array, "query token"]
) -> tuple[Float[Array, "head query token"], Float[Array, "head query 1"]]:
    """The weights of the softmax before they are divided by their total, and that total.

    Dividing the output instead is the same, for less work.
    """
    scores = jnp.where(visible, scores.astype(jnp.float32), -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return weights, weights.sum(-1, keepdims=True)


def causal_attention(
    q: Float[Array, "head query d"],
    k: Float[Array, "head d token"],
    v: Float[Array, "head d token"],
    seed: Seed | None,
    rate: float,
    first: int,
    stride: int,
) -> Float[Array, "head query d"]:
    """Attention of the tokens first, first + stride, ... to all tokens up to themselves.

    Keys and values have their tokens last: the products here and in the gradient are then all of a
    form that a CPU multiplies at full speed (1.2 to 1.4 times as fast as features last).
    """
    fast = fast_attention(q, k, v, seed, rate, first, stride)
    if fast is not None:
        return fast
    queries, tokens = q.shape[1], k.shape[2]
    size, outputs = max(1, BLOCK // stride), []
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        position = first + stride * jnp.arange(start, stop)
        seen = first + stride * (stop - 1) + 1
        visible = jnp.arange(seen) <= position[:, None]
        # The gradient computes a block's weights again instead of storing them, to save memory.
        block = jax.checkpoint(partial(attend, rate=rate, block=(start, queries, tokens)))
        outputs.append(block(q[:, start:stop], k[..., :seen], v[..., :seen], visible, seed))
    return jnp.concatenate(outputs, axis=1)


# --- keys and values of an episode so far -------------------------------------------------------------

# Steps whose keys and values are stored together. A step reads the blocks that the episode has begun:
# half of the whole on average, and a block at a time stays in a core's cache.
STEPS_PER_BLOCK = 25


class Block(NamedTuple):
    """Keys and values of some tokens in one layer, in the layouts that few queries read fastest."""

    keys: Float[Array, "*episodes head d token"]
    values: Float[Array, "*episodes head token d"]


def empty_blocks(
    steps: int, tokens_per_step: int, heads: int, d: int, dtype: str
) -> tuple[Block, ...]:
    """Room for the keys and values of an episode's tokens in one layer."""
    tokens = tokens_per_step * min(STEPS_PER_BLOCK, steps)
    keys = jnp.zeros((heads, d, tokens), dtype)
    return (Block(keys, keys.swapaxes(1, 2)),) * -(-steps // STEPS_PER_BLOCK)


def add_tokens(block: Block, new: Block, position: Int[Array, ""]) -> Block:
    """The block with new tokens from `position` on; as it was if that lies outside."""

    def put(old: Array, new: Array, axis: int) -> Array:
        room, count = old.shape[axis], new.shape[axis]
        place = jnp.clip(position, 0, room - count)
        kept = jax.lax.dynamic_slice_in_dim(old, place, count, axis)
        new = jnp.where(place == position, new, kept)
        return jax.lax.dynamic_update_slice_in_dim(old, new, place, axis)

    return Block(put(block.keys, new.keys, -1), put(block.values, new.values, -2))


remember = jax.custom_batching.custom_vmap(add_tokens)


@remember.def_vmap
def _remember_in_step(episodes: int, batched: Any, block: Block, new: Block, position: Array):
    """Many episodes that are played in step write at one position, a few numbers each.

    JAX by itself would scatter, as if every episode had a position of its own: 3 to 5 times as slow.
    """
    if batched[2]:
        axes = jax.tree.map(lambda has_axis: 0 if has_axis else None, tuple(batched))
        return jax.vmap(add_tokens, axes)(block, new, position), Block(True, True)

    def stack(x: Array, has_axis: bool) -> Array:
        return x if has_axis else jnp.broadcast_to(x, (episodes, *x.shape))

    block, new = jax.tree.map(stack, (block, new), tuple(batched[:2]))
    return remember(block, new, position), Block(True, True)


def recall(
    begun: int,
    q: Float[Array, "head query d"],
    blocks: tuple[Block, ...],
    visible: Bool[Array, "query token"],
) -> Float[Array, "head query d"]:
    """`attend` to the blocks that the episode has begun."""
    seen, q = blocks[:begun], q / math.sqrt(q.shape[2])
    scores = [jnp.einsum("hqd,hdk->hqk", q, block.keys) for block in seen]
    weights, total = weigh(jnp.concatenate(scores, axis=-1), visible[:, : tokens_in(seen)])
    shares = jnp.split(weights.astype(q.dtype), begun, axis=-1)
    output = sum(
        jnp.einsum("hqk,hkd->hqd", share, block.values)
        for share, block in zip(shares, seen, strict=True)
    )
    return (output / total).astype(q.dtype)


def tokens_in(blocks: tuple[Block, ...]) -> int:
    return sum(block.keys.shape[-1] for block in blocks)


def attend_to_past(
    q: Float[Array, "head query d"],
    k: Float[Array, "head d query"],
    v: Float[Array, "head d query"],
    blocks: tuple[Block, ...],
    position: Int[Array, ""],
    visible: Bool[Array, "query token"],
    queries: int,
) -> tuple[Float[Array, "head queries d"], tuple[Block, ...]]:
    """Writes new tokens at `position`; the last `queries` of them attend to all that they may see."""
    room = tokens_in(blocks[:1])
    new = Block(k, v.swapaxes(1, 2))
    blocks = tuple(remember(b, new, position - i * room) for i, b in enumerate(blocks))
    q, visible = q[:, -queries:], visible[-queries:]
    readers = [partial(recall, begun) for begun in range(1, len(blocks) + 1)]
    return jax.lax.switch(position // room, readers, q, blocks, visible), blocks
