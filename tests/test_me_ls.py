"""The searches against a plain transcription of the paper's algorithms, as values and on disk.

`Plain` is algorithms 1 and 2 of the paper in loops and lists, without JAX. The numbers that are drawn
are small multiples of powers of two, so that both sides compute exactly and ties are real ties.
"""

import collections
import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.spatial.distance
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import me_ls
from envs import Episodes, Task, TaskConfig, make_task
from machinery import machine
from machinery.driver import Stopped, drive
from machinery.files import UserError
from machinery.runs import Stage, read_metrics
from machinery.streams import stream
from me_ls import (
    RULES,
    Character,
    MapElites,
    Offspring,
    Repertoire,
    Rule,
    SearchConfig,
    SearchState,
    characterise,
    cvt,
    insert,
    make_search,
)

ALGOS = ("me", "me-sampling", "me-ls")

# --- the paper's pseudocode -----------------------------------------------------------------------


class Solution(NamedTuple):
    """What a cell of the plain repertoire holds. `name` is the number of the policy."""

    name: int
    fitness: float
    descriptor: tuple[float, ...]
    spread: float


class Plain:
    """The repertoire M of the pseudocode: a list of cells, each empty or with one solution."""

    def __init__(self, algo: str, centroids: list[list[float]]):
        self.algo = algo
        self.centroids = centroids
        self.cells: list[Solution | None] = [None] * len(centroids)
        self.insertions = 0

    def cell_of(self, descriptor: tuple[float, ...]) -> int:
        best, nearest = math.inf, 0
        for i, centroid in enumerate(self.centroids):
            distance = sum((a - b) ** 2 for a, b in zip(descriptor, centroid, strict=True))
            if distance < best:
                best, nearest = distance, i
        return nearest

    def evaluate(self, name: int, episodes: list[tuple[float, tuple[float, ...], bool]]) -> None:
        """The part of the main loop that follows the episodes: fitness, BD and spread; insertion."""
        for _, _, diverged in episodes:
            if diverged:
                return
        fitness = sum(f for f, _, _ in episodes) / len(episodes)
        descriptors = [d for _, d, _ in episodes]
        pairs = list(itertools.combinations(descriptors, 2))
        spread = sum(math.dist(a, b) for a, b in pairs) / len(pairs) if pairs else 0.0
        if self.algo == "me-sampling":
            descriptor = plain_median(descriptors)
            cell = self.cell_of(descriptor)
        else:  # with one episode, `me`, the most frequent cell is the one that there is
            cells = [self.cell_of(d) for d in descriptors]
            cell = max(cells, key=lambda c: (cells.count(c), -cells.index(c)))
            inside = [d for d, c in zip(descriptors, cells, strict=True) if c == cell]
            descriptor = tuple(sum(axis) / len(inside) for axis in zip(*inside, strict=True))
        self.insert(cell, Solution(name, fitness, descriptor, spread))

    def insert(self, cell: int, new: Solution) -> None:
        old = self.cells[cell]
        if old is None:
            accepted = True
        elif self.algo == "me-ls":
            accepted = new.fitness > old.fitness and new.spread < old.spread
        else:
            accepted = new.fitness > old.fitness
        if accepted:
            self.cells[cell] = new
            self.insertions += 1


def plain_median(points: list[tuple[float, ...]]) -> tuple[float, ...]:
    """Weiszfeld's algorithm in double precision, with many rounds."""
    centre = tuple(sum(axis) / len(points) for axis in zip(*points, strict=True))
    for _ in range(2000):
        weights = [1 / max(math.dist(p, centre), 1e-12) for p in points]
        centre = tuple(
            sum(w * x for w, x in zip(weights, axis, strict=True)) / sum(weights)
            for axis in zip(*points, strict=True)
        )
    return min([*points, centre], key=lambda c: sum(math.dist(c, p) for p in points))


# --- from numbers to repertoires and back ---------------------------------------------------------

CENTROIDS = [[-1.0, -1.0], [1.0, -1.0], [0.0, 0.0], [-1.0, 1.0], [1.0, 1.0], [8.0, 8.0]]
BATCH, EPISODES = 12, 4


def named_policies(names: Any) -> me_ls.MLP:
    """Policies that can be told apart: every weight of a policy is its name."""
    names = np.asarray(names, np.float32)
    shapes = jax.eval_shape(lambda: me_ls.MLP((2, 3, 2), key=jax.random.key(0)))

    def named(leaf: Any) -> jax.Array:
        column = names.reshape(-1, *(1 for _ in leaf.shape))
        return jnp.asarray(np.broadcast_to(column, (len(names), *leaf.shape)))

    return jax.tree.map(named, shapes)


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def names_of(policies: me_ls.MLP) -> list[int]:
    """Whose weights these are; no policy may be a mixture of two."""
    rows = [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(policies)]
    weights = np.concatenate(rows, axis=1)
    assert (weights == weights[:, :1]).all()
    return weights[:, 0].astype(int).tolist()


