"""What the report is about: all that is in a set of runs, by task, method and seed.

What it knows of algorithms, tasks and models, it is handed: titles, colours and axes.
Reads in this order: runs and their results, methods over seeds, curves.
"""

import functools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from machinery.config import describe_difference
from machinery.driver import tell
from machinery.files import UserError, read_checksum, read_json
from machinery.reproduction import OWN, tables
from machinery.runs import read_metrics, read_stage_config, variant


@functools.cache
def paper() -> dict[str, Any]:
    """What the paper prints (means and deviations over five seeds), and what it claims."""
    return json.loads(Path(__file__).with_name("paper.json").read_text())


# --- runs and their results -------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """One run and the experiments that were made on it."""

    directory: Path
    plan: dict[str, Any]
    task: Any  # what is played: bounds, axes and unit of its descriptors
    method: str  # title of the algorithm
    colour: str
    titles: dict[str, str]  # of all kinds of models: what stands before the method's name
    paper: dict[str, Any]  # the plan of such a run with the paper's settings
    results: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)  # of all models

    @property
    def seed(self) -> int:
        return self.plan["seed"]

    def is_made(self, section: str) -> bool:
        """Whether something is there that was made by this section of the plan."""
        return section in ("task", "search") or self.plan["train"]["model"] in self.training

    def model_name(self, directory: str) -> str:
        """`qdt-naive` of an ME-LS run is QDT(ME-LS, naive)."""
        kinds = [kind for kind in self.titles if f"{directory}-".startswith(f"{kind}-")]
        kind = max(kinds, key=len, default=directory)  # of a kind that is not registered here
        extra = directory.removeprefix(kind).removeprefix("-")
        method = f"{self.method}, {extra}" if extra else self.method
        return f"{self.titles.get(kind, kind)}({method})"


def with_results(run: Found) -> Found:
    """A run with all that is in its directory."""
    results = {}
    for path in sorted(run.directory.glob("evaluation/*.json")):
        result = read_result(path)
        if changed := made_again(path):
            tell(
                f"{path} is left out: {changed} was made again since; "
                f"`qdt evaluate {path.stem} {run.directory}` measures it anew."
            )
        else:
            results[path.stem] = result
    logs = {path.parent.name: path for path in sorted(run.directory.glob("*/metrics.jsonl"))}
    metrics = {name: read_metrics(path) for name, path in logs.items()}
    search = metrics.pop("search", [])
    recipes = {name: read_recipe(run.directory / name) for name in metrics}
    return replace(run, results=results, metrics=search, training=metrics, recipes=recipes)


def read_recipe(directory: Path) -> dict[str, Any]:
    """All that a model was made with, but for its seed."""
    config = read_stage_config(directory)
    data = directory.with_name(variant("dataset", config.get("dataset")))
    is_ours = (data / "config.json").exists()  # and was not imported
    shown = read_stage_config(data).get("dataset") if is_ours else None
    return {"dataset": shown, "train": config.get("train"), "prune": config.get("prune")}


ACCURACY = {n: {} for n in ("goals", "distance", "mean_distance", "mean_spread", "diverged")}
METRICS = {"coverage": {}, "max_fitness": {}, "qd_score": {}}
NEEDED: dict[str, dict[str, Any]] = {  # what the report reads of each experiment; *: of all entries
    "accuracy": {"repertoire": ACCURACY, "*": ACCURACY},
    "elsewhere": {"*": ACCURACY},
    "calibrate": {"before": ACCURACY, "after": ACCURACY, "episodes": {}},
    "generalize": {name: ACCURACY | {"density": {}, "emptied": {}} for name in ("all", "*")},
    "reassess": {"before": METRICS, "after": METRICS, "spread": {}, "reachable": {}},
    "reproducibility": {"descriptor": {}, "spread": {}, "path": {}},
}


def read_result(path: Path) -> dict[str, Any]:
    """What `qdt evaluate` wrote; a file of somebody else's is refused before it is drawn."""

    def holds(content: Any, needed: dict[str, Any]) -> bool:
        if not needed:
            return isinstance(content, list | float | int)
        if not isinstance(content, dict):
            return False
        names = set(needed) - {"*"} | (set(content) if "*" in needed else set())
        return all(
            n in content and holds(content[n], needed.get(n, needed.get("*", {}))) for n in names
        )

    content = read_json(path)
    result = content.get("result") if isinstance(content, dict) else None
    if path.stem not in NEEDED or not holds(result, NEEDED[path.stem]):
        raise UserError(
            f"{path} is not the result of an experiment; `qdt evaluate` makes it again."
        )
    assert isinstance(result, dict)
    return result


def made_again(path: Path) -> str | None:
    """What a result was measured on and has changed since. Published results have nothing beside them."""
    inputs, run = read_json(path).get("inputs"), path.parent.parent
    for name, checksum in inputs.items() if isinstance(inputs, dict) else ():
        file = "search/repertoire" if name == "repertoire" else f"{name}/model"
        made = run / f"{file}.safetensors"
        if made.exists() and read_checksum(made) != checksum:
            return name
    return None


def gather(runs: Iterable[Found], methods: Sequence[str]) -> dict[str, list[Found]]:
    """By task, in the order of `methods`, then of seeds; runs that cannot be compared are refused."""
    found = defaultdict(list)
    for run in runs:
        found[run.plan["task"]["task"]].append(run)
    order = {name: i for i, name in enumerate(methods)}
    for of_task in found.values():
        of_task.sort(key=lambda f: (order[f.method], f.seed, str(f.directory)))
        refuse_mixtures(of_task)
    return dict(found)


