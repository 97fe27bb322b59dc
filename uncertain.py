"""Search where an evaluation is a matter of luck: other answers than ME-LS.

Section 2.3 of the paper names the first two and cites the study of the third. One episode may be lucky,
and MAP-Elites never looks at an elite again: luck piles up. Each method has its own answer to that:

    deep-grid          a cell holds many policies, and a newcomer always gets in: luck does not last
                       (Flageat & Cully 2020, Fast and stable MAP-Elites in noisy domains using deep grids)
    adaptive-sampling  who is challenged plays again; who challenges plays as often as the elite did
                       (Justesen, Risi & Mouret 2019, MAP-Elites for noisy domains by adaptive sampling)
    archive-sampling   everybody plays again in every iteration and is inserted anew
                       (Flageat & Cully 2023, Uncertain Quality-Diversity)
    me-soft            ours, ME-LS with a knob: E episodes; higher fitness − price · spread

In the first three, whoever plays takes a seat, and every seat is one episode: batches have one shape
although policies need different numbers of episodes, and a seat that nobody needs goes to one more
offspring. Then the players come to their cells one after another. A method says who takes a seat and who
settles in a cell. An iteration costs seats × length environment steps, re-evaluations included.
Experiments see `state.repertoire`: of the policies in a cell, the fittest stands for it.

Repertoire, variation and metrics are those of `me_ls.py`, episodes come from `envs.py`. "Open" marks what
the sources do not say, or do otherwise in their code (Flageat & Cully's of 2020, for adaptive-sampling
too, and of 2023).
Reads in this order: config, players, deep cells, settling, an iteration, the three methods, ME-Soft.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from envs import Episodes, rollout
from machinery.config import require_at_least
from me_ls import (
    MLP,
    RULES,
    Character,
    MapElites,
    Repertoire,
    Rule,
    SearchConfig,
    characterise_by_mode,
    characterise_once,
    fitter,
    nearest,
    repertoire_metrics,
    spread,
)


@dataclass(frozen=True)
class UncertainConfig(SearchConfig):
    """Each method reads its own; of those with seats, `batch` is their number (see ArchiveSampling)."""

    depth: int | None = None  # of a cell; the method's own: 50 deep-grid, 2 archive-, 1 adaptive-
    memory: int = 32  # archive-, adaptive-: a policy's newest episodes, which count (open: all do)
    outside: float = 0.5  # adaptive-: share of a policy's episodes that may miss its cell (open)
    price: float = 1.0  # me-soft: 1 is the worst fitness there is for a spread as wide as the space

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "depth", "memory")
        require_at_least(0, self, "outside", "price")


# --- players: policies and what was seen of them --------------------------------------------------


class Seen(eqx.Module):
    """The newest episodes of a policy, newest first. The first `count` of them are real."""

    fitness: Float[Array, "*n memory"]
    descriptor: Float[Array, "*n memory d"]
    count: Int[Array, "*n"]

    @property
    def counted(self) -> Bool[Array, "*n memory"]:
        return jnp.arange(self.fitness.shape[-1]) < self.count[..., None]


class Players(eqx.Module):
    """A row of policies, and what was seen of each; of offspring, nothing."""

    policies: MLP
    seen: Seen


def unseen(shape: tuple[int, ...], memory: int, size: int) -> Seen:
    zeros = jnp.zeros((*shape, memory, size))
    return Seen(zeros[..., 0], zeros, jnp.zeros(shape, jnp.int32))


def nobody(repertoire: Repertoire, shape: tuple[int, ...], memory: int) -> Players:
    """As many players as a shape says, with policies like those of a repertoire, but all zeros."""
    policies = jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape[1:])), repertoire.policies)
    return Players(policies, unseen(shape, memory, repertoire.centroids.shape[1]))


@eqx.filter_jit
def remember(players: Players, episodes: Episodes) -> Players:
    """The players after one more episode each; a full memory forgets the oldest."""
    seen = players.seen
    fitness = jnp.roll(seen.fitness, 1, axis=1).at[:, 0].set(episodes.fitness[:, 0])
    descriptor = jnp.roll(seen.descriptor, 1, axis=1).at[:, 0].set(episodes.descriptor[:, 0])
    count = jnp.minimum(seen.count + 1, seen.fitness.shape[1])
    return Players(players.policies, Seen(fitness, descriptor, count))


def recall(seen: Seen) -> Character:
    """What the remembered episodes say about one policy: mean fitness, mean descriptor, spread."""
    counted, episodes = seen.counted, jnp.maximum(seen.count, 1)
    fitness = jnp.sum(seen.fitness, where=counted) / episodes
    descriptor = jnp.sum(seen.descriptor, axis=0, where=counted[:, None]) / episodes
    return Character(fitness, descriptor, spread(seen.descriptor, counted))


@eqx.filter_jit
def share_outside(seen: Seen, centroids: Float[Array, "cells d"]) -> Float[Array, " players"]:
    """Of each player's episodes, those that ended in another cell than the one of their mean."""
    home = nearest(centroids, jax.vmap(recall)(seen).descriptor)
    elsewhere = seen.counted & (nearest(centroids, seen.descriptor) != home[:, None])
    return elsewhere.sum(axis=1) / seen.count


