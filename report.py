"""The report: everything that is in a set of runs, beside the paper's numbers, in one HTML page.

Tables are also written as Markdown, CSV and LaTeX, figures as PNG. The page opens without a network.
Reads in this order: the paper's numbers, gathering, tables, figures, the page.
"""

import base64
import dataclasses
import html
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

import plots
from dataset import PRUNINGS
from envs import make_task
from pipeline import Lineage, Plan, open_run, presets
from runs import UserError, read_json, read_metrics, write_safely

# --- the paper's numbers ----------------------------------------------------------------------------

# Table 1: (distance, spread), mean and deviation over five seeds. Halfcheetah-Uni in units, not × 10².
PAPER_ACCURACY: dict[str, dict[str, tuple[tuple[float, float], tuple[float, float]]]] = {
    "ant-omni": {
        "ME": ((6.38, 0.15), (3.76, 0.03)),
        "PGAME": ((6.39, 0.14), (3.99, 0.09)),
        "ME-LS": ((3.01, 0.05), (2.33, 0.01)),
        "PGAME-LS": ((3.13, 0.04), (2.24, 0.04)),
        "ME-Sampling": ((5.10, 0.19), (4.50, 0.11)),
        "QDT(ME)": ((4.64, 0.10), (4.66, 0.07)),
        "QDT(PGAME)": ((4.45, 0.05), (4.18, 0.16)),
        "QDT(ME-LS)": ((2.86, 0.07), (1.99, 0.09)),
        "QDT(PGAME-LS)": ((3.06, 0.03), (2.32, 0.06)),
    },
    "halfcheetah-uni": {
        "ME": ((0.1633, 0.0047), (0.1545, 0.0045)),
        "PGAME": ((0.1767, 0.0048), (0.1600, 0.0081)),
        "ME-LS": ((0.1001, 0.0047), (0.1001, 0.0045)),
        "PGAME-LS": ((0.1000, 0.0), (0.1067, 0.0050)),
        "ME-Sampling": ((0.1540, 0.0090), (0.1412, 0.0095)),
        "QDT(ME)": ((0.1200, 0.0), (0.1300, 0.0)),
        "QDT(PGAME)": ((0.1200, 0.0), (0.1200, 0.0)),
        "QDT(ME-LS)": ((0.0909, 0.0032), (0.0920, 0.0022)),
        "QDT(PGAME-LS)": ((0.0734, 0.0042), (0.0840, 0.0037)),
    },
}

# Table 2, Halfcheetah-Uni: coverage in %, maximum fitness, QD score; before and after.
PAPER_REASSESSMENT = {
    "ME": ((100, 43), (1226, 770), (3.05e6, 1.17e6)),
    "ME-LS": ((100, 55), (992, 730), (2.63e6, 1.41e6)),
    "PGAME": ((100, 40), (1417, 977), (3.07e6, 1.10e6)),
    "PGAME-LS": ((100, 53), (1194, 1073), (2.63e6, 1.36e6)),
}

RATIOS = (  # what the paper claims is that these are below 1 in distance
    ("ME-LS", "ME"),
    ("PGAME-LS", "PGAME"),
    ("ME-Sampling", "ME"),
    ("QDT(ME)", "ME"),
    ("QDT(PGAME)", "PGAME"),
    ("QDT(ME-LS)", "ME-LS"),
    ("QDT(PGAME-LS)", "PGAME-LS"),
)
METHODS = ("ME", "PGAME", "ME-LS", "PGAME-LS", "ME-Sampling")


def method_name(algo: str) -> str:
    return {"me-sampling": "ME-Sampling"}.get(algo, algo.upper())


def qdt_name(method: str, directory: str) -> str:
    """`qdt-naive` of an ME-LS run is QDT(ME-LS, naive)."""
    extra = directory.removeprefix("qdt").removeprefix("-")
    return f"QDT({method}, {extra})" if extra else f"QDT({method})"


