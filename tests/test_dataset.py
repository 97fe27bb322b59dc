"""Datasets: who plays, what is stored, what a reader gets, and what damage does."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import sys
import zlib
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dataset as ds
import envs
import me_ls
from machinery import alike, machine, runs
from machinery.driver import Stopped
from machinery.files import UserError, lock
from machinery.shards import array_file
from machinery.streams import stream

TASK = envs.make_task(envs.TaskConfig("point-omni", length=10, reach=0.4))
CONFIG = ds.DatasetConfig(trajectories=100, zones=6, selection_episodes=4)
SHARD_SIZE = 24


def made_up_repertoire(task: envs.Task = TASK, cells: int = 24, holes: int = 3) -> me_ls.Repertoire:
    """Random policies in the left half of the descriptor space; the last cells are empty."""
    keys = jax.random.split(jax.random.key(1), cells)
    policies = me_ls.random_policies(task, (8,), keys)
    policies = jax.tree.map(lambda x: 2 * x, policies)
    episodes = envs.rollout(task, policies, keys[:, None])
    descriptor = episodes.descriptor[:, 0].at[:, 0].min(0.0)
    occupied = jnp.arange(cells) < cells - holes
    return me_ls.Repertoire(
        policies,
        jnp.where(occupied, episodes.fitness[:, 0], -jnp.inf),
        descriptor,
        jnp.zeros(cells),
        descriptor,
    )


REPERTOIRE = made_up_repertoire()


def build(
    directory, config=CONFIG, repertoire=REPERTOIRE, task=TASK, seed=3, shard_size=SHARD_SIZE
) -> ds.Dataset:
    stage = runs.Stage(directory, {"dataset": config})
    with mock.patch.object(machine, "_current", machine.Machine(shard_size=shard_size)):
        return ds.build(task, repertoire, config, seed, stage)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> ds.Dataset:
    return build(tmp_path_factory.mktemp("built") / "dataset")


@pytest.fixture
def copied(built, tmp_path) -> ds.Dataset:
    """A dataset that a test may damage."""
    shutil.copytree(built.directory, tmp_path / "dataset")
    return ds.open_dataset(tmp_path / "dataset")


def files(directory) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name != ".lock"}


# --- zones ----------------------------------------------------------------------------------------


def plain_best_of_each_zone(zone, hits, spread, fitness, valid) -> list[int]:
    """Section 4.3 in words: of the candidates of a zone, the one that lands in it most often."""
    best = {}
    for i in range(len(zone)):
        if not valid[i]:
            continue
        j = best.get(zone[i])
        better = j is None or hits[i] > hits[j]
        if j is not None and hits[i] == hits[j]:
            better = spread[i] < spread[j] or (spread[i] == spread[j] and fitness[i] > fitness[j])
        if better:
            best[zone[i]] = i
    return [best[z] for z in sorted(best)]


few = st.integers(0, 2)


@given(st.lists(st.tuples(few, few, few, few, st.booleans()), max_size=30))
def test_the_best_of_each_zone_is_that_of_a_plain_transcription(candidates):
    """Numbers from 0 to 2: ties of all kinds, empty zones and diverged policies are common."""
    columns = np.array(candidates, dtype=int).reshape(-1, 5).T
    zone, hits, spread, fitness, valid = columns
    arguments = zone, hits, spread.astype(np.float32), fitness.astype(np.float32), valid == 1
    assert ds.best_of_each_zone(*arguments).tolist() == plain_best_of_each_zone(*arguments)


def test_a_nan_of_a_diverged_policy_does_not_disturb_the_others():
    nan = np.array([np.nan, 1.0], np.float32)
    best = ds.best_of_each_zone(
        np.array([0, 0]), np.array([9, 1]), nan, nan, np.array([False, True])
    )
    assert best.tolist() == [1]


@pytest.mark.parametrize("action_noise", [0.0, 0.3])
def test_selection_plays_every_policy_of_an_occupied_cell_and_keeps_one_per_zone(action_noise):
    """The whole selection again, policy by policy, in plain Python."""
    config = dataclasses.replace(CONFIG, action_noise=action_noise)
    selection = ds.select_policies(TASK, REPERTOIRE, config, seed=3)
    centroids = np.asarray(me_ls.cvt(TASK.low, TASK.high, 6, key=stream(0, "goals")))

    def zone_of(point) -> int:
        return int(np.argmin(((centroids - np.asarray(point)) ** 2).sum(axis=1)))

    cells = [c for c in range(24) if REPERTOIRE.fitness[c] > -np.inf]
    assert len(cells) == 21
    keys = jax.random.split(stream(3, "selection"), (21, 4))
    rows, play = [], eqx.filter_jit(envs.play_episode)
    for row, cell in enumerate(cells):
        policy = jax.tree.map(lambda x, cell=cell: x[cell], REPERTOIRE.policies)
        played = [play(TASK, policy, key, action_noise=action_noise) for key in keys[row]]
        zone = zone_of(REPERTOIRE.descriptor[cell])
        hits = sum(zone_of(episode.descriptor) == zone for episode in played)
        ends = [np.asarray(episode.descriptor) for episode in played]
        pairs = [np.linalg.norm(a - b) for i, a in enumerate(ends) for b in ends[i + 1 :]]
        fitness = np.mean([float(e.fitness) for e in played])
        rows.append((zone, hits, np.mean(pairs), fitness, hits > 0))
    best = plain_best_of_each_zone(*zip(*rows, strict=True))
    assert selection.cells.tolist() == [cells[i] for i in best]
    assert selection.zone.tolist() == [rows[i][0] for i in best]
    assert selection.hits.tolist() == [rows[i][1] for i in best]
    assert len(selection.empty_zones) == 6 - len(best) > 0


def test_a_diverged_policy_is_never_selected(built):
    best = built.meta.selection.cells[0]
    broken = jax.tree.map(lambda x: x.at[best].set(jnp.nan), REPERTOIRE.policies)
    repertoire = eqx.tree_at(lambda r: r.policies, REPERTOIRE, broken)
    selection = ds.select_policies(TASK, repertoire, CONFIG, seed=3)
    assert best not in selection.cells
    assert set(built.meta.selection.cells[1:]) <= set(selection.cells)


def test_a_policy_that_never_ends_in_its_zone_demonstrates_nothing(built, tmp_path):
    """Its stored descriptor was luck: the zone is left to the next one, or to nobody."""
    selection = built.meta.selection
    assert selection.hits.min() > 0
    last = selection.cells[-1]
    elsewhere = jnp.where(REPERTOIRE.descriptor[last] > 0, TASK.low[0], TASK.high[0])
    moved = eqx.tree_at(
        lambda r: r.descriptor, REPERTOIRE, REPERTOIRE.descriptor.at[last].set(elsewhere)
    )
    assert last not in ds.select_policies(TASK, moved, CONFIG, seed=3).cells
    wide = envs.make_task(envs.TaskConfig("point-omni", length=10, reach=9.0))
    in_a_corner = eqx.tree_at(
        lambda r: r.descriptor, REPERTOIRE, jnp.full_like(REPERTOIRE.descriptor, wide.high[0])
    )
    with pytest.raises(UserError, match="never ended in its own zone"):
        ds.select_policies(wide, in_a_corner, CONFIG, seed=3)


def test_an_empty_repertoire_and_one_that_always_diverges_are_refused(tmp_path):
    empty = eqx.tree_at(lambda r: r.fitness, REPERTOIRE, jnp.full(24, -jnp.inf))
    with pytest.raises(UserError, match="repertoire is empty"):
        build(tmp_path / "a", repertoire=empty)
    broken = eqx.tree_at(
        lambda r: r.policies,
        REPERTOIRE,
        replace_fn=lambda p: jax.tree.map(lambda x: x * jnp.nan, p),
    )
    with pytest.raises(UserError, match="diverged"):
        build(tmp_path / "b", repertoire=broken)
    with pytest.raises(UserError, match="diverged; nothing to store"):
        build(tmp_path / "c", dataclasses.replace(CONFIG, naive=True), repertoire=broken)


# --- demonstrators that resemble their neighbours ---------------------------------------------------


@st.composite
def candidates_of_zones(draw):
    """Policies, the zones they may be selected for, and how different they are; ties abound."""
    zones, count = draw(st.integers(1, 4)), draw(st.integers(4, 8))
    number = st.lists(st.integers(0, 4), min_size=count**2, max_size=count**2)
    table = np.array(draw(number), np.float32).reshape(count, count)
    candidate = np.array(draw(number)).reshape(count, count)[:, :zones] > 1
    candidate[np.arange(zones), np.arange(zones)] = True
    centroids = np.array(draw(number)[: 2 * zones], np.float32).reshape(zones, 2)
    return candidate, table + table.T, centroids


@given(candidates_of_zones())
def test_no_other_candidate_is_more_like_the_neighbours(drawn):
    candidate, difference, centroids = drawn
    near, zones = alike.neighbours(centroids), range(len(centroids))
    first = np.arange(len(centroids))
    selected = alike.most_alike(first, candidate, near, difference)
    assert len(set(selected)) == len(centroids)
    assert all(candidate[selected[z], z] for z in zones)

    def unlike(chosen) -> float:
        return sum(difference[chosen[a], chosen[b]] for a in zones for b in zones if near[a, b])

    assert unlike(selected) <= unlike(first)
    for other, zone in itertools.product(range(len(candidate)), zones):
        if candidate[other, zone] and other not in selected:
            exchanged = selected.copy()
            exchanged[zone] = other
            assert unlike(exchanged) >= unlike(selected)


def test_who_diverged_is_like_nobody_and_is_replaced_only_by_somebody_sound():
    """Policy 2 diverged in the episode that is compared; of the others, 3 is more like 1 than 0 is."""
    difference = np.array([[0, 5, 1, 1], [5, 0, 1, 2], [1, 1, 0, 1], [1, 2, 1, 0]], np.float32)
    difference[2] = difference[:, 2] = np.nan
    candidate = np.array([[1, 0], [0, 1], [1, 0], [1, 0]], bool)
    near = np.array([[0, 1], [1, 0]], bool)
    assert alike.most_alike(np.array([0, 1]), candidate, near, difference).tolist() == [3, 1]
    assert alike.most_alike(np.array([2, 1]), candidate, near, difference).tolist() == [3, 1]


def test_neighbours_are_the_four_nearest_zones_of_either():
    line = np.arange(12, dtype=np.float32)[:, None]
    near = alike.neighbours(line)
    assert np.flatnonzero(near[6]).tolist() == [4, 5, 7, 8]
    # The first zone's four nearest are all on one side, so it is a neighbour of the fourth, too.
    assert np.flatnonzero(near[0]).tolist() == [1, 2, 3, 4] and near[4, 0]


def test_actions_are_compared_in_the_states_of_both_policies():
    members = jax.tree.map(lambda x: x[:3], REPERTOIRE.policies)
    found = ds._differences(TASK, members, 0.2, seed=3)
    policies = [jax.tree.map(lambda x, i=i: x[i], members) for i in range(3)]
    keys = jax.random.split(stream(3, "alike"), (3, 1))[:, 0]
    visited = [
        envs.play_episode(TASK, policy, key, envs.transitions, 0.2).recorded.observations[:10]
        for policy, key in zip(policies, keys, strict=True)
    ]
    for a, b in itertools.product(range(3), repeat=2):
        squares = [
            np.mean((policies[a](state) - policies[b](state)) ** 2)
            for state in [*visited[a], *visited[b]]
        ]
        np.testing.assert_allclose(found[a, b], np.mean(squares), rtol=1e-5)


def test_demonstrators_that_are_alike_end_nearly_as_close_to_the_middle_of_their_zones():
    best = ds.select_policies(TASK, REPERTOIRE, CONFIG, seed=3)
    similar = ds.select_policies(TASK, REPERTOIRE, dataclasses.replace(CONFIG, alike=1.5), seed=3)
    assert similar.zone.tolist() == best.zone.tolist() and np.all(similar.hits > 0)
    assert similar.cells.tolist() != best.cells.tolist()

    cells = np.flatnonzero(REPERTOIRE.occupied)
    keys = jax.random.split(stream(3, "selection"), (21, 4))
    ends = np.asarray(envs.rollout(TASK, ds._members(REPERTOIRE, cells), keys).descriptor)
    apart = {
        (cell, zone): np.mean(np.linalg.norm(ends[row] - best.centroids[zone], axis=1))
        for row, cell in enumerate(cells)
        for zone in best.zone
        if zone in [np.argmin(((best.centroids - end) ** 2).sum(axis=1)) for end in ends[row]]
    }
    for first, cell, zone in zip(best.cells, similar.cells, similar.zone, strict=True):
        nearest = min(distance for (_, at), distance in apart.items() if at == zone)
        assert cell == first or apart[cell, zone] <= 1.5 * nearest * (1 + 1e-6)

    members = ds._members(REPERTOIRE, np.concatenate([best.cells, similar.cells]))
    difference = ds._differences(TASK, members, 0.0, seed=3)
    near, count = alike.neighbours(best.centroids[best.zone]), len(best.cells)
    assert np.mean(difference[count:, count:][near]) < np.mean(difference[:count, :count][near])


@pytest.mark.parametrize("times", [0.9, float("nan"), float("inf")])
def test_nobody_ends_nearer_to_the_middle_than_the_nearest(times):
    with pytest.raises(UserError, match="alike must be at least 1"):
        ds.DatasetConfig(alike=times)


def test_zones_left_out_are_reported(tmp_path, capsys):
    built = build(tmp_path / "dataset")
    assert (
        f"{len(built.meta.selection.empty_zones)} of 6 zones are left out: no policy"
        in capsys.readouterr().err
    )


def test_the_tasks_have_the_papers_numbers_of_zones():
    assert ds.DatasetConfig().zones is None  # the task's own
    assert len(me_ls.goals(TASK)) == 100
    assert object.__new__(envs.HalfcheetahUni).zones == 50  # without its physics


# --- what is stored -------------------------------------------------------------------------------


def test_the_trajectories_are_shared_equally_and_every_shard_has_all_policies(built):
    selection = built.meta.selection
    assert len(built) == 100 and len(built.meta.shards) > 3
    counts = np.bincount(built.policy)[selection.cells]
    assert counts.sum() == 100 and np.ptp(counts) <= 1
    for first, shard in zip(built.rows.first, built.meta.shards, strict=True):
        if shard.rows >= len(selection.cells):
            assert set(built.policy[first : first + shard.rows]) == set(selection.cells)
        assert shard.rows <= SHARD_SIZE
    zone_of = dict(zip(selection.cells, selection.zone, strict=True))
    assert [zone_of[c] for c in built.policy] == built.zone.tolist()
    assert built.trajectory.tolist() == list(range(100))


def test_a_naive_dataset_has_all_policies_of_the_repertoire(tmp_path):
    naive = build(tmp_path / "dataset", dataclasses.replace(CONFIG, naive=True))
    assert set(naive.policy) == set(range(21))
    with pytest.raises(UserError, match="20 trajectories are too few for 21 policies"):
        build(tmp_path / "b", dataclasses.replace(CONFIG, naive=True, trajectories=20))


def replay(task, dataset, i, action_noise=0.0) -> tuple[list, list, list, np.ndarray]:
    """Feeds the stored actions to the task, from the stored key."""
    key = ds.trajectory_key(dataset.meta.seed, int(dataset.trajectory[i]))
    start_key, noise_key = jax.random.split(key)
    reset, step = jax.jit(task.reset), jax.jit(task.step)
    state = reset(start_key)
    observations, rewards, achieved = [state.observation], [], []
    for t, action in enumerate(dataset.rows.read("actions", np.array([i]))[0]):
        achieved.append(state.descriptor)
        noise = action_noise * jax.random.normal(jax.random.fold_in(noise_key, t), action.shape)
        state = step(state, jnp.clip(action + noise, -1, 1))
        observations.append(state.observation)
        rewards.append(state.reward)
    return observations, rewards, achieved, np.asarray(state.descriptor)


@pytest.mark.parametrize("action_noise", [0.0, 0.3])
def test_a_stored_trajectory_replays_from_its_key(tmp_path, action_noise):
    config = dataclasses.replace(CONFIG, action_noise=action_noise, achieved=True)
    dataset = build(tmp_path / "dataset", config)
    for i in (0, 17, 99):
        observations, rewards, achieved, descriptor = replay(TASK, dataset, i, action_noise)
        one = np.array([i])
        close = {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(dataset.rows.read("observations", one)[0], observations, **close)
        np.testing.assert_allclose(dataset.rows.read("rewards", one)[0], rewards, **close)
        np.testing.assert_allclose(dataset.rows.read("achieved", one)[0], achieved, **close)
        np.testing.assert_allclose(dataset.descriptor[i], descriptor, **close)
        np.testing.assert_allclose(dataset.fitness[i], np.sum(rewards), rtol=1e-5)


@pytest.mark.slow
def test_a_stored_ant_trajectory_replays_from_its_key(tmp_path):
    """Contacts amplify the last digit: step by step from the key, over a short episode."""
    ant = envs.make_task(envs.TaskConfig("ant-omni", length=10))
    config = ds.DatasetConfig(trajectories=16, zones=8, selection_episodes=2)
    dataset = build(tmp_path / "dataset", config, made_up_repertoire(ant), ant)
    observations, _, _, descriptor = replay(ant, dataset, 5)
    close = {"rtol": 1e-3, "atol": 1e-3}
    np.testing.assert_allclose(
        dataset.rows.read("observations", np.array([5]))[0], observations, **close
    )
    np.testing.assert_allclose(dataset.descriptor[5], descriptor, **close)


def test_diverged_episodes_are_left_out_and_others_played_instead(tmp_path, monkeypatch):
    """Trajectories 3 and 40 are said to diverge, number 50 has a NaN that nobody saw."""
    play = ds.play_shard

    def with_accidents(*arguments):
        arrays, diverged = play(*arguments)
        diverged = diverged | np.isin(arrays["trajectory"], (3, 40))
        arrays["rewards"] = arrays["rewards"].copy()
        arrays["rewards"][arrays["trajectory"] == 50, 2] = np.nan
        return arrays, diverged

    monkeypatch.setattr(ds, "play_shard", with_accidents)
    dataset = build(tmp_path / "dataset")
    assert len(dataset) == 100 and dataset.left_out == {"diverged": 3, "untypical": 0}
    assert dataset.trajectory.tolist() == [i for i in range(103) if i not in (3, 40, 50)]
    assert np.isfinite(dataset.rows.read("rewards", dataset.everything)).all()


def test_typical_trajectories_end_nearest_to_their_own_policy(tmp_path, built):
    """The same episodes as without it, in the same order; what is left out is replaced by later ones."""
    dataset = build(tmp_path / "dataset", dataclasses.replace(CONFIG, typical=True))
    selection = dataset.meta.selection
    assert len(dataset) == 100
    for end, policy in zip(dataset.descriptor, dataset.policy, strict=True):
        distance = ((selection.descriptor - end) ** 2).sum(axis=1)
        assert selection.cells[distance.argmin()] == policy
    assert dataset.left_out["untypical"] > 0 and dataset.left_out["diverged"] == 0
    assert len(set(built.trajectory) - set(dataset.trajectory)) == sum(
        selection.cells[((selection.descriptor - end) ** 2).sum(axis=1).argmin()] != policy
        for end, policy in zip(built.descriptor, built.policy, strict=True)
    )


def test_float16_halves_the_disk_and_reports_what_it_costs(tmp_path, built):
    half = build(tmp_path / "dataset", dataclasses.replace(CONFIG, dtype="float16"))
    whole = built.batch(built.everything)
    batch = half.batch(half.everything)
    assert batch.actions.dtype == batch.observations.dtype == np.float32
    error = np.abs(batch.actions - whole.actions).max()
    assert 0 < error == pytest.approx(half.rounding["actions"]) and error < 1e-3
    np.testing.assert_array_equal(half.descriptor, built.descriptor)
    assert built.rounding == {}
    stored = {n: array_file(half.directory, 0, n).stat().st_size for n in ("actions", "descriptor")}
    rows = half.meta.shards[0].rows
    assert stored["actions"] == 128 + rows * 10 * 2 * 2


def test_numbers_too_large_for_float16_are_not_stored(tmp_path, monkeypatch):
    play = ds.play_shard

    def with_a_giant(*arguments):
        arrays, diverged = play(*arguments)
        arrays["observations"] = arrays["observations"].copy()
        arrays["observations"][arrays["trajectory"] == 7] = 1e6
        return arrays, diverged

    monkeypatch.setattr(ds, "play_shard", with_a_giant)
    half = build(tmp_path / "dataset", dataclasses.replace(CONFIG, dtype="float16"))
    assert 7 not in half.trajectory and half.left_out["diverged"] == 1


def test_the_size_on_disk_is_the_one_computed(built):
    on_disk = sum(p.stat().st_size for p in built.directory.glob("*.npy"))
    headers = 128 * 8 * len(built.meta.shards)
    assert on_disk == ds.bytes_on_disk(TASK, CONFIG) + headers


# --- interruptions --------------------------------------------------------------------------------


def test_a_stopped_build_goes_on_to_the_same_bytes(tmp_path, built, monkeypatch):
    """A signal while a shard is played: each call adds one."""
    played, play = [], ds.play_shard
    monkeypatch.setattr(ds, "play_shard", lambda *a: (played.append(1), play(*a))[1])
    monkeypatch.setattr(ds, "stop_requested", lambda: bool(played))
    directory = tmp_path / "dataset"
    for _ in built.meta.shards:  # also while the last one is played: the next stage must not begin
        with pytest.raises(Stopped, match="of 100 trajectories; the same command continues"):
            build(directory)
        with pytest.raises(UserError, match="holds no finished dataset"):
            ds.open_dataset(directory)
        assert len(played) == 1
        played.clear()
    build(directory)
    assert files(directory) == files(built.directory)


def test_what_is_stored_does_not_depend_on_how_much_is_played_at_a_time(
    tmp_path, built, monkeypatch
):
    """Whoever begins a build decides on its shards; another machine may go on with it."""
    at_once = build(tmp_path / "at once", shard_size=4096)
    assert len(at_once.meta.shards) == 1 < len(built.meta.shards)
    assert at_once.trajectory.tolist() == built.trajectory.tolist()
    everything = built.everything
    for name in ("observations", "actions", "rewards"):
        there, here = (data.rows.read(name, everything) for data in (at_once, built))
        np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(ds, "stop_requested", lambda: True)
        with pytest.raises(Stopped):
            build(tmp_path / "dataset")
    build(tmp_path / "dataset", shard_size=4096)
    assert files(tmp_path / "dataset") == files(built.directory)


KILLED = """
import os, sys, threading, time
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/tests"]
from machinery import machine
machine.prepare_jax()
import test_dataset as test
count = [0]
real = os.replace
def replace(a, b):
    count[0] += 1
    if count[0] == int(sys.argv[3]):
        os.kill(os.getpid(), 9)
    real(a, b)
