"""Experiments: from a repertoire or a conditioned policy to the numbers of the paper's tables and figures.

    accuracy          section 5.2, table 1, figures 6 and 12: asked for a goal, how near does it get
    elsewhere         ours: the same for goals that no demonstrator was selected for
    reproducibility   section 3.2, figures 3, 8 and 9: the same policy again and again
    reassess          appendix C.2.1, table 5: what a repertoire is worth after a second look
    calibrate         ours: which target makes a conditioned policy land on the goal

Each experiment is a pure function to plain arrays; `EXPERIMENTS` has them by name, as `qdt evaluate` makes
them. Drawing and tabulating is the machinery's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from envs import Episodes, Policy, State, Task, identity, path, rollout
from machinery.files import UserError
from machinery.streams import stream
from me_ls import (
    Offspring,
    Repertoire,
    characterise,
    cvt,
    find_rule,
    goals,
    insert,
    nearest,
    repertoire_metrics,
    spread,
)
from qdt import ConditionedPolicy, play

EPISODES = 10  # per goal and per re-evaluated policy, as in the paper


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


def accuracy_after_reevaluation(
    task: Task,
    repertoire: Repertoire,
    goals: Float[Array, "goals d"],
    keys: Key[Array, "goals episodes"],
    episodes: int = EPISODES,
    *,
    key: Key[Array, ""],
) -> Accuracy:
    """For each goal plays the policy that came nearest to it when all were played again; ours.

    What a repertoire stores may have been luck, and a model is shown what its policies really do. This
    gives a repertoire the same chance.
    """
    refuse_empty(repertoire)
    again = jax.random.split(key, (len(repertoire.fitness), episodes))
    chosen = best_policy(repertoire, rollout(task, repertoire.policies, again), goals)
    return measure(
        goals, rollout(task, jax.tree.map(lambda x: x[chosen], repertoire.policies), keys)
    )


@eqx.filter_jit
def best_policy(
    repertoire: Repertoire, played: Episodes, goals: Float[Array, "goals d"]
) -> Int[Array, " goals"]:
    """The occupied cell whose policy's episodes ended nearest to each goal, in the mean."""
    sound = repertoire.occupied & ~played.diverged.any(axis=1)

    def of_goal(goal: Array) -> Array:
        distance = jnp.sqrt(jnp.sum((played.descriptor - goal) ** 2, axis=-1)).mean(axis=1)
        return jnp.argmin(jnp.where(sound, distance, jnp.inf))

    return jax.lax.map(of_goal, goals)


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
    character, valid = characterise(find_rule("me-ls"), played, repertoire.centroids)
    offspring = Offspring(repertoire.policies, character, valid & repertoire.occupied)
    sound = repertoire.occupied[:, None] & ~played.diverged
    empty = eqx.tree_at(
        lambda r: (r.fitness, r.spread),
        repertoire,
        (jnp.full_like(repertoire.fitness, -jnp.inf), jnp.full_like(repertoire.spread, jnp.inf)),
    )
    again, _ = insert(empty, offspring, find_rule("me").replaces)
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
    path: Float[Array, "policies episodes time d"]
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
    played = rollout(task, chosen, keys, record=path)
    spreads = jax.vmap(spread)(played.descriptor, ~played.diverged)
    return Reproducibility(cells, played.descriptor, played.recorded, spreads)


# --- calibration ------------------------------------------------------------------------------------


class Calibration(NamedTuple):
    targets: Float[Array, "goals d"]  # what to ask for in order to land on the goals
    before: Accuracy
    after: Accuracy  # on episodes that the search has not seen
    episodes: int  # that the search for the targets cost


