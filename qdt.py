"""The Quality-Diversity Transformer: one policy that plays any behaviour on demand.

Section 4.2 and algorithm 5 of the paper. A trajectory is read as the tokens
(BD, O_0, A_0, BD, O_1, A_1, ...) by a causal Transformer (GPT-2), which predicts A_t from the token
of O_t. What makes attention and its cache fast is in `machinery/attention.py`.

A model that can be asked for a behaviour is a `ConditionedPolicy` (`machinery/conditioned.py`); the QDT is
one, an MLP to compare it with is another (`machinery/mlp.py`), and `MODELS` lists them. Training,
evaluation, report and `qdt act` know nothing else about a model.

Reads in this order: config; the model, written for one trajectory; decoding with a cache of keys and
values; all models; loss and training, from a dataset to the best epoch (section 5.1).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from dataset import BatchReader, Dataset, Sizes, Trajectory, View
from envs import Episodes, Record, State, Task, nothing, rollout
from machinery import machine
from machinery.attention import (
    Block,
    Seed,
    attend_to_past,
    causal_attention,
    dropout,
    empty_blocks,
    tokens_in,
)
from machinery.conditioned import REMEMBERED, ConditionedPolicy, Statistics
from machinery.config import find, make_config, require_at_least, require_choices, require_layers
from machinery.files import UserError, load_arrays
from machinery.gradients import loss_and_gradient
from machinery.layers import Embedding, LayerNorm, Linear
from machinery.mlp import ConditionedMLP
from machinery.optimiser import optimiser
from machinery.runs import read_stage_config
from machinery.streams import generator, stream
from me_ls import goals


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. The defaults are the paper's (table 4) wherever it names a value."""

    model: str = "qdt"
    # Trajectories per optimiser step.
    batch_size: int = 256
    # AdamW. The paper names no weight decay; this one is the Decision Transformer's. Muon, ours, moves
    # the layers' matrices by orthogonal steps: on a small budget it learns several times as fast.
    optimiser: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 7e-4
    weight_decay: float = 1e-4
    # Passes over the dataset, and after how many of them the model is asked for its goals.
    epochs: int = 100
    evaluate_every: int = 5
    # Optimiser steps that count as an epoch where that is not to be one pass: models of a large and of a
    # small dataset are then trained equally long. Ours.
    steps_per_epoch: int | None = None
    goal_episodes: int = 10
    # Steps in which the rate grows to its value, and whether it falls to zero on a half cosine. Ours.
    warmup_steps: int = 0
    decay: bool = False
    # Beside every batch, this many further trajectories, of which only the first steps are learned. Ours:
    # these are the hardest to imitate and decide where a robot goes; all others repeat a gait.
    beginnings: int = 0
    beginning_steps: int = 50
    # Give descriptors and observations mean 0 and deviation 1. The paper feeds them raw.
    normalise: bool = False
    # If a target lies beyond everything that was demonstrated, play towards what is nearest to it, as a
    # repertoire does with its nearest policy. The paper asks for every target as it is.
    stay_within: bool = False
    # Actions end in a tanh, as in the Decision Transformer: policies that saturate are then easier to
    # imitate. The paper's last layer is linear.
    bounded: bool = False
    # Share of the trajectories that is held out, to see the loss on what was not learned. Ours.
    held_out: float = 0.0

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(1, self, "batch_size", "epochs", "evaluate_every", "goal_episodes")
        require_at_least(1, self, "steps_per_epoch", "beginning_steps")
        require_at_least(0, self, "warmup_steps", "weight_decay", "beginnings")
        if not 0 <= self.held_out < 1:
            raise UserError(f"held_out must lie in [0, 1), it is {self.held_out}.")

    @property
    def reads_achieved(self) -> bool:
        """Whether the model needs to know the descriptor before each step."""
        return False


