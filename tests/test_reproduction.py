"""What is made for the tables and figures: the table of variants, and the list of jobs."""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_cli import command
from test_cli import settings as set_to

import cli
import pgame_ls  # noqa: F401 - registers its rules
from evaluate import EXPERIMENTS
from machinery import machine, reproduction
from machinery.config import presets
from machinery.files import InUse, UserError, lock, read_checksum
from machinery.reproduction import (
    Job,
    dataset_like,
    do_jobs,
    model_like,
    parse_seeds,
    plan_jobs,
    recipes,
    time_left,
)
from me_ls import RULES


def settings(preset: str, model: str, algo: str = "me-ls") -> dict[str, Any]:
    """All that a model of the reproduction is made with: of its dataset and of its training."""
    recipe = recipes().get(model, reproduction.Recipe((algo,), None, {}))
    plan = cli.plain(cli.PLANS.asked(cli.Asked(preset, algo=algo, seed=0)))  # as a run has it
    changes = {
        "dataset": reproduction.datasets().get(recipe.dataset or "", {}),
        "train": reproduction.training_changes(recipe, plan) if model in recipes() else {},
    }
    changed = {name: reproduction.as_text(fields) for name, fields in changes.items()}
    plan = cli.PLANS.make(plan, changed)
    return {
        f"{stage}.{name}": value
        for stage in ("dataset", "train")
        for name, value in vars(getattr(plan, stage)).items()
    }


@pytest.mark.parametrize("preset", presets())
def test_every_variant_is_a_plan_of_every_preset(preset: str) -> None:
    for model, recipe in recipes().items():
        for algo in recipe.searches:
            assert settings(preset, model, algo)["train.model"] == model.split("-")[0]


@pytest.mark.parametrize(("preset", "hidden"), [("tiny", (64, 64)), ("laptop", (448, 448, 448))])
def test_an_mlp_beside_a_qdt_has_the_presets_size(preset: str, hidden: tuple[int, ...]) -> None:
    """The plan of the run is a QDT's, and knows nothing of it."""
    assert settings(preset, "mlp")["train.hidden"] == hidden


ONE_CHANGE = [
    {"train.tokens"},
    {"train.optimiser", "train.learning_rate", "train.warmup_steps", "train.decay"},
    {"train.dropout"},
    {"train.normalise"},
    {"train.bounded"},
    {"train.batch_size", "train.beginnings", "train.beginning_steps"},  # as many steps in a batch
    {"dataset.typical"},
    {"dataset.action_noise"},
    {"dataset.alike"},
    {"dataset.naive"},
    {"train.conditioning", "dataset.achieved"},
    {"train.stay_within"},
]


@pytest.mark.parametrize("table", reproduction.tables())
def test_a_row_differs_in_one_thing_from_what_it_is_compared_with(table: str) -> None:
    """In the preset that is reported: from the paper's recipe to its own without a gap."""
    for row in reproduction.tables()[table].rows:
        if row.against:
            one, other = settings("laptop", row.model), settings("laptop", row.against)
            changed = {name for name in one if one[name] != other[name]}
            assert changed and any(changed <= change for change in ONE_CHANGE), (row, changed)


def test_the_papers_recipe_is_the_papers() -> None:
    """At the preset's width and number of steps; everything else has the paper's value."""
    ours, paper = settings("laptop", "qdt-paper"), settings("paper", "own")
    sizes = {
        "dataset.trajectories",
        "train.layers",
        "train.heads",
        "train.width",
        "train.batch_size",
    }
    sizes |= {"train.epochs", "train.steps_per_epoch", "train.evaluate_every", "train.held_out"}
    sizes |= {"train.beginning_steps"}  # of which there are none
    assert ours["train.beginnings"] == 0
    assert {name for name in ours if ours[name] != paper[name]} == sizes


@pytest.mark.parametrize(
    ("preset", "task", "batch"),
    [
        ("laptop", "halfcheetah-uni", 12),
        ("laptop", "ant-omni", 12),
        ("overnight", "ant-omni", 12),
        ("tiny", "point-omni", 16),
        ("paper", "ant-omni", 256),
    ],
)
def test_a_batch_without_beginnings_shows_as_many_steps(preset: str, task: str, batch: int) -> None:
    """And where there are none anyway it is the preset's: the paper's recipe at the paper's size is it."""
    plan = cli.PLANS.asked(cli.Asked(preset, task=task))
    train, length = plan.train, plan.task.length
    shown = train.batch_size * length + train.beginnings * train.beginning_steps
    assert (
        reproduction.training_changes(recipes()["qdt-paper"], cli.plain(plan))["batch_size"]
        == batch
    )
    assert 0 <= shown - batch * length < length
    if preset == "paper":
        assert model_like("qdt-paper", cli.plain(plan)) == reproduction.OWN


