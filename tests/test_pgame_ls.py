"""TD3 against plain NumPy, the replay buffer's corner cases, and the search that is built on them."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
import me_ls
import pgame_ls
from envs import Episodes, PointOmni, State, TaskConfig, Transitions, transitions
from machinery import machine
from machinery.driver import drive
from machinery.files import UserError
from machinery.machine import replicate
from machinery.runs import Stage
from machinery.streams import stream
from pgame_ls import PGAME, PGAMEConfig, PGAMEState, Transition

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def config() -> PGAMEConfig:
    """Eight iterations on the `point` of conftest.py, small in everything."""
    return PGAMEConfig(
        steps=8 * 12 * 3 * 20,
        cells=16,
        batch=12,
        episodes=3,
        hidden=(8,),
        critic_hidden=(12, 10),
        critic_steps=5,
        policy_steps=4,
        td3_batch=16,
        replay=1500,
    )


# --- plain NumPy ----------------------------------------------------------------------------------


def forward(network, x: np.ndarray) -> np.ndarray:
    """What goes into the last activation, for the rows of x."""
    *hidden, last = [(np.asarray(y.weight), np.asarray(y.bias)) for y in network.layers]
    for weight, bias in hidden:
        x = np.maximum(x @ weight.T + bias, 0)
    return x @ last[0].T + last[1]


def act(policy, s: np.ndarray) -> np.ndarray:
    return np.tanh(forward(policy, s))


def value(critic, s: np.ndarray, a: np.ndarray) -> np.ndarray:
    return forward(critic, np.concatenate([s, a], axis=1))[:, 0]


def pair(critics: pgame_ls.Critic) -> list[pgame_ls.Critic]:
    return [jax.tree.map(lambda x, i=i: x[i], critics) for i in (0, 1)]


def some_td3(task: envs.Task, config: PGAMEConfig, seed: int = 0) -> pgame_ls.TD3:
    """All networks different from each other, and wide enough for clipping to happen."""
    td3 = pgame_ls.first_td3(task, config, key=jax.random.key(seed))
    other = pgame_ls.first_td3(task, config, key=jax.random.key(seed + 1))
    different = jax.tree.map(lambda x: 2 * x, (other.actor, other.critics))
    return eqx.tree_at(lambda x: (x.target_actor, x.target_critics), td3, different)


def some_batch(task: envs.Task, count: int = 32, seed: int = 2) -> Transition:
    draw = np.random.default_rng(seed).normal
    seen, done = task.observation_size, task.action_size
    arrays = draw(size=(count, seen)), draw(size=(count, done)), draw(size=count)
    return Transition(*(jnp.array(x, jnp.float32) for x in (*arrays, draw(size=(count, seen)))))


def some_noise(batch: Transition) -> jax.Array:
    return 3 * jax.random.normal(jax.random.key(5), batch.action.shape)  # often beyond the clip


# --- TD3 ------------------------------------------------------------------------------------------


def test_the_target_is_that_of_the_td3_paper(point, config):
    config = dataclasses.replace(config, reward_scale=0.7, discount=0.9)
    td3, batch = some_td3(point, config), some_batch(point)
    noise = some_noise(batch)

    after = np.asarray(batch.next_observation)
    epsilon = np.clip(0.2 * np.asarray(noise), -0.5, 0.5)
    action = np.clip(act(td3.target_actor, after) + epsilon, -1, 1)
    assert (np.abs(epsilon) == 0.5).any() and (np.abs(action) == 1).any()
    lower = np.minimum(*(value(q, after, action) for q in pair(td3.target_critics)))
    expected = 0.7 * np.asarray(batch.reward) + 0.9 * lower

    found = jax.vmap(lambda t, n: pgame_ls.target(config, td3, t, n))(batch, noise)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_losses_are_those_of_the_td3_paper(point, config):
    td3, batch = some_td3(point, config), some_batch(point)
    s, a = np.asarray(batch.observation), np.asarray(batch.action)
    y = np.random.default_rng(0).normal(size=len(s)).astype(np.float32)

    errors = [np.mean((value(q, s, a) - y) ** 2) for q in pair(td3.critics)]
    found = pgame_ls.critic_loss(td3.critics, batch, jnp.array(y))
    np.testing.assert_allclose(found, sum(errors), rtol=1e-5)

    expected = -np.mean(value(pair(td3.critics)[0], s, act(td3.actor, s)))
    found = pgame_ls.actor_loss(td3.actor, pair(td3.critics)[0], batch.observation)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_gradient_of_the_actor_is_the_deterministic_policy_gradient(point, config):
    """The chain rule of dQ/da and da/dθ, here for the last bias: dQ/da · (1 − a²), by differences."""
    td3, batch = some_td3(point, config), some_batch(point)
    s = np.asarray(batch.observation, np.float64)
    a, step = act(td3.actor, s), 1e-5
    expected = []
    for i in range(a.shape[1]):
        along = step * np.eye(a.shape[1])[i]
        slope = value(pair(td3.critics)[0], s, a + along) - value(
            pair(td3.critics)[0], s, a - along
        )
        expected.append(-np.mean(slope / (2 * step) * (1 - a[:, i] ** 2)))
    gradient = jax.grad(pgame_ls.actor_loss)(td3.actor, pair(td3.critics)[0], batch.observation)
    np.testing.assert_allclose(gradient.layers[-1].bias, expected, rtol=1e-3, atol=1e-5)


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def test_actor_and_targets_wait_for_every_second_step(point, config):
    td3, batch = some_td3(point, config), some_batch(point)
    once, _ = pgame_ls.train_step(config, td3, batch, some_noise(batch))
    assert not same(once.critics, td3.critics)
    for waits in ("actor", "target_actor", "target_critics", "actor_optimiser"):
        assert same(getattr(once, waits), getattr(td3, waits))
    twice, _ = pgame_ls.train_step(config, once, batch, some_noise(batch))
    for moves in ("actor", "target_actor", "target_critics", "actor_optimiser"):
        assert not same(getattr(twice, moves), getattr(once, moves))
    # An odd number of steps per iteration does not shift the rhythm: the steps are counted on.
    assert int(twice.steps) == 2


def test_targets_move_by_exactly_the_soft_update(point, config):
    config = dataclasses.replace(config, policy_delay=1)
    before, batch = some_td3(point, config), some_batch(point)
    after, _ = pgame_ls.train_step(config, before, batch, some_noise(batch))
    old = (before.target_actor, before.target_critics)
    trained, new = (after.actor, after.critics), (after.target_actor, after.target_critics)
    expected = jax.tree.map(
        lambda o, t: np.float32(0.995) * o + np.float32(0.005) * t, old, trained
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), new, expected)


def test_the_critics_take_adams_first_step(point, config):
    """Adam's first step is the learning rate times the sign of the gradient."""
    td3, batch = some_td3(point, config), some_batch(point)
    noise = some_noise(batch)
    y = jax.vmap(lambda t, n: pgame_ls.target(config, td3, t, n))(batch, noise)
    gradient = jax.grad(pgame_ls.critic_loss)(td3.critics, batch, y)
    once, loss = pgame_ls.train_step(config, td3, batch, noise)
    assert loss == pytest.approx(float(pgame_ls.critic_loss(td3.critics, batch, y)), rel=1e-5)

    def check(old, new, slope):
        clear = np.abs(slope) > 1e-4
        expected = -config.critic_rate * np.sign(slope)
        np.testing.assert_allclose((new - old)[clear], expected[clear], rtol=2e-2)

    jax.tree.map(check, td3.critics, once.critics, gradient)


