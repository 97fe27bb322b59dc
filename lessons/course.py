"""What the lessons share: how they show things below a cell, and the small search they all begin with.

In a notebook the last value of a cell is shown, as a picture, as code or as a page. Run as a plain script, a
lesson shows nothing: pictures are drawn all the same, so that a mistake in one is found, and asserts hold.
"""

import html
import inspect
import io
import textwrap
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float
from matplotlib.figure import Figure

from envs import Task, TaskConfig, make_task
from me_ls import Repertoire, SearchConfig, make_search

# The point of all lessons: 30 steps of 0.1 s on a square of 3 m.
POINT = TaskConfig("point-omni", length=30, reach=1.5)


# --- below a cell -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    png: bytes

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return "a picture"


def show(figure: Figure) -> Picture:
    """A figure as a small picture."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=85)
    return Picture(file.getvalue())


@dataclass(frozen=True)
class Lines:
    code: str

    def _repr_markdown_(self) -> str:
        return f"```python\n{self.code}```"

    def __repr__(self) -> str:
        return self.code


def lines(*things: Any) -> Lines:
    """The lines of the project that define these functions or classes, as they are today."""
    return Lines("\n\n".join(textwrap.dedent(inspect.getsource(inspect.unwrap(x))) for x in things))


@dataclass(frozen=True)
class Page:
    text: str
    height: int

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {self.height}px; border: 1px solid #ccc"
        return f'<iframe srcdoc="{html.escape(self.text)}" style="{style}"></iframe>'

    def __repr__(self) -> str:
        return "a page; a notebook shows it here"


def panels(columns: int = 1, width: float = 3.6, height: float = 3.4) -> tuple[Figure, list[Any]]:
    """A figure with one row of axes."""
    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, list(np.atleast_1d(figure.subplots(1, columns)))


def frame(axes: Any, task: Task, title: str = "", margin: float = 0.0) -> None:
    """Makes the axes those of the task's descriptor space."""
    (x0, y0), (x1, y1) = task.low, task.high
    axes.set(xlim=(x0 - margin, x1 + margin), ylim=(y0 - margin, y1 + margin), aspect="equal")
    axes.set(xlabel=task.axes[0], ylabel=task.axes[1], title=title)


def draw_borders(axes: Any, centroids: Float[Array, "cells 2"], task: Task) -> None:
    """The borders between the Voronoi cells of these points, in grey."""
    ticks = [np.linspace(low, high, 300) for low, high in zip(task.low, task.high, strict=True)]
    grid = np.stack(np.meshgrid(*ticks), axis=-1)
    points = np.asarray(centroids)
    cell = ((grid[:, :, None] - points) ** 2).sum(-1).argmin(-1)
    edge = np.zeros(cell.shape, bool)
    edge[:, 1:] |= cell[:, 1:] != cell[:, :-1]
    edge[1:] |= cell[1:] != cell[:-1]
    shade = np.zeros((*cell.shape, 4))
    shade[edge] = (0.6, 0.6, 0.6, 1.0)
    extent = (task.low[0], task.high[0], task.low[1], task.high[1])
    axes.imshow(shade, origin="lower", extent=extent, zorder=0)


# --- what the lessons begin with ----------------------------------------------------------------------


def point() -> Task:
    return make_task(POINT)


def settings(algo: str, **others: Any) -> SearchConfig:
    """A search of a few seconds: 64 cells, batches of 32 small policies, mutations larger than the paper's."""
    small = {"cells": 64, "batch": 32, "episodes": 10, "hidden": (16,)}
    return SearchConfig(algo, **small | {"iso_sigma": 0.2, "line_sigma": 0.1} | others)


def search(task: Task, algo: str, iterations: int, seed: int = 0) -> Repertoire:
    """What a search has found after some iterations."""
    elites = make_search(task, settings(algo))
    state = elites.init(jax.random.key(seed))  # the same cells for every algorithm
    for key in jax.random.split(jax.random.key(seed + 1), iterations):
        state, _ = elites.step(state, key)
    return state.repertoire
