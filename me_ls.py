"""Search: MAP-Elites, ME-Sampling and MAP-Elites Low-Spread on a CVT repertoire.

The paper's first contribution (section 4.1, algorithm 1) and the two algorithms it is compared with
(algorithm 2 and section 2.3). All three vary policies of the repertoire, play episodes with the
offspring and insert them; they differ in how the episodes of an offspring are summed up and in when it
replaces the policy of its cell:

    me           one episode; higher fitness
    me-sampling  E episodes; mean fitness, geometric median of the descriptors; higher mean fitness
    me-ls        E episodes; mean fitness, most frequent cell, spread; higher fitness and lower spread

Tasks and episodes come from `envs.py`, files from `runs.py`; `pgame_ls.py` builds on this file.
Reads in this order: config, policy, repertoire, the algorithms, insertion, one iteration, the search.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from envs import Episodes, State, Task, devices, replicate, rollout
from runs import Progress, Stage, Stopped, UserError, finish_iteration_on_signal, stop_requested

ALGORITHMS = ("me", "me-sampling", "me-ls", "pgame", "pgame-ls")


@dataclass(frozen=True)
class SearchConfig:
    """The paper's values (table 3); what the paper leaves open is marked."""

    algo: str = "me-ls"
    steps: int = 500_000_000  # budget of environment steps; open: "hundreds of millions"
    iterations: int = 0  # a budget of iterations instead; 0: what the steps allow
    cells: int = 1024  # of the repertoire
    batch: int = 1000  # policies per iteration, also the number of random ones at the start (open)
    episodes: int = 10  # of each policy; `me` and `pgame` play one
    hidden: tuple[int, ...] = (256, 256)  # layers of a policy
    iso_sigma: float = 0.005  # variation: noise on every weight
    line_sigma: float = 0.05  # variation: noise along the line to another policy
    checkpoint_seconds: float = 120.0  # ours

    def __post_init__(self) -> None:
        for name in ("steps", "cells", "batch", "episodes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.iterations < 0:
            raise UserError(f"iterations must not be negative, it is {self.iterations}.")
        if self.algo not in ALGORITHMS:
            raise UserError(f"unknown algorithm {self.algo!r}; there are {', '.join(ALGORITHMS)}.")
        for name in ("iso_sigma", "line_sigma"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must not be negative, it is {getattr(self, name)}.")
        if self.algo.endswith("-ls") and self.episodes < 2:
            raise UserError(f"{self.algo} compares episodes: it needs at least 2 per policy.")
        if not self.hidden or min(self.hidden) < 1:
            raise UserError(f"hidden must be sizes of layers such as 256,256, not {self.hidden}.")

    @property
    def episodes_played(self) -> int:
        return 1 if self.algo in ("me", "pgame") else self.episodes

    def budget(self, task: Task) -> int:
        """In iterations."""
        per_iteration = self.batch * self.episodes_played * task.length
        return self.iterations or -(-self.steps // per_iteration)


# --- policies -------------------------------------------------------------------------------------


class MLP(eqx.Module):
    """A policy: observation in, action in [-1, 1] out. It remembers nothing."""

    layers: list[eqx.nn.Linear]

    def __init__(self, sizes: tuple[int, ...], *, key: Key[Array, ""]):
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = [_linear(i, o, k) for i, o, k in zip(sizes, sizes[1:], keys, strict=False)]

    def __call__(self, observation: Float[Array, " observation"]) -> Float[Array, " action"]:
        *hidden, last = self.layers
        x = observation
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return jnp.tanh(last(x))

    def start(self) -> None:
        return None

    def act(self, memory: None, state: State) -> tuple[Float[Array, " action"], None]:
        return self(state.observation), memory


def _linear(inputs: int, outputs: int, key: Key[Array, ""]) -> eqx.nn.Linear:
    """Weights of variance 1 / inputs and no bias, so that random policies saturate now and then."""
    layer = eqx.nn.Linear(inputs, outputs, key=key)
    weight = jax.nn.initializers.lecun_uniform(in_axis=1, out_axis=0)(key, layer.weight.shape)
    return eqx.tree_at(lambda x: (x.weight, x.bias), layer, (weight, jnp.zeros(outputs)))


@eqx.filter_jit
def random_policies(task: Task, hidden: tuple[int, ...], keys: Key[Array, " n"]) -> MLP:
    """A population: one MLP whose arrays have a leading axis."""
    sizes = (task.observation_size, *hidden, task.action_size)
    return eqx.filter_vmap(lambda key: MLP(sizes, key=key))(keys)


# --- the repertoire -------------------------------------------------------------------------------


class Repertoire(eqx.Module):
    """One policy per cell of the descriptor space; an empty cell has fitness -inf."""

    policies: MLP
    fitness: Float[Array, " cells"]
    descriptor: Float[Array, "cells d"]
    spread: Float[Array, " cells"]
    centroids: Float[Array, "cells d"]

    @property
    def occupied(self) -> Bool[Array, " cells"]:
        return self.fitness > -jnp.inf


def cvt(
    low: tuple[float, ...],
    high: tuple[float, ...],
    cells: int,
    *,
    key: Key[Array, ""],
    samples_per_cell: int = 32,
    rounds: int = 40,
) -> Float[Array, "cells d"]:
    """Centroids of a centroidal Voronoi tessellation, by Lloyd's algorithm on uniform samples."""
    sample_key, start_key = jax.random.split(key)
    lower, upper = jnp.array(low), jnp.array(high)
    samples = jax.random.uniform(
        sample_key, (cells * samples_per_cell, len(low)), minval=lower, maxval=upper
    )
    centroids = jax.random.choice(start_key, samples, (cells,), replace=False)

    @jax.jit
    def lloyd(_: Any, centroids: Array) -> Array:
        cell = nearest(centroids, samples)
        count = jax.ops.segment_sum(jnp.ones(len(samples)), cell, cells)
        total = jax.ops.segment_sum(samples, cell, cells)
        return jnp.where(count[:, None] > 0, total / jnp.maximum(count, 1)[:, None], centroids)

    return jax.lax.fori_loop(0, rounds, lloyd, centroids)


def nearest(centroids: Float[Array, "cells d"], points: Float[Array, "*n d"]) -> Int[Array, "*n"]:
    """The cell of each point: the index of the nearest centroid, the first one of equals."""
    return jax.lax.map(
        lambda point: jnp.argmin(jnp.sum((centroids - point) ** 2, axis=-1)),
        points.reshape(-1, points.shape[-1]),
        batch_size=1024,
    ).reshape(points.shape[:-1])


def empty_repertoire(task: Task, config: SearchConfig, centroids: Array) -> Repertoire:
    cells, size = centroids.shape
    policies = random_policies(task, config.hidden, jax.random.split(jax.random.key(0), cells))
    return Repertoire(
        jax.tree.map(jnp.zeros_like, policies),
        jnp.full(cells, -jnp.inf),
        jnp.zeros((cells, size)),
        jnp.full(cells, jnp.inf),
        centroids,
    )


# --- summing up the episodes of one policy --------------------------------------------------------


class Character(NamedTuple):
    """What the episodes of one policy say about it."""

    fitness: Float[Array, ""]
    descriptor: Float[Array, " d"]
    spread: Float[Array, ""]


def spread(
    descriptors: Float[Array, "episodes d"], counted: Bool[Array, " episodes"] | None = None
) -> Float[Array, ""]:
    """ψ of equation 1: mean distance over all pairs of (counted) episodes; 0 for a single episode."""
    counted = jnp.ones(len(descriptors), bool) if counted is None else counted
    difference = descriptors[:, None] - descriptors[None]
    distance = jnp.sqrt(jnp.sum(difference**2, axis=-1))
    pairs = jnp.triu(counted[:, None] & counted[None], k=1)
    return jnp.sum(distance, where=pairs) / jnp.maximum(pairs.sum(), 1)


def most_frequent(cells: Int[Array, " episodes"]) -> Int[Array, ""]:
    """The cell that occurs most often; of several, the one seen first."""
    count = jnp.sum(cells[:, None] == cells[None], axis=1)
    return cells[jnp.argmax(count)]


def geometric_median(points: Float[Array, "n d"], rounds: int = 100) -> Float[Array, " d"]:
    """The point with the least total distance to `points`, by Weiszfeld's algorithm.

    The iteration slows down near a data point, so the data points themselves are candidates too.
    """

    def total_distance(centre: Array) -> Array:
        return jnp.sum(jnp.sqrt(jnp.sum((points - centre) ** 2, axis=1)))

    def round_(_: Any, centre: Array) -> Array:
        weight = 1 / jnp.maximum(jnp.sqrt(jnp.sum((points - centre) ** 2, axis=1)), 1e-8)
        return weight @ points / jnp.sum(weight)

    between = jax.lax.fori_loop(0, rounds, round_, jnp.mean(points, axis=0))
    candidates = jnp.concatenate([between[None], points])
    return candidates[jnp.argmin(jax.vmap(total_distance)(candidates))]


def characterise_once(fitness: Array, descriptors: Array, centroids: Array) -> Character:
    """`me`: the one episode is taken at its word."""
    return Character(fitness[0], descriptors[0], jnp.zeros(()))


def characterise_by_median(fitness: Array, descriptors: Array, centroids: Array) -> Character:
    """`me-sampling`: mean fitness, geometric median of the descriptors."""
    return Character(jnp.mean(fitness), geometric_median(descriptors), spread(descriptors))


def characterise_by_mode(fitness: Array, descriptors: Array, centroids: Array) -> Character:
    """`me-ls`: mean fitness, most frequent cell, spread.

    The descriptor that is stored is the mean of those in that cell. Cells are convex: it lies in it.
    """
    cells = nearest(centroids, descriptors)
    inside = (cells == most_frequent(cells))[:, None]
    descriptor = jnp.sum(jnp.where(inside, descriptors, 0), axis=0) / jnp.sum(inside)
    return Character(jnp.mean(fitness), descriptor, spread(descriptors))


# --- insertion ------------------------------------------------------------------------------------


def fitter(new: Character, old: Character) -> Bool[Array, ""]:
    return new.fitness > old.fitness


def fitter_and_steadier(new: Character, old: Character) -> Bool[Array, ""]:
    """The low-spread criterion: a lower spread alone is not enough, nor a higher fitness alone."""
    return (new.fitness > old.fitness) & (new.spread < old.spread)


class Rule(NamedTuple):
    """An algorithm: how it sums up a policy's episodes, and when one policy replaces another."""

    characterise: Callable[[Array, Array, Array], Character]
    replaces: Callable[[Character, Character], Array]


RULES = {
    "me": Rule(characterise_once, fitter),
    "me-sampling": Rule(characterise_by_median, fitter),
    "me-ls": Rule(characterise_by_mode, fitter_and_steadier),
    "pgame": Rule(characterise_once, fitter),
    "pgame-ls": Rule(characterise_by_mode, fitter_and_steadier),
}


class Offspring(NamedTuple):
    """A batch of played policies. Not valid: one of its episodes diverged, it never gets in."""

    policies: MLP
    character: Character
    valid: Bool[Array, " batch"]


@eqx.filter_jit(donate="all-except-first")  # the repertoire is changed in place
def insert(
    offspring: Offspring,
    repertoire: Repertoire,
    replaces: Callable[[Character, Character], Array],
) -> tuple[Repertoire, Int[Array, ""]]:
    """Inserts a batch exactly as if its members came one after another; also counts acceptances.

    The scan decides on a few numbers per cell; then each policy that stayed is moved once.
    """
    policies, character, valid = offspring
    cells = nearest(repertoire.centroids, character.descriptor)
    indices = jnp.arange(len(cells))

    def consider(table: tuple, offer: tuple) -> tuple[tuple, Array]:
        inside, owner = table
        index, cell, new, valid = offer
        old = jax.tree.map(lambda x: x[cell], inside)
        empty = old.fitness == -jnp.inf
        accepted = valid & (empty | replaces(new, old))
        inside = jax.tree.map(
            lambda xs, n, o: xs.at[cell].set(jnp.where(accepted, n, o)), inside, new, old
        )
        owner = owner.at[cell].set(jnp.where(accepted, index, owner[cell]))
        return (inside, owner), accepted

    inside = Character(repertoire.fitness, repertoire.descriptor, repertoire.spread)
    nobody = jnp.full(len(repertoire.fitness), -1)
    (inside, owner), accepted = jax.lax.scan(
        consider, (inside, nobody), (indices, cells, character, valid)
    )
    stayed = owner[cells] == indices
    target = jnp.where(stayed, cells, len(owner))  # beyond the end: dropped
    kept = jax.tree.map(
        lambda old, new: old.at[target].set(new, mode="drop"), repertoire.policies, policies
    )
    fitness, descriptor, spread = inside
    return Repertoire(kept, fitness, descriptor, spread, repertoire.centroids), accepted.sum()


# --- one iteration --------------------------------------------------------------------------------


@eqx.filter_jit
def vary(
    repertoire: Repertoire, count: int, iso_sigma: float, line_sigma: float, *, key: Key[Array, ""]
) -> MLP:
    """Iso+line variation of uniformly selected policies: x + σ₁·N(0, I) + σ₂·N(0, 1)·(y − x)."""
    x_key, y_key, iso_key, line_key = jax.random.split(key, 4)
    x, y = (select(repertoire, count, key=k) for k in (x_key, y_key))
    leaves, structure = jax.tree.flatten(x)
    iso_keys = jax.tree.unflatten(structure, list(jax.random.split(iso_key, len(leaves))))
    along = line_sigma * jax.random.normal(line_key, (count,))

    # Drawing the noise is most of the work: each device draws a share, where shares are equal.
    shared = PartitionSpec("device" if count % devices().size == 0 else None)

    def mix(x: Array, y: Array, key: Key[Array, ""]) -> Array:
        noise = iso_sigma * jax.random.normal(key, x.shape)
        noise = jax.lax.with_sharding_constraint(noise, NamedSharding(devices(), shared))
        varied = x + noise + jnp.expand_dims(along, range(1, x.ndim)) * (y - x)
        return jax.lax.with_sharding_constraint(varied, NamedSharding(devices(), PartitionSpec()))

    return jax.tree.map(mix, x, y, iso_keys)


def select(repertoire: Repertoire, count: int, *, key: Key[Array, ""]) -> MLP:
    """Policies of `count` occupied cells, uniformly and with replacement."""
    cells = len(repertoire.fitness)
    chance = repertoire.occupied / jnp.maximum(repertoire.occupied.sum(), 1)
    chosen = jax.random.choice(key, cells, (count,), p=chance)
    return jax.tree.map(lambda x: x[chosen], repertoire.policies)


def characterise(
    rule: Rule, policies: MLP, episodes: Episodes, centroids: Float[Array, "cells d"]
) -> Offspring:
    """Sums up the episodes of a batch. The policies stay where they are: jit would copy them."""
    return Offspring(policies, *sum_up(rule, episodes, centroids))


@eqx.filter_jit
def sum_up(
    rule: Rule, episodes: Episodes, centroids: Float[Array, "cells d"]
) -> tuple[Character, Bool[Array, " policies"]]:
    """The character of each policy, and whether none of its episodes diverged."""
    of_batch = jax.vmap(rule.characterise, in_axes=(0, 0, None))
    character = of_batch(episodes.fitness, episodes.descriptor, centroids)
    return character, ~episodes.diverged.any(axis=1)


def insert_played(
    config: SearchConfig, repertoire: Repertoire, policies: MLP, episodes: Episodes
) -> tuple[Repertoire, dict[str, Array]]:
    """What follows the episodes in every algorithm: characterise, insert, count."""
    rule = RULES[config.algo]
    offspring = characterise(rule, policies, episodes, repertoire.centroids)
    repertoire, insertions = insert(offspring, repertoire, rule.replaces)
    return repertoire, {"insertions": insertions, "diverged": episodes.diverged.sum()}


class SearchState(eqx.Module):
    """All that an iteration hands to the next one."""

    repertoire: Repertoire


def first_state(task: Task, config: SearchConfig, *, key: Key[Array, ""]) -> SearchState:
    centroids = cvt(task.low, task.high, config.cells, key=key)
    return SearchState(empty_repertoire(task, config, centroids))


def iterate(
    task: Task, config: SearchConfig, state: SearchState, iteration: int, *, key: Key[Array, ""]
) -> tuple[SearchState, dict[str, Array]]:
    """One pass through the loop of algorithm 1 (or 2), for a batch of policies."""
    vary_key, play_key = jax.random.split(key)
    repertoire = state.repertoire
    offspring = propose(task, config, repertoire, iteration, config.batch, key=vary_key)
    keys = jax.random.split(play_key, (config.batch, config.episodes_played))
    episodes = rollout(task, offspring, keys)
    repertoire, counts = insert_played(config, repertoire, offspring, episodes)
    return SearchState(repertoire), counts


def propose(
    task: Task,
    config: SearchConfig,
    repertoire: Repertoire,
    iteration: int,
    count: int,
    *,
    key: Key[Array, ""],
) -> MLP:
    """Random policies at first, variations of the repertoire's afterwards."""
    if iteration == 0:
        return random_policies(task, config.hidden, jax.random.split(key, count))
    return vary(repertoire, count, config.iso_sigma, config.line_sigma, key=key)


# --- the search -----------------------------------------------------------------------------------

# No iteration has this number: the cells depend on the seed alone, whatever the algorithm and budget.
BEFORE_ALL = 2**31 - 1


@eqx.filter_jit
def repertoire_metrics(task: Task, repertoire: Repertoire) -> dict[str, Array]:
    """Coverage, maximum fitness and QD score, as in the paper's figure 10.

    The QD score adds up fitness − worst possible fitness, so that every further cell makes it grow.
    The maximum is over the repertoire; the paper's is over everything ever evaluated, kept or not.
    """
    occupied = repertoire.occupied
    above_worst = jnp.maximum(repertoire.fitness - task.length * task.worst_reward, 0)
    return {
        "coverage": occupied.mean(),
        "max_fitness": repertoire.fitness.max(),
        "qd_score": jnp.sum(jnp.where(occupied, above_worst, 0)),
        "mean_spread": jnp.sum(jnp.where(occupied, repertoire.spread, 0)) / occupied.sum(),
    }


SHOWN = ("steps", "steps_per_second", "coverage", "max_fitness", "qd_score")
SHOWN += ("mean_spread", "insertions", "diverged")


def search(
    task: Task,
    config: SearchConfig,
    seed: int,
    stage: Stage,
    first_state: Callable[..., Any] = first_state,
    iterate: Callable[..., tuple[Any, dict[str, Array]]] = iterate,
) -> Repertoire:
    """Runs a search to its budget, from the last checkpoint if there is one.

    Iteration i draws from `fold_in(key, i)` and from nothing else: a run that was killed and resumed
    ends with the very repertoire of an undisturbed one. `pgame_ls.py` brings its own state and
    iteration.
    """
    key = jax.random.key(seed)
    total = config.budget(task)
    per_iteration = config.batch * config.episodes_played * task.length
    state = first_state(task, config, key=jax.random.fold_in(key, BEFORE_ALL))
    restored = stage.restore(state)
    start, state = restored if restored else (0, state)
    stage.rewind_metrics(before=start)
    state = replicate(state)
    progress = Progress(f"{config.algo:<11}", total, start)
    saved_at = time.monotonic()

    with finish_iteration_on_signal():
        for i in range(start, total):
            began = time.monotonic()
            state, counts = iterate(task, config, state, i, key=jax.random.fold_in(key, i))
            row = {n: x.item() for n, x in counts.items()}
            row |= {n: x.item() for n, x in repertoire_metrics(task, state.repertoire).items()}
            if config.episodes_played == 1:
                row["mean_spread"] = None  # one episode has none
            if row["coverage"] == 0:
                raise UserError("the repertoire is empty: every episode diverged.")
            done = i + 1
            row |= {"iteration": i, "steps": done * per_iteration}
            row["steps_per_second"] = per_iteration / (time.monotonic() - began)
            stage.log(row)
            if progress.due(done):
                progress.update(done, **{name: row[name] for name in SHOWN})
            stopping = stop_requested()
            overdue = time.monotonic() - saved_at > config.checkpoint_seconds
            if done == total or stopping or overdue:
                stage.save_checkpoint(done, state)
                saved_at = time.monotonic()
            if stopping:
                progress.close()
                raise Stopped(
                    f"stopped after iteration {done} of {total}; the same command continues."
                )
    progress.close()
    return state.repertoire
