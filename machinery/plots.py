"""Figures, drawn so that one sees the paper's figure in them.

Functions take plain arrays and return a Matplotlib figure; `save` writes it. Methods that are compared
share one colour scale. Lighter is better, as in the paper: high fitness, low distance, low spread.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from machinery.files import write_safely

matplotlib.use("Agg")

GRID = 400  # pixels along one side of a map


def save(figure: Figure, path: Path) -> None:
    with write_safely(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=110)


def _panels(
    columns: int, rows: int = 1, width: float = 3.4, height: float = 3.2
) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns + 0.6, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _frame(axes: Any, low: Sequence[float], high: Sequence[float], names: Sequence[str]) -> None:
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.set_xlabel(names[0], fontsize=8)
    axes.set_ylabel(names[1], fontsize=8)
    axes.tick_params(labelsize=7)


def _draw_cells(
    axes: Any,
    centroids: np.ndarray,
    values: np.ndarray,
    low: Sequence[float],
    high: Sequence[float],
    limits: tuple[float, float],
    colours: str,
    borders: bool,
) -> Any:
    """Fills the Voronoi cell of each centroid with the colour of its value; NaN stays white."""
    x = np.linspace(low[0], high[0], GRID)
    y = np.linspace(low[1], high[1], GRID)
    points = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    cell = np.concatenate(
        [
            np.argmin(((part[:, None] - centroids[None]) ** 2).sum(-1), axis=1)
            for part in np.array_split(points, 64)
        ]
    ).reshape(GRID, GRID)
    image = axes.imshow(
        values[cell],
        origin="lower",
        extent=(low[0], high[0], low[1], high[1]),
        vmin=limits[0],
        vmax=limits[1],
        cmap=colours,
        interpolation="nearest",
    )
    if borders:
        edge = np.zeros_like(cell, dtype=bool)
        edge[:, 1:] |= cell[:, 1:] != cell[:, :-1]
        edge[1:] |= cell[1:] != cell[:-1]
        overlay = np.zeros((GRID, GRID, 4))
        overlay[edge] = (1, 1, 1, 0.8)
        axes.imshow(overlay, origin="lower", extent=(low[0], high[0], low[1], high[1]))
    return image


def _shared_limits(columns: Sequence[np.ndarray]) -> tuple[float, float]:
    everything = np.concatenate([c[np.isfinite(c)] for c in columns] or [np.zeros(1)])
    if everything.size == 0:
        return 0.0, 1.0
    return float(everything.min()), float(everything.max())


def cell_maps(
    panels: Mapping[str, tuple[ArrayLike, ArrayLike]],
    low: Sequence[float],
    high: Sequence[float],
    names: Sequence[str],
    label: str,
    lighter_is: str = "high",
    borders: bool = False,
    from_zero: bool = False,
) -> Figure:
    """Maps of (centroids, value per cell), one per title, on one colour scale (figures 5, 9, 11)."""
    drawn = {t: (np.asarray(c, float), np.asarray(v, float)) for t, (c, v) in panels.items()}
    limits = _shared_limits([values for _, values in drawn.values()])
    limits = (0.0, limits[1]) if from_zero else limits
    rows = -(-len(drawn) // 4)
    figure, axes = _panels(columns=-(-len(drawn) // rows), rows=rows)
    for ax in axes.flat[len(drawn) :]:
        ax.set_axis_off()
    colours = "viridis" if lighter_is == "high" else "viridis_r"
    image: Any = None
    for ax, (title, (centroids, values)) in zip(axes.flat, drawn.items(), strict=False):
        values = np.where(np.isfinite(values), values, np.nan)
        image = _draw_cells(ax, centroids, values, low, high, limits, colours, borders)
        _frame(ax, low, high, names)
        ax.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    return figure


def reproducibility(
    rows: Mapping[str, tuple[ArrayLike, ArrayLike | None]],
    low: Sequence[float],
    high: Sequence[float],
    names: Sequence[str],
) -> Figure:
    """Final descriptors, and paths where they mean something, of a few policies (figures 2, 7, 8).

    `rows` maps a title to (final descriptors [policies, episodes, 2], paths [.., time, 2] or None).
    """
    columns = max(np.asarray(ends).shape[0] for ends, _ in rows.values())
    per_method = 2 if any(paths is not None for _, paths in rows.values()) else 1
    figure, axes = _panels(columns, per_method * len(rows), width=2.9, height=2.9)
    for i, (title, (ends, paths)) in enumerate(rows.items()):
        ends = np.asarray(ends)
        colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, ends.shape[1]))
        for j, policy in enumerate(ends):
            ax = axes[per_method * i, j]
            ax.scatter(policy[:, 0], policy[:, 1], c=colours, s=16)
            ax.set_title(f"{title}, policy {j + 1}", fontsize=9)
            _frame(ax, low, high, names)
            if paths is not None:
                below = axes[per_method * i + 1, j]
                for path, colour in zip(np.asarray(paths)[j], colours, strict=True):
                    below.plot(path[:, 0], path[:, 1], color=colour, linewidth=0.7)
                _frame(below, low, high, names)
    return figure


def curves(
    panels: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
    xlabel: str,
    colours: Mapping[str, str],
) -> Figure:
    """Mean and deviation over seeds of several methods (figures 4, 10, 13).

    `panels` maps a title to methods, each with (x, values [seeds, x]); `colours` has those of some.
    """
    figure, axes = _panels(len(panels), width=3.8)
    for ax, (title, methods) in zip(axes[0], panels.items(), strict=True):
        for name, (x, values) in methods.items():
            x, values = np.asarray(x), np.asarray(values, float)
            mean, deviation = values.mean(axis=0), values.std(axis=0)
            (line,) = ax.plot(x, mean, label=name, color=colours.get(name))
            ax.fill_between(
                x,
                mean - deviation,
                mean + deviation,
                alpha=0.2,
                color=line.get_color(),
                linewidth=0,
            )
        ax.set_title(title, fontsize=9)
        ax.set_xlabel(xlabel, fontsize=8)
        ax.tick_params(labelsize=7)
        ax.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    return figure


def density_map(
    counts: Mapping[str, ArrayLike],
    low: Sequence[float],
    high: Sequence[float],
    names: Sequence[str],
) -> Figure:
    """Trajectories per bin of the descriptor space (top rows of figures 6 and 12)."""
    figure, axes = _panels(len(counts))
    _draw_densities(figure, axes[0], counts, low, high, names)
    return figure


def _draw_densities(
    figure: Figure,
    row: Any,
    counts: Mapping[str, ArrayLike],
    low: Sequence[float],
    high: Sequence[float],
    names: Sequence[str],
) -> None:
    images = {title: np.log10(1 + np.asarray(c, float)) for title, c in counts.items()}
    limits = _shared_limits(list(images.values()))
    drawn: Any = None
    for ax, (title, image) in zip(row, images.items(), strict=True):
        drawn = ax.imshow(
            image.T,
            origin="lower",
            extent=(low[0], high[0], low[1], high[1]),
            vmin=limits[0],
            vmax=limits[1],
            cmap="magma",
        )
        _frame(ax, low, high, names)
        ax.set_title(f"{title}: {int(np.asarray(counts[title]).sum()):,} trajectories", fontsize=8)
    figure.colorbar(drawn, ax=list(row), label="log₁₀(1 + trajectories)", shrink=0.8)


def generalization(
    counts: Mapping[str, ArrayLike],
    goals: ArrayLike,
    distances: Mapping[str, ArrayLike],
    low: Sequence[float],
    high: Sequence[float],
    names: Sequence[str],
    label: str,
) -> Figure:
    """Density of each pruned dataset above, accuracy of its QDT below (figures 6 and 12)."""
    figure, axes = _panels(len(counts), rows=2, width=2.9, height=2.9)
    _draw_densities(figure, axes[0], counts, low, high, names)
    limits = (0.0, _shared_limits([np.asarray(d, float) for d in distances.values()])[1])
    image: Any = None
    for ax, title in zip(axes[1], counts, strict=True):
        values = np.asarray(distances[title], float)
        image = _draw_cells(
            ax, np.asarray(goals), values, low, high, limits, "viridis_r", borders=True
        )
        _frame(ax, low, high, names)
        ax.set_title(f"mean distance {np.nanmean(values):.3g}", fontsize=8)
    figure.colorbar(image, ax=list(axes[1]), label=label, shrink=0.8)
    return figure