class Steady(PointOmni):
    """A reward of 1 for each step, whatever one does."""

    def step(self, state: State, action: jax.Array) -> State:
        after = super().step(state, action)
        return eqx.tree_at(lambda x: x.reward, after, jnp.ones(()))


def test_bootstrapping_goes_through_the_time_limit():
    """Worth 1/(1 − γ) = 5 everywhere; if the end of the 4 steps counted, it would be 1 to 2.95."""
    task = Steady(TaskConfig("point-omni", length=4))
    config = PGAMEConfig(
        batch=8, hidden=(8,), critic_hidden=(16,), discount=0.8, td3_batch=32, replay=256,
        critic_steps=1000, critic_rate=0.01, soft_update=0.1,
    )  # fmt: skip
    state = PGAME(task, config).init(jax.random.key(0))
    policies = me_ls.random_policies(task, config.hidden, jax.random.split(jax.random.key(1), 8))
    keys = jax.random.split(jax.random.key(2), (8, 8))
    episodes = envs.rollout(task, policies, keys, record=transitions)
    replay = pgame_ls.remember(state.replay, episodes)
    td3, _ = pgame_ls.train(config, state.td3, replay, key=jax.random.key(3))
    worth = jax.vmap(jax.vmap(pgame_ls.first_of(td3.critics)))
    seen = episodes.recorded
    last = worth(seen.observations[:, :, -2], seen.actions[:, :, -2])
    np.testing.assert_allclose(last, 5, atol=0.3)


