"""The Quality-Diversity Transformer: one policy that plays any behaviour on demand.

Section 4.2 and algorithm 5 of the paper. A trajectory is read as the tokens
(BD, O_0, A_0, BD, O_1, A_1, ...) by a causal Transformer (GPT-2), which predicts A_t from the token
of O_t. In order: the configuration; dropout, attention and the model, written for one trajectory;
decoding with a cache of keys and values; the loss and one step of training.

The mathematics is GPT-2's; three choices make it fast without changing the result. Attention goes
over blocks of queries, so that its tokens x tokens matrix never exists at once and the half behind
the causal mask is not computed. The last layer is computed for the O tokens only, because nothing
reads its other outputs. Dropout draws its noise from a hash inside the loop that uses it.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree, UInt32

from envs import devices
from runs import UserError


@dataclass(frozen=True)
class QDTConfig:
    """The defaults are the paper's (its table for the QDT) wherever it names a value."""

    # Transformer: layers, attention heads per layer, width of a token.
    layers: int = 4
    heads: int = 8
    width: int = 256
    # Share of the attention weights, the layers' outputs and the embeddings that is dropped.
    dropout: float = 0.1
    # What the model is told of the goal: the target descriptor at every step (the paper's choice),
    # once at the start, or at every step what is left of it: target minus achieved so far.
    conditioning: Literal["every-step", "start", "to-go"] = "every-step"
    # What a step is read as: the paper's three tokens BD, O and A, or, ours, one: the sum of BD and O.
    # That trains more than twice as fast, and a model that sees no actions cannot just continue them.
    tokens: Literal["three", "one"] = "three"
    # Give descriptors and observations mean 0 and deviation 1. The paper feeds them raw.
    normalise: bool = False
    # Trajectories per optimiser step, and how many of them one device holds at once at most. Only
    # memory and speed depend on the latter: one at a time fits a CPU's cache, a GPU wants many.
    batch_size: int = 256
    micro_batch: int = 1
    # AdamW. The paper names no weight decay; this one is the Decision Transformer's. Muon, ours, moves
    # the layers' matrices by orthogonal steps: on a small budget it learns several times as fast.
    optimiser: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 7e-4
    weight_decay: float = 1e-4
    # Passes over the dataset, and after how many of them the model is asked for its goals.
    epochs: int = 100
    evaluate_every: int = 5
    goal_episodes: int = 10
    # Steps in which the rate grows to its value, and whether it falls to zero on a half cosine. Ours.
    warmup_steps: int = 0
    decay: bool = False
    # Share of the trajectories that is only used to look at the loss on what was not learned. Ours.
    held_out: float = 0.0
    # Gaussian noise on the actions that the QDT plays. Ours: demonstrators that were disturbed
    # (dataset.disturbance) reached their descriptors with that noise, and so does who imitates them.
    disturbance: float = 0.0
    checkpoint_seconds: float = 120.0
    # Arithmetic of the matrix products and activations; weights are always kept in float32.
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        counts = (
            "layers", "heads", "width", "batch_size", "micro_batch", "epochs", "evaluate_every",
            "goal_episodes",
        )  # fmt: skip
        for name in counts:
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.width % self.heads:
            raise UserError(
                f"the width ({self.width}) must be a multiple of the heads ({self.heads})."
            )
        if self.tokens == "one" and self.conditioning == "start":
            raise UserError(
                "one token per step shows the goal at every step, not once at the start."
            )
        for name in ("dropout", "held_out"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must lie in [0, 1), it is {getattr(self, name)}.")
        if not 0 <= self.disturbance < math.inf:
            raise UserError(f"disturbance must not be negative, it is {self.disturbance}.")
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                choices = ", ".join(get_args(kind))
                raise UserError(f"{name} must be one of {choices}, not {getattr(self, name)}.")

    @property
    def tokens_per_step(self) -> int:
        if self.tokens == "one":
            return 1
        return 2 if self.conditioning == "start" else 3


class Trajectory(eqx.Module):
    """One episode, or a batch of episodes along leading axes."""

    descriptor: Float[Array, "*batch descriptor"]
    observations: Float[Array, "*batch time observation"]
    actions: Float[Array, "*batch time action"]
    # The descriptor of the steps before each step, only read by conditioning "to-go".
    achieved: Float[Array, "*batch time descriptor"] | None = None


# ------------------------------------------------------------------------------------- dropout

Seed = UInt32[Array, "2"]


def kept(seed: Seed, shape: tuple[int, ...], rate: float, drawn: int = 0) -> Bool[Array, "..."]:
    """Bernoulli(1 - rate) for every element, from a hash of the seed and the element's number.

    The hash ("lowbias32": every output bit depends on every input bit) is a handful of integer
    operations that XLA fuses into whatever reads the mask. On a CPU it is 20 times as fast as
    `jax.random.bernoulli`, which would cost about as much as the attention it disturbs. `drawn` says
    how many elements this seed has served already.
    """
    bits = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + jnp.uint32(drawn)
    bits = bits ^ seed[0]
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    # A second word of seed, so that the streams of two seeds are not permutations of each other.
    bits = (bits ^ (bits >> 15) ^ seed[1]) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16) < jnp.uint32((1 - rate) * 2**32)