def kept(models: Iterable[str], task: str) -> list[str]:
    """Those that are not the same as an earlier one with the laptop's plan of a task."""
    plan = cli.plain(cli.PLANS.asked(cli.Asked("laptop", task=task)))
    return [name for name in models if model_like(name, plan) == name]


def test_what_changes_nothing_is_not_made_twice() -> None:
    """Ant's demonstrators are not chosen to be alike: that step of the ladder is the one before it."""
    assert kept(recipes(), "halfcheetah-uni") == [*recipes()]
    assert {*recipes()} - {*kept(recipes(), "ant-omni")} == {"qdt-paper-noise"}
    rows = {"qdt-paper-noise", "qdt-paper-alike"}
    plan = cli.plain(cli.PLANS.asked(cli.Asked("laptop", task="ant-omni")))
    assert len({model_like(name, plan) for name in rows}) == 1
    assert dataset_like("best", plan) is None and dataset_like("quiet", plan) == "quiet"


def test_what_the_file_names_is_there() -> None:
    content = reproduction.content()
    assert set(reproduction.all_searches()) <= set(RULES)
    assert set(content["experiments"]) == {*EXPERIMENTS, "generalize"}
    for part in reproduction.parts().values():
        assert set(part.experiments) <= set(content["experiments"])
        assert set(part.models) <= {reproduction.OWN, *recipes()}


# --- jobs -----------------------------------------------------------------------------------------


def test_everything_comes_after_what_it_needs_and_the_report_last() -> None:
    jobs = plan_jobs([0, 1])
    order = ["search", "dataset", "train", "evaluate"]
    for seed in (0, 1):
        stages = [order.index(job.stage) for job in jobs[:-1] if job.seed == seed]
        assert stages == sorted(stages) and {*stages} == {0, 1, 2, 3}
    for algo in reproduction.content()["taught"]:
        trained = [
            job.what for job in jobs if (job.algo, job.stage, job.seed) == (algo, "train", 0)
        ]
        assert trained[0] == "own"
    assert jobs[-1].stage == "report" and len(set(jobs)) == len(jobs)
    searches = [(job.seed, job.algo) for job in jobs if job.stage == "search"]
    assert searches == [(s, a) for s in (0, 1) for a in reproduction.content()["searches"]]
    # A seed is finished before the next one begins.
    assert [job.seed for job in jobs[:-1]] == sorted(job.seed for job in jobs[:-1])


def test_a_part_needs_no_more_than_it_shows() -> None:
    kinds = [job.kind for job in plan_jobs([0], ["table-5"])]
    assert {kind.split()[1] for kind in kinds[:-1]} == {"search", "evaluate"}
    ladder = plan_jobs([3], ["ladder"])
    assert {job.algo for job in ladder[:-1]} == {"me-ls"}
    rows = {row.model for row in reproduction.tables()["ladder"].rows}
    assert {job.what for job in ladder if job.stage == "train"} == rows
    assert [job.what for job in ladder if job.stage == "dataset"] == ["", "best", "quiet", "plain"]
    assert {job.algo for job in plan_jobs([0], searches=["me"])[:-1]} == {"me"}
    for part, algos in {
        "figure-7": {"me-ls"},
        "calibration": {"me-ls"},
        "elsewhere": {"me", "me-ls", "pgame", "pgame-ls"},
        "figure-14": {"me", "me-ls", "pgame", "pgame-ls"},
    }.items():
        assert {job.algo for job in plan_jobs([0], [part])[:-1]} == algos
    # What is beside the paper is made if it is asked for, and has no models.
    related = plan_jobs([0], ["related"])
    algos = [job.algo for job in related if job.stage == "search"]
    assert {"me", "me-ls", "deep-grid", "me-soft"} < {*algos} and "pgame" not in algos
    assert {job.stage for job in related} == {"search", "evaluate", "report"}
    assert "deep-grid" not in {job.algo for job in plan_jobs([0])}
    # The paper has no QDT(ME-Sampling).
    assert not [j for j in plan_jobs([0]) if (j.algo, j.stage) == ("me-sampling", "train")]


def test_after_three_seeds_only_the_claims_are_made_unless_a_part_is_named() -> None:
    def of(seed: int, jobs: Iterable[Job]) -> list[Job]:
        return [replace(job, seed=0) for job in jobs if job.stage != "report" and job.seed == seed]

    jobs = plan_jobs(range(5))
    for seed in (0, 1, 2):
        assert of(seed, jobs) == plan_jobs([0])[:-1]
    for seed in (3, 4):
        assert of(seed, jobs) == plan_jobs([0], ["table-1", "table-5"])[:-1]
    assert of(4, plan_jobs(range(5), ["ladder"])) == plan_jobs([0], ["ladder"])[:-1]