# --- the replay buffer ----------------------------------------------------------------------------


SHORT = PointOmni(TaskConfig("point-omni", length=3))


def numbered_episodes(first: int, policies: int, episodes: int) -> Episodes:
    """Episode n (in the order of writing) has n in every reward, and n + time/100 as observation.

    An action is the negative of its observation. What leads to the first state and what is done in the
    last one is no number: neither belongs to a transition.
    """
    n = first + np.arange(episodes)[None] * policies + np.arange(policies)[:, None]
    over_time = (n[..., None] + np.arange(SHORT.length + 1) / 100).astype(np.float32)
    seen = over_time[..., None].repeat(SHORT.observation_size, axis=-1)
    actions = -over_time[..., None].repeat(SHORT.action_size, axis=-1)
    actions[:, :, -1] = np.nan
    rewards = n[..., None].repeat(SHORT.length + 1, axis=-1).astype(np.float32)
    rewards[:, :, 0] = np.nan
    path = np.zeros((*over_time.shape, 2), np.float32)
    return Episodes(
        fitness=jnp.zeros(n.shape),
        descriptor=jnp.zeros((*n.shape, 2)),
        diverged=jnp.zeros(n.shape, bool),
        recorded=Transitions(*map(jnp.asarray, (seen, actions, rewards, path))),
    )


def small_replay(episodes: int) -> pgame_ls.Replay:
    return pgame_ls.empty_replay(SHORT, SHORT.length * episodes)


def inside(replay: pgame_ls.Replay) -> set[float]:
    assert (np.asarray(replay.rewards) == np.asarray(replay.rewards)[:, :1]).all()
    first = np.asarray(replay.observations)[:, 0, 0]
    size = int(replay.size)
    assert (first[:size] == np.asarray(replay.rewards)[:size, 0]).all()
    return set(np.asarray(replay.rewards)[:size, 0].tolist())


def test_the_newest_episodes_replace_the_oldest():
    replay = small_replay(5)
    replay = pgame_ls.remember(replay, numbered_episodes(1, 3, 1))
    assert inside(replay) == {1, 2, 3} and int(replay.size) == 3
    replay = pgame_ls.remember(replay, numbered_episodes(4, 2, 2))
    assert inside(replay) == {3, 4, 5, 6, 7} and int(replay.size) == 5


def test_of_more_episodes_than_fit_every_policy_keeps_its_last_ones():
    replay = pgame_ls.remember(small_replay(8), numbered_episodes(1, 4, 6))
    assert inside(replay) == set(range(17, 25))  # episodes 5 and 6 of each of the 4 policies
    replay = pgame_ls.remember(replay, numbered_episodes(25, 1, 1))
    assert inside(replay) == set(range(18, 26))


