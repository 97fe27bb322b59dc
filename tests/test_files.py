"""Files are whole or absent, damage is one sentence, and a directory belongs to one process at a time."""

import contextlib
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.numpy import load_file

import envs
import me_ls
import qdt
from machinery import files
from machinery.files import UserError, load_arrays, read_checksum, save_arrays

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
    """A file that begins as a safetensors file does, whatever its header says."""
    size = (len(header) if length is None else length).to_bytes(8, "little")
    path.write_bytes(size + header + body)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "tree.safetensors"
    save_arrays(path, TREE, {"iteration": 3})
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
NAMES = st.text(alphabet='aé_ "\\', min_size=1, max_size=3)  # any but dots, which join names
TREES = st.recursive(
    ARRAYS | st.none() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@given(TREES)
@example({"nothing": np.zeros((0, 3), np.float32), "one": np.float32([1])})
@example({"odd": np.array([True]), "after": np.arange(3.0)})
@example(np.arange(3.0))
@example({})
def test_a_tree_comes_back_as_it_was(place: Path, tree: Any) -> None:
    save_arrays(place / "tree.safetensors", tree)
    blank = jax.tree.map(lambda x: np.zeros_like(x) if isinstance(x, np.ndarray) else x, tree)
    again, about = load_arrays(place / "tree.safetensors", blank)
    assert same(again, tree)
    assert about == {}


def test_shapes_alone_are_enough_to_read_a_tree(saved: Path) -> None:
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, TREE))
    again, about = load_arrays(saved, shapes)
    assert same(again, TREE)
    assert about == {"iteration": 3}


def test_arrays_of_jax_come_back_bit_for_bit(tmp_path: Path) -> None:
    tree = {"x": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45]), "half": jnp.ones(3, jnp.bfloat16)}
    save_arrays(tmp_path / "tree.safetensors", tree)
    again, _ = load_arrays(tmp_path / "tree.safetensors", tree)
    assert same(jax.tree.map(jnp.asarray, again), tree)


def test_equal_arrays_are_equal_files(tmp_path: Path) -> None:
    """Also those that are not contiguous in memory; another number is another checksum."""
    turned = TREE | {"weights": np.asfortranarray(TREE["weights"])}
    other = TREE | {"count": np.array(8, np.int32)}
    paths = [tmp_path / name for name in ("a", "b", "c", "other")]
    for path, tree in zip(paths, (TREE, TREE, turned, other), strict=True):
        save_arrays(path, tree, {"a": 1, "b": 2})
    first, *equal, different = (path.read_bytes() for path in paths)
    assert all(content == first for content in equal) and different != first
    first, *equal, different = map(read_checksum, paths)
    assert all(checksum == first for checksum in equal) and different != first