def is_pruned(directory: str) -> bool:
    """QDTs of pruned datasets are compared with each other, not with the methods."""
    return directory.endswith(PRUNINGS)


# --- gathering --------------------------------------------------------------------------------------


class Found(NamedTuple):
    """One run and the experiments that were made on it."""

    lineage: Lineage
    results: dict[str, Any]
    metrics: list[dict[str, Any]]
    training: dict[str, list[dict[str, Any]]]

    @property
    def method(self) -> str:
        return method_name(self.lineage.algo)


ACCURACY = {n: {} for n in ("goals", "distance", "mean_distance", "mean_spread", "diverged")}
METRICS = {"coverage": {}, "max_fitness": {}, "qd_score": {}}
NEEDED: dict[str, dict[str, Any]] = {  # what the report reads of each experiment; *: of all entries
    "accuracy": {"repertoire": ACCURACY, "*": ACCURACY},
    "calibrate": {"before": ACCURACY, "after": ACCURACY, "episodes": {}},
    "generalize": {name: ACCURACY | {"density": {}} for name in ("all", "*")},
    "reassess": {"before": METRICS, "after": METRICS, "spread": {}, "reachable": {}},
    "reproducibility": {"descriptor": {}, "path": {}},
}


def read_result(path: Path) -> Any:
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

    result = read_json(path)
    if path.stem not in NEEDED or not holds(result, NEEDED[path.stem]):
        raise UserError(
            f"{path} is not the result of an experiment; `qdt evaluate` makes it again."
        )
    return result


def gather(directories: Iterable[Path]) -> dict[str, list[Found]]:
    """By task. A directory that holds several runs stands for all of them."""
    places: dict[Path, Path] = {}  # a run that is named twice is one run
    for directory in directories:
        inside = sorted(path.parent.parent for path in directory.glob("**/search/config.json"))
        if not inside:
            raise UserError(f"{directory} holds no run.")
        for run in inside:
            places.setdefault(run.resolve(), run)
    found = defaultdict(list)
    for run in places.values():
        lineage = open_run(run)
        results = {p.stem: read_result(p) for p in sorted(run.glob("evaluation/*.json"))}
        metrics = run / "search" / "metrics.jsonl"
        training = {p.parent.name: read_metrics(p) for p in sorted(run.glob("qdt*/metrics.jsonl"))}
        found[lineage.plan.task.task].append(
            Found(lineage, results, read_metrics(metrics) if metrics.exists() else [], training)
        )
    order = {name: i for i, name in enumerate(METHODS)}
    for runs in found.values():
        runs.sort(key=lambda f: (order[f.method], f.lineage.seed, str(f.lineage.directory)))
        refuse_mixtures(runs)
    return dict(found)


def refuse_mixtures(runs: Sequence[Found]) -> None:
    """All runs of a task play the same episodes; those of a method differ in their seed alone."""
    first: dict[str, Found] = {}
    for run in runs:
        twin = first.setdefault(run.method, run)
        for other, stage in ((runs[0], "task"), (twin, "search")):
            a, b = (dataclasses.asdict(getattr(r.lineage.plan, stage)) for r in (other, run))
            if different := [n for n in a if a[n] != b[n] and n != "checkpoint_seconds"]:
                raise UserError(
                    f"{other.lineage.directory} and {run.lineage.directory} do not belong into one "
                    + "table: "
                    + ", ".join(f"{stage}.{n} is {a[n]} there and {b[n]} here" for n in different)
                    + "."
                )
    for a, b in pairwise(runs):
        if (a.method, a.lineage.seed) == (b.method, b.lineage.seed):
            raise UserError(
                f"{a.lineage.directory} and {b.lineage.directory} are the same seed of {a.method}: "
                "take one of them."
            )


def by_method(runs: Sequence[Found], experiment: str) -> dict[str, list[Any]]:
    """The results of an experiment, one per seed."""
    results = defaultdict(list)
    for run in runs:
        if experiment in run.results:
            results[run.method].append(run.results[experiment])
    return dict(results)


