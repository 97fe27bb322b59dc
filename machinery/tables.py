"""The report's tables, beside the paper's numbers, and the sentences with which the report begins.

Every number over seeds is a mean with its sample deviation, and where there are several seeds a 95 %
interval; differences are paired by seed. Captions say what better means, and in what the rows depart from
the paper. Tables and figures have the paper's numbers, counted from its teaser, figure 1.
Reads in this order: captions, tables in the report's order, findings, formats.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from machinery.gather import (
    BySeed,
    Found,
    accuracies,
    by_method,
    by_models,
    is_pruned,
    main_model,
    main_models,
    paper,
    reachable_goals,
)
from machinery.reproduction import OWN, model_like, recipes, tables
from machinery.statistics import (
    Estimate,
    difference_text,
    estimate,
    interval_text,
    mean_text,
    paired,
    significant,
    verdict,
)


class Table(NamedTuple):
    name: str
    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


# --- captions ---------------------------------------------------------------------------------------

SEEDS = (
    "Mean ± sample deviation over seeds; in brackets the 95 % interval of the mean (Student's t)."
)
PAIRED = (
    "Differences are paired by seed, with their 95 % interval (Student's t), each by itself; "
    "where it contains zero, the two are not distinguishable."
)
LOWER = "Distance and spread: lower is better."


def departures(runs: Sequence[Found], *sections: str) -> str:
    """The settings that are not the paper's, with those of the `paper` preset in brackets."""
    found: dict[str, tuple[set[str], str]] = {}
    for run in runs:
        for section in filter(run.is_made, sections):
            theirs = run.paper[section]
            for name, value in run.plan[section].items():
                if name in theirs and value != theirs[name]:
                    ours, _ = found.setdefault(f"{section}.{name}", (set(), _setting(theirs[name])))
                    ours.add(_setting(value))
    if not found:
        return "Made with the paper's settings."
    listed = (
        f"{name} {' or '.join(sorted(ours))} ({theirs})" for name, (ours, theirs) in found.items()
    )
    return (
        "Settings that are not the `paper` preset's, whose own are in brackets (the paper's, or ours where "
        f"it names none): {', '.join(listed)}."
    )


