"""What a model is that can be asked for a behaviour, and what it may know about its data.

The interface, `ConditionedPolicy`, is all that training, evaluation, report and `qdt act` know about a
model. The method hands in what is of its own kinds: a trajectory is a `Trajectory` of `dataset.py`, sizes
are its `Sizes`, a config is a `TrainConfig` of `qdt.py`, and what plays is a `Policy` of `envs.py`.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

REMEMBERED = 512  # descriptors that a model remembers
NEIGHBOURS = 4  # of them that stand for a target beyond all: one alone may have been an accident


class Scale(eqx.Module):
    """Brings what has this mean and deviation to mean 0 and deviation 1; not trained."""

    mean: Float[Array, " n"]
    deviation: Float[Array, " n"]

    @staticmethod
    def none(size: int) -> "Scale":
        return Scale(jnp.zeros(size), jnp.ones(size))

    @staticmethod
    def of(sample: Float[np.ndarray, "*batch n"]) -> "Scale":
        rows = sample.reshape(-1, sample.shape[-1])
        return Scale(jnp.asarray(rows.mean(axis=0)), jnp.asarray(rows.std(axis=0)))

    def __call__(self, x: Float[Array, "*time n"]) -> Float[Array, "*time n"]:
        mean, deviation = jax.lax.stop_gradient((self.mean, self.deviation))
        # What never varies has no deviation to be divided by.
        return (x - mean) / jnp.maximum(deviation, 1e-6)


class Statistics(eqx.Module):
    """What a model may want to know about the trajectories it learns from, and carries with it."""

    descriptor: Scale
    observation: Scale
    # Noise on the actions with which the demonstrators reached their descriptors. Whoever imitates them
    # plays with the same noise.
    action_noise: Float[Array, ""]
    # Descriptors that were demonstrated, and how far a target may be from them.
    shown: Float[Array, f"{REMEMBERED} d"]
    margin: Float[Array, ""]

    @staticmethod
    def none(sizes: Any) -> "Statistics":
        """Of trajectories about which nothing is known: inputs and targets stay as they are."""
        scales = Scale.none(sizes.descriptor), Scale.none(sizes.observation)
        nowhere = jnp.zeros((REMEMBERED, sizes.descriptor))
        return Statistics(*scales, jnp.zeros(()), nowhere, jnp.array(jnp.inf))

    @staticmethod
    def of(
        sample: Any, action_noise: float, demonstrators: Float[np.ndarray, "policies d"]
    ) -> "Statistics":
        """The margin is how far the middle of four neighbours is from them: between them is within."""
        scales = Scale.of(sample.descriptor), Scale.of(sample.observations)
        apart = np.linalg.norm(demonstrators[:, None] - demonstrators, axis=-1)
        np.fill_diagonal(apart, np.inf)
        margin = apart.min(axis=1).mean() / np.sqrt(2) if len(demonstrators) > 1 else 0.0
        ends = np.unique(np.asarray(sample.descriptor, np.float32), axis=0)
        shown = ends[np.arange(REMEMBERED) % len(ends)]
        noise = jnp.array(action_noise, jnp.float32)
        return Statistics(*scales, noise, jnp.asarray(shown), jnp.array(margin, jnp.float32))

    def as_wanted(self, config: Any) -> "Statistics":
        """What a model of this config uses; the noise is part of what it imitates."""
        wanted = self
        if not config.normalise:
            scales = [Scale.none(x.mean.size) for x in (self.descriptor, self.observation)]
            wanted = eqx.tree_at(lambda s: (s.descriptor, s.observation), wanted, tuple(scales))
        if not config.stay_within:
            wanted = eqx.tree_at(lambda s: s.margin, wanted, jnp.array(jnp.inf))
        return wanted

    def within(self, target: Float[Array, " d"]) -> Float[Array, " d"]:
        """The target; or, if it lies beyond the margin, the middle of what was shown next to it."""
        distance = jnp.sqrt(jnp.sum((target - self.shown) ** 2, axis=1))
        nearest = jnp.argsort(distance)[:NEIGHBOURS]
        edge = jnp.mean(self.shown[nearest], axis=0)
        return jnp.where(distance[nearest[0]] > self.margin, edge, target)


class ConditionedPolicy(eqx.Module):
    """One policy for any behaviour: it learns from trajectories, and plays towards a target."""

    statistics: eqx.AbstractVar[Statistics]

    def error(self, trajectory: Any, *, key: Key[Array, ""] | None = None) -> Float[Array, ""]:
        """What training minimises. With a key, it may be random: dropout is on."""
        raise NotImplementedError

    def policy(self, target: Float[Array, " descriptor"]) -> Any:
        """Who plays towards this target."""
        raise NotImplementedError

    def without_margin(self) -> "ConditionedPolicy":
        """The same model, asked for every target as it is: what `stay_within` would replace, too."""
        return eqx.tree_at(lambda m: m.statistics.margin, self, jnp.array(jnp.inf))

    def decays(self) -> PyTree[bool]:
        """Which arrays weight decay is for: matrices that are learned."""
        matrices = jax.tree.map(lambda x: x.ndim >= 2, self)
        fixed = jax.tree.map(lambda _: False, self.statistics)
        return eqx.tree_at(lambda m: m.statistics, matrices, fixed)

    def moves_by_muon(self) -> PyTree[bool]:
        """Which arrays Muon is for: matrices between hidden layers."""
        return jax.tree.map(lambda x: False, self)

    def diagnose(self, batch: Any) -> dict[str, Float[Array, "..."]]:
        """Numbers about trajectories that were held out, which help to see what is wrong."""
        return {}
