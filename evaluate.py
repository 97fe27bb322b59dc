"""Experiments: from a repertoire or a QDT to the numbers of the paper's tables and figures.

    accuracy          section 5.2, table 1, figures 5 and 9: asked for a goal, how near does it get
    reproducibility   section 3.2, figures 2, 7 and 8: the same policy again and again
    reassess          appendix C.2.1, table 2: what a repertoire is worth after a second look
    calibrate         ours: which target makes the QDT land on the goal

Each experiment is a pure function to plain arrays. Drawing is in `plots.py`; `report.py` gathers.
"""

from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from envs import Episodes, Policy, Task, disturb, rollout
from me_ls import (
    RULES,
    Repertoire,
    characterise,
    cvt,
    insert,
    nearest,
    repertoire_metrics,
    spread,
)
from runs import UserError

EPISODES = 10  # per goal and per re-evaluated policy, as in the paper


def goals(task: Task, count: int) -> Float[Array, "goals d"]:
    """Targets that cover the descriptor space: the centroids of a CVT, the same in every evaluation."""
    return cvt(task.low, task.high, count, key=jax.random.key(0))


# --- accuracy -------------------------------------------------------------------------------------


class Accuracy(NamedTuple):
    """Per goal, over its episodes; diverged ones are left out and counted. NaN: too few were left."""

    goals: Float[Array, "goals d"]
    descriptor: Float[Array, "goals episodes d"]
    distance: Float[Array, " goals"]
    spread: Float[Array, " goals"]
    fitness: Float[Array, " goals"]
    diverged: Int[Array, ""]


@eqx.filter_jit
def measure(goals: Float[Array, "goals d"], episodes: Episodes) -> Accuracy:
    """Mean distance to the goal, spread and mean fitness of the episodes of each goal."""

    def of_goal(goal: Array, fitness: Array, descriptor: Array, diverged: Array) -> tuple:
        distance = jnp.sqrt(jnp.sum((descriptor - goal) ** 2, axis=-1))
        return (
            jnp.mean(distance, where=~diverged),
            jnp.where((~diverged).sum() > 1, spread(descriptor, ~diverged), jnp.nan),
            jnp.mean(fitness, where=~diverged),
        )

    distance, spreads, fitness = jax.vmap(of_goal)(
        goals, episodes.fitness, episodes.descriptor, episodes.diverged
    )
    return Accuracy(goals, episodes.descriptor, distance, spreads, fitness, episodes.diverged.sum())


def accuracy_of_repertoire(
    task: Task,
    repertoire: Repertoire,
    goals: Float[Array, "goals d"],
    keys: Key[Array, "goals episodes"],
) -> Accuracy:
    """For each goal plays the policy whose stored descriptor is nearest to it."""
    refuse_empty(repertoire)
    cell = nearest_policy(repertoire, goals)
    chosen = jax.tree.map(lambda x: x[cell], repertoire.policies)
    return measure(goals, rollout(task, chosen, keys))


def nearest_policy(repertoire: Repertoire, goals: Float[Array, "goals d"]) -> Int[Array, " goals"]:
    """The occupied cell whose policy's descriptor is nearest to each goal."""
    nowhere = jnp.full_like(repertoire.descriptor, jnp.inf)
    descriptor = jnp.where(repertoire.occupied[:, None], repertoire.descriptor, nowhere)
    return nearest(descriptor, goals)


def refuse_empty(repertoire: Repertoire) -> None:
    if not bool(repertoire.occupied.any()):
        raise UserError("the repertoire is empty: it has no policy to play.")


# --- reassessment ---------------------------------------------------------------------------------


class Reassessment(NamedTuple):
    before: dict[str, float]  # coverage, max_fitness, qd_score, mean_spread
    after: dict[str, float]
    repertoire: Repertoire  # the policies that found a place after re-evaluation
    spread: float  # mean over all policies of the repertoire, re-evaluated
    descriptor: Float[Array, "cells episodes d"]  # NaN for an empty cell or a diverged episode


def reassess(
    task: Task, repertoire: Repertoire, episodes: int = EPISODES, *, key: Key[Array, ""]
) -> Reassessment:
    """Plays every policy again and inserts it into an empty repertoire.

    Mean fitness and most frequent cell decide, and of two policies in a cell the fitter one stays,
    for all algorithms alike (the paper: "according to their recalculated fitnesses and behaviors").
    """
    refuse_empty(repertoire)
    keys = jax.random.split(key, (len(repertoire.fitness), episodes))
    played = rollout(task, repertoire.policies, keys)
    offspring = characterise(RULES["me-ls"], repertoire.policies, played, repertoire.centroids)
    offspring = offspring._replace(valid=offspring.valid & repertoire.occupied)
    sound = repertoire.occupied[:, None] & ~played.diverged
    empty = jax.tree.map(jnp.copy, repertoire)
    empty = eqx.tree_at(
        lambda r: (r.fitness, r.spread),
        empty,
        (jnp.full_like(empty.fitness, -jnp.inf), jnp.full_like(empty.spread, jnp.inf)),
    )
    again, _ = insert(offspring, empty, RULES["me"].replaces)
    return Reassessment(
        _plain(repertoire_metrics(task, repertoire)),
        _plain(repertoire_metrics(task, again)),
        again,
        float(jnp.mean(offspring.character.spread, where=offspring.valid)),
        jnp.where(sound[..., None], played.descriptor, jnp.nan),
    )