def test_a_repertoire_and_a_model_are_open_to_any_reader_of_safetensors(
    tmp_path: Path, point: envs.Task
) -> None:
    """The same names, shapes and numbers, without a line of this project."""
    policies = me_ls.random_policies(point, (8,), jax.random.split(jax.random.key(0), 5))
    centroids = me_ls.cvt(point.low, point.high, 5, key=jax.random.key(1))
    repertoire = me_ls.empty_repertoire(point, (8,), centroids)
    repertoire = eqx.tree_at(lambda r: r.policies, repertoire, policies)
    model = qdt.make_model(point, qdt.QDTConfig(layers=1, width=8), key=jax.random.key(2))
    layers, attention = policies.layers, model.layers[0].query_key_value
    known = (
        {
            "policies.layers.0.weight": layers[0].weight,
            "policies.layers.1.bias": layers[1].bias,
            "fitness": repertoire.fitness,
            "centroids": centroids,
        },
        {
            "layers.0.query_key_value.weight": attention.weight,
            "embed_time": model.embed_time,
            "statistics.action_noise": model.statistics.action_noise,
        },
    )

    def contents(arrays: Iterable[Any]) -> list[Any]:
        return sorted((str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in arrays)

    for tree, named in zip((repertoire, model), known, strict=True):
        save_arrays(tmp_path / "arrays.safetensors", tree)
        loaded = load_file(tmp_path / "arrays.safetensors")
        assert same({name: loaded[name] for name in named}, named)
        assert contents(loaded.values()) == contents(jax.tree.leaves(tree))
        with safe_open(tmp_path / "arrays.safetensors", framework="numpy") as file:
            assert file.metadata()["format"] == files.FORMAT


@pytest.mark.parametrize(
    ("like", "difference"),
    [
        ({**TREE, "weights": np.zeros((3, 2), np.float32)}, r"\[2, 3\]"),
        ({**TREE, "weights": np.zeros((2, 3), np.float64)}, "float32"),
        ({**TREE, "further": np.zeros(1)}, "does not hold further"),
        ({"weights": TREE["weights"]}, "also holds count"),
    ],
)
def test_a_tree_of_another_shape_is_refused(saved: Path, like: Any, difference: str) -> None:
    with pytest.raises(UserError, match=f"another configuration.*(?:{difference})"):
        load_arrays(saved, like)


def one_sentence(error: pytest.ExceptionInfo[UserError]) -> bool:
    text = str(error.value)
    return text.endswith(".") and "\n" not in text


def test_every_truncation_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for content in (*(whole[:length] for length in range(len(whole))), whole + b"\0"):
        saved.write_bytes(content)
        with pytest.raises(UserError) as error:
            load_arrays(saved, TREE)
        assert one_sentence(error)


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    for position in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        saved.write_bytes(damaged)
        with pytest.raises(UserError) as error:
            load_arrays(saved, TREE)
        assert one_sentence(error)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


WANTED = {"a": np.zeros(2, np.float32)}
ABOUT = {"format": files.FORMAT, "about": "{}", "checksum": files._checksum(WANTED, "{}")}
ARRAY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
GOOD = {"__metadata__": ABOUT, "a": ARRAY}


def changed(**metadata: Any) -> dict[str, Any]:
    return {**GOOD, "__metadata__": ABOUT | metadata}


def checked(about: str) -> dict[str, Any]:
    """With a checksum that fits."""
    return changed(about=about, checksum=files._checksum(WANTED, about))


HOSTILE_HEADERS = [
    b"",
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b"{",
    b"{}",
    b"\xff\xfe",
    b"\0" * 50,
    nested(100_000),
    b'{"a":' * 50_000,
    b"9" * 10_000,
    b'{"__metadata__": {"about":' + nested(200) + b"}}",
    *(
        json.dumps(header).encode()
        for header in (
            {"a": ARRAY},
            {"__metadata__": ABOUT},
            {"__metadata__": None, "a": ARRAY},
            {"__metadata__": [], "a": ARRAY},
            {"__metadata__": {}, "a": ARRAY},
            {"__metadata__": {"format": files.FORMAT}, "a": ARRAY},
            {"__metadata__": {n: ABOUT[n] for n in ("format", "about")}, "a": ARRAY},
            {"__metadata__": {n: ABOUT[n] for n in ("format", "checksum")}, "a": ARRAY},
            changed(format="qdt-1"),
            changed(format=2),
            changed(format=None),
            changed(checksum="00000000"),
            changed(checksum=""),
            changed(checksum=0),
            changed(about="{ }"),
            changed(about={}),
            checked(""),
            checked("3"),
            checked("{"),
            checked("[1]"),
            checked(nested(100_000).decode()),
            GOOD | {"b": ARRAY},
            GOOD | {"b": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}},
            *(
                GOOD | {"a": ARRAY | change}
                for change in (
                    {"dtype": "F64"},
                    {"dtype": "F64", "shape": [1]},
                    {"dtype": "I32"},
                    {"dtype": "BF16", "shape": [4]},
                    {"dtype": "F8_E4M3", "shape": [8]},
                    {"dtype": "f32"},
                    {"dtype": "O"},
                    {"dtype": None},
                    {"dtype": ["F32"]},
                    {"shape": [1]},
                    {"shape": []},
                    {"shape": [1, 2]},
                    {"shape": [1 << 60]},
                    {"shape": [1 << 63, 2]},
                    {"shape": [1 << 60] * 1000},
                    {"shape": [1 << 70]},
                    {"shape": [0, 1 << 60]},
                    {"shape": [-2]},
                    {"shape": ["2"]},
                    {"shape": [2.5]},
                    {"shape": 2},
                    {"shape": None},
                    {"data_offsets": [0, 4]},
                    {"data_offsets": [4, 12]},
                    {"data_offsets": [8, 0]},
                    {"data_offsets": [-8, 0]},
                    {"data_offsets": [0, 1 << 63]},
                    {"data_offsets": [0, 1 << 80]},
                    {"data_offsets": [1 << 63, (1 << 63) + 8]},
                    {"data_offsets": [0]},
                    {"data_offsets": "08"},
                    {"data_offsets": None},
                )
            ),
            {"__metadata__": ABOUT, "a": None},
            {"__metadata__": ABOUT, "a": []},
            {"__metadata__": ABOUT, "\ud800": ARRAY},
            {"__metadata__": ABOUT} | {f"a{i}": ARRAY for i in range(10_000)},
        )
    ),
]