@dataclass(frozen=True)
class QDTConfig(TrainConfig):
    """The paper's Transformer, and what we add to the choice."""

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
    # Arithmetic of the matrix products and activations; weights are always kept in float32.
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "layers", "heads", "width")
        if self.width % self.heads:
            raise UserError(
                f"the width ({self.width}) must be a multiple of the heads ({self.heads})."
            )
        if self.tokens == "one" and self.conditioning == "start":
            raise UserError(
                "one token per step shows the goal at every step, not once at the start."
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout must lie in [0, 1), it is {self.dropout}.")

    @property
    def reads_achieved(self) -> bool:
        return self.conditioning == "to-go"

    @property
    def tokens_per_step(self) -> int:
        if self.tokens == "one":
            return 1
        return 2 if self.conditioning == "start" else 3


# --- the model ------------------------------------------------------------------------------------


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

    def __init__(self, config: QDTConfig, *, key: Key[Array, ""]):
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
        """The layer's outputs for the tokens first, first + stride, ...; each reads all up to itself."""
        seed_attention, *seeds_residual = (None, None, None) if seeds is None else seeds
        q, k, v = self.project(x)
        y = causal_attention(q[:, first::stride], k, v, seed_attention, self.dropout, first, stride)
        return self.finish(x[first::stride], y, *seeds_residual)

    def project(
        self, x: Float[Array, "token width"]
    ) -> tuple[
        Float[Array, "head token d"], Float[Array, "head d token"], Float[Array, "head d token"]
    ]:
        """Queries, keys and values."""
        qkv = jnp.split(self.query_key_value(self.norm_attention(x)), 3, axis=-1)
        q, k, v = (y.reshape(len(x), self.heads, -1) for y in qkv)
        return q.transpose(1, 0, 2), k.transpose(1, 2, 0), v.transpose(1, 2, 0)

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


class QDT(ConditionedPolicy):
    """The model of algorithm 5: E_BD, E_O, E_A, E_t, Transformer and Pred_A."""

    embed_descriptor: Embedding
    embed_observation: Embedding
    embed_action: Embedding
    embed_time: Float[Array, "time width"]
    layers: tuple[Layer, ...]
    norm: LayerNorm
    head: Linear
    statistics: Statistics
    config: QDTConfig = eqx.field(static=True)

    def __init__(
        self,
        config: QDTConfig,
        sizes: Sizes,
        statistics: Statistics | None = None,
        *,
        key: Key[Array, ""],
    ):
        width = config.width
        keys = jax.random.split(key, 6)
        self.embed_descriptor = Embedding(sizes.descriptor, width, key=keys[0])
        self.embed_observation = Embedding(sizes.observation, width, key=keys[1])
        self.embed_action = Embedding(sizes.action, width, key=keys[2])
        self.embed_time = 0.02 * jax.random.normal(keys[3], (sizes.length, width))
        layer_keys = jax.random.split(keys[4], config.layers)
        self.layers = tuple(Layer(config, key=key) for key in layer_keys)
        self.norm = LayerNorm(width)
        self.head = Linear(width, sizes.action, key=keys[5])
        self.statistics = (statistics or Statistics.none(sizes)).as_wanted(config)
        self.config = config

    def __call__(
        self,
        descriptor: Float[Array, " descriptor"],
        observations: Float[Array, "time observation"],
        actions: Float[Array, "time action"],
        achieved: Float[Array, "time descriptor"] | None = None,
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "time action"]:
        """The action predicted at each step, from everything up to that step's observation.

        `achieved[t]` is the descriptor of the steps before t, for conditioning "to-go". Dropout is
        on if there is a key.
        """
        model = self.in_precision()
        time = model.embed_time[: len(observations)]
        o = model.embed_observation(self.statistics.observation(observations)) + time
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
        self, tokens: Float[Array, "token width"], *, key: Key[Array, ""] | None = None
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
        return self.to_actions(x)

    def to_actions(self, x: Float[Array, "*time width"]) -> Float[Array, "*time action"]:
        """Pred_A: a linear layer, or one that cannot leave the range of actions."""
        action = self.head(self.norm(x))
        return jnp.tanh(action) if self.config.bounded else action

    def goal(
        self,
        descriptor: Float[Array, " descriptor"],
        achieved: Float[Array, "*time descriptor"] | None,
    ) -> Float[Array, "*tokens descriptor"]:
        """What the BD tokens show."""
        if self.config.conditioning != "to-go":
            return self.statistics.descriptor(descriptor)
        if achieved is None:
            raise UserError('Conditioning "to-go" needs the descriptor achieved so far.')
        return self.statistics.descriptor(descriptor - achieved)

    def in_precision(self) -> "QDT":
        return jax.tree.map(lambda leaf: leaf.astype(self.config.precision), self)

    def error(
        self, trajectory: Trajectory, *, key: Key[Array, ""] | None = None
    ) -> Float[Array, ""]:
        """The loss of algorithm 5: mean((A_preds − A)²)."""
        return jnp.mean(self.errors(trajectory, key=key))

    def errors(
        self, trajectory: Trajectory, *, key: Key[Array, ""] | None = None, blank: bool = False
    ) -> Float[Array, " time"]:
        """The squared error of imitation at each step; `blank`: of a model that sees no action."""
        shown = jnp.zeros_like(trajectory.actions) if blank else trajectory.actions
        predicted = self(
            trajectory.descriptor, trajectory.observations, shown, trajectory.achieved, key=key
        )
        return jnp.mean((predicted - trajectory.actions) ** 2, axis=-1)

    def diagnose(self, batch: Trajectory) -> dict[str, Float[Array, "..."]]:
        """The loss when actions are hidden (far above the loss, it copies instead of looking), and the
        error over the steps of an episode."""
        return {
            "hidden_action_loss": jnp.mean(jax.vmap(partial(self.errors, blank=True))(batch)),
            "error_over_time": jnp.mean(jax.vmap(self.errors)(batch), axis=0),
        }

    def policy(self, target: Float[Array, " descriptor"]) -> "Conditioned":
        return Conditioned(self, self.statistics.within(target))

    def decays(self) -> PyTree[bool]:
        return eqx.tree_at(lambda m: m.embed_time, super().decays(), False)

    def moves_by_muon(self) -> PyTree[bool]:
        """Embeddings, head, norms and biases stay with Adam."""

        def hidden(model: "QDT") -> list:
            names = ("query_key_value", "mix", "expand", "contract")
            return [getattr(layer, name).weight for layer in model.layers for name in names]

        none = jax.tree.map(lambda _: False, self)
        return eqx.tree_at(hidden, none, replace_fn=lambda _: True)


def interleave(*sequences: Float[Array, "time width"]) -> Float[Array, "token width"]:
    return jnp.stack(sequences, axis=1).reshape(-1, sequences[0].shape[1])


# --- decoding -------------------------------------------------------------------------------------


class Cache(eqx.Module):
    """What an episode has shown so far."""

    layers: tuple[tuple[Block, ...], ...]
    action: Float[Array, " action"]  # the last one taken
    step: Int[Array, ""]


def initial_cache(model: QDT) -> Cache:
    config, steps = model.config, len(model.embed_time)
    d = config.width // config.heads
    blocks = empty_blocks(steps, config.tokens_per_step, config.heads, d, config.precision)
    return Cache(
        (blocks,) * config.layers, jnp.zeros_like(model.head.bias), jnp.zeros((), jnp.int32)
    )


def act(
    model: QDT,
    cache: Cache,
    target: Float[Array, " descriptor"],
    observation: Float[Array, " observation"],
    achieved: Float[Array, " descriptor"] | None = None,
) -> tuple[Float[Array, " action"], Cache]:
    """The next action of an episode, at the cost of its new tokens: the evaluation of algorithm 5.

    Feeds the tokens since the last call, (A_{t-1}, BD, O_t), and reads the action from the last. To
    play another action than this one, write it into `cache.action`; but a model that plays with noise
    has learned from tokens without the noise that was played.
    """
    net, config, t = model.in_precision(), model.config, cache.step
    time = net.embed_time[t]
    o = net.embed_observation(model.statistics.observation(observation)) + time
    a = net.embed_action(cache.action) + net.embed_time[jnp.maximum(t - 1, 0)]
    bd = net.embed_descriptor(model.goal(target, achieved))
    if config.tokens == "one":
        x = jnp.stack([bd + o])
    elif config.conditioning == "start":
        x = jnp.stack([jnp.where(t == 0, bd + time, a), o])
    else:
        x = jnp.stack([a, bd + time, o])
    position = len(x) * t + jnp.arange(len(x))
    token = jnp.arange(tokens_in(cache.layers[0]))
    visible = token <= position[:, None]
    if len(x) == 3:
        # There is no A_{-1}: what stands in its place sees itself, and nobody else sees it.
        visible &= (token > 0) | (position[:, None] == 0)
    layers = []
    for layer, blocks in zip(net.layers, cache.layers, strict=True):
        # Of the last layer only the token of O_t is read.
        queries = 1 if layer is net.layers[-1] else len(x)
        attended, blocks = attend_to_past(*layer.project(x), blocks, position[0], visible, queries)
        x = layer.finish(x[-queries:], attended)
        layers.append(blocks)
    action = net.to_actions(x[-1]).astype(jnp.float32).clip(-1, 1)
    return action, Cache(tuple(layers), action, t + 1)


class Conditioned(eqx.Module):
    """The QDT with a target: a policy for the engine. What it remembers is its cache."""

    model: QDT
    target: Float[Array, " descriptor"]

    def start(self) -> Cache:
        return initial_cache(self.model)

    def act(self, memory: Cache, state: State) -> tuple[Float[Array, " action"], Cache]:
        return act(self.model, memory, self.target, state.observation, state.descriptor)


# --- all models -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MLPConfig(TrainConfig):
    """A network without memory, to see what the Transformer is worth."""

    # Layers between observation and target on one side and the action on the other.
    hidden: tuple[int, ...] = (512, 512, 512)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers(self, "hidden")


@dataclass(frozen=True)
class Model:
    """A kind of conditioned policy: how it is called, configured and made."""

    title: str  # as in the paper's tables, where it stands before the repertoire's name
    config: type[TrainConfig]
    make: Callable[..., ConditionedPolicy]  # of config, sizes and statistics, and a key


MODELS: dict[str, Model] = {
    "qdt": Model("QDT", QDTConfig, QDT),
    "mlp": Model("MLP", MLPConfig, ConditionedMLP),
}


def find_model(name: str) -> Model:
    return find("model", MODELS, name)


def make_model(
    task: Task,
    config: TrainConfig,
    statistics: Statistics | None = None,
    *,
    key: Key[Array, ""],
) -> ConditionedPolicy:
    sizes = Sizes.of(task)
    return find_model(config.model).make(
        config, sizes, statistics or Statistics.none(sizes), key=key
    )


def load_model(directory: Path, task: Task) -> ConditionedPolicy:
    """The best epoch of the training in this directory."""
    path = directory / "model.safetensors"
    if not path.exists():
        raise UserError(
            f"{directory.parent} has no trained {directory.name}; `qdt train` makes one."
        )
    try:
        stored = read_stage_config(directory)["train"]
        config = make_config(find_model(stored["model"]).config, stored)
    except (KeyError, TypeError):
        raise UserError(f"{directory} is not the directory of a training.") from None
    like = eqx.filter_eval_shape(make_model, task, config, key=jax.random.key(0))
    return machine.replicate(load_arrays(path, like)[0])


def play(
    task: Task,
    model: ConditionedPolicy,
    targets: Float[Array, "targets d"],
    keys: Key[Array, "targets episodes"],
    record: Record = nothing,
) -> Episodes:
    """Plays episodes towards every target, many at once, with the noise that the model carries."""
    noise = float(model.statistics.action_noise)
    return rollout(task, targets, keys, model.policy, record, action_noise=noise)


# --- one step of training -------------------------------------------------------------------------


def loss(
    model: ConditionedPolicy, batch: Trajectory, keys: Key[Array, " batch"] | None = None
) -> Float[Array, ""]:
    return jnp.mean(errors(model, batch, keys))


def errors(
    model: ConditionedPolicy, batch: Trajectory, keys: Key[Array, " batch"] | None = None
) -> Float[Array, " batch"]:
    """The error of each trajectory; dropout is on if there are keys."""
    return jax.vmap(lambda trajectory, key: model.error(trajectory, key=key))(batch, keys)


@partial(jax.jit, static_argnames=("config", "total", "micro_batch"))
def train_step(
    model: ConditionedPolicy,
    moments: PyTree,
    batch: Trajectory,
    key: Key[Array, ""],
    beginnings: Trajectory | None = None,
    *,
    config: TrainConfig,
    total: int,
    micro_batch: int = 1,
) -> tuple[ConditionedPolicy, PyTree, Float[Array, ""]]:
    """One step of the optimiser on one batch, and on beginnings if there are any; also returns the
    batch's loss before it.

    `micro_batch`: how many trajectories a device holds at once. Only memory and speed depend on it.
    """

    def learn(part: Trajectory, first: int) -> tuple[Float[Array, ""], ConditionedPolicy]:
        # A key for each trajectory's number: its dropout is the same on any device.
        numbers = first + jnp.arange(len(part.actions))
        keys = jax.vmap(partial(jax.random.fold_in, key))(numbers)
        # Short trajectories are held as many at once as make up whole ones.
        at_once = micro_batch * max(1, batch.actions.shape[1] // part.actions.shape[1])
        return loss_and_gradient(
            lambda model, share: errors(model, *share), model, (part, keys), at_once
        )

    value, gradient = learn(batch, 0)
    if beginnings is not None:
        _, further = learn(beginnings, len(batch.actions))
        gradient = jax.tree.map(jnp.add, gradient, further)
    updates, moments = optimiser(config, total).update(gradient, moments, model)
    return eqx.apply_updates(model, updates), moments, value


# --- training -------------------------------------------------------------------------------------


class Best(eqx.Module):
    """The model of the best evaluation so far; infinite distance: there was none."""

    model: ConditionedPolicy
    distance: Float[Array, ""]


class TrainingState(eqx.Module):
    """All that a step hands to the next one."""

    model: ConditionedPolicy
    moments: PyTree  # of the optimiser
    best: Best
    loss_sum: Float[Array, ""]  # over the steps of this epoch
    step: Int[Array, ""]  # steps done


@dataclass(frozen=True)
class Training:
    """The training loop of algorithm 5 as a value to `init` and `step`, or to hand to `drive`.

    Every few epochs the model is asked for goals that cover the descriptor space (section 5.1), and the
    best epoch is kept. Step i reads batch i, which depends on the seed alone. An epoch is one pass over the
    dataset, or as many steps as the config says.
    """

    task: Task
    config: TrainConfig
    data: Dataset
    seed: int
    view: View | None = None  # a part of the dataset

    def __post_init__(self) -> None:
        sizes = Sizes.of(self.task)
        if self.data.meta.sizes != sizes:
            raise UserError(
                f"{self.data.directory} was made for another task: its trajectories have sizes "
                f"{vars(self.data.meta.sizes)}, this task has {vars(sizes)}."
            )
        if self.config.reads_achieved and not self.data.meta.config.achieved:
            raise UserError(
                "this model reads what was achieved before each step, which the dataset does not "
                "hold: --set dataset.achieved=true."
            )
        if len(self.learned) < self.config.batch_size:
            raise UserError(
                f"{len(self.learned)} trajectories do not fill a batch of {self.config.batch_size}."
            )

    @cached_property
    def views(self) -> tuple[View, View]:
        return self.data.split(self.config.held_out, seed=self.seed, view=self.view)

    @property
    def learned(self) -> View:
        return self.views[0]

    @cached_property
    def unseen(self) -> Trajectory | None:
        """Some of the trajectories that are held out."""
        held_out = self.views[1]
        return self.data.batch(held_out[:64]) if len(held_out) else None

    @cached_property
    def batches(self) -> BatchReader:
        return BatchReader(self.data, self.config.batch_size, seed=self.seed, view=self.learned)

    @cached_property
    def beginnings(self) -> Callable[[int], Trajectory | None]:
        """Of step i, in an order of their own."""
        count, steps = self.config.beginnings, self.config.beginning_steps
        if not count:
            return lambda step: None
        reader = BatchReader(
            self.data, count, seed=self.seed, view=self.learned, stream="beginnings"
        )
        return lambda step: reader(step).beginning(steps)

    @property
    def steps_per_epoch(self) -> int:
        return self.config.steps_per_epoch or len(self.learned) // self.config.batch_size

    @property
    def total(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    def init(self, key: Key[Array, ""]) -> TrainingState:
        count = min(len(self.learned), REMEMBERED)
        drawn = generator(self.seed, "statistics").choice(self.learned, count, replace=False)
        meta = self.data.meta
        known = Statistics.of(
            self.data.batch(drawn), meta.config.action_noise, meta.selection.descriptor
        )
        model = make_model(self.task, self.config, known, key=key)
        # The best model is a copy, with memory of its own.
        best = Best(jax.tree.map(jnp.array, model), jnp.array(jnp.inf))
        moments = optimiser(self.config, self.total).init(model)
        return TrainingState(model, moments, best, jnp.zeros(()), jnp.zeros((), jnp.int32))

    def step(
        self, state: TrainingState, key: Key[Array, ""]
    ) -> tuple[TrainingState, dict[str, Any]]:
        """One step of the optimiser; at the end of an epoch also its metrics."""
        model, moments, value = train_step(
            state.model,
            state.moments,
            self.batches(int(state.step)),
            key,
            self.beginnings(int(state.step)),
            config=self.config,
            total=self.total,
            micro_batch=machine.micro_batch(self.task.length),
        )
        done = state.step + 1
        state = TrainingState(model, moments, state.best, state.loss_sum + value, done)
        if int(done) % self.steps_per_epoch:
            return state, {}
        return self.finish_epoch(state)

    def finish_epoch(self, state: TrainingState) -> tuple[TrainingState, dict[str, Any]]:
        epoch = int(state.step) // self.steps_per_epoch
        metrics: dict[str, Any] = {"epoch": epoch}
        metrics["loss"] = float(state.loss_sum) / self.steps_per_epoch
        if epoch % self.config.evaluate_every == 0 or int(state.step) == self.total:
            measured, best = self.evaluate(state)
            state = eqx.tree_at(lambda s: s.best, state, best)
            metrics |= measured
            if self.unseen is not None:
                metrics |= diagnose(state.model, self.unseen)
        return eqx.tree_at(lambda s: s.loss_sum, state, jnp.zeros_like(state.loss_sum)), metrics

    def evaluate(self, state: TrainingState) -> tuple[dict[str, float], Best]:
        """Asks for every goal, from the same starts every time; keeps the model if it is the best yet."""
        targets, count = goals(self.task), self.config.goal_episodes
        keys = jax.random.split(stream(self.seed, "training-goals"), (len(targets), count))
        episodes = play(self.task, state.model, targets, keys)
        far = jnp.sqrt(jnp.sum((episodes.descriptor - targets[:, None]) ** 2, axis=-1))
        distance = jnp.mean(far, where=~episodes.diverged)
        fitness = jnp.mean(episodes.fitness, axis=1, where=~episodes.diverged)
        best = state.best
        if bool(distance < best.distance):
            best = Best(jax.tree.map(jnp.copy, state.model), distance)
        return {"distance": float(distance), "max_fitness": float(jnp.nanmax(fitness))}, best


@eqx.filter_jit
def diagnose(model: ConditionedPolicy, unseen: Trajectory) -> dict[str, Float[Array, "..."]]:
    return {"held_out_loss": loss(model, unseen)} | model.diagnose(unseen)


# What the progress line of a training shows.
SHOWN = ("epoch", "loss", "distance", "trajectories_per_second")


def refuse_divergence(metrics: dict[str, Any]) -> None:
    if not math.isfinite(metrics["loss"]):
        raise UserError(
            f"the loss is not a number in epoch {metrics['epoch']}: remove the training's directory "
            "and train with a lower rate (--set train.learning_rate=...)."
        )


def best_model(state: TrainingState) -> ConditionedPolicy:
    if not math.isfinite(state.best.distance):
        raise UserError("all episodes of the model diverged in every evaluation; none is kept.")
    return state.best.model
