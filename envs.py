"""Tasks (what an episode is) and the rollout engine (how many episodes run fast).

A task is section 3.1 of the paper: a robot, a reward and a behaviour descriptor. `ant-omni` and
`halfcheetah-uni` are the paper's, on Brax; `point-omni` is an analytic stand-in that compiles in a
second and goes through the very same code. Episodes have a fixed length and never end early.

The engine plays every policy for several episodes. The physics is nearly the whole cost of a search,
and on a CPU how it is batched decides the speed: small chunks of episodes stay in the cache, one chunk
after another on each device, all devices at once. Results depend on the keys alone.

Reads in this order: configuration, `State` and `Task`, the tasks, one episode, many episodes.
"""

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from lanes import spring_step
from runs import UserError

BACKENDS = ("spring", "positional", "generalized", "mjx")


@dataclass(frozen=True)
class TaskConfig:
    """What is played."""

    task: str = "halfcheetah-uni"
    length: int = 250  # steps of an episode
    backend: str = "spring"  # brax physics; the descendant of what the paper ran on
    reach: float = (
        0.0  # omni tasks: descriptors lie in [-reach, reach]²; 0: the task's own (Ant: 15)
    )


class State(eqx.Module):
    """One moment of one episode."""

    physics: PyTree
    observation: Float[Array, " observation"]
    reward: Float[Array, ""]  # of the step that led here
    descriptor: Float[Array, " descriptor"]  # of the episode as if it ended here
    time: Int[Array, ""]  # steps played


class Task(eqx.Module):
    """What the pipeline needs to know about a task. Written for one episode; the engine batches."""

    length: eqx.AbstractVar[int]
    observation_size: eqx.AbstractVar[int]
    action_size: eqx.AbstractVar[int]
    low: eqx.AbstractVar[tuple[float, ...]]  # bounds of the descriptor space
    high: eqx.AbstractVar[tuple[float, ...]]
    dt: eqx.AbstractVar[float]  # seconds per step
    worst_reward: eqx.AbstractVar[float]  # of one step, at least: the offset of the QD score
    zones: ClassVar[int] = 100  # of the dataset, and goals of the evaluations, as in the paper

    def reset(self, key: Key[Array, ""]) -> State:
        raise NotImplementedError

    def step(self, state: State, action: Float[Array, " action"]) -> State:
        raise NotImplementedError

    def pose(self, state: State) -> tuple[Float[Array, "bodies 3"], Float[Array, "bodies 4"]]:
        """Where the bodies are and how they are turned (quaternions), for the eye."""
        raise NotImplementedError

    def touching(self, state: State) -> Bool[Array, " feet"]:
        """Which feet touch the ground, where feet matter."""
        return jnp.zeros(0, bool)

    @property
    def descriptor_size(self) -> int:
        return len(self.low)


# --- the analytic task ----------------------------------------------------------------------------


class PointOmni(Task):
    """A point with inertia and drag on the plane, steered by its acceleration, as `ant-omni` is.

    Like the ant it does not see where it is, only how it moves, and a constant, so that a policy
    without biases can start at all. The start is random: a policy that amplifies its first velocity
    ends somewhere else every time, one that damps it does not.
    """

    length: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    observation_size: int = 3
    action_size: int = 2
    dt: float = 0.1
    worst_reward: float = -(2**0.5)  # −‖a‖₂ with both actions at their limit

    def __init__(self, config: TaskConfig):
        self.length = config.length
        reach = config.reach or 3.0
        self.low, self.high = (-reach, -reach), (reach, reach)

    def reset(self, key: Key[Array, ""]) -> State:
        position, velocity = 0.1 * jax.random.normal(key, (2, 2))
        return self._state(position, velocity, jnp.zeros(()), jnp.zeros((), int))

    def step(self, state: State, action: Float[Array, " action"]) -> State:
        position, velocity = state.physics
        velocity = velocity + self.dt * (action - velocity)
        position = position + self.dt * velocity
        return self._state(position, velocity, -norm(action), state.time + 1)

    def pose(self, state: State) -> tuple[Float[Array, "bodies 3"], Float[Array, "bodies 4"]]:
        position, _ = state.physics
        return jnp.append(position, 0.1)[None], jnp.array([[1.0, 0.0, 0.0, 0.0]])

    def _state(self, position: Array, velocity: Array, reward: Array, time: Array) -> State:
        descriptor = jnp.clip(position, jnp.array(self.low), jnp.array(self.high))
        return State((position, velocity), jnp.append(velocity, 1.0), reward, descriptor, time)