def accuracies(runs: Sequence[Found]) -> dict[str, list[dict[str, Any]]]:
    """By method, one result per seed: repertoires first, then QDTs."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        if "accuracy" in run.results:
            rows[run.method].append(run.results["accuracy"]["repertoire"])
    for run in runs:
        for name, result in run.results.get("accuracy", {}).items():
            if name != "repertoire" and not is_pruned(name):
                rows[qdt_name(run.method, name)].append(result)
        if "calibrate" in run.results:
            rows[qdt_name(run.method, "qdt-calibrated")].append(run.results["calibrate"]["after"])
    return dict(rows)


def reachable_goals(runs: Sequence[Found]) -> np.ndarray | None:
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

    def of(plan: Plan) -> str:
        played = make_task(plan.task)
        space = " × ".join(f"[{a:g}, {b:g}]" for a, b in zip(played.low, played.high, strict=True))
        cells = plan.search.cells
        return f"episodes of {plan.task.length} steps, descriptors in {space}, {cells:,} cells"

    theirs = presets()["paper"].get(task)
    return f"Ours: {of(runs[0].lineage.plan)}; the paper: {of(theirs)}." if theirs else ""


def mean_text(values: Sequence[float]) -> str:
    mean, deviation = np.mean(values), np.std(values)
    return f"{mean:.4g} ± {deviation:.2g}" if len(values) > 1 else f"{mean:.4g}"


def pair_text(pair: tuple[float, float] | None) -> str:
    return f"{pair[0]:.4g} ± {pair[1]:.2g}" if pair else "–"


def accuracy_table(task: str, runs: Sequence[Found]) -> Table:
    rows, mask = [], reachable_goals(runs)
    for method, results in accuracies(runs).items():
        paper = PAPER_ACCURACY.get(task, {}).get(method)
        inside = [np.nanmean(np.array(r["distance"], float)[mask]) for r in results]
        diverged = sum(r["diverged"] for r in results)
        rows.append(
            [
                method + (f" ({diverged} episodes diverged)" if diverged else ""),
                str(len(results)),
                mean_text([r["mean_distance"] for r in results]),
                pair_text(paper and paper[0]),
                mean_text(inside) if mask is not None else "–",
                mean_text([r["mean_spread"] for r in results]),
                pair_text(paper and paper[1]),
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
    seeds = {run.lineage.seed for run in runs}
    by_seed = [accuracies([r for r in runs if r.lineage.seed == seed]) for seed in seeds]
    paper, rows = PAPER_ACCURACY.get(task, {}), []
    for a, b in RATIOS:
        common = [ours for ours in by_seed if a in ours and b in ours]
        if common:
            row = [f"{a} / {b}"]
            for index, name in enumerate(("mean_distance", "mean_spread")):
                top, bottom = (np.mean([r[name] for x in common for r in x[m]]) for m in (a, b))
                theirs = paper and f"{paper[a][index][0] / paper[b][index][0]:.2f}"
                row += [f"{top / bottom:.2f}", theirs or "–"]
            rows.append(row)
    head = ["ratio", "distance", "paper", "spread", "paper"]
    title = f"Ratios on {task}: a distance below 1 is the paper's claim"
    return Table(f"ratios-{task}", title, head, rows, sizes(task, runs))


def reassessment_table(task: str, runs: Sequence[Found]) -> Table:
    rows = []
    for method, results in by_method(runs, "reassess").items():
        row = [method, str(len(results))]
        paper = PAPER_REASSESSMENT.get(method) if task == "halfcheetah-uni" else None
        for i, (name, scale) in enumerate((("coverage", 100), ("max_fitness", 1), ("qd_score", 1))):
            for j, when in enumerate(("before", "after")):
                row.append(mean_text([scale * r[when][name] for r in results]))
                row.append(f"{paper[i][j]:.4g}" if paper else "–")
        rows.append([*row, mean_text([r["spread"] for r in results])])
    head = ["method", "seeds"]
    for name in ("coverage %", "max fitness", "QD score"):
        head += [f"{name}, initial", "paper", f"{name}, re-evaluated", "paper"]
    return Table(
        f"reassessment-{task}",
        f"Reassessment on {task} (table 2)",
        [*head, "spread"],
        rows,
        sizes(task, runs) if task == "halfcheetah-uni" else "",  # the paper has no other
    )


def generalization_table(task: str, runs: Sequence[Found]) -> Table:
    rows = []
    for method, seeds in by_method(runs, "generalize").items():
        for how in seeds[0]:
            results = [seed[how] for seed in seeds if how in seed]
            rows.append(
                [
                    qdt_name(method, "qdt"),
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
    rows = []
    for method, results in by_method(runs, "calibrate").items():
        episodes = np.mean([r["episodes"] for r in results])
        row = [qdt_name(method, "qdt"), str(len(results)), f"{episodes:,.0f}"]
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
    task = runs[0].lineage.task
    space = (task.low, task.high, plots.axis_names(task_name))
    distance = f"distance to the goal ({plots.unit(task_name)})"
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
        drawn["search"] = (caption, plots.curves(search, "environment steps"))
    training = {
        distance: training_curves(runs, "distance"),
        "maximum fitness over the goals": training_curves(runs, "max_fitness"),
    }
    if training[distance]:
        caption = "QDT training: mean distance to the goals and maximum fitness (figures 4, 13)."
        drawn["training"] = (caption, plots.curves(training, "epoch"))
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
        method: (result["descriptor"], result["path"] if task_name.endswith("-omni") else None)
        for method, result in _first(runs, "reproducibility").items()
    }
    if again:
        caption = "Reproducibility: three policies, 30 episodes each (figures 2, 7, 8)."
        drawn["reproducibility"] = (caption, plots.reproducibility(again, *space))
    for method, result in _first(runs, "generalize").items():
        drawn[f"generalization-{method.lower()}"] = (
            f"Generalization of QDT({method}): datasets above, accuracy below (figures 6, 12).",
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


Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # by method: x and values [seeds, x]


def search_curves(runs: Sequence[Found], name: str) -> Curves:
    """A metric of the search over environment steps."""
    return _over_seeds(((run.method, run.metrics) for run in runs), "steps", name)


def training_curves(runs: Sequence[Found], name: str) -> Curves:
    """A metric of the QDTs over epochs."""
    trained = (
        (qdt_name(run.method, directory), metrics)
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
        stacked[name] = (np.array(common, float), np.array([[c[i] for i in common] for c in seeds]))
    return stacked


# --- the page ---------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Quality-Diversity Transformer: report</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
        color: #222; background: #fff; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; display: block;
         overflow-x: auto; }}
th, td {{ padding: 0.3rem 0.7rem; border-bottom: 1px solid #ddd; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
td {{ white-space: nowrap; }}
figure {{ margin: 1.5rem 0; }} img {{ max-width: 100%; }} figcaption {{ color: #555; }}
</style></head><body>
<h1>Quality-Diversity Transformer: report</h1>
{body}
</body></html>
"""


def write_report(directories: Sequence[Path], out: Path) -> Path:
    """Writes tables, figures and report.html into `out`."""
    found = gather(directories)
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
    with write_safely(path) as file:
        file.write(PAGE.format(body="\n".join(body)).encode())
    return path


def _runs_list(runs: Sequence[Found]) -> str:
    items = []
    for run in runs:
        config, task = run.lineage.plan.search, run.lineage.plan.task
        steps = run.metrics[-1]["steps"] if run.metrics else config.steps
        items.append(
            f"<li>{run.method}, seed {run.lineage.seed}: {steps:,} environment steps, episodes of "
            f"{task.length}, {config.cells} cells, preset {html.escape(run.lineage.plan.preset)}</li>"
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
