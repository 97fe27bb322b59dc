"""What the lessons share: how they show things below a cell, and the small search they all begin with.

In a notebook the last value of a cell is shown, as a picture, as code or as a page. Run as a plain script,
a lesson shows only what it prints; pictures are drawn all the same, so that a mistake in one is found.
"""

import contextlib
import html
import inspect
import io
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Key
from matplotlib.figure import Figure

from dataset import Dataset, DatasetConfig, View, build
from envs import Task, TaskConfig, make_task
from machinery.runs import Stage
from me_ls import Repertoire, SearchConfig, SearchState, make_search
from qdt import QDT, QDTConfig, Training

# The point of all lessons: 30 steps of 0.1 s on a square of 3 m.
POINT = TaskConfig("point-omni", length=30, reach=1.5)


# --- below a cell -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    png: bytes
    words: str

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        return self.png, {"alt": self.words}

    def __repr__(self) -> str:
        return f"a picture: {self.words}"


def show(figure: Figure, words: str) -> Picture:
    """A figure as a small picture, and in words for those who do not see it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=85, bbox_inches="tight")  # no label is cut off
    return Picture(file.getvalue(), words)


@dataclass(frozen=True)
class Lines:
    code: str

    def _repr_markdown_(self) -> str:
        # The frame is for nbconvert, which would take the font of prose.
        frame = '<div style="font-family: monospace; font-size: 90%">'
        return f"{frame}\n\n```python\n{self.code}```\n\n</div>"

    def __repr__(self) -> str:
        return self.code


def lines(*things: Any) -> Lines:
    """The lines of the project that define these functions or classes, as they are today."""
    return Lines("\n\n".join(textwrap.dedent(inspect.getsource(inspect.unwrap(x))) for x in things))


@dataclass(frozen=True)
class Page:
    title: str
    text: str
    height: int

    def _repr_html_(self) -> str:
        style = (
            f"width: 100%; height: {self.height}px; border: 1px solid #ccc; box-sizing: border-box"
        )
        title, page = html.escape(self.title), html.escape(self.text)
        return f'<iframe title="{title}" srcdoc="{page}" style="{style}"></iframe>'

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
    """A search of a few seconds: 64 cells, batches of 32 small policies, larger mutations than the paper's."""
    small = {"cells": 64, "batch": 32, "episodes": 10, "hidden": (16,)}
    return SearchConfig(algo, **small | {"iso_sigma": 0.2, "line_sigma": 0.1} | others)


def search(task: Task, algo: str, iterations: int, seed: int = 0) -> Repertoire:
    """What a search has found after some iterations. All of them are one compiled loop."""
    elites = make_search(task, settings(algo))

    @eqx.filter_jit
    def loop(state: SearchState, keys: Key[Array, " iterations"]) -> SearchState:
        return jax.lax.scan(lambda state, key: (elites.step(state, key)[0], None), state, keys)[0]

    start = elites.init(jax.random.key(seed))  # the same cells for every algorithm
    return loop(start, jax.random.split(jax.random.key(seed + 1), iterations)).repertoire


def demonstrations(task: Task, repertoire: Repertoire, directory: Path) -> Dataset:
    """2,048 trajectories of the best policies of 32 zones, in a directory."""
    config = DatasetConfig(trajectories=2048, zones=32, achieved=True)
    with contextlib.redirect_stderr(io.StringIO()):  # without the progress line
        return build(task, repertoire, config, seed=0, stage=Stage(directory, {}))


# A Transformer of 27,000 weights and 512 steps, also on a part of the data, at a quick learner's settings.
SMALL: dict[str, Any] = {
    "layers": 2, "heads": 2, "width": 32, "dropout": 0.0, "normalise": True,
    "batch_size": 16, "epochs": 4, "steps_per_epoch": 128, "evaluate_every": 4,
    "optimiser": "muon", "learning_rate": 0.002, "warmup_steps": 50, "decay": True,
}  # fmt: skip


def train(
    task: Task, data: Dataset, view: View | None = None, **others: Any
) -> tuple[QDT, list[float]]:
    """A trained model and its loss in each epoch; `view`: on a part of the data."""
    training = Training(task, QDTConfig(**SMALL | others), data, seed=0, view=view)
    state, losses = training.init(jax.random.key(0)), []
    for key in jax.random.split(jax.random.key(1), training.total):
        state, metrics = training.step(state, key)
        if metrics:
            losses.append(metrics["loss"])
    return state.model, losses
