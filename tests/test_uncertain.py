"""The methods for uncertain domains against plain transcriptions, as values, on disk and as commands.

`Plain` and its three children are the methods in loops and lists, without JAX. Both sides are given the
same episodes from a script: what a policy achieves in its first, second, ... episode is drawn beforehand.
The numbers are small multiples of powers of two, so that ties are real ties, and no mean lies on the border
between two cells, where rounding would decide.
"""

import collections
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cli
import me_ls
import uncertain
from envs import Episodes, Task, TaskConfig, make_task
from machinery import machine
from machinery.driver import Stopped, drive
from machinery.files import UserError
from machinery.runs import Stage, read_metrics
from machinery.streams import stream
from me_ls import RULES, Character, Repertoire, SearchConfig, make_search
from uncertain import (
    AdaptiveSampling,
    ArchiveSampling,
    Deep,
    DeepGrid,
    UncertainConfig,
    UncertainState,
)

SEATED = ("deep-grid", "adaptive-sampling", "archive-sampling")
ALGOS = (*SEATED, "me-soft")

# --- episodes from a script -----------------------------------------------------------------------

CENTROIDS = [[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [9.0, 0.0]]
BATCH, MEMORY, ITERATIONS = 6, 3, 8


class Episode(NamedTuple):
    fitness: float
    descriptor: tuple[float, float]
    diverged: bool


class Script(NamedTuple):
    """What policies achieve. A policy is a number; so are its episodes."""

    skill: np.ndarray  # of a policy
    luck: np.ndarray  # of an episode
    home: np.ndarray  # of a policy
    way: np.ndarray  # of an episode
    diverged: np.ndarray  # an episode

    def episode(self, name: int, number: int) -> Episode:
        policy, chance = 5 * name % len(self.skill), (7 * name + 3 * number) % len(self.luck)
        x = self.home[policy] + self.way[chance] / 4 + 1 / 32  # off the borders, also in the mean
        fitness = float(self.skill[policy] + self.luck[chance])
        return Episode(fitness, (float(x), 0.0), bool(self.diverged[chance]))


def whole_numbers(count: int, low: int, high: int) -> st.SearchStrategy:
    return hnp.arrays(np.int8, count, elements=st.integers(low, high))


SCRIPTS = st.builds(
    Script,
    skill=whole_numbers(13, -1, 2),
    luck=whole_numbers(31, -2, 2),
    home=whole_numbers(13, 0, 3),
    way=whole_numbers(31, -3, 3),
    diverged=hnp.arrays(bool, 31, elements=st.sampled_from([False] * 14 + [True])),
)
RANDOM = np.random.default_rng(0)
ALL_THE_SAME = Script(*(np.zeros(31, int) for _ in range(4)), np.zeros(31, bool))
ALL_DIVERGED = ALL_THE_SAME._replace(diverged=np.ones(31, bool))
ALL_DRIFT = Script(
    RANDOM.integers(-1, 3, 13),
    RANDOM.integers(-2, 3, 31),
    RANDOM.integers(0, 4, 13),
    RANDOM.integers(-6, 7, 31),
    RANDOM.random(31) < 0.03,
)


@dataclass
class Theatre:
    """Offspring are numbered as they are proposed, and play what their script says."""

    script: Script
    born: int = 0
    played: collections.Counter = field(default_factory=collections.Counter)

    def offspring(self, count: int) -> list[int]:
        self.born += count
        return list(range(self.born - count, self.born))

    def play(self, name: int) -> Episode:
        self.played[name] += 1
        return self.script.episode(name, self.played[name])


class OnStage:
    """In place of variation and of episodes."""

    def propose(self: Any, repertoire: Repertoire, count: int, *, key: jax.Array) -> me_ls.MLP:
        return named_policies(self.theatre.offspring(count))

    def play(self: Any, policies: me_ls.MLP, *, key: jax.Array, **how: Any) -> Episodes:
        episodes = [self.theatre.play(name) for name in names_of(policies)]
        nothing = np.array([np.nan if e.diverged else 0.0 for e in episodes])
        return Episodes(
            jnp.float32(np.array([e.fitness for e in episodes]) + nothing)[:, None],
            jnp.float32(np.array([e.descriptor for e in episodes]) + nothing[:, None])[:, None],
            jnp.array([e.diverged for e in episodes])[:, None],
        )


class StagedDeepGrid(OnStage, DeepGrid):
    theatre: Any = eqx.field(static=True)


class StagedArchiveSampling(OnStage, ArchiveSampling):
    theatre: Any = eqx.field(static=True)


class StagedAdaptiveSampling(OnStage, AdaptiveSampling):
    theatre: Any = eqx.field(static=True)


def named_policies(names: Any) -> me_ls.MLP:
    """Policies that can be told apart: every weight of a policy is its number."""
    names = np.asarray(names, np.float32)
    shapes = jax.eval_shape(lambda: me_ls.MLP((3, 4, 2), key=jax.random.key(0)))

    def named(leaf: Any) -> jax.Array:
        column = names.reshape(*names.shape, *(1 for _ in leaf.shape))
        return jnp.asarray(np.broadcast_to(column, (*names.shape, *leaf.shape)))

    return jax.tree.map(named, shapes)


def names_of(policies: me_ls.MLP) -> list[int]:
    """Whose weights these are; no policy may be a mixture of two."""
    rows = [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(policies)]
    weights = np.concatenate(rows, axis=1)
    assert (weights == weights[:, :1]).all()
    return weights[:, 0].astype(int).tolist()


def same_bits(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


# --- the methods in plain Python ------------------------------------------------------------------


@dataclass
class Policy:
    name: int
    episodes: list[Episode] = field(default_factory=list)  # newest first
    challenges: int = 0

    @property
    def fitness(self) -> float:
        return sum(e.fitness for e in self.episodes) / len(self.episodes)

    @property
    def descriptor(self) -> tuple[float, ...]:
        axes = zip(*(e.descriptor for e in self.episodes), strict=True)
        return tuple(sum(axis) / len(self.episodes) for axis in axes)


class Plain:
    """Cells with places, each empty or with a policy."""

    def __init__(self, theatre: Theatre, depth: int, seats: int):
        self.theatre, self.seats = theatre, seats
        self.cells: list[list[Policy | None]] = [[None] * depth for _ in CENTROIDS]
        self.waiting: list[Policy] = []

    def cell_of(self, descriptor: tuple[float, ...]) -> int:
        distances = [math.dist(descriptor, centroid) for centroid in CENTROIDS]
        return distances.index(min(distances))

    def offspring(self) -> list[Policy]:
        return [Policy(name) for name in self.theatre.offspring(self.seats)]

    def play(self, policy: Policy) -> bool:
        """Plays and remembers; false if the episode diverged."""
        episode = self.theatre.play(policy.name)
        policy.episodes = [episode, *policy.episodes][:MEMORY]
        return not episode.diverged

    def weakest(self, cell: int) -> int:
        """The first free place, else that of the first of the least fit."""
        fitness = [-math.inf if policy is None else policy.fitness for policy in self.cells[cell]]
        return fitness.index(min(fitness))


class PlainDeepGrid(Plain):
    def iterate(self, draws: list[int]) -> None:
        for policy, draw in zip(self.offspring(), draws, strict=True):
            if self.play(policy):
                cell = self.cells[self.cell_of(policy.descriptor)]
                cell[cell.index(None) if None in cell else draw] = policy


class PlainArchiveSampling(Plain):
    def iterate(self, draws: list[int]) -> None:
        offspring = self.offspring()
        everybody = [policy for cell in self.cells for policy in cell if policy is not None]
        everybody += offspring[: self.seats - len(everybody)]
        self.cells = [[None] * len(cell) for cell in self.cells]
        for policy in everybody:
            if self.play(policy):
                cell = self.cell_of(policy.descriptor)
                place = self.weakest(cell)
                old = self.cells[cell][place]
                if old is None or policy.fitness > old.fitness:
                    self.cells[cell][place] = policy


class PlainAdaptiveSampling(Plain):
    outside = 0.5

    def iterate(self, draws: list[int]) -> None:
        offspring = self.offspring()
        places = [(c, p) for c, cell in enumerate(self.cells) for p in range(len(cell))]
        challenged = [(c, p) for c, p in places if (who := self.cells[c][p]) and who.challenges]
        challenged.sort(key=lambda at: -self.cells[at[0]][at[1]].challenges)  # stable
        players = []
        for c, p in sorted(challenged[: self.seats - len(self.waiting)]):
            players.append(self.cells[c][p])
            self.cells[c][p] = None
        players += self.waiting
        players += offspring[: self.seats - len(players)]
        self.waiting = []
        played = [(policy, self.play(policy)) for policy in players]
        for policy, finite in played:
            if finite:
                self.settle(policy)

    def settle(self, policy: Policy) -> None:
        home = self.cell_of(policy.descriptor)
        elsewhere = [e for e in policy.episodes if self.cell_of(e.descriptor) != home]
        if len(elsewhere) / len(policy.episodes) > self.outside:
            return
        place = self.weakest(home)
        elite = self.cells[home][place]
        if elite is None:
            policy.challenges, self.cells[home][place] = 0, policy
        elif policy.fitness <= elite.fitness:
            elite.challenges += 1
        elif len(policy.episodes) >= len(elite.episodes):
            policy.challenges, self.cells[home][place] = 0, policy
        else:
            self.waiting.append(policy)


# --- both, side by side ---------------------------------------------------------------------------

METHODS = {
    "deep-grid": (StagedDeepGrid, PlainDeepGrid),
    "archive-sampling": (StagedArchiveSampling, PlainArchiveSampling),
    "adaptive-sampling": (StagedAdaptiveSampling, PlainAdaptiveSampling),
}


def staged(algo: str, depth: int, script: Script) -> Any:
    """A search whose episodes are given."""
    task = make_task(TaskConfig("point-omni", length=20))
    cells = len(CENTROIDS)
    config = UncertainConfig(
        algo, cells=cells, batch=BATCH, hidden=(4,), depth=depth, memory=MEMORY
    )
    return METHODS[algo][0](task, config, theatre=Theatre(script))


def first_state(search: Any) -> UncertainState:
    state = search.init(jax.random.key(0))
    centroids = jnp.array(CENTROIDS)
    return eqx.tree_at(
        lambda s: (s.repertoire.centroids, s.deep.centroids), state, (centroids, centroids)
    )


def assert_equal(state: UncertainState, plain: Plain) -> None:
    """The same policies in the same places, the same memory, and the fittest on the surface."""
    state = jax.tree.map(np.asarray, state)
    deep, seen = state.deep, state.deep.seen
    names = np.array(names_of(deep.players.policies)).reshape(deep.fitness.shape)
    on_surface = names_of(state.repertoire.policies)
    for cell, row in enumerate(plain.cells):
        for place, policy in enumerate(row):
            at = (cell, place)
            assert (deep.fitness[at] > -np.inf) == (policy is not None)
            if policy is None:
                assert seen.count[at] == deep.challenges[at] == 0
                continue
            count = len(policy.episodes)
            assert (names[at], seen.count[at]) == (policy.name, count)
            assert isinstance(plain, PlainArchiveSampling) or (
                deep.challenges[at] == policy.challenges
            )
            assert seen.fitness[at][:count].tolist() == [e.fitness for e in policy.episodes]
            found = [deep.fitness[at], *deep.descriptor[at]]
            np.testing.assert_allclose(found, [policy.fitness, *policy.descriptor], rtol=1e-6)
        inside = [policy for policy in row if policy is not None]
        assert (state.repertoire.fitness[cell] > -np.inf) == bool(inside)
        if inside:
            assert on_surface[cell] == max(inside, key=lambda policy: policy.fitness).name
    if state.waiting is not None:
        waits = state.waiting.seen.count > 0
        waiting = np.array(names_of(state.waiting.policies))[waits].tolist()
        assert waiting == [policy.name for policy in plain.waiting]


@pytest.mark.parametrize(
    "algo, depth",
    [
        ("deep-grid", 3),
        ("deep-grid", 1),
        ("archive-sampling", 2),
        ("archive-sampling", 1),
        ("adaptive-sampling", 1),
        ("adaptive-sampling", 2),
    ],
)
@given(script=SCRIPTS)
@example(ALL_THE_SAME)
@example(ALL_DIVERGED)
@example(ALL_DRIFT)
def test_every_iteration_is_that_of_the_plain_transcription(
    algo: str, depth: int, script: Script
) -> None:
    search = staged(algo, depth, script)
    plain = METHODS[algo][1](Theatre(script), depth, search.seats)
    state = first_state(search)
    for i in range(ITERATIONS):
        key = jax.random.key(i)
        draws = jax.random.randint(jax.random.split(key, 3)[2], (search.seats,), 0, depth)
        state, _ = search.step(state, key)
        plain.iterate(draws.tolist())
        assert_equal(state, plain)
        assert search.theatre.played == plain.theatre.played
        assert search.theatre.played.total() == (i + 1) * search.seats  # the budget


def test_the_scripts_contain_what_is_to_be_tested() -> None:
    """Elites that move, elites that vanish, challengers that wait and take over, full cells."""
    search = staged("adaptive-sampling", 1, ALL_DRIFT)
    state, seen = first_state(search), collections.Counter()
    home: dict[int, int] = {}
    for i in range(60):
        names = names_of(state.waiting.policies)
        waited = {names[j] for j in np.flatnonzero(np.asarray(state.waiting.seen.count))}
        state, _ = search.step(state, jax.random.key(i))
        occupied = np.asarray(state.repertoire.occupied)
        now = {n: c for c, n in enumerate(names_of(state.repertoire.policies)) if occupied[c]}
        seen["moved"] += sum(home[n] != c for n, c in now.items() if n in home)
        seen["gone"] += len(set(home.values()) - set(now.values()))
        seen["waited"] += len(waited)
        seen["won"] += len(waited & set(now))
        seen["full"] += (np.asarray(state.deep.seen.count) == MEMORY).sum()
        home = now
    assert min(seen[what] for what in ("moved", "gone", "waited", "won", "full")) > 0, seen


# --- single statements about the methods ----------------------------------------------------------


def deep_of(fitness: list[list[float]]) -> Deep:
    """Cells whose places hold the policies 0, 1, 2, ... with these fitnesses; -inf is an empty place."""
    cells, depth = np.shape(fitness)
    centroids = jnp.array([[float(i), 0.0] for i in range(cells)])
    policies = named_policies(np.arange(cells))
    numbers = (jnp.full(cells, -jnp.inf), jnp.zeros((cells, 2)), jnp.full(cells, jnp.inf))
    deep = uncertain.deepen(Repertoire(policies, *numbers, centroids), depth, MEMORY)
    names = named_policies(np.arange(cells * depth).reshape(cells, depth))
    return eqx.tree_at(lambda d: (d.policies, d.fitness), deep, (names, jnp.array(fitness)))


def test_parents_of_deep_grid_come_in_proportion_to_fitness_from_uniform_cells() -> None:
    nobody = -math.inf
    deep = deep_of([[1.0, 2.0, 4.0], [nobody] * 3, [-5.0, nobody, nobody], [3.0, 3.0, nobody]])
    parents = uncertain.select_in_proportion(deep, 30_000, key=jax.random.key(0))
    count = np.bincount(names_of(parents), minlength=12)
    wanted = np.array([0, 1 / 4, 3 / 4, 0, 0, 0, 1, 0, 0, 1 / 2, 1 / 2, 0]) / 3
    assert (count[wanted == 0] == 0).all()
    chosen = wanted > 0
    assert scipy.stats.chisquare(count[chosen], 30_000 * wanted[chosen]).pvalue > 0.001


def test_the_fittest_stands_for_a_cell() -> None:
    nobody = -math.inf
    repertoire = uncertain.surface(deep_of([[1.0, 4.0, 4.0], [nobody] * 3, [nobody, -5.0, -6.0]]))
    assert type(repertoire) is Repertoire
    assert repertoire.occupied.tolist() == [True, False, True]
    assert [names_of(repertoire.policies)[i] for i in (0, 2)] == [1, 7]
    assert repertoire.fitness[0] == 4


def test_a_lucky_elite_is_found_out_when_it_is_challenged() -> None:
    """Policy 0 is lucky once; the others are better in the long run."""

    class Lucky(Script):
        def episode(self, name: int, number: int) -> Episode:
            lucky = name == 0 and number == 1
            return Episode(10.0 if lucky else -1.0 if name == 0 else 1.0, (0.0, 0.0), False)

    search = staged("adaptive-sampling", 1, Lucky(*ALL_THE_SAME))
    state, _ = search.step(first_state(search), jax.random.key(0))
    assert names_of(state.repertoire.policies)[0] == 0
    for i in range(1, 20):
        state, _ = search.step(state, jax.random.key(i))
    assert names_of(state.repertoire.policies)[0] != 0
    assert state.repertoire.fitness[0] == 1


def left_in_cell(price: float, *offered: tuple[float, float]) -> int:
    """Which of the offered (fitness, spread), one after another in one cell, stays."""
    fitness, spread = np.array(offered, float).T
    count = len(offered)
    character = Character(jnp.float32(fitness), jnp.zeros((count, 2)), jnp.float32(spread))
    batch = me_ls.Offspring(named_policies(range(count)), character, jnp.ones(count, bool))
    empty = uncertain.surface(deep_of([[-math.inf]]))
    repertoire, _ = me_ls.insert(empty, batch, uncertain.SoftlyBetter(price))
    return names_of(repertoire.policies)[0]


def test_the_soft_criterion_lets_fitness_pay_for_spread() -> None:
    fit, steady = (4.0, 2.0), (3.0, 1.0)
    assert left_in_cell(0.5, fit, steady) == 0
    assert left_in_cell(2.0, fit, steady) == 1
    assert left_in_cell(1.0, fit, steady) == left_in_cell(1.0, steady, fit) == 0  # a tie
    assert left_in_cell(0.0, steady, fit) == 1  # then it is plain fitness


@given(
    fitness=whole_numbers(12, -3, 3),
    spread=whole_numbers(12, 0, 3),
    cell=whole_numbers(12, 0, 2),
    price=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_me_soft_inserts_as_the_plain_transcription(
    fitness: Any, spread: Any, cell: Any, price: float
) -> None:
    plain: dict[int, int] = {}
    score = [f - price * s for f, s in zip(fitness.tolist(), spread.tolist(), strict=True)]
    for i, c in enumerate(cell.tolist()):
        if c not in plain or score[i] > score[plain[c]]:
            plain[c] = i
    descriptor = jnp.float32(np.stack([cell, np.zeros(12)], axis=1))
    character = Character(jnp.float32(fitness), descriptor, jnp.float32(spread))
    batch = me_ls.Offspring(named_policies(range(12)), character, jnp.ones(12, bool))
    empty = uncertain.surface(deep_of([[-math.inf]] * 3))
    repertoire, _ = me_ls.insert(empty, batch, uncertain.SoftlyBetter(price))
    names, occupied = names_of(repertoire.policies), repertoire.occupied.tolist()
    assert {c: names[c] for c in range(3) if occupied[c]} == plain


def test_the_price_is_scaled_by_the_task(point: Task) -> None:
    """Price 1: a spread as wide as the space costs the worst fitness that there is."""
    search = make_search(point, UncertainConfig("me-soft", price=1.0))
    worst, width = math.sqrt(2) * point.length, math.sqrt(2)  # a square of side 1
    assert search.rule.replaces.price == pytest.approx(worst / width)
    double = make_search(point, UncertainConfig("me-soft", price=2.0))
    assert double.rule.replaces.price == 2 * search.rule.replaces.price


# --- searches: pure, seeded, counted --------------------------------------------------------------


@pytest.fixture(scope="session")
def small(tiny: SearchConfig) -> UncertainConfig:
    """Ten iterations or a few more, of every method."""
    return UncertainConfig(**vars(tiny) | {"depth": 3, "memory": 4})


def test_the_budget_counts_every_episode(point: Task) -> None:
    def search(algo: str, **more: Any) -> me_ls.MapElites:
        config = {"steps": 48_000, "cells": 10, "batch": 20, "episodes": 5} | more
        return make_search(point, UncertainConfig(algo, **config))

    length = 20
    assert search("deep-grid").steps_per_iteration == 20 * length
    assert search("adaptive-sampling").steps_per_iteration == 20 * length
    assert search("archive-sampling").steps_per_iteration == (2 * 10 + 20) * length
    assert search("archive-sampling", depth=1).steps_per_iteration == (10 + 20) * length
    assert search("me-soft").steps_per_iteration == 20 * 5 * length
    for algo, iterations in zip(ALGOS, (120, 120, 60, 24), strict=True):
        assert search(algo).iterations == iterations
        assert search(algo, steps=48_001).iterations == iterations + 1
        assert search(algo, iterations=7).iterations == 7


@pytest.mark.parametrize("algo", SEATED)
def test_as_many_episodes_are_played_as_are_counted(
    algo: str, point: Task, small: UncertainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = []

    def counting(
        task: Task, members: Any, keys: jax.Array, rollout: Any = uncertain.rollout
    ) -> Any:
        played.append(keys.size * task.length)
        return rollout(task, members, keys)

    monkeypatch.setattr(uncertain, "rollout", counting)
    search = make_search(point, replace(small, algo=algo))
    state = search.init(jax.random.key(0))
    for i in range(3):
        state, metrics = search.step(state, jax.random.key(i))
        assert 0 < metrics["offspring"] <= search.seats
    assert played == [search.steps_per_iteration] * 3


@pytest.mark.parametrize("algo", ALGOS)
def test_a_step_leaves_everything_that_the_caller_holds(
    algo: str, point: Task, small: UncertainConfig
) -> None:
    search = make_search(point, replace(small, algo=algo))
    states = [search.init(jax.random.key(0))]
    for i in range(3):
        states.append(search.step(states[-1], jax.random.key(i))[0])
    again, _ = search.step(states[1], jax.random.key(1))  # an old state goes on as it did
    assert same_bits(again, states[2])


@pytest.mark.parametrize("algo", SEATED)
def test_searches_of_several_seeds_at_once_are_those_of_each_seed(
    algo: str, point: Task, small: UncertainConfig
) -> None:
    search = make_search(point, replace(small, algo=algo))
    keys = jax.random.split(jax.random.key(0), (3, 2))
    together = jax.vmap(search.init)(keys[0])
    alone = [search.init(key) for key in keys[0]]
    for step in keys[1:]:
        together, _ = jax.vmap(search.step)(together, step)
        alone = [search.step(state, key)[0] for state, key in zip(alone, step, strict=True)]
    for i, state in enumerate(alone):
        found = jax.tree.map(lambda x: x[i], together)  # noqa: B023 - used at once
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algo", SEATED)
def test_policies_that_diverge_stay_out_and_are_counted(
    algo: str, point: Task, small: UncertainConfig
) -> None:
    search = make_search(point, replace(small, algo=algo))

    class OneSick(type(search)):
        """One offspring of every batch is no number."""

        def propose(self, repertoire: Repertoire, count: int, *, key: jax.Array) -> me_ls.MLP:
            policies = super().propose(repertoire, count, key=key)
            return jax.tree.map(lambda x: x.at[0].set(jnp.nan), policies)

    sick = OneSick(point, search.config)
    state = sick.init(jax.random.key(0))
    for i in range(4):
        state, metrics = sick.step(state, jax.random.key(i))
        assert metrics["diverged"] == 1
        inside = jax.tree.map(lambda x: x[state.deep.occupied], state.deep.policies)  # noqa: B023
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(inside))
        assert jnp.isfinite(state.repertoire.descriptor).all()


@pytest.mark.parametrize(
    "wrong",
    [{"depth": 0}, {"memory": 0}, {"outside": -0.1}, {"price": -1.0}, {"price": math.nan}],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_one_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="|".join(wrong)) as caught:
        UncertainConfig(**wrong)
    assert "\n" not in str(caught.value)


# --- runs: stopped and killed ---------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def checkpoint_after_every_iteration() -> Iterator[None]:
    before = machine.settings().checkpoint_seconds
    machine.configure({"checkpoint_seconds": 0.0})
    yield
    machine.configure({"checkpoint_seconds": before})


@dataclass(frozen=True)
class Eventful:
    """A search in which something happens during the iteration that draws from a certain key."""

    search: me_ls.MapElites
    when: jax.Array
    happens: Callable[[], None]

    def init(self, key: jax.Array) -> Any:
        return self.search.init(key)

    def step(self, state: Any, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        if bool(key == self.when):
            self.happens()
        return self.search.step(state, key)


def run_search(
    search: me_ls.MapElites,
    directory: Path,
    at: int = 0,
    happens: Callable[[], None] = lambda: None,
) -> Any:
    """As `qdt search` does; during iteration `at`, something happens. Returns the last state."""
    steps = stream(7, "search")
    return drive(
        Eventful(search, jax.random.fold_in(steps, at), happens),
        Stage(directory, {}),
        init=stream(7, "search-init"),
        steps=steps,
        total=search.iterations,
        title=search.config.algo,
        work=("steps", search.steps_per_iteration),
        show=me_ls.SHOWN,
        check=me_ls.refuse_empty,
    )


def comparable(directory: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    return [
        {n: x for n, x in row.items() if n != "steps_per_second"}
        for row in read_metrics(directory / "metrics.jsonl")
    ]


KILLED = """
import json, os, pathlib, signal, sys
import envs, me_ls, uncertain
from machinery import driver, machine, runs, streams
machine.prepare_jax()
machine.configure({"checkpoint_seconds": 0.0})
config = json.loads(sys.argv[2])
config = uncertain.UncertainConfig(**(config | {"hidden": tuple(config["hidden"])}))

def log_and_die(stage, row, log=runs.Stage.log):
    log(stage, row)
    if row["iteration"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)

runs.Stage.log = log_and_die
search = me_ls.make_search(envs.make_task(envs.TaskConfig("point-omni", length=20, reach=0.5)), config)
driver.drive(
    search, runs.Stage(pathlib.Path(sys.argv[1]), {}), init=streams.stream(7, "search-init"),
    steps=streams.stream(7, "search"), total=search.iterations,
    title="", work=("steps", search.steps_per_iteration), show=(),
)
"""


@pytest.mark.parametrize("algo", ALGOS)
def test_a_search_that_is_stopped_and_killed_goes_on_as_if_it_had_not_been(
    algo: str, point: Task, small: UncertainConfig, tmp_path: Path, run_python: Any
) -> None:
    """Ctrl-C in two iterations, then `kill -9` between the metrics and the checkpoint."""
    config = replace(small, algo=algo, iterations=8)
    search = make_search(point, config)
    wanted = run_search(search, tmp_path / "wanted")
    found = tmp_path / "found"
    for i in (0, 2):
        with pytest.raises(Stopped):
            run_search(search, found, i, lambda: os.kill(os.getpid(), signal.SIGINT))
    ended = run_python(KILLED, found, json.dumps(vars(config)), check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    resumed = run_search(search, found)
    assert same_bits(resumed, wanted)
    assert comparable(found) == comparable(tmp_path / "wanted")
    rows = comparable(found)
    assert rows[-1]["coverage"] > 0
    assert rows[-1]["steps"] == 8 * search.steps_per_iteration
    assert (rows[-1]["mean_spread"] is None) == (algo in SEATED)


@pytest.mark.parametrize("algo", ALGOS)
def test_all_algorithms_of_a_seed_have_the_same_cells(
    algo: str, point: Task, tiny: SearchConfig, small: UncertainConfig
) -> None:
    me = make_search(point, replace(tiny, algo="me")).init(stream(7, "search-init"))
    ours = make_search(point, replace(small, algo=algo)).init(stream(7, "search-init"))
    assert same_bits(me.repertoire.centroids, ours.repertoire.centroids)


# --- commands -------------------------------------------------------------------------------------


def test_the_rules_are_registered_with_names_and_colours_of_their_own() -> None:
    for algo in ALGOS:
        assert RULES[algo].config is UncertainConfig
    for what in ("title", "colour", "about"):
        assert len({getattr(rule, what) for rule in RULES.values()}) == len(RULES)


@pytest.mark.parametrize("algo", ALGOS)
def test_the_command_line_searches_and_experiments_see_one_policy_per_cell(
    algo: str, tmp_path: Path
) -> None:
    changes = ["task.length=10", "search.steps=8000", "search.cells=16", "search.batch=8"]
    changes += ["search.hidden=8", "search.episodes=3", "search.depth=2"]
    options = [part for change in changes for part in ("--set", change)]
    command = ["search", "--preset", "tiny", "--algo", algo, "--out", str(tmp_path / "run")]
    cli.app([*command, *options], standalone_mode=False)
    run = cli.open_run(tmp_path / "run")
    repertoire = run.repertoire()
    assert type(repertoire) is Repertoire
    assert repertoire.fitness.shape == (16,)
    assert repertoire.policies.layers[0].weight.shape[:2] == (16, 8)
    assert 0 < repertoire.occupied.sum() <= 16
    rows = read_metrics(tmp_path / "run" / "search" / "metrics.jsonl")
    per_iteration = rows[0]["steps"]
    assert rows[-1]["steps"] - per_iteration < 8000 <= rows[-1]["steps"]
    cells = np.asarray(me_ls.nearest(repertoire.centroids, repertoire.descriptor))
    occupied = np.asarray(repertoire.occupied)
    assert (cells == np.arange(16))[occupied].all()
