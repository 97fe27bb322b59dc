"""The experiments on made-up repertoires whose answers are known by hand."""

from itertools import combinations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import evaluate
import me_ls
from envs import Episodes, PointOmni, State, TaskConfig, rollout
from machinery.files import UserError

KEY = jax.random.key(0)


class Still(PointOmni):
    """The point starts where the action sends it at once, so that a policy ends where it says."""

    def reset(self, key: jax.Array) -> State:
        zero = jnp.zeros(2)
        return self._state(zero, zero, jnp.zeros(()), jnp.zeros((), int))

    def step(self, state: State, action: jax.Array) -> State:
        return self._state(action, jnp.zeros(2), jnp.array(-1.0), state.time + 1)


class Scattered(Still):
    """The same, but a random start leads beside it and decides what the way costs."""

    def reset(self, key: jax.Array) -> State:
        start = jax.random.uniform(key, (2,), minval=-0.6, maxval=0.6)
        return self._state(start, start, jnp.zeros(()), jnp.zeros((), int))

    def step(self, state: State, action: jax.Array) -> State:
        _, start = state.physics
        return self._state(action + start, start, -jnp.abs(action + start[0]).sum(), state.time + 1)


TASK = Still(TaskConfig("point-omni", length=3, reach=1.0))
SCATTERED = Scattered(TaskConfig("point-omni", length=3, reach=1.0))


def constant_policies(places: list[list[float]]) -> me_ls.MLP:
    """Policies that always go to the same place: no weights, only the last bias."""
    policies = me_ls.random_policies(TASK, (4,), jax.random.split(KEY, len(places)))
    policies = jax.tree.map(jnp.zeros_like, policies)
    return eqx.tree_at(lambda p: p.layers[-1].bias, policies, jnp.arctanh(jnp.array(places)))


def repertoire(places: list[list[float]], stored: list[list[float]]) -> me_ls.Repertoire:
    """One cell around each stored descriptor; its policy really goes to `places`."""
    n = len(places)
    return me_ls.Repertoire(
        constant_policies(places), jnp.zeros(n), jnp.array(stored), jnp.zeros(n), jnp.array(stored)
    )


