"""Tasks recomputed by hand, and an engine whose results depend on the keys alone.

Rewards and descriptors of the brax tasks are recomputed in NumPy from the recorded positions of the
robot. Compiling brax is slow, so each task is compiled once, and episodes are short.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from envs import Episodes, State, Task, TaskConfig, make_task, rollout
from machinery import machine
from machinery.config import make_config
from machinery.engine import Schedule
from machinery.files import UserError
from me_ls import MLP, random_policies

LENGTH = 20


def policies_for(task: Task, count: int, seed: int = 0) -> MLP:
    """Random policies that act strongly enough to lift a foot within a few steps."""
    policies = random_policies(task, (8,), jax.random.split(jax.random.key(seed), count))
    return jax.tree.map(lambda x: 3 * x, policies)


def keys_for(policies: int, episodes: int, seed: int = 1) -> jax.Array:
    return jax.random.split(jax.random.key(seed), (policies, episodes))


def member(policies: MLP, i: int) -> MLP:
    return jax.tree.map(lambda x: x[i], policies)


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- episodes played by a plain loop --------------------------------------------------------------


class ByHand(NamedTuple):
    """Some episodes: what the engine says, and every state of a loop of `task.step`."""

    task: Task
    engine: Episodes  # policies × episodes
    states: dict[tuple[int, int], list[State]]
    actions: dict[tuple[int, int], list[np.ndarray]]


def play_by_hand(name: str, policies: int = 2, episodes: int = 2) -> ByHand:
    # brax's own robots: rounding grows slowly on them; `test_lanes.py` and `test_robots.py` have the others
    task = make_task(TaskConfig(name, LENGTH, robot="brax"))
    population, keys = policies_for(task, policies), keys_for(policies, episodes)
    engine = rollout(task, population, keys, record=envs.transitions)
    reset, step, act = jax.jit(task.reset), jax.jit(task.step), jax.jit(lambda p, o: p(o))
    states, actions = {}, {}
    for i, e in np.ndindex(policies, episodes):
        start_key, _ = jax.random.split(keys[i, e])  # the other one is for noise
        states[i, e], actions[i, e] = [reset(start_key)], []
        for _ in range(LENGTH):
            action = act(member(population, i), states[i, e][-1].observation)
            actions[i, e].append(np.asarray(action))
            states[i, e].append(step(states[i, e][-1], action))
    return ByHand(task, engine, states, actions)


@pytest.fixture(scope="module")
def point_by_hand() -> ByHand:
    return play_by_hand("point-omni", 3, 3)


@pytest.fixture(scope="module")
def ant() -> ByHand:
    return play_by_hand("ant-omni")


@pytest.fixture(scope="module")
def halfcheetah() -> ByHand:
    return play_by_hand("halfcheetah-uni")


@pytest.mark.parametrize("name", ["point_by_hand", "ant", "halfcheetah"])
def test_the_engine_does_what_a_plain_loop_does(name: str, request: Any) -> None:
    """Up to rounding, which contacts with the ground amplify: the first five steps are compared."""
    played: ByHand = request.getfixturevalue(name)
    steps, close = (LENGTH, 1e-5) if name == "point_by_hand" else (5, 2e-3)
    for (i, e), states in played.states.items():
        found = jax.tree.map(lambda x: x[i, e], played.engine)  # noqa: B023 - used at once
        seen, nothing_done = found.recorded, np.zeros(played.task.action_size)
        for engine, plain in (
            (seen.observations, [s.observation for s in states]),
            (seen.actions, [*played.actions[i, e], nothing_done]),
            (seen.rewards, [s.reward for s in states]),
            (seen.path, [s.descriptor for s in states]),
        ):
            compared = slice(0, steps + 1)
            np.testing.assert_allclose(engine[compared], np.array(plain)[compared], close, close)
            assert len(engine) == len(plain) == LENGTH + 1
        assert not seen.actions[-1].any() and seen.rewards[0] == 0
        np.testing.assert_array_equal(found.descriptor, seen.path[-1])
        np.testing.assert_allclose(found.fitness, seen.rewards.sum(), rtol=1e-5)
        assert not found.diverged
        assert [int(s.time) for s in states] == list(range(LENGTH + 1))


# --- rewards and descriptors in NumPy -------------------------------------------------------------


def positions(states: list[State]) -> np.ndarray:
    """Where the links were: time × links × 3."""
    return np.array([s.physics.pipeline_state.x.pos for s in states], np.float64)


def rotations(states: list[State]) -> np.ndarray:
    return np.array([s.physics.pipeline_state.x.rot for s in states], np.float64)


def effort(actions: list[np.ndarray]) -> np.ndarray:
    return np.sqrt((np.array(actions, np.float64) ** 2).sum(axis=1))


def test_the_ant_pays_for_effort_and_ends_where_its_torso_is(ant: ByHand) -> None:
    for episode, states in ant.states.items():
        torso = positions(states)[1:, 0, :2]
        rewards = [s.reward for s in states[1:]]
        np.testing.assert_allclose(rewards, -effort(ant.actions[episode]), rtol=1e-5)
        np.testing.assert_allclose([s.descriptor for s in states[1:]], torso, rtol=1e-6)
        assert np.abs(torso[-1] - torso[0]).max() > 0.01  # it did move


def test_the_descriptor_of_the_ant_is_clipped_to_its_bounds(ant: ByHand) -> None:
    assert ant.task.low == (-15.0, -15.0)
    assert ant.task.high == (15.0, 15.0)
    state = ant.states[0, 0][-1]
    far = state.physics.pipeline_state.x.pos.at[0, :2].set(jnp.array([99.0, -99.0]))
    pipeline = eqx.tree_at(lambda p: p.x.pos, state.physics.pipeline_state, far)
    found = ant.task.describe(pipeline, state.descriptor, state.time)
    assert found.tolist() == [15.0, -15.0]


def rotated(quaternion: np.ndarray, vector: np.ndarray) -> np.ndarray:
    w, axis = quaternion[0], quaternion[1:]
    return vector + 2 * np.cross(axis, np.cross(axis, vector) + w * vector)


def product(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    vector = p[0] * q[1:] + q[0] * p[1:] + np.cross(p[1:], q[1:])
    return np.concatenate([[p[0] * q[0] - p[1:] @ q[1:]], vector])


def height_over_ground(system: Any, geom: int, position: Any, rotation: Any) -> float:
    """Of the lowest point of a capsule, given its link's place: negative is in the ground."""
    radius, half_length, _ = np.asarray(system.geom_size[geom], np.float64)
    centre = position + rotated(rotation, np.asarray(system.geom_pos[geom], np.float64))
    turned = product(rotation, np.asarray(system.geom_quat[geom], np.float64))
    axis = rotated(turned, np.array([0.0, 0.0, half_length]))
    return min(centre[2] + axis[2], centre[2] - axis[2]) - radius