os.replace = replace
test.build(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "moment", [6, 12, *(pytest.param(m, marks=pytest.mark.faults) for m in (1, 2, 3, 11, 30, 45))]
)
def test_a_killed_build_goes_on_to_the_same_bytes(tmp_path, built, run_python, moment):
    """`kill -9` just before a file gets its name: the config, an array, the meta.json."""
    from conftest import ROOT

    directory = tmp_path / "dataset"
    done = run_python(KILLED, directory, ROOT, moment, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    build(directory)
    assert files(directory) == files(built.directory)


def test_another_repertoire_or_config_is_refused(copied):
    other = eqx.tree_at(lambda r: r.spread, REPERTOIRE, REPERTOIRE.spread + 1)
    with pytest.raises(UserError, match="begun with another repertoire"):
        build(copied.directory, repertoire=other)
    with pytest.raises(UserError, match=r"zones is 6 there and 7 here"):
        build(copied.directory, dataclasses.replace(CONFIG, zones=7))


def test_a_second_process_is_told(copied, run_python):
    with lock(copied.directory), pytest.raises(UserError, match="in use by another"):
        build(copied.directory)


# --- damage ---------------------------------------------------------------------------------------


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def remove(path):
    path.unlink()


@pytest.mark.parametrize("array", ["observations", "trajectory"])
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [(truncate, "bytes instead of"), (flip, "checksum does not fit"), (remove, "No such file")],
)
def test_damage_is_one_sentence_and_repaired_by_building_again(
    copied, built, capsys, array, damage, sentence
):
    path = array_file(copied.directory, 1, array)
    damage(path)
    with pytest.raises(UserError, match=f"{path.name}.*{sentence}.*replays what is damaged"):
        ds.open_dataset(copied.directory)
    intact = array_file(copied.directory, 2, array)
    before = intact.stat().st_mtime_ns
    build(copied.directory)
    assert "Replaying it." in capsys.readouterr().err
    assert files(copied.directory) == files(built.directory)
    assert intact.stat().st_mtime_ns == before


