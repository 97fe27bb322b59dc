"""A run on disk: its plan, and stages that outlive kills, damage and a full disk."""

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_files import MANY, damaged, nested, same

from machinery import runs
from machinery.files import UserError
from machinery.runs import Stage

CONFIG = {"seed": 0, "algo": "me-ls"}


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "search", CONFIG)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all examples of a property may share."""
    return tmp_path_factory.mktemp("place")


# --- plans ----------------------------------------------------------------------------------------

PLAN = {"preset": None, "seed": 3, "search": {"cells": 8}}


def test_a_plan_is_read_from_its_run_or_from_its_file(tmp_path: Path) -> None:
    runs.write_plan(tmp_path / "run", PLAN)
    assert runs.read_plan(tmp_path / "run") == PLAN
    assert runs.read_plan(tmp_path / "run" / runs.PLAN) == PLAN
    written = json.loads((tmp_path / "run" / runs.PLAN).read_text())
    assert {"python", "jax", "equinox"} <= set(written["versions"])


def test_all_runs_below_a_directory_are_found(tmp_path: Path) -> None:
    for name in ("b", "a/x", "a/y/z"):
        runs.write_plan(tmp_path / name, PLAN)
    assert runs.find_runs(tmp_path) == [tmp_path / name for name in ("a/x", "a/y/z", "b")]
    assert runs.find_runs(tmp_path / "b") == [tmp_path / "b"]
    assert runs.find_runs(tmp_path / "nothing") == []


HOSTILE = [b"", b"{", b"[]", b"3", b"null", b"\xff", nested(100_000), b"9" * 10_000]


@pytest.mark.parametrize("content", [*HOSTILE, b"{}", b'{"plan": 3}', b'{"plan": null}'])
def test_a_hostile_plan_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / runs.PLAN).write_bytes(content)
    with pytest.raises(UserError):
        runs.read_plan(tmp_path)


def test_a_plan_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(UserError, match="does not exist"):
            runs.read_plan(path)


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoint(value: int) -> dict[str, np.ndarray]:
    return {"x": np.full(3, value, np.float32)}


def test_the_last_two_checkpoints_are_kept(stage: Stage) -> None:
    assert stage.restore(checkpoint(0)) is None
    for i in (1, 2, 9, 10, 1_000_000_000, 1_000_000_001):  # beyond the padding of the names
        stage.save_checkpoint(i, checkpoint(i))
    kept = sorted(int(p.stem.split("-")[1]) for p in stage.directory.glob("checkpoint-*"))
    assert kept == [1_000_000_000, 1_000_000_001]
    restored = stage.restore(checkpoint(0))
    assert restored is not None
    assert restored[0] == 1_000_000_001


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(
    stage: Stage, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    for i in (1, 2):
        stage.save_checkpoint(i, checkpoint(i))
    newest = stage.directory / "checkpoint-000000002.safetensors"
    content = newest.read_bytes()
    flipped = content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]
    newest.write_bytes({"cut": content[:-5], "flipped": flipped, "empty": b""}[damage])
    restored = stage.restore(checkpoint(0))
    assert restored is not None
    assert restored[0] == 1
    assert same(restored[1], checkpoint(1))
    assert newest.name in capsys.readouterr().err


def test_without_any_readable_checkpoint_nothing_starts_over_silently(stage: Stage) -> None:
    for i in (1, 2):
        stage.save_checkpoint(i, checkpoint(i))
    for path in stage.directory.glob("checkpoint-*"):
        path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"no checkpoint in .* can be read"):
        stage.restore(checkpoint(0))


def test_half_a_checkpoint_under_its_temporary_name_is_never_read(stage: Stage) -> None:
    stage.save_checkpoint(1, checkpoint(1))
    whole = (stage.directory / "checkpoint-000000001.safetensors").read_bytes()
    (stage.directory / ".checkpoint-000000002.safetensors.partial").write_bytes(whole[:20])
    restored = stage.restore(checkpoint(0))
    assert restored is not None
    assert restored[0] == 1


def test_a_full_disk_loses_nothing(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("256k")
    stage = Stage(disk / "search", {"seed": 0})
    old, new = ({"x": np.full(20_000, value, np.float32)} for value in (1, 2))
    stage.save_checkpoint(1, old)
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
        while filler.write(b"\0" * 4096):
            pass
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        stage.save_checkpoint(2, new)
    with pytest.raises(UserError, match=r"cannot write .*No space left"):
        for i in range(1000):  # what a file already holds of its last block may still be filled
            stage.log({"iteration": i})
    restored = Stage(disk / "search", {"seed": 0}).restore(new)
    assert restored is not None
    assert restored[0] == 1
    assert same(restored[1], old)

    (disk / "filler").unlink()
    stage.rewind_metrics(before=1)
    stage.save_checkpoint(2, new)
    restored = stage.restore(old)
    assert restored is not None
    assert same(restored[1], new)


# --- the config of a stage ------------------------------------------------------------------------


def test_another_configuration_is_refused_with_the_difference_named(stage: Stage) -> None:
    Stage(stage.directory, CONFIG)
    with pytest.raises(UserError, match="seed is 0 there and 1 here") as caught:
        Stage(stage.directory, {"seed": 1, "algo": "me-ls"})
    assert "algo" not in str(caught.value)
    with pytest.raises(UserError, match=r"algo is 'me-ls' there and 'unset' here.*batch"):
        Stage(stage.directory, {"seed": 0, "batch": 10})
    assert runs.read_stage_config(stage.directory) == CONFIG


def test_a_mistake_before_anything_was_made_is_forgotten(tmp_path: Path) -> None:
    for seed in (0, 1):
        with pytest.raises(UserError, match="no"), runs.open_stage(tmp_path / "a", {"seed": seed}):
            raise UserError("no")
    with runs.open_stage(tmp_path / "a", {"seed": 2}) as stage:
        stage.save_checkpoint(1, checkpoint(1))
    with pytest.raises(UserError, match="no"), runs.open_stage(tmp_path / "a", {"seed": 2}):
        raise UserError("no")
    with pytest.raises(UserError, match="seed is 2 there and 3 here"):
        Stage(tmp_path / "a", {"seed": 3})


@pytest.mark.parametrize("content", [*HOSTILE, b"{}", b'{"config": 3}'])
def test_a_hostile_config_is_one_sentence(stage: Stage, content: bytes) -> None:
    (stage.directory / "config.json").write_bytes(content)
    with pytest.raises(UserError):
        Stage(stage.directory, CONFIG)


def test_a_config_nested_to_any_depth_is_one_sentence(stage: Stage) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit - 150, limit + 10, 2):
        content = b'{"config": {"seed": %s}}' % nested(depth)
        (stage.directory / "config.json").write_bytes(content)
        with pytest.raises(UserError):
            Stage(stage.directory, CONFIG)


def test_a_deep_tree_of_tables_in_a_config_is_one_sentence(stage: Stage) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit // 4, limit + 10, 10):
        tables = b'{"a":' * depth + b"1" + b"}" * depth
        (stage.directory / "config.json").write_bytes(b'{"config": %s}' % tables)
        with pytest.raises(UserError):
            Stage(stage.directory, CONFIG)


def test_a_stage_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot create|not readable"):
        Stage(tmp_path / "file" / "run", {})


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_survive_a_line_that_was_cut_off(stage: Stage) -> None:
    for i in range(5):
        stage.log({"iteration": i, "coverage": np.float32(i / 8)})
    with open(stage.metrics_path, "a") as file:
        file.write('{"iteration": 5, "cover')
    assert [row["iteration"] for row in runs.read_metrics(stage.metrics_path)] == [0, 1, 2, 3, 4]
    stage.rewind_metrics(before=3)
    stage.log({"iteration": 3, "coverage": 0.5})
    rows = runs.read_metrics(stage.metrics_path)
    assert [row["coverage"] for row in rows] == [0.0, 0.125, 0.25, 0.5]


def test_hostile_metrics_are_left_out(stage: Stage) -> None:
    lines = [b"[]", b"3", b'{"iteration": "x"}', nested(100_000), b"\xff\xfe", b"9" * 10_000, b"{}"]
    stage.metrics_path.write_bytes(b"\n".join([*lines, b'{"iteration": 0}', b""]))
    assert runs.read_metrics(stage.metrics_path) == [{"iteration": 0}]


# --- thousands of damaged files -------------------------------------------------------------------

STORED = json.dumps({"config": {"seed": 0, "hidden": [8, 8]}, "versions": {}}).encode()
METRICS = b"".join(b'{"iteration": %d, "coverage": 0.5}\n' % i for i in range(4))


@pytest.mark.faults
@MANY
@given(damaged(STORED))
def test_damaged_configs(place: Path, content: bytes) -> None:
    (place / "config.json").write_bytes(content)
    with contextlib.suppress(UserError):
        Stage(place, {"seed": 0, "hidden": (8, 8)})


@pytest.mark.faults
@MANY
@given(damaged(METRICS), st.integers(0, 5))
def test_damaged_metrics(place: Path, content: bytes, before: int) -> None:
    stage = Stage(place / "metrics", {})
    stage.metrics_path.write_bytes(content)
    stage.rewind_metrics(before)
    assert all(row["iteration"] < before for row in runs.read_metrics(stage.metrics_path))
