"""Files are whole or absent, damage is one sentence, and a run belongs to one process at a time."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import runs
from envs import TaskConfig
from me_ls import SearchConfig
from runs import Stage, UserError, load_tree, save_tree

TREE = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3), "count": np.array(7, np.int32)}


def same(a: Any, b: Any) -> bool:
    """Structure, types, shapes and every bit."""

    def bits(tree: Any) -> list[Any]:
        return [
            (str(x.dtype), x.shape, np.asarray(x).tobytes()) if hasattr(x, "dtype") else x
            for x in jax.tree.leaves(tree)
        ]

    return jax.tree.structure(a) == jax.tree.structure(b) and bits(a) == bits(b)


def forge(path: Path, header: bytes, body: bytes = b"", length: int | None = None) -> Path:
    """A file whose outside is in order: magic, length and checksum fit whatever the header says."""
    size = (len(header) if length is None else length).to_bytes(4, "little")
    content = runs.MAGIC + size + header + body
    path.write_bytes(content + zlib.crc32(content).to_bytes(4, "little"))
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "tree.qdt"
    save_tree(path, TREE, {"iteration": 3})
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all examples of a property may share."""
    return tmp_path_factory.mktemp("place")


# --- trees of arrays ------------------------------------------------------------------------------

DTYPES = ("bool", "uint8", "int32", "uint32", "int64", "float16", "float32", "float64")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
TREES = st.recursive(
    ARRAYS | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(TREES)
@example({"nothing": np.zeros((0, 3), np.float32), "one": np.float32([1])})
@example({"odd": np.array([True]), "after": np.arange(3.0)})
def test_a_tree_comes_back_as_it_was(place: Path, tree: Any) -> None:
    save_tree(place / "tree.qdt", tree)
    blank = jax.tree.map(lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else x, tree)
    again, about = load_tree(place / "tree.qdt", blank)
    assert same(again, tree)
    assert about == {}


def test_shapes_alone_are_enough_to_read_a_tree(saved: Path) -> None:
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TREE))
    again, about = load_tree(saved, shapes)
    assert same(again, TREE)
    assert about == {"iteration": 3}


def test_arrays_of_jax_come_back_bit_for_bit(tmp_path: Path) -> None:
    tree = {"x": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45]), "half": jnp.ones(3, jnp.bfloat16)}
    save_tree(tmp_path / "tree.qdt", tree)
    again, _ = load_tree(tmp_path / "tree.qdt", tree)
    assert same(jax.tree.map(jnp.asarray, again), tree)


@pytest.mark.parametrize(
    ("like", "difference"),
    [
        ({**TREE, "weights": np.zeros((3, 2), np.float32)}, r"\(2, 3\)"),
        ({**TREE, "weights": np.zeros((2, 3), np.float64)}, "<f4"),
        ({**TREE, "further": np.zeros(1)}, "weights|further"),
        ({"weights": TREE["weights"]}, "count"),
    ],
)
def test_a_tree_of_another_shape_is_refused(saved: Path, like: Any, difference: str) -> None:
    with pytest.raises(UserError, match=f"another configuration.*(?:{difference})"):
        load_tree(saved, like)


def test_every_truncation_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in range(len(whole)):
        saved.write_bytes(whole[:length])
        with pytest.raises(UserError):
            load_tree(saved, TREE)
    saved.write_bytes(whole + b"\0")
    with pytest.raises(UserError):
        load_tree(saved, TREE)


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for position in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        saved.write_bytes(damaged)
        with pytest.raises(UserError):
            load_tree(saved, TREE)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


GOOD = {"version": 1, "about": {}, "arrays": [["['a']", "<f4", [2]]]}
HOSTILE_HEADERS = [
    b"",
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b"{",
    b"\xff\xfe",
    b"\0" * 50,
    nested(100_000),
    b'{"a":' * 50_000,
    b"9" * 10_000,
    b'{"version": 1, "about": {}}',
    *(
        json.dumps(GOOD | change).encode()
        for change in (
            {"version": 2},
            {"version": None},
            {"version": "1"},
            {"about": 3},
            {"about": "ab"},
            {"arrays": None},
            {"arrays": {"a": 1}},
            {"arrays": [[]]},
            {"arrays": ["abc"]},
            {"arrays": [["['a']", "<f4", [1 << 60]]]},
            {"arrays": [["['a']", "<f4", [1 << 60] * 1000]]},
            {"arrays": [["['a']", "<f4", [-2]]]},
            {"arrays": [["['a']", "<f4", ["2"]]]},
            {"arrays": [["['a']", "<f4", ["x"]]]},
            {"arrays": [["['a']", "<f4", [float("inf")]]]},
            {"arrays": [["['a']", "<f4", 2]]},
            {"arrays": [["['a']", "<f4", None]]},
            {"arrays": [["['a']", "O", [2]]]},
            {"arrays": [["['a']", "no such type", [2]]]},
            {"arrays": [["['a']", None, [2]]]},
            {"arrays": [["\ud800", "<f4", [2]]]},
            {"arrays": [["['a']", "<f4", [2]]] * 10_000},
        )
    ),
]