def empty(centroids: Any = CENTROIDS) -> Repertoire:
    cells, size = np.shape(centroids)
    nobody, nowhere = named_policies([-1] * cells), jnp.asarray(np.zeros((cells, size), np.float32))
    fitness, spread = (jnp.asarray(np.full(cells, x, np.float32)) for x in (-np.inf, np.inf))
    return Repertoire(nobody, fitness, nowhere, spread, jnp.asarray(np.float32(centroids)))


def assert_equal(repertoire: Repertoire, plain: Plain, close: float = 0.0) -> None:
    """The same policy in the same cell with the same fitness, descriptor and spread."""
    names, occupied = names_of(repertoire.policies), np.asarray(repertoire.occupied)
    fitness, descriptor, spread = (
        np.asarray(x) for x in (repertoire.fitness, repertoire.descriptor, repertoire.spread)
    )
    for cell, solution in enumerate(plain.cells):
        if solution is None:
            assert not occupied[cell]
            assert names[cell] == -1
        else:
            assert names[cell] == solution.name
            found = [fitness[cell], *descriptor[cell], spread[cell]]
            wanted = [solution.fitness, *solution.descriptor, solution.spread]
            np.testing.assert_allclose(found, wanted, rtol=close or 1e-6, atol=close)


class Drawn(NamedTuple):
    """Characters of two batches, drawn directly: many ties, many in one cell, some diverged."""

    cell: np.ndarray
    fitness: np.ndarray
    spread: np.ndarray
    valid: np.ndarray