def test_a_diverged_episode_leaves_no_trace():
    episodes = numbered_episodes(1, 3, 2)
    bad = episodes.diverged.at[1, 0].set(True)
    poisoned = episodes.recorded.observations.at[1, 0].set(jnp.nan)
    spoilt = eqx.tree_at(lambda x: (x.diverged, x.recorded.observations), episodes, (bad, poisoned))
    replay = pgame_ls.remember(small_replay(10), spoilt)
    assert inside(replay) == {1, 3, 4, 5, 6} and int(replay.position) == 5
    everything = pgame_ls.sample(replay, 500, key=jax.random.key(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(everything))


def test_a_transition_is_followed_by_the_next_observation_also_at_the_end():
    replay = pgame_ls.remember(small_replay(10), numbered_episodes(1, 4, 1))
    found = pgame_ls.sample(replay, 2000, key=jax.random.key(0))
    np.testing.assert_allclose(found.next_observation - found.observation, 0.01, atol=1e-5)
    assert (np.floor(found.observation[:, 0]) == found.reward).all()
    assert (found.action == -found.observation[:, : SHORT.action_size]).all()
    places = {round(float(x), 2) for x in found.observation[:, 0]}
    assert places == {n + t / 100 for n in (1, 2, 3, 4) for t in range(3)}


def test_the_buffer_that_the_caller_holds_stays_as_it_is():
    before = replicate(small_replay(10))
    after = pgame_ls.remember(before, replicate(numbered_episodes(1, 3, 2)))
    assert inside(before) == set() and inside(after) == {1, 2, 3, 4, 5, 6}
    assert not np.asarray(before.observations).any()


# --- variation by gradient ------------------------------------------------------------------------


def filled_state(task: envs.Task, config: PGAMEConfig) -> PGAMEState:
    search = PGAME(task, config)
    return search.step(search.init(jax.random.key(0)), jax.random.key(1))[0]


def test_offspring_climb_the_critic(point, config):
    config = dataclasses.replace(config, policy_steps=50)
    state = filled_state(point, config)
    parents = me_ls.select_uniformly(state.repertoire, 5, key=jax.random.key(2))
    critic, replay = pgame_ls.first_of(state.td3.critics), state.replay
    climbed = pgame_ls.vary_by_gradient(config, parents, critic, replay, key=jax.random.key(3))
    seen = pgame_ls.sample(replay, 500, key=jax.random.key(4)).observation
    loss = jax.vmap(pgame_ls.actor_loss, in_axes=(0, None, None))
    assert (loss(climbed, critic, seen) < loss(parents, critic, seen)).all()


@pytest.mark.parametrize("together", [1, 2, 3, 100])
def test_every_offspring_climbs_on_its_own(point, config, together):
    """Chunks and devices only divide the work; seven parents fill neither."""
    state = filled_state(point, config)
    parents = me_ls.select_uniformly(state.repertoire, 7, key=jax.random.key(2))
    critic, replay, key = pgame_ls.first_of(state.td3.critics), state.replay, jax.random.key(3)
    climbed = pgame_ls.vary_by_gradient(config, parents, critic, replay, together, key=key)
    alone = jax.vmap(lambda parent, key: pgame_ls.climb(config, parent, critic, replay, key=key))
    expected = alone(parents, jax.random.split(key, 7))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), climbed, expected)


# --- the search -----------------------------------------------------------------------------------


def first_key(key: jax.Array) -> jax.Array:
    """Of an iteration's key, the one for random policies and iso+line variation."""
    vary_key, _ = jax.random.split(key)
    return jax.random.split(vary_key, 4)[0]


def test_the_first_batch_is_random_and_the_greedy_actor_is_always_in_it(point, config, monkeypatch):
    played = []

    def watched(task, offspring, keys, **options):
        played.append(offspring)
        return envs.rollout(task, offspring, keys, **options)

    monkeypatch.setattr(me_ls, "rollout", watched)
    search = PGAME(point, config)
    state = search.init(jax.random.key(0))
    untrained = state.td3
    for i in range(3):
        state, metrics = search.step(state, jax.random.key(i))
        assert same(jax.tree.map(lambda x: x[0], played[-1]), state.td3.actor)
        assert len(played[-1].layers[0].bias) == config.batch
        assert np.isnan(metrics["critic_loss"]) == (i == 0)
        if i == 0:
            assert same(state.td3, untrained)
            keys = jax.random.split(first_key(jax.random.key(i)), config.batch - 1)
            random = me_ls.random_policies(point, config.hidden, keys)
            assert same(jax.tree.map(lambda x: x[1:], played[-1]), random)
    assert config.by_gradient == 5 and config.by_variation == 6
    assert int(state.td3.steps) == 2 * config.critic_steps
    assert int(state.replay.size) == 75  # 3 × 36 episodes were played


