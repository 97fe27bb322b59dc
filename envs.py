"""Tasks: what an episode is.

A task is section 3.1 of the paper: a robot, a reward and a behaviour descriptor. `ant-omni` and
`halfcheetah-uni` are the paper's, on Brax; `point-omni` is an analytic stand-in that compiles in a second
and goes through the same code. Episodes have a fixed length and never end early.

`rollout` plays every policy for several episodes; how that is made fast is in `machinery/engine.py`.
Reads in this order: configuration, `State` and `Task`, the tasks, one episode, many episodes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from machinery import viewer
from machinery.config import find, require_at_least, require_choices
from machinery.engine import map_episodes
from machinery.files import UserError
from machinery.native import c_compiler
from machinery.robots import contact_sensor, load_robot, start_on_joints


@dataclass(frozen=True)
class TaskConfig:
    """What is played."""

    task: str = "halfcheetah-uni"
    length: int = 250  # steps of an episode
    # brax's physics; spring is the descendant of what the paper ran on
    backend: Literal["spring", "positional", "generalized", "mjx"] = "spring"
    reach: float | None = None  # omni tasks: descriptors lie in [-reach, reach]²; the task's own
    # Like the paper's, which ran on Brax v1 (docs/robots.md), or the one that brax ships. Not set: like the
    # paper's, where there is one, on spring and with the start on the joints; brax's otherwise.
    robot: Literal["brax", "v1"] | None = None
    # Random numbers at the start: on the joints alone, as in Brax v1, or brax's own, on everything.
    start: Literal["joints", "brax"] = "joints"
    # Equations 2 and 3, or what the framework of the paper's time gives: 1 − ½‖a‖² and v − 0.1‖a‖².
    reward: Literal["paper", "framework"] = "paper"

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(1, self, "length")
        if self.reach is not None and not 0 < self.reach < float("inf"):
            raise UserError(f"reach must be positive and finite, it is {self.reach}.")


class State(eqx.Module):
    """One moment of one episode."""

    physics: PyTree
    observation: Float[Array, " observation"]
    reward: Float[Array, ""]  # of the step that led here
    descriptor: Float[Array, " descriptor"]  # of the episode as if it ended here
    time: Int[Array, ""]  # steps played


class Task(eqx.Module):
    """What everybody else needs to know about a task. Written for one episode; the engine batches."""

    length: eqx.AbstractVar[int]
    observation_size: eqx.AbstractVar[int]
    action_size: eqx.AbstractVar[int]
    low: eqx.AbstractVar[tuple[float, ...]]  # bounds of the descriptor space
    high: eqx.AbstractVar[tuple[float, ...]]
    dt: eqx.AbstractVar[float]  # seconds per step
    worst_reward: eqx.AbstractVar[float]  # of one step, at least: the offset of the QD score
    axes: eqx.AbstractVar[tuple[str, ...]]  # what each number of a descriptor says
    unit: ClassVar[str]  # of a distance between descriptors
    good: ClassVar[float] = 1 / 15  # of the space's width: a distance that the paper calls good
    is_place: ClassVar[bool] = False  # whether a descriptor is where the robot is on the ground
    in_lanes: ClassVar[bool] = False  # whether its physics goes through `machinery/lanes.py`
    zones: ClassVar[int] = 100  # of the dataset, and goals of the evaluations, as in the paper

    def reset(self, key: Key[Array, ""]) -> State:
        raise NotImplementedError

    def step(self, state: State, action: Float[Array, " action"]) -> State:
        raise NotImplementedError

    def scene(self) -> viewer.Scene:
        """What there is to see: the bodies' shapes."""
        raise NotImplementedError

    def pose(self, state: State) -> tuple[Float[Array, "bodies 3"], Float[Array, "bodies 4"]]:
        """Where the bodies are and how they are turned (quaternions)."""
        raise NotImplementedError

    def touching(self, state: State) -> Bool[Array, " feet"]:
        """Which feet touch the ground, where feet matter."""
        return jnp.zeros(0, bool)

    @property
    def descriptor_size(self) -> int:
        return len(self.low)

    @property
    def good_distance(self) -> float:
        """Up to which a goal counts as reached: 2 of 30 m on Ant-Omni, 0.1 on Halfcheetah-Uni."""
        return self.good * (self.high[0] - self.low[0])


