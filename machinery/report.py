"""The report: everything that is in a set of runs, beside the paper's numbers, in one HTML page.

It begins with what was found. Tables are also written as Markdown, CSV and LaTeX, figures as PNG and PDF.
The page opens without a network. Reads in this order: figures, the page.
"""

import base64
import html
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from machinery import plots
from machinery.files import UserError, write_safely
from machinery.gather import (
    BySeed,
    Found,
    accuracies,
    by_method,
    is_main,
    main_models,
    paper,
    search_curves,
    training_curves,
)
from machinery.statistics import estimate
from machinery.tables import Table, all_tables, csv, findings, is_text, latex, markdown

# --- figures ----------------------------------------------------------------------------------------

Drawn = dict[str, tuple[str, Figure]]  # by file name: caption and figure


def figures(task_name: str, runs: Sequence[Found]) -> Drawn:
    """Of everything that is there. Maps and paths show one seed, and say which."""
    drawn = draw_curves(runs) | draw_points(task_name, runs)
    if runs[0].task.descriptor_size == 2:
        drawn |= draw_maps(runs) | draw_again(runs) | draw_generalization(runs)
    return drawn


def colours_of(runs: Sequence[Found]) -> dict[str, str]:
    """A method, what is chosen from it and its models have one colour."""
    colours = {run.method: run.colour for run in runs}
    colours |= {f"{run.method}, chosen after re-evaluation": run.colour for run in runs}
    return colours | {run.model_name(name): run.colour for run in runs for name in run.training}


def draw_curves(runs: Sequence[Found]) -> Drawn:
    drawn: Drawn = {}
    colours = colours_of(runs)
    search = {
        title: search_curves(runs, name)
        for title, name in (
            ("coverage", "coverage"),
            ("maximum fitness", "max_fitness"),
            ("QD score", "qd_score"),
        )
    }
    if search["coverage"]:
        drawn["search"] = (
            "Search: coverage, maximum fitness and QD score over environment steps; higher is better. "
            "Mean and sample deviation over n seeds (figure 10).",
            plots.curves(search, "environment steps (millions)", colours, unit=1e6),
        )
    unit = runs[0].task.unit
    standing = {
        f"distance to the goals ({unit})": search_curves(runs, "distance"),
        f"spread at the goals ({unit})": search_curves(runs, "spread"),
        "coverage, re-evaluated": search_curves(runs, "coverage_again"),
    }
    if any(standing.values()):
        drawn["budget"] = (
            "Budget: what each search is worth after an eighth, a quarter, half and all of its steps, "
            "re-evaluated; distance and spread: lower is better, coverage: higher. Mean and sample "
            "deviation over n seeds; ours.",
            plots.curves(standing, "environment steps (millions)", colours, unit=1e6),
        )
    distance = f"distance to the goal ({unit})"
    training = {
        distance: training_curves(runs, "distance"),
        "maximum fitness over the goals": training_curves(runs, "max_fitness"),
    }
    if training[distance]:
        taught = {(run.method, run.seed) for run in runs if run.training}
        levels = {}
        for method, results in accuracies(runs, wanted=lambda _: False).items():
            if of_these := [r for seed, r in results.items() if (method, seed) in taught]:
                levels[method] = float(np.mean([r["mean_distance"] for r in of_these]))
        drawn["training"] = (
            "Training: mean distance to the goals, lower is better, and maximum fitness, higher is better. "
            "Mean and sample deviation over n seeds; dashed: the repertoires that they learned from "
            "(figures 5, 14).",
            plots.curves(training, "epoch", colours, {distance: levels}),
        )
    return drawn


def draw_points(task_name: str, runs: Sequence[Found]) -> Drawn:
    """Table 1 as a picture."""
    rows, colours = accuracies(runs), colours_of(runs)
    theirs = paper()["accuracy"].get(task_name, {})

    def points(method: str, results: BySeed, quantity: str) -> plots.Points:
        found = estimate([result[f"mean_{quantity}"] for result in results.values()])
        printed = theirs.get(method, {}).get(quantity)
        return plots.Points(
            found.values,
            found.mean,
            found.low,
            found.high,
            printed[0] if printed else None,
            colours.get(method, "#555555"),
        )

    if not rows:
        return {}
    panels = {
        quantity: {method: points(method, results, quantity) for method, results in rows.items()}
        for quantity in ("distance", "spread")
    }
    caption = (
        "Distance and spread of every seed (points), their mean and its 95 % interval (black), and the "
        "paper's mean (diamond); lower is better (table 1)."
    )
    return {"seeds": (caption, plots.seed_points(panels))}


def draw_maps(runs: Sequence[Found]) -> Drawn:
    task, drawn = runs[0].task, {}
    space = (task.low, task.high, task.axes)
    covered = {}
    for method, results in by_method(runs, "reassess").items():
        sound = {s: r for s, r in results.items() if {"centroids", "fitness"} <= set(r)}
        if sound:
            seed, result = min(sound.items())
            fitness = np.array(result["fitness"], float)
            full = np.isfinite(fitness).mean()
            title = f"{method}, seed {seed}\n{full:.0%} of the cells"
            covered[title] = (result["centroids"], fitness)
    if covered:
        drawn["coverage"] = (
            "Coverage maps: fitness of the policy in each cell, lighter is fitter; grey cells are empty "
            "(figure 11).",
            plots.cell_maps(covered, *space, "fitness"),
        )
    rows = accuracy_rows(runs)
    if rows:
        drawn["accuracy"] = (
            "Accuracy: mean distance to each goal over 10 episodes, lighter is nearer; repertoires above, "
            "what learned from them below (figures 6, 12).",
            plots.map_grid(
                rows,
                *space,
                f"distance to the goal ({task.unit})",
                "low",
                borders=True,
                from_zero=True,
            ),
        )
    return drawn


