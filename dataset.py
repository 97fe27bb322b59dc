"""Datasets: from a repertoire to trajectories on disk, and from there to batches.

Section 4.3 of the paper: the descriptor space is divided into large zones, the best policy of each
is selected, and the selected policies play the trajectories that the QDT learns from. The ablation
QDT(Naive) of section 5.1 plays all policies instead. Section 5.3 prunes datasets: `prune`.

A dataset is a directory of shards. A shard is one `.npy` file per array of `layout`; sizes and checksums
are in `meta.json`, which has this name only once everything is there. Trajectory i is played by policy i
modulo the number of policies from `trajectory_key(seed, i)`: what is damaged can be played again.

Tasks and episodes come from `envs.py`, repertoires from `me_ls.py`, files from `runs.py`.
Reads in this order: config, zones, files, the build, reading, pruning, Minari.
"""

import functools
import io
import itertools
import json
import math
import operator
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Bool, Float, Int, Int64, Key

import runs
from envs import VECTOR, Task, replicate, rollout
from me_ls import MLP, Repertoire, cvt, nearest, spread
from runs import UserError

FORMAT = "qdt-dataset-1"
DTYPES = {"float32": "<f4", "float16": "<f2"}
PER_EPISODE = ("descriptor", "fitness", "policy", "zone", "trajectory")  # arrays of small rows
PRUNINGS = ("density-50", "density-30", "density-10", "tiles", "upper")
TILES = 4  # per axis of the chequerboard; the paper gives no number


