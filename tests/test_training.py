"""What training is for: the QDT reaches goals on demand, also goals that no demonstration reached."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dataset
import evaluate
import me_ls
import training
from envs import TaskConfig, make_task, rollout
from runs import Stage, UserError

TASK = make_task(TaskConfig("point-omni", length=50))
WIDTH = TASK.high[0] - TASK.low[0]
SEARCH = me_ls.SearchConfig(
    algo="me-ls", steps=400_000, cells=128, batch=64, episodes=4, hidden=(16, 16)
)
DATASET = dataset.DatasetConfig(trajectories=1536, zones=64)
TRAIN = training.QDTConfig(
    layers=2, heads=2, width=32, dropout=0.0, normalise=True, batch_size=16, micro_batch=8,
    optimiser="muon", learning_rate=1e-3, decay=True, epochs=8, evaluate_every=4, goal_episodes=4,
)  # fmt: skip
HIDDEN = jnp.array([[1.2, 0.0], [-1.0, 1.0], [0.0, -1.2]])  # places that training does not see
RADIUS = 0.1 * WIDTH


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dataset.Dataset:
    place = tmp_path_factory.mktemp("lineage")
    stage = Stage(place / "search", {})
    repertoire = me_ls.search(TASK, SEARCH, 0, stage, me_ls.first_state, me_ls.iterate)
    return dataset.build(TASK, repertoire, DATASET, 0, Stage(place / "dataset", {}))


def distance(model: training.QDT, goals: jax.Array) -> float:
    keys = jax.random.split(jax.random.key(99), (len(goals), 10))
    return float(evaluate.measure(goals, training.play(TASK, model, goals, keys)).distance.mean())


def test_the_qdt_reaches_what_it_saw_and_what_it_did_not(data: dataset.Dataset, tmp_path: Path):
    """Under 5 % of the space's width where trajectories ended, under 10 % where none did."""
    to_hidden = np.linalg.norm(data.descriptor[:, None] - np.asarray(HIDDEN), axis=-1).min(axis=1)
    view = np.flatnonzero(to_hidden > RADIUS)
    assert len(view) < len(data)
    model = training.train(TASK, TRAIN, data, view, 0, Stage(tmp_path / "qdt", {}))
    goals = evaluate.goals(TASK, 100)
    ends = jnp.asarray(data.descriptor[view])
    nearest_end = jnp.linalg.norm(goals[:, None] - ends, axis=-1).min(axis=1)
    seen = goals[nearest_end < 0.03 * WIDTH]
    assert len(seen) > 40
    assert distance(model, seen) < 0.05 * WIDTH
    assert distance(model, HIDDEN) < 0.10 * WIDTH


def test_the_qdt_plays_with_the_noise_of_its_config():
    """In evaluations as in films, and from an episode's key alone."""
    goals, keys = jnp.array([[0.5, 0.5]]), jax.random.split(jax.random.key(1), (1, 3))
    calm = training.make_model(TASK, TRAIN, key=jax.random.key(0))
    noisy = training.make_model(TASK, replace(TRAIN, disturbance=0.2), key=jax.random.key(0))
    ends = [training.play(TASK, model, goals, keys).descriptor[0] for model in (calm, noisy)]
    assert (jnp.abs(ends[0] - ends[1]).max(axis=1) > 1e-3).all()
    disturbed = rollout(TASK, goals, keys, training.Conditioning(calm), disturbance=0.2)
    np.testing.assert_array_equal(ends[1], disturbed.descriptor[0])
    film = evaluate.film(TASK, training.Conditioned(noisy, goals[0]), keys[0], 0.2)
    np.testing.assert_allclose(film.path[:, -1], ends[1], atol=1e-4)


def test_other_noise_than_the_demonstrators_had_is_refused(data: dataset.Dataset):
    with pytest.raises(UserError, match=r"train.disturbance=0\."):
        training.check_fit(TASK, replace(TRAIN, disturbance=0.2), data)