@pytest.mark.parametrize(
    ("only", "searches", "named"), [(["table-9"], [], "table-9"), ([], ["mee"], "mee")]
)
def test_an_unknown_part_or_search_is_named(only: list, searches: list, named: str) -> None:
    with pytest.raises(UserError, match=f"there is no '{named}'; there are"):
        plan_jobs([0], only, searches)


@pytest.mark.parametrize(("only", "search"), [([], "deep-grid"), (["ladder"], "me")])
def test_a_search_that_nothing_needs_is_refused(only: list, search: str) -> None:
    """Instead of a report on nothing."""
    with pytest.raises(UserError, match=f"needs no {search}"):
        plan_jobs([0], only, [search])


def test_seeds_are_numbers_and_ranges() -> None:
    assert parse_seeds("0-4") == [0, 1, 2, 3, 4]
    assert parse_seeds("7") == [7]
    assert parse_seeds("0, 2,5-6,2") == [0, 2, 5, 6]
    with pytest.raises(UserError, match="more seeds than"):
        parse_seeds("0-999999999")
    # Unless they are named, none on which the preset was made.
    assert reproduction.own_seeds("laptop", "ant-omni") == [2, 3, 4, 5, 6]
    assert reproduction.own_seeds("laptop", "halfcheetah-uni") == [0, 1, 2, 3, 4]
    assert reproduction.own_seeds("mine", "ant-omni") == [0]
    for wrong in ("", "a", "4-0", "1-", "-1", "1.5"):
        with pytest.raises(UserError, match="seeds are numbers"):
            parse_seeds(wrong)


def alone(job: Job) -> AbstractContextManager[bool]:
    """The claim of the only process."""
    return nullcontext(True)


def test_jobs_that_are_done_are_not_done_again_and_the_time_left_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job("search", "me", seed) for seed in range(4)]
    done, times = {jobs[0]}, tmp_path / "times.json"

    def fail_at_two(job: Job) -> None:
        if job.seed == 2:
            raise UserError("enough")
        done.add(job)

    with pytest.raises(UserError):
        do_jobs(jobs, done.__contains__, fail_at_two, alone, times)
    said = capsys.readouterr().out
    assert "1 of 4 jobs are done" in said and "[2/4] seed 1, me search; 3 jobs left" in said
    assert "[3/4] seed 2, me search; about 0:00 left" in said
    times.write_text("[]")  # somebody's file
    do_jobs(jobs, done.__contains__, done.add, alone, times)
    assert done == set(jobs)
    assert "2 of 4 jobs are done" in capsys.readouterr().out


def test_an_experiment_is_made_again_once_there_are_further_models(tmp_path: Path) -> None:
    """As `--only table-1` and then everything else."""
    models, measured = ["own"], [["own"]]
    jobs = [Job("train", "me-ls", 0, "mlp"), Job("evaluate", "me-ls", 0, "accuracy")]

    def is_done(job: Job) -> bool:
        return job.what in models if job.stage == "train" else measured[-1] == models

    def do(job: Job) -> None:
        if job.stage == "train":
            models.append(job.what)
        else:
            measured.append([*models])

    do_jobs(jobs, is_done, do, alone, tmp_path / "times.json")
    assert measured == [["own"], ["own", "mlp"]]


def test_processes_share_the_jobs_and_none_begins_before_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads in place of processes: the system's locks hold between them, too."""
    monkeypatch.setattr(reproduction, "PATIENCE", 0.01)
    jobs = plan_jobs([0, 1], ["table-1", "demonstrations"], ["me", "me-ls"])
    done: set[Job] = set()
    begun: list[tuple[str, Job]] = []
    stages = reproduction.Stages(*[cli.open_run] * 6)
    maker = reproduction.Maker(tmp_path, cli.Asked("tiny"), cli.PLANS, stages)

    def do(job: Job) -> None:
        of_run = [other for other in jobs if (other.algo, other.seed) == (job.algo, job.seed)]
        needed = jobs[:-1] if job.stage == "report" else of_run
        order = ["search", "dataset", "train", "evaluate", "report"]
        earlier = {x for x in needed if order.index(x.stage) < order.index(job.stage)}
        assert earlier <= done
        begun.append((threading.current_thread().name, job))
        time.sleep(0.02)
        done.add(job)

    def work() -> None:
        is_done = lambda job: job.stage != "report" and job in done  # noqa: E731
        do_jobs(jobs, is_done, do, maker.claim, tmp_path / "times.json")

    with ThreadPoolExecutor(3) as pool:
        for worker in [pool.submit(work) for _ in range(3)]:
            worker.result()
    made = [job for _, job in begun if job.stage != "report"]
    assert len(made) == len(set(made)) and {*made, jobs[-1]} == set(jobs) == done
    assert len({name for name, _ in begun}) > 1


