"""Search: MAP-Elites, ME-Sampling and MAP-Elites Low-Spread on a CVT repertoire.

The paper's first contribution (section 4.1, algorithm 1) and the two algorithms it is compared with
(algorithm 2 and section 2.3). All three vary policies of the repertoire, play episodes with the
offspring and insert them; they differ in how the episodes of an offspring are summed up and in when it
replaces the policy of its cell:

    me           one episode; higher fitness
    me-sampling  E episodes; mean fitness, geometric median of the descriptors; higher mean fitness
    me-ls        E episodes; mean fitness, most frequent cell, spread; higher fitness and lower spread

Such a difference is a `Rule`, and `RULES` lists them all: a further one is one line there. A search is
a value, `MapElites`, with `init(key) -> state` and `step(state, key) -> (state, metrics)`; both are pure.

Tasks and episodes come from `envs.py`; `pgame_ls.py` builds on this file.
Reads in this order: config, policy, repertoire, summing up episodes, rules, insertion, the search.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, Num

from envs import Episodes, State, Task, rollout
from machinery.config import find, require_at_least, require_layers
from machinery.files import UserError, load_arrays
from machinery.machine import devices, replicate
from machinery.streams import Seed, normals, stream


@dataclass(frozen=True)
class SearchConfig:
    """The paper's values (table 2); what the paper leaves open is marked."""

    algo: str = "me-ls"
    steps: int = 500_000_000  # budget of environment steps; open: "hundreds of millions"
    iterations: int | None = None  # a budget of iterations instead
    cells: int = 1024  # of the repertoire
    batch: int = 1000  # policies per iteration, also the number of random ones at the start (open)
    episodes: int = 10  # of each policy, where the algorithm plays more than one
    hidden: tuple[int, ...] = (256, 256)  # layers of a policy
    iso_sigma: float = 0.005  # variation: noise on every weight
    line_sigma: float = 0.05  # variation: noise along the line to another policy

    def __post_init__(self) -> None:
        require_at_least(1, self, "steps", "iterations", "cells", "batch", "episodes")
        require_at_least(0, self, "iso_sigma", "line_sigma")
        require_layers(self, "hidden")


# --- policies -------------------------------------------------------------------------------------


Weights = list[Float[Array, "_ _"]]  # of all layers, as inputs × outputs


class MLP(eqx.Module):
    """A policy: observation in, action in [-1, 1] out. It remembers nothing."""

    layers: list[eqx.nn.Linear]

    def __init__(self, sizes: tuple[int, ...], *, key: Key[Array, ""]):
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = [_linear(i, o, k) for i, o, k in zip(sizes, sizes[1:], keys, strict=False)]

    def __call__(self, observation: Float[Array, " observation"]) -> Float[Array, " action"]:
        return self.through(self.start(), observation)

    def start(self) -> Weights:
        """Weights as inputs × outputs, for a whole episode: half as fast again as the other way."""
        return [layer.weight.T for layer in self.layers]

    def act(self, memory: Weights, state: State) -> tuple[Float[Array, " action"], Weights]:
        return self.through(memory, state.observation), memory

    def through(
        self, weights: Weights, observation: Float[Array, " observation"]
    ) -> Float[Array, " action"]:
        *hidden, last = [
            (w, jnp.asarray(x.bias)) for w, x in zip(weights, self.layers, strict=True)
        ]
        x = observation
        for weight, bias in hidden:
            x = jax.nn.relu(x @ weight + bias)
        return jnp.tanh(x @ last[0] + last[1])


def _linear(inputs: int, outputs: int, key: Key[Array, ""]) -> eqx.nn.Linear:
    """Weights of variance 1 / inputs, biases of zero: random policies saturate now and then."""
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


def goals(task: Task, count: int | None = None) -> Float[Array, "goals d"]:
    """The middles of large zones that cover the space, the same for every run; as many as the task has.

    Evaluations ask for them, and a dataset has a demonstrator for each. The paper has one word and one
    number for the zones of both; that they are the same ones is how we read it (docs/decisions.md).
    """
    return cvt(task.low, task.high, count or task.zones, key=stream(0, "goals"))


