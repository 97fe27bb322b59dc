"""The pipeline as its user sees it: commands, run directories, resuming, and one sentence for mistakes.

Everything here runs on `point-omni`, through the code paths of every other task.
"""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cli
import dataset
import envs
import me_ls
import pgame_ls
import pipeline
import qdt
import runs
import training
from envs import make_task, rollout
from runs import UserError

ROOT = Path(__file__).parents[1]
SEARCH = ["search.steps=150000"]
DATASET = ["dataset.trajectories=384"]
TRAIN = ["train.epochs=2", "train.evaluate_every=1", "train.goal_episodes=2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small lineage: ME-LS, dataset, QDT."""
    directory = tmp_path_factory.mktemp("runs") / "me-ls"
    plan = pipeline.make_plan("tiny", "", SEARCH)
    pipeline.do_search(directory, plan, "me-ls", seed=0)
    pipeline.do_dataset(directory, DATASET, naive=False)
    pipeline.do_train(directory, TRAIN, naive=False, prune="")
    return directory


def test_the_qdt_follows_its_targets_better_than_chance(run: Path):
    result = pipeline.do_evaluate("accuracy", run)
    task = pipeline.open_run(run).task
    width = task.high[0] - task.low[0]
    goals = np.array(result["qdt"]["goals"])
    chance = np.linalg.norm(goals[:, None] - goals[None], axis=-1).mean()
    assert result["qdt"]["mean_distance"] < 0.6 * chance < width
    assert result["repertoire"]["mean_distance"] < 0.6 * chance


def test_a_report_is_one_page_without_the_network(run: Path, tmp_path: Path):
    from report import write_report

    for experiment in ("accuracy", "reassess"):
        pipeline.do_evaluate(experiment, run)
    page = write_report([run], tmp_path / "report").read_text()
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/png;base64,") >= 4
    table = (tmp_path / "report" / "accuracy-point-omni.md").read_text()
    assert "QDT(ME-LS)" in table and "| ME-LS |" in table
    assert (tmp_path / "report" / "coverage-point-omni.png").exists()


def test_act_prints_what_was_reached_and_writes_a_page(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "page.html"
    pipeline.do_act(run, "-1 1", episodes=2, seed=0, page=page)
    assert capsys.readouterr().out.count("reached") == 2
    assert "<canvas" in page.read_text()


@pytest.mark.parametrize(
    ("target", "complaint"),
    [("9 0", "outside"), ("1", "2 numbers"), ("1 2 3", "2 numbers"), ("a b", "numbers such as")],
)
def test_a_target_that_makes_no_sense_gets_one_sentence(run: Path, target: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        pipeline.do_act(run, target, episodes=1, seed=0, page=None)


def test_negative_targets_need_no_tricks():
    assert cli.join_target(["act", "run", "--target", "-3", "4", "--html", "f"]) == [
        "act", "run", "--target", "-3 4", "--html", "f",
    ]  # fmt: skip


def test_a_finished_stage_is_not_done_again(run: Path):
    before = (run / "search" / "repertoire.qdt").stat().st_mtime_ns
    pipeline.do_search(run, pipeline.make_plan("tiny", "", SEARCH), "me-ls", seed=0)
    assert (run / "search" / "repertoire.qdt").stat().st_mtime_ns == before


def test_another_config_on_the_same_run_is_refused_with_the_difference(run: Path):
    plan = pipeline.make_plan("tiny", "", [*SEARCH, "search.cells=32"])
    with pytest.raises(UserError, match=r"search\.cells is 64 there and 32 here"):
        pipeline.do_search(run, plan, "me-ls", seed=0)


def test_a_mistake_does_not_stick(run: Path, tmp_path: Path):
    """A setting that is refused before anything was made can be corrected in the same place."""
    (tmp_path / "search").symlink_to(run / "search")
    with pytest.raises(UserError, match="too few"):
        pipeline.do_dataset(tmp_path, ["dataset.trajectories=3"], naive=False)
    assert len(pipeline.do_dataset(tmp_path, ["dataset.trajectories=64"], naive=False)) == 64
    with pytest.raises(UserError, match="do not fill a batch"):
        pipeline.do_train(tmp_path, ["train.batch_size=1000"], naive=False, prune="")
    assert not (tmp_path / "qdt" / "config.json").exists()


def test_generalization_trains_a_qdt_like_the_runs_own_on_each_pruned_dataset(
    run: Path, tmp_path: Path
):
    from report import write_report

    result = pipeline.do_evaluate("generalize", run)
    assert set(result) == {"all", *dataset.PRUNINGS}
    assert np.sum(result["density-10"]["density"]) < 0.2 * np.sum(result["all"]["density"])
    lineage = pipeline.open_run(run)
    assert pipeline.trained_config(lineage, "qdt-tiles") == pipeline.trained_config(lineage)
    pipeline.do_evaluate("accuracy", run)
    write_report([run], tmp_path)
    assert (tmp_path / "generalization-me-ls-point-omni.png").exists()
    assert "| QDT(ME-LS) | tiles | 1 |" in (tmp_path / "generalization-point-omni.md").read_text()


def test_an_experiment_is_done_again_only_for_a_newer_model(run: Path):
    pipeline.do_evaluate("reassess", run)
    assert pipeline.is_evaluated(run, "reassess") and not pipeline.is_evaluated(run, "calibrate")
    (run / "qdt" / "model.qdt").touch()
    assert not pipeline.is_evaluated(run, "reassess")


def test_a_model_of_another_configuration_is_refused(run: Path, tmp_path: Path):
    lineage = pipeline.open_run(run)
    other = tmp_path / "qdt"
    other.mkdir()
    stored = json.loads((run / "qdt" / "config.json").read_text())
    stored["config"]["train"]["width"] = 16
    (other / "config.json").write_text(json.dumps(stored))
    (other / "model.qdt").write_bytes((run / "qdt" / "model.qdt").read_bytes())
    (tmp_path / "search").symlink_to(run / "search")
    with pytest.raises(UserError, match="another configuration"):
        pipeline.load_model(lineage._replace(directory=tmp_path))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("search.cels=3", "not a field"),
        ("search.cells=many", "whole number"),
        ("serch.cells=3", "STAGE.FIELD"),
        ("train.decay=perhaps", "true or false"),
        ("search.cells=0", "at least 1"),
        ("search.iterations=-1", "must not be negative"),
        ("search.hidden=64,x", "whole number"),
    ],
)
def test_a_setting_that_makes_no_sense_gets_one_sentence(change: str, complaint: str):
    with pytest.raises(UserError, match=complaint):
        pipeline.make_plan("tiny", "", [change])


def test_a_setting_of_another_stage_is_not_ignored(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"dataset as the stage, not 'train\.width=8'"):
        pipeline.do_dataset(run, ["train.width=8"], naive=False)
    with pytest.raises(UserError, match="train as the stage"):
        pipeline.do_train(run, ["dataset.trajectories=9"], naive=False, prune="")
    command = ["search", "--preset", "tiny", "--out", str(tmp_path / "run"), "--set"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *command, "train.width=8"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "task or search as the stage" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_robot_that_brax_has_for_another_engine_alone_can_be_a_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Exercise 4: its plan and its run never build the robot with the preset's engine."""

    class SwimmerOmni(envs.OmniTask):
        robot, own_reach = "swimmer", 3.0

    monkeypatch.setitem(envs.TASKS, "swimmer-omni", SwimmerOmni)
    plan = pipeline.make_plan("laptop", "swimmer-omni", ["task.backend=generalized"])
    about = {"preset": "laptop", "task": plan.task, "search": plan.search, "seed": 0}
    with runs.open_stage(tmp_path / "search", about):
        pass
    assert pipeline.open_run(tmp_path).task.action_size == 2


def test_unknown_tasks_and_directories_that_are_no_runs_get_one_sentence(tmp_path: Path):
    with pytest.raises(UserError, match="unknown task"):
        pipeline.make_plan("tiny", "cartpole", [])
    with pytest.raises(UserError, match="not a run directory"):
        pipeline.open_run(tmp_path)


def test_settings_from_the_command_line_reach_the_plan():
    plan = pipeline.make_plan("paper", "ant-omni", ["search.hidden=32,16", "train.decay=true"])
    assert plan.search.hidden == (32, 16) and plan.train.decay and plan.task.length == 250


@pytest.mark.slow
@pytest.mark.parametrize("name", ["halfcheetah-uni", "ant-omni"])
def test_all_stages_of_the_paper_pass_shape_tracing(name: str):
    """Traced, not run: every search, the dataset, a step of training and the QDT's episodes."""
    plan = pipeline.make_plan("paper", name, [])
    task, key = make_task(plan.task), jax.random.key(0)
    trace = eqx.filter_eval_shape
    for algo in me_ls.ALGORITHMS:
        config = pipeline.search_config(plan, algo)
        module = pgame_ls if algo.startswith("pgame") else me_ls
        state = trace(module.first_state, task, config, key=key)
        assert state.repertoire.policies.layers[1].weight.shape == (1024, 256, 256)
        after, counts = trace(partial(module.iterate, task, config, iteration=1), state, key=key)
        assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
        assert counts["insertions"].shape == ()

    keys = jax.random.split(key, (task.zones, 40))
    members = trace(me_ls.random_policies, task, (256, 256), keys[:, 0])
    played = trace(partial(rollout, task, keys=keys, record="transitions"), members)
    assert played.observations.shape == (task.zones, 40, 251, task.observation_size)

    model = trace(training.make_model, task, plan.train, key=key)
    sizes = ((256, 2), (256, 250, task.observation_size), (256, 250, task.action_size))
    batch = trace(lambda: qdt.Trajectory(*map(jnp.zeros, sizes)))
    state = trace(qdt.initial_state, model)
    after, loss = trace(qdt.train_step, state, batch, key)
    assert jax.tree.map(lambda x: x.shape, after) == jax.tree.map(lambda x: x.shape, state)
    assert loss.shape == ()

    goals = jax.ShapeDtypeStruct((task.zones, 2), "float32")
    asked = trace(partial(training.play, task, keys=keys[:, :10]), model, goals)
    assert asked.descriptor.shape == (task.zones, 10, 2)


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "cli.py"), *arguments]


