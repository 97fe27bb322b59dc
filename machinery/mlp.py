"""A conditioned policy without a memory, to see what the Transformer is worth.

What the method hands in has its kinds, as `machinery/conditioned.py` says.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from machinery.conditioned import ConditionedPolicy, Statistics
from machinery.layers import Linear


class ConditionedMLP(ConditionedPolicy):
    """Behaviour cloning: what to do follows from the observation and the target alone."""

    layers: tuple[Linear, ...]
    statistics: Statistics
    bounded: bool = eqx.field(static=True)

    def __init__(
        self,
        config: Any,
        sizes: Any,
        statistics: Statistics | None = None,
        *,
        key: Key[Array, ""],
    ):
        widths = (sizes.observation + sizes.descriptor, *config.hidden, sizes.action)
        keys = jax.random.split(key, len(widths) - 1)
        self.layers = tuple(
            Linear(i, o, scale=math.sqrt(2 / i), key=k)  # He's, for layers that end in a ReLU
            for i, o, k in zip(widths, widths[1:], keys, strict=False)
        )
        self.statistics = (statistics or Statistics.none(sizes)).as_wanted(config)
        self.bounded = config.bounded

    def __call__(
        self,
        descriptor: Float[Array, " descriptor"],
        observations: Float[Array, "*time observation"],
    ) -> Float[Array, "*time action"]:
        """The action for each observation."""
        seen = self.statistics.observation(observations)
        goal = self.statistics.descriptor(descriptor)
        goals = jnp.broadcast_to(goal, (*seen.shape[:-1], goal.size))
        x = jnp.concatenate([seen, goals], axis=-1)
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        action = self.layers[-1](x)
        return jnp.tanh(action) if self.bounded else action

    def error(self, trajectory: Any, *, key: Key[Array, ""] | None = None) -> Float[Array, ""]:
        predicted = self(trajectory.descriptor, trajectory.observations)
        return jnp.mean((predicted - trajectory.actions) ** 2)

    def policy(self, target: Float[Array, " descriptor"]) -> "Aimed":
        return Aimed(self, self.statistics.within(target))

    def moves_by_muon(self) -> PyTree[bool]:
        """As in the QDT, the first and the last layer stay with Adam."""
        none = jax.tree.map(lambda _: False, self)
        between = lambda model: [layer.weight for layer in model.layers[1:-1]]  # noqa: E731
        return eqx.tree_at(between, none, replace_fn=lambda _: True)


class Aimed(eqx.Module):
    """The MLP with a target: a policy for the engine that remembers nothing."""

    model: ConditionedMLP
    target: Float[Array, " descriptor"]

    def start(self) -> tuple[()]:
        return ()

    def act(self, memory: tuple[()], state: Any) -> tuple[Float[Array, " action"], tuple[()]]:
        return self.model(self.target, state.observation).clip(-1, 1), memory