def nearest(centroids: Float[Array, "cells d"], points: Float[Array, "*n d"]) -> Int[Array, "*n"]:
    """The cell of each point: the index of the nearest centroid, the first one of equals."""
    columns, numbers = centroids.T, jnp.arange(len(centroids))

    def cell(point: Float[Array, " d"]) -> Int[Array, ""]:
        distance = sum((c - x) ** 2 for c, x in zip(columns, point, strict=True))
        # `argmin` looks at one cell after another; two minima of vectors are 14 times as fast on a CPU.
        first = jnp.min(numbers, where=distance == jnp.min(distance), initial=len(numbers))
        return first % len(numbers)  # a point that is not a number is nearest to none

    return jax.lax.map(cell, points.reshape(-1, points.shape[-1]), batch_size=1024).reshape(
        points.shape[:-1]
    )


def empty_repertoire(
    task: Task, hidden: tuple[int, ...], centroids: Float[Array, "cells d"]
) -> Repertoire:
    cells, size = centroids.shape
    policies = random_policies(task, hidden, jax.random.split(jax.random.key(0), cells))
    return Repertoire(
        jax.tree.map(jnp.zeros_like, policies),
        jnp.full(cells, -jnp.inf),
        jnp.zeros((cells, size)),
        jnp.full(cells, jnp.inf),
        centroids,
    )


def load_repertoire(path: Path, task: Task, config: SearchConfig) -> Repertoire:
    """What a search has written."""
    shape = config.cells, task.descriptor_size
    like = eqx.filter_eval_shape(lambda: empty_repertoire(task, config.hidden, jnp.zeros(shape)))
    return replicate(load_arrays(path, like)[0])


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


def characterise_once(
    fitness: Float[Array, " episodes"],
    descriptors: Float[Array, "episodes d"],
    centroids: Float[Array, "cells d"],
) -> Character:
    """`me`: the one episode is taken at its word."""
    return Character(fitness[0], descriptors[0], jnp.zeros(()))


def characterise_by_median(
    fitness: Float[Array, " episodes"],
    descriptors: Float[Array, "episodes d"],
    centroids: Float[Array, "cells d"],
) -> Character:
    """`me-sampling`: mean fitness, geometric median of the descriptors."""
    return Character(jnp.mean(fitness), geometric_median(descriptors), spread(descriptors))


def characterise_by_mode(
    fitness: Float[Array, " episodes"],
    descriptors: Float[Array, "episodes d"],
    centroids: Float[Array, "cells d"],
) -> Character:
    """`me-ls`: mean fitness, most frequent cell, spread.

    The descriptor that is stored is the mean of those in that cell. Cells are convex: it lies in it.
    """
    cells = nearest(centroids, descriptors)
    inside = (cells == most_frequent(cells))[:, None]
    descriptor = jnp.sum(jnp.where(inside, descriptors, 0), axis=0) / jnp.sum(inside)
    return Character(jnp.mean(fitness), descriptor, spread(descriptors))


# --- rules ----------------------------------------------------------------------------------------


def fitter(new: Character, old: Character) -> Bool[Array, ""]:
    return new.fitness > old.fitness


def fitter_and_steadier(new: Character, old: Character) -> Bool[Array, ""]:
    """The low-spread criterion: a lower spread alone is not enough, nor a higher fitness alone."""
    return (new.fitness > old.fitness) & (new.spread < old.spread)


def select_uniformly(repertoire: Repertoire, count: int, *, key: Key[Array, ""]) -> MLP:
    """Policies of `count` occupied cells, uniformly and with replacement."""
    cells = len(repertoire.fitness)
    chance = repertoire.occupied / jnp.maximum(repertoire.occupied.sum(), 1)
    chosen = jax.random.choice(key, cells, (count,), p=chance)
    return jax.tree.map(lambda x: x[chosen], repertoire.policies)