def calibrate(
    task: Task,
    play: Callable[[Float[Array, "n d"], Key[Array, "n episodes"]], Episodes],
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


class Film(eqx.Module):
    """What a viewer needs of an episode, a row per state."""

    position: Float[Array, "*time bodies 3"]
    rotation: Float[Array, "*time bodies 4"]
    path: Float[Array, "*time d"]
    contact: Bool[Array, "*time feet"]


class Filming(eqx.Module):
    """Records where every body is: filming is a rollout like any other."""

    task: Task

    def __call__(self, state: State, action: Float[Array, " action"]) -> Film:
        return Film(*self.task.pose(state), state.descriptor, self.task.touching(state))


class Shaken(eqx.Module):
    """A policy whose actions are disturbed as `play_episode` does it, by a noise that is a number of the
    program, not a part of it: switching it on or off compiles nothing."""

    policy: Any
    key: Key[Array, "*starts"]
    noise: Float[Array, "*starts"]

    def start(self) -> Any:
        return self.policy.start()

    def act(self, memory: Any, state: State) -> tuple[Float[Array, " action"], Any]:
        action, memory = self.policy.act(memory, state)
        shake = jax.random.normal(jax.random.fold_in(self.key, state.time), action.shape)
        return jnp.clip(action, -1.0, 1.0) + self.noise * shake, memory


class InTurns(eqx.Module):
    """A policy that may be another one in every part of the episode; all of them remember alike."""

    members: PyTree  # stacked along the parts
    policy: Callable[[Any], Policy]  # of a member
    length: int = eqx.field(static=True)

    def at(self, time: int | Int[Array, ""]) -> Policy:
        parts = len(jax.tree.leaves(self.members)[0])
        part = jnp.minimum(time * parts // self.length, parts - 1)
        return self.policy(jax.tree.map(lambda x: x[part], self.members))

    def start(self) -> Any:
        return self.at(0).start()

    def act(self, memory: Any, state: State) -> tuple[Float[Array, " action"], Any]:
        return self.at(state.time).act(memory, state)


class TakeTurns(eqx.Module):
    """Makes the policy of the members that stand in its place, one for each part of the episode."""

    policy: Callable[[Any], Policy]
    length: int = eqx.field(static=True)

    def __call__(self, shaken: Shaken) -> Shaken:
        turns = InTurns(shaken.policy, self.policy, self.length)
        return Shaken(turns, shaken.key, shaken.noise)


def film(
    task: Task,
    player: Repertoire | ConditionedPolicy,
    targets: Float[Array, "parts d"],
    starts: Key[Array, " starts"],
    noise: float,
) -> Film:
    """A conditioned policy, or the nearest ones of a repertoire, play towards a target from some starts.

    Each part of the episode has its own target: one that stays is the same in all of them, and then these
    are the episodes that `play` and `rollout` would play with this noise.
    """
    members, policy = targets, identity
    if isinstance(player, Repertoire):
        cells = nearest_policy(player, targets)
        members = jax.tree.map(lambda x: x[cells], player.policies)
    else:
        policy = player.policy
    each = jax.tree.map(lambda x: jnp.repeat(x[None], len(starts), axis=0), members)
    noise_keys = jax.vmap(lambda key: jax.random.split(key)[1])(starts)
    shaken = Shaken(each, noise_keys, jnp.full(len(starts), noise))
    turns = TakeTurns(policy, task.length)
    played = rollout(task, shaken, starts[:, None], turns, Filming(task))
    return jax.tree.map(lambda x: x[:, 0], played.recorded)


# --- by name ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """What experiments look at: what a run holds."""

    task: Task
    seed: int
    found: Repertoire | None  # None: there are only models, without those from whom they learned
    models: dict[str, ConditionedPolicy]  # by the name of their directory; the run's own is first
    asked: Float[Array, "goals d"] | None = None  # other goals than the task's

    @property
    def repertoire(self) -> Repertoire:
        if self.found is None:
            raise UserError("this experiment is about a repertoire, and there is none.")
        return self.found

    @property
    def goals(self) -> Float[Array, "goals d"]:
        return goals(self.task) if self.asked is None else self.asked

    @property
    def episode_keys(self) -> Key[Array, "goals episodes"]:
        """The same starts for everything that is compared on the goals of a run."""
        return jax.random.split(stream(self.seed, "accuracy"), (self.task.zones, EPISODES))

    def measure(self, model: ConditionedPolicy) -> Accuracy:
        return measure(self.goals, play(self.task, model, self.goals, self.episode_keys))


def averages(measured: Accuracy) -> dict[str, Any]:
    """An accuracy with its means over the goals; of the fitness, the maximum, as in figure 14."""
    return measured._asdict() | {
        "mean_distance": float(jnp.nanmean(measured.distance)),
        "mean_spread": float(jnp.nanmean(measured.spread)),
        "max_fitness": float(jnp.nanmax(measured.fitness)),
    }


def evaluate_accuracy(subject: Subject) -> dict[str, Any]:
    """A repertoire's nearest policies, those chosen after a second look, and every model of the run."""
    whose, result = (subject.goals, subject.episode_keys), {}
    if subject.found is not None:
        of = subject.task, subject.found
        again = accuracy_after_reevaluation(*of, *whose, key=stream(subject.seed, "second-look"))
        result["repertoire"] = averages(accuracy_of_repertoire(*of, *whose))
        result["chosen"] = averages(again)
    return result | {name: averages(subject.measure(m)) for name, m in subject.models.items()}


def evaluate_elsewhere(subject: Subject) -> dict[str, Any]:
    """Accuracy at as many goals of another tessellation: most lie between those that were demonstrated."""
    task = subject.task
    others = cvt(task.low, task.high, task.zones, key=stream(0, "elsewhere"))
    return evaluate_accuracy(replace(subject, asked=others))


def evaluate_reassessment(subject: Subject) -> dict[str, Any]:
    repertoire = subject.repertoire
    again = reassess(subject.task, repertoire, key=stream(subject.seed, "reassessment"))
    return {
        "centroids": repertoire.centroids,
        "fitness": jnp.where(repertoire.occupied, repertoire.fitness, jnp.nan),  # as found
        "before": again.before,
        "after": again.after,
        "spread": again.spread,
        "reachable": reachable(subject.goals, again.descriptor),
    }


def standing(subject: Subject) -> dict[str, float]:
    """What a repertoire is worth by now: the numbers that `accuracy` and `reassess` would tell of it."""
    task, repertoire = subject.task, subject.repertoire
    asked = averages(accuracy_of_repertoire(task, repertoire, subject.goals, subject.episode_keys))
    again = reassess(task, repertoire, key=stream(subject.seed, "reassessment"))
    return {
        "distance": asked["mean_distance"],
        "spread": asked["mean_spread"],
        "coverage_again": again.after["coverage"],
        "max_fitness_again": again.after["max_fitness"],
    }


def evaluate_reproducibility(subject: Subject) -> dict[str, Any]:
    key = stream(subject.seed, "reproducibility")
    again = reproducibility(subject.task, subject.repertoire, key=key)
    return again._asdict() | {"centroids": subject.repertoire.centroids}


def evaluate_calibration(subject: Subject) -> dict[str, Any]:
    if not subject.models:
        raise UserError("there is no trained model to calibrate; `qdt train` makes one.")
    model = next(iter(subject.models.values()))
    found = calibrate(
        subject.task,
        partial(play, subject.task, model),
        subject.goals,
        test=subject.episode_keys,
        key=stream(subject.seed, "calibration"),
    )
    return {
        "targets": found.targets,
        "before": averages(found.before),
        "after": averages(found.after),
        "episodes": found.episodes,
    }


EXPERIMENTS: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "accuracy": evaluate_accuracy,
    "elsewhere": evaluate_elsewhere,
    "reproducibility": evaluate_reproducibility,
    "reassess": evaluate_reassessment,
    "calibrate": evaluate_calibration,
}


def summary(experiment: str, result: dict[str, Any]) -> list[str]:
    """One line for each number that an experiment is about."""
    if experiment in ("accuracy", "elsewhere", "generalize"):
        return [
            f"{name}: distance {r['mean_distance']:.4g}, spread {r['mean_spread']:.4g}"
            + (f", {int(r['diverged'])} episodes diverged" if r["diverged"] else "")
            for name, r in result.items()
        ]
    if experiment == "reassess":
        before, after = result["before"], result["after"]
        names = ("coverage", "max_fitness", "qd_score")
        return [f"{n}: {before[n]:.4g}, re-evaluated {after[n]:.4g}" for n in names] + [
            f"spread, re-evaluated: {result['spread']:.4g}"
        ]
    if experiment == "calibrate":
        before, after = result["before"]["mean_distance"], result["after"]["mean_distance"]
        cost = result["episodes"]
        return [f"distance {before:.4g}, calibrated {after:.4g}, found in {cost:,} episodes"]
    return [f"spread of three policies: {', '.join(f'{float(s):.4g}' for s in result['spread'])}"]