def accuracy_rows(runs: Sequence[Found]) -> list[list[plots.Panel | None]]:
    """Repertoires in the first row, below each the models that learned from it, each kind in a row.

    All are of the seed of which most is there, as far as they have it. Where the descriptor is a place, the
    first row ends with what a policy is that does not move.
    """
    measured = [run for run in runs if "accuracy" in run.results]
    if not measured:
        return []
    most = Counter(run.seed for run in measured for _ in run.results["accuracy"])
    shown: dict[str, Found] = {}
    for run in sorted(measured, key=lambda run: (-most[run.seed], run.seed)):
        shown.setdefault(run.method, run)
    columns = [shown[method] for method in dict.fromkeys(run.method for run in measured)]

    def panel(run: Found, entry: str, name: str) -> plots.Panel | None:
        result = run.results["accuracy"].get(entry)
        if result is None:
            return None
        title = f"{name}, seed {run.seed}\nmean {result['mean_distance']:.3g}"
        return plots.Panel(title, result["goals"], result["distance"])

    kinds = [
        entry
        for run in columns
        for entry in run.results["accuracy"]
        if entry not in ("repertoire", "chosen") and is_main(entry)
    ]
    rows = [[panel(run, "repertoire", run.method) for run in columns]]
    for kind in dict.fromkeys(kinds):
        rows.append([panel(run, kind, run.model_name(kind)) for run in columns])
    if runs[0].task.is_place:
        goals = np.array(columns[0].results["accuracy"]["repertoire"]["goals"], float)
        far = np.linalg.norm(goals, axis=1)
        still = plots.Panel(f"standing still\nmean {far.mean():.3g}", goals, far, counts=False)
        rows[0].append(still)
    return rows


def draw_again(runs: Sequence[Found]) -> Drawn:
    task, columns, seeds = runs[0].task, {}, set()
    for method, results in by_method(runs, "reproducibility").items():
        seed, result = min(results.items())
        seeds.add(seed)
        columns[method] = plots.Again(
            result["descriptor"],
            result["spread"],
            result["path"] if task.is_place else None,
            result.get("cells"),
            result.get("centroids"),
        )
    if not columns:
        return {}
    caption = (
        "Reproducibility: three policies of each algorithm, 30 episodes each, from new starts (seed "
        f"{' and '.join(map(str, sorted(seeds)))}). Points are where episodes end, grey is the cell that "
        "the policy was kept for; a lower spread is better (figures 3, 8, 9)."
    )
    space = (task.low, task.high, task.axes)
    return {"reproducibility": (caption, plots.reproducibility(columns, *space))}


def draw_generalization(runs: Sequence[Found]) -> Drawn:
    task, drawn = runs[0].task, {}
    names = main_models(runs)
    for method, results in by_method(runs, "generalize").items():
        seed, result = min(results.items())
        drawn[f"generalization-{method.lower()}"] = (
            f"Generalization of {names[method]}, seed {seed}: datasets above, distance to each goal below, "
            "lighter is nearer; every goal is asked for as it is; hatched: what was removed "
            "(figures 7, 13).",
            plots.generalization(
                {how: r["density"] for how, r in result.items()},
                result["all"]["goals"],
                {how: r["distance"] for how, r in result.items()},
                {how: r["removed"] for how, r in result.items() if "removed" in r},
                task.low,
                task.high,
                task.axes,
                f"distance to the goal ({task.unit})",
            ),
        )
    return drawn


# --- the page ---------------------------------------------------------------------------------------


def write_report(found: dict[str, list[Found]], out: Path) -> Path:
    """Writes tables, figures and report.html into `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create {out}: {error.strerror}.") from None
    body = []
    for task, runs in found.items():
        sentences = "".join(f"<p>{html.escape(text)}</p>" for text in findings(task, runs))
        body.append(f"<h2>{html.escape(task)}</h2>{sentences}{_runs_list(runs)}")
        for table in all_tables(task, runs):
            for suffix, write in ((".md", markdown), (".csv", csv), (".tex", latex)):
                with write_safely(out / f"{table.name}{suffix}") as file:
                    file.write(write(table).encode())
            body.append(_html_table(table))
        for name, (caption, figure) in figures(task, runs).items():
            path = out / f"{name}-{task}.png"
            plots.save(figure, path)
            plots.save(figure, path.with_suffix(".pdf"))
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
        steps = (run.metrics or [{}])[-1].get("steps", search["steps"])
        preset = html.escape(run.plan["preset"] or "none")
        items.append(
            f"<li>{run.method}, seed {run.seed}: {steps:,} environment steps, episodes of "
            f"{task['length']}, {search['cells']} cells, preset {preset}</li>"
        )
    return f"<details><summary>{len(runs)} runs</summary><ul>{''.join(items)}</ul></details>"


def _html_table(table: Table) -> str:
    sides = [' class="text"' if text else "" for text in is_text(table)]
    for i, column in enumerate(zip(*table.rows, strict=True)):
        if max(map(len, column)) > 35:  # a sentence may take several lines, a name or a number not
            sides[i] = ' class="sentence"'

    def row(cells: Sequence[str], tag: str) -> str:
        inside = zip(cells, sides, strict=True)
        return "".join(f"<{tag}{side}>{html.escape(cell)}</{tag}>" for cell, side in inside)

    rows = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    note = re.sub("`(.+?)`", r"<code>\1</code>", html.escape(table.note))
    return (
        f"<h3>{html.escape(table.title)}</h3>"
        + (f"<p>{note}</p>" if note else "")
        + f"<table><tr>{row(table.head, 'th')}</tr>{rows}</table>"
    )
