"""The command line as its user sees it: commands, plans, resuming, and one sentence for mistakes.

Everything here runs on `point-omni`, through the code paths of every other task. One small run is made for
all tests; a test that changes something works on a copy.
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cli
import dataset
import envs
import me_ls
import pgame_ls  # noqa: F401 - registers its rules
import qdt
from machinery import config, driver, machine, runs
from machinery.files import UserError, read_checksum, read_json, save_arrays

ROOT = Path(__file__).parents[1]
SMALL = [
    "search.steps=150000", "dataset.trajectories=384", "train.epochs=2", "train.evaluate_every=1",
    "train.goal_episodes=2", "train.learning_rate=3e-3", "train.layers=1", "train.width=16",
]  # fmt: skip


def command(*arguments: object) -> int:
    """`qdt` with these arguments, in this process; returns the exit code."""
    words = ["qdt", *map(str, arguments)]
    with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def settings(changes: list[str]) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


@pytest.fixture(autouse=True)
def own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command sets for the machine ends with its test."""
    monkeypatch.setattr(machine, "_current", machine.Machine())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `qdt run` makes: ME and ME-LS with dataset, QDT, experiments, and the report."""
    out = tmp_path_factory.mktemp("runs")
    assert command("run", "--preset", "tiny", *settings(SMALL), "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def run(both: Path) -> Path:
    return both / "me-ls"


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Callable[..., Path]:
    """A run with the same plan and some of the stages."""

    def make(*stages: str, name: str = "copy") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        shutil.copy(run / runs.PLAN, directory)
        for stage in stages:
            (directory / stage).symlink_to(run / stage)
        return directory

    return make


def plan_of(directory: Path) -> dict[str, Any]:
    return runs.read_plan(directory)


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one sentence with which a command is refused."""

    def refused(*arguments: object) -> str:
        capsys.readouterr()
        assert command(*arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("qdt: ") and error.count("\n") == 1, error
        return error

    return refused


# --- the whole pipeline ---------------------------------------------------------------------------


def test_later_commands_read_what_the_first_one_planned(
    both: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`qdt run --set train.width=16`, then `qdt train` and `qdt evaluate` without a word of it."""
    for directory in (both / "me", run):
        plan = plan_of(directory)
        assert (plan["preset"], plan["train"]["width"], plan["search"]["steps"]) == (
            "tiny",
            16,
            150_000,
        )
    assert command("train", run) == 0
    assert "the training" in capsys.readouterr().out
    assert cli.open_run(run).model().head.weight.shape[0] == 16
    before = read_json(run / "evaluation" / "accuracy.json")
    assert command("evaluate", "accuracy", run) == 0
    after = read_json(run / "evaluation" / "accuracy.json")
    assert after["inputs"] == before["inputs"]
    for name in ("repertoire", "qdt"):
        np.testing.assert_allclose(
            after["result"][name]["distance"], before["result"][name]["distance"], rtol=1e-4
        )


@pytest.mark.parametrize("algo", ["me", "me-ls"])
def test_a_search_logs_what_it_is_worth_by_parts_of_its_budget(both: Path, algo: str) -> None:
    rows = runs.read_metrics(both / algo / "search" / "metrics.jsonl")
    examined = [row for row in rows if "distance" in row]
    total = len(rows)
    wanted = {total // 8, total // 4, total // 2, total} - {0}
    assert [row["iteration"] + 1 for row in examined] == sorted(wanted)
    asked, again = (
        read_json(both / algo / "evaluation" / f"{name}.json")["result"]
        for name in ("accuracy", "reassess")
    )
    last = examined[-1]
    assert last["distance"] == asked["repertoire"]["mean_distance"]
    assert last["spread"] == asked["repertoire"]["mean_spread"]
    assert last["coverage_again"] == again["after"]["coverage"]
    assert last["max_fitness_again"] == again["after"]["max_fitness"]


def test_the_same_command_again_does_nothing_again(both: Path) -> None:
    made = [p for p in both.glob("*/*/*") if p.suffix in (".safetensors", ".json", ".npy")]
    before = {path: path.stat().st_mtime_ns for path in made}
    assert len([path for path in made if path.parent.name == "evaluation"]) == 8
    assert command("run", "--preset", "tiny", *settings(SMALL), "--out", both) == 0
    assert command("search", "--out", both / "me-ls") == 0
    assert {path: path.stat().st_mtime_ns for path in made} == before


def test_the_qdt_follows_its_targets_better_than_chance(run: Path) -> None:
    result = read_json(run / "evaluation" / "accuracy.json")["result"]
    task = cli.open_run(run).task
    width = task.high[0] - task.low[0]
    goals = np.array(result["qdt"]["goals"])
    chance = np.linalg.norm(goals[:, None] - goals[None], axis=-1).mean()
    assert result["qdt"]["mean_distance"] < 0.6 * chance < width
    assert result["repertoire"]["mean_distance"] < 0.6 * chance


def test_a_report_is_one_page_without_the_network(both: Path) -> None:
    page = (both / "report" / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/png;base64,") >= 4
    table = (both / "report" / "accuracy-point-omni.md").read_text()
    assert "QDT(ME-LS)" in table and "| ME-LS |" in table and "| ME |" in table
    assert (both / "report" / "coverage-point-omni.png").exists()


def test_a_written_plan_gives_the_very_same_files(run: Path, tmp_path: Path) -> None:
    """`--config` is the preset and all settings in one file; the seed is part of it."""
    again = tmp_path / "again"
    assert command("search", "--config", run / runs.PLAN, "--out", again) == 0
    assert command("dataset", again) == 0
    assert command("train", again) == 0
    assert plan_of(again) == plan_of(run)
    for file in ("search/repertoire.safetensors", "qdt/model.safetensors"):
        assert read_checksum(again / file) == read_checksum(run / file)
        assert (again / file).read_bytes() == (run / file).read_bytes()
    for path in sorted((run / "dataset").glob("*.[nj]*")):
        assert (again / "dataset" / path.name).read_bytes() == path.read_bytes()


def test_a_plan_may_be_begun_with_another_seed(run: Path) -> None:
    plan = cli.PLANS.asked(
        cli.Asked(None, run / runs.PLAN, None, "me", 7, {"train": {"width": "8"}})
    )
    assert (plan.seed, plan.search.algo, plan.train.width) == (7, "me", 8)
    assert replace(plan.search, algo="me-ls") == cli.open_run(run).plan.search


# --- plans ----------------------------------------------------------------------------------------


def test_a_setting_for_a_stage_that_has_not_begun_is_written_into_the_plan(
    copy: Callable[..., Path], complaint: Callable[..., str]
) -> None:
    """For one that has begun it is refused with the difference; a named variant has its own."""
    directory = copy("search", "dataset")
    quick = settings(["train.epochs=1"])
    assert command("train", directory, "--set", "train.width=8", *quick) == 0
    assert (plan_of(directory)["train"]["width"], plan_of(directory)["train"]["epochs"]) == (8, 1)
    planned = (directory / runs.PLAN).read_bytes()

    error = complaint("train", directory, "--set", "train.width=32")
    assert "train.width is 8 there and 32 here" in error
    assert command("train", directory, "--name", "wide", "--set", "train.width=32") == 0
    assert (directory / runs.PLAN).read_bytes() == planned

    opened = cli.open_run(directory)
    assert list(opened.model_paths()) == ["qdt", "qdt-wide"]
    widths = {name: opened.model(name).head.weight.shape[0] for name in opened.model_paths()}
    assert widths == {"qdt": 8, "qdt-wide": 32}
    assert command("evaluate", "accuracy", directory) == 0
    result = read_json(directory / "evaluation" / "accuracy.json")["result"]
    assert list(result) == ["repertoire", "chosen", "qdt", "qdt-wide"]


def test_another_plan_on_the_same_run_is_refused_with_the_difference(
    run: Path, complaint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(envs.TASKS, "other", envs.PointOmni)
    planned = (run / runs.PLAN).read_bytes()
    difference = {
        ("--set", "search.cells=32"): "search.cells is 64 there and 32 here",
        ("--seed", "3"): "seed is 0 there and 3 here",
        ("--algo", "me"): "search.algo is 'me-ls' there and 'me' here",
        ("--task", "other"): "task.task is 'point-omni' there and 'other' here",
        ("--preset", "tiny"): "train.width is 16 there and 32 here",
    }
    for options, sentence in difference.items():
        assert sentence in complaint("search", "--out", run, *options)
    assert (run / runs.PLAN).read_bytes() == planned


def test_a_mistake_does_not_stick(copy: Callable[..., Path], complaint: Callable[..., str]) -> None:
    """A setting that is refused before anything was made can be corrected in the same place."""
    directory = copy("search")
    planned = (directory / runs.PLAN).read_bytes()
    assert "too few" in complaint("dataset", directory, "--trajectories", 3)
    assert (directory / runs.PLAN).read_bytes() == planned
    assert command("dataset", directory, "--trajectories", 64) == 0
    assert len(cli.open_run(directory).dataset()) == 64
    assert plan_of(directory)["dataset"]["trajectories"] == 64
    error = complaint("train", directory, "--set", "train.batch_size=1000")
    assert "do not fill a batch" in error
    assert not (directory / "qdt" / "config.json").exists()
    assert plan_of(directory)["train"]["batch_size"] == 16


def test_a_search_that_never_began_leaves_no_plan(
    tmp_path: Path, complaint: Callable[..., str]
) -> None:
    wrong = settings(["search.episodes=1"])
    assert "needs at least 2" in complaint("search", "--preset", "tiny", "--out", tmp_path, *wrong)
    assert not (tmp_path / runs.PLAN).exists()


def test_a_run_outlives_its_preset(
    copy: Callable[..., Path],
    complaint: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Renamed or changed: what counts is the plan that was written."""
    directory = copy("search", "dataset", "qdt")
    presets = tmp_path / "presets.toml"
    monkeypatch.setattr(config, "PRESETS", presets)
    for content in ("[small.point-omni.task]\nlength = 7", "[tiny.point-omni.task]\nlength = 7"):
        presets.write_text(content)
        assert command("search", "--out", directory) == 0
        assert command("dataset", directory) == 0
        assert command("train", directory) == 0
        assert cli.open_run(directory).task.length == 30
    assert command("dataset", directory, "--name", "further", "--trajectories", 64) == 0
    assert len(cli.open_run(directory).dataset("further")) == 64
    error = complaint("search", "--out", directory, "--preset", "tiny")
    assert "task.length is 30 there and 7 here" in error


@pytest.fixture
def written(run: Path) -> dict[str, Any]:
    return json.loads((run / runs.PLAN).read_text())


WRONG_PLANS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no plan": (lambda plan: {}, "sections that it needs"),
    "a section less": (lambda plan: plan.pop("dataset") and plan, "sections that it needs"),
    "a number as section": (lambda plan: plan | {"search": 3}, "sections that it needs"),
    "a list as section": (lambda plan: plan | {"search": [3]}, "sections that it needs"),
    "a seed of text": (lambda plan: plan | {"seed": "x"}, "sections that it needs"),
    "a negative seed": (lambda plan: plan | {"seed": -1}, "sections that it needs"),
    "a list as algorithm": (
        lambda plan: plan | {"search": plan["search"] | {"algo": ["me"]}},
        "sections that it needs",
    ),
    "a table as model": (
        lambda plan: plan | {"train": plan["train"] | {"model": {"a": 1}}},
        "sections that it needs",
    ),
    "another algorithm": (
        lambda plan: plan | {"search": plan["search"] | {"algo": "me-x"}},
        "unknown algorithm 'me-x'; there are me, ",
    ),
    "another model": (
        lambda plan: plan | {"train": plan["train"] | {"model": "lstm"}},
        "unknown model 'lstm'; there are qdt, mlp",
    ),
    "another task": (
        lambda plan: plan | {"task": plan["task"] | {"task": "cartpole"}},
        "unknown task 'cartpole'; there are point-omni, ",
    ),
    "a misspelt field": (
        lambda plan: plan | {"train": plan["train"] | {"widht": 16}},
        "widht: there is no such field in the train of a plan",
    ),
    "a wrong value": (
        lambda plan: plan | {"search": plan["search"] | {"cells": "many"}},
        "cells must be a whole number",
    ),
}


@pytest.mark.parametrize("name", WRONG_PLANS)
def test_a_wrong_plan_gets_one_sentence(
    written: dict[str, Any], tmp_path: Path, complaint: Callable[..., str], name: str
) -> None:
    """As a file to begin with, and in the directory of a run."""
    change, sentence = WRONG_PLANS[name]
    content = json.dumps(written | {"plan": change(written["plan"])})
    (tmp_path / "wrong.json").write_text(content)
    out = tmp_path / "run"
    assert sentence in complaint("search", "--config", tmp_path / "wrong.json", "--out", out)
    assert not out.exists()
    out.mkdir()
    (out / runs.PLAN).write_text(content)
    assert sentence in complaint("dataset", out)
    assert sentence in complaint("search", "--out", out)


@pytest.mark.parametrize("content", ["", "[]", "3", "{", '{"plan": 3}', "[" * 100_000])
def test_a_file_that_is_no_plan_gets_one_sentence(
    tmp_path: Path, complaint: Callable[..., str], content: str
) -> None:
    (tmp_path / "wrong.json").write_text(content)
    out = tmp_path / "run"
    error = complaint("search", "--config", tmp_path / "wrong.json", "--out", out)
    assert "not readable JSON" in error or "is not the plan of a run" in error
    assert not out.exists()


@given(st.data())
def test_a_damaged_plan_is_refused_in_a_sentence_or_makes_sense(
    run: Path, data: st.DataObject
) -> None:
    """A value anywhere in it is replaced by anything else."""
    plan = plan_of(run)
    place, key, here = plan, "", plan
    while isinstance(here, dict | list) and here:
        names = sorted(here) if isinstance(here, dict) else list(range(len(here)))
        key = data.draw(st.sampled_from(names))
        place, here = here, here[key]
    junk = st.none() | st.integers() | st.floats() | st.text(max_size=3)
    place[key] = data.draw(junk | st.sampled_from([[], {}, [1] * 9, {"a": 1}, True]))
    try:
        made = cli.PLANS.make(plan, {})
    except UserError as error:
        assert str(error).endswith(".")
    else:
        assert cli.PLANS.make(cli.plain(made), {}) == made


def test_presets_and_plans_that_do_not_fit_together_get_one_sentence(
    run: Path, tmp_path: Path, complaint: Callable[..., str]
) -> None:
    out = ("--out", tmp_path / "run")
    assert "unknown preset 'huge'; there are tiny" in complaint("search", "--preset", "huge", *out)
    assert "does not exist" in complaint("search", "--config", tmp_path / "missing.json", *out)
    both_given = ("--config", run / runs.PLAN, "--preset", "tiny")
    assert "do not go with it" in complaint("search", *both_given, *out)
    assert "unknown task" in complaint("search", "--preset", "tiny", "--task", "cartpole", *out)
    assert "unknown algorithm" in complaint("search", "--preset", "tiny", "--algo", "sa", *out)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("search.cels=3", "not a field"),
        ("search.cells=many", "whole number"),
        ("serch.cells=3", "STAGE.FIELD"),
        ("search.cells", "STAGE.FIELD"),
        ("train.decay=perhaps", "true or false"),
        ("search.cells=0", "at least 1"),
        ("search.iterations=-1", "at least 1"),
        ("search.hidden=64,x", "whole number"),
        ("train.optimiser=sgd", "adamw, muon"),
        ("train.action_noise=0.1", "not a field"),
        ("machine.micro_batch=0", "at least 1"),
        ("machine.tempo=9", "not a field"),
    ],
)
def test_a_setting_that_makes_no_sense_gets_one_sentence(
    complaint: Callable[..., str], change: str, sentence: str
) -> None:
    assert sentence in complaint("run", "--preset", "tiny", "--dry-run", "--set", change)