def test_who_finds_nothing_but_what_others_do_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [Job("search", "me", 0), Job("report")]
    do_jobs(jobs, lambda job: False, pytest.fail, lambda job: nullcontext(False), tmp_path / "t")
    assert "0 of 2 jobs are done.\nOther processes are" in capsys.readouterr().out


def test_variants_of_one_run_may_be_made_at_once_but_not_what_its_plan_is_about(
    tmp_path: Path,
) -> None:
    plan = cli.PLANS.asked(cli.Asked("tiny"))
    begin = partial(cli.PLANS.begin_stage, tmp_path, plan, "train")
    changes = {"train": {"width": "16"}}
    with cli.PLANS.begin_run(tmp_path, plan), begin("narrow", changes) as narrow:
        assert narrow.train.width == 16
        with begin("again", {}), pytest.raises(InUse), begin(None, {}):
            pass
    assert cli.PLANS.stored(tmp_path) == plan


def test_the_time_left_is_what_jobs_of_the_same_kind_took() -> None:
    jobs = [Job("search", "me", 0), Job("search", "me", 1), Job("search", "pgame", 1)]
    assert time_left(jobs, {}) == "3 jobs"
    assert time_left(jobs, {"me search": 60.0}) == "about 2:00 and 1 job not timed yet"
    assert time_left(jobs, {"me search": 60.0, "pgame search": 5.0}) == "about 2:05"


# --- the command ----------------------------------------------------------------------------------

SMALL = [
    "search.steps=30000", "dataset.trajectories=64", "dataset.zones=8", "dataset.typical=true",
    "train.epochs=1", "train.evaluate_every=1", "train.goal_episodes=1", "train.layers=1", "train.width=8",
]  # fmt: skip


def reproduce(out: Path, *changes: str) -> int:
    part = ["--only", "demonstrations", "--searches", "me", "--seeds", "3"]
    return command(
        "reproduce", "--preset", "tiny", *part, "--out", out, *set_to([*SMALL, *changes])
    )


def test_a_reproduction_that_was_stopped_ends_with_the_files_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "_current", machine.Machine())
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"

    def stop(*arguments: Any) -> None:
        raise UserError("the power failed.")

    with monkeypatch.context() as failing:
        failing.setattr(cli, "do_train", stop)
        assert reproduce(stopped) == 1
    assert reproduce(stopped) == 0
    said = capsys.readouterr().out
    assert "3 of 7 jobs are done" in said and "[4/7] seed 3, me train own; 4 jobs left" in said
    assert "QDT(ME)" in said and (stopped / "report" / "report.html").exists()
    assert reproduce(whole) == 0
    made = sorted(p.relative_to(whole) for p in whole.glob("seed-3/me/*/*.safetensors"))
    assert {path.parent.name for path in made} == {"search", "qdt", "qdt-unfiltered"}
    for path in made:
        assert read_checksum(stopped / path) == read_checksum(whole / path), path
    table = Path("report") / "demonstrations-point-omni.md"
    assert (stopped / table).read_text() == (whole / table).read_text()

    capsys.readouterr()
    assert reproduce(whole) == 0
    assert "6 of 7 jobs are done" in capsys.readouterr().out  # a report is always drawn
    assert reproduce(whole, "search.cells=16") == 1
    assert (
        "was made with another plan: search.cells is 64 there and 16 here"
        in capsys.readouterr().err
    )

    with lock(whole / ".claims" / "job-0-report"):
        assert reproduce(whole) == 0
    assert "Other processes are making what is left." in capsys.readouterr().out

    # What was made from something else is not done, nor a model of another dataset than its recipe names.
    run = cli.open_run(whole / "seed-3" / "me")
    asked = cli.Asked("tiny", changes=cli.changes_of(SMALL, cli.STAGES))
    maker = reproduction.Maker(whole, asked, cli.PLANS, reproduction.Stages(*[cli.open_run] * 6))
    own, variant = (Job("train", "me", 3, what) for what in ("own", "qdt-unfiltered"))
    assert maker.is_done(own) and maker.is_done(variant)
    with monkeypatch.context() as changing:
        changing.setattr(reproduction, "dataset_like", lambda name, plan: None)
        assert maker.is_done(own) and not maker.is_done(variant)
    config = run.directory / "qdt" / "config.json"
    kept = config.read_text()
    config.write_text(kept.replace(run.source_of_models(None) or "", "another"))
    assert not maker.is_done(own) and maker.is_done(variant)
    config.write_text(kept)

    # A recipe that has changed since is not reported under its new name.
    changed = {"unfiltered": {"typical": False, "action_noise": 0.5}}
    monkeypatch.setattr(reproduction, "datasets", lambda: changed)
    assert reproduce(whole) == 1
    said = capsys.readouterr().err
    assert "dataset-unfiltered was made with another configuration" in said
    assert "dataset.action_noise is 0.0 there and 0.5 here" in said