def test_accuracy_plays_the_policy_stored_nearest_and_measures_where_it_really_goes():
    tells_the_truth, lies = [0.5, 0.5], [-0.5, -0.5]
    both = repertoire([tells_the_truth, [0.0, -0.5]], [tells_the_truth, lies])
    goals = jnp.array([[0.5, 0.5], [-0.5, -0.5]])
    result = evaluate.accuracy_of_repertoire(TASK, both, goals, jax.random.split(KEY, (2, 4)))
    np.testing.assert_allclose(result.distance, [0.0, 0.5], atol=1e-5)
    np.testing.assert_allclose(result.spread, [0.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(result.fitness, [-3.0, -3.0])


def test_the_nearest_policy_is_judged_by_its_descriptor_and_not_by_its_cell():
    two = repertoire([[0.5, 0.0], [-0.5, 0.0]], [[0.1, 0.0], [-0.9, 0.0]])
    two = eqx.tree_at(lambda r: r.centroids, two, jnp.array([[0.9, 0.0], [-0.1, 0.0]]))
    assert evaluate.nearest_policy(two, jnp.array([[-0.1, 0.0]])).tolist() == [0]


def test_an_empty_cell_is_nobodys_nearest_policy():
    both = repertoire([[0.5, 0.5], [-0.5, -0.5]], [[0.5, 0.5], [-0.5, -0.5]])
    both = eqx.tree_at(lambda r: r.fitness, both, jnp.array([0.0, -jnp.inf]))
    assert evaluate.nearest_policy(both, jnp.array([[-0.5, -0.5]])).tolist() == [0]


def test_a_second_look_takes_who_really_goes_there():
    """The first policy was stored at the goal by luck; the third goes there, wherever it was stored."""
    found = repertoire([[0.8, 0.8], [-0.5, 0.0], [0.1, 0.0]], [[0.0, 0.0], [-0.5, 0.0], [0.6, 0.6]])
    goals, keys = jnp.array([[0.0, 0.0], [-0.5, 0.0]]), jax.random.split(KEY, (2, 3))
    first = evaluate.accuracy_of_repertoire(TASK, found, goals, keys)
    np.testing.assert_allclose(first.distance, [0.8 * 2**0.5, 0.0], atol=1e-5)
    again = evaluate.accuracy_after_reevaluation(TASK, found, goals, keys, key=KEY)
    np.testing.assert_allclose(again.distance, [0.1, 0.0], atol=1e-5)
    # Neither an empty cell nor a policy that diverged is taken.
    found = eqx.tree_at(lambda r: r.fitness, found, jnp.array([0.0, 0.0, -jnp.inf]))
    played = rollout(TASK, found.policies, jax.random.split(KEY, (3, 2)))
    diverged = played.diverged.at[1, 0].set(True)
    played = eqx.tree_at(lambda e: e.diverged, played, diverged)
    assert evaluate.best_policy(found, played, goals).tolist() == [0, 0]


def test_an_empty_repertoire_is_refused():
    none = eqx.tree_at(
        lambda r: r.fitness, repertoire([[0.5, 0.5]], [[0.5, 0.5]]), jnp.array([-jnp.inf])
    )
    with pytest.raises(UserError, match="empty"):
        evaluate.accuracy_of_repertoire(TASK, none, jnp.zeros((1, 2)), KEY[None, None])
    for experiment in (evaluate.reassess, evaluate.reproducibility):
        with pytest.raises(UserError, match="empty"):
            experiment(TASK, none, key=KEY)


def test_distance_and_spread_of_four_corners():
    """Around a goal in the middle of a unit square: distance √½; pairs: four sides, two diagonals."""
    corners = jnp.array([[[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    episodes = Episodes(jnp.zeros((1, 4)), corners, jnp.zeros((1, 4), bool))
    result = evaluate.measure(jnp.array([[0.5, 0.5]]), episodes)
    np.testing.assert_allclose(result.distance, [0.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(result.spread, [(4 + 2 * 2**0.5) / 6], rtol=1e-6)


def test_a_diverged_episode_is_left_out_of_the_distance_and_counted():
    ends = jnp.array([[[0.0, 0.0], [jnp.nan, 0.0]]])
    episodes = Episodes(jnp.array([[1.0, jnp.nan]]), ends, jnp.array([[False, True]]))
    result = evaluate.measure(jnp.array([[0.0, 3.0]]), episodes)
    np.testing.assert_allclose(result.distance, [3.0])
    np.testing.assert_allclose(result.fitness, [1.0])
    assert result.diverged == 1


def test_a_goal_with_fewer_than_two_sound_episodes_has_no_spread():
    """Zero would call a policy steady that was hardly ever seen to arrive."""
    ends = jnp.array([[[0.0, 0.0], [jnp.nan, 0.0]], [[0.0, 0.0], [0.0, 2.0]]])
    episodes = Episodes(jnp.zeros((2, 2)), ends, jnp.array([[False, True], [False, False]]))
    np.testing.assert_array_equal(evaluate.measure(jnp.zeros((2, 2)), episodes).spread, [np.nan, 2])


def test_the_average_of_an_accuracy_leaves_out_goals_that_were_not_measured():
    ends = jnp.array([[[0.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [3.0, 0.0]], [[jnp.nan, 0.0]] * 2])
    fitness = jnp.array([[1.0, 3.0], [-1.0, -3.0], [jnp.nan, jnp.nan]])
    measured = evaluate.measure(jnp.zeros((3, 2)), Episodes(fitness, ends, jnp.isnan(fitness)))
    result = evaluate.averages(measured)
    assert result["mean_distance"] == (1 + 3) / 2
    assert result["mean_spread"] == (2 + 0) / 2
    assert result["max_fitness"] == 2
    assert result["diverged"] == 2


def test_reassessment_moves_every_policy_to_where_it_really_goes():
    """Two policies claim different cells and go to the same one: coverage halves."""
    two = repertoire([[0.5, 0.5], [0.5, 0.4]], [[0.5, 0.5], [-0.5, -0.5]])
    again = evaluate.reassess(TASK, two, episodes=3, key=KEY)
    assert again.before["coverage"] == 1.0
    assert again.after["coverage"] == 0.5
    assert again.repertoire.occupied.tolist() == [True, False]
    assert again.spread == pytest.approx(0.0, abs=1e-6)


def test_reassessment_agrees_with_a_transcription_of_the_appendix():
    """Mean fitness, most frequent behaviour, an empty repertoire, the fitter one stays (C.2.1)."""
    rng = np.random.default_rng(0)
    places, centroids = rng.uniform(-0.9, 0.9, (2, 40, 2))
    found = repertoire(places.tolist(), centroids.tolist())
    again = evaluate.reassess(SCATTERED, found, episodes=5, key=KEY)

    played = rollout(SCATTERED, found.policies, jax.random.split(KEY, (40, 5)))
    best: dict[int, float] = {}
    spreads = []
    for fitness, ends in zip(
        np.asarray(played.fitness), np.asarray(played.descriptor), strict=True
    ):
        cells = [int(np.argmin(((centroids - end) ** 2).sum(axis=1))) for end in ends]
        cell = max(cells, key=cells.count)  # of several, the first
        best[cell] = max(best.get(cell, -np.inf), float(fitness.mean()))
        spreads += [np.mean([np.linalg.norm(a - b) for a, b in combinations(ends, 2)])]

    assert 2 < len(best) < 40  # some cells are fought for, some stay empty
    assert {int(c): float(again.repertoire.fitness[c]) for c in best} == pytest.approx(best)
    assert again.after["coverage"] == pytest.approx(len(best) / 40)
    assert again.after["max_fitness"] == pytest.approx(max(best.values()))
    worst = SCATTERED.length * SCATTERED.worst_reward
    assert again.after["qd_score"] == pytest.approx(sum(max(f - worst, 0) for f in best.values()))
    assert again.spread == pytest.approx(np.mean(spreads), rel=1e-5)


def test_an_empty_cell_does_not_take_part_in_the_reassessment():
    two = repertoire([[0.5, 0.5], [-0.5, -0.5]], [[0.5, 0.5], [-0.5, -0.5]])
    two = eqx.tree_at(lambda r: r.fitness, two, jnp.array([0.0, -jnp.inf]))
    again = evaluate.reassess(TASK, two, episodes=3, key=KEY)
    assert again.repertoire.occupied.tolist() == [True, False]
    assert np.isnan(again.descriptor[1]).all()


def test_a_goal_is_reachable_if_an_episode_ended_in_its_zone():
    goals = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    ends = jnp.array([[[0.1, 0.0], [0.9, 0.1]], [[jnp.nan, jnp.nan], [0.2, 0.1]]])
    assert evaluate.reachable(goals, ends).tolist() == [True, True, False]


def test_reproducibility_plays_three_policies_thirty_times():
    places = [[0.0, 0.5], [-0.5, -0.3], [0.5, -0.3], [0.0, 0.0]]
    played = evaluate.reproducibility(TASK, repertoire(places, places), key=KEY)
    assert sorted(played.cells.tolist()) == [0, 1, 2]
    assert played.descriptor.shape == (3, 30, 2)
    assert played.path.shape == (3, 30, TASK.length + 1, 2)  # with the start
    np.testing.assert_array_equal(played.path[:, :, -1], played.descriptor)
    np.testing.assert_allclose(played.spread, 0.0, atol=1e-6)


def test_calibration_finds_what_to_ask_a_policy_that_always_misses_by_the_same_amount():
    offset = jnp.array([0.2, -0.1])

    def play(targets: jax.Array, keys: jax.Array) -> Episodes:
        ends = jnp.broadcast_to(targets[:, None] + offset, (*keys.shape, 2))
        noise = 0.01 * jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,))))(keys)
        return Episodes(jnp.zeros(keys.shape), ends + noise, jnp.zeros(keys.shape, bool))

    goals = jnp.array([[0.0, 0.0], [0.4, 0.3], [-0.5, 0.2]])
    test = jax.random.split(jax.random.key(1), (3, 10))
    found = evaluate.calibrate(TASK, play, goals, test, generations=12, key=KEY)
    alone = evaluate.measure(goals, play(goals, test))
    np.testing.assert_array_equal(found.before.distance, alone.distance)
    assert float(found.before.distance.mean()) == pytest.approx(0.05**0.5, abs=0.02)
    assert float(found.after.distance.mean()) < 0.5 * float(found.before.distance.mean())
    assert found.episodes == 3 * 4 * (12 * 6 + 4)


def test_goals_are_the_same_in_every_evaluation_and_cover_the_space():
    first, second = (np.asarray(me_ls.goals(TASK)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(first) == TASK.zones
    assert (np.abs(first) < 1).all()
    assert len({(x > 0, y > 0) for x, y in first.tolist()}) == 4


# --- by name --------------------------------------------------------------------------------------


def subject(seed: int = 0) -> evaluate.Subject:
    places = [[0.0, 0.5], [-0.5, -0.3], [0.5, -0.3], [0.0, 0.0]]
    return evaluate.Subject(TASK, seed, repertoire(places, places), {})


def test_runs_of_all_seeds_are_asked_for_the_same_goals_from_other_starts():
    one, other = subject(0), subject(1)
    np.testing.assert_array_equal(one.goals, other.goals)
    assert one.episode_keys.shape == (TASK.zones, evaluate.EPISODES)
    assert (one.episode_keys == subject(0).episode_keys).all()
    assert (one.episode_keys != other.episode_keys).all()


@pytest.mark.parametrize("name", ["accuracy", "elsewhere", "reproducibility", "reassess"])
def test_an_experiment_of_a_repertoire_needs_no_model(name):
    result = evaluate.EXPERIMENTS[name](subject())
    lines = evaluate.summary(name, result)
    assert lines and all(isinstance(line, str) for line in lines)
    assert not any("diverged" in line for line in lines)


def test_goals_elsewhere_are_as_many_and_not_those_of_the_zones():
    here, elsewhere = (
        np.asarray(evaluate.EXPERIMENTS[name](subject())["repertoire"]["goals"])
        for name in ("accuracy", "elsewhere")
    )
    np.testing.assert_array_equal(here, me_ls.goals(TASK))
    apart = np.linalg.norm(here[:, None] - elsewhere[None], axis=-1)
    assert here.shape == elsewhere.shape and apart.min() > 0
    # The tessellations differ everywhere: a goal elsewhere is a good part of a zone away from the nearest.
    assert np.median(apart.min(axis=0)) > 0.2 * np.median(np.sort(apart, axis=0)[3])


def test_calibration_without_a_model_is_one_sentence():
    with pytest.raises(UserError, match="no trained model"):
        evaluate.EXPERIMENTS["calibrate"](subject())
