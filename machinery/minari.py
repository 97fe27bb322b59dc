"""Minari, the exchange format of offline reinforcement learning: trajectories there and back.

Not a dependency of the project: `pip install -e ".[minari]"`.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from machinery.files import UserError, write_safely
from machinery.shards import Layout, Rows, Shard, array_file, write_array

KEY = "quality_diversity_transformer"


def _minari() -> Any:
    try:
        import minari  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("Minari is not installed: pip install minari gymnasium h5py.") from None
    return minari


def export_rows(rows: Rows, per_episode: Sequence[str], meta: str, dataset_id: str) -> None:
    """Copies trajectories to a Minari dataset such as `qdt/ant-omni-v0`, shard by shard.

    An episode ends by truncation. The arrays `per_episode`, for which Minari has no place, go into the
    episodes' metadata, and `meta`, a text, into the dataset's.
    """
    minari = _minari()
    from gymnasium.spaces import Box  # pyright: ignore[reportMissingImports]

    observation = rows.layout["observations"][1][1:]
    length, *action = rows.layout["actions"][1]
    ends = np.arange(length) == length - 1
    warnings.filterwarnings("ignore", module="minari")  # it misses an author and a Gymnasium task
    try:
        exported = minari.create_dataset_from_buffers(
            dataset_id,
            [],
            observation_space=Box(-np.inf, np.inf, observation),
            action_space=Box(-1, 1, tuple(action)),
        )
    except ValueError as error:
        raise UserError(f"cannot create the Minari dataset {dataset_id}: {error}") from None
    for first, shard in zip(rows.first, rows.shards, strict=True):
        view = np.arange(first, first + shard.rows)
        arrays = {name: rows.read(name, view) for name in rows.layout}
        episodes = [
            dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)
        ]
        exported.update_dataset_from_buffer(
            [
                minari.data_collector.EpisodeBuffer(
                    observations=episode["observations"].astype(np.float32),
                    actions=episode["actions"].astype(np.float32),
                    rewards=episode["rewards"].astype(np.float32),
                    terminations=np.zeros_like(ends),
                    truncations=ends,
                    infos={"achieved": episode["achieved"]} if "achieved" in episode else {},
                )
                for episode in episodes
            ]
        )
        metadata = [{name: episode[name] for name in per_episode} for episode in episodes]
        exported.storage.update_episode_metadata(metadata, view)
    exported.storage.update_metadata({KEY: meta})  # last: without it nothing is imported


def import_rows(
    dataset_id: str,
    directory: Path,
    per_episode: Sequence[str],
    parse: Callable[[str], tuple[Layout, list[Shard]]],
) -> None:
    """The way back: the files that were exported, bit for bit. `parse` reads the metadata's text."""
    if (directory / "meta.json").exists():
        raise UserError(f"{directory} holds a dataset already.")
    try:
        imported = _minari().load_dataset(dataset_id)
        text = imported.storage.metadata[KEY]
        layout, shards = parse(text)
        first = 0
        directory.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(shards):
            view = range(first, first := first + shard.rows)
            episodes = list(imported.iterate_episodes(view))
            metadata = list(imported.storage.get_episode_metadata(view))
            for name, (dtype, _) in layout.items():
                if name in per_episode:
                    rows = [m[name] for m in metadata]
                elif name == "achieved":
                    rows = [e.infos[name] for e in episodes]
                else:
                    rows = [getattr(e, name) for e in episodes]
                write_array(array_file(directory, number, name), np.stack(rows).astype(dtype))
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        raise UserError(f"{dataset_id} is not a dataset of `export_minari`: {error}.") from None
    with write_safely(directory / "meta.json") as file:
        file.write(text.encode())
