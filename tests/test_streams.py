"""Randomness: nothing that is drawn for one purpose is drawn for another.

Keys are compared by their bits. A key that is found twice, anywhere in the trees below two streams, would
draw the same numbers for two purposes.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import envs
from envs import Task
from machinery.streams import ORDERS, STREAMS, generator, normals, stream
from me_ls import SearchConfig, make_search

SEEDS = (0, 1, 2, 7, 2**31 - 1)
CHILDREN, GRANDCHILDREN = 300, 20


def bits(keys: jax.Array) -> np.ndarray:
    """One number for each key."""
    return np.ascontiguousarray(jax.random.key_data(keys)).view(np.uint64).reshape(-1)


def below(key: jax.Array, count: int) -> jax.Array:
    """The children of a key: `split` and `fold_in` have the same ones."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(count))


def family(key: jax.Array) -> np.ndarray:
    """A key, its first children, and the first children of each of them."""
    children = below(key, CHILDREN)
    grandchildren = jax.vmap(lambda child: below(child, GRANDCHILDREN))(children)
    return np.concatenate([bits(key[None]), bits(children), bits(grandchildren)])


def test_every_stream_has_a_number_of_its_own() -> None:
    for numbers in (STREAMS, ORDERS):
        assert len(set(numbers.values())) == len(numbers)
        assert all(number >= 0 for number in numbers.values())


def test_split_and_fold_in_count_below_the_same_key() -> None:
    """Why streams are needed at all."""
    key = jax.random.key(0)
    np.testing.assert_array_equal(bits(jax.random.split(key, 5)), bits(below(key, 5)))


def test_no_two_streams_meet() -> None:
    """All streams of all seeds, with their children and grandchildren, are different keys."""
    found = np.concatenate([family(stream(seed, name)) for seed in SEEDS for name in STREAMS])
    assert len(found) == len(SEEDS) * len(STREAMS) * (1 + CHILDREN * (1 + GRANDCHILDREN))
    assert len(np.unique(found)) == len(found)


def test_no_stream_is_the_key_of_a_seed() -> None:
    seeds = bits(jax.vmap(jax.random.key)(jnp.arange(1000)))
    streams = np.concatenate([bits(stream(seed, name)[None]) for seed in SEEDS for name in STREAMS])
    assert not set(seeds) & set(streams)


def test_the_same_seed_gives_the_same_stream() -> None:
    for name in STREAMS:
        assert stream(3, name) == stream(3, name) != stream(4, name)


def test_a_stream_without_a_name_in_the_list_is_refused() -> None:
    with pytest.raises(KeyError):
        stream(0, "whatever")


def test_no_two_orders_meet() -> None:
    drawn = [
        tuple(generator(seed, name, *more).integers(2**62, size=3))
        for seed in SEEDS
        for name in ORDERS
        for more in ((), (0,), (1,), (2,))
    ]
    again = [tuple(generator(seed, "order", 1).integers(2**62, size=3)) for seed in SEEDS]
    assert set(again) <= set(drawn)
    # NumPy cuts trailing zeros of a seed: no epoch and epoch 0 of one stream are the same order.
    assert len(set(drawn)) == len(SEEDS) * len(ORDERS) * 3


# --- two places where keys have met ---------------------------------------------------------------


class Watched(envs.PointOmni):
    """A point whose start is the noise that its reset key draws for an action."""

    def reset(self, key: jax.Array) -> envs.State:
        drawn = jax.random.normal(key, (2,)), jax.random.normal(jax.random.fold_in(key, 0), (2,))
        return self._state(*drawn, jnp.zeros(()), jnp.zeros((), int))


class Idle(eqx.Module):
    def start(self) -> None:
        return None

    def act(self, memory: None, state: envs.State) -> tuple[jax.Array, None]:
        return jnp.zeros(2), memory


def test_the_noise_on_the_first_actions_is_not_that_of_the_start() -> None:
    size, task = 1e-3, Watched(envs.TaskConfig("point-omni", length=5, reach=100.0))

    def noise_and_start(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = envs.play_episode(
            task, Idle(), key, lambda state, action: state.physics, action_noise=size
        ).recorded
        velocity = seen[1]
        noise = (velocity[1:] - velocity[:-1]) / task.dt + velocity[:-1]
        return noise / size, jnp.concatenate([seen[0][0], velocity[0]])

    noise, start = jax.vmap(noise_and_start)(jax.random.split(jax.random.key(0), 200))
    noise = np.asarray(noise.reshape(200, -1), np.float64)
    assert noise.std() == pytest.approx(1, rel=0.1)
    together = np.corrcoef(np.concatenate([noise, start], axis=1).T)
    assert np.abs(together[: noise.shape[1], noise.shape[1] :]).max() < 0.4


def test_the_goal_episodes_of_a_training_do_not_start_like_the_search(point: Task) -> None:
    """Nor do they start like those of any other stage that plays."""
    seed = 5
    search = make_search(point, SearchConfig(batch=100, episodes=10, cells=8, hidden=(4,)))
    _, play_key = jax.random.split(jax.random.fold_in(stream(seed, "search"), 1))
    shape = (search.config.batch, search.episodes)
    starts = {
        "search, iteration 1": bits(jax.random.split(play_key, shape)),
        "trajectories": bits(below(stream(seed, "trajectories"), 1000)),
    }
    for name in ("training-goals", "accuracy", "selection", "reassessment", "reproducibility"):
        starts[name] = bits(jax.random.split(stream(seed, name), shape))
    together = np.concatenate(list(starts.values()))
    assert len(np.unique(together)) == len(together) == 7 * 1000


def test_much_noise_is_normal_and_independent() -> None:
    seeds = jax.random.bits(jax.random.key(0), (3, 2))
    drawn = np.stack([normals(seed, (400, 500)) for seed in seeds])
    for of_seed in drawn:
        assert scipy.stats.kstest(of_seed.ravel(), "norm").pvalue > 0.001
    assert 4 < np.abs(drawn).max() < 6
    pairs = [(drawn[0], drawn[1]), (drawn[0], drawn[2])]
    pairs += [(drawn[:, 1:], drawn[:, :-1]), (drawn[..., 1:], drawn[..., :-1])]  # neighbours
    for one, other in pairs:
        assert abs(np.mean(one * other)) < 0.01
