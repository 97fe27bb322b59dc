"""Figures, drawn so that one sees the paper's figure in them, and ready for print.

Functions take plain arrays and return a Matplotlib figure; `save` writes it. Methods that are compared
share one colour scale. Lighter is better, as in the paper: high fitness, low distance, low spread. Colours
end at percentiles, so that a few extreme cells do not make all others look alike; where they cut something
off, the colour bar has a point and says so.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from machinery.files import write_safely

matplotlib.use("Agg")
matplotlib.rcParams["pdf.fonttype"] = 42  # text in a PDF stays text

GRID = 400  # pixels along one side of a map
PERCENTILE = 2.0  # of all values, and as many from above: where the colours end
EMPTY = "0.85"  # grey: nothing there


def save(figure: Figure, path: Path) -> None:
    """The same figure is the same file: a PDF does not say when it was made."""
    undated = {"CreationDate": None} if path.suffix == ".pdf" else None
    with write_safely(path) as file:
        # Tight: a row of many maps would lose the upper edge of its titles.
        figure.savefig(file, format=path.suffix[1:], dpi=150, bbox_inches="tight", metadata=undated)


def _panels(
    columns: int, rows: int = 1, width: float = 3.4, height: float = 3.2, **more: Any
) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns + 0.6, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def _frame(axes: Any, low: Sequence[float], high: Sequence[float], names: Sequence[str]) -> None:
    """Bounds, and axis labels where a panel stands at the left or at the bottom."""
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal")
    axes.set_xlabel(names[0], fontsize=7)
    axes.set_ylabel(names[1], fontsize=7)
    axes.tick_params(labelsize=7)
    axes.label_outer()


def _cell_of_pixel(
    centroids: np.ndarray, low: Sequence[float], high: Sequence[float]
) -> np.ndarray:
    """The nearest centroid of every pixel."""
    x = np.linspace(low[0], high[0], GRID)
    y = np.linspace(low[1], high[1], GRID)
    points = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    nearest = [
        np.argmin(((part[:, None] - centroids[None]) ** 2).sum(-1), axis=1)
        for part in np.array_split(points, 64)
    ]
    return np.concatenate(nearest).reshape(GRID, GRID)


def _outline(
    axes: Any,
    mask: np.ndarray,
    low: Sequence[float],
    high: Sequence[float],
    colour: str,
    hatch: str = "",
) -> None:
    """A line around the region where an image is true, which may be hatched."""
    if mask.any() and not mask.all():
        rows, columns = mask.shape
        x = low[0] + (np.arange(columns) + 0.5) / columns * (high[0] - low[0])
        y = low[1] + (np.arange(rows) + 0.5) / rows * (high[1] - low[1])
        axes.contour(x, y, mask.astype(float), levels=[0.5], colors=colour, linewidths=1.2)
        if hatch:
            inside = axes.contourf(
                x, y, mask.astype(float), [0.5, 1.5], colors="none", hatches=[hatch]
            )
            inside.set(edgecolor=colour, linewidth=0.0)


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
    """Fills the Voronoi cell of each centroid with the colour of its value; NaN is grey: empty."""
    cell = _cell_of_pixel(centroids, low, high)
    extent = (low[0], high[0], low[1], high[1])
    scale = matplotlib.colormaps[colours].with_extremes(bad=EMPTY)
    image = axes.imshow(
        np.ma.masked_invalid(values[cell]),
        origin="lower",
        extent=extent,
        vmin=limits[0],
        vmax=limits[1],
        cmap=scale,
        interpolation="nearest",
    )
    if borders:
        edge = np.zeros_like(cell, dtype=bool)
        edge[:, 1:] |= cell[:, 1:] != cell[:, :-1]
        edge[1:] |= cell[1:] != cell[:-1]
        overlay = np.zeros((GRID, GRID, 4))
        overlay[edge] = (1, 1, 1, 0.8)
        axes.imshow(overlay, origin="lower", extent=extent)
    return image


class _Limits(NamedTuple):
    """Where colours begin and end, and whether they cut something off."""

    ends: tuple[float, float]
    extend: str

    def bar(self, figure: Figure, image: Any, axes: Any, label: str) -> None:
        last, first = f"{100 - PERCENTILE:g}th percentile", f"{PERCENTILE:g}nd"
        cuts = {
            "max": f"up to the {last}",
            "both": f"{first} to {last}",
            "min": f"from the {first}",
        }
        marked = f"{label},\n{cuts[self.extend]}" if self.extend in cuts else label
        bar = figure.colorbar(image, ax=axes, shrink=0.9, extend=self.extend)
        bar.set_label(marked, fontsize=7)
        bar.ax.tick_params(labelsize=7)


def _limits(columns: Sequence[np.ndarray], from_zero: bool = False) -> _Limits:
    everything = np.concatenate([c[np.isfinite(c)].ravel() for c in columns] or [np.zeros(0)])
    if everything.size == 0:
        return _Limits((0.0, 1.0), "neither")
    low, high = (float(x) for x in np.percentile(everything, [PERCENTILE, 100 - PERCENTILE]))
    low = 0.0 if from_zero else low
    below, above = bool((everything < low).any()), bool((everything > high).any())
    kinds = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}
    return _Limits((low, high), kinds[int(below), int(above)])


class Panel(NamedTuple):
    """A map: a value in the cell of each centroid."""

    title: str
    centroids: ArrayLike
    values: ArrayLike
    counts: bool = True  # for where the colours end


def map_grid(
    rows: Sequence[Sequence[Panel | None]],
    low: Sequence[float],
    high: Sequence[float],
    names: Sequence[str],
    label: str,
    lighter_is: str = "high",
    borders: bool = False,
    from_zero: bool = False,
) -> Figure:
    """Maps in rows and columns on one colour scale (figures 6, 11, 12); None leaves a place empty."""
    panels = [panel for row in rows for panel in row if panel is not None]
    limits = _limits([np.asarray(p.values, float) for p in panels if p.counts], from_zero)
    size = {"width": 2.7, "height": 2.9} if len(panels) > 1 else {}
    figure, axes = _panels(max(map(len, rows)), len(rows), sharex=True, sharey=True, **size)
    colours = "viridis" if lighter_is == "high" else "viridis_r"
    image: Any = None
    for ax in axes.flat:
        ax.set_axis_off()
    for line, row in zip(axes, rows, strict=True):
        for ax, panel in zip(line, row, strict=False):
            if panel is None:
                continue
            values = np.asarray(panel.values, float)
            values = np.where(np.isfinite(values), values, np.nan)
            ax.set_axis_on()
            image = _draw_cells(
                ax,
                np.asarray(panel.centroids, float),
                values,
                low,
                high,
                limits.ends,
                colours,
                borders,
            )
            _frame(ax, low, high, names)
            ax.set_title(panel.title, fontsize=8)
    _label_edges(axes, rows, names)
    limits.bar(figure, image, axes, label)
    return figure


def _label_edges(axes: Any, rows: Sequence[Sequence[Panel | None]], names: Sequence[str]) -> None:
    """The lowest panel of a column and the first of a row are labelled, also where places are empty."""
    there = np.zeros(axes.shape, bool)
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            there[i, j] = panel is not None
    for i, j in np.argwhere(there):
        if not there[i + 1 :, j].any():
            axes[i, j].set_xlabel(names[0], fontsize=7)
            axes[i, j].tick_params(labelbottom=True)
        if not there[i, :j].any():
            axes[i, j].set_ylabel(names[1], fontsize=7)
            axes[i, j].tick_params(labelleft=True)


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
    """Maps of (centroids, value per cell) in one row, by title."""
    row = [Panel(title, *content) for title, content in panels.items()]
    return map_grid([row], low, high, names, label, lighter_is, borders, from_zero)


class Again(NamedTuple):
    """A few policies of an algorithm, played again and again."""

    ends: ArrayLike  # descriptors [policies, episodes, 2]
    spread: ArrayLike  # [policies]
    paths: ArrayLike | None = None  # [policies, episodes, time, 2], where they mean something
    cells: ArrayLike | None = None  # of the policies, which they were kept for
    centroids: ArrayLike | None = None  # of all cells


def reproducibility(
    columns: Mapping[str, Again], low: Sequence[float], high: Sequence[float], names: Sequence[str]
) -> Figure:
    """A column per algorithm, a policy in each row: where its episodes go (figures 3, 8, 9)."""
    count = max(len(np.asarray(again.ends)) for again in columns.values())
    figure, axes = _panels(len(columns), count, 2.3, 2.5, sharex=True, sharey=True)
    for line, (title, again) in zip(axes.T, columns.items(), strict=True):
        ends, spreads = np.asarray(again.ends, float), np.asarray(again.spread, float)
        colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, ends.shape[1]))
        for j, (ax, policy, spread) in enumerate(zip(line, ends, spreads, strict=False)):
            if again.cells is not None and again.centroids is not None:
                cell = _cell_of_pixel(np.asarray(again.centroids, float), low, high)
                aimed = cell == np.asarray(again.cells)[j]
                ax.contourf(
                    np.linspace(low[0], high[0], GRID),
                    np.linspace(low[1], high[1], GRID),
                    aimed.astype(float),
                    levels=[0.5, 1.5],
                    colors=["0.8"],
                )
                _outline(ax, aimed, low, high, "black")
            if again.paths is not None:
                for path, colour in zip(np.asarray(again.paths, float)[j], colours, strict=True):
                    ax.plot(path[:, 0], path[:, 1], color=colour, linewidth=0.5, alpha=0.6)
            ax.scatter(
                policy[:, 0], policy[:, 1], c=colours, s=14, edgecolors="white", linewidths=0.4,
                zorder=3,
            )  # fmt: skip
            ax.set_title(f"{title}: spread {spread:.2g}", fontsize=8)
            _frame(ax, low, high, names)
    return figure


def curves(
    panels: Mapping[str, Mapping[str, tuple[ArrayLike, ArrayLike]]],
    xlabel: str,
    colours: Mapping[str, str],
    levels: Mapping[str, Mapping[str, float]] | None = None,
    unit: float = 1.0,
) -> Figure:
    """Mean and sample deviation over seeds of several methods (figures 5, 10, 14).

    `panels` maps a title to methods, each with (x, values [seeds, x]); `colours` has those of some.
    `levels`: dashed lines in a panel, by method. x is shown in multiples of `unit`. Those that share a
    colour have lines of different kinds.
    """
    figure, axes = _panels(len(panels), width=3.8, height=3.6)
    for ax, (title, methods) in zip(axes[0], panels.items(), strict=True):
        drawn: list[str | None] = []
        for name, (x, values) in methods.items():
            x, values = np.asarray(x) / unit, np.asarray(values, float)
            mean, count, colour = values.mean(axis=0), len(values), colours.get(name)
            style = ("-", ":", "-.")[drawn.count(colour) % 3]
            drawn.append(colour)
            few = {"marker": "o", "markersize": 3} if len(x) < 25 else {}
            label = f"{name} (n = {count})"
            (line,) = ax.plot(x, mean, linestyle=style, label=label, color=colour, **few)
            if count > 1:
                deviation = values.std(axis=0, ddof=1)
                shade = {"alpha": 0.2, "color": line.get_color(), "linewidth": 0}
                ax.fill_between(x, mean - deviation, mean + deviation, **shade)
        for name, level in (levels or {}).get(title, {}).items():
            ax.axhline(level, linestyle="--", linewidth=1, color=colours.get(name, "grey"))
        ax.set_title(title, fontsize=9)
        ax.set_xlabel(xlabel, fontsize=8)
        ax.tick_params(labelsize=7)
        if unit == 1:
            ax.locator_params(axis="x", integer=True)  # there is no epoch 2.5
        ax.grid(alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=7, loc="outside lower center", ncols=min(len(labels), 5)
    )
    return figure


class Points(NamedTuple):
    """A number of each seed, with its mean and 95 % interval, and what the paper printed."""

    values: Sequence[float]
    mean: float
    low: float
    high: float
    paper: float | None
    colour: str


def seed_points(panels: Mapping[str, Mapping[str, Points]]) -> Figure:
    """Every seed as a point, by title and method."""
    rows = max(len(methods) for methods in panels.values())
    figure, axes = _panels(len(panels), width=4.6, height=0.6 + 0.24 * rows)
    for ax, (title, methods) in zip(axes[0], panels.items(), strict=True):
        for y, points in enumerate(methods.values()):
            ax.plot(
                points.values, [y] * len(points.values), "o", color=points.colour, alpha=0.6,
                markersize=4,
            )  # fmt: skip
            ax.plot([points.mean] * 2, [y - 0.3, y + 0.3], color="black", linewidth=1.2)
            if np.isfinite(points.low):
                ax.plot([points.low, points.high], [y, y], color="black", linewidth=0.8)
            if points.paper is not None:
                ax.plot(
                    [points.paper], [y], "D", markerfacecolor="none", color="grey", markersize=5
                )
        ax.set_yticks(range(len(methods)), list(methods), fontsize=7)
        ax.set_ylim(len(methods) - 0.5, -0.5)
        ax.set_xlim(left=0)
        ax.set_title(title, fontsize=9)
        ax.tick_params(labelsize=7)
        ax.grid(axis="x", alpha=0.3)
        ax.label_outer()
    return figure


def density_map(
    counts: Mapping[str, ArrayLike],
    low: Sequence[float],
    high: Sequence[float],
    names: Sequence[str],
) -> Figure:
    """Trajectories per bin of the descriptor space (top rows of figures 7 and 13)."""
    figure, axes = _panels(len(counts), sharey=True)
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
    ends = 0.0, max(1e-9, *(float(image.max()) for image in images.values()))
    drawn: Any = None
    for ax, (title, image) in zip(row, images.items(), strict=True):
        drawn = ax.imshow(
            image.T,
            origin="lower",
            extent=(low[0], high[0], low[1], high[1]),
            vmin=ends[0],
            vmax=ends[1],
            cmap="magma",
        )
        _frame(ax, low, high, names)
        ax.set_title(f"{title}: {int(np.asarray(counts[title]).sum()):,} trajectories", fontsize=8)
    bar = figure.colorbar(drawn, ax=list(row), shrink=0.8)
    bar.set_label("log₁₀(1 + trajectories)", fontsize=8)
    bar.ax.tick_params(labelsize=7)


def generalization(
    counts: Mapping[str, ArrayLike],
    goals: ArrayLike,
    distances: Mapping[str, ArrayLike],
    removed: Mapping[str, ArrayLike],
    low: Sequence[float],
    high: Sequence[float],
    names: Sequence[str],
    label: str,
) -> Figure:
    """Density of each pruned dataset above, accuracy of its model below (figures 7 and 13).

    `removed` has the boxes that a pruning emptied, of some: they are outlined in both rows.
    """
    figure, axes = _panels(len(counts), 2, 2.5, 2.7, sharex=True, sharey=True)
    _draw_densities(figure, axes[0], counts, low, high, names)
    limits = _limits([np.asarray(d, float) for d in distances.values()], from_zero=True)
    image: Any = None
    for above, ax, title in zip(*axes, counts, strict=True):
        values = np.asarray(distances[title], float)
        image = _draw_cells(
            ax, np.asarray(goals), values, low, high, limits.ends, "viridis_r", borders=True
        )
        _frame(ax, low, high, names)
        ax.set_title(f"mean distance {np.nanmean(values):.3g}", fontsize=8)
        if title in removed:
            # As fine as the maps, so that the line has corners.
            boxes = np.asarray(removed[title], bool).T
            fine = np.kron(boxes, np.ones((-(-GRID // len(boxes)),) * 2, bool))
            for panel, colour in ((above, "cyan"), (ax, "red")):
                _outline(panel, fine, low, high, colour, hatch="//")
    limits.bar(figure, image, list(axes[1]), label)
    return figure
