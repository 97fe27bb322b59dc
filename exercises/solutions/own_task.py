"""A task of one's own: a boat with an engine and a rudder. The descriptor is where it is in the end."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from envs import State, Task, TaskConfig
from machinery import viewer


class Boat(Task):
    """It sees its heading and its speed; the rudder works only when it moves."""

    length: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    observation_size: int
    action_size: int
    dt: float
    worst_reward: float
    axes: tuple[str, ...]
    unit: ClassVar[str] = "m"
    is_place: ClassVar[bool] = True

    def __init__(self, config: TaskConfig):
        reach = config.reach or 2.0
        self.length, self.dt = config.length, 0.1
        self.low, self.high = (-reach, -reach), (reach, reach)
        self.observation_size, self.action_size = 4, 2
        self.worst_reward = -1.0  # full throttle
        self.axes = ("x at the end (m)", "y at the end (m)")

    def reset(self, key: Key[Array, ""]) -> State:
        x, y, heading, speed = 0.1 * jax.random.normal(key, (4,))
        return self.moment((x, y, heading, speed), jnp.zeros(()), jnp.zeros((), int))

    def step(self, state: State, action: Float[Array, " action"]) -> State:
        x, y, heading, speed = state.physics
        throttle, rudder = action
        speed = speed + self.dt * (2.0 * throttle - speed)
        heading = heading + self.dt * 3.0 * rudder * speed
        x = x + self.dt * speed * jnp.cos(heading)
        y = y + self.dt * speed * jnp.sin(heading)
        return self.moment((x, y, heading, speed), -jnp.abs(throttle), state.time + 1)

    def moment(self, physics: tuple[Array, ...], reward: Float[Array, ""], time: Array) -> State:
        x, y, heading, speed = physics
        seen = jnp.array([jnp.cos(heading), jnp.sin(heading), speed, 1.0])
        place = jnp.clip(jnp.array([x, y]), jnp.array(self.low), jnp.array(self.high))
        return State(physics, seen, reward, place, time)

    def scene(self) -> viewer.Scene:
        return viewer.point_scene(0.02 * (self.high[0] - self.low[0]))

    def pose(self, state: State) -> tuple[Float[Array, "bodies 3"], Float[Array, "bodies 4"]]:
        x, y, heading, _ = state.physics
        turn = jnp.array([jnp.cos(heading / 2), 0.0, 0.0, jnp.sin(heading / 2)])
        return jnp.array([[x, y, 0.0]]), turn[None]


def make(config: TaskConfig) -> Task:
    return Boat(config)
