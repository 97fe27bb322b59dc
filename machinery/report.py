"""The report: everything that is in a set of runs, beside the paper's numbers, in one HTML page.

Tables are also written as Markdown, CSV and LaTeX, figures as PNG. The page opens without a network.
What the report knows of algorithms, tasks and models, it is handed: it reads titles, colours and axes.
Reads in this order: gathering, tables, figures, the page.
"""

import base64
import functools
import html
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.figure import Figure

from machinery import plots
from machinery.config import describe_difference
from machinery.files import UserError, read_json, write_safely
from machinery.runs import read_metrics


@functools.cache
def paper() -> dict[str, Any]:
    """The paper's numbers: mean and deviation over five seeds; in the reassessment before and after."""
    return json.loads(Path(__file__).with_name("paper.json").read_text())


# --- gathering --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """One run and the experiments that were made on it."""

    directory: Path
    plan: dict[str, Any]
    task: Any  # what is played: bounds, axes and unit of its descriptors
    method: str  # title of the algorithm
    colour: str
    titles: dict[str, str]  # of all kinds of models: what stands before the method's name
    results: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.plan["seed"]

    def model_name(self, directory: str) -> str:
        """`qdt-naive` of an ME-LS run is QDT(ME-LS, naive)."""
        kinds = [kind for kind in self.titles if f"{directory}-".startswith(f"{kind}-")]
        kind = max(kinds, key=len, default=directory)  # of a kind that is not registered here
        extra = directory.removeprefix(kind).removeprefix("-")
        method = f"{self.method}, {extra}" if extra else self.method
        return f"{self.titles.get(kind, kind)}({method})"


def with_results(run: Found) -> Found:
    """A run with all that is in its directory."""
    results = {p.stem: read_result(p) for p in sorted(run.directory.glob("evaluation/*.json"))}
    logs = {path.parent.name: path for path in sorted(run.directory.glob("*/metrics.jsonl"))}
    metrics = {name: read_metrics(path) for name, path in logs.items()}
    search = metrics.pop("search", [])
    return replace(run, results=results, metrics=search, training=metrics)


def is_pruned(directory: str) -> bool:
    """Models of pruned datasets are compared with each other, not with the methods."""
    return re.search(r"-(density-\d+|tiles|upper)$", directory) is not None