def test_a_setting_of_another_stage_is_not_ignored(
    run: Path, tmp_path: Path, complaint: Callable[..., str]
) -> None:
    error = complaint("dataset", run, "--set", "train.width=8")
    assert "dataset or machine as the stage, not 'train.width=8'" in error
    error = complaint("train", run, "--set", "dataset.trajectories=9")
    assert "train or machine as the stage" in error
    out = ("--preset", "tiny", "--out", tmp_path / "run")
    assert "as the stage" in complaint("search", *out, "--set", "evaluate.episodes=8")
    assert not (tmp_path / "run").exists()


def test_settings_from_the_command_line_reach_the_plan() -> None:
    changes = cli.changes_of(
        ["search.hidden=32,16", "train.decay=true", "machine.chunk=64"], cli.STAGES
    )
    plan = cli.PLANS.asked(cli.Asked("paper", None, "ant-omni", None, None, changes))
    assert plan.search.hidden == (32, 16) and plan.train.decay and plan.task.length == 250
    assert "machine" not in cli.plain(plan) and machine.settings().chunk == 64


def test_every_preset_makes_a_plan_for_every_algorithm() -> None:
    for preset in config.presets():
        for algo in me_ls.RULES:
            plan = cli.PLANS.asked(cli.Asked(preset, None, "point-omni", algo, 3, {}))
            assert plan.search.algo == algo and type(plan.search) is me_ls.RULES[algo].config
            assert cli.PLANS.make(cli.plain(plan), {}) == plan


