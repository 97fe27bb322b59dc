"""Datasets: from a repertoire to trajectories on disk, and from there to batches.

Section 4.3 of the paper: the descriptor space is divided into large zones, the best policy of each
is selected, and the selected policies play the trajectories that the QDT learns from. The ablation
QDT(Naive) of section 5.1 plays all policies instead. Section 5.3 prunes datasets: `prune`.

A dataset is a directory of shards (`machinery/shards.py`) and a `meta.json`, which has this name only
once everything is there. Trajectory i is played by policy i modulo the number of policies from
`trajectory_key(seed, i)`: what is damaged can be played again.

Tasks and episodes come from `envs.py`, repertoires from `me_ls.py`.
Reads in this order: config, zones, trajectories and what is known about them, the build, reading, pruning.
"""

import functools
import itertools
import json
import operator
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int, Int64, Key, Shaped

from envs import Task, rollout, transitions
from machinery import machine, minari
from machinery.alike import action_differences, most_alike, neighbours
from machinery.config import make_config, require_at_least, require_choices
from machinery.driver import Progress, Stopped, finish_step_on_signal, stop_requested
from machinery.engine import VECTOR
from machinery.files import UserError, is_writer, lock, read_json, write_json
from machinery.machine import replicate
from machinery.runs import Stage
from machinery.shards import (
    Layout,
    Rows,
    Shard,
    bytes_per_row,
    check_shard,
    load_column,
    write_shard,
)
from machinery.streams import generator, stream
from me_ls import MLP, Repertoire, goals, nearest, spread

FORMAT = "qdt-dataset-2"
DTYPES = {"float32": "<f4", "float16": "<f2"}
PER_EPISODE = ("descriptor", "fitness", "policy", "zone", "trajectory")  # arrays of small rows
PRUNINGS = ("density-50", "density-30", "density-10", "tiles", "upper")
COMPARED = 24  # states of an episode in which `alike` compares actions
TILES = 4  # per axis of the chequerboard; the paper gives no number


@dataclass(frozen=True)
class DatasetConfig:
    """The paper's values; what the paper leaves open is marked."""

    trajectories: int = 300_000
    zones: int | None = None  # the task's own: 50 for Halfcheetah-Uni and 100 for Ant-Omni
    selection_episodes: int = 10  # of each candidate; open: "a few"
    # How many times as far from the middle of a zone a policy may end as the nearest does, if it acts more
    # like the policies of the zones around (`machinery/alike.py`); ours.
    alike: float | None = None
    naive: bool = False  # the ablation: no selection, all policies of the repertoire play
    typical: bool = False  # store only what ends nearest to its own policy's mean; ours
    action_noise: float = 0.0  # on the actions that are played, not on those stored; ours
    achieved: bool = False  # also store the descriptor so far, for conditioning "to-go"
    dtype: Literal["float32", "float16"] = "float32"  # of what is stored per step

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(1, self, "trajectories", "selection_episodes", "zones", "alike")
        require_at_least(0, self, "action_noise")


# --- zones ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """Who plays: cells of the repertoire, in the order in which their policies take turns."""

    centroids: Float[np.ndarray, "zones d"]
    cells: Int[np.ndarray, " policies"]
    zone: Int[np.ndarray, " policies"]  # of each policy
    descriptor: Float[np.ndarray, "policies d"]  # mean of the selection episodes; naive: as stored
    hits: Int[np.ndarray, " policies"] | None  # selection episodes that ended in it; None: naive

    @property
    def empty_zones(self) -> list[int]:
        return sorted(set(range(len(self.centroids))) - set(self.zone.tolist()))


def best_of_each_zone(
    zone: Int[np.ndarray, " n"],
    hits: Int[np.ndarray, " n"],
    spread: Float[np.ndarray, " n"],
    fitness: Float[np.ndarray, " n"],
    valid: Bool[np.ndarray, " n"],
) -> Int[np.ndarray, " best"]:
    """Per zone who lands in it most often; ties: lower spread, then higher fitness, then the first."""
    order = np.lexsort((-fitness, spread, -hits, zone))  # stable: of equals, the first stays first
    order = order[valid[order]]
    _, first = np.unique(zone[order], return_index=True)
    return order[first]