def dropout(x: Float[Array, "..."], seed: Seed | None, rate: float) -> Float[Array, "..."]:
    if seed is None:
        return x
    return jnp.where(kept(seed, x.shape, rate), x / (1 - rate), 0)


# ----------------------------------------------------------------------------------- attention

# Queries whose scores exist at once: 128 rows against 750 tokens, some heads, fill a core's cache.
BLOCK = 128


def attend(
    q: Float[Array, "head query d"],
    k: Float[Array, "head d token"],
    v: Float[Array, "head d token"],
    visible: Bool[Array, "query token"],
    seed: Seed | None = None,
    rate: float = 0.0,
    drawn: int = 0,
) -> Float[Array, "head query d"]:
    """Softmax attention of some queries to the tokens that each may see, with dropout."""
    weights, total = weigh(jnp.einsum("hqd,hdk->hqk", q / math.sqrt(q.shape[2]), k), visible)
    if seed is not None:
        weights = jnp.where(kept(seed, weights.shape, rate, drawn), weights / (1 - rate), 0)
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
    heads, queries, _ = q.shape
    size, drawn, outputs = max(1, BLOCK // stride), 0, []
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        position = first + stride * jnp.arange(start, stop)
        seen = first + stride * (stop - 1) + 1
        visible = jnp.arange(seen) <= position[:, None]
        # The gradient computes a block's weights again instead of storing them, to save memory.
        block = jax.checkpoint(partial(attend, rate=rate, drawn=drawn))
        outputs.append(block(q[:, start:stop], k[..., :seen], v[..., :seen], visible, seed))
        drawn += heads * (stop - start) * seen
    return jnp.concatenate(outputs, axis=1)


# --------------------------------------------------------------------------------------- model


class Linear(eqx.Module):
    weight: Float[Array, "in out"]
    bias: Float[Array, " out"]

    def __init__(self, size_in: int, size_out: int, *, scale: float = 0.02, key: PRNGKeyArray):
        self.weight = scale * jax.random.normal(key, (size_in, size_out))
        self.bias = jnp.zeros(size_out)

    def __call__(self, x: Float[Array, "*token in"]) -> Float[Array, "*token out"]:
        return x.astype(self.weight.dtype) @ self.weight + self.bias


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

    def __init__(self, size: int, width: int, *, key: PRNGKeyArray):
        keys = jax.random.split(key)
        linear = Linear(size, width, scale=1 / math.sqrt(size), key=keys[0])
        # Normalisation forgets how long a vector is: with no bias, a target (0.1, 0.1) would look
        # like (0.9, 0.9) until one is learned.
        self.linear = eqx.tree_at(lambda x: x.bias, linear, jax.random.normal(keys[1], (width,)))
        self.norm = LayerNorm(width)

    def __call__(self, x: Float[Array, "*token in"]) -> Float[Array, "*token width"]:
        return self.norm(self.linear(x))


class Scale(eqx.Module):
    """Makes mean 0 and deviation 1 of what has this mean and this deviation."""

    mean: Float[Array, " n"]
    deviation: Float[Array, " n"]

    def __call__(self, x: Float[Array, "*time n"]) -> Float[Array, "*time n"]:
        mean, deviation = jax.lax.stop_gradient((self.mean, self.deviation))
        # What never varies has no deviation to be divided by.
        return (x - mean) / jnp.maximum(deviation, 1e-6)


class Layer(eqx.Module):
    """Attention, then a ReLU network; each reads a normalised copy and adds to its input."""

    norm_attention: LayerNorm
    query_key_value: Linear
    mix: Linear
    norm_mlp: LayerNorm
    expand: Linear
    contract: Linear
    heads: int = eqx.field(static=True)
    dropout: float = eqx.field(static=True)

    def __init__(self, config: QDTConfig, *, key: PRNGKeyArray):
        width = config.width
        keys = jax.random.split(key, 4)
        # GPT-2: what is added to the residual stream starts smaller, the more layers add to it.
        residual = 0.02 / math.sqrt(2 * config.layers)
        self.norm_attention, self.norm_mlp = LayerNorm(width), LayerNorm(width)
        self.query_key_value = Linear(width, 3 * width, key=keys[0])
        self.mix = Linear(width, width, scale=residual, key=keys[1])
        self.expand = Linear(width, 4 * width, key=keys[2])
        self.contract = Linear(4 * width, width, scale=residual, key=keys[3])
        self.heads, self.dropout = config.heads, config.dropout

    def __call__(
        self,
        x: Float[Array, "token width"],
        seeds: UInt32[Array, "3 2"] | None = None,
        first: int = 0,
        stride: int = 1,
    ) -> Float[Array, "query width"]:
        """The layer's outputs for the tokens first, first + stride, ..., which read all before."""
        seed_attention, *seeds_residual = (None, None, None) if seeds is None else seeds
        q, k, v = self.project(x)
        y = causal_attention(q[:, first::stride], k, v, seed_attention, self.dropout, first, stride)
        return self.finish(x[first::stride], y, *seeds_residual)

    def project(self, x: Float[Array, "token width"]):
        """Queries [head, token, d], keys and values [head, d, token]."""
        qkv = self.query_key_value(self.norm_attention(x)).T
        q, k, v = qkv.reshape(3, self.heads, -1, len(x))
        return q.transpose(0, 2, 1), k, v

    def finish(
        self,
        x: Float[Array, "token width"],
        attended: Float[Array, "head token d"],
        seed_attention: Seed | None = None,
        seed_mlp: Seed | None = None,
    ) -> Float[Array, "token width"]:
        y = self.mix(attended.transpose(1, 0, 2).reshape(x.shape))
        x = x + dropout(y, seed_attention, self.dropout)
        y = self.contract(jax.nn.relu(self.expand(self.norm_mlp(x))))
        return x + dropout(y, seed_mlp, self.dropout)


class QDT(eqx.Module):
    """The model of algorithm 5: E_BD, E_O, E_A, E_t, Transformer and Pred_A."""

    embed_descriptor: Embedding
    embed_observation: Embedding
    embed_action: Embedding
    embed_time: Float[Array, "time width"]
    layers: tuple[Layer, ...]
    norm: LayerNorm
    head: Linear
    # What the embeddings subtract and divide by; not trained. Raw inputs have 0 and 1 here.
    descriptor_scale: Scale
    observation_scale: Scale
    config: QDTConfig = eqx.field(static=True)

    def __init__(
        self,
        config: QDTConfig,
        *,
        descriptor_size: int,
        observation_size: int,
        action_size: int,
        steps: int,
        key: PRNGKeyArray,
    ):
        width = config.width
        keys = jax.random.split(key, 6)
        self.embed_descriptor = Embedding(descriptor_size, width, key=keys[0])
        self.embed_observation = Embedding(observation_size, width, key=keys[1])
        self.embed_action = Embedding(action_size, width, key=keys[2])
        self.embed_time = 0.02 * jax.random.normal(keys[3], (steps, width))
        layer_keys = jax.random.split(keys[4], config.layers)
        self.layers = tuple(Layer(config, key=key) for key in layer_keys)
        self.norm = LayerNorm(width)
        self.head = Linear(width, action_size, key=keys[5])
        self.descriptor_scale = Scale(jnp.zeros(descriptor_size), jnp.ones(descriptor_size))
        self.observation_scale = Scale(jnp.zeros(observation_size), jnp.ones(observation_size))
        self.config = config

    def __call__(
        self,
        descriptor: Float[Array, " descriptor"],
        observations: Float[Array, "time observation"],
        actions: Float[Array, "time action"],
        achieved: Float[Array, "time descriptor"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "time action"]:
        """The action predicted at each step, from everything up to that step's observation.

        `achieved[t]` is the descriptor of the steps before t, for conditioning "to-go". Dropout is
        on if there is a key.
        """
        model = self.in_precision()
        time = model.embed_time[: len(observations)]
        o = model.embed_observation(self.observation_scale(observations)) + time
        a = model.embed_action(actions) + time
        bd = model.embed_descriptor(self.goal(descriptor, achieved))
        if self.config.conditioning == "start":
            tokens = jnp.concatenate([bd[None] + time[0], interleave(o, a)])
        elif self.config.tokens == "one":
            tokens = bd + o
        else:
            tokens = interleave(bd + time, o, a)
        return model.predict(tokens, key=key).astype(jnp.float32)

    def predict(
        self, tokens: Float[Array, "token width"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "time action"]:
        """Transformer and Pred_A: from the interleaved embeddings to an action for each O token."""
        rate, layers = self.config.dropout, self.config.layers
        seed, seeds = None, [None] * layers
        if key is not None and rate > 0:
            bits = jax.random.bits(key, (1 + 3 * layers, 2))
            seed, seeds = bits[0], bits[1:].reshape(layers, 3, 2)
        x = dropout(tokens, seed, rate)
        for layer, seeds_of_layer in zip(self.layers[:-1], seeds, strict=False):
            x = layer(x, seeds_of_layer)
        # Of the last layer only the O tokens are read.
        stride = self.config.tokens_per_step
        x = self.layers[-1](x, seeds[-1], first=min(1, stride - 1), stride=stride)
        return self.head(self.norm(x))

    def goal(
        self,
        descriptor: Float[Array, " descriptor"],
        achieved: Float[Array, "*time descriptor"] | None,
    ) -> Float[Array, "*tokens descriptor"]:
        """What the BD tokens show."""
        if self.config.conditioning != "to-go":
            return self.descriptor_scale(descriptor)
        if achieved is None:
            raise UserError('Conditioning "to-go" needs the descriptor achieved so far.')
        return self.descriptor_scale(descriptor - achieved)

    def in_precision(self) -> "QDT":
        return jax.tree.map(lambda leaf: leaf.astype(self.config.precision), self)


def interleave(*sequences: Float[Array, "time width"]) -> Float[Array, "token width"]:
    return jnp.stack(sequences, axis=1).reshape(-1, sequences[0].shape[1])


# ------------------------------------------------------------------------------------ decoding

# Steps whose keys and values are stored together. A step reads the blocks that the episode has begun:
# half of the whole on average, and a block at a time stays in a core's cache.
STEPS_PER_BLOCK = 25


class Block(NamedTuple):
    """Keys and values of some tokens in one layer, in the layouts that few queries read fastest."""

    keys: Float[Array, "*episodes head d token"]
    values: Float[Array, "*episodes head token d"]


class Cache(eqx.Module):
    """What an episode has shown so far."""

    layers: tuple[tuple[Block, ...], ...]
    action: Float[Array, " action"]  # the last one taken
    step: Int[Array, ""]


def initial_cache(model: QDT) -> Cache:
    config, steps = model.config, len(model.embed_time)
    tokens = config.tokens_per_step * min(STEPS_PER_BLOCK, steps)
    shape = (config.heads, config.width // config.heads, tokens)
    keys = jnp.zeros(shape, config.precision)
    blocks = (Block(keys, keys.swapaxes(1, 2)),) * -(-steps // STEPS_PER_BLOCK)
    return Cache(
        layers=(blocks,) * config.layers,
        action=jnp.zeros_like(model.head.bias),
        step=jnp.zeros((), jnp.int32),
    )


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
    weights, total = weigh(jnp.concatenate(scores, axis=-1), visible[:, : _tokens(seen)])
    shares = jnp.split(weights.astype(q.dtype), begun, axis=-1)
    output = sum(
        jnp.einsum("hqk,hkd->hqd", share, block.values)
        for share, block in zip(shares, seen, strict=True)
    )
    return (output / total).astype(q.dtype)


def _tokens(blocks: tuple[Block, ...]) -> int:
    return sum(block.keys.shape[-1] for block in blocks)


def act(
    model: QDT,
    cache: Cache,
    target: Float[Array, " descriptor"],
    observation: Float[Array, " observation"],
    achieved: Float[Array, " descriptor"] | None = None,
) -> tuple[Float[Array, " action"], Cache]:
    """The next action of an episode, at the cost of its new tokens: the evaluation of algorithm 5.

    Feeds the tokens since the last call, (A_{t-1}, BD, O_t), and reads the action from the last. To
    play another action than this one, write it into `cache.action`; but a model that is meant to be
    disturbed (`config.disturbance`) has learned from tokens without the noise that was played.
    """
    net, config, t = model.in_precision(), model.config, cache.step
    time = net.embed_time[t]
    o = net.embed_observation(model.observation_scale(observation)) + time
    a = net.embed_action(cache.action) + net.embed_time[jnp.maximum(t - 1, 0)]
    bd = net.embed_descriptor(model.goal(target, achieved))
    if config.tokens == "one":
        x = jnp.stack([bd + o])
    elif config.conditioning == "start":
        x = jnp.stack([jnp.where(t == 0, bd + time, a), o])
    else:
        x = jnp.stack([a, bd + time, o])
    position = len(x) * t + jnp.arange(len(x))
    token = jnp.arange(_tokens(cache.layers[0]))
    visible = token <= position[:, None]
    if len(x) == 3:
        # There is no A_{-1}: what stands in its place sees itself, and nobody else sees it.
        visible &= (token > 0) | (position[:, None] == 0)
    room = _tokens(cache.layers[0][:1])
    layers = []
    for layer, blocks in zip(net.layers, cache.layers, strict=True):
        q, k, v = layer.project(x)
        new = Block(k, v.swapaxes(1, 2))
        blocks = tuple(remember(b, new, position[0] - i * room) for i, b in enumerate(blocks))
        if layer is net.layers[-1]:
            x, q, visible = x[-1:], q[:, -1:], visible[-1:]  # of the last layer only O_t is read
        readers = [partial(recall, begun) for begun in range(1, len(blocks) + 1)]
        x = layer.finish(x, jax.lax.switch(position[0] // room, readers, q, blocks, visible))
        layers.append(blocks)
    action = net.head(net.norm(x[-1])).astype(jnp.float32).clip(-1, 1)
    return action, Cache(tuple(layers), action, t + 1)


# ------------------------------------------------------------------------------------ training


class TrainState(eqx.Module):
    model: QDT
    optimiser: PyTree[Array]


def initial_state(model: QDT) -> TrainState:
    return TrainState(model, optimiser(model.config).init(model))


def optimiser(config: QDTConfig) -> optax.GradientTransformation:
    """All but the last factor, the learning rate, which a schedule may change from step to step."""
    direction = optax.scale_by_adam()
    if config.optimiser == "muon":
        muon = optax.chain(
            optax.trace(decay=0.95, nesterov=True),
            optax.stateless(lambda momentum, model: orthogonal(momentum)),
            optax.scale(MUON_RATE),
        )
        direction = optax.multi_transform({"muon": muon, "adam": direction}, muon_or_adam)
    return optax.chain(direction, optax.add_decayed_weights(config.weight_decay, mask=decayed))


HIDDEN = ("query_key_value", "mix", "expand", "contract")
MUON_RATE = 20.0  # times Adam's: its steps are orthogonal matrices, whose numbers are small


def muon_or_adam(model: QDT) -> PyTree[str]:
    """Muon is for matrices between hidden layers; embeddings, head, norms and biases stay with Adam."""

    def hidden(model):
        return [getattr(layer, name).weight for layer in model.layers for name in HIDDEN]

    return eqx.tree_at(hidden, jax.tree.map(lambda _: "adam", model), replace_fn=lambda _: "muon")


def orthogonal(matrices: PyTree[Float[Array, "_ _"]]) -> PyTree[Array]:
    """`orthogonalise` of each matrix; they are dealt out among the devices, from small to large."""
    mesh = devices()

    def on_device(leaves):
        order = sorted(range(len(leaves)), key=lambda i: leaves[i].size)

        def hand(device):
            mine = order[device :: mesh.size]
            return [
                orthogonalise(x) if i in mine else jnp.zeros_like(x) for i, x in enumerate(leaves)
            ]

        hands = [partial(hand, device) for device in range(mesh.size)]
        return jax.lax.psum(jax.lax.switch(jax.lax.axis_index("device"), hands), "device")

    leaves, structure = jax.tree.flatten(matrices)
    whole = PartitionSpec()
    done = jax.shard_map(on_device, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.tree.unflatten(structure, done(leaves))


def orthogonalise(matrix: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Brings all singular values near 1 by five steps of Newton and Schulz, with Muon's polynomial."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


def decayed(model: QDT) -> PyTree[bool]:
    """Matrices decay; biases, norms, embeddings of time and the statistics do not."""

    def mark(node):
        if isinstance(node, Linear):
            return eqx.tree_at(lambda linear: (linear.weight, linear.bias), node, (True, False))
        return False

    return jax.tree.map(mark, model, is_leaf=lambda node: isinstance(node, Linear))


def errors(
    model: QDT, batch: Trajectory, keys: Key[Array, " batch"] | None = None
) -> Float[Array, " batch"]:
    """Mean squared error over all steps of each trajectory; dropout is on if there are keys."""

    def error(trajectory, key):
        predicted = model(
            trajectory.descriptor,
            trajectory.observations,
            trajectory.actions,
            trajectory.achieved,
            key=key,
        )
        return jnp.mean((predicted - trajectory.actions) ** 2)

    return jax.vmap(error)(batch, keys)


def loss(
    model: QDT, batch: Trajectory, keys: Key[Array, " batch"] | None = None
) -> Float[Array, ""]:
    return jnp.mean(errors(model, batch, keys))


def loss_and_gradient(
    model: QDT, batch: Trajectory, keys: Key[Array, " batch"] | None = None
) -> tuple[Float[Array, ""], QDT]:
    """`jax.value_and_grad(loss)` of a batch of any size, in the memory of one micro-batch a device.

    Every device goes through its share of the batch, a micro-batch at a time, and adds up. Where the
    shares would not be equal, the last trajectory fills them up and counts for nothing.
    """
    mesh, size = devices(), len(batch.actions)
    micro_batch = min(model.config.micro_batch, -(-size // mesh.size))
    row = mesh.size * micro_batch
    padded = -(-size // row) * row
    weight = (jnp.arange(padded) < size) / size
    if padded > size:
        index = jnp.minimum(jnp.arange(padded), size - 1)
        batch, keys = jax.tree.map(lambda x: x[index], (batch, keys))

    def weighted_loss(model, weight, batch, keys):
        return jnp.sum(weight * errors(model, batch, keys))

    def on_device(model, *share):
        def add(total, part):
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(weighted_loss)(model, *part)
            ), None

        split = jax.tree.map(lambda x: x.reshape(-1, micro_batch, *x.shape[1:]), share)
        zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), model))
        total, _ = jax.lax.scan(add, zero, split)
        return jax.lax.psum(total, "device")

    split, whole = PartitionSpec("device"), PartitionSpec()
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(whole, split, split, split),
        out_specs=whole,
        check_vma=False,
    )(model, weight, batch, keys)


@jax.jit
def train_step(
    state: TrainState,
    batch: Trajectory,
    key: PRNGKeyArray,
    rate: float | Float[Array, ""] | None = None,
) -> tuple[TrainState, Float[Array, ""]]:
    """One step of AdamW on one batch; also returns the loss. No rate: the config's."""
    config = state.model.config
    rate = config.learning_rate if rate is None else rate
    # A key for each trajectory's number in the batch: its dropout is the same on any device.
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(batch.actions)))
    value, gradient = loss_and_gradient(state.model, batch, keys)
    updates, moments = optimiser(config).update(gradient, state.optimiser, state.model)
    updates = jax.tree.map(lambda update: -rate * update, updates)
    return TrainState(eqx.apply_updates(state.model, updates), moments), value