# --- cells with several policies ------------------------------------------------------------------


class Deep(Repertoire):
    """A repertoire with one more axis: the places in a cell. An empty one has fitness -inf."""

    policies: MLP
    fitness: Float[Array, "cells depth"]
    descriptor: Float[Array, "cells depth d"]
    spread: Float[Array, "cells depth"]
    centroids: Float[Array, "cells d"]
    seen: Seen
    challenges: Int[Array, "cells depth"]  # that were repelled since the policy played

    @property
    def occupied(self) -> Bool[Array, "cells depth"]:
        return self.fitness > -jnp.inf

    @property
    def players(self) -> Players:
        """All places in one row."""
        players = Players(self.policies, self.seen)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), players)


def deepen(repertoire: Repertoire, depth: int, memory: int) -> Deep:
    """The cells of a repertoire with `depth` empty places in each."""
    cells, size = repertoire.centroids.shape
    shape = (cells, depth)
    players = nobody(repertoire, shape, memory)
    return Deep(
        players.policies,
        jnp.full(shape, -jnp.inf),
        jnp.zeros((*shape, size)),
        jnp.full(shape, jnp.inf),
        repertoire.centroids,
        players.seen,
        jnp.zeros(shape, jnp.int32),
    )


def vacate(deep: Deep, leaving: Bool[Array, "cells depth"]) -> Deep:
    """Without those who leave. Not compiled: a program would copy the policies, which stay."""
    where, empty = lambda d: (d.fitness, d.seen.count, d.challenges), (-jnp.inf, 0, 0)
    left = [jnp.where(leaving, e, x) for e, x in zip(empty, where(deep), strict=True)]
    return eqx.tree_at(where, deep, left)


@eqx.filter_jit
def surface(deep: Deep) -> Repertoire:
    """What experiments see: for a cell stands the fittest of its policies, the first of equals.

    Open: the study of 2023 lets all policies of a deep cell stand for it, a random one in each episode.
    """
    cells, best = jnp.arange(len(deep.fitness)), jnp.argmax(deep.fitness, axis=1)
    inside = (deep.policies, deep.fitness, deep.descriptor, deep.spread)
    policies, *numbers = jax.tree.map(lambda x: x[cells, best], inside)
    return Repertoire(policies, *numbers, centroids=deep.centroids)


# --- settling -------------------------------------------------------------------------------------


class Inside(NamedTuple):
    """What a decision looks at: numbers of each place in a cell, or of one player."""

    fitness: Float[Array, "*depth"]
    count: Int[Array, "*depth"]  # of the episodes behind it


class Decision(NamedTuple):
    """Which place it is about, and what becomes of the player. If neither, it was repelled."""

    place: Int[Array, "*players"]
    settles: Bool[Array, "*players"]
    waits: Bool[Array, "*players"]  # plays again before it is decided


Decide = Callable[[Inside, Inside, Array], Decision]


def crowd_in(cell: Inside, new: Inside, draw: Int[Array, ""]) -> Decision:
    """`deep-grid`: a free place, or that of a random inhabitant; nobody is refused."""
    free = cell.fitness == -jnp.inf
    place = jnp.where(free.any(), jnp.argmax(free), draw)
    return Decision(place, jnp.array(True), jnp.array(False))