def select_policies(
    task: Task, repertoire: Repertoire, config: DatasetConfig, *, seed: int
) -> Selection:
    """Divides the repertoire into zones and selects the best policy of each (naive: every policy).

    A policy is a candidate for the zone in which its stored descriptor lies, and plays a few episodes as
    it will play the trajectories, with or without noise. It is out if one of them diverges, or if none of
    them ends in the zone: it has nothing to demonstrate there. With `alike`, the best give way to whoever
    is nearly as good in their zone, wherever stored, and more like its neighbours.
    """
    centroids = goals(task, config.zones)
    cells = np.flatnonzero(repertoire.occupied)
    if len(cells) == 0:
        raise UserError("the repertoire is empty: there is nobody to play the dataset.")
    zone = np.asarray(nearest(centroids, jnp.asarray(repertoire.descriptor)[cells]))
    if config.naive:
        stored = np.asarray(repertoire.descriptor)[cells]
        return Selection(np.asarray(centroids), cells, zone, stored, None)
    keys = jax.random.split(stream(seed, "selection"), (len(cells), config.selection_episodes))
    members, noise = _members(repertoire, cells), config.action_noise
    episodes = rollout(task, members, keys, action_noise=noise)
    ended = np.asarray(nearest(centroids, episodes.descriptor))  # zone in which each episode ended
    centroids, ends = np.asarray(centroids), np.asarray(episodes.descriptor)
    sound = np.asarray(~episodes.diverged.any(axis=1))
    hits = (ended == zone[:, None]).sum(axis=1)
    best = best_of_each_zone(
        zone,
        hits,
        np.asarray(jax.vmap(spread)(episodes.descriptor)),
        np.asarray(episodes.fitness.mean(axis=1)),
        sound & (hits > 0),
    )
    if len(best) == 0:
        raise UserError(
            "no policy can be selected: each of them diverged, or never ended in its own zone."
        )
    zone = zone[best]
    if config.alike is not None:
        # By policy and zone: how far from its middle episodes end; endlessly, if none ends in the zone.
        reaches = np.stack([sound & (ended == z).any(axis=1) for z in zone], axis=1)
        apart = [np.linalg.norm(ends - c, axis=-1).mean(axis=1) for c in centroids[zone]]
        distance = np.where(reaches, np.stack(apart, axis=1), np.inf)
        candidate = distance <= config.alike * distance.min(axis=0)
        candidate[best, np.arange(len(best))] = True
        who = np.flatnonzero(candidate.any(axis=1))
        difference = _differences(task, _members(repertoire, cells[who]), noise, seed)
        first, near = np.searchsorted(who, best), neighbours(centroids[zone])
        best = who[most_alike(first, candidate[who], near, difference)]
    hits = (ended[best] == zone[:, None]).sum(axis=1)
    return Selection(centroids, cells[best], zone, ends[best].mean(axis=1), hits)


def _differences(
    task: Task, policies: MLP, action_noise: float, seed: int
) -> Float[np.ndarray, "n n"]:
    """How differently every two policies act, in some states of one episode of each."""
    keys = jax.random.split(stream(seed, "alike"), (len(policies.layers[0].weight), 1))
    episodes = rollout(task, policies, keys, record=transitions, action_noise=action_noise)
    steps = np.linspace(0, task.length - 1, min(COMPARED, task.length)).astype(int)
    return np.asarray(action_differences(policies, episodes.recorded.observations[:, 0, steps]))


def _members(repertoire: Repertoire, cells: Int[np.ndarray, " n"]) -> MLP:
    return replicate(jax.tree.map(lambda x: jnp.asarray(x)[cells], repertoire.policies))


def trajectory_key(seed: int, index: int | Int[Array, ""]) -> Key[Array, ""]:
    """The key from which trajectory `index` was played: its start, and its noise if any."""
    return jax.random.fold_in(stream(seed, "trajectories"), index)


# --- trajectories and what is known about them ----------------------------------------------------


class Trajectory(eqx.Module):
    """One episode as a model reads it, or a batch of them along leading axes."""

    descriptor: Float[Array | np.ndarray, "*batch descriptor"]  # that it achieved
    observations: Float[Array | np.ndarray, "*batch time observation"]
    actions: Float[Array | np.ndarray, "*batch time action"]
    # The descriptor before each step; only conditioning "to-go" reads it.
    achieved: Float[Array | np.ndarray, "*batch time descriptor"] | None = None

    def beginning(self, steps: int) -> "Trajectory":
        """Its first steps; the descriptor stays what the whole of it achieved."""
        every = (self.observations, self.actions, self.achieved)
        return Trajectory(self.descriptor, *(x if x is None else x[..., :steps, :] for x in every))


