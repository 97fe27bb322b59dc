"""Files that hold hours of work: they appear whole or not at all, and damage is noticed.

- `write_safely` gives a file its name only when all of it is on disk.
- `save_arrays` and `load_arrays` keep a pytree of arrays in the safetensors format: names, shapes and
  numbers that any tool can open, and nothing that could be executed. The reader brings the structure; the
  file only fills in the numbers.
- `lock` lets one process at a time work in a directory.

With several processes (`jax.distributed`) all of them compute the same state, and only process 0 writes.
"""

import contextlib
import dataclasses
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

try:
    import fcntl
except ImportError:  # Windows has none: there, nothing stops a second process
    fcntl = None

FORMAT = "qdt-2"
MAX_JSON = 1 << 24  # bytes; what is read here is at most a few megabytes


class UserError(Exception):
    """Something the user can put right. The command line prints it as one sentence."""


class InUse(UserError):
    """Another process holds it."""


def cache_directory() -> Path:
    """For what can be made again: compiled programs."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "quality-diversity-transformer"


def is_writer() -> bool:
    """Whether this process writes files: process 0 of possibly many."""
    return jax.process_index() == 0


@contextlib.contextmanager
def write_safely(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that appears under its name only if the block ends well."""
    if not path.name:
        raise UserError(f"{path} is a directory, not the name of a file.")
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # directories cannot be opened there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- JSON -------------------------------------------------------------------------------------------


# What stands in a list without lists, objects or strings. A string holds no line break.
ROW = re.compile(r'\[\n\s+([^][{}"]+?)\n\s+\]')


def write_json(path: Path, content: Any) -> None:
    """With a row of numbers on one line."""
    if is_writer():
        text = json.dumps(content, indent=2, default=to_plain)
        text = ROW.sub(lambda row: f"[{' '.join(row[1].split())}]", text)
        with write_safely(path) as file:
            file.write(text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file that may come from anybody."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise UserError(f"{path} is too large for a file of this kind.")
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}.") from None


def to_plain(value: Any) -> Any:
    """What JSON does not know: dataclasses, arrays and NumPy's numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return np.asarray(value).tolist()


# --- pytrees of arrays ------------------------------------------------------------------------------


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _named_arrays(tree: Any) -> dict[str, Any]:
    """The array leaves of a tree by the paths that lead to them, such as `policies.layers.0.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [
        (jax.tree_util.keystr(path, simple=True, separator=".") or "array", leaf)
        for path, leaf in leaves
        if _is_array(leaf)
    ]
    named = dict(arrays)
    assert len(named) == len(arrays), "two leaves of one name"
    return named


def _checksum(arrays: dict[str, np.ndarray], about: str) -> str:
    """Of the names, types, shapes and numbers, and of what is said about them."""
    checksum = zlib.crc32(about.encode())
    for name in sorted(arrays):
        array = arrays[name]
        checksum = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(_bytes(array), checksum)
    return f"{checksum:08x}"


def save_arrays(path: Path, tree: Any, about: dict[str, Any] | None = None) -> None:
    """Writes the arrays of `tree` to a safetensors file, and `about` into its metadata."""
    arrays = {name: np.asarray(leaf) for name, leaf in _named_arrays(tree).items()}
    if not is_writer():
        return
    text = json.dumps(about or {}, default=to_plain)
    metadata = {"format": FORMAT, "about": text, "checksum": _checksum(arrays, text)}
    with write_safely(path) as file:
        # Large types first, so that all of them are aligned.
        ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
        file.write(_header(dict(ordered), metadata))
        for _, array in ordered:
            file.write(_bytes(array))


def _header(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """How a safetensors file begins. The library shuffles metadata; here, equal arrays are equal files."""
    types = {ours: theirs for theirs, ours in _TYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        where = {"shape": array.shape, "data_offsets": [begin, end]}
        header[name] = {"dtype": types[str(array.dtype)]} | where
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def load_arrays(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """Fills the structure `like` (arrays or their shapes) from a file; returns it and `about`.

    Names, types and shapes are compared before any number is read.
    """
    wanted = _named_arrays(like)
    try:
        path.stat()
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(
                    f"{path} has format {metadata.get('format')}, this version reads {FORMAT}."
                )
            _refuse_difference(path, file, wanted)
            arrays = {name: file.get_tensor(name) for name in wanted}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from None
    except (
        SafetensorError,
        RecursionError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
    ) as error:
        raise UserError(f"{path} is damaged, or not a safetensors file: {error}.") from None
    about = metadata.get("about", "")
    if metadata.get("checksum") != _checksum(arrays, about):
        raise UserError(f"{path} is damaged: its checksum does not fit.")
    rest = iter(arrays.values())
    filled = jax.tree.map(lambda leaf: next(rest) if _is_array(leaf) else leaf, like)
    return filled, read_about(path, about)


def read_checksum(path: Path) -> str:
    """The checksum that a file of `save_arrays` carries: equal for equal arrays."""
    try:
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get("checksum", "")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}.") from None


def read_about(path: Path, text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        raise UserError(f"{path} has damaged metadata.") from None


# safetensors' names for NumPy's types.
_TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64",
}  # fmt: skip


def _refuse_difference(path: Path, file: Any, wanted: dict[str, Any]) -> None:
    other = f"{path} belongs to another configuration"
    found = set(file.keys())
    for name, leaf in wanted.items():
        if name not in found:
            raise UserError(f"{other}: it does not hold {name}.")
        part = file.get_slice(name)
        have = f"{_TYPES.get(part.get_dtype(), part.get_dtype())}{list(part.get_shape())}"
        want = f"{leaf.dtype}{list(leaf.shape)}"
        if have != want:
            raise UserError(f"{other}: it holds {name} as {have}, needed is {want}.")
    if further := sorted(found - set(wanted)):
        raise UserError(f"{other}: it also holds {', '.join(further[:3])}.")


# --- one process at a time --------------------------------------------------------------------------


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Holds a directory for this process; the system lets go of it even after `kill -9`."""
    if not is_writer():
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / ".lock", "w")  # noqa: SIM115 - held until the process is done
    except OSError as error:
        raise UserError(f"cannot use {directory} as a run directory: {error.strerror}.") from None
    with file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InUse(f"{directory} is in use by another process.") from None
        yield