def test_help_answers_at_once_and_mistakes_exit_with_one_sentence(tmp_path: Path):
    began = time.monotonic()
    done = subprocess.run(command("--help"), capture_output=True, text=True)
    assert done.returncode == 0 and "search" in done.stdout
    assert time.monotonic() - began < 10  # a loaded machine; without JAX it takes a tenth of this
    wrong = ("run", "--dry-run", "--set", "train.optimiser=sgd")
    for arguments in (("show", str(tmp_path)), wrong):
        done = subprocess.run(command(*arguments), capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith("qdt: ") and done.stderr.count("\n") == 1


def test_ctrl_c_is_one_line_wherever_it_comes(tmp_path: Path):
    listen = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    as_in_a_terminal = [sys.executable, "-c", listen + "os.execv(sys.argv[1], sys.argv[1:])"]
    arguments = [*as_in_a_terminal, *command("run", "--preset", "tiny", "--out", str(tmp_path))]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "[1/6]" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    last = errors.splitlines()[-1]
    assert last.startswith("qdt: ") and ("interrupted" in last or "continues" in last)
    assert "Traceback" not in errors


TRAIN_AND_DIE = """
import os, signal, sys
from pathlib import Path
import envs, runs
envs.prepare_jax()
import pipeline
log = runs.Stage.log
def log_and_die(self, row):
    log(self, row)
    if row["iteration"] >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
runs.Stage.log = log_and_die
pipeline.do_train(Path(sys.argv[1]), sys.argv[3:], naive=False, prune="")
"""


def test_a_training_that_is_killed_and_resumed_ends_with_the_very_same_model(
    run: Path, tmp_path: Path
):
    """Compared is a training of the same directory in one go, by processes of the same kind."""
    settings = [*TRAIN, "train.checkpoint_seconds=0.0"]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        for stage in ("search", "dataset"):
            (tmp_path / name / stage).symlink_to(run / stage)
    for name, iteration in (("whole", 10**9), ("killed", 0), ("killed", 10**9)):
        done = subprocess.run(
            [sys.executable, "-c", TRAIN_AND_DIE, str(tmp_path / name), str(iteration), *settings],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert (done.returncode == 0) == (iteration > 0), done.stderr
    whole, killed = (tmp_path / name / "qdt" / "model.qdt" for name in ("whole", "killed"))
    assert whole.read_bytes() == killed.read_bytes()


def test_a_dataset_of_another_task_is_refused(run: Path):
    plan = pipeline.make_plan("tiny", "", ["task.length=20"])
    data = dataset.open_dataset(run / "dataset")
    with pytest.raises(UserError, match="another task"):
        training.check_fit(make_task(plan.task), plan.train, data)


def test_a_dataset_of_another_task_with_the_same_sizes_is_refused(run: Path):
    lineage = pipeline.open_run(run)
    elsewhere = replace(lineage.plan, task=replace(lineage.plan.task, reach=2.0))
    with pytest.raises(UserError, match="another task"):
        pipeline.open_dataset(lineage._replace(plan=elsewhere))


def test_a_loss_that_is_not_a_number_stops_the_training(run: Path, tmp_path: Path):
    lineage = pipeline.open_run(run)
    plan = pipeline.change_plan(lineage.plan, [*TRAIN, "train.learning_rate=1e30"])
    data = dataset.open_dataset(run / "dataset")
    stage = runs.Stage(tmp_path / "qdt", {})
    with pytest.raises(UserError, match="not a number"):
        training.train(lineage.task, plan.train, data, None, 0, stage)