@dataclass(frozen=True)
class Sizes:
    """Of a trajectory."""

    length: int
    observation: int
    action: int
    descriptor: int

    @staticmethod
    def of(task: Task) -> "Sizes":
        return Sizes(task.length, task.observation_size, task.action_size, task.descriptor_size)


def layout(sizes: Sizes, config: DatasetConfig) -> Layout:
    """What is stored: the type and the shape of one trajectory in every array."""
    real, length = DTYPES[config.dtype], sizes.length
    arrays: Layout = {
        "observations": (real, (length + 1, sizes.observation)),  # the last follows the last action
        "actions": (real, (length, sizes.action)),
        "rewards": (real, (length,)),
        "descriptor": ("<f4", (sizes.descriptor,)),  # that the trajectory achieved
        "fitness": ("<f4", ()),
        "policy": ("<i4", ()),  # its cell in the repertoire
        "zone": ("<i4", ()),  # of its policy
        "trajectory": ("<i8", ()),  # index, for `trajectory_key`
    }
    further: Layout = {"achieved": (real, (length, sizes.descriptor))} if config.achieved else {}
    return arrays | further


def bytes_on_disk(task: Task, config: DatasetConfig) -> int:
    """Of the numbers; headers and meta.json add two or three kilobytes per shard."""
    return config.trajectories * bytes_per_row(layout(Sizes.of(task), config))


@dataclass(frozen=True)
class Meta:
    """`meta.json`: what a dataset is, and what is there of it."""

    format: str
    sizes: Sizes
    low: tuple[float, ...]  # bounds of the descriptor space
    high: tuple[float, ...]
    seed: int
    config: DatasetConfig
    stage: dict[str, Any]  # config of the stage that built it
    repertoire: int  # checksum
    selection: Selection
    episodes_per_shard: int  # of every policy
    shards: list[Shard]

    @property
    def arrays(self) -> Layout:
        return layout(self.sizes, self.config)


def parse_meta(content: Any, path: Path | str) -> Meta:
    """What somebody's `meta.json` says: everything that is relied on is checked."""
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r} instead of {FORMAT!r}")
        sizes = make_config(Sizes, content["sizes"])
        low, high = (tuple(map(float, content[name])) for name in ("low", "high"))
        config = make_config(DatasetConfig, content["config"])
        who = content["selection"]
        selection = Selection(
            np.array(who["centroids"], np.float32),
            np.array(who["cells"], np.int64),
            np.array(who["zone"], np.int64),
            np.array(who["descriptor"], np.float32),
            None if who["hits"] is None else np.array(who["hits"], np.int64),
        )
        shards = [Shard.parse(shard) for shard in content["shards"]]
        rows = [shard.rows for shard in shards]
        complete = all(layout(sizes, config).keys() <= shard.files.keys() for shard in shards)
        ordered = len(low) == len(high) == sizes.descriptor and all(map(operator.lt, low, high))
        seed, repertoire, each = (
            int(content[name]) for name in ("seed", "repertoire", "episodes_per_shard")
        )
        if min(*vars(sizes).values(), *rows, each) < 1 or not complete or not ordered:
            raise ValueError("its numbers make no sense")
        stage = dict(content["stage"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, UserError) as error:
        reason = str(error).rstrip(".")
        raise UserError(f"{path} does not describe a dataset, or is damaged: {reason}.") from None
    return Meta(FORMAT, sizes, low, high, seed, config, stage, repertoire, selection, each, shards)


# --- the build ------------------------------------------------------------------------------------


def build(
    task: Task, repertoire: Repertoire, config: DatasetConfig, seed: int, stage: Stage
) -> "Dataset":
    """Plays and stores the dataset, shard by shard; shards that are there and intact are kept.

    Diverged episodes are counted and left out, and others are played in their place: the dataset has
    as many trajectories as were asked for.
    """
    directory, wanted = stage.directory, config.trajectories
    finished = directory / "meta.json"
    path = finished if finished.exists() else directory / "unfinished.json"
    with lock(directory), finish_step_on_signal():
        meta = _begin(task, repertoire, config, seed, stage, path)
        members = _members(repertoire, meta.selection.cells)
        stored, progress = 0, None
        for number in itertools.count():
            if not _is_intact(directory, number, meta):
                progress = progress or Progress("dataset", wanted)
                played = play_shard(task, members, meta, number)
                shard = write_shard(directory, number, *to_store(*played, meta, wanted - stored))
                shards = [*meta.shards[:number], shard, *meta.shards[number + 1 :]]
                meta = replace(meta, shards=shards)
                write_json(path, meta)
            stored += meta.shards[number].rows
            if progress:
                progress.update(stored, **_left_out(meta.shards))
            if stop_requested():
                raise Stopped(
                    f"stopped after {stored} of {wanted} trajectories; the same command continues."
                )
            if stored >= wanted:
                break
        if progress:
            progress.close()
        if path != finished and is_writer():
            path.rename(finished)
        multihost_utils.sync_global_devices("the dataset is on disk")
    return open_dataset(directory)


def _left_out(shards: list[Shard]) -> dict[str, int]:
    names = shards[0].left_out if shards else {}
    return {name: sum(shard.left_out[name] for shard in shards) for name in names}


def _begin(
    task: Task, repertoire: Repertoire, config: DatasetConfig, seed: int, stage: Stage, path: Path
) -> Meta:
    """Who plays, and the shards that an earlier build has left."""
    checksum = 0
    for leaf in jax.tree.leaves(repertoire):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).data, checksum)
    if path.exists():
        meta = parse_meta(read_json(path), path)
        if (meta.config, meta.seed, meta.repertoire) != (config, seed, checksum):
            raise UserError(f"{path.parent} was begun with another repertoire, seed or config.")
        return meta
    selection = select_policies(task, repertoire, config, seed=seed)
    policies, zones, empty = len(selection.cells), len(selection.centroids), selection.empty_zones
    if config.trajectories < policies:
        raise UserError(
            f"{config.trajectories} trajectories are too few for {policies} policies to share."
        )
    if empty and is_writer():
        print(
            f"{len(empty)} of {zones} zones are left out: no policy, or none that ends there.",
            file=sys.stderr,
        )
    each = episodes_per_shard(config.trajectories, policies)
    bounds = task.low, task.high
    about = config, stage.config, checksum, selection
    meta = Meta(FORMAT, Sizes.of(task), *bounds, seed, *about, each, shards=[])
    write_json(path, meta)
    return meta