def _setting(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, list):
        return "×".join(map(_setting, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _column(results: BySeed, name: str, scale: float = 1.0) -> dict[int, float]:
    return {seed: scale * result[name] for seed, result in results.items()}


def _estimate(results: BySeed, name: str, scale: float = 1.0) -> Estimate:
    return estimate(list(_column(results, name, scale).values()))


def _with_interval(found: Estimate) -> str:
    return (
        f"{mean_text(found)} {interval_text(found)}" if len(found.values) > 1 else mean_text(found)
    )


def _printed_pair(pair: Sequence[float] | None) -> str:
    """The paper's mean and deviation, with the digits that it prints."""
    if not pair:
        return "–"
    decimals = max(2, *(len(str(x).partition(".")[2]) for x in pair))
    return " ± ".join(f"{x:.{decimals}f}" for x in pair)


# --- table 1 ----------------------------------------------------------------------------------------


def accuracy_table(task: str, runs: Sequence[Found]) -> Table:
    rows, mask, good = [], reachable_goals(runs), runs[0].task.good_distance
    some = mask is not None and not mask.all()
    for method, results in accuracies(runs).items():
        theirs = paper()["accuracy"].get(task, {}).get(method, {})
        goals = {s: np.array(r["distance"], float) for s, r in results.items()}
        near = estimate([100 * float(np.mean(d <= good)) for d in goals.values()])
        diverged = sum(r["diverged"] for r in results.values())
        row = [
            method + (f" ({diverged} episodes diverged)" if diverged else ""),
            str(len(results)),
            _with_interval(_estimate(results, "mean_distance")),
            _printed_pair(theirs.get("distance")),
            mean_text(near),
            _with_interval(_estimate(results, "mean_spread")),
            _printed_pair(theirs.get("spread")),
        ]
        if some:
            row.append(mean_text(estimate([float(np.nanmean(d[mask])) for d in goals.values()])))
        rows.append(row)
    head = ["method", "seeds", "distance", "paper", "% of goals reached", "spread", "paper"]
    explained = ""
    if mask is not None and some:
        head.append(f"distance to the {int(mask.sum())} of {len(mask)} goals that can be reached")
        explained = (
            "A goal can be reached if an episode of one of these repertoires, re-evaluated, ended in its "
            "zone. "
        )
    return Table(
        f"accuracy-{task}",
        f"Accuracy on {task} (table 1)",
        head,
        rows,
        f"{SEEDS} {LOWER} A goal counts as reached if its ten episodes end, on average, no "
        f"farther than {good:.3g} from it, a distance that the paper calls good; higher is better. "
        "“Chosen after re-evaluation”: all policies of a repertoire play ten more episodes, and the one "
        f"that ends nearest is taken for each goal. {explained}"
        + departures(runs, "task", "search", "dataset", "train"),
    )


# --- goals elsewhere --------------------------------------------------------------------------------


def elsewhere_table(task: str, runs: Sequence[Found]) -> Table:
    rows, here = [], accuracies(runs)
    for method, results in accuracies(runs, experiment="elsewhere").items():
        both = {seed: r for seed, r in here.get(method, {}).items() if seed in results}
        difference = paired(_column(results, "mean_distance"), _column(both, "mean_distance"))
        rows.append(
            [
                method,
                str(len(results)),
                _with_interval(_estimate(results, "mean_distance")),
                mean_text(_estimate(both, "mean_distance")) if both else "–",
                difference_text(difference),
                interval_text(difference),
                _with_interval(_estimate(results, "mean_spread")),
            ]
        )
    head = ["method", "seeds", "distance", "to the goals of table 1", "difference", "95 % interval"]
    return Table(
        f"elsewhere-{task}",
        f"Accuracy elsewhere on {task}: goals for which no demonstrator was selected; ours",
        [*head, "spread"],
        rows,
        "Unless a dataset has zones of its own (`dataset.zones`), the goals of table 1 are the middles of "
        "its zones, as we read the paper: somebody was selected to demonstrate each. Here are as many "
        "goals of another tessellation, most of them between those. "
        f"{SEEDS} {LOWER} {PAIRED}",
    )


# --- claims -----------------------------------------------------------------------------------------

LOWER_IS_BETTER = {"distance": True, "spread": True} | dict.fromkeys(
    ("coverage", "max_fitness", "qd_score"), False
)
NAMES = {"max_fitness": "maximum fitness", "qd_score": "QD score"}


def values_of(runs: Sequence[Found], method: str, quantity: str) -> dict[int, float]:
    """By seed: distance and spread on the goals, or what a re-evaluated repertoire has."""
    if quantity in ("distance", "spread"):
        rows = accuracies(runs, wanted=lambda directory: not is_pruned(directory))
        return _column(rows.get(method, {}), f"mean_{quantity}")
    again = by_method(runs, "reassess").get(method, {})
    return {seed: result["after"][quantity] for seed, result in again.items()}


def printed(task: str, method: str, quantity: str) -> float | None:
    """What the paper's tables 1 and 5 say."""
    if quantity in ("distance", "spread"):
        pair = paper()["accuracy"].get(task, {}).get(method, {}).get(quantity)
        return pair[0] if pair else None
    found = paper()["reassessment"].get(task, {}).get(method)
    return found[quantity][1] / (100 if quantity == "coverage" else 1) if found else None


def made_as(name: str, runs: Sequence[Found]) -> str:
    """The model with the settings of this one that is made: with some plans a variant changes nothing."""
    for run in by_models(runs).values():
        for directory in recipes():
            if run.model_name(directory) == name:
                like = model_like(directory, run.plan)
                return main_model(run) if like == OWN else run.model_name(like)
    return name


def claims_table(task: str, runs: Sequence[Found]) -> Table:
    rows = []
    for entry in (*paper()["claims"], *paper()["questions"]):
        names = [made_as(entry[who], runs) for who in ("one", "other")]
        one, other = (values_of(runs, name, entry["of"]) for name in names)
        difference = paired(one, other)
        if not difference.values:
            continue
        theirs = [printed(task, entry[who], entry["of"]) for who in ("one", "other")]
        common = sorted(one.keys() & other.keys())
        means = [float(np.mean([x[seed] for seed in common])) for x in (one, other)]
        rows.append(
            [
                entry["claim"],
                NAMES.get(entry["of"], entry["of"]),
                _against(theirs) if None not in theirs else "–",
                _against(means),
                str(len(common)),
                difference_text(difference),
                interval_text(difference),
                judge(difference, LOWER_IS_BETTER[entry["of"]], entry.get("alike", False)),
            ]
        )
    head = ["claim", "in", "paper", "ours", "seeds", "difference", "95 % interval", "verdict"]
    return Table(
        f"claims-{task}",
        f"The paper's claims, and questions of ours, on {task}",
        head,
        rows,
        f"{PAIRED} Of distance and spread lower is better, of coverage, maximum fitness and QD score "
        "(re-evaluated) higher. “Holds” and “does not hold” are said only where the interval excludes "
        "zero; of a claim to be as good, that it is not worse.",
    )


def _against(pair: Sequence[float | None]) -> str:
    return " against ".join(significant(x) for x in pair if x is not None)


def judge(difference: Estimate, lower_is_better: bool, alike: bool = False) -> str:
    """Whether it is as claimed, of one that is said to be better than the other, or as good."""
    as_claimed = (difference.mean < 0) == lower_is_better
    if alike:
        if len(difference.values) == 1:
            return "one seed does not say"
        better_or_worse = "better, even" if as_claimed else "does not hold: worse"
        return better_or_worse if difference.is_distinct else "not distinguishable"
    if len(difference.values) == 1:
        return "as claimed, on one seed" if as_claimed else "not as claimed, on one seed"
    if not difference.is_distinct:
        return "not distinguishable"
    return "holds" if as_claimed else "does not hold"


# --- variants ---------------------------------------------------------------------------------------


def variant_tables(task: str, runs: Sequence[Found]) -> list[Table]:
    """One change at a time, each row beside the one that it is compared with.

    What changes nothing with the settings of these runs is left out.
    """
    everything = accuracies(runs, wanted=lambda directory: not is_pruned(directory))
    made = []
    for name, table in tables().items():
        rows = []
        for run in by_models(runs).values():
            like = {row.model: model_like(row.model, run.plan) for row in table.rows}
            name_of = lambda model, run=run: run.model_name(  # noqa: E731
                run.plan["train"]["model"] if model == OWN else model
            )
            results = {
                row.model: everything.get(name_of(like[row.model]), {}) for row in table.rows
            }
            if not any(results[row.model] for row in table.rows if like[row.model] != OWN):
                continue
            called: dict[str, str] = {}  # what is made once has the name of its first row
            for row in table.rows:
                if not results[row.model] or (row.against and like[row.model] == like[row.against]):
                    continue
                distance = _column(results[row.model], "mean_distance")
                base = _column(results.get(row.against or "", {}), "mean_distance")
                difference = paired(distance, base)
                called.setdefault(like[row.model], name_of(row.model))
                rows.append(
                    [
                        name_of(row.model),
                        row.about,
                        str(len(distance)),
                        _with_interval(estimate(list(distance.values()))),
                        mean_text(_estimate(results[row.model], "mean_spread")),
                        called[like[row.against]] if row.against and base else "–",
                        difference_text(difference),
                        interval_text(difference),
                        verdict(difference, "nearer", "farther"),
                    ]
                )
        head = ["model", "what is different", "seeds", "distance", "spread"]
        head += ["compared with", "difference", "95 % interval", "verdict"]
        note = f"{SEEDS} {LOWER} {PAIRED}"
        made.append(Table(f"{name}-{task}", f"{table.title}, on {task}", head, rows, note))
    return made


# --- calibration ------------------------------------------------------------------------------------


def calibration_table(task: str, runs: Sequence[Found]) -> Table:
    rows, names = [], main_models(runs)
    for method, results in by_method(runs, "calibrate").items():
        before, after = ({s: r[when] for s, r in results.items()} for when in ("before", "after"))
        difference = paired(_column(after, "mean_distance"), _column(before, "mean_distance"))
        rows.append(
            [
                names[method],
                str(len(results)),
                f"{_estimate(results, 'episodes').mean:,.0f}",
                *(mean_text(_estimate(x, "mean_distance")) for x in (before, after)),
                difference_text(difference),
                interval_text(difference),
                verdict(difference, "nearer", "farther"),
                *(mean_text(_estimate(x, "mean_spread")) for x in (before, after)),
            ]
        )
    head = ["method", "seeds", "episodes", "distance", "calibrated", "difference", "95 % interval"]
    return Table(
        f"calibration-{task}",
        f"Calibration on {task}: which target to ask for, searched for each goal; ours",
        [*head, "verdict", "spread", "calibrated"],
        rows,
        f"On the episodes of table 1. {SEEDS} {LOWER} {PAIRED} No other row searches for "
        "targets; a second look (table 1) has ten further episodes of every policy.",
    )


# --- table 5 ----------------------------------------------------------------------------------------


def reassessment_table(task: str, runs: Sequence[Found]) -> Table:
    rows = []
    for method, results in by_method(runs, "reassess").items():
        row = [method, str(len(results))]
        theirs = paper()["reassessment"].get(task, {}).get(method)
        for name, scale in (("coverage", 100.0), ("max_fitness", 1.0), ("qd_score", 1.0)):
            for j, when in enumerate(("before", "after")):
                of_time = {seed: result[when] for seed, result in results.items()}
                row.append(mean_text(_estimate(of_time, name, scale)))
                row.append(f"{theirs[name][j]:,.0f}" if theirs else "–")
        rows.append([*row, mean_text(_estimate(results, "spread"))])
    head = ["method", "seeds"]
    for name in ("coverage %", "max fitness", "QD score"):
        head += [f"{name}, initial", "paper", f"{name}, re-evaluated", "paper"]
    return Table(
        f"reassessment-{task}",
        f"Reassessment on {task} (table 5)",
        [*head, "spread, re-evaluated"],
        rows,
        "Mean ± sample deviation over seeds. Coverage, fitness and QD score: higher is better, and what "
        "re-evaluation leaves of them counts; spread: lower is better. The offset of "
        "the QD score is ours. " + departures(runs, "task", "search"),
    )


# --- figures 7 and 13 -------------------------------------------------------------------------------


def generalization_table(task: str, runs: Sequence[Found]) -> Table:
    rows, names = [], main_models(runs)
    for method, seeds in by_method(runs, "generalize").items():
        everything = {s: r["all"] for s, r in seeds.items()}
        whole = _column(everything, "mean_distance")
        for how in next(iter(seeds.values())):
            results = {s: r[how] for s, r in seeds.items() if how in r}
            shown = np.mean([np.sum(r["density"]) for r in results.values()])
            timed = all("steps" in r for r in results.values())
            difference = paired(_column(results, "mean_distance"), whole if how != "all" else {})
            rows.append(
                [
                    names[method],
                    how,
                    str(len(results)),
                    f"{shown:,.0f}",
                    f"{_estimate(results, 'steps').mean:,.0f}" if timed else "not recorded",
                    _with_interval(_estimate(results, "mean_distance")),
                    difference_text(difference),
                    interval_text(difference),
                    verdict(difference, "nearer", "farther"),
                    *(mean_text(_where_emptied(results, x)) for x in (results, everything)),
                    mean_text(_estimate(results, "mean_spread")),
                ]
            )
    head = ["method", "dataset", "seeds", "trajectories", "optimiser steps"]
    head += ["distance", "difference from all", "95 % interval", "verdict"]
    return Table(
        f"generalization-{task}",
        f"Generalization on {task} (figures 7, 13)",
        [*head, "distance where nothing was shown", "all's there", "spread"],
        rows,
        "density: this share of the trajectories in per cent, at random; tiles: every other tile of a "
        "4 × 4 chequerboard is left out; upper: the half with the larger last coordinate is left out. "
        "Every model learns for as many steps, by the run's own recipe, which also chooses its best epoch "
        "on all goals; then it is asked for every goal as it is, even where the recipe would stay within "
        "what was shown. "
        f"{SEEDS} {LOWER} {PAIRED}",
    )


def _where_emptied(pruned: BySeed, measured: BySeed) -> Estimate:
    """Mean distance at the goals where a pruning left nothing, if there are any."""
    means = []
    for seed, result in pruned.items():
        empty, far = np.array(result["emptied"], bool), np.array(measured[seed]["distance"], float)
        if empty.shape == far.shape and empty.any():
            means.append(float(np.nanmean(far[empty])))
    return estimate(means)


def all_tables(task: str, runs: Sequence[Found]) -> list[Table]:
    """Those that have rows, in the report's order."""
    makers: tuple[Callable[[str, Sequence[Found]], Table], ...]
    makers = accuracy_table, elsewhere_table, claims_table
    more = calibration_table, reassessment_table, generalization_table
    made = [make(task, runs) for make in makers] + variant_tables(task, runs)
    return [table for table in [*made, *(make(task, runs) for make in more)] if table.rows]


# --- findings ---------------------------------------------------------------------------------------


# By quantity: what a method does that is better than another, what if it is not, and what the numbers are.
WORDS = {
    "distance": (
        "comes nearer to its goals than",
        "does not come as near to its goals as",
        "a mean distance",
    ),
    "coverage": (
        "covers more than",
        "does not cover as much as",
        "a share of the cells, re-evaluated,",
    ),
}


def findings(task: str, runs: Sequence[Found]) -> list[str]:
    """What was found, in up to three sentences."""
    said = []
    for one, other, quantity in paper()["findings"]:
        a, b = (values_of(runs, method, quantity) for method in (one, other))
        difference = paired(a, b)
        if difference.values:
            common = sorted(a.keys() & b.keys())
            means = [float(np.mean([x[seed] for seed in common])) for x in (a, b)]
            theirs = [printed(task, method, quantity) for method in (one, other)]
            said.append(_sentence(one, other, quantity, means, difference, theirs))
    return said[:3]


def _sentence(
    one: str,
    other: str,
    quantity: str,
    means: Sequence[float],
    difference: Estimate,
    theirs: Sequence[float | None],
) -> str:
    count = len(difference.values)
    better, not_better, name = WORDS[quantity]
    does = better if (difference.mean < 0) == LOWER_IS_BETTER[quantity] else not_better
    paper_too = f"; the paper: {_against(theirs)}" if None not in theirs else ""
    numbers = f"{name} of {_against(means)}"
    if count == 1:
        return f"On the only seed, {one} {does} {other}: {numbers}{paper_too}."
    interval = f"95 % interval of the difference {interval_text(difference, '+')}"
    basis = f"{numbers} ({interval}, {count} seeds{paper_too})"
    if not difference.is_distinct:
        return f"{one} and {other} are not distinguishable: {basis}."
    return f"{one} {does} {other}: {basis}."


# --- formats ----------------------------------------------------------------------------------------


def is_text(table: Table) -> list[bool]:
    """By column: whether it holds words, which begin on the left, or numbers, which end on the right."""
    columns = zip(*table.rows, strict=True)
    return [any(cell[:1].isalpha() for cell in column) for column in columns]


def markdown(table: Table) -> str:
    sides = ["---" if text else "---:" for text in is_text(table)]
    title = f"**{table.title}.** {table.note}".strip()
    lines = [table.head, sides, *table.rows]
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def csv(table: Table) -> str:
    """For programs: a minus is the keyboard's."""
    quote = lambda cell: '"' + cell.replace('"', '""').replace("−", "-") + '"'  # noqa: E731
    return "\n".join(",".join(map(quote, row)) for row in (table.head, *table.rows)) + "\n"


def latex(table: Table) -> str:
    symbols = str.maketrans({"%": r"\%", "±": r"$\pm$", "−": "$-$", "–": "--"})
    rows = [
        " & ".join(cell.translate(symbols) for cell in row) + r" \\"
        for row in (table.head, *table.rows)
    ]
    sides = "".join("l" if text else "r" for text in is_text(table))
    body = [rf"\begin{{tabular}}{{{sides}}}", r"\toprule", rows[0], r"\midrule", *rows[1:]]
    title = f"% {table.title}. {table.note}".strip()
    return "\n".join([title, *body, r"\bottomrule", r"\end{tabular}"]) + "\n"