def test_a_header_that_contradicts_meta_json_is_refused(copied):
    """Somebody else's dataset: sizes and checksums fit, the shape does not; or it wants a pickle."""
    path = copied.directory / "meta.json"
    for array in (np.zeros((3, 3)), np.array([{}, {}], dtype=object)):
        forged = array_file(copied.directory, 0, "fitness")
        np.save(forged, array, allow_pickle=True)
        content = json.loads(path.read_text())
        content["shards"][0]["files"]["fitness"] = [
            forged.stat().st_size,
            zlib.crc32(forged.read_bytes()),
        ]
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match="does not hold <f4"):
            ds.open_dataset(copied.directory)


@pytest.fixture(scope="module")
def fuzzed(built, tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz") / "dataset"
    shutil.copytree(built.directory, directory)
    return directory


@given(st.data())
def test_a_damaged_meta_json_gives_one_sentence(built, fuzzed, data):
    """A value replaced by anything else: either it does not matter, or it is our own error."""
    content = json.loads((built.directory / "meta.json").read_text())
    place, key = None, None
    here = content
    while isinstance(here, dict | list) and here:
        key = data.draw(
            st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here)))
        )
        place, here = here, here[key]
    junk = st.one_of(
        st.none(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.just([]),
        st.just({}),
        st.just([1] * 9),
    )
    place[key] = data.draw(junk)
    (fuzzed / "meta.json").write_text(json.dumps(content))
    try:
        opened = ds.open_dataset(fuzzed)
        ds.BatchReader(opened, 8, seed=0).prepare(0)
        assert all(isinstance(count, int) for count in opened.left_out.values())
    except UserError as error:
        assert str(error)


def test_text_that_is_no_meta_json_gives_one_sentence(copied):
    for text in ("", "[", "[]", "null", "{}", "7", '"x"', '{"format": "other"}', "[" * 100_000):
        (copied.directory / "meta.json").write_text(text)
        with pytest.raises(UserError):
            ds.open_dataset(copied.directory)
    (copied.directory / "meta.json").unlink()
    with pytest.raises(UserError, match="holds no finished dataset"):
        ds.open_dataset(copied.directory)


def test_a_full_disk_is_one_sentence_and_the_build_goes_on_afterwards(small_disk, built):
    disk = small_disk("64k")
    with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
        build(disk / "dataset")
    assert not list((disk / "dataset").glob(".*.partial"))
    small_disk("8m")
    dataset = build(disk / "dataset")
    assert files(dataset.directory) == files(built.directory)


# --- reading --------------------------------------------------------------------------------------


def test_a_row_is_read_from_its_shard(built):
    view = np.array([99, 0, 57, 57, 23, 24, 25])
    whole = np.concatenate(
        [np.load(array_file(built.directory, i, "actions")) for i in range(len(built.meta.shards))]
    )
    np.testing.assert_array_equal(built.rows.read("actions", view), whole[view])
    batch = built.batch(view)
    assert batch.observations.shape == (7, 10, TASK.observation_size) and batch.achieved is None
    np.testing.assert_array_equal(batch.descriptor, built.descriptor[view])


def test_an_epoch_visits_every_trajectory_once_in_an_order_of_its_own(built):
    batches = ds.BatchReader(built, 25, seed=5)
    assert batches.per_epoch == 4
    epochs = [batches(step).descriptor for step in range(8)]
    seen = [np.concatenate(part) for part in (epochs[:4], epochs[4:])]
    for descriptors in seen:
        np.testing.assert_array_equal(
            np.sort(descriptors, axis=0), np.sort(built.descriptor, axis=0)
        )
    assert not np.array_equal(*seen)


def test_a_batch_depends_on_its_number_alone(built):
    """Wherever one starts, and in whatever order one asks."""
    batches = ds.BatchReader(built, 30, seed=5)
    in_order = [batches(step) for step in range(9)]
    for step in (1, 4, 8):
        resumed = ds.BatchReader(built, 30, seed=5)(step)
        jax.tree.map(np.testing.assert_array_equal, resumed, in_order[step])
    for step in (8, 0, 3, 3):
        jax.tree.map(np.testing.assert_array_equal, batches(step), in_order[step])
    other = ds.BatchReader(built, 30, seed=6)(0)
    assert not np.array_equal(other.descriptor, in_order[0].descriptor)


def test_the_next_batch_is_prepared_while_the_current_one_is_used(built, monkeypatch):
    prepared: list[int] = []
    batches = ds.BatchReader(built, 10, seed=0)
    prepare = batches.prepare
    monkeypatch.setattr(batches, "prepare", lambda step: (prepared.append(step), prepare(step))[1])
    batches(0)
    batches.ahead[1].result()
    assert prepared == [0, 1]
    batches(1)
    batches.ahead[2].result()
    assert prepared == [0, 1, 2]  # the second was not made again


def test_a_batch_larger_than_the_view_is_refused(built):
    with pytest.raises(UserError, match="a batch of 101 is more than the 100 trajectories"):
        ds.BatchReader(built, 101, seed=0)


def test_what_was_achieved_goes_with_the_batch_if_it_was_stored(tmp_path):
    """Before the first step nothing but the start, and in the end the descriptor itself is not told."""
    dataset = build(tmp_path / "dataset", dataclasses.replace(CONFIG, achieved=True))
    batch = dataset.batch(np.array([4, 8]))
    assert batch.achieved.shape == (2, 10, 2)
    for row, i in enumerate((4, 8)):
        _, _, achieved, descriptor = replay(TASK, dataset, i)
        np.testing.assert_allclose(batch.achieved[row], achieved, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(batch.achieved[row, -1], descriptor)


def test_a_split_holds_out_a_share_and_respects_a_view(built):
    training, held_out = built.split(0.2, seed=1)
    assert len(held_out) == 20
    assert sorted([*training, *held_out]) == list(range(100))
    assert not np.array_equal(held_out, built.split(0.2, seed=2)[1])
    view = ds.prune(built, "density-30", seed=0)
    training, held_out = built.split(0.5, seed=1, view=view)
    assert sorted([*training, *held_out]) == view.tolist()
    with pytest.raises(UserError, match="held out"):
        built.split(1.0, seed=0)


# --- pruning --------------------------------------------------------------------------------------


def spread_out(built, n=4000) -> ds.Dataset:
    """The same dataset with descriptors all over the space (only they matter here)."""
    points = np.random.default_rng(0).uniform(-0.4, 0.4, (n, 2)).astype(np.float32)
    zeros = np.zeros(n, np.int64)
    return dataclasses.replace(
        built, descriptor=points, fitness=points[:, 0], policy=zeros, zone=zeros, trajectory=zeros
    )


def test_density_keeps_a_share_everywhere(built):
    dataset = spread_out(built)
    counts, edges = ds.density(dataset, bins=4)
    assert counts.shape == (4, 4) and counts.sum() == 4000 and len(edges) == 2
    assert edges[0][0] == pytest.approx(-0.4) and edges[1][-1] == pytest.approx(0.4)
    views = {share: ds.prune(dataset, f"density-{share}", seed=0) for share in (50, 30, 10)}
    for share, view in views.items():
        assert len(view) == 40 * share
        thinned, _ = ds.density(dataset, bins=4, view=view)
        np.testing.assert_allclose(thinned / counts, share / 100, atol=0.1)
    assert set(views[10]) < set(views[30]) < set(views[50])
    np.testing.assert_array_equal(views[30], ds.prune(dataset, "density-30", seed=0))
    assert not np.array_equal(views[30], ds.prune(dataset, "density-30", seed=1))


def test_tiles_empties_every_other_tile(built):
    dataset = spread_out(built)
    counts, _ = ds.density(dataset, bins=4, view=ds.prune(dataset, "tiles", seed=0))
    row, column = np.indices((4, 4))
    assert ((counts > 0) == ((row + column) % 2 == 0)).all()


def test_upper_empties_the_half_with_the_larger_last_coordinate(built):
    dataset = spread_out(built)
    view = ds.prune(dataset, "upper", seed=0)
    assert (dataset.descriptor[view, 1] <= 0).all()
    assert len(view) == (dataset.descriptor[:, 1] <= 0).sum()


@pytest.mark.parametrize("how", ["tiles", "upper", "density-50"])
def test_the_boxes_that_a_pruning_empties_are_those_that_become_empty(built, how):
    dataset = spread_out(built)
    before, _ = ds.density(dataset, bins=8)
    after, _ = ds.density(dataset, bins=8, view=ds.prune(dataset, how, seed=0))
    gone = ds.empty_boxes(dataset, how, bins=8)
    assert ((before > 0) & (after == 0) == gone).all()
    assert gone.any() == (how != "density-50")


def test_an_unknown_pruning_is_refused(built):
    with pytest.raises(UserError, match="unknown pruning 'density-20'; there are density-50"):
        ds.prune(built, "density-20", seed=0)


# --- Minari ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"dtype": "float16", "achieved": True}])
def test_a_dataset_goes_to_minari_and_comes_back(tmp_path, monkeypatch, changes):
    minari = pytest.importorskip("minari", reason="Minari is an optional extra: not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    dataset = build(tmp_path / "dataset", dataclasses.replace(CONFIG, **changes))
    ds.export_minari(dataset, "qdt/point-omni-v0")
    episode = minari.load_dataset("qdt/point-omni-v0")[57]
    assert episode.observations.shape == (
        11,
        TASK.observation_size,
    ) and episode.truncations.tolist() == [False] * 9 + [True]
    np.testing.assert_allclose(episode.rewards.sum(), dataset.fitness[57], rtol=1e-2)
    with pytest.raises(UserError, match="cannot create"):
        ds.export_minari(dataset, "qdt/point-omni-v0")
    back = ds.import_minari("qdt/point-omni-v0", tmp_path / "back")
    stored = {n: c for n, c in files(dataset.directory).items() if n != "config.json"}
    assert files(back.directory) == stored
    with pytest.raises(UserError, match="already"):
        ds.import_minari("qdt/point-omni-v0", tmp_path / "back")
    with pytest.raises(UserError, match="is not a dataset of"):
        ds.import_minari("qdt/nothing-v0", tmp_path / "nothing")


def test_without_minari_there_is_a_clear_word(built, monkeypatch):
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(UserError, match="Minari is not installed"):
        ds.export_minari(built, "qdt/point-omni-v0")