def episodes_per_shard(trajectories: int, policies: int) -> int:
    """Every shard is played in one shape, which compiles once: all policies, equally often."""
    per_policy = max(1, machine.settings().shard_size // policies)
    shards = -(-trajectories // (policies * per_policy))
    episodes = -(-trajectories // (policies * shards))
    # Whole vectors of episodes play fastest.
    return episodes if episodes <= VECTOR else -(-episodes // VECTOR) * VECTOR


def _is_intact(directory: Path, number: int, meta: Meta) -> bool:
    """Whether a shard can be kept; if it is there but damaged, the user is told."""
    try:
        return number < len(meta.shards) and bool(
            check_shard(directory, number, meta.arrays, meta.shards[number])
        )
    except UserError as error:
        print(f"{error} Replaying it.", file=sys.stderr)
        return False


Arrays = dict[str, Shaped[np.ndarray, "n ..."]]


def play_shard(
    task: Task, members: MLP, meta: Meta, number: int
) -> tuple[Arrays, Bool[np.ndarray, " n"]]:
    """Plays the trajectories of one shard; also tells which of them diverged."""
    selection, policies, episodes = (
        meta.selection,
        len(meta.selection.cells),
        meta.episodes_per_shard,
    )
    index = np.arange(episodes * policies) + number * episodes * policies
    keys = jax.vmap(functools.partial(trajectory_key, meta.seed))(jnp.asarray(index))
    keys = keys.reshape(episodes, policies).T
    noise = meta.config.action_noise
    played = rollout(task, members, keys, record=transitions, action_noise=noise)

    def in_turns(x: Any) -> np.ndarray:
        return np.asarray(x).swapaxes(0, 1).reshape(len(index), *x.shape[2:])

    seen = jax.tree.map(in_turns, played.recorded)
    arrays = {
        "observations": seen.observations,
        "actions": seen.actions[:, :-1],  # nothing is done in the last state,
        "rewards": seen.rewards[:, 1:],  # and nothing has led to the first
        "achieved": seen.path[:, :-1],
        "descriptor": in_turns(played.descriptor),
        "fitness": in_turns(played.fitness),
        "policy": np.tile(selection.cells, episodes),
        "zone": np.tile(selection.zone, episodes),
        "trajectory": index,
    }
    return arrays, in_turns(played.diverged)


def to_store(
    arrays: Arrays, diverged: Bool[np.ndarray, " n"], meta: Meta, most: int
) -> tuple[dict[str, Shaped[np.ndarray, "stored ..."]], dict[str, int], dict[str, float]]:
    """The first `most` trajectories that are worth it; how many are left out, by reason; rounding errors.

    A number that is not finite, or too large for float16, makes a trajectory count as diverged.
    """
    with np.errstate(over="ignore"):
        stored = {
            name: arrays[name].astype(dtype, copy=False) for name, (dtype, _) in meta.arrays.items()
        }
    sound = ~diverged
    for array in stored.values():
        sound &= np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
    wanted = sound.copy()
    if meta.config.typical:
        ends, means = jnp.asarray(arrays["descriptor"]), jnp.asarray(meta.selection.descriptor)
        wanted &= meta.selection.cells[np.asarray(nearest(means, ends))] == arrays["policy"]
    if not wanted.any():
        why = "are untypical" if sound.any() else "diverged"
        raise UserError(f"all {len(sound)} episodes of a shard {why}; nothing to store.")
    left_out = {"diverged": int((~sound).sum()), "untypical": int((sound & ~wanted).sum())}
    kept = np.flatnonzero(wanted)[:most]
    rounding = {
        name: float(np.abs(arrays[name][kept] - array[kept].astype(np.float32)).max())
        for name, array in stored.items()
        if array.dtype == np.float16
    }
    return {name: array[kept] for name, array in stored.items()}, left_out, rounding


# --- reading --------------------------------------------------------------------------------------

View = Int64[np.ndarray, " _"]  # indices into a dataset: a part of it, without a copy


@dataclass(frozen=True)
class Dataset:
    """An opened dataset: what is small is in memory, what is large is mapped when it is needed."""

    directory: Path
    meta: Meta
    rows: Rows
    descriptor: Float[np.ndarray, "n d"]
    fitness: Float[np.ndarray, " n"]
    policy: Int[np.ndarray, " n"]
    zone: Int[np.ndarray, " n"]
    trajectory: Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.fitness)

    @property
    def everything(self) -> View:
        return np.arange(len(self))

    @property
    def left_out(self) -> dict[str, int]:
        """Episodes that were played and not stored, by reason."""
        return _left_out(self.meta.shards)

    @property
    def rounding(self) -> dict[str, float]:
        """What float16 costs: the largest absolute error of each array."""
        shards = self.meta.shards
        return {n: max(shard.rounding[n] for shard in shards) for n in shards[0].rounding}

    def batch(self, view: View) -> Trajectory:
        def read(name: str) -> np.ndarray:
            return self.rows.read(name, view).astype(np.float32)

        return Trajectory(
            self.descriptor[view],
            read("observations")[:, :-1],
            read("actions"),
            read("achieved") if self.meta.config.achieved else None,
        )

    def split(self, fraction: float, *, seed: int, view: View | None = None) -> tuple[View, View]:
        """Divides a view at random: one part for training, one, of this share, that is held out."""
        if not 0 <= fraction < 1:
            raise UserError(f"the share that is held out must be in [0, 1), it is {fraction}.")
        indices = self.everything if view is None else view
        shuffled = generator(seed, "held-out").permutation(indices)
        held_out = round(fraction * len(indices))
        return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def open_dataset(directory: Path) -> Dataset:
    """Opens a finished dataset, possibly somebody else's, after every file has been checked."""
    path = directory / "meta.json"
    if not path.exists():
        raise UserError(f"{directory} holds no finished dataset.")
    meta = parse_meta(read_json(path), path)
    if not meta.shards:
        raise UserError(f"{directory} holds no trajectories.")
    rows = Rows.open(directory, meta.arrays, meta.shards)
    small = {name: load_column(directory, len(meta.shards), name) for name in PER_EPISODE}
    return Dataset(directory, meta, rows, **small)


class BatchReader:
    """Batches by number; the next one is prepared while the current one is used.

    An epoch is `len(view) // batch_size` batches, in a new order of the whole view. A batch depends on its
    number and on the arguments alone: a training that resumes goes on as if uninterrupted.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int,
        view: View | None = None,
        stream: str = "order",  # where its orders are drawn
    ):
        self.dataset, self.batch_size, self.seed, self.stream = dataset, batch_size, seed, stream
        self.indices = dataset.everything if view is None else view
        if self.per_epoch < 1:
            raise UserError(
                f"a batch of {batch_size} is more than the {len(self.indices)} trajectories."
            )
        self.background = ThreadPoolExecutor(max_workers=1)
        self.ahead: dict[int, Future[Trajectory]] = {}

    @property
    def per_epoch(self) -> int:
        return len(self.indices) // self.batch_size

    def __call__(self, step: int) -> Trajectory:
        ready = self.ahead.pop(step, None)
        batch = ready.result() if ready else self.prepare(step)
        self.ahead = {step + 1: self.background.submit(self.prepare, step + 1)}
        return batch

    def prepare(self, step: int) -> Trajectory:
        epoch, place = divmod(step, self.per_epoch)
        order = self.order(epoch)
        return self.dataset.batch(order[place * self.batch_size : (place + 1) * self.batch_size])

    @functools.lru_cache(maxsize=1)  # noqa: B019 - there is one reader per training
    def order(self, epoch: int) -> View:
        return generator(self.seed, self.stream, epoch).permutation(self.indices)


# --- pruning --------------------------------------------------------------------------------------


def prune(dataset: Dataset, how: str, seed: int) -> View:
    """What one of the paper's prunings leaves of a dataset (section 5.3, figures 7 and 13).

    density-50, -30, -10: this share of the trajectories, drawn at random: thinner, empty nowhere; with
    one seed the smaller is a part of the larger. tiles: every other tile of a chequerboard over the
    descriptor space is empty. upper: the half with the larger last coordinate is empty.
    A trajectory lies where it ended, not where its policy was meant to go.
    """
    if how not in PRUNINGS:
        raise UserError(f"unknown pruning {how!r}; there are {', '.join(PRUNINGS)}.")
    if how.startswith("density-"):
        share = int(how.removeprefix("density-")) / 100
        shuffled = generator(seed, "density").permutation(len(dataset))
        view = np.sort(shuffled[: round(share * len(dataset))])
    else:
        view = np.flatnonzero(~is_emptied(dataset, how, dataset.descriptor))
    if len(view) == 0:
        raise UserError(f"pruning {how} leaves no trajectories.")
    return view


def is_emptied(
    dataset: Dataset, how: str, descriptor: Float[np.ndarray, "n d"]
) -> Bool[np.ndarray, " n"]:
    """Which of these descriptors lie where a pruning leaves nothing."""
    low, high = np.array(dataset.meta.low), np.array(dataset.meta.high)
    return left_empty(how, (descriptor - low) / (high - low))


def left_empty(how: str, where: Float[np.ndarray, "*n d"]) -> Bool[np.ndarray, "*n"]:
    """Which places a pruning empties; a place is given in shares of the space's width."""
    if how == "tiles":
        tile = np.minimum(np.floor(where * TILES), TILES - 1)
        return tile.sum(axis=-1) % 2 == 1
    return (where[..., -1] > 0.5) & (how == "upper")


def empty_boxes(dataset: Dataset, how: str, bins: int = 50) -> Bool[np.ndarray, "..."]:
    """The boxes of `density` that a pruning empties, where the space has as many dimensions as they."""
    size = len(dataset.meta.low)
    if size > 2:
        return np.zeros((bins, bins), bool)
    middles = (np.arange(bins) + 0.5) / bins
    return left_empty(how, np.stack(np.meshgrid(*[middles] * size, indexing="ij"), axis=-1))


def density(
    dataset: Dataset, bins: int = 50, view: View | None = None
) -> tuple[Float[np.ndarray, "..."], tuple[Float[np.ndarray, " edges"], ...]]:
    """How many trajectories end in each box of the descriptor space (its first two dimensions).

    Returns the counts and, for each dimension, the edges of the boxes.
    """
    ends = dataset.descriptor[dataset.everything if view is None else view]
    span = list(zip(dataset.meta.low, dataset.meta.high, strict=True))
    counts, edges = np.histogramdd(ends[:, :2], bins=bins, range=span[:2])
    return counts, tuple(edges)


# --- exchange -------------------------------------------------------------------------------------


def export_minari(dataset: Dataset, dataset_id: str) -> None:
    """Copies a dataset to a Minari dataset such as `qdt/ant-omni-v0`."""
    meta = (dataset.directory / "meta.json").read_text()
    minari.export_rows(dataset.rows, PER_EPISODE, meta, dataset_id)


def import_minari(dataset_id: str, directory: Path) -> Dataset:
    """The way back: the files that were exported, which `open_dataset` checks."""

    def parse(text: str) -> tuple[Layout, list[Shard]]:
        meta = parse_meta(json.loads(text), dataset_id)
        return meta.arrays, meta.shards

    minari.import_rows(dataset_id, directory, PER_EPISODE, parse)
    return open_dataset(directory)