@pytest.mark.parametrize("header", HOSTILE_HEADERS, ids=range(len(HOSTILE_HEADERS)))
def test_a_hostile_header_is_one_sentence(tmp_path: Path, header: bytes) -> None:
    path = forge(tmp_path / "hostile.qdt", header, b"\0" * 7)
    with pytest.raises(UserError):
        load_tree(path, {"a": np.zeros(2, np.float32)})


@pytest.mark.parametrize("place_in_header", ["version", "about", "arrays"])
def test_nesting_of_any_depth_is_one_sentence(tmp_path: Path, place_in_header: str) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit - 150, limit + 10, 2):
        text = json.dumps(GOOD | {place_in_header: "HERE"}).encode()
        path = forge(tmp_path / "deep.qdt", text.replace(b'"HERE"', nested(depth)))
        with pytest.raises(UserError):
            load_tree(path, {"a": np.zeros(2, np.float32)})


def test_a_header_longer_than_its_file_is_one_sentence(tmp_path: Path) -> None:
    for length in (1 << 10, 1 << 24, (1 << 32) - 1):
        path = forge(tmp_path / "long.qdt", b"{}", length=length)
        with pytest.raises(UserError):
            load_tree(path, TREE)


def test_nothing_is_allocated_for_numbers_that_are_not_there(tmp_path: Path) -> None:
    like = {"a": jax.ShapeDtypeStruct((1 << 40,), np.float32)}
    header = GOOD | {"arrays": [["['a']", "<f4", [1 << 40]]]}
    path = forge(tmp_path / "huge.qdt", json.dumps(header).encode(), b"\0" * 8)
    tracemalloc.start()
    with pytest.raises(UserError, match="damaged"):
        load_tree(path, like)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_directory_or_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.qdt", tmp_path / "missing" / "x.qdt"):
        with pytest.raises(UserError, match="cannot read"):
            load_tree(path, TREE)


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, OSError(28, "No space left")])
def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path, fault: Any) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with (
        pytest.raises(UserError if isinstance(fault, OSError) else fault),
        runs.write_safely(path) as file,
    ):
        file.write(b"new, but not all of it")
        raise fault
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


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


# --- a stage --------------------------------------------------------------------------------------


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "search", {"seed": 0, "algo": "me-ls"})


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
    newest = stage.directory / "checkpoint-000000002.qdt"
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
    whole = stage.directory / "checkpoint-000000001.qdt"
    (stage.directory / ".checkpoint-000000002.qdt.partial").write_bytes(whole.read_bytes()[:20])
    restored = stage.restore(checkpoint(0))
    assert restored is not None
    assert restored[0] == 1


def test_another_configuration_is_refused_with_the_difference_named(stage: Stage) -> None:
    Stage(stage.directory, {"seed": 0, "algo": "me-ls"})
    with pytest.raises(UserError, match="seed is 0 there and 1 here") as caught:
        Stage(stage.directory, {"seed": 1, "algo": "me-ls"})
    assert "algo" not in str(caught.value)
    with pytest.raises(UserError, match=r"algo is 'me-ls' there and 'unset' here.*batch"):
        Stage(stage.directory, {"seed": 0, "batch": 10})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"config": 3}', b"\xff", nested(100_000), b"9" * 10_000]
)
def test_a_hostile_config_is_one_sentence(stage: Stage, content: bytes) -> None:
    (stage.directory / "config.json").write_bytes(content)
    with pytest.raises(UserError):
        Stage(stage.directory, {"seed": 0, "algo": "me-ls"})


def test_a_config_nested_to_any_depth_is_one_sentence(stage: Stage) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit - 150, limit + 10, 2):
        content = b'{"config": {"seed": %s}}' % nested(depth)
        (stage.directory / "config.json").write_bytes(content)
        with pytest.raises(UserError):
            Stage(stage.directory, {"seed": 0, "algo": "me-ls"})