def test_the_halfcheetah_is_paid_for_speed_and_pays_for_effort(halfcheetah: ByHand) -> None:
    system = halfcheetah.task.env.sys
    dt = float(system.opt.timestep) * halfcheetah.task.env._n_frames
    assert halfcheetah.task.dt == pytest.approx(dt)
    for episode, states in halfcheetah.states.items():
        speed = np.diff(positions(states)[:, 0, 0]) / dt
        wanted = speed - effort(halfcheetah.actions[episode])
        np.testing.assert_allclose([s.reward for s in states[1:]], wanted, rtol=1e-4, atol=1e-4)
        assert np.abs(speed).max() > 0.1  # it did move


def test_the_descriptor_of_the_halfcheetah_is_how_long_each_foot_touches_the_ground(
    halfcheetah: ByHand,
) -> None:
    system = halfcheetah.task.env.sys
    assert [system.link_names[i] for i in halfcheetah.task.feet] == ["bfoot", "ffoot"]
    capsule = 3  # MuJoCo's number for this shape
    seen = set()
    for states in halfcheetah.states.values():
        position, rotation = positions(states)[1:], rotations(states)[1:]
        touched = np.zeros((LENGTH, 2))
        for foot, link in enumerate(halfcheetah.task.feet):
            [geom] = np.flatnonzero(system.geom_bodyid == link + 1)  # body 0 is the world
            assert system.geom_type[geom] == capsule
            for t in range(LENGTH):
                height = height_over_ground(system, geom, position[t, link], rotation[t, link])
                assert abs(height) > 1e-6, "too close to tell in single precision"
                touched[t, foot] = height < 0
        share = touched.cumsum(axis=0) / np.arange(1, LENGTH + 1)[:, None]
        np.testing.assert_allclose([s.descriptor for s in states[1:]], share, atol=1e-6)
        seen |= set(touched.flat)
    assert seen == {0.0, 1.0}