def displace(cell: Inside, new: Inside, draw: Int[Array, ""]) -> Decision:
    """`archive-sampling`: the fittest stay."""
    place = jnp.argmin(cell.fitness)  # an empty one, if there is one
    return Decision(place, new.fitness > cell.fitness[place], jnp.array(False))


def challenge(cell: Inside, new: Inside, draw: Int[Array, ""]) -> Decision:
    """`adaptive-sampling`: the fitter one stays, after at least as many episodes as the elite."""
    place = jnp.argmin(cell.fitness)
    is_fitter, is_even = new.fitness > cell.fitness[place], new.count >= cell.count[place]
    return Decision(place, is_fitter & is_even, is_fitter & ~is_even)


@partial(jax.jit, static_argnames="decide", donate_argnames="deep")
def settle(
    deep: Deep,
    players: Players,
    valid: Bool[Array, " players"],
    decide: Decide,
    *,
    key: Key[Array, ""],
) -> tuple[Deep, Decision]:
    """Players come to their cells exactly as if one came after another. Who is not valid, vanishes.

    As in `me_ls.py::insert`, a scan decides on a few numbers; then each policy that stayed moves once.
    It moves in place, and `deep` is used up: cells 50 policies deep hold gigabytes.
    """
    character = jax.vmap(recall)(players.seen)
    cells = nearest(deep.centroids, character.descriptor)
    indices = jnp.arange(len(cells))
    draws = jax.random.randint(key, cells.shape, 0, deep.fitness.shape[1])

    def consider(table: tuple, offer: tuple) -> tuple[tuple, Decision]:
        index, cell, new, draw, valid = offer
        place, settles, waits = decide(jax.tree.map(lambda x: x[cell], table[0]), new, draw)
        settles, waits = settles & valid, waits & valid
        inside, challenges, owner = jax.tree.map(lambda x: x[cell, place], table)
        stays = (inside, challenges + (valid & ~settles & ~waits), owner)
        table = jax.tree.map(
            lambda x, new, old: x.at[cell, place].set(jnp.where(settles, new, old)),
            table,
            (new, 0, index),
            stays,
        )
        return table, Decision(place, settles, waits)

    inside, nobody = Inside(deep.fitness, deep.seen.count), jnp.full(deep.fitness.shape, -1)
    offers = (indices, cells, Inside(character.fitness, players.seen.count), draws, valid)
    (_, challenges, owner), decision = jax.lax.scan(
        consider, (inside, deep.challenges, nobody), offers
    )
    stayed = owner[cells, decision.place] == indices
    target = jnp.where(stayed, cells, len(owner))  # beyond the end: dropped
    policies, fitness, descriptor, spread, seen = jax.tree.map(
        lambda old, new: old.at[target, decision.place].set(new, mode="drop"),
        (deep.policies, deep.fitness, deep.descriptor, deep.spread, deep.seen),
        (players.policies, *character, players.seen),
    )
    return Deep(policies, fitness, descriptor, spread, deep.centroids, seen, challenges), decision


# --- an iteration ---------------------------------------------------------------------------------


class UncertainState(eqx.Module):
    """All that an iteration hands to the next one."""

    repertoire: Repertoire  # the surface of `deep`
    deep: Deep
    waiting: Players | None  # of adaptive-sampling: those who play again; the others are unseen


