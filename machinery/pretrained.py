"""A model to hand on: a directory with which others can play without a search, a dataset or a training.

DIR/plan.json             of the run it comes from, as it was
DIR/MODEL/                config.json and model.safetensors
DIR/demonstrators.json    zones, and the descriptors of those from whom it learned
DIR/evaluation/           accuracy.json: the model alone, on the run's goals
DIR/README.md             the model card, written from these files

It is a run directory without a search: `qdt act`, `serve` and `evaluate accuracy` take it as it is.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from machinery.files import UserError, read_checksum, read_json, write_json, write_safely
from machinery.runs import PLAN, Run, commit, read_versions

ROBOTS = {"brax": "brax's own", "v1": "like Brax v1's"}
KEPT = ("config.json", "model.safetensors")


@dataclass(frozen=True)
class About:
    """What the method knows about a model and its task, and the files do not say."""

    title: str  # of the model
    robot: str | None
    robot_kind: str | None
    axes: Sequence[str]  # of a descriptor
    low: Sequence[float]
    high: Sequence[float]
    unit: str  # of a distance


def export(run: Run, out: Path, about: About, demonstrators: dict[str, Any]) -> None:
    """Writes the directory; what is in it already is replaced.

    `demonstrators` has their `descriptor`s and the `centroids` of all zones, also of those without one.
    """
    name = run.plan.train.model
    if not run.is_evaluated("accuracy"):
        raise UserError(
            f"a model card tells how near the model gets: `qdt evaluate accuracy {run.directory}` first."
        )
    if (out / "search").exists():
        raise UserError(f"{out} is a run of its own, with a search; choose another directory.")
    measured = read_json(run.result_path("accuracy"))["result"]
    try:
        (out / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run.directory / PLAN, out / PLAN)
        for file in KEPT:
            shutil.copyfile(run.directory / name / file, out / name / file)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}.") from None
    copied = Run(out, run.plan)
    inputs = {name: read_checksum(out / name / "model.safetensors")}
    accuracy = {"inputs": inputs, "result": {name: measured[name]}}
    write_json(copied.result_path("accuracy"), accuracy)
    write_json(out / "demonstrators.json", demonstrators)
    made = read_versions(out / name / "config.json").get("commit")
    repertoire = measured.get("repertoire")
    text = card(run.plan, about, measured[name], repertoire, demonstrators, made, out)
    with write_safely(out / "README.md") as file:
        file.write(text.encode())


def card(
    plan: Any,
    about: About,
    measured: dict[str, Any],
    repertoire: dict[str, Any] | None,
    demonstrators: dict[str, Any],
    made: str | None,
    place: Path,
) -> str:
    """The model card. `measured` is the accuracy of the model, `made` the commit it was trained at."""
    task, distance = plan.task, np.array(measured["distance"], float)
    example = " ".join(f"{x:.3g}" for x in measured["goals"][int(np.nanargmin(distance))])
    there, zones = len(demonstrators["descriptor"]), len(demonstrators["centroids"])
    return f"""# {about.title} for {task.task}

One policy that plays any behaviour of the space on demand: asked for a target, it acts so that the
episode's descriptor comes near it.

```
qdt act {place} --target {example} --html behaviour.html
qdt serve {place}
qdt evaluate accuracy {place}
```

{origin(plan, about, there, zones, made)}

All settings are in `plan.json`, and beside them the versions of the libraries.

## How near it gets

{nearness(about, measured, repertoire)}

## Limits

- It learned from {there} policies of one search (`demonstrators.json`) and is at its best near what they
  showed; {empty_zones(there, zones, plan.train.stay_within)}
- It knows episodes of exactly {task.length} steps, from the task's random starts, in this simulator.
  Nothing was tried on a real robot.
"""


def origin(plan: Any, about: About, there: int, zones: int, made: str | None) -> str:
    """Where the model comes from, as a table."""
    task, search, data, train = plan.task, plan.search, plan.dataset, plan.train
    noise = f"normal, deviation {data.action_noise:g}, on every action, as its demonstrators had it"
    rows = {
        "task": f"`{task.task}`, episodes of {task.length} steps",
        "robot": about.robot_kind
        and f"{about.robot}, {ROBOTS[about.robot_kind]}, {task.backend} physics",
        "behaviour": "; ".join(
            f"{axis}, from {low:g} to {high:g}"
            for axis, low, high in zip(about.axes, about.low, about.high, strict=True)
        ),
        "preset and seed": f"{plan.preset or 'a written plan'}, seed {plan.seed}",
        "demonstrators": f"{there} policies, for {there} of {zones} zones, "
        f"by `{search.algo}` in {search.steps:,} steps",
        "training": f"{data.trajectories:,} trajectories, {train.epochs} epochs",
        "commit": made or f"not recorded; exported at {commit() or 'an unknown one'}",
        "noise": noise if data.action_noise else "none",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def nearness(about: About, measured: dict[str, Any], repertoire: dict[str, Any] | None) -> str:
    """What `qdt evaluate accuracy` measured, of the model and of those it learned from."""
    distance, diverged = np.array(measured["distance"], float), int(measured["diverged"])
    rows = {"this model": measured} | (
        {"the nearest policy of its repertoire": repertoire} if repertoire else {}
    )
    lines = [
        f"| {name} | {interval(result['distance'])} | {interval(result['spread'])} |"
        for name, result in rows.items()
    ]
    table = "\n".join(["| | distance | spread |", "| --- | --- | --- |", *lines])
    unit = f" (in {about.unit})" if about.unit else ""
    lost = f" {diverged} episodes diverged and are left out." if diverged else ""
    episodes = len(measured["descriptor"][0])
    return f"""{len(distance)} goals that cover the space, {episodes} episodes each: mean \
distance to the goal and mean spread{unit}, with the 95 % interval of the mean over the goals. Another seed
would be another model, of which the intervals say nothing.{lost}

{table}

Half of the goals are missed by less than {np.nanmedian(distance):.3g}, the worst by \
{np.nanmax(distance):.3g}."""


def empty_zones(there: int, zones: int, stay_within: bool) -> str:
    if there >= zones:
        return "every zone has one."
    what = (
        "beyond what was shown it plays what is nearest"
        if stay_within
        else "targets there are guesses"
    )
    return f"{zones - there} of {zones} zones have none: {what}."


def interval(values: Sequence[float | None]) -> str:
    """The mean and its 95 % interval by the normal approximation; goals without a value are left out."""
    known = np.array([value for value in values if value is not None and math.isfinite(value)])
    mean = known.mean()
    if len(known) < 2:
        return f"{mean:.3f}"
    half = 1.96 * known.std(ddof=1) / math.sqrt(len(known))
    return f"{mean:.3f} ({mean - half:.3f} to {mean + half:.3f})"
