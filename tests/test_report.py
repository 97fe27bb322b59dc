"""The report's tables, from made-up results whose rows are known by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cli
import pgame_ls  # noqa: F401 - registers its rules
from envs import make_task
from machinery import plots
from machinery.files import UserError, read_checksum, save_arrays
from machinery.gather import (
    Found,
    accuracies,
    by_models,
    print_accuracies,
    read_result,
    search_curves,
    training_curves,
    with_results,
)
from machinery.report import accuracy_rows, draw_curves, figures, write_report
from machinery.runs import write_plan
from machinery.statistics import difference_text, estimate, interval_text, mean_text
from machinery.tables import (
    accuracy_table,
    all_tables,
    calibration_table,
    claims_table,
    csv,
    departures,
    elsewhere_table,
    findings,
    generalization_table,
    latex,
    markdown,
    reassessment_table,
    variant_tables,
)
from me_ls import RULES


def found(algo: str, seed: int, preset: str = "tiny", **results: Any) -> Found:
    plan, rule = cli.PLANS.asked(cli.Asked(preset, None, None, algo, seed, {})), RULES[algo]
    task, titles = make_task(plan.task), {"qdt": "QDT", "mlp": "MLP"}
    plans = cli.plain(plan), cli.paper_plan(plan)
    about = plans[0], task, rule.title, rule.colour, titles, plans[1]
    return Found(Path("run"), *about, results)


def write_run(directory: Path, algo: str, seed: int, **changes: dict[str, str]) -> None:
    """The beginning of a run, as far as the report reads it."""
    write_plan(
        directory, cli.plain(cli.PLANS.asked(cli.Asked("tiny", None, None, algo, seed, changes)))
    )


def measured(*distance: float) -> dict[str, Any]:
    mean = sum(distance) / len(distance)
    means = {"mean_distance": mean, "mean_spread": 2 * mean}
    return {"distance": list(distance), "diverged": 0} | means


def test_a_run_that_is_named_twice_is_one_run(tmp_path: Path):
    write_run(tmp_path / "a", "me", seed=0)
    write_run(tmp_path / "b", "me-ls", seed=0)
    (runs,) = cli.found_runs([tmp_path, tmp_path / "a", tmp_path / "b" / ".." / "a"]).values()
    assert [run.method for run in runs] == ["ME", "ME-LS"]


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        ({"seed": 1, "search": {"steps": "9"}}, "search.steps is 500000 there and 9 here"),
        ({"seed": 1, "task": {"length": "9"}}, "task.length is 30 there and 9 here"),
        ({"seed": 0}, "the same seed of ME"),
    ],
)
def test_a_mean_over_seeds_is_of_seeds_alone(tmp_path: Path, other: dict, complaint: str):
    write_run(tmp_path / "a", "me", seed=0)
    write_run(tmp_path / "b", "me", **other)
    with pytest.raises(UserError, match=complaint):
        cli.found_runs([tmp_path])


def train(directory: Path, name: str, train: dict[str, Any], dataset: dict[str, Any]) -> None:
    """The beginning of a training, as far as the report reads it."""
    for stage, config in (("dataset", {"dataset": dataset}), (name, {"train": train})):
        (directory / stage).mkdir()
        (directory / stage / "config.json").write_text(json.dumps({"config": config}))
    (directory / name / "metrics.jsonl").write_text("")


@pytest.mark.parametrize("name", ["qdt", "qdt-wide", "mlp"])
@pytest.mark.parametrize("changed", [({"width": 8}, {"zones": 50}), ({"width": 9}, {"zones": 5})])
def test_a_mean_over_models_is_of_one_recipe(tmp_path: Path, name: str, changed: tuple):
    write_run(tmp_path / "a", "me", seed=0)
    write_run(tmp_path / "b", "me", seed=1, train={"width": "8"})
    train(tmp_path / "a", name, {"width": 9}, {"zones": 50})
    assert cli.found_runs([tmp_path])  # b has no model, so its plan for one does not count
    train(tmp_path / "b", name, *changed)
    with pytest.raises(UserError, match=r"a and .*b do not belong into one table: (train|dataset)"):
        cli.found_runs([tmp_path])


def test_budgets_of_different_methods_may_differ(tmp_path: Path):
    write_run(tmp_path / "a", "me", seed=0)
    write_run(tmp_path / "b", "me-ls", seed=0, search={"steps": "9"}, train={"width": "8"})
    assert len(cli.found_runs([tmp_path])["point-omni"]) == 2


def test_methods_stand_in_the_order_in_which_they_are_registered(tmp_path: Path):
    for seed in (1, 0):
        for algo in reversed(RULES):
            write_run(tmp_path / f"{algo}-{seed}", algo, seed)
    (runs,) = cli.found_runs([tmp_path]).values()
    expected = [(rule.title, seed) for rule in RULES.values() for seed in (0, 1)]
    assert [(run.method, run.seed) for run in runs] == expected


def test_curves_are_averaged_where_all_seeds_have_a_value():
    curves = [{10: 1.0, 20: 2.0, 30: 3.0}, {20: 4.0, 30: 7.0, 40: 9.0}]
    runs = [
        replace(found("me", seed), metrics=[{"steps": x, "coverage": y} for x, y in curve.items()])
        for seed, curve in enumerate(curves)
    ]
    ((steps, values),) = search_curves([*runs, found("me", seed=2)], "coverage").values()
    assert steps.tolist() == [20, 30]
    assert values.tolist() == [[2, 3], [4, 7]]


def test_accuracy_is_mean_deviation_and_interval_over_seeds_beside_the_papers():
    runs = [
        found("me", seed=0, accuracy={"repertoire": measured(0.1, 0.3)}),
        found("me", seed=1, accuracy={"repertoire": measured(0.3, 0.5), "qdt": measured(0.1, 0.2)}),
    ]
    table = accuracy_table("halfcheetah-uni", runs)
    # Two seeds, 0.2 and 0.4: a deviation of 0.2/√2, and 12.7 = t(0.975, 1) times 0.1 around 0.3.
    assert table.rows == [
        ["ME", "2", "0.30 ± 0.14 [−0.97, 1.57]", "0.1633 ± 0.0047", "25 ± 35",
         "0.60 ± 0.28 [−1.94, 3.14]", "0.1545 ± 0.0045"],
        ["QDT(ME)", "1", "0.150", "0.12 ± 0.00", "100", "0.300", "0.13 ± 0.00"],
    ]  # fmt: skip
    assert "lower is better" in table.note and "no farther than 0.2" in table.note


def test_a_caption_says_what_is_not_the_papers_way():
    note = departures([found("me", 0)], "task", "search")
    assert "task.length 30 (250)" in note and "search.hidden 32×32 (256×256)" in note
    assert "search.line_sigma" not in note
    trained = replace(found("me", 0), training={"qdt": []})
    assert "train.width 32 (256)" in departures([trained], "train")
    assert "train.width" not in departures([found("me", 0)], "train")
    paper = replace(trained, plan=trained.paper)
    assert departures([paper], "task", "search", "train") == "Made with the paper's settings."


@pytest.mark.parametrize(
    ("values", "mean", "difference", "interval"),
    [
        ([3.0, 3.2, 3.1], "3.10 ± 0.10", "+3.10", "[2.85, 3.35]"),
        ([529_000.0, 561_000.0], "545,000 ± 23,000", "+545,000", "[342,000, 748,000]"),
        ([0.0698, 0.0697], "0.069750 ± 0.000071", "+0.069750", "[0.069115, 0.070385]"),
        ([0.3 - 0.1, 0.4 - 0.2], "0.200 ± 0", "+0.200", "[0.200, 0.200]"),
        ([18.5, 233.0, 45.0, 243.0, 115.5], "130 ± 100", "+131", "[2, 260]"),  # not [0, 260]
        ([-31.26], "−31.3", "−31.3", "–"),
        ([100.0, 100.0], "100 ± 0", "+100", "[100, 100]"),
        ([], "–", "–", "–"),
        ([1.0, np.nan], "nan ± nan", "+nan", "[nan, nan]"),  # all episodes of a seed diverged
    ],
)
def test_a_mean_has_the_digits_that_its_deviation_bears(
    values: list[float], mean: str, difference: str, interval: str
):
    found = estimate(values)
    assert (mean_text(found), difference_text(found), interval_text(found)) == (
        mean, difference, interval,
    )  # fmt: skip


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=5))
def test_rounding_takes_no_more_than_a_tenth_of_the_deviation(values: list[float]):
    found = estimate(values)
    shown = float(mean_text(found).partition(" ")[0].replace("−", "-").replace(",", ""))
    assert abs(shown - found.mean) <= max(0.1 * found.deviation, 0.005 * abs(found.mean))


def test_goals_that_no_repertoire_reaches_are_told_apart():
    runs = [
        found(
            "me", 0, accuracy={"repertoire": measured(1, 5, 9)}, reassess={"reachable": [1, 0, 0]}
        ),
        found("me", 1, reassess={"reachable": [0, 1, 0]}),
    ]
    table = accuracy_table("point-omni", runs)
    assert table.head[-1] == "distance to the 2 of 3 goals that can be reached"
    assert table.rows == [["ME", "1", "5.00", "–", "0", "10.0", "–", "3.00"]]


def test_episodes_that_diverged_are_told():
    result = {"repertoire": measured(1) | {"diverged": 3}}
    ((name, *_),) = accuracy_table("point-omni", [found("me", 0, accuracy=result)]).rows
    assert name == "ME (3 episodes diverged)"


def test_a_run_that_asked_for_no_goal_yet_prints_no_table(capsys: pytest.CaptureFixture[str]):
    print_accuracies({"point-omni": [found("me", 0)]})
    assert capsys.readouterr().out == ""
    result = {"repertoire": measured(1, 2)}
    print_accuracies({"point-omni": [found("me", 0, accuracy=result)]})
    assert "ME " in capsys.readouterr().out


def test_a_repertoire_after_a_second_look_is_a_row_of_its_own():
    result = {
        "repertoire": measured(2),
        "chosen": measured(1),
        "mlp": measured(4),
        "qdt": measured(3),
    }
    table = accuracy_table("point-omni", [found("me", 0, accuracy=result)])
    assert [(row[0], row[2]) for row in table.rows] == [
        ("ME", "2.00"),
        ("ME, chosen after re-evaluation", "1.00"),
        ("QDT(ME)", "3.00"),
        ("MLP(ME)", "4.00"),
    ]


# --- comparisons ------------------------------------------------------------------------------------


def compared(me: list[float], qdt: list[float]) -> list[Found]:
    """Runs of ME with a distance of the repertoire and one of its QDT, by seed."""
    return [
        found("me", seed, accuracy={"repertoire": measured(a), "qdt": measured(b)})
        for seed, (a, b) in enumerate(zip(me, qdt, strict=True))
    ]


@pytest.mark.parametrize(
    ("qdt", "verdict"),
    [
        ([1.0, 2.0, 3.0], "holds"),  # a unit less in every seed, however much the seeds differ
        ([3.0, 4.0, 5.0], "does not hold"),
        ([1.0, 3.1, 4.0], "not distinguishable"),
    ],
)
def test_methods_are_compared_seed_by_seed(qdt: list[float], verdict: str):
    wobble = [0.0, 0.01, -0.01]
    runs = compared([2.0, 3.0, 4.0], [x + w for x, w in zip(qdt, wobble, strict=True)])
    (row,) = [r for r in claims_table("ant-omni", runs).rows if r[0].startswith("QDT(ME) comes")]
    assert row[1:3] == ["distance", "4.64 against 6.38"] and row[4] == "3" and row[-1] == verdict


def test_one_seed_is_no_evidence_and_says_so():
    """A QDT of seed 0 alone is compared with the repertoire of seed 0, not with the mean of all."""
    runs = [*compared([2.0], [1.0]), found("me", seed=1, accuracy={"repertoire": measured(8.0)})]
    (row,) = claims_table("point-omni", runs).rows
    assert row[2:] == ["–", "1.00 against 2.00", "1", "−1.00", "–", "as claimed, on one seed"]


def test_a_claim_of_being_as_good_fails_only_where_it_is_distinguishably_worse():
    def again(fitness: float) -> dict[str, Any]:
        return {"after": {"max_fitness": fitness, "coverage": 0.5, "qd_score": 1.0}}

    for theirs, verdict in (
        ([9.0, 12.0, 10.0], "not distinguishable"),
        ([5.0, 5.1, 5.0], "does not hold: worse"),
        ([15.0, 15.1, 15.0], "better, even"),
        ([5.0], "one seed does not say"),
    ):
        runs = [found("me", seed, reassess=again(10.0)) for seed in range(3)]
        runs += [found("me-ls", seed, reassess=again(x)) for seed, x in enumerate(theirs)]
        (row,) = [
            row
            for row in claims_table("halfcheetah-uni", runs).rows
            if row[0] == "re-evaluated, the fittest of ME-LS is as fit as that of ME"
        ]
        assert row[1:3] == ["maximum fitness", "730 against 770"] and row[-1] == verdict


def test_the_dashed_level_is_of_the_seeds_that_learned():
    """A repertoire without a model would move the line beside a curve it has no part in."""
    taught, bare = (
        found("me-ls", seed, accuracy={"repertoire": measured(far)})
        for seed, far in ((0, 1.0), (1, 3.0))
    )
    rows = [{"epoch": x, "distance": 0.5, "max_fitness": x} for x in (1, 2)]
    _, figure = draw_curves([replace(taught, training={"qdt": rows}), bare])["training"]
    (level,) = (line for line in figure.axes[0].get_lines() if line.get_linestyle() == "--")
    assert set(np.asarray(level.get_ydata())) == {1.0}


def test_a_run_without_models_does_not_speak_for_those_that_have_some():
    """Its plan may say something else about models."""
    bare, taught = found("me-ls", 1), replace(found("me-ls", 0), training={"qdt": []})
    assert by_models([taught, bare, found("me", 0)])["ME-LS"] is taught


def test_claims_about_repertoires_are_of_the_second_look():
    metrics = lambda x: {"coverage": x, "max_fitness": 10 * x, "qd_score": 100 * x}  # noqa: E731
    runs = [
        found(algo, seed, reassess={"before": metrics(1.0), "after": metrics(share), "spread": 0.1})
        for algo, shares in (("me", (0.40, 0.42)), ("me-ls", (0.50, 0.521)))
        for seed, share in enumerate(shares)
    ]
    row, *others = claims_table("halfcheetah-uni", runs).rows
    assert [other[1] for other in others] == ["QD score", "maximum fitness"]
    assert row[:4] == [
        "re-evaluated, ME-LS covers more than ME",
        "coverage",
        "0.550 against 0.430",
        "0.510 against 0.410",
    ]
    assert row[-1] == "holds"


def test_the_report_begins_with_what_was_found():
    def runs(ls: list[float], qdt: list[float]) -> list[Found]:
        me = [
            found("me", s, accuracy={"repertoire": measured(6.0 + 0.1 * s)}) for s in range(len(ls))
        ]
        return me + [
            found("me-ls", s, accuracy={"repertoire": measured(a), "qdt": measured(b)})
            for s, (a, b) in enumerate(zip(ls, qdt, strict=True))
        ]

    nearer, alike = findings("ant-omni", runs([3.0, 3.2, 3.1], [2.9, 3.3, 3.1]))
    assert nearer.startswith(
        "ME-LS comes nearer to its goals than ME: a mean distance of 3.10 against 6.10"
    )
    assert "3 seeds; the paper: 3.01 against 6.38" in nearer
    assert alike.startswith("QDT(ME-LS) and ME-LS are not distinguishable: a mean distance of 3.10")
    first, second = findings("point-omni", runs([3.0], [4.0]))
    nearer = "On the only seed, ME-LS comes nearer to its goals than ME: a mean distance of "
    assert first == nearer + "3.00 against 6.00."
    farther = "does not come as near to its goals as ME-LS: a mean distance of 4.00 against 3.00."
    assert second.endswith(farther)
    played = [
        found(a, 0, reassess={"after": {"coverage": c}}) for a, c in (("me", 0.5), ("me-ls", 0.6))
    ]
    assert findings("halfcheetah-uni", played) == [
        "On the only seed, ME-LS covers more than ME: "
        "a share of the cells, re-evaluated, of 0.600 against 0.500; the paper: 0.550 against 0.430."
    ]


def test_a_variant_is_compared_with_what_it_differs_from_in_one_thing():
    names = {"qdt": 1.0, "qdt-paper": 4.0, "qdt-paper-tokens": 3.0, "qdt-naive": 2.0}
    runs = [
        found(
            "me-ls",
            seed,
            "laptop",
            accuracy={"repertoire": measured(9.0)}
            | {
                name: measured(x + 0.01 * seed * (name == "qdt-paper")) for name, x in names.items()
            },
        )
        for seed in range(3)
    ]
    tables = {table.name: table for table in variant_tables("halfcheetah-uni", runs)}
    ladder = tables["ladder-halfcheetah-uni"].rows
    assert [row[0] for row in ladder] == [
        "QDT(ME-LS, paper)",
        "QDT(ME-LS, paper-tokens)",
        "QDT(ME-LS)",
    ]
    assert ladder[0][5:] == ["–", "–", "–", "–"]
    assert ladder[1][5:7] == ["QDT(ME-LS, paper)", "−1.010"] and ladder[1][-1] == "nearer"
    # Compared with qdt-paper-typical and qdt-unfiltered, which were not made.
    assert (
        ladder[2][5:]
        == tables["demonstrations-halfcheetah-uni"].rows[1][5:]
        == ["–", "–", "–", "–"]
    )
    assert not tables["conditioning-halfcheetah-uni"].rows
    rows = [row[0] for row in accuracy_table("halfcheetah-uni", runs).rows]
    assert rows == ["ME-LS", "QDT(ME-LS)"]  # variants have tables of their own


def test_a_variant_that_changes_nothing_is_left_out():
    """On Ant-Omni no preset asks for demonstrators that are alike; tiny's recipe is the paper's."""
    results = {"repertoire": measured(9.0), "qdt": measured(1.0), "qdt-paper-alike": measured(2.0)}
    ran = found("me-ls", 0, preset="overnight", accuracy=results)
    ladder = variant_tables("ant-omni", [ran])[0]
    assert [row[0] for row in ladder.rows] == ["QDT(ME-LS, paper-noise)", "QDT(ME-LS)"]
    assert ladder.rows[1][5] == "QDT(ME-LS, paper-noise)"  # the same model, by the name it has here
    results |= {"qdt-paper": measured(3.0), "qdt-paper-bounded": measured(4.0)}
    tiny = variant_tables("point-omni", [found("me-ls", 0, accuracy=results)])
    assert not [row for table in tiny for row in table.rows]


def test_reassessment_shows_both_repertoires_beside_the_papers():
    metrics = lambda x: {"coverage": x, "max_fitness": 10 * x, "qd_score": 100 * x}  # noqa: E731
    result = {"before": metrics(1.0), "after": metrics(0.5), "spread": 0.25}
    (row,) = reassessment_table("halfcheetah-uni", [found("me", 0, reassess=result)]).rows
    assert row[:2] == ["ME", "1"]
    assert row[2:6] == ["100", "100", "50.0", "43"]
    assert row[6:10] == ["10.0", "1,226", "5.00", "770"]
    assert row[10:] == ["100", "3,050,000", "50.0", "1,170,000", "0.250"]


def test_calibration_shows_before_and_after_and_what_it_cost():
    runs = [
        found("me-ls", s, calibrate={"before": measured(b), "after": measured(a), "episodes": 1200})
        for s, b, a in ((0, 4, 2), (1, 6, 2))
    ]
    assert calibration_table("point-omni", runs).rows == [
        ["QDT(ME-LS)", "2", "1,200", "5.0 ± 1.4", "2.00 ± 0", "−3.0", "[−15.7, 9.7]",
         "not distinguishable", "10.0 ± 2.8", "4.00 ± 0"]
    ]  # fmt: skip
    assert not accuracy_table("point-omni", runs).rows  # whose rows had no further episodes


def test_goals_elsewhere_stand_beside_those_of_table_1():
    runs = [
        found("me-ls", s, accuracy={"repertoire": measured(2), "qdt": measured(a)},
              elsewhere={"repertoire": measured(2), "qdt": measured(b)})
        for s, a, b in ((0, 1, 3), (1, 2, 4))
    ]  # fmt: skip
    rows = elsewhere_table("point-omni", runs).rows
    assert [row[:2] for row in rows] == [["ME-LS", "2"], ["QDT(ME-LS)", "2"]]
    assert rows[1][3:6] == ["1.50 ± 0.71", "+2.00", "[2.00, 2.00]"]
    assert len(accuracy_table("point-omni", runs).rows) == 2  # they are not mixed


def test_generalization_counts_trajectories_and_looks_where_nothing_was_shown():
    far, near = measured(3) | {"distance": [1.0, 5.0]}, measured(1) | {"distance": [0.5, 1.5]}
    result = {
        "all": near
        | {"density": [[1000, 1000], [0, 500]], "steps": 900, "emptied": [False, False]},
        "tiles": far | {"density": [[1000, 0], [0, 500]], "emptied": [False, True]},
    }
    assert generalization_table("point-omni", [found("me-ls", 0, generalize=result)]).rows == [
        ["QDT(ME-LS)", "all", "1", "2,500", "900", "1.00", "–", "–", "–", "–", "–", "2.00"],
        [
            "QDT(ME-LS)",
            "tiles",
            "1",
            "1,500",
            "not recorded",
            "3.00",
            "+2.00",
            "–",
            "farther, one seed",
            "5.00",
            "1.50",
            "6.00",
        ],
    ]


def test_qdts_of_pruned_datasets_stay_out_of_the_comparison_of_methods():
    """They belong to the generalization experiment; QDT(Naive) is one of the methods of figure 5."""
    names = ["qdt", "qdt-naive", "qdt-tiles", "qdt-naive-density-50"]
    run = found("me-ls", 0, accuracy={"repertoire": {}} | {name: {} for name in names})
    run = replace(run, training={name: [{"epoch": 1, "distance": 0.5}] for name in names})
    assert set(accuracies([run])) == {"ME-LS", "QDT(ME-LS)"}
    assert set(training_curves([run], "distance")) == {"QDT(ME-LS)", "QDT(ME-LS, naive)"}


def test_a_model_is_called_by_the_title_of_its_kind():
    """Of kinds whose names begin alike, the longest is meant."""
    run = replace(found("me-ls", 0), titles={"qdt": "QDT", "qdt-deep": "Deep", "mlp": "MLP"})
    names = ("qdt", "qdt-naive", "qdt-deep", "qdt-deep-naive", "qdt-deeper", "mlp")
    assert [run.model_name(name) for name in names] == [
        "QDT(ME-LS)",
        "QDT(ME-LS, naive)",
        "Deep(ME-LS)",
        "Deep(ME-LS, naive)",
        "QDT(ME-LS, deeper)",
        "MLP(ME-LS)",
    ]


def test_figures_have_the_axes_and_the_unit_of_the_task_and_the_colour_of_the_method():
    run = found("me-ls", 0, accuracy={"repertoire": measured(1, 2) | {"goals": [[0, 0], [1, 1]]}})
    run = replace(
        run,
        metrics=[{"steps": x, "coverage": 0.5, "max_fitness": x, "qd_score": x} for x in (1, 2)],
        training={"qdt": [{"epoch": x, "distance": 0.5, "max_fitness": x} for x in (1, 2)]},
    )
    drawn = figures("point-omni", [run])
    assert set(drawn) == {"search", "training", "seeds", "accuracy"}
    lines = [line for axes in drawn["search"][1].axes for line in axes.get_lines()]
    assert {line.get_color() for line in lines} == {RULES["me-ls"].colour}
    assert drawn["training"][1].axes[0].get_title() == "distance to the goal (m)"
    panel, still, bar = drawn["accuracy"][1].axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == run.task.axes
    assert (still.get_xlabel(), still.get_ylabel()) == (run.task.axes[0], "")
    assert bar.get_ylabel() == "distance to the goal (m),\nup to the 98th percentile"


def test_a_search_is_drawn_over_its_budget_where_it_was_examined():
    run = found("me-ls", 0)
    rows = [{"steps": x, "coverage": 0.5, "max_fitness": x, "qd_score": x} for x in range(1, 9)]
    examined = {"distance": 1.0, "spread": 0.5, "coverage_again": 0.4, "max_fitness_again": 3.0}
    rows[0] |= examined
    rows[7] |= examined | {"distance": 0.7}
    _, figure = figures("point-omni", [replace(run, metrics=rows)])["budget"]
    (line,) = figure.axes[0].get_lines()
    assert line.get_xydata().tolist() == [[1e-6, 1.0], [8e-6, 0.7]]
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "distance to the goals (m)",
        "spread at the goals (m)",
        "coverage, re-evaluated",
    ]


def test_models_are_drawn_below_what_they_learned_from():
    goals = {"goals": [[3.0, 4.0], [0.0, 0.0]]}
    me = {name: measured(1, 2) | goals for name in ("repertoire", "chosen", "qdt", "qdt-naive")}
    runs = [
        found("me", 0, accuracy=me),
        found("me", 1, accuracy={"repertoire": measured(8, 8) | goals}),
        found(
            "me-ls",
            0,
            accuracy={"repertoire": measured(1, 1) | goals, "mlp": measured(5, 5) | goals},
        ),
    ]
    titles = [[panel and panel.title for panel in row] for row in accuracy_rows(runs)]
    assert titles == [
        ["ME, seed 0\nmean 1.5", "ME-LS, seed 0\nmean 1", "standing still\nmean 2.5"],
        ["QDT(ME), seed 0\nmean 1.5", None],
        [None, "MLP(ME-LS), seed 0\nmean 5"],
    ]


def test_maps_are_of_the_seed_of_which_most_is_there():
    goals = {"goals": [[0, 3], [0, 1]]}
    repertoire = {"repertoire": measured(1, 2) | goals}
    both = repertoire | {"qdt": measured(1, 2) | goals}
    runs = [
        found("me", 0, accuracy=repertoire),
        found("me", 1, accuracy=both),
        found("me-sampling", 2, accuracy=repertoire),
        found("me-ls", 0, accuracy=repertoire),
        found("me-ls", 1, accuracy=repertoire),
    ]
    seeds = [panel.title.split("\n")[0] for row in accuracy_rows(runs) for panel in row if panel]
    assert seeds == [
        "ME, seed 1", "ME-Sampling, seed 2", "ME-LS, seed 1", "standing still", "QDT(ME), seed 1",
    ]  # fmt: skip


def test_the_page_begins_with_the_findings_and_every_table_says_what_better_means(tmp_path: Path):
    result = {"repertoire": measured(1, 2) | {"goals": [[0, 0], [1, 1]]}}
    runs = [found("me", 0, accuracy=result), found("me-ls", 0, accuracy=result)]
    page = write_report({"point-omni": runs}, tmp_path).read_text()
    assert page.index("On the only seed") < page.index("<table")
    assert all("is better" in table.note for table in all_tables("point-omni", runs))
    assert {path.suffix for path in tmp_path.glob("accuracy-*")} == {
        ".png", ".pdf", ".md", ".csv", ".tex",
    }  # fmt: skip


def test_the_same_figure_is_the_same_file_whenever_it_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = [tmp_path / "a.pdf", tmp_path / "b.pdf"]
    for path, second in zip(files, ("0", "1000000000"), strict=True):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", second)
        point = plots.Points((1.0,), 1.0, np.nan, np.nan, None, "#555555")
        plots.save(plots.seed_points({"distance": {"ME": point}}), path)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_table_says_the_same_in_three_formats():
    runs = [found("me", s, accuracy={"repertoire": measured(s + 1)}) for s in range(2)]
    table = accuracy_table("point-omni", runs)._replace(head=list("abcdefg"))
    cells = ["ME", "2", "1.50 ± 0.71 [−4.85, 7.85]", "–", "0 ± 0", "3.0 ± 1.4 [−9.7, 15.7]", "–"]
    assert markdown(table).startswith(
        "**Accuracy on point-omni (table 1).** Mean ± sample deviation"
    )
    assert markdown(table).splitlines()[-1] == "| " + " | ".join(cells) + " |"
    for_programs = [cell.replace("−", "-") for cell in cells]
    assert csv(table).splitlines()[1] == ",".join(f'"{cell}"' for cell in for_programs)
    row = " & ".join(cells).replace("±", r"$\pm$").replace("–", "--").replace("−", "$-$") + r" \\"
    assert row in latex(table).splitlines()


RIGHT = {"repertoire": measured(1, 2) | {"goals": [[0, 0], [1, 1]]}}


@pytest.mark.parametrize(
    "content",
    [
        [],
        RIGHT,
        {"result": []},
        {"result": {}},
        {"result": {"repertoire": {}}},
        {"result": {"repertoire": {"goals": "x"}}},
        {"result": RIGHT | {"qdt": {}}},
    ],
)
def test_a_result_of_somebody_else_is_not_drawn(tmp_path: Path, content: Any):
    (tmp_path / "accuracy.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="not the result of an experiment"):
        read_result(tmp_path / "accuracy.json")


def test_a_result_of_what_was_made_again_since_is_not_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, result = (
        tmp_path / "qdt" / "model.safetensors",
        tmp_path / "evaluation" / "accuracy.json",
    )
    for directory in (model.parent, result.parent):
        directory.mkdir()
    save_arrays(model, {"weight": np.zeros(2)})
    inputs = {"qdt": read_checksum(model), "repertoire": "published without it"}
    result.write_text(json.dumps({"inputs": inputs, "result": RIGHT}))
    assert with_results(replace(found("me", 0), directory=tmp_path)).results == {"accuracy": RIGHT}
    save_arrays(model, {"weight": np.ones(2)})
    assert not with_results(replace(found("me", 0), directory=tmp_path)).results
    assert "accuracy.json is left out: qdt was made again since" in capsys.readouterr().out
