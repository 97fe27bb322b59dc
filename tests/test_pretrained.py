"""A model that is handed on: it plays without the run it came from, and its card tells the truth."""

import json
import re
import shutil
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import cli
from machinery import pretrained, runs
from machinery.demand import PARTS
from machinery.files import UserError, read_json, save_arrays
from machinery.plans import STAGES, Asked, changes_of
from machinery.runs import open_stage
from qdt import make_model

SMALL = ["task.length=20", "search.steps=12800", "search.cells=16", "train.width=16"]
SMALL += ["dataset.trajectories=64", "dataset.action_noise=0.05"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> cli.Run:
    """A small repertoire and its dataset, and a QDT that has learned nothing but plays."""
    plan = cli.PLANS.asked(Asked("tiny", algo="me-ls", changes=changes_of(SMALL, STAGES)))
    made = cli.do_search(tmp_path_factory.mktemp("handed-on") / "run", plan)
    cli.do_dataset(made, {})
    model = make_model(made.task, plan.train, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.head.weight, model, replace_fn=lambda w: 50 * w)
    with open_stage(made.directory / "qdt", {"train": plan.train, "dataset": None}):
        save_arrays(made.directory / "qdt" / "model.safetensors", model)
    return made


@pytest.fixture(scope="module")
def out(run) -> Path:
    cli.do_evaluate(run, "accuracy")
    out = run.directory.parent / "pretrained" / "point-omni"
    cli.export(run.directory, out)
    return out


def test_a_card_needs_a_measurement(run, tmp_path):
    shutil.copytree(run.directory, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "evaluation", ignore_errors=True)
    with pytest.raises(UserError, match=r"`qdt evaluate accuracy .*run` first"):
        cli.export(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_is_not_written_over(run, out):
    with pytest.raises(UserError, match="a run of its own"):
        cli.export(run.directory, run.directory)


def test_it_holds_what_is_needed_to_play_and_nothing_else(run, out):
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {
        "plan.json",
        "qdt/config.json",
        "qdt/model.safetensors",
        "demonstrators.json",
        "evaluation/accuracy.json",
        "README.md",
    }
    shown = read_json(out / "demonstrators.json")
    selection = run.dataset().meta.selection
    np.testing.assert_allclose(shown["descriptor"], selection.descriptor)
    assert len(shown["centroids"]) == len(selection.centroids)


def test_it_plays_what_the_run_plays(run, out, capsys):
    for place in (run.directory, out):
        cli.act(place, ["0.5 -0.5"], episodes=2)
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 6 and told[:3] == told[3:]


def test_only_the_model_plays_before_the_page_and_the_map_has_its_colours(out):
    handed_on = cli.open_run(out)
    cast = cli.cast_of(handed_on, starts=1)
    assert cast.titles == {"model": "QDT"}
    assert cast.accuracy is not None and set(cast.accuracy.distance) == {"model"}
    assert len(cast.film("model", [(0.5, 0.5)] * PARTS, 0, 0.0)) == 1


def test_evaluated_again_it_gives_the_number_of_its_card(run, out, tmp_path):
    shutil.copytree(out, tmp_path / "copy")
    again = cli.do_evaluate(cli.open_run(tmp_path / "copy"), "accuracy")
    assert set(again) == {"qdt"}
    in_the_run = read_json(run.result_path("accuracy"))["result"]["qdt"]
    assert again["qdt"]["mean_distance"] == in_the_run["mean_distance"]
    text = (out / "README.md").read_text()
    for values in (again["qdt"]["distance"], again["qdt"]["spread"]):
        assert pretrained.interval(np.asarray(values).tolist()) in text


def test_the_card_tells_where_it_comes_from(run, out):
    text = (out / "README.md").read_text()
    assert "`point-omni`, episodes of 20 steps" in text and "robot |" not in text
    assert "tiny, seed 0" in text and "deviation 0.05" in text
    assert "x at the end (m), from -1.5 to 1.5" in text
    selection = run.dataset().meta.selection
    policies, zones = len(selection.cells), len(selection.centroids)
    assert f"{policies} policies, for {policies} of {zones} zones" in text
    assert f"{zones - policies} of {zones} zones have none" in text
    assert (runs.commit() or "an unknown one") in text


def test_the_interval_is_the_means_and_leaves_out_what_is_not_known():
    assert pretrained.interval([1.0, 3.0, None, float("nan")]) == "2.000 (0.040 to 3.960)"
    assert pretrained.interval([1.0]) == "1.000"


@pytest.mark.parametrize("experiment", ["reassess", "reproducibility"])
def test_what_needs_the_repertoire_is_told_in_a_sentence(out, experiment):
    with pytest.raises(UserError, match="about a repertoire, and there is none"):
        cli.do_evaluate(cli.open_run(out), experiment)
    with pytest.raises(UserError, match="a pretrained model: it has no repertoire"):
        cli.show(out)
    with pytest.raises(UserError, match="its card has its numbers"):
        cli.found_runs([out])


def test_a_search_that_is_not_finished_is_no_pretrained_model(run, tmp_path):
    shutil.copytree(run.directory, tmp_path / "run")
    (tmp_path / "run" / "search" / "repertoire.safetensors").unlink()
    with pytest.raises(UserError, match="is not finished; continue it first"):
        cli.do_evaluate(cli.open_run(tmp_path / "run"), "accuracy")


def test_what_was_made_knows_its_commit(run):
    stored = json.loads((run.directory / "plan.json").read_text())["versions"]
    assert stored.get("commit") == runs.commit()
    assert (runs.commit() is None) == (not (Path(runs.__file__).parents[1] / ".git").exists())


# --- the models that are handed on with the project -------------------------------------------------

OURS = sorted(
    path.parent for path in (Path(__file__).parents[1] / "pretrained").glob("*/plan.json")
)


@pytest.mark.parametrize("directory", OURS, ids=lambda path: path.name)
def test_our_models_play(directory, capsys):
    """As in their cards: asked for the goal that they reach best, they come nearer than to the middle."""
    measured = read_json(directory / "evaluation" / "accuracy.json")["result"]["qdt"]
    best = measured["goals"][int(np.argmin(measured["distance"]))]
    cli.act(directory, [" ".join(map(str, best))], episodes=4)
    told = capsys.readouterr().out
    distance = float(re.search(r"mean distance ([\d.]+)", told)[1])
    task = cli.open_run(directory).task
    middle = (np.array(task.low) + np.array(task.high)) / 2
    assert distance < 0.5 * np.linalg.norm(np.array(best) - middle)


@pytest.mark.slow
@pytest.mark.parametrize("directory", OURS, ids=lambda path: path.name)
def test_our_models_are_as_good_as_their_cards_say(directory, tmp_path):
    """On another processor an ant's path differs after a while, and so do the means, a little."""
    card = read_json(directory / "evaluation" / "accuracy.json")["result"]["qdt"]
    shutil.copytree(directory, tmp_path / "model")
    result = cli.do_evaluate(cli.open_run(tmp_path / "model"), "accuracy")["qdt"]
    for name in ("mean_distance", "mean_spread"):
        assert result[name] == pytest.approx(card[name], rel=0.1)
        assert f"{card[name]:.3f}" in (directory / "README.md").read_text()