def _plain(metrics: dict[str, Array]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def reachable(
    goals: Float[Array, "goals d"], descriptors: Float[Array, "*n d"]
) -> Bool[Array, " goals"]:
    """The goals in whose zone at least one of the episodes ended."""
    points = descriptors.reshape(-1, descriptors.shape[-1])
    zone = nearest(goals, points)
    seen = jnp.isfinite(points).all(axis=-1)
    return jax.ops.segment_max(seen.astype(int), zone, len(goals)) > 0


# --- reproducibility --------------------------------------------------------------------------------


class Reproducibility(NamedTuple):
    cells: Int[Array, " policies"]
    descriptor: Float[Array, "policies episodes d"]
    path: Float[Array, "policies episodes length d"]
    spread: Float[Array, " policies"]


def reproducibility(
    task: Task, repertoire: Repertoire, episodes: int = 30, *, key: Key[Array, ""]
) -> Reproducibility:
    """Plays three representative policies again and again, each from new starts.

    Representative: spread over the space. Around the middle of it, those at 90, 210 and 330 degrees
    and at half the way to the border, or what is nearest to them; the same choice for every algorithm.
    """
    refuse_empty(repertoire)
    low, high = jnp.array(task.low), jnp.array(task.high)
    angle = jnp.deg2rad(jnp.array([90.0, 210.0, 330.0]))
    direction = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)
    direction = jnp.pad(direction, ((0, 0), (0, max(0, len(low) - 2))))[:, : len(low)]
    cells = nearest_policy(repertoire, (low + high) / 2 + direction * (high - low) / 4)
    chosen = jax.tree.map(lambda x: x[cells], repertoire.policies)
    keys = jax.random.split(key, (len(cells), episodes))
    played = rollout(task, chosen, keys, record="path")
    assert played.path is not None
    spreads = jax.vmap(spread)(played.descriptor, ~played.diverged)
    return Reproducibility(cells, played.descriptor, played.path, spreads)


# --- calibration ------------------------------------------------------------------------------------


class Calibration(NamedTuple):
    targets: Float[Array, "goals d"]  # what to ask for in order to land on the goals
    before: Accuracy
    after: Accuracy  # on episodes that the search has not seen
    episodes: int  # that the search for the targets cost


def calibrate(
    task: Task,
    play: Callable[[Array, Array], Episodes],
    goals: Float[Array, "goals d"],
    test: Key[Array, "goals episodes"],
    generations: int = 5,
    population: int = 6,
    trials: int = 4,
    *,
    key: Key[Array, ""],
) -> Calibration:
    """Searches, for each goal, the target that makes a conditioned policy land on it.

    One CMA-ES per goal over the target, started at the goal itself, with the mean distance of a few
    episodes as the noisy objective; all goals at once. In the end the goal itself and the target
    that was found play a few more episodes, and the nearer of the two is kept.
    `play` takes targets [n, d] and keys [n, episodes]; with the keys `test` before and after are
    compared, which the search does not see.
    """
    from evosax.algorithms import CMA_ES

    count, size = goals.shape
    low, high = jnp.array(task.low), jnp.array(task.high)
    start_key, search_key, choice_key = jax.random.split(key, 3)
    cma = CMA_ES(population_size=population, solution=jnp.zeros(size))
    settings = cma.default_params.replace(std_init=0.1 * (high - low).mean())
    states = jax.vmap(lambda k, goal: cma.init(k, goal, settings))(
        jax.random.split(start_key, count), goals
    )

    def mean_distance(targets: Array, trials: int, key: Array) -> Array:
        """Of each row of targets [goals, n, d] to its goal."""
        n = targets.shape[1]
        keys = jax.random.split(key, (count * n, trials))
        played = play(targets.reshape(-1, size), keys)
        again = jnp.repeat(goals, n, axis=0)
        return measure(again, played).distance.reshape(count, n)

    for i in range(generations):
        ask_key, play_key, tell_key = jax.random.split(jax.random.fold_in(search_key, i), 3)
        asked, states = jax.vmap(lambda k, s: cma.ask(k, s, settings))(
            jax.random.split(ask_key, count), states
        )
        asked = jnp.clip(asked, low, high)
        distance = jnp.nan_to_num(mean_distance(asked, trials, play_key), nan=jnp.inf)
        states, _ = jax.vmap(lambda k, a, d, s: cma.tell(k, a, d, s, settings))(
            jax.random.split(tell_key, count), asked, distance, states
        )

    found = jnp.clip(states.mean, low, high)
    both = jnp.stack([goals, found], axis=1)
    distance = jnp.nan_to_num(mean_distance(both, 2 * trials, choice_key), nan=jnp.inf)
    nearer = jnp.argmin(distance, axis=1)
    targets = both[jnp.arange(count), nearer]
    return Calibration(
        targets,
        measure(goals, play(goals, test)),
        measure(goals, play(targets, test)),
        count * trials * (generations * population + 4),
    )


# --- filming ----------------------------------------------------------------------------------------


class Film(NamedTuple):
    """What a viewer needs of one episode, a row per step."""

    position: Float[Array, "time bodies 3"]
    rotation: Float[Array, "time bodies 4"]
    path: Float[Array, "time d"]
    contact: Bool[Array, "time feet"]
    reward: Float[Array, " time"]


@eqx.filter_jit
def film(
    task: Task, policy: Policy, keys: Key[Array, " episodes"], disturbance: float = 0.0
) -> Film:
    """Plays episodes with one policy, as `envs.rollout` does, and records where every body is."""

    def one(key: Key[Array, ""]) -> Film:
        def step(carry: tuple, _: None) -> tuple[tuple, Film]:
            state, memory = carry
            action, memory = policy.act(memory, state)
            action = disturb(jnp.clip(action, -1.0, 1.0), disturbance, key, state.time)
            state = task.step(state, action)
            frame = Film(*task.pose(state), state.descriptor, task.touching(state), state.reward)
            return (state, memory), frame

        start = task.reset(key)
        return jax.lax.scan(step, (start, policy.start()), length=task.length)[1]

    return jax.vmap(one)(keys)
