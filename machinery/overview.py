"""What `qdt show` and `qdt dataset --show` print and draw: where trajectories ended, maps of a repertoire.

Task, dataset and repertoire are handed in: those of `envs.py`, `dataset.py` and `me_ls.py`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from machinery import plots


def show_dataset(task: Any, data: Any, counts: Float[np.ndarray, "..."], name: str | None) -> None:
    """Prints who played a dataset, and draws where its trajectories ended: `counts`, box by box."""
    zones = len(data.meta.selection.centroids)
    print(
        f"{len(data):,} trajectories of {len(set(data.policy))} policies; "
        f"{len(set(data.zone))} of {zones} zones have a policy."
    )
    if (hits := data.meta.selection.hits) is not None:
        tried = data.meta.config.selection_episodes
        print(
            f"Of {tried} episodes before the selection, {hits.mean():.1f} ended in the zone of "
            f"their policy (least {hits.min()}, most {hits.max()})."
        )
    for reason, count in data.left_out.items():
        print(f"{count:,} episodes were left out: {reason}.")
    if task.descriptor_size == 2:
        title = name or "all"
        figure = plots.density_map({title: counts}, task.low, task.high, task.axes)
        path = data.directory / "density.png"
        plots.save(figure, path)
        print(path)


def draw_maps(task: Any, repertoire: Any, title: str, out: Path, *, with_spread: bool) -> None:
    """Of fitness and spread, where a descriptor has two dimensions; prints where they are."""
    if task.descriptor_size != 2:
        return
    for name in ("fitness", "spread") if with_spread else ("fitness",):
        values = np.where(repertoire.occupied, getattr(repertoire, name), np.nan)
        figure = plots.cell_maps(
            {title: (repertoire.centroids, values)},
            task.low,
            task.high,
            task.axes,
            name,
            lighter_is="high" if name == "fitness" else "low",
        )
        path = out / f"{name}.png"
        plots.save(figure, path)
        print(f"  {path}")
