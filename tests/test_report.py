"""The report's tables, from made-up results whose rows are known by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cli
import pgame_ls  # noqa: F401 - registers its rules
from envs import make_task
from machinery.files import UserError
from machinery.report import (
    Found,
    accuracies,
    accuracy_table,
    calibration_table,
    csv,
    figures,
    generalization_table,
    latex,
    markdown,
    ratio_table,
    read_result,
    reassessment_table,
    search_curves,
    training_curves,
)
from machinery.runs import write_plan
from me_ls import RULES


def found(algo: str, seed: int, **results: Any) -> Found:
    plan, rule = cli.PLANS.asked(cli.Asked("tiny", None, None, algo, seed, {})), RULES[algo]
    task, titles = make_task(plan.task), {"qdt": "QDT", "mlp": "MLP"}
    return Found(Path("run"), cli.plain(plan), task, rule.title, rule.colour, titles, results)


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


def test_accuracy_is_mean_and_deviation_over_seeds_beside_the_papers():
    runs = [
        found("me", seed=0, accuracy={"repertoire": measured(0.1, 0.3)}),
        found("me", seed=1, accuracy={"repertoire": measured(0.3, 0.5), "qdt": measured(0.1, 0.2)}),
    ]
    table = accuracy_table("halfcheetah-uni", runs)
    assert "Ours: episodes of 30 steps" in table.note and "the paper: episodes of 250" in table.note
    assert table.rows == [
        ["ME", "2", "0.3 ± 0.1", "0.1633 ± 0.0047", "–", "0.6 ± 0.2", "0.1545 ± 0.0045"],
        ["QDT(ME)", "1", "0.15", "0.12 ± 0", "–", "0.3", "0.13 ± 0"],
    ]


def test_goals_that_no_repertoire_reaches_are_told_apart():
    runs = [
        found(
            "me", 0, accuracy={"repertoire": measured(1, 5, 9)}, reassess={"reachable": [1, 0, 0]}
        ),
        found("me", 1, reassess={"reachable": [0, 1, 0]}),
    ]
    table = accuracy_table("point-omni", runs)
    assert table.head[4] == "distance, reachable goals (2 of 3)"
    assert table.rows == [["ME", "1", "5", "–", "3", "10", "–"]]


def test_episodes_that_diverged_are_told():
    result = {"repertoire": measured(1) | {"diverged": 3}}
    ((name, *_),) = accuracy_table("point-omni", [found("me", 0, accuracy=result)]).rows
    assert name == "ME (3 episodes diverged)"


def test_ratios_compare_the_same_seeds():
    """A QDT of seed 0 alone is compared with the repertoire of seed 0, not with the mean of all."""
    runs = [
        found("me", seed=0, accuracy={"repertoire": measured(2), "qdt": measured(1)}),
        found("me", seed=1, accuracy={"repertoire": measured(8)}),
    ]
    assert ratio_table("point-omni", runs).rows == [["QDT(ME) / ME", "0.50", "–", "0.50", "–"]]
    assert ratio_table("ant-omni", runs).rows == [["QDT(ME) / ME", "0.50", "0.73", "0.50", "1.24"]]


def test_reassessment_shows_both_repertoires_beside_the_papers():
    metrics = lambda x: {"coverage": x, "max_fitness": 10 * x, "qd_score": 100 * x}  # noqa: E731
    result = {"before": metrics(1.0), "after": metrics(0.5), "spread": 0.25}
    (row,) = reassessment_table("halfcheetah-uni", [found("me", 0, reassess=result)]).rows
    assert row[:2] == ["ME", "1"]
    assert row[2:6] == ["100", "100", "50", "43"]
    assert row[6:10] == ["10", "1226", "5", "770"]
    assert row[10:] == ["100", "3.05e+06", "50", "1.17e+06", "0.25"]


def test_calibration_shows_before_and_after_and_what_it_cost():
    runs = [
        found("me-ls", s, calibrate={"before": measured(b), "after": measured(a), "episodes": 1200})
        for s, b, a in ((0, 4, 2), (1, 6, 2))
    ]
    assert calibration_table("point-omni", runs).rows == [
        ["QDT(ME-LS)", "2", "1,200", "5 ± 1", "2 ± 0", "10 ± 2", "4 ± 0"]
    ]


def test_generalization_counts_the_trajectories_of_each_dataset():
    result = {
        "all": measured(1) | {"density": [[1000, 1000], [0, 500]]},
        "tiles": measured(3) | {"density": [[1000, 0], [0, 500]]},
    }
    assert generalization_table("point-omni", [found("me-ls", 0, generalize=result)]).rows == [
        ["QDT(ME-LS)", "all", "1", "2,500", "1", "2"],
        ["QDT(ME-LS)", "tiles", "1", "1,500", "3", "6"],
    ]


def test_qdts_of_pruned_datasets_stay_out_of_the_comparison_of_methods():
    """They belong to the generalization experiment; QDT(Naive) is one of the methods of figure 5."""
    names = ["qdt", "qdt-naive", "qdt-tiles", "qdt-naive-density-50"]
    run = found("me-ls", 0, accuracy={"repertoire": {}} | {name: {} for name in names})
    run = replace(run, training={name: [{"epoch": 1, "distance": 0.5}] for name in names})
    assert set(accuracies([run])) == {"ME-LS", "QDT(ME-LS)", "QDT(ME-LS, naive)"}
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
    assert set(drawn) == {"search", "training", "accuracy"}
    lines = [line for axes in drawn["search"][1].axes for line in axes.get_lines()]
    assert {line.get_color() for line in lines} == {RULES["me-ls"].colour}
    assert drawn["training"][1].axes[0].get_title() == "distance to the goal (m)"
    panel, bar = drawn["accuracy"][1].axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == run.task.axes
    assert bar.get_ylabel() == "distance to the goal (m)"


def test_a_table_says_the_same_in_three_formats():
    runs = [found("me", s, accuracy={"repertoire": measured(s + 1)}) for s in range(2)]
    table = accuracy_table("point-omni", runs)._replace(head=list("abcdefg"))
    assert markdown(table).startswith("**Accuracy on point-omni (table 1)**")
    assert markdown(table).splitlines()[-1] == "| ME | 2 | 1.5 ± 0.5 | – | – | 3 ± 1 | – |"
    assert csv(table).splitlines()[1] == '"ME","2","1.5 ± 0.5","–","–","3 ± 1","–"'
    assert r"ME & 2 & 1.5 $\pm$ 0.5 & -- & -- & 3 $\pm$ 1 & -- \\" in latex(table).splitlines()


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


def test_a_result_is_read_from_beside_what_it_was_made_with(tmp_path: Path):
    (tmp_path / "accuracy.json").write_text(json.dumps({"inputs": {}, "result": RIGHT}))
    assert read_result(tmp_path / "accuracy.json") == RIGHT