def refuse_mixtures(runs: Sequence[Found]) -> None:
    """All runs of a task play the same episodes; those of a method differ in their seed alone."""
    first: dict[str, tuple[Path, dict[str, Any]]] = {}  # by what is averaged: who came first
    for run in runs:
        made_with = {
            "the task": {"task": run.plan["task"]},
            run.method: {"search": run.plan["search"]},
            **{run.model_name(name): recipe for name, recipe in run.recipes.items()},
        }
        for name, settings in made_with.items():
            other, theirs = first.setdefault(name, (run.directory, settings))
            if difference := describe_difference(theirs, settings):
                raise UserError(
                    f"{other} and {run.directory} do not belong into one table: {difference}."
                )
    for a, b in pairwise(runs):
        if (a.method, a.seed) == (b.method, b.seed):
            raise UserError(
                f"{a.directory} and {b.directory} are the same seed of {a.method}: "
                "take one of them."
            )


# --- methods over seeds -----------------------------------------------------------------------------

BySeed = dict[int, dict[str, Any]]  # a result of each seed


def by_method(runs: Sequence[Found], experiment: str) -> dict[str, BySeed]:
    """The results of an experiment."""
    results: dict[str, BySeed] = defaultdict(dict)
    for run in runs:
        if experiment in run.results:
            results[run.method][run.seed] = run.results[experiment]
    return dict(results)


def by_models(runs: Sequence[Found]) -> dict[str, Found]:
    """By method: the run with the most models, whose plan says what all of them are."""
    return {
        method: max(
            (run for run in runs if run.method == method), key=lambda run: len(run.training)
        )
        for method in dict.fromkeys(run.method for run in runs)
    }


def main_models(runs: Sequence[Found]) -> dict[str, str]:
    """By method: how its runs' own model is called."""
    return {method: main_model(run) for method, run in by_models(runs).items()}


def main_model(run: Found) -> str:
    """The name of the run's own model in tables."""
    return run.model_name(run.plan["train"]["model"])


def is_pruned(directory: str) -> bool:
    """Models of pruned datasets are compared with each other, not with the methods."""
    return re.search(r"-(density-\d+|tiles|upper)$", directory) is not None


def is_main(directory: str) -> bool:
    """Not pruned, and no variant that has its place in a table of variants."""
    variants = {row.model for table in tables().values() for row in table.rows} - {OWN}
    return not is_pruned(directory) and directory not in variants


def accuracies(
    runs: Sequence[Found], wanted: Callable[[str], bool] = is_main, experiment: str = "accuracy"
) -> dict[str, BySeed]:
    """By method: repertoires, the same after a second look, and models whose directory is wanted."""
    rows: dict[str, BySeed] = defaultdict(dict)
    for entry, title in (("repertoire", "{}"), ("chosen", "{}, chosen after re-evaluation")):
        for run in runs:
            if entry in run.results.get(experiment, {}):
                rows[title.format(run.method)][run.seed] = run.results[experiment][entry]
    for is_own in (True, False):
        for run in runs:
            models = dict(run.results.get(experiment, {}))
            for entry in ("repertoire", "chosen"):
                models.pop(entry, None)
            for name, result in models.items():
                if wanted(name) and (name == run.plan["train"]["model"]) == is_own:
                    rows[run.model_name(name)][run.seed] = result
    return dict(rows)


def print_accuracies(found: dict[str, list[Found]]) -> None:
    """The table with which a run ends."""
    for of_task in found.values():
        good, rows = of_task[0].task.good_distance, accuracies(of_task)
        if rows:
            tell(f"\n{'method':<38}{'distance':>10}{'goals reached':>15}{'spread':>10}")
        for method, results in rows.items():
            for result in results.values():
                near = np.mean(np.array(result["distance"], float) <= good)
                distance, spread = result["mean_distance"], result["mean_spread"]
                tell(f"{method:<38}{distance:>10.4f}{near:>15.0%}{spread:>10.4f}")


def reachable_goals(runs: Sequence[Found]) -> Bool[np.ndarray, " goals"] | None:
    """Goals in whose zone an episode of any re-evaluated repertoire ended."""
    masks = [r.results["reassess"]["reachable"] for r in runs if "reassess" in r.results]
    return np.any(masks, axis=0) if masks else None


# --- curves -----------------------------------------------------------------------------------------

# By method: x and values.
Curves = dict[str, tuple[Float[np.ndarray, " x"], Float[np.ndarray, "seeds x"]]]


def search_curves(runs: Sequence[Found], name: str) -> Curves:
    """A metric of the search over environment steps."""
    return _over_seeds(((run.method, run.metrics) for run in runs), "steps", name)


def training_curves(runs: Sequence[Found], name: str) -> Curves:
    """A metric of the models over epochs; QDT(Naive) is among those of figure 5."""
    trained = (
        (run.model_name(directory), metrics)
        for run in runs
        for directory, metrics in own_first(run)
        if is_main(directory) or directory == "qdt-naive"
    )
    return _over_seeds(trained, "epoch", name)


def own_first(run: Found) -> list[tuple[str, list[dict[str, Any]]]]:
    """The trainings of a run, its own model's first."""
    return sorted(run.training.items(), key=lambda item: item[0] != run.plan["train"]["model"])


def _over_seeds(logs: Iterable[tuple[str, list[dict[str, Any]]]], x: str, y: str) -> Curves:
    """The curves of each name, where all of them have a value."""
    curves = defaultdict(list)
    for name, rows in logs:
        curve = {r[x]: r[y] for r in rows if r.get(x) is not None and r.get(y) is not None}
        if curve:
            curves[name].append(curve)
    stacked = {}
    for name, seeds in curves.items():
        common = sorted(set.intersection(*map(set, seeds)))
        values = np.array([[curve[i] for i in common] for curve in seeds], float)
        stacked[name] = (np.array(common, float), values)
    return stacked