class Uncertain(MapElites):
    """What the three methods share: seats with an episode in each, and cells with a depth."""

    config: UncertainConfig = eqx.field(static=True)
    own_depth: ClassVar[int]
    decide: ClassVar[Decide]

    @property
    def depth(self) -> int:
        return self.config.depth or self.own_depth

    @property
    def seats(self) -> int:
        return self.config.batch

    @property
    def steps_per_iteration(self) -> int:
        return self.seats * self.task.length

    def init(self, key: Key[Array, ""]) -> UncertainState:
        repertoire = super().init(key).repertoire
        return UncertainState(repertoire, deepen(repertoire, self.depth, self.config.memory), None)

    def step(
        self, state: UncertainState, key: Key[Array, ""]
    ) -> tuple[UncertainState, dict[str, Num[Array, ""] | None]]:
        return self.advance(jax.tree.map(jnp.copy, state), key)

    def advance(
        self, state: UncertainState, key: Key[Array, ""]
    ) -> tuple[UncertainState, dict[str, Num[Array, ""] | None]]:
        """One pass through the loop: offspring for free seats, an episode in every seat, settling.

        Uses the state up, as `settle` does its cells.
        """
        vary_key, play_key, settle_key = jax.random.split(key, 3)
        policies = self.propose(self.parents(state), self.seats, key=vary_key)
        nothing = unseen((self.seats,), self.config.memory, self.task.descriptor_size)
        players, leaving = self.seat(state, Players(policies, nothing))
        episodes = self.play(players.policies, key=play_key)
        after = remember(players, episodes)
        valid = ~episodes.diverged[:, 0] & self.may_settle(state.deep, after)
        rest, decide = vacate(state.deep, leaving), type(self).decide
        deep, decision = settle(rest, after, valid, decide, key=settle_key)
        repertoire = surface(deep)
        is_new = players.seen.count == 0
        metrics: dict[str, Num[Array, ""] | None] = {
            **repertoire_metrics(self.task, repertoire),
            "mean_spread": None,  # many were seen only once
            "insertions": jnp.sum(decision.settles & is_new),
            "offspring": is_new.sum(),
            "diverged": episodes.diverged.sum(),
        }
        return UncertainState(repertoire, deep, self.wait(after, decision)), metrics

    def play(self, policies: MLP, *, key: Key[Array, ""], **how: Any) -> Episodes:
        return rollout(self.task, policies, jax.random.split(key, (self.seats, 1)), **how)

    def parents(self, state: UncertainState) -> Repertoire:
        return state.repertoire

    def seat(
        self, state: UncertainState, offspring: Players
    ) -> tuple[Players, Bool[Array, "cells depth"]]:
        """Who plays, and who leaves the cells to do so. By default nobody: all seats are for offspring."""
        return offspring, jnp.zeros_like(state.deep.occupied)

    def may_settle(self, deep: Deep, players: Players) -> Bool[Array, " players"]:
        return jnp.ones(self.seats, bool)

    def wait(self, players: Players, decision: Decision) -> Players | None:
        return None


@eqx.filter_jit
def first_in_turn(
    rows: tuple[Players, ...], turns: tuple[Num[Array, " _"], ...], seats: int
) -> Players:
    """Of several rows of players, those whose turn comes first, in the order of their turns."""
    seated = jnp.argsort(jnp.concatenate(turns))[:seats]
    return jax.tree.map(lambda *x: jnp.concatenate(x)[seated], *rows)


# --- the methods ----------------------------------------------------------------------------------


class DeepGrid(Uncertain):
    """All seats are for offspring: nobody plays twice."""

    own_depth: ClassVar[int] = 50
    decide: ClassVar[Decide] = crowd_in

    def parents(self, state: UncertainState) -> Repertoire:
        return state.deep


def select_in_proportion(deep: Deep, count: int, *, key: Key[Array, ""]) -> MLP:
    """Parents of `deep-grid`: a uniform cell, in it in proportion to fitness minus the cell's lowest.

    So the least fit is no parent, unless all are equal: then anybody may be.
    """
    cell_key, place_key = jax.random.split(key)
    inhabited = deep.occupied.any(axis=1)
    chance = inhabited / jnp.maximum(inhabited.sum(), 1)
    cell = jax.random.choice(cell_key, len(chance), (count,), p=chance)
    fitness, occupied = deep.fitness[cell], deep.occupied[cell]
    lowest = jnp.min(jnp.where(occupied, fitness, jnp.inf), axis=1, keepdims=True)
    above = jnp.where(occupied, fitness - lowest, 0)
    weight = jnp.where(above.any(axis=1, keepdims=True), above, occupied)
    place = jax.random.categorical(place_key, jnp.log(weight))
    return jax.tree.map(lambda x: x[cell, place], deep.policies)