def test_a_header_of_other_hands_is_read_if_it_is_right(tmp_path: Path) -> None:
    path = forge(tmp_path / "good.safetensors", json.dumps(GOOD).encode(), b"\0" * 8)
    assert same(load_arrays(path, WANTED), (WANTED, {}))


@pytest.mark.parametrize("header", HOSTILE_HEADERS, ids=range(len(HOSTILE_HEADERS)))
def test_a_hostile_header_is_one_sentence(tmp_path: Path, header: bytes) -> None:
    path = forge(tmp_path / "hostile.safetensors", header, b"\0" * 8)
    with pytest.raises(UserError) as error:
        load_arrays(path, WANTED)
    assert one_sentence(error)
    with contextlib.suppress(UserError):
        assert isinstance(read_checksum(path), str)


def test_two_arrays_in_one_place_are_refused(tmp_path: Path) -> None:
    """Overlapping, and with a hole between them."""
    like = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    checksum = files._checksum(like, "{}")
    for begin in (0, 4, 12):
        second = ARRAY | {"data_offsets": [begin, begin + 8]}
        header = changed(checksum=checksum) | {"b": second}
        path = forge(tmp_path / "x.safetensors", json.dumps(header).encode(), b"\0" * (begin + 8))
        with pytest.raises(UserError, match="damaged"):
            load_arrays(path, like)


@pytest.mark.parametrize("place_in_header", ["format", "about", "checksum", "a"])
def test_nesting_of_any_depth_is_one_sentence(tmp_path: Path, place_in_header: str) -> None:
    limit = sys.getrecursionlimit()
    text = json.dumps(
        GOOD | {"a": "HERE"} if place_in_header == "a" else changed(**{place_in_header: "HERE"})
    ).encode()
    for depth in (1, 2, *range(100, 150), *range(limit - 150, limit + 10, 2)):
        header = text.replace(b'"HERE"', nested(depth))
        with pytest.raises(UserError):
            load_arrays(forge(tmp_path / "deep.safetensors", header, b"\0" * 8), WANTED)


def test_what_is_said_about_arrays_may_be_nested_to_any_depth(tmp_path: Path) -> None:
    limit = sys.getrecursionlimit()
    for depth in range(limit - 150, limit + 10, 2):
        header = json.dumps(checked(nested(depth).decode())).encode()
        with pytest.raises(UserError, match="damaged metadata"):
            load_arrays(forge(tmp_path / "deep.safetensors", header, b"\0" * 8), WANTED)


def test_a_header_longer_than_its_file_is_one_sentence(tmp_path: Path) -> None:
    for length in (1 << 10, 1 << 24, (1 << 32) - 1, (1 << 64) - 1):
        path = forge(tmp_path / "long.safetensors", b"{}", length=length)
        with pytest.raises(UserError, match="damaged"):
            load_arrays(path, TREE)


def test_nothing_is_allocated_for_numbers_that_are_not_there(tmp_path: Path) -> None:
    like = {"a": jax.ShapeDtypeStruct((1 << 40,), np.float32)}
    header = GOOD | {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    path = forge(tmp_path / "huge.safetensors", json.dumps(header).encode(), b"\0" * 8)
    tracemalloc.start()
    with pytest.raises(UserError, match="damaged"):
        load_arrays(path, like)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_directory_or_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.safetensors", tmp_path / "missing" / "x"):
        with pytest.raises(UserError, match="cannot read"):
            load_arrays(path, TREE)
        with pytest.raises(UserError, match="cannot read"):
            read_checksum(path)


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"nul", nested(100_000), b'{"a":' * 50_000, b"9" * 10_000]
)
def test_hostile_json_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file.json").write_bytes(content)
    with pytest.raises(UserError, match="not readable JSON"):
        files.read_json(tmp_path / "file.json")