def test_the_point_moves_as_its_equations_say(point_by_hand: ByHand) -> None:
    for episode, states in point_by_hand.states.items():
        position, velocity = (np.array(x, np.float64) for x in states[0].physics)
        for action, state in zip(point_by_hand.actions[episode], states[1:], strict=True):
            velocity += 0.1 * (action - velocity)
            position += 0.1 * velocity
            np.testing.assert_allclose(state.observation, [*velocity, 1], atol=1e-5)
            np.testing.assert_allclose(state.descriptor, position, atol=1e-5)
            assert state.reward == pytest.approx(-np.linalg.norm(action), rel=1e-5)


def test_every_start_is_different_and_no_observation_tells_where_it_is(ant: ByHand) -> None:
    starts = np.array([states[0].observation for states in ant.states.values()])
    assert len(np.unique(starts, axis=0)) == len(starts)
    assert ant.task.observation_size == starts.shape[1] == 27
    state = ant.states[0, 0][0].physics.pipeline_state
    moved = eqx.tree_at(lambda p: p.q, state, state.q.at[:2].add(5.0))
    assert (ant.task.env._get_obs(moved) == ant.task.env._get_obs(state)).all()


@pytest.mark.parametrize("name", sorted(envs.TASKS))
def test_a_task_says_what_it_is(name: str) -> None:
    task = make_task(TaskConfig(name, LENGTH))
    start = jax.eval_shape(task.reset, jax.random.key(0))
    after = jax.eval_shape(task.step, start, jnp.zeros(task.action_size))
    assert start.observation.shape == after.observation.shape == (task.observation_size,)
    assert start.descriptor.shape == after.descriptor.shape == (task.descriptor_size,)
    assert jax.tree.structure(start) == jax.tree.structure(after)
    assert len(task.low) == len(task.high) == task.descriptor_size
    assert all(low < high for low, high in zip(task.low, task.high, strict=True))
    assert len(task.axes) == task.descriptor_size
    assert task.unit
    assert task.worst_reward < 0 < task.dt


# --- chunks and devices ---------------------------------------------------------------------------


SIZES = ((1, 1), (5, 3), (3, 7))  # policies, episodes: few of them fill their chunks
CHUNKS = (1, 4, 64)
OUTCOMES = ("fitness", "descriptor")
PLAY = """
import sys
import jax, numpy as np
import envs
from machinery import machine
machine.prepare_jax()
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
from me_ls import random_policies

def play(name, policies, episodes, chunk):
    task = envs.make_task(envs.TaskConfig(name, 20, robot="brax"))
    population = random_policies(task, (8,), jax.random.split(jax.random.key(0), policies))
    keys = jax.random.split(jax.random.key(1), (policies, episodes))
    return envs.rollout(task, population, keys, chunk=chunk)

found = {}
for work in sys.argv[3:]:
    name, *sizes = work.split()
    played = play(name, *map(int, sizes))
    found |= {f"{work} fitness": played.fitness, f"{work} descriptor": played.descriptor}
np.savez(sys.argv[2], **found)
"""