class ArchiveSampling(Uncertain):
    """A seat for each place in the cells and a batch of them; what inhabitants leave, offspring take.

    Open: in the study the offspring are always a batch, and empty places count as if they played.
    """

    own_depth: ClassVar[int] = 2  # where an elite moves away, there is another
    decide: ClassVar[Decide] = displace

    @property
    def seats(self) -> int:
        return self.config.cells * self.depth + self.config.batch

    def seat(
        self, state: UncertainState, offspring: Players
    ) -> tuple[Players, Bool[Array, "cells depth"]]:
        everybody = state.deep.occupied
        turns = jnp.where(everybody.reshape(-1), 0, 2), jnp.ones(self.seats, int)
        return first_in_turn((state.deep.players, offspring), turns, self.seats), everybody


class AdaptiveSampling(Uncertain):
    """Elites that repelled a challenger play again, and so do challengers that are fitter so far.

    An elite leaves its cell to play. It comes back before all challengers, to wherever its mean descriptor
    lies by then: it settles if a place is free, else it is a challenger itself. Who was seen too often
    outside the cell of its mean vanishes, elite or not.
    Open: in the code of 2020 a challenger that is repelled has another chance after one more episode of the
    elite, and plays twice before it enters an empty cell.
    """

    own_depth: ClassVar[int] = 1
    decide: ClassVar[Decide] = challenge

    def init(self, key: Key[Array, ""]) -> UncertainState:
        state = super().init(key)
        waiting = nobody(state.repertoire, (self.seats,), self.config.memory)
        return UncertainState(state.repertoire, state.deep, waiting)

    def seat(
        self, state: UncertainState, offspring: Players
    ) -> tuple[Players, Bool[Array, "cells depth"]]:
        """Challenged elites, those who wait, offspring; they come to their cells in this order.

        All who wait find a seat: they were in one before. Among the elites, the most challenged do first.
        """
        waiting, challenges = state.waiting or offspring, state.deep.challenges.reshape(-1)
        waits = waiting.seen.count > 0
        rank = jnp.argsort(jnp.argsort(-challenges))
        called = (challenges > 0) & (rank < self.seats - waits.sum())
        turns = jnp.where(called, 0, 3), jnp.where(waits, 1, 3), jnp.full(self.seats, 2)
        players = first_in_turn((state.deep.players, waiting, offspring), turns, self.seats)
        return players, called.reshape(state.deep.challenges.shape)

    def may_settle(self, deep: Deep, players: Players) -> Bool[Array, " players"]:
        return share_outside(players.seen, deep.centroids) <= self.config.outside

    def wait(self, players: Players, decision: Decision) -> Players:
        count = jnp.where(decision.waits, players.seen.count, 0)
        return eqx.tree_at(lambda p: p.seen.count, players, count)


one_episode = partial(
    Rule, characterise=characterise_once, replaces=fitter, several=False, config=UncertainConfig
)
RULES["deep-grid"] = one_episode(
    "Deep-Grid", "many policies in a cell", "#9c755f", select=select_in_proportion, search=DeepGrid
)
RULES["adaptive-sampling"] = one_episode(
    "Adaptive-Sampling", "challenged elites play again", "#f28e2b", search=AdaptiveSampling
)
RULES["archive-sampling"] = one_episode(
    "Archive-Sampling", "all elites play again and again", "#edc948", search=ArchiveSampling
)


# --- ME-Soft --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftlyBetter:
    """The low-spread criterion as one number: more fitness may pay for more spread."""

    price: float  # fitness per distance

    def __call__(self, new: Character, old: Character) -> Bool[Array, ""]:
        return new.fitness - self.price * new.spread > old.fitness - self.price * old.spread


class MESoft(MapElites):
    """ME-LS with the soft criterion, its price in the units of the task."""

    config: UncertainConfig = eqx.field(static=True)

    @property
    def rule(self) -> Rule:
        worst = self.task.length * self.task.worst_reward
        price = self.config.price * -worst / math.dist(self.task.low, self.task.high)
        return replace(super().rule, replaces=SoftlyBetter(price))


RULES["me-soft"] = Rule(
    "ME-Soft",
    "fitness minus a price for spread",
    "#59a14f",
    characterise_by_mode,
    SoftlyBetter(1.0),
    least_episodes=2,
    config=UncertainConfig,
    search=MESoft,
)