ACCURACY = {n: {} for n in ("goals", "distance", "mean_distance", "mean_spread", "diverged")}
METRICS = {"coverage": {}, "max_fitness": {}, "qd_score": {}}
NEEDED: dict[str, dict[str, Any]] = {  # what the report reads of each experiment; *: of all entries
    "accuracy": {"repertoire": ACCURACY, "*": ACCURACY},
    "calibrate": {"before": ACCURACY, "after": ACCURACY, "episodes": {}},
    "generalize": {name: ACCURACY | {"density": {}} for name in ("all", "*")},
    "reassess": {"before": METRICS, "after": METRICS, "spread": {}, "reachable": {}},
    "reproducibility": {"descriptor": {}, "path": {}},
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
    first: dict[str, Found] = {}
    for run in runs:
        twin = first.setdefault(run.method, run)
        for other, section in ((runs[0], "task"), (twin, "search")):
            a, b = ({section: r.plan[section]} for r in (other, run))
            if difference := describe_difference(a, b):
                raise UserError(
                    f"{other.directory} and {run.directory} do not belong into one table: "
                    f"{difference}."
                )
    for a, b in pairwise(runs):
        if (a.method, a.seed) == (b.method, b.seed):
            raise UserError(
                f"{a.directory} and {b.directory} are the same seed of {a.method}: "
                "take one of them."
            )


def by_method(runs: Sequence[Found], experiment: str) -> dict[str, list[Any]]:
    """The results of an experiment, one per seed."""
    results = defaultdict(list)
    for run in runs:
        if experiment in run.results:
            results[run.method].append(run.results[experiment])
    return dict(results)


def main_model(run: Found) -> str:
    """The name of the run's own model in tables."""
    return run.model_name(run.plan["train"]["model"])


def accuracies(runs: Sequence[Found]) -> dict[str, list[dict[str, Any]]]:
    """By method, one result per seed: repertoires first, then models."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        if "accuracy" in run.results:
            rows[run.method].append(run.results["accuracy"]["repertoire"])
    for run in runs:
        for name, result in run.results.get("accuracy", {}).items():
            if name != "repertoire" and not is_pruned(name):
                rows[run.model_name(name)].append(result)
        if "calibrate" in run.results:
            own = run.plan["train"]["model"]
            rows[run.model_name(f"{own}-calibrated")].append(run.results["calibrate"]["after"])
    return dict(rows)


def reachable_goals(runs: Sequence[Found]) -> Bool[np.ndarray, " goals"] | None:
    """Goals in whose zone an episode of any re-evaluated repertoire ended."""
    masks = [r.results["reassess"]["reachable"] for r in runs if "reassess" in r.results]
    return np.any(masks, axis=0) if masks else None


# --- tables -----------------------------------------------------------------------------------------


class Table(NamedTuple):
    name: str
    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


def sizes(task: str, runs: Sequence[Found]) -> str:
    """What to know before comparing numbers with the paper's; nothing for tasks that it has not."""

    def of(length: int, low: Sequence[float], high: Sequence[float], cells: int) -> str:
        space = " × ".join(f"[{a:g}, {b:g}]" for a, b in zip(low, high, strict=True))
        return f"episodes of {length} steps, descriptors in {space}, {cells:,} cells"

    theirs = paper()["sizes"].get(task)
    if theirs is None:
        return ""
    played = runs[0].task
    ours = of(played.length, played.low, played.high, runs[0].plan["search"]["cells"])
    return f"Ours: {ours}; the paper: {of(**theirs)}."


def mean_text(values: Sequence[float]) -> str:
    mean, deviation = np.mean(values), np.std(values)
    return f"{mean:.4g} ± {deviation:.2g}" if len(values) > 1 else f"{mean:.4g}"


def pair_text(pair: Sequence[float] | None) -> str:
    return f"{pair[0]:.4g} ± {pair[1]:.2g}" if pair else "–"


def accuracy_table(task: str, runs: Sequence[Found]) -> Table:
    rows, mask = [], reachable_goals(runs)
    for method, results in accuracies(runs).items():
        theirs = paper()["accuracy"].get(task, {}).get(method, {})
        inside = [np.nanmean(np.array(r["distance"], float)[mask]) for r in results]
        diverged = sum(r["diverged"] for r in results)
        rows.append(
            [
                method + (f" ({diverged} episodes diverged)" if diverged else ""),
                str(len(results)),
                mean_text([r["mean_distance"] for r in results]),
                pair_text(theirs.get("distance")),
                mean_text(inside) if mask is not None else "–",
                mean_text([r["mean_spread"] for r in results]),
                pair_text(theirs.get("spread")),
            ]
        )
    reach = "" if mask is None else f" ({int(mask.sum())} of {len(mask)})"
    head = ["method", "seeds", "distance", "paper", f"distance, reachable goals{reach}"]
    return Table(
        f"accuracy-{task}",
        f"Accuracy on {task} (table 1)",
        [*head, "spread", "paper"],
        rows,
        sizes(task, runs),
    )


def ratio_table(task: str, runs: Sequence[Found]) -> Table:
    """Of means over the seeds that both methods have."""
    seeds = {run.seed for run in runs}
    by_seed = [accuracies([r for r in runs if r.seed == seed]) for seed in seeds]
    theirs, rows = paper()["accuracy"].get(task), []
    for a, b in paper()["ratios"]:
        common = [ours for ours in by_seed if a in ours and b in ours]
        if common:
            row = [f"{a} / {b}"]
            for name in ("distance", "spread"):
                top, bottom = (
                    np.mean([r[f"mean_{name}"] for x in common for r in x[m]]) for m in (a, b)
                )
                printed = f"{theirs[a][name][0] / theirs[b][name][0]:.2f}" if theirs else "–"
                row += [f"{top / bottom:.2f}", printed]
            rows.append(row)
    head = ["ratio", "distance", "paper", "spread", "paper"]
    title = f"Ratios on {task}: a distance below 1 is the paper's claim"
    return Table(f"ratios-{task}", title, head, rows, sizes(task, runs))


def reassessment_table(task: str, runs: Sequence[Found]) -> Table:
    rows = []
    for method, results in by_method(runs, "reassess").items():
        row = [method, str(len(results))]
        theirs = paper()["reassessment"].get(task, {}).get(method)
        for name, scale in (("coverage", 100), ("max_fitness", 1), ("qd_score", 1)):
            for j, when in enumerate(("before", "after")):
                row.append(mean_text([scale * r[when][name] for r in results]))
                row.append(f"{theirs[name][j]:.4g}" if theirs else "–")
        rows.append([*row, mean_text([r["spread"] for r in results])])
    head = ["method", "seeds"]
    for name in ("coverage %", "max fitness", "QD score"):
        head += [f"{name}, initial", "paper", f"{name}, re-evaluated", "paper"]
    return Table(
        f"reassessment-{task}",
        f"Reassessment on {task} (table 2)",
        [*head, "spread"],
        rows,
        sizes(task, runs) if task in paper()["reassessment"] else "",
    )


def generalization_table(task: str, runs: Sequence[Found]) -> Table:
    rows, names = [], {run.method: main_model(run) for run in runs}
    for method, seeds in by_method(runs, "generalize").items():
        for how in seeds[0]:
            results = [seed[how] for seed in seeds if how in seed]
            rows.append(
                [
                    names[method],
                    how,
                    str(len(results)),
                    f"{np.mean([np.sum(r['density']) for r in results]):,.0f}",
                    mean_text([r["mean_distance"] for r in results]),
                    mean_text([r["mean_spread"] for r in results]),
                ]
            )
    head = ["method", "dataset", "seeds", "trajectories", "distance", "spread"]
    return Table(f"generalization-{task}", f"Generalization on {task} (figures 6, 12)", head, rows)


def calibration_table(task: str, runs: Sequence[Found]) -> Table:
    rows, names = [], {run.method: main_model(run) for run in runs}
    for method, results in by_method(runs, "calibrate").items():
        episodes = np.mean([r["episodes"] for r in results])
        row = [names[method], str(len(results)), f"{episodes:,.0f}"]
        for name in ("mean_distance", "mean_spread"):
            row += [mean_text([r[when][name] for r in results]) for when in ("before", "after")]
        rows.append(row)
    head = ["method", "seeds", "episodes", "distance", "calibrated", "spread", "calibrated"]
    return Table(
        f"calibration-{task}", f"Calibration on {task}, on the episodes of table 1", head, rows
    )


def markdown(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    title = f"**{table.title}** {table.note}".strip()
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def csv(table: Table) -> str:
    quote = lambda cell: '"' + cell.replace('"', '""') + '"'  # noqa: E731
    return "\n".join(",".join(map(quote, row)) for row in (table.head, *table.rows)) + "\n"


def latex(table: Table) -> str:
    clean = lambda cell: cell.replace("%", r"\%").replace("±", r"$\pm$").replace("–", "--")  # noqa: E731
    rows = [" & ".join(map(clean, row)) + r" \\" for row in (table.head, *table.rows)]
    body = [rows[0], r"\midrule", *rows[1:]]
    start = rf"\begin{{tabular}}{{l{'c' * (len(table.head) - 1)}}}"
    title = f"% {table.title}. {table.note}".strip()
    return "\n".join([title, start, r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]) + "\n"


# --- figures ----------------------------------------------------------------------------------------


def figures(task_name: str, runs: Sequence[Found]) -> dict[str, tuple[str, Figure]]:
    """File name to caption and figure, for everything that is there; maps show the first seed."""
    task = runs[0].task
    space = (task.low, task.high, task.axes)
    distance = f"distance to the goal ({task.unit})"
    colours = {run.method: run.colour for run in runs}
    colours |= {main_model(run): run.colour for run in runs}
    drawn: dict[str, tuple[str, Figure]] = {}
    search = {
        title: search_curves(runs, name)
        for title, name in (
            ("coverage", "coverage"),
            ("maximum fitness", "max_fitness"),
            ("QD score", "qd_score"),
        )
    }
    if search["coverage"]:
        caption = (
            "Search: coverage, maximum fitness and QD score over environment steps (figure 10)."
        )
        drawn["search"] = (caption, plots.curves(search, "environment steps", colours))
    training = {
        distance: training_curves(runs, "distance"),
        "maximum fitness over the goals": training_curves(runs, "max_fitness"),
    }
    if training[distance]:
        caption = "QDT training: mean distance to the goals and maximum fitness (figures 4, 13)."
        drawn["training"] = (caption, plots.curves(training, "epoch", colours))
    if task.descriptor_size != 2:
        return drawn
    maps = {
        method: (result["centroids"], result["fitness"])
        for method, result in _first(runs, "reassess", "centroids", "fitness").items()
    }
    if maps:
        drawn["coverage"] = (
            "Coverage maps: fitness of the policy in each cell (figure 11).",
            plots.cell_maps(maps, *space, "fitness"),
        )
    panels = {name: (r[0]["goals"], r[0]["distance"]) for name, r in accuracies(runs).items()}
    if panels:
        drawn["accuracy"] = (
            "Accuracy: mean distance to each goal over 10 episodes; lighter is nearer (figures 5, 9).",
            plots.cell_maps(panels, *space, distance, "low", borders=True, from_zero=True),
        )
    again = {
        method: (result["descriptor"], result["path"] if task.is_place else None)
        for method, result in _first(runs, "reproducibility").items()
    }
    if again:
        caption = "Reproducibility: three policies, 30 episodes each (figures 2, 7, 8)."
        drawn["reproducibility"] = (caption, plots.reproducibility(again, *space))
    names = {run.method: main_model(run) for run in runs}
    for method, result in _first(runs, "generalize").items():
        drawn[f"generalization-{method.lower()}"] = (
            f"Generalization of {names[method]}: datasets above, accuracy below (figures 6, 12).",
            plots.generalization(
                {how: r["density"] for how, r in result.items()},
                result["all"]["goals"],
                {how: r["distance"] for how, r in result.items()},
                *space,
                distance,
            ),
        )
    return drawn


def _first(runs: Sequence[Found], experiment: str, *needed: str) -> dict[str, Any]:
    """By method, the result of the first seed that has what is needed."""
    return {
        method: sound[0]
        for method, results in by_method(runs, experiment).items()
        if (sound := [r for r in results if set(needed) <= set(r)])
    }


# By method: x and values.
Curves = dict[str, tuple[Float[np.ndarray, " x"], Float[np.ndarray, "seeds x"]]]


def search_curves(runs: Sequence[Found], name: str) -> Curves:
    """A metric of the search over environment steps."""
    return _over_seeds(((run.method, run.metrics) for run in runs), "steps", name)


def training_curves(runs: Sequence[Found], name: str) -> Curves:
    """A metric of the models over epochs."""
    trained = (
        (run.model_name(directory), metrics)
        for run in runs
        for directory, metrics in run.training.items()
        if not is_pruned(directory)
    )
    return _over_seeds(trained, "epoch", name)


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


# --- the page ---------------------------------------------------------------------------------------


def write_report(found: dict[str, list[Found]], out: Path) -> Path:
    """Writes tables, figures and report.html into `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {out}: {error.strerror}.") from None
    body = []
    for task, runs in found.items():
        body.append(f"<h2>{html.escape(task)}</h2>{_runs_list(runs)}")
        makers: tuple[Callable[[str, Sequence[Found]], Table], ...]
        makers = (
            accuracy_table,
            ratio_table,
            calibration_table,
            reassessment_table,
            generalization_table,
        )
        for table in (make(task, runs) for make in makers):
            if table.rows:
                for suffix, write in ((".md", markdown), (".csv", csv), (".tex", latex)):
                    with write_safely(out / f"{table.name}{suffix}") as file:
                        file.write(write(table).encode())
                body.append(_html_table(table))
        for name, (caption, figure) in figures(task, runs).items():
            path = out / f"{name}-{task}.png"
            plots.save(figure, path)
            picture = base64.b64encode(path.read_bytes()).decode()
            body.append(
                f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{picture}">'
                f"<figcaption>{html.escape(caption)}</figcaption></figure>"
            )
    path = out / "report.html"
    page = (Path(__file__).parent / "page" / "report.html").read_text()
    with write_safely(path) as file:
        file.write(page.replace("@@BODY@@", "\n".join(body)).encode())
    return path


def _runs_list(runs: Sequence[Found]) -> str:
    items = []
    for run in runs:
        search, task = run.plan["search"], run.plan["task"]
        steps = run.metrics[-1]["steps"] if run.metrics else search["steps"]
        preset = html.escape(run.plan["preset"] or "none")
        items.append(
            f"<li>{run.method}, seed {run.seed}: {steps:,} environment steps, episodes of "
            f"{task['length']}, {search['cells']} cells, preset {preset}</li>"
        )
    return f"<details><summary>{len(runs)} runs</summary><ul>{''.join(items)}</ul></details>"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in table.rows
    )
    return (
        f"<h3>{html.escape(table.title)}</h3>"
        + (f"<p>{html.escape(table.note)}</p>" if table.note else "")
        + f"<table><tr>{head}</tr>{rows}</table>"
    )