@pytest.mark.parametrize("algo", ["pgame", "pgame-ls"])
def test_a_search_runs_to_its_budget(point, config, algo):
    search = me_ls.make_search(point, dataclasses.replace(config, algo=algo))
    assert isinstance(search, PGAME)
    assert search.iterations == (8 if algo == "pgame-ls" else 24)
    state = search.init(jax.random.key(0))
    for key in jax.random.split(jax.random.key(1), search.iterations):
        state, _ = search.step(state, key)
    found = state.repertoire
    assert found.occupied.sum() > 1
    assert (np.asarray(found.spread)[np.asarray(found.occupied)] > 0).any() == (algo == "pgame-ls")


@pytest.mark.parametrize("algo", ["pgame", "pgame-ls"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_cells_are_those_of_map_elites_with_the_same_key(point, config, algo, seed):
    key = stream(seed, "search-init")
    ours = me_ls.make_search(point, dataclasses.replace(config, algo=algo)).init(key)
    me = me_ls.SearchConfig("me", cells=config.cells, hidden=config.hidden)
    assert same(ours.repertoire, me_ls.make_search(point, me).init(key).repertoire)


def test_a_step_leaves_everything_that_the_caller_holds(point, config):
    search = PGAME(point, config)
    states = [search.init(jax.random.key(0))]
    before = [jax.tree.map(np.array, states[0])]
    for i in range(3):
        states.append(search.step(states[-1], jax.random.key(i))[0])
        before.append(jax.tree.map(np.array, states[-1]))
    for state, copy in zip(states, before, strict=True):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        assert same(state, copy)
    assert same(search.step(states[1], jax.random.key(1))[0], states[2])


class Place(PointOmni):
    """Be at (1, −0.5). Here the point sees where that is from where it is."""

    def __init__(self, config: TaskConfig):
        super().__init__(config)
        self.observation_size = 4

    def _state(self, position, velocity, reward, time) -> State:
        state = super()._state(position, velocity, reward, time)
        way = jnp.array([1.0, -0.5]) - position
        seen = jnp.concatenate([way, velocity])
        return State(state.physics, seen, -envs.norm(way), state.descriptor, time)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_greedy_actor_learns_what_random_search_does_not_find(seed: int):
    """Both have the same steps. TD3 learns from its actor's episodes and those of noisy copies."""
    task = Place(TaskConfig("point-omni", length=50))
    config = PGAMEConfig(
        batch=16, hidden=(32, 32), critic_hidden=(64, 64), replay=100_000, td3_batch=64,
        critic_steps=100, critic_rate=0.002, greedy_rate=0.002, soft_update=0.03, discount=0.9,
    )  # fmt: skip
    rounds, judged = 60, jax.random.split(jax.random.key(9), (1, 50))

    def fitness_of(policy: me_ls.MLP) -> float:
        alone = jax.tree.map(lambda x: x[None], policy)
        return float(envs.rollout(task, alone, judged).fitness.mean())

    state = PGAME(task, config).init(jax.random.key(seed))
    td3, replay, best, found = state.td3, state.replay, -np.inf, None
    for key in jax.random.split(jax.random.key(100 + seed), rounds):
        policy_key, play_key, train_key = jax.random.split(key, 3)
        random = me_ls.random_policies(task, config.hidden, jax.random.split(policy_key, 16))
        keys = jax.random.split(play_key, (16, 1))

        batch = jax.tree.map(lambda x, a: a + 0.5 * x.at[0].set(0), random, td3.actor)
        replay = pgame_ls.remember(replay, envs.rollout(task, batch, keys, record=transitions))
        td3, _ = pgame_ls.train(config, td3, replay, key=train_key)

        fitness = np.asarray(envs.rollout(task, random, keys).fitness[:, 0])
        if fitness.max() > best:
            best, winner = fitness.max(), fitness.argmax()
            found = jax.tree.map(lambda x, i=winner: x[i], random)

    still = -50 * 1.25**0.5  # staying at the start
    greedy, searched = fitness_of(td3.actor), fitness_of(found)
    print(f"still {still:.1f}, random search {searched:.1f}, greedy actor {greedy:.1f}")
    assert greedy > 0.75 * searched > 0.75 * still


# --- interrupted and resumed ----------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def checkpoint_after_every_iteration() -> Iterator[None]:
    before = machine.settings().checkpoint_seconds
    machine.configure({"checkpoint_seconds": 0.0})
    yield
    machine.configure({"checkpoint_seconds": before})


def search_in(directory: Path, search: PGAME, log: Callable = lambda row: None) -> None:
    drive(
        search,
        Stage(directory, dataclasses.asdict(search.config)),
        init=stream(3, "search-init"),
        steps=stream(3, "search"),
        total=search.iterations,
        title=search.config.algo,
        work=("steps", search.steps_per_iteration),
        show=me_ls.SHOWN,
        check=log,
    )


def final_checkpoint(directory: Path) -> bytes:
    return max(directory.glob("checkpoint-*.safetensors")).read_bytes()


def test_a_resumed_search_ends_with_the_very_same_state(point, config, tmp_path):
    """The final checkpoints are equal byte by byte: buffer, networks, optimisers and repertoire."""
    search, rows = PGAME(point, config), []

    def break_down(row: dict) -> None:
        rows.append(row)
        if len(rows) == 6:
            raise RuntimeError("the power is gone")

    search_in(tmp_path / "whole", search)
    with pytest.raises(RuntimeError):
        search_in(tmp_path / "torn", search, break_down)
    assert (tmp_path / "torn" / "checkpoint-000000005.safetensors").exists()
    search_in(tmp_path / "torn", search)
    assert final_checkpoint(tmp_path / "whole") == final_checkpoint(tmp_path / "torn")


CHILD = """
import sys, time, jax
from pathlib import Path
import envs, pgame_ls
from machinery import driver, machine, runs, streams
machine.prepare_jax()
machine.configure({"checkpoint_seconds": 0.0})
jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
task = envs.make_task(envs.TaskConfig("point-omni", length=20, reach=0.5))
config = pgame_ls.PGAMEConfig(
    steps=6 * 12 * 3 * 20, cells=16, batch=12, episodes=3, hidden=(8,), critic_hidden=(12, 10),
    critic_steps=5, policy_steps=4, td3_batch=16, replay=1500,
)
search = pgame_ls.PGAME(task, config)
driver.drive(
    search, runs.Stage(Path(sys.argv[1]), {}), init=streams.stream(0, "search-init"),
    steps=streams.stream(0, "search"), total=search.iterations, title="pgame-ls",
    work=("steps", search.steps_per_iteration), show=(), check=lambda row: time.sleep(float(sys.argv[3])),
)
"""


@pytest.mark.faults
def test_kill_9_changes_nothing(tmp_path, run_python):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_python(CHILD, whole, 2, 0)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(killed), "2", "0.5"], env=environment
    )
    try:
        deadline = time.monotonic() + 120
        while not list(killed.glob("checkpoint-00000000[3-9].safetensors")):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not list(killed.glob("checkpoint-000000006.safetensors"))  # it was killed on the way
    run_python(CHILD, killed, 2, 0)
    assert final_checkpoint(whole) == final_checkpoint(killed)


@pytest.mark.faults
def test_the_number_of_devices_changes_nothing(tmp_path, run_python):
    for devices in (1, 2, 3):
        run_python(CHILD, tmp_path / str(devices), devices, 0)
    one, two, three = (final_checkpoint(tmp_path / n) for n in ("1", "2", "3"))
    assert one == two == three


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": 2}, "batch of 4"),
        ({"gradient_share": 1.0}, "batch of 4"),
        ({"policy_delay": 0}, "policy_delay must be at least 1"),
        ({"discount": 1.0}, "discount must lie in"),
        ({"critic_hidden": ()}, "critic_hidden must be sizes"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_sentence(wrong, says):
    with pytest.raises(UserError, match=says):
        PGAMEConfig(**wrong)