@pytest.fixture(scope="module")
def across_devices(run_python: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The same episodes in processes with 1, 2 and 4 devices."""
    point = [f"point-omni {p} {e} {chunk}" for p, e in SIZES for chunk in CHUNKS]
    brax = {1: ["ant-omni 3 3 4"], 4: ["ant-omni 3 3 4", "ant-omni 3 3 2"]}
    found = {}
    for devices in (1, 2, 4):
        file = tmp_path_factory.mktemp("devices") / "played.npz"
        run_python(PLAY, devices, file, *point, *brax.get(devices, []))
        found[devices] = np.load(file)
    return found


@pytest.mark.parametrize("devices", [2, 4])
def test_results_do_not_depend_on_devices(across_devices: dict[int, Any], devices: int) -> None:
    """Bit for bit where the chunks are full, up to the last digits where there is too little to play."""
    one, many = across_devices[1], across_devices[devices]
    shared = set(one) & set(many)
    assert len(shared) >= 2 * len(SIZES) * len(CHUNKS)
    for name in shared:
        if name.split()[3] == str(CHUNKS[-1]):
            np.testing.assert_allclose(many[name], one[name], rtol=1e-5, atol=1e-6)
        else:
            assert one[name].tobytes() == many[name].tobytes()


@pytest.mark.parametrize("policies, episodes", SIZES)
def test_results_do_not_depend_on_chunks(
    across_devices: dict[int, Any], policies: int, episodes: int
) -> None:
    """Up to the last digits, which the compiler may round differently."""
    for outcome in OUTCOMES:
        first, *others = (
            across_devices[4][f"point-omni {policies} {episodes} {chunk} {outcome}"]
            for chunk in CHUNKS
        )
        assert first.shape[:2] == (policies, episodes)
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-6)


def test_short_brax_episodes_do_not_depend_on_chunks(across_devices: dict[int, Any]) -> None:
    """Contacts amplify rounding, so that long episodes part in the end."""
    four, two = ({o: across_devices[4][f"ant-omni 3 3 {c} {o}"] for o in OUTCOMES} for c in (4, 2))
    np.testing.assert_allclose(four["fitness"], two["fitness"], atol=0.05)
    np.testing.assert_allclose(four["descriptor"], two["descriptor"], atol=1.5 / LENGTH)


def test_each_policy_is_played_with_its_own_keys(point: Task) -> None:
    population, keys = policies_for(point, 5), keys_for(5, 3)
    together = rollout(point, population, keys, chunk=4)
    for i in range(5):
        one = jax.tree.map(lambda x: x[i : i + 1], population)  # noqa: B023 - used at once
        alone = rollout(point, one, keys[i : i + 1], chunk=4)
        np.testing.assert_allclose(alone.descriptor[0], together.descriptor[i], atol=1e-6)
        np.testing.assert_allclose(alone.fitness[0], together.fitness[i], rtol=1e-5)
    assert len(np.unique(together.fitness)) == 15


def test_members_need_not_be_policies_themselves(point: Task) -> None:
    """One network behind many targets, as the QDT is: here, a push in a given direction."""

    class Push(eqx.Module):
        direction: jax.Array

        def start(self) -> None:
            return None

        def act(self, memory: None, state: State) -> tuple[jax.Array, None]:
            return self.direction, memory

    directions = jnp.array([[1.0, 0.0], [0.0, -1.0]])
    path = rollout(point, directions, keys_for(2, 8), policy=Push, record=envs.path).recorded
    moved = path[:, :, -1] - path[:, :, 0]
    assert (moved[0, :, 0] > 0).all()
    assert (moved[1, :, 1] < 0).all()


# --- what is recorded -----------------------------------------------------------------------------


def test_what_is_recorded_does_not_change_what_is_played(point: Task) -> None:
    population, keys = policies_for(point, 3), keys_for(3, 2)
    outcome, path, transitions = (
        rollout(point, population, keys, record=r)
        for r in (envs.nothing, envs.path, envs.transitions)
    )
    assert outcome.recorded is None
    assert path.recorded.shape == (3, 2, LENGTH + 1, 2)
    assert {name: x.shape for name, x in vars(transitions.recorded).items()} == {
        "observations": (3, 2, LENGTH + 1, 3),
        "actions": (3, 2, LENGTH + 1, 2),
        "rewards": (3, 2, LENGTH + 1),
        "path": (3, 2, LENGTH + 1, 2),
    }
    for other in (path, transitions):
        np.testing.assert_allclose(other.fitness, outcome.fitness, rtol=1e-6)
        np.testing.assert_allclose(other.descriptor, outcome.descriptor, atol=1e-6)
    np.testing.assert_allclose(transitions.recorded.path, path.recorded, atol=1e-6)


def test_whatever_a_function_of_state_and_action_returns_is_recorded(point: Task) -> None:
    def record(state: State, action: jax.Array) -> dict[str, Any]:
        return {"time": state.time, "both": (state.observation, action)}

    population, keys = policies_for(point, 3), keys_for(3, 2)
    found = rollout(point, population, keys, record=record).recorded
    wanted = rollout(point, population, keys, record=envs.transitions).recorded
    assert (found["time"] == jnp.arange(LENGTH + 1)).all()  # a row per state, the start included
    np.testing.assert_allclose(found["both"][0], wanted.observations, atol=1e-6)
    np.testing.assert_allclose(found["both"][1], wanted.actions, atol=1e-6)
    for i in range(3):
        seen = wanted.observations[i, :, :-1].reshape(-1, 3)
        own = jax.vmap(member(population, i))(seen).reshape(2, LENGTH, 2)
        np.testing.assert_allclose(wanted.actions[i, :, :-1], own, atol=1e-5)
    assert not wanted.actions[:, :, -1].any()  # nothing is done in the last state


def test_noise_is_played_but_not_recorded(point: Task) -> None:
    population, keys = policies_for(point, 2), keys_for(2, 2)
    clean = rollout(point, population, keys, record=envs.transitions).recorded
    noisy = rollout(point, population, keys, record=envs.transitions, action_noise=0.3).recorded
    np.testing.assert_array_equal(clean.observations[:, :, 0], noisy.observations[:, :, 0])
    assert (jnp.abs(clean.path - noisy.path).max(axis=(2, 3)) > 1e-3).all()
    for i, e in np.ndindex(2, 2):
        seen = noisy.observations[i, e]
        own = jax.vmap(member(population, i))(seen[:-1])
        speed = seen[:, :2]
        np.testing.assert_allclose(noisy.actions[i, e, :-1], own, atol=1e-5)
        # The point's equation, solved for a.
        played = speed[:-1] + (speed[1:] - speed[:-1]) / point.dt
        noise = np.asarray(played - own)
        assert 0.1 < noise.std() < 0.5
        effort = np.linalg.norm(played, axis=1)
        np.testing.assert_allclose(noisy.rewards[i, e, 1:], -effort, rtol=1e-3, atol=1e-4)


def test_noise_has_its_size_and_differs_at_every_step_and_in_every_episode() -> None:
    keys, still = jax.random.split(jax.random.key(0), 50), jnp.zeros(4)
    noise = jax.vmap(
        lambda key: jax.vmap(lambda t: envs.with_noise(still, 0.1, key, t))(jnp.arange(100))
    )(keys)
    assert noise.std() == pytest.approx(0.1, rel=0.02)
    assert noise.mean() == pytest.approx(0, abs=0.003)
    assert len(np.unique(noise.reshape(-1, 4), axis=0)) == 50 * 100
    np.testing.assert_array_equal(envs.with_noise(still, 0.0, keys[0], 3), still)


def test_actions_are_played_within_their_limits(point: Task) -> None:
    class Strong(eqx.Module):
        strength: jax.Array

        def start(self) -> None:
            return None

        def act(self, memory: None, state: State) -> tuple[jax.Array, None]:
            return jnp.full(2, self.strength), memory

    strong = Strong(jnp.array([5.0]))
    seen = rollout(point, strong, keys_for(1, 1), record=envs.transitions).recorded
    assert (seen.actions[:, :, :-1] == 1).all()
    np.testing.assert_allclose(seen.rewards[:, :, 1:], -np.sqrt(2), rtol=1e-6)


def test_a_chunk_holds_no_more_members_than_a_core_reads_again_at_every_step() -> None:
    def at_once(members: int, episodes: int, most: int) -> int:
        batch = Schedule.of(members, episodes, chunk=128, most=most).groups_per_batch
        return batch // machine.devices().size

    assert at_once(1000, 1, most=1000) == 128
    assert at_once(1000, 1, most=70) == 64
    assert at_once(1000, 1, most=3) == 32  # fewer would not fill a vector
    assert at_once(100, 10, most=34) == at_once(100, 10, most=100) == 16


# --- divergence -----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_policy_that_diverges_is_flagged_and_leaves_its_neighbours_alone(
    point: Task, poison: float
) -> None:
    healthy, keys = policies_for(point, 5), keys_for(5, 3)
    # With the signs that they have, infinite weights cancel out to no number, whatever is seen.
    sick = jax.tree.map(lambda x: x.at[2].set(jnp.copysign(poison, x[2])), healthy)
    wanted, found = (rollout(point, p, keys, chunk=8) for p in (healthy, sick))
    assert found.diverged.tolist() == [[i == 2] * 3 for i in range(5)]
    others = jnp.array([0, 1, 3, 4])
    assert_same_bits(*(jax.tree.map(lambda x: x[others], p) for p in (wanted, found)))


def test_a_robot_that_diverges_is_flagged(halfcheetah: ByHand) -> None:
    sick = jax.tree.map(lambda x: x.at[1].set(jnp.nan), policies_for(halfcheetah.task, 2))
    found = rollout(halfcheetah.task, sick, keys_for(2, 2), record=envs.transitions)
    assert found.diverged.tolist() == [[False, False], [True, True]]
    assert_same_bits(found.fitness[0], halfcheetah.engine.fitness[0])


# --- what cannot work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, sentence",
    [
        ({"task": "ant-olympics"}, "unknown task 'ant-olympics'; there are .*ant-omni"),
        ({"length": 0}, "length must be at least 1, it is 0"),
        ({"length": -250}, "length must be at least 1, it is -250"),
        ({"task": "ant-omni", "backend": "newton"}, "backend must be one of spring.* not 'newton'"),
        ({"task": "ant-omni", "reach": -1.0}, "reach must"),
        ({"reach": 0.0}, "reach must"),
        ({"reach": float("nan")}, "reach must"),
        ({"reach": float("inf")}, "reach must"),
        ({"task": "halfcheetah-uni", "reach": 2.0}, "reach is a setting of the omni tasks"),
    ],
    ids=str,
)
def test_a_task_that_cannot_be_is_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        make_task(make_config(TaskConfig, {"task": "point-omni"} | config))
    assert "\n" not in str(caught.value)


def test_without_a_reach_a_task_has_its_own() -> None:
    own, given = (make_task(TaskConfig("point-omni", LENGTH, reach=r)) for r in (None, 0.5))
    assert own.low == (-3.0, -3.0)
    assert given.low == (-0.5, -0.5)


def test_the_point_lies_on_the_ground() -> None:
    task = make_task(TaskConfig("point-omni", LENGTH, reach=2.0))
    _, ball = task.scene().geoms
    (place,), _ = task.pose(task.reset(jax.random.key(0)))
    assert float(place[2]) + ball.position[2] == pytest.approx(ball.size[0])


@pytest.mark.parametrize("chunk", [0, -64])
def test_a_chunk_without_episodes_is_one_sentence(point: Task, chunk: int) -> None:
    with pytest.raises(UserError, match="chunk must hold at least one episode"):
        rollout(point, policies_for(point, 2), keys_for(2, 2), chunk=chunk)


def test_the_same_config_is_the_same_task() -> None:
    assert make_task(TaskConfig("point-omni", 20)) is make_task(TaskConfig("point-omni", 20))