def test_json_that_is_missing_or_too_large_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="does not exist"):
        files.read_json(tmp_path / "file.json")
    monkeypatch.setattr(files, "MAX_JSON", 3)
    (tmp_path / "file.json").write_text("1234")
    with pytest.raises(UserError, match="too large"):
        files.read_json(tmp_path / "file.json")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text('[]{}",\\\n 1a'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('[] "\n'), inner),
)


@given(content=JSON)
@example(content={"a": ["[\n 1,\n 2\n]", [1, 2, [3, None]]]})
def test_json_reads_as_what_was_written(
    content: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    files.write_json(path, content)
    assert files.read_json(path) == content


def test_a_row_of_numbers_is_a_row_in_json(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, {"points": np.array([[1.5, 2.0], [3.0, 4.0]]), "names": ["a", "b"]})
    lines = path.read_text().splitlines()
    assert lines[2:4] == ["    [1.5, 2.0],", "    [3.0, 4.0]"] and '    "a",' in lines


def test_arrays_and_configs_are_plain_in_json(tmp_path: Path) -> None:
    content = {"x": jnp.arange(3), "n": np.float32(0.5), "config": envs.TaskConfig("point-omni", 5)}
    files.write_json(tmp_path / "file.json", content)
    again = files.read_json(tmp_path / "file.json")
    assert again["x"] == [0, 1, 2] and again["n"] == 0.5
    assert again["config"]["length"] == 5 and again["config"]["reach"] is None


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, OSError(28, "No space left")])
def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path, fault: Any) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with (
        pytest.raises(UserError if isinstance(fault, OSError) else fault),
        files.write_safely(path) as file,
    ):
        file.write(b"new, but not all of it")
        raise fault
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save_arrays(tmp_path / "file" / "inside", TREE)
    with pytest.raises(UserError, match="a directory"):
        save_arrays(Path("/"), TREE)


# --- one process at a time ------------------------------------------------------------------------

HOLD_LOCK = """
import pathlib, sys, time
from machinery import files
with files.lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


WITHOUT_FCNTL = """
import pathlib, sys
sys.modules["fcntl"] = None  # as on Windows: importing it fails
import cli
from machinery import files
with files.lock(pathlib.Path(sys.argv[1])):
    files.write_json(pathlib.Path(sys.argv[1]) / "x.json", 1)
"""


def test_where_there_are_no_locks_everything_else_works(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    run_python(WITHOUT_FCNTL, tmp_path)
    assert files.read_json(tmp_path / "x.json") == 1


def test_a_directory_belongs_to_one_process_until_that_one_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="in use by another process"), files.lock(tmp_path):
            pass
        holder.kill()
    with files.lock(tmp_path):
        pass


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run directory"), files.lock(tmp_path / "file" / "run"):
        pass


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


MANY = settings(max_examples=4000)


@pytest.mark.faults
@MANY
@given(damaged(json.dumps(GOOD).encode()))
def test_damaged_headers_of_a_length_that_fits(place: Path, header: bytes) -> None:
    path = forge(place / "tree.safetensors", header, b"\0" * 8)
    with contextlib.suppress(UserError):
        tree, _ = load_arrays(path, WANTED)
        assert same(tree, WANTED)
    with contextlib.suppress(UserError):
        read_checksum(path)


@pytest.mark.faults
@MANY
@given(st.data())
def test_damaged_trees_are_noticed_or_read_as_they_were(place: Path, data: st.DataObject) -> None:
    """As they were: a blank more or less between the words of the header says the same."""
    path = place / "tree.safetensors"
    save_arrays(path, TREE, {"iteration": 3})
    whole = path.read_bytes()
    content = data.draw(damaged(whole))
    path.write_bytes(content)
    try:
        tree, about = load_arrays(path, TREE)
    except UserError:
        assert content != whole
    else:
        assert same(tree, TREE) and about == {"iteration": 3}