# --- the analytic task ----------------------------------------------------------------------------


END_OF_THE_WAY = ("x at the end (m)", "y at the end (m)")


class PointOmni(Task):
    """A point with inertia and drag on the plane, steered by its acceleration.

    Like the ant it does not see where it is, only how it moves, and a constant, so that a policy
    without biases can move at all. The start is random: a policy that amplifies its first velocity
    ends somewhere else every time, one that damps it does not.
    """

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
        reach = config.reach or 3.0
        self.length, self.dt = config.length, 0.1
        self.low, self.high = (-reach, -reach), (reach, reach)
        self.observation_size, self.action_size = 3, 2
        self.worst_reward = -(2**0.5)  # −‖a‖₂ with both actions at their limit
        self.axes = END_OF_THE_WAY

    def reset(self, key: Key[Array, ""]) -> State:
        position, velocity = 0.1 * jax.random.normal(key, (2, 2))
        return self._state(position, velocity, jnp.zeros(()), jnp.zeros((), int))

    def step(self, state: State, action: Float[Array, " action"]) -> State:
        position, velocity = state.physics
        velocity = velocity + self.dt * (action - velocity)
        position = position + self.dt * velocity
        return self._state(position, velocity, -norm(action), state.time + 1)

    def scene(self) -> viewer.Scene:
        return viewer.point_scene(0.02 * (self.high[0] - self.low[0]))

    def pose(self, state: State) -> tuple[Float[Array, "bodies 3"], Float[Array, "bodies 4"]]:
        position, _ = state.physics
        return jnp.append(position, 0.0)[None], jnp.array([[1.0, 0.0, 0.0, 0.0]])

    def _state(self, position: Array, velocity: Array, reward: Array, time: Array) -> State:
        descriptor = jnp.clip(position, jnp.array(self.low), jnp.array(self.high))
        return State((position, velocity), jnp.append(velocity, 1.0), reward, descriptor, time)


# --- brax tasks -----------------------------------------------------------------------------------


V1 = ("ant", "halfcheetah")  # robots that `machinery/bodies` describes like the paper's