def test_a_deep_tree_of_tables_in_a_config_is_one_sentence(stage: Stage) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit // 4, limit + 10, 10):
        tables = b'{"a":' * depth + b"1" + b"}" * depth
        (stage.directory / "config.json").write_bytes(b'{"config": %s}' % tables)
        with pytest.raises(UserError):
            Stage(stage.directory, {"seed": 0, "algo": "me-ls"})


@pytest.mark.parametrize("config", [SearchConfig(hidden=(8, 4)), TaskConfig("ant-omni", 10)])
def test_a_config_comes_back_from_its_file(tmp_path: Path, config: Any) -> None:
    runs.write_json(tmp_path / "config.json", config)
    assert runs.make_config(type(config), runs.read_json(tmp_path / "config.json")) == config


def test_a_config_is_also_made_of_words_of_the_command_line() -> None:
    words = {"batch": "64", "steps": "1e6", "iso_sigma": "0.01", "hidden": "16,8", "algo": "me"}
    config = runs.make_config(SearchConfig, words)
    assert config == SearchConfig("me", 1_000_000, batch=64, iso_sigma=0.01, hidden=(16, 8))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.sampled_from([SearchConfig, TaskConfig]), st.data())
def test_a_wrong_value_in_a_config_is_one_sentence(kind: type, data: st.DataObject) -> None:
    names = st.sampled_from([field.name for field in dataclasses.fields(kind)])
    values = data.draw(st.dictionaries(names | st.text(max_size=3), JSON, max_size=2) | JSON)
    try:
        config = runs.make_config(kind, values)
    except UserError:
        return
    for field in dataclasses.fields(kind):  # what is accepted has the type that it should have
        assert type(getattr(config, field.name)) is type(field.default)


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


# --- processes and signals ------------------------------------------------------------------------

HOLD_LOCK = """
import pathlib, sys, time, runs
with runs.lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_run_belongs_to_one_process_until_that_one_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="in use by another process"), runs.lock(tmp_path):
            pass
        holder.kill()
    with runs.lock(tmp_path):
        pass


def test_a_run_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run directory"), runs.lock(tmp_path / "file" / "run"):
        pass
    with pytest.raises(UserError, match=r"cannot create|not readable"):
        Stage(tmp_path / "file" / "run", {})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_does_not_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with runs.finish_iteration_on_signal():
        assert not runs.stop_requested()
        os.kill(os.getpid(), number)
        assert runs.stop_requested()
    assert signal.getsignal(number) is before


# --- thousands of damaged files -------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file after something bad: bytes changed, cut out, repeated or put in."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(content) - 1, 0)))
        match draw(st.sampled_from(["set", "flip", "cut", "repeat", "insert", "end"])):
            case "set" if content:
                content[at] = draw(st.integers(0, 255))
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[at : at + draw(st.integers(1, 40))]
            case "repeat":
                content[at:at] = content[at : at + draw(st.integers(1, 40))]
            case "insert":
                content[at:at] = draw(st.binary(max_size=20))
            case "end":
                del content[at:]
    return bytes(content)


HEADER = json.dumps(GOOD).encode()
CONFIG = json.dumps({"config": {"seed": 0, "hidden": [8, 8]}, "versions": {}}).encode()
METRICS = b"".join(b'{"iteration": %d, "coverage": 0.5}\n' % i for i in range(4))
MANY = settings(max_examples=4000)


@pytest.mark.faults
@MANY
@given(damaged(HEADER))
def test_damaged_headers_with_a_checksum_that_fits(place: Path, header: bytes) -> None:
    path = forge(place / "tree.qdt", header, b"\0" * 8)
    with contextlib.suppress(UserError):
        tree, _ = load_tree(path, {"a": np.zeros(2, np.float32)})
        assert tree["a"].shape == (2,)


@pytest.mark.faults
@MANY
@given(st.data())
def test_damaged_trees(place: Path, data: st.DataObject) -> None:
    path = place / "tree.qdt"
    save_tree(path, TREE, {"iteration": 3})
    whole = path.read_bytes()
    content = data.draw(damaged(whole))
    path.write_bytes(content)
    if content == whole:
        return
    with pytest.raises(UserError):
        load_tree(path, TREE)


@pytest.mark.faults
@MANY
@given(damaged(CONFIG))
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