@dataclass(frozen=True)
class Rule:
    """All that tells one algorithm from another, and how it is called and drawn."""

    title: str  # as in the paper's tables
    about: str
    colour: str
    characterise: Callable[[Array, Array, Array], Character]  # how episodes are summed up
    replaces: Callable[[Character, Character], Bool[Array, ""]]  # when one policy replaces another
    least_episodes: int = 1  # that its comparison makes sense with
    several: bool = True  # whether it plays `config.episodes` per policy, or a single one
    select: Callable[..., MLP] = select_uniformly  # how parents are selected
    config: type[SearchConfig] = SearchConfig
    search: "Callable[..., MapElites] | None" = None  # of a task and a config; None: `MapElites`


RULES: dict[str, Rule] = {
    "me": Rule("ME", "MAP-Elites", "#8c8c8c", characterise_once, fitter, several=False),
    "me-sampling": Rule(
        "ME-Sampling",
        "MAP-Elites with several episodes",
        "#b07aa1",
        characterise_by_median,
        fitter,
    ),
    "me-ls": Rule(
        "ME-LS",
        "MAP-Elites Low-Spread",
        "#e15759",
        characterise_by_mode,
        fitter_and_steadier,
        least_episodes=2,
    ),
}


def find_rule(algo: str) -> Rule:
    return find("algorithm", RULES, algo)


# --- insertion ------------------------------------------------------------------------------------


class Offspring(NamedTuple):
    """A batch of played policies. Not valid: one of its episodes diverged, it never gets in."""

    policies: MLP
    character: Character
    valid: Bool[Array, " batch"]