@pytest.mark.parametrize(
    ("preset", "is_long"),
    [("tiny", False), ("laptop", False), ("overnight", True), ("paper", True)],
)
def test_a_long_run_and_no_other_says_beforehand_how_long(preset: str, is_long: bool) -> None:
    plan = cli.PLANS.asked(cli.Asked(preset, task="point-omni"))
    assert (cli.training_work(plan) >= cli.LONG) == is_long


def test_a_dry_run_lists_every_field_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model: what is measured here is compiled first."""
    small = settings(["train.width=8", "train.layers=1", "task.length=5"])
    out = tmp_path / "run"
    assert command("run", "--preset", "tiny", "--dry-run", *small, "--out", out) == 0
    text = capsys.readouterr().out
    kinds = (envs.TaskConfig, me_ls.SearchConfig, dataset.DatasetConfig, qdt.QDTConfig)
    for kind in (*kinds, machine.Machine):
        for field in config.field_types(kind):
            assert f"\n  {field} " in text, field
    assert "iterations" in text and "parameters" in text and "in all" in text
    assert not out.exists()


# --- the machine ----------------------------------------------------------------------------------


def stop_after(steps: int) -> Any:
    """As if Ctrl-C came in this step."""
    answers = iter([False] * (steps - 1))
    return mock.patch.object(driver, "stop_requested", lambda: next(answers, True))


def test_a_training_begun_on_one_machine_goes_on_on_another(
    copy: Callable[..., Path], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings of the machine are no part of the plan and never refuse a run."""
    directory = copy("search", "dataset")
    planned = (directory / runs.PLAN).read_bytes()
    with stop_after(5):
        assert command("train", directory, "--set", "machine.micro_batch=1") == 130
    assert "stopped after step 5 of 48; the same command continues" in capsys.readouterr().err
    assert machine.settings().micro_batch == 1
    further = settings(["machine.micro_batch=4", "machine.checkpoint_seconds=0"])
    assert command("train", directory, *further) == 0
    assert (directory / runs.PLAN).read_bytes() == planned
    assert "micro_batch" not in (directory / "qdt" / "config.json").read_text()
    logs = [runs.read_metrics(place / "qdt" / "metrics.jsonl") for place in (directory, run)]
    for ours, whole in zip(*logs, strict=True):
        assert ours["epoch"] == whole["epoch"]
        assert ours["loss"] == pytest.approx(whole["loss"], rel=1e-3)