@dataclass(frozen=True)
class DatasetConfig:
    """The paper's values; what the paper leaves open is marked."""

    trajectories: int = 300_000
    zones: int = 0  # 0: the task's, 50 for Halfcheetah-Uni and 100 for Ant-Omni
    selection_episodes: int = 10  # of each candidate; open: "a few"
    naive: bool = False  # the ablation: no selection, all policies of the repertoire play
    typical: bool = False  # store only what ends nearest to its own policy's mean; ours
    disturbance: float = 0.0  # noise on the actions that are played, not on those stored; ours
    paths: bool = False  # also store the descriptor over time, for the QDT's descriptor-to-go
    dtype: str = "float32"  # of what is stored per step; float16 halves the disk: `rounding`
    shard_size: int = 2048  # trajectories that are played and written at a time, at most; ours

    def __post_init__(self) -> None:
        for name in ("trajectories", "selection_episodes", "shard_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("zones", "disturbance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} must not be negative, it is {getattr(self, name)}.")
        if self.dtype not in DTYPES:
            raise UserError(f"unknown dtype {self.dtype!r}; there are {', '.join(DTYPES)}.")

    def zone_count(self, task: Task) -> int:
        return self.zones or task.zones


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

    A policy is a candidate for the zone in which its stored descriptor lies, plays a few episodes as
    it will play the trajectories, disturbed or not, and is out if one of them diverges.
    """
    zones_key, episodes_key, _ = _keys(seed)
    centroids = cvt(task.low, task.high, config.zone_count(task), key=zones_key)
    cells = np.flatnonzero(repertoire.occupied)
    if len(cells) == 0:
        raise UserError("the repertoire is empty: there is nobody to play the dataset.")
    zone = np.asarray(nearest(centroids, jnp.asarray(repertoire.descriptor)[cells]))
    if config.naive:
        stored = np.asarray(repertoire.descriptor)[cells]
        return Selection(np.asarray(centroids), cells, zone, stored, None)
    keys = jax.random.split(episodes_key, (len(cells), config.selection_episodes))
    episodes = rollout(task, _members(repertoire, cells), keys, disturbance=config.disturbance)
    hits = (np.asarray(nearest(centroids, episodes.descriptor)) == zone[:, None]).sum(axis=1)
    best = best_of_each_zone(
        zone,
        hits,
        np.asarray(jax.vmap(spread)(episodes.descriptor)),
        np.asarray(episodes.fitness.mean(axis=1)),
        np.asarray(~episodes.diverged.any(axis=1)),
    )
    if len(best) == 0:
        raise UserError("no policy can be selected: an episode of every one of them diverged.")
    mean = np.asarray(episodes.descriptor.mean(axis=1))
    return Selection(np.asarray(centroids), cells[best], zone[best], mean[best], hits[best])


def _members(repertoire: Repertoire, cells: Int[np.ndarray, " n"]) -> MLP:
    return replicate(jax.tree.map(lambda x: jnp.asarray(x)[cells], repertoire.policies))


def _keys(seed: int) -> Key[Array, "3"]:
    """For the zones, the episodes of the selection and the trajectories."""
    apart = 0xDA7A5E7  # from the iterations of a search with the same seed, which count from 0
    return jax.random.split(jax.random.fold_in(jax.random.key(seed), apart), 3)


def trajectory_key(seed: int, index: int | Int[Array, ""]) -> Key[Array, ""]:
    """The key from which trajectory `index` was played: its start, and its disturbance if any."""
    return jax.random.fold_in(_keys(seed)[2], index)


# --- files ----------------------------------------------------------------------------------------

Layout = dict[str, tuple[str, tuple[int, ...]]]


def layout(sizes: Sequence[int], config: DatasetConfig) -> Layout:
    """What is stored: the type and the shape of one trajectory in every array."""
    length, observation, action, descriptor = sizes
    real = DTYPES[config.dtype]
    arrays: Layout = {
        "observations": (real, (length + 1, observation)),  # the last follows the last action
        "actions": (real, (length, action)),
        "rewards": (real, (length,)),
        "descriptor": ("<f4", (descriptor,)),  # that the trajectory achieved
        "fitness": ("<f4", ()),
        "policy": ("<i4", ()),  # its cell in the repertoire
        "zone": ("<i4", ()),  # of its policy
        "trajectory": ("<i8", ()),  # index, for `trajectory_key`
    }
    return arrays | ({"paths": (real, (length, descriptor))} if config.paths else {})


def sizes_of(task: Task) -> tuple[int, ...]:
    return task.length, task.observation_size, task.action_size, task.descriptor_size


def bytes_on_disk(task: Task, config: DatasetConfig) -> int:
    """Of the numbers; headers and meta.json add two or three kilobytes per shard."""
    arrays = layout(sizes_of(task), config).values()
    return config.trajectories * sum(np.dtype(d).itemsize * math.prod(s) for d, s in arrays)


@dataclass(frozen=True)
class Shard:
    """What `meta.json` says about a shard."""

    rows: int
    diverged: int  # episodes that were left out
    untypical: int  # with `typical`: episodes that ended nearer to another policy; left out, too
    files: dict[str, tuple[int, int]]  # size and checksum of each array's file
    rounding: dict[str, float]  # float16: the largest absolute error of each array

    @staticmethod
    def parse(content: Any) -> "Shard":
        files = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        rounding = {name: float(x) for name, x in content["rounding"].items()}
        rows, diverged, untypical = (int(content[n]) for n in ("rows", "diverged", "untypical"))
        return Shard(rows, diverged, untypical, files, rounding)


@dataclass(frozen=True)
class Meta:
    """`meta.json`: what a dataset is, and what is there of it."""

    format: str
    sizes: tuple[int, ...]  # length, observation, action, descriptor
    low: tuple[float, ...]  # bounds of the descriptor space
    high: tuple[float, ...]
    seed: int
    config: DatasetConfig
    stage: dict[str, Any]  # config of the stage that built it
    repertoire: int  # checksum
    selection: Selection
    shards: list[Shard]

    @property
    def arrays(self) -> Layout:
        return layout(self.sizes, self.config)


def parse_meta(content: Any, path: Path | str) -> Meta:
    """What somebody's `meta.json` says: everything that is relied on is checked."""
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r} instead of {FORMAT!r}")
        sizes = tuple(map(int, content["sizes"]))
        low, high = (tuple(map(float, content[name])) for name in ("low", "high"))
        config = runs.make_config(DatasetConfig, content["config"])
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
        ordered = len(low) == len(high) == sizes[-1] and all(map(operator.lt, low, high))
        if min(*sizes, *rows) < 1 or not complete or not ordered:
            raise ValueError("its numbers make no sense")
        seed, repertoire = int(content["seed"]), int(content["repertoire"])
        stage = dict(content["stage"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"{path} does not describe a dataset, or is damaged: {error}.") from None
    return Meta(FORMAT, sizes, low, high, seed, config, stage, repertoire, selection, shards)


def _file(directory: Path, number: int, name: str) -> Path:
    return directory / f"shard-{number:05d}-{name}.npy"


def _write_array(path: Path, array: np.ndarray) -> tuple[int, int]:
    """Writes a `.npy` file; returns its size and checksum."""
    array = np.ascontiguousarray(array)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    blocks = header.getvalue(), array.reshape(-1).view(np.uint8).data
    if runs.is_writer():
        with runs.write_safely(path) as file:
            for block in blocks:
                file.write(block)
    return sum(map(len, blocks)), zlib.crc32(blocks[1], zlib.crc32(blocks[0]))


def _check_array(path: Path, dtype: str, shape: tuple[int, ...], size: int, checksum: int) -> int:
    """Compares a `.npy` file with what is known about it; returns where its numbers begin.

    Size and checksum come first: nothing damaged reaches NumPy, and nothing large is allocated.
    """
    advice = "building the dataset again replays what is damaged."
    try:
        with open(path, "rb") as file:
            found = file.seek(0, io.SEEK_END)
            if found != size:
                raise UserError(f"{path} is damaged: {found} bytes instead of {size}; {advice}")
            file.seek(0)
            computed = 0
            while block := file.read(1 << 20):
                computed = zlib.crc32(block, computed)
            if computed != checksum:
                raise UserError(f"{path} is damaged: its checksum does not fit; {advice}")
            file.seek(0)
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0(file)
            begin = file.tell()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; {advice}") from None
    except UserError:
        raise
    except Exception as error:  # NumPy's parser of headers raises nearly anything
        raise UserError(f"{path} is not a NumPy array: {error}.") from None
    numbers = np.dtype(dtype).itemsize * math.prod(shape)
    if (version, header, begin) != ((1, 0), (shape, False, np.dtype(dtype)), size - numbers):
        raise UserError(f"{path} does not hold {dtype}{list(shape)}, as meta.json says.")
    return begin


def _check_shard(directory: Path, number: int, meta: Meta) -> dict[str, int]:
    """Checks all files of a shard; returns where the numbers begin in each."""
    rows, files = meta.shards[number].rows, meta.shards[number].files
    return {
        name: _check_array(_file(directory, number, name), dtype, (rows, *shape), *files[name])
        for name, (dtype, shape) in meta.arrays.items()
    }


# --- the build ------------------------------------------------------------------------------------


def build(
    task: Task, repertoire: Repertoire, config: DatasetConfig, seed: int, stage: runs.Stage
) -> "Dataset":
    """Plays and stores the dataset, shard by shard; shards that are there and intact are kept.

    Diverged episodes are counted and left out, and others are played in their place: the dataset has
    as many trajectories as were asked for.
    """
    directory, wanted = stage.directory, config.trajectories
    finished = directory / "meta.json"
    path = finished if finished.exists() else directory / "unfinished.json"
    with runs.lock(directory), runs.finish_iteration_on_signal():
        meta = _begin(task, repertoire, config, seed, stage, path)
        members = _members(repertoire, meta.selection.cells)
        # Every shard is played in one shape, which compiles once: all policies, equally often.
        policies = len(meta.selection.cells)
        count = -(-wanted // (policies * max(1, config.shard_size // policies)))
        episodes = -(-wanted // (policies * count))
        if episodes > VECTOR:  # whole vectors of episodes play fastest
            episodes = -(-episodes // VECTOR) * VECTOR
        stored, progress = 0, None
        for number in itertools.count():
            if not _is_intact(directory, number, meta):
                progress = progress or runs.Progress("dataset    ", wanted, stored)
                played = play_shard(task, members, meta, number, episodes)
                shard = _write_shard(directory, number, *played, meta, wanted - stored)
                shards = [*meta.shards[:number], shard, *meta.shards[number + 1 :]]
                meta = replace(meta, shards=shards)
                runs.write_json(path, meta)
            stored += meta.shards[number].rows
            if progress:
                progress.update(stored, diverged=sum(s.diverged for s in meta.shards))
            if runs.stop_requested():
                raise runs.Stopped(
                    f"stopped after {stored} of {wanted} trajectories; the same command continues."
                )
            if stored >= wanted:
                break
        if progress:
            progress.close()
        if path != finished and runs.is_writer():
            path.rename(finished)
        multihost_utils.sync_global_devices("the dataset is on disk")
    return open_dataset(directory)


def _begin(
    task: Task,
    repertoire: Repertoire,
    config: DatasetConfig,
    seed: int,
    stage: runs.Stage,
    path: Path,
) -> Meta:
    """Who plays, and the shards that an earlier build has left."""
    checksum = 0
    for leaf in jax.tree.leaves(repertoire):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).data, checksum)
    if path.exists():
        meta = parse_meta(runs.read_json(path), path)
        if (meta.config, meta.seed, meta.repertoire) != (config, seed, checksum):
            raise UserError(f"{path.parent} was begun with another repertoire, seed or config.")
        return meta
    selection = select_policies(task, repertoire, config, seed=seed)
    policies, zones, empty = len(selection.cells), len(selection.centroids), selection.empty_zones
    if config.trajectories < policies:
        raise UserError(
            f"{config.trajectories} trajectories are too few for {policies} policies to share."
        )
    if empty and runs.is_writer():
        print(f"{len(empty)} of {zones} zones have no policy and are left out.", file=sys.stderr)
    bounds = task.low, task.high
    about = config, stage.config, checksum, selection
    meta = Meta(FORMAT, sizes_of(task), *bounds, seed, *about, shards=[])
    runs.write_json(path, meta)
    return meta


def _is_intact(directory: Path, number: int, meta: Meta) -> bool:
    """Whether a shard can be kept; if it is there but damaged, the user is told."""
    try:
        return number < len(meta.shards) and bool(_check_shard(directory, number, meta))
    except UserError as error:
        print(f"{error} Replaying it.", file=sys.stderr)
        return False


Arrays = dict[str, np.ndarray]


def play_shard(
    task: Task, members: MLP, meta: Meta, number: int, episodes: int
) -> tuple[Arrays, Bool[np.ndarray, " n"]]:
    """Plays the trajectories of one shard; also tells which of them diverged."""
    selection, policies = meta.selection, len(meta.selection.cells)
    index = np.arange(episodes * policies) + number * episodes * policies
    keys = jax.vmap(functools.partial(trajectory_key, meta.seed))(jnp.asarray(index))
    keys = keys.reshape(episodes, policies).T
    played = rollout(task, members, keys, record="transitions", disturbance=meta.config.disturbance)

    def in_turns(x: Any) -> np.ndarray:
        return np.asarray(x).swapaxes(0, 1).reshape(len(index), *x.shape[2:])

    arrays = {
        "observations": in_turns(played.observations),
        "actions": in_turns(played.actions),
        "rewards": in_turns(played.rewards),
        "paths": in_turns(played.path),
        "descriptor": in_turns(played.descriptor),
        "fitness": in_turns(played.fitness),
        "policy": np.tile(selection.cells, episodes),
        "zone": np.tile(selection.zone, episodes),
        "trajectory": index,
    }
    return arrays, in_turns(played.diverged)


def _write_shard(
    directory: Path, number: int, arrays: Arrays, diverged: np.ndarray, meta: Meta, most: int
) -> Shard:
    """Stores the first `most` trajectories that did not diverge (`typical`: and are typical).

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
    kept = np.flatnonzero(wanted)[:most]
    if len(kept) == 0:
        why = "are untypical" if sound.any() else "diverged"
        raise UserError(f"all {len(sound)} episodes of shard {number} {why}; nothing to store.")
    files, rounding = {}, {}
    for name, array in stored.items():
        files[name] = _write_array(_file(directory, number, name), array[kept])
        if array.dtype == np.float16:
            error = np.abs(arrays[name][kept] - array[kept].astype(np.float32))
            rounding[name] = float(error.max())
    untypical = int((sound & ~wanted).sum())
    return Shard(len(kept), int((~sound).sum()), untypical, files, rounding)


# --- reading --------------------------------------------------------------------------------------

View = Int64[np.ndarray, " _"]  # indices into a dataset: a part of it, without a copy


class Batch(NamedTuple):
    """Trajectories as the QDT wants them, in float32."""

    observations: Float[np.ndarray, "batch length observation"]
    actions: Float[np.ndarray, "batch length action"]
    descriptor: Float[np.ndarray, "batch d"]  # that the trajectory achieved
    path: Float[np.ndarray, "batch length d"] | None  # descriptor over time, where it is stored


@dataclass(frozen=True)
class Dataset:
    """An opened dataset: what is small is in memory, what is large is mapped when it is needed."""

    directory: Path
    meta: Meta
    begins: list[dict[str, int]]  # per shard: where the numbers begin in each file
    first: Int64[np.ndarray, " shards"]  # index of each shard's first trajectory
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
    def diverged(self) -> int:
        """Episodes that were played and left out."""
        return sum(shard.diverged for shard in self.meta.shards)

    @property
    def rounding(self) -> dict[str, float]:
        """What float16 costs: the largest absolute error of each array."""
        shards = self.meta.shards
        return {n: max(shard.rounding[n] for shard in shards) for n in shards[0].rounding}

    def read(self, name: str, view: View) -> np.ndarray:
        """Trajectories of one array in the order of the view.

        A file is mapped only while it is read: neither memory nor open files grow with the dataset.
        """
        dtype, shape = self.meta.arrays[name]
        shard = np.searchsorted(self.first, view, side="right") - 1
        read = np.empty((len(view), *shape), dtype)
        for number in np.unique(shard).tolist():
            here = shard == number
            path = _file(self.directory, number, name)
            whole = (self.meta.shards[number].rows, *shape)
            mapped = np.memmap(path, dtype, "r", self.begins[number][name], whole)
            read[here] = mapped[view[here] - self.first[number]]
        return read

    def batch(self, view: View) -> Batch:
        paths = "paths" in self.meta.arrays
        return Batch(
            self.read("observations", view)[:, :-1].astype(np.float32),
            self.read("actions", view).astype(np.float32),
            self.descriptor[view],
            self.read("paths", view).astype(np.float32) if paths else None,
        )

    def split(self, fraction: float, *, seed: int, view: View | None = None) -> tuple[View, View]:
        """Divides a view at random: one part for training, one, of this share, that is held out."""
        if not 0 <= fraction < 1:
            raise UserError(f"the share that is held out must be in [0, 1), it is {fraction}.")
        indices = self.everything if view is None else view
        shuffled = np.random.default_rng((seed, 1)).permutation(indices)
        held_out = round(fraction * len(indices))
        return np.sort(shuffled[held_out:]), np.sort(shuffled[:held_out])


def open_dataset(directory: Path) -> Dataset:
    """Opens a finished dataset, possibly somebody else's, after every file has been checked."""
    path = directory / "meta.json"
    if not path.exists():
        raise UserError(f"{directory} holds no finished dataset.")
    meta = parse_meta(runs.read_json(path), path)
    if not meta.shards:
        raise UserError(f"{directory} holds no trajectories.")
    numbers = range(len(meta.shards))
    begins = [_check_shard(directory, number, meta) for number in numbers]
    first = np.cumsum([0] + [shard.rows for shard in meta.shards])[:-1]
    small = {
        name: np.concatenate([np.load(_file(directory, i, name)) for i in numbers])
        for name in PER_EPISODE
    }
    return Dataset(directory, meta, begins, first, **small)


def batches(
    dataset: Dataset, batch_size: int, *, seed: int, step: int = 0, view: View | None = None
) -> Iterator[Batch]:
    """Batches for ever, from `step` on; the next one is prepared while the current one is used.

    An epoch is `len(view) // batch_size` batches, in a new order of the whole view. Batch number
    `step` depends on the arguments alone: a training that resumes there goes on as if uninterrupted.
    """
    indices = dataset.everything if view is None else view
    per_epoch = len(indices) // batch_size
    if per_epoch < 1:
        raise UserError(f"a batch of {batch_size} is more than the {len(indices)} trajectories.")

    @functools.lru_cache(maxsize=1)
    def order(epoch: int) -> View:
        return np.random.default_rng((seed, 0, epoch)).permutation(indices)

    def prepare(step: int) -> Batch:
        epoch, place = divmod(step, per_epoch)
        return dataset.batch(order(epoch)[place * batch_size : (place + 1) * batch_size])

    def run() -> Iterator[Batch]:
        with ThreadPoolExecutor(max_workers=1) as background:
            ahead = background.submit(prepare, step)
            for following in itertools.count(step + 1):
                batch, ahead = ahead.result(), background.submit(prepare, following)
                yield batch

    return run()


# --- pruning --------------------------------------------------------------------------------------


def prune(dataset: Dataset, how: str, seed: int) -> View:
    """What one of the paper's prunings leaves of a dataset (section 5.3, figures 6 and 12).

    density-50, -30, -10: this share of the trajectories, drawn at random: thinner, empty nowhere; with
    one seed the smaller is a part of the larger. tiles: every other tile of a chequerboard over the
    descriptor space is empty. upper: the half with the larger last coordinate is empty.
    A trajectory lies where it ended, not where its policy was meant to go.
    """
    if how not in PRUNINGS:
        raise UserError(f"unknown pruning {how!r}; there are {', '.join(PRUNINGS)}.")
    low, high = np.array(dataset.meta.low), np.array(dataset.meta.high)
    where = (dataset.descriptor - low) / (high - low)
    if how == "tiles":
        tile = np.minimum(np.floor(where * TILES), TILES - 1)
        view = np.flatnonzero(tile.sum(axis=1) % 2 == 0)
    elif how == "upper":
        view = np.flatnonzero(where[:, -1] <= 0.5)
    else:
        share = int(how.removeprefix("density-")) / 100
        shuffled = np.random.default_rng((seed, 2)).permutation(len(dataset))
        view = np.sort(shuffled[: round(share * len(dataset))])
    if len(view) == 0:
        raise UserError(f"pruning {how} leaves no trajectories.")
    return view


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


# --- Minari, the exchange format of offline reinforcement learning --------------------------------

MINARI_KEY = "quality_diversity_transformer"


def _minari() -> Any:
    try:
        import minari  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("Minari is not installed: pip install minari gymnasium h5py.") from None
    return minari


def export_minari(dataset: Dataset, dataset_id: str) -> None:
    """Copies a dataset to a Minari dataset such as `qdt/ant-omni-v0`, shard by shard.

    An episode ends by truncation. What Minari has no place for goes into the episode's metadata.
    """
    minari = _minari()
    from gymnasium.spaces import Box  # pyright: ignore[reportMissingImports]

    length, observation, action, _ = dataset.meta.sizes
    ends = np.arange(length) == length - 1
    warnings.filterwarnings("ignore", module="minari")  # it misses an author and a Gymnasium task
    try:
        exported = minari.create_dataset_from_buffers(
            dataset_id,
            [],
            observation_space=Box(-np.inf, np.inf, (observation,)),
            action_space=Box(-1, 1, (action,)),
        )
    except ValueError as error:
        raise UserError(f"cannot create the Minari dataset {dataset_id}: {error}") from None
    for first, shard in zip(dataset.first, dataset.meta.shards, strict=True):
        view = np.arange(first, first + shard.rows)
        arrays = {name: dataset.read(name, view) for name in dataset.meta.arrays}
        episodes = [
            dict(zip(arrays, rows, strict=True)) for rows in zip(*arrays.values(), strict=True)
        ]
        exported.update_dataset_from_buffer(
            [
                minari.data_collector.EpisodeBuffer(
                    observations=episode["observations"].astype(np.float32),
                    actions=episode["actions"].astype(np.float32),
                    rewards=episode["rewards"].astype(np.float32),
                    terminations=np.zeros_like(ends),
                    truncations=ends,
                    infos={"paths": episode["paths"]} if "paths" in episode else {},
                )
                for episode in episodes
            ]
        )
        metadata = [{name: episode[name] for name in PER_EPISODE} for episode in episodes]
        exported.storage.update_episode_metadata(metadata, view)
    text = (dataset.directory / "meta.json").read_text()
    exported.storage.update_metadata({MINARI_KEY: text})  # last: without it nothing is imported


def import_minari(dataset_id: str, directory: Path) -> Dataset:
    """The way back: the very files that were exported, which `open_dataset` checks."""
    if (directory / "meta.json").exists():
        raise UserError(f"{directory} holds a dataset already.")
    try:
        imported = _minari().load_dataset(dataset_id)
        text = imported.storage.metadata[MINARI_KEY]
        meta, first = parse_meta(json.loads(text), dataset_id), 0
        directory.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(meta.shards):
            view = range(first, first := first + shard.rows)
            episodes = list(imported.iterate_episodes(view))
            metadata = list(imported.storage.get_episode_metadata(view))
            for name, (dtype, _) in meta.arrays.items():
                if name in PER_EPISODE:
                    rows = [m[name] for m in metadata]
                elif name == "paths":
                    rows = [e.infos[name] for e in episodes]
                else:
                    rows = [getattr(e, name) for e in episodes]
                _write_array(_file(directory, number, name), np.stack(rows).astype(dtype))
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise UserError(f"{dataset_id} is not a dataset of `export_minari`: {error}.") from None
    with runs.write_safely(directory / "meta.json") as file:
        file.write(text.encode())
    return open_dataset(directory)