@eqx.filter_jit
def insert(
    repertoire: Repertoire,
    offspring: Offspring,
    replaces: Callable[[Character, Character], Bool[Array, ""]],
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


@eqx.filter_jit
def characterise(
    rule: Rule, episodes: Episodes, centroids: Float[Array, "cells d"]
) -> tuple[Character, Bool[Array, " policies"]]:
    """The character of each policy of a batch, and whether none of its episodes diverged."""
    of_batch = jax.vmap(rule.characterise, in_axes=(0, 0, None))
    character = of_batch(episodes.fitness, episodes.descriptor, centroids)
    return character, ~episodes.diverged.any(axis=1)


# --- variation ------------------------------------------------------------------------------------


def vary(
    repertoire: Repertoire,
    count: int,
    iso_sigma: float,
    line_sigma: float,
    select: Callable[..., MLP] = select_uniformly,
    *,
    key: Key[Array, ""],
) -> MLP:
    """Iso+line variation of selected policies: x + σ₁·N(0, I) + σ₂·N(0, 1)·(y − x)."""
    x_key, y_key, iso_key, line_key = jax.random.split(key, 4)
    x, y = (select(repertoire, count, key=k) for k in (x_key, y_key))
    leaves, structure = jax.tree.flatten(x)
    iso_seeds = jax.tree.unflatten(structure, list(jax.random.bits(iso_key, (len(leaves), 2))))
    along = line_sigma * jax.random.normal(line_key, (count,))

    # Drawing the noise is most of the work: each device draws a share, where shares are equal.
    shared = PartitionSpec("device" if count % devices().size == 0 else None)

    def mix(x: Array, y: Array, seed: Seed) -> Array:
        noise = iso_sigma * normals(seed, x.shape)
        noise = jax.lax.with_sharding_constraint(noise, NamedSharding(devices(), shared))
        varied = x + noise + jnp.expand_dims(along, range(1, x.ndim)) * (y - x)
        return jax.lax.with_sharding_constraint(varied, NamedSharding(devices(), PartitionSpec()))

    return jax.tree.map(mix, x, y, iso_seeds)


# --- the search -----------------------------------------------------------------------------------


class SearchState(eqx.Module):
    """All that an iteration hands to the next one."""

    repertoire: Repertoire


class MapElites(eqx.Module):
    """Algorithm 1 (ME-LS) or 2 (MAP-Elites) for batches of policies, by the rule of `config.algo`."""

    task: Task
    config: SearchConfig = eqx.field(static=True)

    def __check_init__(self) -> None:
        if self.rule.several and self.config.episodes < self.rule.least_episodes:
            raise UserError(
                f"{self.config.algo} compares episodes: it needs at least "
                f"{self.rule.least_episodes} per policy."
            )

    @property
    def rule(self) -> Rule:
        return find_rule(self.config.algo)

    @property
    def episodes(self) -> int:
        """That each policy plays."""
        return self.config.episodes if self.rule.several else 1

    @property
    def steps_per_iteration(self) -> int:
        return self.config.batch * self.episodes * self.task.length

    @property
    def iterations(self) -> int:
        """As many as use up the budget."""
        return self.config.iterations or -(-self.config.steps // self.steps_per_iteration)

    def init(self, key: Key[Array, ""]) -> SearchState:
        """An empty repertoire. Its cells depend on the key alone: algorithms with one key share them."""
        cells_key, _ = jax.random.split(key)
        centroids = cvt(self.task.low, self.task.high, self.config.cells, key=cells_key)
        return SearchState(empty_repertoire(self.task, self.config.hidden, centroids))

    def step(
        self, state: SearchState, key: Key[Array, ""]
    ) -> tuple[SearchState, dict[str, Num[Array, ""] | None]]:
        """One pass through the loop, for a batch: variation, evaluation, insertion."""
        vary_key, play_key = jax.random.split(key)
        offspring = self.propose(state.repertoire, self.config.batch, key=vary_key)
        episodes = self.play(offspring, key=play_key)
        repertoire, metrics = self.insert(state.repertoire, offspring, episodes)
        return SearchState(repertoire), metrics

    @eqx.filter_jit
    def propose(self, repertoire: Repertoire, count: int, *, key: Key[Array, ""]) -> MLP:
        """Variations of the repertoire's policies; random ones as long as it has none."""

        def random(key: Key[Array, ""]) -> MLP:
            return random_policies(self.task, self.config.hidden, jax.random.split(key, count))

        def varied(key: Key[Array, ""]) -> MLP:
            iso, line = self.config.iso_sigma, self.config.line_sigma
            return vary(repertoire, count, iso, line, self.rule.select, key=key)

        return jax.lax.cond(repertoire.occupied.any(), varied, random, key)

    def play(self, policies: MLP, *, key: Key[Array, ""], **how: Any) -> Episodes:
        """A batch of policies, several episodes each."""
        keys = jax.random.split(key, (self.config.batch, self.episodes))
        return rollout(self.task, policies, keys, **how)

    def insert(
        self, repertoire: Repertoire, policies: MLP, episodes: Episodes
    ) -> tuple[Repertoire, dict[str, Num[Array, ""] | None]]:
        """What follows the episodes in every algorithm: characterise, insert, count."""
        offspring = Offspring(policies, *characterise(self.rule, episodes, repertoire.centroids))
        repertoire, insertions = insert(repertoire, offspring, self.rule.replaces)
        metrics: dict[str, Num[Array, ""] | None] = {**repertoire_metrics(self.task, repertoire)}
        if self.episodes == 1:
            metrics["mean_spread"] = None  # one episode has none
        metrics |= {"insertions": insertions, "diverged": episodes.diverged.sum()}
        return repertoire, metrics


def make_search(task: Task, config: SearchConfig) -> MapElites:
    """The search of a config's algorithm: a value to `init` and `step`, or to hand to `drive`."""
    return (find_rule(config.algo).search or MapElites)(task, config)


@eqx.filter_jit
def repertoire_metrics(task: Task, repertoire: Repertoire) -> dict[str, Float[Array, ""]]:
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


# What the progress line of a search shows.
SHOWN = ("steps", "steps_per_second", "coverage", "max_fitness", "qd_score")
SHOWN += ("mean_spread", "insertions", "diverged")


def refuse_empty(metrics: dict[str, Any]) -> None:
    if metrics["coverage"] == 0:
        raise UserError("the repertoire is empty: every episode diverged.")