# --- stages ---------------------------------------------------------------------------------------


def test_act_prints_what_was_reached_and_writes_a_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    asked = ("--target", -1, 1, "--episodes", 2, "--html", page)
    assert command("act", run, *asked) == 0
    assert capsys.readouterr().out.count("reached") == 2
    assert "<canvas" in page.read_text()


@pytest.mark.parametrize(
    ("target", "sentence"),
    [("9 0", "outside"), ("1", "2 numbers"), ("1 2 3", "2 numbers"), ("a b", "numbers such as")],
)
def test_a_target_that_makes_no_sense_gets_one_sentence(
    run: Path, complaint: Callable[..., str], target: str, sentence: str
) -> None:
    assert sentence in complaint("act", run, "--target", target, "--episodes", 1)


def test_negative_targets_need_no_tricks() -> None:
    assert cli.join_target(["act", "run", "--target", "-3", "4", "--html", "f"]) == [
        "act", "run", "--target", "-3 4", "--html", "f",
    ]  # fmt: skip


def test_generalization_trains_a_model_like_the_runs_own_on_each_pruned_dataset(
    copy: Callable[..., Path], tmp_path: Path
) -> None:
    directory = copy("search", "dataset", "qdt")
    # A model that was trained beforehand is one of them.
    assert command("train", directory, "--prune", "tiles") == 0
    assert command("evaluate", "generalize", directory) == 0
    result = read_json(directory / "evaluation" / "generalize.json")["result"]
    assert set(result) == {"all", *dataset.PRUNINGS}
    assert np.sum(result["density-10"]["density"]) < 0.2 * np.sum(result["all"]["density"])
    emptied = {how: np.mean(of["emptied"]) for how, of in result.items()}
    assert 0.3 < emptied["tiles"] < 0.7 and 0.3 < emptied["upper"] < 0.7
    assert emptied["all"] == emptied["density-10"] == 0
    trained = [runs.read_stage_config(directory / name) for name in ("qdt", "qdt-tiles")]
    # Less is shown, not learned: as many optimiser steps, however small the dataset.
    assert trained[0]["train"] | {"steps_per_epoch": 384 // 16} == trained[1]["train"]
    steps = [runs.read_metrics(directory / name / "metrics.jsonl") for name in ("qdt", "qdt-tiles")]
    assert steps[0][-1]["trajectories"] == steps[1][-1]["trajectories"]
    assert [of["prune"] for of in trained] == [None, "tiles"]
    assert command("report", directory, "--out", tmp_path / "report") == 0
    assert (tmp_path / "report" / "generalization-me-ls-point-omni.png").exists()
    table = (tmp_path / "report" / "generalization-point-omni.md").read_text()
    assert "| QDT(ME-LS) | tiles | 1 |" in table


def test_what_generalizes_is_asked_for_every_goal_as_it_is(copy: Callable[..., Path]) -> None:
    """A model that stays within what was shown would be asked for something else where nothing was."""
    directory = copy("search", "dataset")
    assert command("train", directory, "--set", "train.stay_within=true") == 0
    assert command("evaluate", "generalize", directory) == 0
    measured = read_json(directory / "evaluation" / "generalize.json")["result"]["upper"]
    run = cli.open_run(directory)
    model, subject = run.model("qdt-upper"), run.subject("reassess")
    as_it_is = subject.measure(model.without_margin()).distance.tolist()
    assert measured["distance"] == pytest.approx(as_it_is)
    assert measured["distance"] != pytest.approx(subject.measure(model).distance.tolist())


def test_the_naive_variant_stands_beside_the_runs_own(
    copy: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy("search", "dataset", "qdt")
    assert command("dataset", directory, "--naive", "--trajectories", 64) == 0
    naive = cli.open_run(directory).dataset("naive")
    assert naive.meta.config.naive and len(naive) == 64
    assert not cli.open_run(directory).dataset().meta.config.naive
    assert command("train", directory, "--naive", "--set", "train.epochs=1") == 0
    assert list(cli.open_run(directory).model_paths()) == ["qdt", "qdt-naive"]
    capsys.readouterr()
    assert command("train", directory, "--naive", "--dataset", "other") == 1
    assert "--dataset other does not go with it" in capsys.readouterr().err
    assert command("dataset", directory, "--name", "naive", "--show") == 0
    assert "64 trajectories of " in capsys.readouterr().out
    assert (directory / "dataset-naive" / "density.png").exists()


def test_show_tells_what_is_in_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("show", run) == 0
    text = capsys.readouterr().out
    assert "me-ls on point-omni, seed 0" in text and "of 64 cells are occupied" in text
    assert "dataset: 384 trajectories" in text and "qdt: " in text
    assert (run / "search" / "fitness.png").exists()


def test_an_experiment_is_done_again_only_for_another_model(
    copy: Callable[..., Path], run: Path
) -> None:
    """What counts is what is in the files, not when they were written."""
    directory = copy("search", "evaluation")
    shutil.copytree(run / "qdt", directory / "qdt")
    opened = cli.open_run(directory)
    assert opened.is_evaluated("accuracy") and not opened.is_evaluated("generalize")
    path = directory / "qdt" / "model.safetensors"
    path.touch()
    assert opened.is_evaluated("accuracy")
    shutil.copytree(directory / "qdt", directory / "qdt-tiles")
    pruned = read_json(directory / "qdt" / "config.json")
    pruned["config"]["prune"] = "tiles"
    (directory / "qdt-tiles" / "config.json").write_text(json.dumps(pruned))
    assert opened.is_evaluated("accuracy")  # which is not about models of pruned datasets
    save_arrays(path, jax.tree.map(lambda x: x + 1, opened.model()))
    assert not opened.is_evaluated("accuracy") and not opened.is_evaluated("calibrate")
    assert opened.is_evaluated("reassess")  # which is about the repertoire


def test_a_model_that_appears_while_an_experiment_plays_was_not_measured(
    copy: Callable[..., Path], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy("search", "dataset")

    def measure(subject: Any) -> dict[str, Any]:
        shutil.copytree(run / "qdt", directory / "qdt")
        return cli.EXPERIMENTS["elsewhere"](subject)

    monkeypatch.setitem(cli.EXPERIMENTS, "accuracy", measure)
    cli.do_evaluate(cli.open_run(directory), "accuracy")
    assert not cli.open_run(directory).is_evaluated("accuracy")


def test_what_was_made_from_something_else_is_refused(copy: Callable[..., Path], run: Path) -> None:
    """A dataset of another repertoire, a model of another dataset; those that do not say are taken."""
    directory = copy("search")
    for stage in ("dataset", "qdt"):
        shutil.copytree(run / stage, directory / stage)
    lineage = cli.open_run(directory)
    assert cli.do_train(lineage, {}) and lineage.dataset()

    def change(file: str, edit: Callable[[Any], None]) -> str:
        path = directory / file
        before = path.read_text()
        content = json.loads(before)
        edit(content)
        path.write_text(json.dumps(content))
        return before

    before = change("dataset/config.json", lambda x: x["config"].update(made_from="another"))
    with pytest.raises(UserError, match="dataset was made from another repertoire than is there"):
        lineage.dataset()
    (directory / "dataset" / "config.json").write_text(before)
    change("dataset/meta.json", lambda x: x["shards"][0].update(left_out={"diverged": 99}))
    for make in (lambda: cli.do_train(lineage, {}), lambda: cli.export(directory, directory)):
        with pytest.raises(UserError, match="qdt was made from another dataset than is there now"):
            make()
    change("qdt/config.json", lambda x: x["config"].pop("made_from"))  # as it was before
    assert cli.do_train(lineage, {})


def test_a_model_of_another_configuration_is_refused(copy: Callable[..., Path], run: Path) -> None:
    directory = copy("search")
    shutil.copytree(run / "qdt", directory / "qdt")
    stored = json.loads((directory / "qdt" / "config.json").read_text())
    stored["config"]["train"]["width"] = 32
    (directory / "qdt" / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="another configuration"):
        cli.open_run(directory).model()


def test_a_dataset_of_another_task_is_refused(copy: Callable[..., Path]) -> None:
    """Also of one with the same sizes."""
    for field, value in (("length", 20), ("reach", 2.0)):
        directory = copy("search", "dataset", name=field)
        content = json.loads((directory / runs.PLAN).read_text())
        content["plan"]["task"][field] = value
        (directory / runs.PLAN).write_text(json.dumps(content))
        with pytest.raises(UserError, match="was made for another task"):
            cli.open_run(directory).dataset()


def test_what_is_missing_is_named(
    copy: Callable[..., Path], tmp_path: Path, complaint: Callable[..., str]
) -> None:
    directory = copy()
    assert "is not finished" in complaint("dataset", directory)
    assert "has no dataset; `qdt dataset`" in complaint("train", directory)
    assert "has no trained qdt; `qdt train`" in complaint("act", directory, "--target", 0, 0)
    assert "is not a run directory" in complaint("show", tmp_path)
    assert "holds no run" in complaint("report", tmp_path / "nothing", "--out", tmp_path / "report")


def test_a_loss_that_is_not_a_number_stops_the_training(
    copy: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = copy("search", "dataset")
    assert command("train", directory, "--set", "train.learning_rate=1e30") == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("qdt: the loss is not a number in epoch 1")
    assert "Traceback" not in error


def test_a_robot_that_brax_has_for_another_engine_alone_can_be_a_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its plan and its run never build the robot with the preset's engine."""

    class SwimmerOmni(envs.OmniTask):
        robot, own_reach = "swimmer", 3.0

    monkeypatch.setitem(envs.TASKS, "swimmer-omni", SwimmerOmni)
    changes = {"task": {"backend": "generalized"}}
    plan = cli.PLANS.asked(cli.Asked("laptop", None, "swimmer-omni", None, None, changes))
    runs.write_plan(tmp_path, cli.plain(plan))
    assert cli.open_run(tmp_path).task.action_size == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["halfcheetah-uni", "ant-omni"])
def test_all_stages_of_the_paper_pass_shape_tracing(name: str) -> None:
    """Traced, not run: every search, the dataset, a step of training and the QDT's episodes."""
    trace, key = eqx.filter_eval_shape, jax.random.key(0)

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.shape, tree)

    for algo in me_ls.RULES:
        plan = cli.PLANS.asked(cli.Asked("paper", None, name, algo, None, {}))
        task = envs.make_task(plan.task)
        search = me_ls.make_search(task, plan.search)
        state = trace(search.init, key)
        assert state.repertoire.policies.layers[1].weight.shape == (1024, 256, 256)
        after, metrics = trace(search.step, state, key)
        assert shapes(after) == shapes(state)
        assert metrics["insertions"].shape == ()

    keys = jax.random.split(key, (task.zones, 40))
    members = trace(me_ls.random_policies, task, (256, 256), keys[:, 0])
    played = trace(partial(envs.rollout, task, keys=keys, record=envs.transitions), members)
    assert played.recorded.observations.shape == (task.zones, 40, 251, task.observation_size)

    model = trace(qdt.make_model, task, plan.train, key=key)
    sizes = ((256, 2), (256, 250, task.observation_size), (256, 250, task.action_size))
    batch = trace(lambda: dataset.Trajectory(*map(jnp.zeros, sizes)))
    moments = trace(qdt.optimiser(plan.train, 1).init, model)
    step = partial(qdt.train_step, config=plan.train, total=1)
    *after, loss = trace(step, model, moments, batch, key)
    assert shapes(after) == shapes([model, moments])
    assert loss.shape == ()

    goals = jax.ShapeDtypeStruct((task.zones, 2), "float32")
    ask = lambda model, goals: envs.rollout(task, goals, keys[:, :10], model.policy)  # noqa: E731
    assert trace(ask, model, goals).descriptor.shape == (task.zones, 10, 2)


# --- help, mistakes and signals -------------------------------------------------------------------


def process(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "cli.py"), *map(str, arguments)]


def test_help_answers_at_once_and_mistakes_exit_with_one_sentence(tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(process("--help"), capture_output=True, text=True)
    assert done.returncode == 0 and "search" in done.stdout
    assert time.monotonic() - began < 10  # a loaded machine; it takes about two
    done = subprocess.run(process("show", tmp_path), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("qdt: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["search", "run"])
def test_help_lists_every_registered_rule_and_task(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "300")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)
    mine = replace(me_ls.RULES["me"], about="a rule of my own")
    monkeypatch.setitem(me_ls.RULES, "mine", mine)
    monkeypatch.setitem(envs.TASKS, "my-task", envs.PointOmni)
    assert command(name, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    for task in envs.TASKS:
        assert task in text, task
    if name == "search":
        for algo, rule in me_ls.RULES.items():
            assert f"{algo}: {rule.about}" in text, algo
    assert "@" not in text


def test_ctrl_c_is_one_line_wherever_it_comes(tmp_path: Path) -> None:
    listen = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    as_in_a_terminal = [sys.executable, "-c", listen + "os.execv(sys.argv[1], sys.argv[1:])"]
    arguments = [*as_in_a_terminal, *process("run", "--preset", "tiny", "--out", tmp_path)]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    while "[1/6]" not in child.stdout.readline():
        pass
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    last = errors.splitlines()[-1]
    assert last.startswith("qdt: ") and ("interrupted" in last or "continues" in last)
    assert "Traceback" not in errors


TRAIN_AND_DIE = """
import os, signal, sys
from pathlib import Path
from machinery import machine, runs
machine.prepare_jax()
machine.configure({"checkpoint_seconds": 0.0})
import cli
log = runs.Stage.log
def log_and_die(self, row):
    log(self, row)
    if row["iteration"] >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
runs.Stage.log = log_and_die
cli.do_train(cli.open_run(Path(sys.argv[1])), {})
"""


def test_a_training_that_is_killed_and_resumed_ends_with_the_very_same_model(
    copy: Callable[..., Path],
) -> None:
    """Compared is a training of the same directory in one go, by processes of the same kind."""
    places = {name: copy("search", "dataset", name=name) for name in ("whole", "killed")}
    for name, iteration in (("whole", 10**9), ("killed", 0), ("killed", 10**9)):
        done = subprocess.run(
            [sys.executable, "-c", TRAIN_AND_DIE, str(places[name]), str(iteration)],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert (done.returncode == 0) == (iteration > 0), done.stderr
    whole, killed = (place / "qdt" / "model.safetensors" for place in places.values())
    assert whole.read_bytes() == killed.read_bytes()