# --- brax tasks -----------------------------------------------------------------------------------


class BraxTask(Task):
    """A brax robot with the paper's reward and descriptor in place of brax's own reward and end.

    A further task is a subclass that names a `robot` and a line in `TASKS`.
    """

    robot: ClassVar[str]
    lanes: ClassVar[bool] = False  # whether `lanes.py` is worth its compile time for this robot

    env: Any = eqx.field(static=True)
    length: int
    observation_size: int
    action_size: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    dt: float
    worst_reward: float

    def __init__(self, config: TaskConfig):
        self.env = _brax_environment(self.robot, config.backend, self.lanes)
        self.length = config.length
        self.observation_size = int(self.env.observation_size)
        self.action_size = int(self.env.action_size)
        self.dt = float(self.env.dt)
        self.low, self.high = self.bounds(config)
        self.worst_reward = self.lowest_reward()

    def bounds(self, config: TaskConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
        raise NotImplementedError

    def lowest_reward(self) -> float:
        raise NotImplementedError

    def reward(self, before: Any, after: Any, action: Float[Array, " action"]) -> Float[Array, ""]:
        """Of one step, from brax's pipeline states before and after it."""
        raise NotImplementedError

    def describe(self, physics: Any, before: Float[Array, " d"], time: Array) -> Array:
        """The descriptor of the episode so far, given the one a step before."""
        raise NotImplementedError

    def reset(self, key: Key[Array, ""]) -> State:
        start = self.env.reset(key)
        nothing = jnp.zeros(self.descriptor_size)
        return State(start, start.obs, jnp.zeros(()), nothing, jnp.zeros((), jnp.int32))

    def step(self, state: State, action: Float[Array, " action"]) -> State:
        after = self.env.step(state.physics, action)
        before, now = state.physics.pipeline_state, after.pipeline_state
        time = state.time + 1
        descriptor = self.describe(now, state.descriptor, time)
        return State(after, after.obs, self.reward(before, now, action), descriptor, time)

    def pose(self, state: State) -> tuple[Float[Array, "bodies 3"], Float[Array, "bodies 4"]]:
        x = state.physics.pipeline_state.x
        return x.pos, x.rot


class OmniTask(BraxTask):
    """Go anywhere with little effort (equation 2): the descriptor is where the torso ends."""

    own_reach: ClassVar[float]

    def bounds(self, config: TaskConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
        reach = config.reach or self.own_reach
        return (-reach, -reach), (reach, reach)

    def lowest_reward(self) -> float:
        return -(self.action_size**0.5)

    def reward(self, before: Any, after: Any, action: Float[Array, " action"]) -> Float[Array, ""]:
        return -norm(action)

    def describe(self, physics: Any, before: Float[Array, " d"], time: Array) -> Array:
        return jnp.clip(physics.x.pos[0, :2], jnp.array(self.low), jnp.array(self.high))


class UniTask(BraxTask):
    """Run forward with little effort (equation 3): how long each foot is on the ground."""

    zones: ClassVar[int] = 50
    feet: ClassVar[
        tuple[int, ...]
    ]  # links, as in `env.sys.link_names` (the ant's lower legs have none)
    slowest: ClassVar[float]  # m/s, about the fastest that the robot falls backwards

    def bounds(self, config: TaskConfig) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if config.reach:
            raise UserError(f"reach is a setting of the omni tasks; {config.task} has none.")
        return (0.0,) * len(self.feet), (1.0,) * len(self.feet)

    def lowest_reward(self) -> float:
        return -self.slowest - self.action_size**0.5

    def reward(self, before: Any, after: Any, action: Float[Array, " action"]) -> Float[Array, ""]:
        return (after.x.pos[0, 0] - before.x.pos[0, 0]) / self.dt - norm(action)

    def describe(self, physics: Any, before: Float[Array, " d"], time: Array) -> Array:
        touching = self.feet_on_ground(physics).astype(before.dtype)
        return before + (touching - before) / time  # running mean

    def feet_on_ground(self, physics: Any) -> Bool[Array, " feet"]:
        return _contact_sensor(self.env, self.feet)(physics.x)

    def touching(self, state: State) -> Bool[Array, " feet"]:
        return self.feet_on_ground(state.physics.pipeline_state)


@functools.cache
def _contact_sensor(env: Any, feet: tuple[int, ...]) -> Callable[[Any], Bool[Array, " feet"]]:
    """Tells which of the links touch something, from where the links are."""
    from brax import contact

    def sense(x: Any) -> Bool[Array, " feet"]:
        found = contact.get(env.sys, x)
        assert found is not None, "a robot that runs has contacts"
        of_foot = jnp.array([(found.link_idx[0] == f) | (found.link_idx[1] == f) for f in feet])
        return (of_foot & (found.dist <= 0)).any(axis=1)

    return sense


class AntOmni(OmniTask):
    robot, own_reach, lanes = "ant", 15.0, True


class HalfcheetahUni(UniTask):
    robot, feet, slowest, lanes = "halfcheetah", (3, 6), 7.0, True  # bfoot, ffoot


class AntUni(UniTask):
    robot, feet, slowest, lanes = "ant", (2, 4, 6, 8), 5.0, True  # the lower legs


class HopperUni(UniTask):
    robot, feet, slowest = "hopper", (3,), 5.0


class Walker2dUni(UniTask):
    robot, feet, slowest = "walker2d", (3, 6), 5.0


class HumanoidOmni(OmniTask):
    robot, own_reach = "humanoid", 15.0


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
    if config.task not in TASKS:
        raise UserError(f"unknown task {config.task!r}; there are {', '.join(TASKS)}.")
    if config.length < 1:
        raise UserError(f"the episode length must be at least 1, not {config.length}.")
    if config.backend not in BACKENDS:
        raise UserError(f"unknown backend {config.backend!r}; there are {', '.join(BACKENDS)}.")
    if not 0 <= config.reach < math.inf:
        raise UserError(f"reach must not be negative nor infinite, it is {config.reach}.")
    return TASKS[config.task](config)


@functools.cache
def _brax_environment(robot: str, backend: str, lanes: bool) -> Any:
    with _quiet():
        import brax.envs
        import mujoco

        # Without this, MuJoCo's warnings leave a MUJOCO_LOG.TXT behind.
        silence: Any = vars(mujoco)["set_mju_user_warning"]
        silence(lambda text: None)
        with _on_own_device():
            env: Any = brax.envs.get_environment(robot, backend=backend)
    if lanes and backend == "spring" and jax.default_backend() == "cpu":
        env.pipeline_step = spring_step(env)
    return env


@contextlib.contextmanager
def _on_own_device() -> Iterator[None]:
    """MJX puts a robot on the first device of all, which may be another process's."""
    from mujoco import mjx

    put_model = mjx.put_model
    mjx.put_model = functools.partial(put_model, device=jax.local_devices()[0])
    try:
        yield
    finally:
        mjx.put_model = put_model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Importing brax and loading its robots print notices, some of them from C."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        kept = os.dup(1), os.dup(2)
        try:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)


def norm(x: Float[Array, " n"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.sum(x**2))


# --- one episode ----------------------------------------------------------------------------------


@runtime_checkable
class Policy(Protocol):
    """Whoever acts. `start` makes what it remembers; `act` may look at the whole state."""

    def start(self) -> Any: ...

    def act(self, memory: Any, state: State) -> tuple[Float[Array, " action"], Any]: ...


class Episodes(eqx.Module):
    """What came out. Leading axes: policies, episodes. Only what was asked for is recorded."""

    fitness: Float[Array, "*batch"]
    descriptor: Float[Array, "*batch descriptor"]
    diverged: Bool[Array, "*batch"]  # NaN or infinity was seen: fitness and descriptor mean nothing
    path: Float[Array, "*batch length descriptor"] | None = None  # descriptor over time
    observations: Float[Array, "*batch length_plus_1 observation"] | None = None
    actions: Float[Array, "*batch length action"] | None = None
    rewards: Float[Array, "*batch length"] | None = None


Record = Literal["outcome", "path", "transitions"]


def disturb(
    action: Float[Array, " action"],
    disturbance: float,
    key: Key[Array, ""],
    time: int | Int[Array, ""],
) -> Float[Array, " action"]:
    """The action with Gaussian noise of this size, drawn from the episode's key and the time step."""
    if not disturbance:
        return action
    noise = jax.random.normal(jax.random.fold_in(key, time), action.shape)
    return jnp.clip(action + disturbance * noise, -1.0, 1.0)


def play_episode(
    task: Task,
    policy: Policy,
    key: Key[Array, ""],
    record: Record = "outcome",
    disturbance: float = 0.0,
) -> Episodes:
    """Plays one episode from a random start.

    With a `disturbance`, Gaussian noise of that size is added to every action that is played, while
    the action that is recorded stays the policy's own: what it would do in states it seldom visits.
    """

    def step(carry: tuple, _: None) -> tuple[tuple, Any]:
        state, memory, fitness, finite = carry
        action, memory = policy.act(memory, state)
        action = jnp.clip(action, -1.0, 1.0)
        played = disturb(action, disturbance, key, state.time)
        after = task.step(state, played)
        fitness += after.reward
        finite &= jnp.isfinite(after.observation).all() & jnp.isfinite(after.reward)
        seen = {
            "outcome": None,
            "path": after.descriptor,
            "transitions": (after.descriptor, state.observation, action, after.reward),
        }[record]
        return (after, memory, fitness, finite), seen

    start = task.reset(key)
    carry = (start, policy.start(), jnp.zeros(()), jnp.array(True))
    (end, _, fitness, finite), seen = jax.lax.scan(step, carry, length=task.length)
    diverged = ~(finite & jnp.isfinite(end.descriptor).all())
    outcome = Episodes(fitness, end.descriptor, diverged)
    if record == "outcome":
        return outcome
    if record == "path":
        return Episodes(fitness, end.descriptor, diverged, seen)
    path, observations, actions, rewards = seen
    observations = jnp.concatenate([observations, end.observation[None]])
    return Episodes(fitness, end.descriptor, diverged, path, observations, actions, rewards)


# --- many episodes --------------------------------------------------------------------------------


def prepare_jax(cache: bool = True) -> None:
    """To be called before JAX computes anything: one CPU device per core, and a compilation cache."""
    on_linux = hasattr(os, "sched_getaffinity")  # it knows which cores this process may use
    cores = len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", cores)
    if cache:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "quality-diversity-transformer"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def join_cluster(coordinator: str = "", num_processes: int = 0, process_id: int = -1) -> None:
    """Makes this one of several processes, before JAX computes anything.

    Without a coordinator, JAX finds the cluster by itself (SLURM, TPU pods, ...).
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if coordinator:
            if not 0 <= process_id < num_processes:
                raise UserError("--coordinator needs --num-processes N and --process-id 0 ... N-1.")
            jax.distributed.initialize(coordinator, num_processes, process_id)
        else:
            jax.distributed.initialize()
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot join the cluster: {str(error).splitlines()[0]}") from None


@functools.cache
def devices() -> Mesh:
    """All devices of all processes, in one row."""
    return jax.make_mesh((jax.device_count(),), ("device",), axis_types=(AxisType.Auto,))


def replicate(tree: PyTree) -> PyTree:
    """Puts the same arrays on every device: state is identical everywhere, only work is divided."""
    everywhere = NamedSharding(devices(), PartitionSpec())
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, everywhere), rest)


VECTOR = 32  # numbers that a CPU core works on in one pass of a vectorised loop


def default_chunk() -> int:
    """Episodes at a time on a device, about: what fits in a CPU core's cache, or all elsewhere."""
    return 128 if jax.default_backend() == "cpu" else 1 << 30


def identity(member: Any) -> Any:
    return member


def rollout(
    task: Task,
    members: PyTree,
    keys: Key[Array, "policies episodes"],
    policy: Callable[[Any], Policy] = identity,
    record: Record = "outcome",
    chunk: int | None = None,
    disturbance: float = 0.0,
) -> Episodes:
    """Plays each of the stacked `members` once for each of its keys.

    `policy` makes a `Policy` of one member; by default the members are policies themselves. It may
    hold arrays that all share, such as the one Transformer behind many targets.

    A chunk is a few members with some of their episodes, so that a member's weights are read once for
    several episodes. Every device plays one chunk at a time; a row is a chunk for each. Memory does
    not grow with the number of policies and episodes unless they are recorded, and all rows have the
    same shape, whatever that number: the physics compiles once.
    """
    chunk = default_chunk() if chunk is None else chunk
    if chunk < 1:
        raise UserError(f"a chunk must hold at least one episode, not {chunk}.")
    policies, episodes = keys.shape
    deal = Deal.of(policies, episodes, chunk)
    rows = _deal_out(deal, members, keys)
    played = [_play_row(task, *row, policy, record, disturbance) for row in rows]
    return _collect(deal, played)


class Deal(eqx.Module):
    """How episodes are dealt out: groups of one member's episodes, chunks of groups, rows of chunks."""

    policies: int
    episodes: int
    together: int  # episodes in a group
    groups_per_member: int
    groups_per_row: int
    rows: int

    @staticmethod
    def of(policies: int, episodes: int, chunk: int) -> "Deal":
        # Whole vectors: 160 episodes are played half as fast again as 120, whose last 24 go one by one.
        together = min(episodes, chunk, VECTOR)
        groups_per_member = -(-episodes // together)
        groups = policies * groups_per_member
        fill = VECTOR // math.gcd(VECTOR, together)
        per_chunk = round(chunk // together / fill) * fill or chunk // together
        # With few groups a chunk is smaller than it could be, so that no device has nothing to do.
        per_chunk = min(per_chunk, -(-groups // devices().size))
        per_row = max(1, per_chunk) * devices().size
        return Deal(policies, episodes, together, groups_per_member, per_row, -(-groups // per_row))

    @property
    def groups(self) -> int:
        return self.policies * self.groups_per_member


def _sharded(tree: PyTree, *axes: str) -> PyTree:
    sharding = NamedSharding(devices(), PartitionSpec(*axes))
    return jax.tree.map(
        lambda x: jax.lax.with_sharding_constraint(x, sharding) if eqx.is_array(x) else x, tree
    )


@eqx.filter_jit
def _deal_out(deal: Deal, members: PyTree, keys: Key[Array, "p e"]) -> list[tuple[PyTree, Array]]:
    """The members and keys of each row. What does not fill a row is filled up with the last group."""
    episode = jnp.minimum(jnp.arange(deal.groups_per_member * deal.together), deal.episodes - 1)
    keys = keys[:, episode].reshape(deal.groups, deal.together)
    group = jnp.minimum(jnp.arange(deal.rows * deal.groups_per_row), deal.groups - 1)
    rows = []
    for row in group.reshape(deal.rows, deal.groups_per_row):
        owner = row // deal.groups_per_member
        chosen = jax.tree.map(lambda x, o=owner: x[o] if eqx.is_array(x) else x, members)
        rows.append(_sharded((chosen, keys[row]), "device"))
    return rows


@eqx.filter_jit
def _play_row(
    task: Task,
    members: PyTree,
    keys: Key[Array, "groups together"],
    policy: Callable[[Any], Policy],
    record: Record,
    disturbance: float,
) -> Episodes:
    """Plays a chunk on every device."""
    members, rest = eqx.partition(members, eqx.is_array)
    shared, shared_rest = eqx.partition(policy, eqx.is_array)

    def play_chunk(members: PyTree, keys: Array, shared: PyTree) -> Episodes:
        make = eqx.combine(shared, shared_rest)

        def play_group(member: PyTree, keys: Array) -> Episodes:
            actor = make(eqx.combine(member, rest))
            return jax.vmap(lambda k: play_episode(task, actor, k, record, disturbance))(keys)

        return jax.vmap(play_group)(members, keys)

    divided = PartitionSpec("device")
    return jax.shard_map(
        play_chunk,
        mesh=devices(),
        in_specs=(divided, divided, PartitionSpec()),
        out_specs=divided,
        check_vma=False,
    )(members, keys, shared)


@eqx.filter_jit
def _collect(deal: Deal, rows: list[Episodes]) -> Episodes:
    """Puts rows together in the order of the keys, the same on every device; drops the filling."""

    def join(*parts: Array) -> Array:
        x = jnp.concatenate(parts)[: deal.groups]
        x = x.reshape(deal.policies, deal.groups_per_member * deal.together, *x.shape[2:])
        return x[:, : deal.episodes]

    return jax.tree.map(join, *_sharded(rows))