def drawn_arrays(elements: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(elements, min_size=2 * BATCH, max_size=2 * BATCH).map(np.array)


DRAWN = st.builds(
    Drawn,
    cell=drawn_arrays(st.integers(0, len(CENTROIDS) - 2)),  # the last cell stays empty
    fitness=drawn_arrays(st.integers(-3, 3)),
    spread=drawn_arrays(st.integers(0, 3)),
    valid=drawn_arrays(st.sampled_from([True, True, True, False])),
)
ALL_THE_SAME = Drawn(*(np.full(2 * BATCH, x) for x in (2, 1, 1, True)))
ALL_DIVERGED = ALL_THE_SAME._replace(valid=np.full(2 * BATCH, False))


def offer(drawn: Drawn, order: Any) -> Offspring:
    """Members of `drawn` as offspring, in this order. What a diverged one achieved is no number."""
    order = np.asarray(order)
    valid = drawn.valid[order]
    nothing = np.where(valid, 0, np.nan)
    offset = 0.25 * (order % 2)  # descriptors differ inside a cell
    descriptor = np.array(CENTROIDS)[drawn.cell[order]] + (offset + nothing)[:, None]
    numbers = (drawn.fitness[order] + nothing, descriptor, drawn.spread[order] / 4 + nothing)
    character = Character(*(jnp.asarray(np.float32(x)) for x in numbers))
    return Offspring(named_policies(order), character, jnp.array(valid))


def insert_in_order(algo: str, drawn: Drawn, order: Any) -> tuple[list[Repertoire], int]:
    """The repertoires after each of two batches, and the number of insertions."""
    replaces = RULES[algo].replaces
    first, n = insert(empty(), offer(drawn, order[:BATCH]), replaces)
    second, m = insert(first, offer(drawn, order[BATCH:]), replaces)
    return [first, second], int(n + m)


# --- insertion ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGOS)
@given(drawn=DRAWN)
@example(ALL_THE_SAME)
@example(ALL_DIVERGED)
def test_a_batch_is_inserted_as_the_pseudocode_inserts_one_after_another(
    algo: str, drawn: Drawn
) -> None:
    plain = Plain(algo, CENTROIDS)
    for i in range(2 * BATCH):
        if drawn.valid[i]:
            descriptor = tuple(x + 0.25 * (i % 2) for x in CENTROIDS[drawn.cell[i]])
            solution = Solution(i, float(drawn.fitness[i]), descriptor, drawn.spread[i] / 4)
            plain.insert(drawn.cell[i], solution)
    (_, repertoire), insertions = insert_in_order(algo, drawn, np.arange(2 * BATCH))
    assert_equal(repertoire, plain)
    assert insertions == plain.insertions


@given(drawn=DRAWN)
def test_with_me_the_fitness_of_a_cell_never_falls(drawn: Drawn) -> None:
    (first, second), _ = insert_in_order("me", drawn, np.arange(2 * BATCH))
    assert (second.fitness >= first.fitness).all()


@given(drawn=DRAWN)
def test_with_me_ls_a_replacement_is_fitter_and_steadier(drawn: Drawn) -> None:
    (first, second), _ = insert_in_order("me-ls", drawn, np.arange(2 * BATCH))
    before, after = names_of(first.policies), names_of(second.policies)
    for cell, replaced in enumerate(np.array(before) != np.array(after)):
        if replaced and first.fitness[cell] > -np.inf:
            assert second.fitness[cell] > first.fitness[cell]
            assert second.spread[cell] < first.spread[cell]
        elif not replaced:
            assert second.fitness[cell] == first.fitness[cell]
            assert second.spread[cell] == first.spread[cell]


@pytest.mark.parametrize("algo", ALGOS)
@given(drawn=DRAWN, shuffled=st.permutations(range(BATCH)))
def test_order_matters_only_inside_a_cell(algo: str, drawn: Drawn, shuffled: list[int]) -> None:
    """Any order of a batch that leaves the members of each cell in order gives the same repertoire."""
    waiting = collections.defaultdict(collections.deque)
    for i in range(BATCH):
        waiting[drawn.cell[i]].append(i)
    order = [waiting[drawn.cell[i]].popleft() for i in shuffled]
    rest = list(range(BATCH, 2 * BATCH))
    (one, _), _ = insert_in_order(algo, drawn, [*range(BATCH), *rest])
    (other, _), _ = insert_in_order(algo, drawn, [*order, *rest])
    assert same_bits(one, other)


@given(drawn=DRAWN, order=st.permutations(range(2 * BATCH)))
def test_with_me_and_different_fitnesses_no_order_matters(drawn: Drawn, order: list[int]) -> None:
    drawn = drawn._replace(fitness=drawn.fitness * 100 + np.arange(2 * BATCH))
    (_, one), _ = insert_in_order("me", drawn, np.arange(2 * BATCH))
    (_, other), _ = insert_in_order("me", drawn, order)
    assert same_bits(one, other)


def left_in_cell(algo: str, *offered: tuple[float, float]) -> int:
    """Which of the offered (fitness, spread), one after another in one cell, stays."""
    fitness, spread = np.array(offered, float).T
    character = Character(jnp.float32(fitness), jnp.zeros((len(offered), 2)), jnp.float32(spread))
    batch = Offspring(named_policies(range(len(offered))), character, jnp.ones(len(offered), bool))
    repertoire, _ = insert(empty(), batch, RULES[algo].replaces)
    return names_of(repertoire.policies)[2]


def test_a_lower_spread_alone_is_not_enough() -> None:
    assert left_in_cell("me-ls", (1.0, 1.0), (0.5, 0.5)) == 0


def test_a_higher_fitness_alone_is_not_enough() -> None:
    assert left_in_cell("me-ls", (1.0, 1.0), (2.0, 1.5)) == 0
    assert left_in_cell("me", (1.0, 1.0), (2.0, 1.5)) == 1


def test_a_tie_is_no_improvement() -> None:
    assert left_in_cell("me", (1.0, 0.0), (1.0, 0.0)) == 0
    assert left_in_cell("me-ls", (1.0, 1.0), (1.0, 0.5)) == 0
    assert left_in_cell("me-ls", (1.0, 1.0), (2.0, 1.0)) == 0


def test_of_two_that_do_not_dominate_each_other_the_first_stays() -> None:
    fit, steady = (2.0, 1.0), (1.0, 0.5)
    assert left_in_cell("me-ls", fit, steady) == left_in_cell("me-ls", steady, fit) == 0
    assert left_in_cell("me-ls", fit, steady, (3.0, 0.9)) == 2


# --- what the episodes of a policy say about it ---------------------------------------------------


def played(fitness: np.ndarray, descriptor: np.ndarray, diverged: np.ndarray) -> Episodes:
    return Episodes(jnp.float32(fitness), jnp.float32(descriptor), jnp.array(diverged))


LATTICE = hnp.arrays(np.int8, (2 * BATCH, EPISODES), elements=st.integers(-6, 6))


@pytest.mark.parametrize("algo", ["me", "me-ls"])
@given(
    position=LATTICE,
    height=hnp.arrays(np.int8, 2 * BATCH, elements=st.integers(-2, 2)),
    fitness=LATTICE,
    diverged=hnp.arrays(
        bool, (2 * BATCH, EPISODES), elements=st.sampled_from([False] * 9 + [True])
    ),
)
def test_episodes_become_a_repertoire_as_in_the_pseudocode(
    algo: str, position: Any, height: Any, fitness: Any, diverged: Any
) -> None:
    """From episodes on. A policy's descriptors lie on a horizontal line: their distances are exact."""
    episodes = 1 if algo == "me" else EPISODES
    x, y = position[:, :episodes] / 4, np.repeat(height[:, None] / 2, episodes, axis=1)
    fitness, diverged = fitness[:, :episodes] / 4, diverged[:, :episodes]
    nothing = np.where(diverged, np.nan, 0)

    plain, repertoire = Plain(algo, CENTROIDS), empty()
    for batch in (range(BATCH), range(BATCH, 2 * BATCH)):
        descriptors = np.stack([x + nothing, y], axis=-1)[batch.start : batch.stop]
        outcome = played(
            (fitness + nothing)[batch.start : batch.stop],
            descriptors,
            diverged[batch.start : batch.stop],
        )
        character, valid = characterise(RULES[algo], outcome, repertoire.centroids)
        offspring = Offspring(named_policies(batch), character, valid)
        repertoire, _ = insert(repertoire, offspring, RULES[algo].replaces)
        for i in batch:
            plain.evaluate(
                i, [(fitness[i, e], (x[i, e], y[i, e]), diverged[i, e]) for e in range(episodes)]
            )
    assert_equal(repertoire, plain)


@pytest.mark.parametrize("seed", range(5))
def test_me_sampling_becomes_a_repertoire_as_in_the_pseudocode(seed: int) -> None:
    random, count = np.random.default_rng(seed), 2 * BATCH
    fitness = random.integers(-4, 4, (count, 8)) / 4
    centre = random.uniform(-1.5, 1.5, (count, 1, 2))
    descriptors = np.float32(centre + random.normal(0, 0.4, (count, 8, 2)))
    diverged = random.random((count, 8)) < 0.02
    rule, plain = RULES["me-sampling"], Plain("me-sampling", CENTROIDS)
    outcome = played(fitness, descriptors, diverged)
    character, valid = characterise(rule, outcome, jnp.array(CENTROIDS))
    offspring = Offspring(named_policies(range(count)), character, valid)
    repertoire, _ = insert(empty(), offspring, rule.replaces)
    for i in range(count):
        episodes = zip(fitness[i], descriptors[i].tolist(), diverged[i], strict=True)
        plain.evaluate(i, [(f, tuple(d), bad) for f, d, bad in episodes])
    assert_equal(repertoire, plain, close=5e-3)


@pytest.mark.parametrize("episodes", [1, 2, 3, 10])
def test_spread_is_the_mean_distance_of_all_pairs(episodes: int) -> None:
    descriptors = np.random.default_rng(episodes).normal(0, 5, (episodes, 2))
    pairs = scipy.spatial.distance.pdist(descriptors)
    wanted = pairs.mean() if len(pairs) else 0.0
    assert me_ls.spread(jnp.float32(descriptors)) == pytest.approx(wanted, rel=1e-5)


def test_spread_leaves_out_what_is_not_counted() -> None:
    descriptors = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    descriptors[2] = np.nan
    counted = np.array([True, True, False, True, False, True])
    found = me_ls.spread(jnp.asarray(descriptors), jnp.asarray(counted))
    np.testing.assert_allclose(found, me_ls.spread(jnp.asarray(descriptors[counted])), rtol=1e-6)


@pytest.mark.parametrize("episodes", [1, 2, 10])
def test_equal_descriptors_have_no_spread_and_are_their_own_median(episodes: int) -> None:
    descriptors = jnp.tile(jnp.array([[0.1, -7.3]]), (episodes, 1))
    assert me_ls.spread(descriptors) == 0
    np.testing.assert_allclose(me_ls.geometric_median(descriptors), descriptors[0], rtol=1e-6)


@pytest.mark.parametrize("episodes", [1, 2, 5, 10])
@given(data=st.data())
def test_the_most_frequent_cell_is_the_first_of_equals(episodes: int, data: st.DataObject) -> None:
    cells = data.draw(hnp.arrays(np.int32, episodes, elements=st.integers(0, 4)))
    [(wanted, _)] = collections.Counter(cells.tolist()).most_common(1)  # stable: first of equals
    assert me_ls.most_frequent(jnp.array(cells)) == wanted


def total_distance(centre: Any, points: np.ndarray) -> float:
    return float(np.linalg.norm(points - np.asarray(centre, float), axis=1).sum())


@pytest.mark.parametrize("episodes", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("seed", range(3))
def test_no_point_is_closer_to_all_than_the_geometric_median(episodes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    points = random.normal(0, 3, (episodes, 2)).astype(np.float32)
    if seed == 2:  # half of them in one place: Weiszfeld's algorithm creeps
        points[: episodes // 2] = points[0]
    found = me_ls.geometric_median(jnp.array(points))
    starts = [points.mean(axis=0), *points]
    best = min(
        scipy.optimize.minimize(total_distance, start, (points,), method="Nelder-Mead").fun
        for start in starts
    )
    assert total_distance(found, points) == pytest.approx(best, rel=5e-4, abs=1e-5)


def test_one_far_episode_moves_the_mean_and_not_the_median() -> None:
    points = jnp.array([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [0.1, 0.1], [15.0, 15.0]])
    assert jnp.abs(me_ls.geometric_median(points)).max() < 0.2


def test_the_descriptor_of_me_ls_lies_in_its_most_frequent_cell() -> None:
    random = np.random.default_rng(0)
    centroids = cvt((-1.0, -1.0), (1.0, 1.0), 32, key=jax.random.key(0))
    descriptors = jnp.float32(random.normal(0, 0.3, (200, 10, 2)))
    outcome = played(np.zeros((200, 10)), descriptors, np.zeros((200, 10), bool))
    character, _ = characterise(RULES["me-ls"], outcome, centroids)
    cells = np.asarray(me_ls.nearest(centroids, descriptors))
    wanted = [collections.Counter(row).most_common(1)[0][0] for row in cells.tolist()]
    assert me_ls.nearest(centroids, character.descriptor).tolist() == wanted


# --- the tessellation -----------------------------------------------------------------------------


def test_the_tessellation_depends_on_its_key_alone() -> None:
    one, again, other = (cvt((0.0,), (1.0,), 16, key=jax.random.key(k)) for k in (1, 1, 2))
    assert (one == again).all()
    assert (one != other).any()


@pytest.mark.parametrize("low, high", [((-15.0, -15.0), (15.0, 15.0)), ((0.0, 2.0), (1.0, 8.0))])
def test_cells_are_inside_the_bounds_and_about_equally_large(low: Any, high: Any) -> None:
    cells = 64
    centroids = np.asarray(cvt(low, high, cells, key=jax.random.key(0)))
    assert (centroids > low).all()
    assert (centroids < high).all()
    points = np.random.default_rng(0).uniform(low, high, (50_000, len(low)))
    distance = scipy.spatial.distance.cdist(points, centroids)
    share = np.bincount(distance.argmin(axis=1), minlength=cells) * cells / len(points)
    assert share.min() > 0.25
    assert share.max() < 2.5
    assert share.std() < 0.35


@given(hnp.arrays(np.int8, (7, 2), elements=st.integers(-8, 8)))
def test_a_point_belongs_to_the_first_of_the_nearest_centroids(points: np.ndarray) -> None:
    plain = Plain("me", CENTROIDS)
    found = me_ls.nearest(jnp.array(CENTROIDS), jnp.float32(points / 4))
    assert found.tolist() == [plain.cell_of(tuple(p)) for p in (points / 4).tolist()]


# --- variation and selection ----------------------------------------------------------------------


def filled(occupied: list[int], cells: int = 32) -> Repertoire:
    """A repertoire whose occupied cells hold the policy with the cell's number."""
    repertoire = empty([[float(i), 0.0] for i in range(cells)])
    fitness = repertoire.fitness.at[jnp.array(occupied)].set(0.0)
    return eqx.tree_at(
        lambda r: (r.policies, r.fitness), repertoire, (named_policies(range(cells)), fitness)
    )


def test_parents_come_uniformly_from_the_occupied_cells_alone() -> None:
    occupied = [0, 3, 17, 30, 31]
    parents = names_of(me_ls.select_uniformly(filled(occupied), 10_000, key=jax.random.key(0)))
    count = np.bincount(parents, minlength=32)
    assert set(parents) == set(occupied)
    assert scipy.stats.chisquare(count[occupied]).pvalue > 0.001


def weights_of(policies: me_ls.MLP) -> np.ndarray:
    rows = [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(policies)]
    return np.concatenate(rows, axis=1)


def test_iso_noise_is_independent_for_every_weight() -> None:
    children = me_ls.vary(filled([5]), 2000, 0.005, 0.05, key=jax.random.key(0))
    noise = (weights_of(children) - 5).T  # one parent: the line has no length
    assert noise.mean() == pytest.approx(0, abs=1e-4)
    assert noise.std(axis=1) == pytest.approx(0.005, rel=0.08)
    correlation = np.corrcoef(noise) - np.eye(len(noise))
    assert np.abs(correlation).max() < 0.1


def test_line_noise_is_one_number_for_a_whole_policy() -> None:
    children = weights_of(me_ls.vary(filled([0, 1]), 8000, 0.0, 0.05, key=jax.random.key(0)))
    np.testing.assert_allclose(
        children, np.repeat(children[:, :1], children.shape[1], 1), atol=1e-6
    )
    step = children[:, 0] - np.round(children[:, 0])  # along the line from one parent to the other
    moved = step[step != 0]
    assert len(moved) / len(step) == pytest.approx(0.5, abs=0.05)  # else: both parents are the same
    assert moved.mean() == pytest.approx(0, abs=0.004)
    assert moved.std() == pytest.approx(0.05, rel=0.05)


def test_children_of_different_keys_differ() -> None:
    one, other = (
        weights_of(me_ls.vary(filled([5]), 10, 0.005, 0.05, key=jax.random.key(k))) for k in (0, 1)
    )
    assert len(np.unique(np.concatenate([one, other]), axis=0)) == 20


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_paper(point: Task) -> None:
    repertoire = filled([1, 2], cells=4)
    fitness = jnp.array([-jnp.inf, -3.0, -5.0, -jnp.inf])
    spread = jnp.array([jnp.inf, 0.5, 1.5, jnp.inf])
    repertoire = eqx.tree_at(lambda r: (r.fitness, r.spread), repertoire, (fitness, spread))
    found = me_ls.repertoire_metrics(point, repertoire)
    worst = -math.sqrt(2) * point.length  # both actions at their limit all the time
    assert found["coverage"] == 0.5
    assert found["max_fitness"] == -3
    assert found["qd_score"] == pytest.approx((-3 - worst) + (-5 - worst), rel=1e-6)
    assert found["mean_spread"] == 1


# --- a search is a value --------------------------------------------------------------------------


def test_ten_lines_without_a_directory_are_a_search() -> None:
    task = make_task(TaskConfig("point-omni", length=20, reach=0.5))
    config = SearchConfig("me-ls", iterations=5, cells=32, batch=16, episodes=4, hidden=(8,))
    search = make_search(task, config)
    state = search.init(jax.random.key(0))
    coverage = []
    for key in jax.random.split(jax.random.key(1), search.iterations):
        state, metrics = search.step(state, key)
        coverage.append(float(metrics["coverage"]))
    assert 0 < coverage[0] < coverage[-1] == np.mean(state.repertoire.occupied)


def unharmed(tree: Any) -> Any:
    """A copy in NumPy of what can still be read."""
    return jax.tree.map(np.array, tree)


@pytest.mark.parametrize("algo", ALGOS)
def test_a_step_leaves_everything_that_the_caller_holds(
    algo: str, point: Task, tiny: SearchConfig
) -> None:
    search = make_search(point, replace(tiny, algo=algo))
    states = [search.init(jax.random.key(0))]
    before = [unharmed(states[0])]
    centroids = states[0].repertoire.centroids
    for i in range(4):
        state, _ = search.step(states[-1], jax.random.key(i))
        states.append(state)
        before.append(unharmed(state))
    for state, copy in zip(states, before, strict=True):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        assert same_bits(state, copy)
        assert same_bits(state.repertoire.centroids, centroids)
    again, _ = search.step(states[1], jax.random.key(1))  # an old state goes on as it did
    assert same_bits(again, states[2])


def test_an_insertion_leaves_everything_that_the_caller_holds() -> None:
    drawn = ALL_THE_SAME._replace(fitness=np.arange(2 * BATCH))
    repertoire, offspring = empty(), offer(drawn, np.arange(BATCH))
    before = unharmed((repertoire, offspring))
    results = [insert(repertoire, offspring, RULES["me"].replaces) for _ in range(3)]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((repertoire, offspring)))
    assert same_bits((repertoire, offspring), before)
    assert same_bits(results[0], results[1]) and same_bits(results[1], results[2])
    assert results[0][1] == BATCH


@pytest.mark.parametrize("algo", ALGOS)
def test_searches_of_several_seeds_at_once_are_those_of_each_seed(
    algo: str, point: Task, tiny: SearchConfig
) -> None:
    """`vmap` over seeds: the same policies in the same cells, up to the last digits."""
    search = make_search(point, replace(tiny, algo=algo))
    seeds = jnp.arange(3)
    init_keys, first, second = (
        jax.vmap(lambda s, n=name: jax.random.fold_in(jax.random.key(s), n))(seeds)
        for name in range(3)
    )
    together = jax.vmap(search.init)(init_keys)
    alone = [search.init(key) for key in init_keys]
    for keys in (first, second):
        together, metrics = jax.vmap(search.step)(together, keys)
        pairs = [search.step(state, key) for state, key in zip(alone, keys, strict=True)]
        alone = [state for state, _ in pairs]
        for i, (state, own) in enumerate(pairs):
            found = jax.tree.map(lambda x: x[i], (together, metrics))  # noqa: B023 - used at once
            assert (found[0].repertoire.occupied == state.repertoire.occupied).all()
            assert found[1]["insertions"] == own["insertions"] > 0
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((state, own)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert len({float(x) for x in metrics["max_fitness"]}) == 3


def test_an_empty_repertoire_proposes_random_policies(point: Task, tiny: SearchConfig) -> None:
    search, key = make_search(point, tiny), jax.random.key(3)
    repertoire = search.init(jax.random.key(0)).repertoire
    proposed = search.propose(repertoire, 7, key=key)
    random = me_ls.random_policies(point, tiny.hidden, jax.random.split(key, 7))
    assert same_bits(proposed, random)
    assert len(np.unique(weights_of(proposed), axis=0)) == 7


def test_a_repertoire_with_a_single_policy_proposes_its_variations(
    point: Task, tiny: SearchConfig
) -> None:
    search, key = make_search(point, tiny), jax.random.key(3)
    repertoire = search.init(jax.random.key(0)).repertoire
    repertoire = eqx.tree_at(lambda r: r.fitness, repertoire, repertoire.fitness.at[5].set(-1.0))
    parent = me_ls.random_policies(point, tiny.hidden, jax.random.split(key, 32))
    repertoire = eqx.tree_at(lambda r: r.policies, repertoire, parent)
    proposed = weights_of(search.propose(repertoire, 7, key=key))
    assert (np.abs(proposed - weights_of(parent)[5]) < 6 * tiny.iso_sigma).all()


def test_a_rule_of_ones_own_is_one_line(
    point: Task, tiny: SearchConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: nobody is ever replaced, and all parents are that of the first occupied cell."""

    def select_first(repertoire: Repertoire, count: int, *, key: jax.Array) -> me_ls.MLP:
        first = jnp.argmax(repertoire.occupied)
        return jax.tree.map(lambda x: jnp.repeat(x[first][None], count, 0), repertoire.policies)

    def never(new: Character, old: Character) -> jax.Array:
        return jnp.array(False)

    rule = Rule("Mine", "", "#000000", me_ls.characterise_once, never, select=select_first)
    monkeypatch.setitem(RULES, "mine", rule)
    search = make_search(point, replace(tiny, algo="mine"))
    before, _ = search.step(search.init(jax.random.key(0)), jax.random.key(1))
    after, _ = search.step(before, jax.random.key(2))
    kept = np.asarray(before.repertoire.occupied)
    assert after.repertoire.occupied.sum() >= kept.sum() > 0
    was, now = (weights_of(state.repertoire.policies) for state in (before, after))
    np.testing.assert_array_equal(now[kept], was[kept])
    proposed = search.propose(before.repertoire, 9, key=jax.random.key(3))
    first = was[int(np.argmax(kept))]
    assert (np.abs(weights_of(proposed) - first) < 6 * tiny.iso_sigma).all()


# --- runs: stopped, killed, damaged ---------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def checkpoint_after_every_iteration() -> Iterator[None]:
    before = machine.settings().checkpoint_seconds
    machine.configure({"checkpoint_seconds": 0.0})
    yield
    machine.configure({"checkpoint_seconds": before})


@dataclass(frozen=True)
class Eventful:
    """A search in which something happens during the iteration that draws from a certain key."""

    search: MapElites
    when: jax.Array
    happens: Callable[[], None]

    def init(self, key: jax.Array) -> SearchState:
        return self.search.init(key)

    def step(self, state: SearchState, key: jax.Array) -> tuple[SearchState, dict[str, Any]]:
        if bool(key == self.when):
            self.happens()
        return self.search.step(state, key)


def run_search(
    search: MapElites,
    seed: int,
    directory: Path,
    at: int = 0,
    happens: Callable[[], None] = lambda: None,
) -> Repertoire:
    """As `qdt search` does; during iteration `at`, something happens."""
    steps = stream(seed, "search")
    state = drive(
        Eventful(search, jax.random.fold_in(steps, at), happens),
        Stage(directory, {}),
        init=stream(seed, "search-init"),
        steps=steps,
        total=search.iterations,
        title=search.config.algo,
        work=("steps", search.steps_per_iteration),
        show=me_ls.SHOWN,
        check=me_ls.refuse_empty,
    )
    return state.repertoire


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def comparable(directory: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    return [
        {n: x for n, x in row.items() if n != "steps_per_second"}
        for row in read_metrics(directory / "metrics.jsonl")
    ]


class Undisturbed(NamedTuple):
    search: MapElites
    directory: Path
    repertoire: Repertoire


@pytest.fixture(scope="module", params=ALGOS)
def undisturbed(
    request: pytest.FixtureRequest,
    point: Task,
    tiny: SearchConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Undisturbed:
    """A search that ran through, with a checkpoint after every iteration."""
    search = make_search(point, replace(tiny, algo=request.param))
    directory = tmp_path_factory.mktemp("undisturbed")
    return Undisturbed(search, directory, run_search(search, 7, directory))


def assert_as_undisturbed(directory: Path, repertoire: Repertoire, wanted: Undisturbed) -> None:
    assert same_bits(repertoire, wanted.repertoire)
    assert comparable(directory) == comparable(wanted.directory)


def test_a_search_fills_cells_and_gets_better(undisturbed: Undisturbed) -> None:
    rows, config = comparable(undisturbed.directory), undisturbed.search.config
    assert [row["iteration"] for row in rows] == list(range(undisturbed.search.iterations))
    assert rows[-1]["coverage"] > rows[0]["coverage"] > 0
    assert rows[-1]["max_fitness"] >= rows[0]["max_fitness"]
    assert rows[-1]["steps"] >= config.steps > rows[-2]["steps"]
    assert (rows[-1]["mean_spread"] is None) == (config.algo == "me")


def test_a_run_on_disk_is_the_loop_in_ten_lines(undisturbed: Undisturbed) -> None:
    """The driver adds nothing to a search: iteration i draws from `fold_in(key, i)` alone."""
    search = undisturbed.search
    state = machine.replicate(search.init(stream(7, "search-init")))
    for i in range(search.iterations):
        state, _ = search.step(state, jax.random.fold_in(stream(7, "search"), i))
    assert same_bits(state.repertoire, undisturbed.repertoire)


def test_all_algorithms_of_a_seed_have_the_same_cells(
    undisturbed: Undisturbed, point: Task, tiny: SearchConfig
) -> None:
    me = make_search(point, replace(tiny, algo="me")).init(stream(7, "search-init"))
    assert same_bits(me.repertoire.centroids, undisturbed.repertoire.centroids)


@pytest.mark.parametrize("undisturbed", ["me-ls"], indirect=True)
def test_the_same_seed_gives_the_same_search_and_another_one_does_not(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    again = run_search(undisturbed.search, 7, tmp_path / "again")
    assert_as_undisturbed(tmp_path / "again", again, undisturbed)
    other = run_search(undisturbed.search, 8, tmp_path / "other")
    assert not same_bits(other, again)


def test_a_search_that_is_stopped_goes_on_as_if_it_had_not_been(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    search = undisturbed.search
    last = search.iterations - 1  # even then: whatever comes next does not begin
    for i in (0, 3, last):
        with pytest.raises(Stopped, match=f"stopped after step {i + 1} of {last + 1}; the same"):
            run_search(search, 7, tmp_path, at=i, happens=press_ctrl_c)
    resumed = run_search(search, 7, tmp_path)
    assert_as_undisturbed(tmp_path, resumed, undisturbed)
    finished = run_search(search, 7, tmp_path)
    assert_as_undisturbed(tmp_path, finished, undisturbed)


KILLED = """
import json, os, pathlib, signal, sys
import jax
import envs, me_ls
from machinery import driver, machine, runs, streams
machine.prepare_jax()
machine.configure({"checkpoint_seconds": 0.0})
directory, config, moment, iteration = sys.argv[1:]
config = me_ls.SearchConfig(**(json.loads(config) | {"hidden": tuple(json.loads(config)["hidden"])}))
init, steps = streams.stream(7, "search-init"), streams.stream(7, "search")
fatal = jax.random.fold_in(steps, int(iteration))
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def replace_or_die(source, target, replace=os.replace):
    if moment == "checkpoint" and f"checkpoint-{int(iteration):09d}" in str(target):
        die()
    replace(source, target)

def log_and_die(stage, row, log=runs.Stage.log):
    log(stage, row)
    if moment == "log" and row["iteration"] == int(iteration):
        die()

class Mortal(me_ls.MapElites):
    def step(self, state, key):
        result = super().step(state, key)
        if moment == "iteration" and bool(key == fatal):
            die()
        return result

os.replace, runs.Stage.log = replace_or_die, log_and_die
search = Mortal(envs.make_task(envs.TaskConfig("point-omni", length=20, reach=0.5)), config)
driver.drive(
    search, runs.Stage(pathlib.Path(directory), {}), init=init, steps=steps, total=search.iterations,
    title="", work=("steps", search.steps_per_iteration), show=(),
)
"""


@pytest.mark.parametrize("undisturbed", ["me-ls"], indirect=True)
def test_a_search_that_is_killed_goes_on_as_if_it_had_not_been(
    undisturbed: Undisturbed, tmp_path: Path, run_python: Any
) -> None:
    """`kill -9` inside an iteration, between the metrics and the checkpoint, before the renaming.

    The processes have as many devices as there are cores, this one has two: it makes no difference.
    """
    config = json.dumps(vars(undisturbed.search.config))
    for moment, iteration in (("iteration", 2), ("log", 4), ("checkpoint", 7)):
        ended = run_python(KILLED, tmp_path, config, moment, iteration, check=False)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert (tmp_path / "checkpoint-000000006.safetensors").exists()
    assert not (tmp_path / "checkpoint-000000007.safetensors").exists()
    resumed = run_search(undisturbed.search, 7, tmp_path)
    assert_as_undisturbed(tmp_path, resumed, undisturbed)


@pytest.mark.parametrize("undisturbed", ["me-ls"], indirect=True)
def test_after_a_damaged_checkpoint_the_search_goes_on_from_the_one_before(
    undisturbed: Undisturbed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped):
        run_search(undisturbed.search, 7, tmp_path, at=5, happens=press_ctrl_c)
    newest = tmp_path / "checkpoint-000000006.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = run_search(undisturbed.search, 7, tmp_path)
    assert newest.name in capsys.readouterr().err
    assert_as_undisturbed(tmp_path, resumed, undisturbed)


def test_a_run_does_not_go_on_with_another_config(tiny: SearchConfig, tmp_path: Path) -> None:
    Stage(tmp_path, {"search": vars(tiny)})
    other = vars(tiny) | {"batch": 17}
    with pytest.raises(UserError, match=r"batch is 16 there and 17 here"):
        Stage(tmp_path, {"search": other})


# --- what cannot work -----------------------------------------------------------------------------


class OneSick(MapElites):
    """One policy of every batch is no number."""

    def propose(self, repertoire: Repertoire, count: int, *, key: jax.Array) -> me_ls.MLP:
        policies = super().propose(repertoire, count, key=key)
        return jax.tree.map(lambda x: x.at[3].set(jnp.nan), policies)


class AllSick(MapElites):
    def propose(self, repertoire: Repertoire, count: int, *, key: jax.Array) -> me_ls.MLP:
        policies = super().propose(repertoire, count, key=key)
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), policies)


def test_policies_that_diverge_stay_out_and_are_counted(
    point: Task, tiny: SearchConfig, tmp_path: Path
) -> None:
    repertoire = run_search(OneSick(point, tiny), 0, tmp_path)
    assert jnp.isfinite(weights_of(repertoire.policies)).all()
    rows = comparable(tmp_path)
    assert len(rows) == 10
    assert all(row["diverged"] == tiny.episodes for row in rows)


def test_a_search_in_which_everything_diverges_ends_with_one_sentence(
    point: Task, tiny: SearchConfig, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="every episode diverged"):
        run_search(AllSick(point, tiny), 0, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"iterations": 0},
        {"cells": -1},
        {"batch": 0},
        {"episodes": 0},
        {"algo": "me-ls", "episodes": 1},
        {"hidden": ()},
        {"hidden": (8, 0)},
        {"algo": "map-elites"},
        {"iso_sigma": -0.1},
        {"line_sigma": math.nan},
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_one_sentence(point: Task, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="|".join(wrong)) as caught:
        make_search(point, SearchConfig(**wrong))
    assert "\n" not in str(caught.value)


def test_the_budget_is_counted_in_environment_steps() -> None:
    task = make_task(TaskConfig("point-omni", length=10))

    def iterations(*settings: Any, **more: Any) -> int:
        return make_search(task, SearchConfig(*settings, **more)).iterations

    assert iterations("me-ls", steps=4000, batch=20, episodes=5) == 4
    assert iterations("me", steps=4000, batch=20, episodes=5) == 20
    assert iterations("me-ls", steps=4001, batch=20, episodes=5) == 5
    assert iterations("me-ls", steps=4001, iterations=7) == 7
