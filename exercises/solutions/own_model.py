"""A conditioned model of one's own: two hidden layers that read target, observation and time."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from dataset import Sizes, Trajectory
from envs import State
from me_ls import MLP
from qdt import ConditionedPolicy, Statistics, TrainConfig


class Reactive(ConditionedPolicy):
    network: MLP
    statistics: Statistics
    length: int = eqx.field(static=True)

    def __call__(
        self,
        target: Float[Array, " descriptor"],
        observation: Float[Array, " observation"],
        time: Int[Array, ""],
    ) -> Float[Array, " action"]:
        known = self.statistics
        clock = 2 * time[None] / self.length - 1
        seen = [known.descriptor(target), known.observation(observation), clock]
        return self.network(jnp.concatenate(seen))

    def error(
        self, trajectory: Trajectory, *, key: Key[Array, ""] | None = None
    ) -> Float[Array, ""]:
        of_steps = jax.vmap(self, in_axes=(None, 0, 0))
        times = jnp.arange(self.length)
        predicted = of_steps(trajectory.descriptor, trajectory.observations, times)
        return jnp.mean((predicted - trajectory.actions) ** 2)

    def policy(self, target: Float[Array, " descriptor"]) -> "Towards":
        return Towards(self, target)


class Towards(eqx.Module):
    model: Reactive
    target: Float[Array, " descriptor"]

    def start(self) -> None:
        return None

    def act(self, memory: None, state: State) -> tuple[Float[Array, " action"], None]:
        return self.model(self.target, state.observation, state.time), None


def settings() -> TrainConfig:
    return TrainConfig(epochs=8, batch_size=16, learning_rate=0.003, evaluate_every=8, decay=True)


def make(
    config: TrainConfig, sizes: Sizes, statistics: Statistics, *, key: Key[Array, ""]
) -> Reactive:
    inputs = sizes.descriptor + sizes.observation + 1
    network = MLP((inputs, 64, 64, sizes.action), key=key)
    return Reactive(network, statistics, sizes.length)