class BraxTask(Task):
    """A brax robot with the paper's reward and descriptor in place of brax's own reward and end.

    A further task is a subclass that names a `robot` and a line in `TASKS`.
    """

    robot: ClassVar[str]
    in_lanes: ClassVar[bool] = False  # whether `machinery/lanes.py` is worth its compile time

    env: Any = eqx.field(static=True)
    config: TaskConfig = eqx.field(static=True)
    length: int
    observation_size: int
    action_size: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    dt: float
    worst_reward: float
    axes: tuple[str, ...]

    def __init__(self, config: TaskConfig):
        if config.robot == "v1" and (self.robot not in V1 or config.backend != "spring"):
            raise UserError(f"robots like v1's are {' and '.join(V1)}, on spring.")
        if config.robot == "v1" and config.start != "joints":
            raise UserError("robots like v1's start on their joints.")
        self.config = config
        self.env = self.load(config)
        self.length = config.length
        # `env.observation_size` would play the start for real, operation by operation: four seconds.
        (self.observation_size,) = jax.eval_shape(self.env.reset, jax.random.key(0)).obs.shape
        self.action_size = int(self.env.action_size)
        self.dt = float(self.env.dt)
        self.low, self.high = self.bounds(config)
        self.worst_reward = self.lowest_reward()
        self.axes = self.axis_names()

    def load(self, config: TaskConfig) -> Any:
        """The robot: a brax environment."""
        return load_robot(self.robot, self.robot_kind, config.backend, self.in_lanes)

    @property
    def robot_kind(self) -> str:
        """v1: like the paper's; brax: the one that brax ships."""
        config = self.config
        as_the_paper = self.robot in V1 and (config.backend, config.start) == ("spring", "joints")
        return config.robot or ("v1" if as_the_paper else "brax")

    def bounds(self, config: TaskConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
        raise NotImplementedError

    def lowest_reward(self) -> float:
        raise NotImplementedError

    def axis_names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def reward(self, before: Any, after: Any, action: Float[Array, " action"]) -> Float[Array, ""]:
        """Of one step, from brax's pipeline states before and after it."""
        raise NotImplementedError

    def describe(
        self, physics: Any, before: Float[Array, " d"], time: Int[Array, ""]
    ) -> Float[Array, " d"]:
        """The descriptor of the episode so far, given the one a step before."""
        raise NotImplementedError

    def reset(self, key: Key[Array, ""]) -> State:
        start = self.env.reset(key)
        if self.config.start == "joints" and self.robot_kind == "brax":  # v1's do so by themselves
            physics = start_on_joints(self.env, key)
            start = start.replace(pipeline_state=physics, obs=self.observe(physics))
        nothing = jnp.zeros(self.descriptor_size)
        return State(start, start.obs, jnp.zeros(()), nothing, jnp.zeros((), jnp.int32))

    def step(self, state: State, action: Float[Array, " action"]) -> State:
        after = self.env.step(state.physics, action)
        before, now = state.physics.pipeline_state, after.pipeline_state
        time = state.time + 1
        descriptor = self.describe(now, state.descriptor, time)
        return State(after, after.obs, self.reward(before, now, action), descriptor, time)

    def observe(self, physics: Any) -> Float[Array, " observation"]:
        """What the robot sees at the start, from brax's pipeline state."""
        return self.env._get_obs(physics)

    def scene(self) -> viewer.Scene:
        return viewer.scene_from_brax(self.env.sys)

    def pose(self, state: State) -> tuple[Float[Array, "bodies 3"], Float[Array, "bodies 4"]]:
        x = state.physics.pipeline_state.x
        return x.pos, x.rot


class OmniTask(BraxTask):
    """Go anywhere with little effort (equation 2): the descriptor is where the torso ends."""

    own_reach: ClassVar[float]
    unit: ClassVar[str] = "m"
    is_place: ClassVar[bool] = True

    def bounds(self, config: TaskConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
        reach = config.reach or self.own_reach
        return (-reach, -reach), (reach, reach)

    def lowest_reward(self) -> float:
        if self.config.reward == "framework":
            return 1 - 0.5 * self.action_size
        return -(self.action_size**0.5)

    def axis_names(self) -> tuple[str, ...]:
        return END_OF_THE_WAY

    def reward(self, before: Any, after: Any, action: Float[Array, " action"]) -> Float[Array, ""]:
        if self.config.reward == "framework":  # without its cost of contacts
            return 1 - 0.5 * jnp.sum(action**2)
        return -norm(action)

    def describe(
        self, physics: Any, before: Float[Array, " d"], time: Int[Array, ""]
    ) -> Float[Array, " d"]:
        return jnp.clip(physics.x.pos[0, :2], jnp.array(self.low), jnp.array(self.high))


class UniTask(BraxTask):
    """Run forward with little effort (equation 3): how long each foot is on the ground."""

    feet: ClassVar[tuple[int, ...]]  # links, as they are numbered in `env.sys.link_names`
    slowest: ClassVar[float]  # m/s, about the fastest that the robot falls backwards
    unit: ClassVar[str] = "share of steps"
    good: ClassVar[float] = 0.1
    zones: ClassVar[int] = 50

    def bounds(self, config: TaskConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if config.reach is not None:
            raise UserError(f"reach is a setting of the omni tasks; {config.task} has none.")
        return (0.0,) * len(self.feet), (1.0,) * len(self.feet)

    def lowest_reward(self) -> float:
        effort = (
            0.1 * self.action_size if self.config.reward == "framework" else self.action_size**0.5
        )
        return -self.slowest - effort

    def axis_names(self) -> tuple[str, ...]:
        return tuple(f"{foot} on the ground (share of steps)" for foot in self.foot_names())

    def foot_names(self) -> tuple[str, ...]:
        return viewer.link_labels(self.env.sys, self.feet)

    def scene(self) -> viewer.Scene:
        return viewer.scene_from_brax(self.env.sys, self.feet)

    def reward(self, before: Any, after: Any, action: Float[Array, " action"]) -> Float[Array, ""]:
        framework = self.config.reward == "framework"
        effort = 0.1 * jnp.sum(action**2) if framework else norm(action)
        return (after.x.pos[0, 0] - before.x.pos[0, 0]) / self.dt - effort

    def describe(
        self, physics: Any, before: Float[Array, " d"], time: Int[Array, ""]
    ) -> Float[Array, " d"]:
        touching = self.feet_on_ground(physics).astype(before.dtype)
        return before + (touching - before) / time  # running mean

    def feet_on_ground(self, physics: Any) -> Bool[Array, " feet"]:
        if self.robot_kind == "v1":  # pushed by the ground at any time during the step
            return physics.contact[jnp.array(self.feet)] > 0
        return contact_sensor(self.env, self.feet)(physics.x)

    def touching(self, state: State) -> Bool[Array, " feet"]:
        return self.feet_on_ground(state.physics.pipeline_state)


class AntOmni(OmniTask):
    robot, own_reach, in_lanes = "ant", 15.0, True


class HalfcheetahUni(UniTask):
    robot, feet, slowest, in_lanes = "halfcheetah", (3, 6), 7.0, True  # bfoot, ffoot


class AntUni(UniTask):
    robot, feet, slowest, in_lanes = "ant", (2, 4, 6, 8), 5.0, True  # the lower legs


class HopperUni(UniTask):
    robot, feet, slowest = "hopper", (3,), 5.0


class Walker2dUni(UniTask):
    robot, feet, slowest = "walker2d", (3, 6), 5.0


class HumanoidOmni(OmniTask):
    robot, own_reach = "humanoid", 15.0

    def observe(self, physics: Any) -> Float[Array, " observation"]:
        return self.env._get_obs(physics, jnp.zeros(self.action_size))


TASKS: dict[str, Any] = {
    "point-omni": PointOmni,
    "ant-omni": AntOmni,
    "ant-uni": AntUni,
    "halfcheetah-uni": HalfcheetahUni,
    "hopper-uni": HopperUni,
    "humanoid-omni": HumanoidOmni,
    "walker2d-uni": Walker2dUni,
}


@functools.cache
def make_task(config: TaskConfig) -> Task:
    """The task of a config. The same config gives the same object, so that nothing compiles twice."""
    return find("task", TASKS, config.task)(config)


def norm(x: Float[Array, " n"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.sum(x**2))


# --- one episode ----------------------------------------------------------------------------------


@runtime_checkable
class Policy(Protocol):
    """Whoever acts. `start` makes what it remembers; `act` may look at the whole state."""

    def start(self) -> Any: ...

    def act(self, memory: Any, state: State) -> tuple[Float[Array, " action"], Any]: ...


class Episodes(eqx.Module):
    """What came out. Leading axes: policies, episodes."""

    fitness: Float[Array, "*batch"]
    descriptor: Float[Array, "*batch descriptor"]
    diverged: Bool[Array, "*batch"]  # NaN or infinity was seen: fitness and descriptor mean nothing
    recorded: PyTree = None  # what a `Record` returned, with an axis of length + 1 for time


# What is remembered of a moment: a function of the state and of the action that is chosen in it. There is
# one more state than there are actions; in the last one, the action is zero.
Record = Callable[[State, Float[Array, " action"]], PyTree]


def nothing(state: State, action: Float[Array, " action"]) -> None:
    return None


def path(state: State, action: Float[Array, " action"]) -> Float[Array, " descriptor"]:
    """The descriptor over time."""
    return state.descriptor


class Transitions(eqx.Module):
    """All that one can learn from. In state t, action t brings reward t + 1 and state t + 1."""

    observations: Float[Array, "*batch observation"]
    actions: Float[Array, "*batch action"]
    rewards: Float[Array, "*batch"]
    path: Float[Array, "*batch descriptor"]


def transitions(state: State, action: Float[Array, " action"]) -> Transitions:
    return Transitions(state.observation, action, state.reward, state.descriptor)


def with_noise(
    action: Float[Array, " action"],
    action_noise: float,
    key: Key[Array, ""],
    time: int | Int[Array, ""],
) -> Float[Array, " action"]:
    """The action with Gaussian noise of this size, drawn from the key and the time step."""
    if not action_noise:
        return action
    noise = jax.random.normal(jax.random.fold_in(key, time), action.shape)
    return jnp.clip(action + action_noise * noise, -1.0, 1.0)


def play_episode(
    task: Task,
    policy: Policy,
    key: Key[Array, ""],
    record: Record = nothing,
    action_noise: float = 0.0,
) -> Episodes:
    """Plays one episode from a random start.

    With `action_noise`, Gaussian noise of that size is added to every action that is played, while the
    action that is recorded stays the policy's own: what it would do in states it seldom visits.
    """

    def step(carry: tuple, _: None) -> tuple[tuple, Any]:
        state, memory, fitness, finite = carry
        action, memory = policy.act(memory, state)
        action = jnp.clip(action, -1.0, 1.0)
        after = task.step(state, with_noise(action, action_noise, noise_key, state.time))
        fitness += after.reward
        finite &= jnp.isfinite(after.observation).all() & jnp.isfinite(after.reward)
        return (after, memory, fitness, finite), record(state, action)

    start_key, noise_key = jax.random.split(key)
    start = task.reset(start_key)
    carry = (start, policy.start(), jnp.zeros(()), jnp.array(True))
    (end, _, fitness, finite), recorded = jax.lax.scan(step, carry, length=task.length)
    last = record(end, jnp.zeros(task.action_size))
    recorded = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), recorded, last)
    diverged = ~(finite & jnp.isfinite(end.descriptor).all())
    return Episodes(fitness, end.descriptor, diverged, recorded)


# --- many episodes --------------------------------------------------------------------------------


class Play(eqx.Module):
    """One episode as a function of a member and a key, for the engine."""

    task: Task
    policy: Callable[[Any], Policy]
    record: Record
    action_noise: float = eqx.field(static=True)

    def __call__(self, member: Any, key: Key[Array, ""]) -> Episodes:
        return play_episode(self.task, self.policy(member), key, self.record, self.action_noise)


def identity(member: Any) -> Any:
    return member


def rollout(
    task: Task,
    members: PyTree,
    keys: Key[Array, "members episodes"],
    policy: Callable[[Any], Policy] = identity,
    record: Record = nothing,
    action_noise: float = 0.0,
    chunk: int | None = None,
) -> Episodes:
    """Plays each of the stacked `members` once for each of its keys.

    `policy` makes a `Policy` of one member; by default the members are policies themselves. It may
    hold arrays that all share, such as the one Transformer behind many targets.
    """
    play = Play(task, policy, record, action_noise)
    # Without a C compiler XLA computes the physics; only for programs that the tests have compiled.
    share_work = task.in_lanes and policy is identity and c_compiler() is None
    return map_episodes(play, members, keys, chunk, share_work)
