"""A run on disk: what keeps hours of work safe.

Every stage of the pipeline (search, dataset, training) writes into a directory of its own inside one
run directory. This file holds what they share, and knows nothing about the method:

- `write_safely`: a file appears whole or not at all (temporary name, sync, rename);
- `save_tree` / `load_tree`: a pytree of arrays as one file with a JSON header and a checksum. Files are
  data, never code: the reader brings the structure, the file only fills in the numbers;
- `Stage`: the config, the metrics and the last two checkpoints of one stage;
- `lock`, `stop_requested`, `Progress`: one process at a time, a clean end on Ctrl-C, a line to look at.

With several processes (`jax.distributed`), all of them compute the same state and only process 0 writes.
"""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

MAGIC = b"qdt-tree"
FORMAT_VERSION = 1
MAX_HEADER = 1 << 24  # bytes; a header is a few kilobytes


Config = TypeVar("Config")


class UserError(Exception):
    """Something the user can put right. The command line prints it as one sentence."""


# --- files that are whole or absent ---------------------------------------------------------------


@contextlib.contextmanager
def write_safely(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary neighbour of `path` that takes its name once it is completely on disk."""
    if not path.name:
        raise UserError(f"{path} is a directory, not the name of a file.")
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    if is_writer():
        with write_safely(path) as file:
            file.write(json.dumps(content, indent=2, default=_to_plain).encode() + b"\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file that may come from anybody."""
    try:
        if path.stat().st_size > MAX_HEADER:
            raise UserError(f"{path} is too large for a file of this kind.")
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON: {error}.") from None


def _to_plain(value: Any) -> Any:
    """What JSON does not know: dataclasses, arrays and NumPy's numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return np.asarray(value).tolist()


# --- pytrees of arrays ----------------------------------------------------------------------------


def _named_arrays(tree: Any) -> list[tuple[str, Any]]:
    """The array leaves of a tree with the paths that lead to them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in leaves
        if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    ]


def save_tree(path: Path, tree: Any, about: dict[str, Any] | None = None) -> None:
    """Writes the arrays of `tree` to one file: magic, header length, header, numbers, checksum."""
    arrays = [(name, np.asarray(leaf)) for name, leaf in _named_arrays(tree)]
    header = {
        "version": FORMAT_VERSION,
        "about": about or {},
        "arrays": [[name, array.dtype.str, array.shape] for name, array in arrays],
    }
    if not is_writer():
        return
    text = json.dumps(header, default=_to_plain).encode()
    with write_safely(path) as file:
        checksum = 0
        for block in (MAGIC, len(text).to_bytes(4, "little"), text):
            file.write(block)
            checksum = zlib.crc32(block, checksum)
        for _, array in arrays:
            block = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write(block)
            checksum = zlib.crc32(block, checksum)
        file.write(checksum.to_bytes(4, "little"))


def load_tree(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """Fills the structure `like` (arrays or shapes) from a file of `save_tree`; returns it and `about`.

    Names, types, shapes and the file's size are compared before anything is allocated.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(MAGIC) + 4)
            length = int.from_bytes(start[len(MAGIC) :], "little")
            if start[: len(MAGIC)] != MAGIC or length > min(size, MAX_HEADER):
                raise UserError(f"{path} is not a file of this project, or its start is damaged.")
            text = file.read(length)
            header = _read_header(path, text)
            expected = _check_arrays(path, header["arrays"], _named_arrays(like))
            body = size - len(start) - length - 4
            if body != expected:
                raise UserError(
                    f"{path} is damaged: {body} bytes of numbers instead of {expected}."
                )
            content = bytearray(expected)
            if file.readinto(content) != expected:
                raise UserError(f"{path} became shorter while it was read.")
            checksum = zlib.crc32(content, zlib.crc32(text, zlib.crc32(start)))
            if checksum.to_bytes(4, "little") != file.read(4):
                raise UserError(f"{path} is damaged: its checksum does not fit.")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from None
    return _fill(like, content), header["about"]


def _read_header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
        arrays = [(str(n), str(d), tuple(int(x) for x in s)) for n, d, s in header["arrays"]]
        version, about = header["version"], dict(header["about"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{path} has a damaged header.") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format {version}, this version reads {FORMAT_VERSION}.")
    return {"arrays": arrays, "about": about}


def _check_arrays(path: Path, found: list, wanted: list[tuple[str, Any]]) -> int:
    """Compares the header with the structure that is wanted; returns the number of bytes."""
    wanted_arrays = [(n, np.dtype(leaf.dtype).str, tuple(leaf.shape)) for n, leaf in wanted]
    for have, want in zip(found, wanted_arrays, strict=False):
        if have != want:
            raise UserError(
                f"{path} belongs to another configuration: it holds {have[0]} as {have[1]}{have[2]}, "
                f"needed is {want[0]} as {want[1]}{want[2]}."
            )
    if len(found) != len(wanted_arrays):
        raise UserError(
            f"{path} belongs to another configuration: "
            f"it holds {len(found)} arrays, needed are {len(wanted_arrays)}."
        )
    return sum(np.dtype(d).itemsize * math.prod(shape) for _, d, shape in wanted_arrays)


def _fill(like: Any, content: bytearray) -> Any:
    position = 0

    def next_array(leaf: Any) -> Any:
        nonlocal position
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return leaf
        dtype, count = np.dtype(leaf.dtype), math.prod(leaf.shape)
        array = np.frombuffer(content, dtype, count, position).reshape(leaf.shape)
        position += array.nbytes
        return array

    return jax.tree.map(next_array, like)


# --- one stage of a run ---------------------------------------------------------------------------


class Stage:
    """The directory of one stage: `config.json`, `metrics.jsonl` and `checkpoint-*.qdt`.

    Opening an existing stage with another config is refused with the difference shown.
    """

    def __init__(self, directory: Path, config: dict[str, Any]):
        self.directory = directory
        self.config = json.loads(json.dumps(config, default=_to_plain))
        path = directory / "config.json"
        if path.exists():
            stored = read_json(path)
            if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
                raise UserError(f"{path} is not a stage's config.")
            _refuse_difference(directory, stored["config"], self.config)
        elif is_writer():
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"cannot create {directory}: {error.strerror}.") from None
            write_json(path, {"config": self.config, "versions": versions()})

    @property
    def metrics_path(self) -> Path:
        return self.directory / "metrics.jsonl"

    def log(self, row: dict[str, Any]) -> None:
        if is_writer():
            try:
                with open(self.metrics_path, "a") as file:
                    file.write(json.dumps(row, default=_to_plain) + "\n")
            except OSError as error:
                raise UserError(f"cannot write {self.metrics_path}: {error.strerror}.") from error

    def rewind_metrics(self, before: int) -> None:
        """Drops what a killed process had logged beyond its last checkpoint."""
        if self.metrics_path.exists() and is_writer():
            kept = [row for row in read_metrics(self.metrics_path) if row["iteration"] < before]
            with write_safely(self.metrics_path) as file:
                file.writelines(json.dumps(row).encode() + b"\n" for row in kept)

    def save_checkpoint(self, iteration: int, tree: Any) -> None:
        """Writes a checkpoint and keeps the one before it, in case this one gets damaged."""
        save_tree(
            self.directory / f"checkpoint-{iteration:09d}.qdt", tree, {"iteration": iteration}
        )
        if is_writer():
            for _, old in self._checkpoints()[2:]:
                old.unlink(missing_ok=True)

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """The newest readable checkpoint as (iteration, tree); None where there is none at all."""
        problems = []
        for iteration, path in self._checkpoints():
            try:
                tree, _ = load_tree(path, like)
            except UserError as error:
                problems.append(str(error))
                print(f"{error} Trying the checkpoint before it.", file=sys.stderr)
                continue
            return iteration, tree
        if problems:
            raise UserError(f"no checkpoint in {self.directory} can be read: {problems[0]}")
        return None

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """Checkpoints, newest first."""
        found = []
        for path in self.directory.glob("checkpoint-*.qdt"):
            if match := re.fullmatch(r"checkpoint-(\d+)\.qdt", path.name):
                found.append((int(match[1]), path))
        return sorted(found, reverse=True)


@contextlib.contextmanager
def open_stage(directory: Path, config: dict[str, Any]) -> Iterator[Stage]:
    """A stage to work in. If a mistake ends the work before it began, its config is forgotten again."""
    stage = Stage(directory, config)
    try:
        yield stage
    except UserError:
        made = (p.name for p in directory.iterdir() if not p.name.startswith("."))
        if is_writer() and list(made) == ["config.json"]:
            (directory / "config.json").unlink()
        raise


def _refuse_difference(directory: Path, stored: dict, asked: dict) -> None:
    try:
        stored, asked = _flat(stored), _flat(asked)
    except RecursionError:
        raise UserError(
            f"the config in {directory} is no config: it is nested too deeply."
        ) from None
    names = sorted(stored.keys() | asked.keys())
    missing = object()
    different = [n for n in names if stored.get(n, missing) != asked.get(n, missing)]
    if different:
        shown = "; ".join(
            f"{n} is {stored.get(n, 'unset')!r} there and {asked.get(n, 'unset')!r} here"
            for n in different
        )
        raise UserError(f"{directory} was made with another configuration: {shown}.")


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"search": {"cells": 8}} as {"search.cells": 8}."""
    flat = {}
    for name, value in config.items():
        nested = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def make_config(kind: type[Config], values: Any) -> Config:
    """A config dataclass from what a file or the command line says; types are checked."""
    if not isinstance(values, dict):
        raise UserError(f"a {kind.__name__} must be a table of fields.")
    known = {field.name: field for field in dataclasses.fields(kind)}  # pyright: ignore[reportArgumentType]
    for name in values:
        if name not in known:
            raise UserError(f"{name} is not a field of {kind.__name__}: {', '.join(known)}.")
    return kind(**{n: _typed(n, known[n].default, value) for n, value in values.items()})


def _typed(name: str, default: Any, value: Any) -> Any:
    """`value`, which may be text, as the type that the field's default has."""
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "false": False}[str(value).lower()]
        if kind is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(_typed(name, default[0], part) for part in parts)
        if kind is int and float(value) != int(float(value)):
            raise ValueError
        return int(float(value)) if kind is int else kind(value)
    except (ValueError, TypeError, KeyError, OverflowError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}
        text = wanted.get(kind, "numbers with commas between them")
        raise UserError(f"{name} must be {text}, not {value!r}.") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`; a last line that was cut off by a kill is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("iteration"), int):
            rows.append(row)
    return rows


def versions() -> dict[str, str]:
    names = ("quality-diversity-transformer", "jax", "equinox", "brax", "optax", "numpy")
    return {"python": platform.python_version()} | {n: importlib.metadata.version(n) for n in names}


# --- processes, signals, progress -----------------------------------------------------------------


def is_writer() -> bool:
    """Whether this process writes files: process 0 of possibly many."""
    return jax.process_index() == 0


def is_lost_process(error: Exception) -> bool:
    """Whether an error of JAX, in one of several processes, is the end of another one."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or jax.process_count() == 1:
        return False
    return "RESOURCE_EXHAUSTED" not in str(error)  # out of memory is this one's own trouble


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Holds a run directory for this process; the system lets go of it even after `kill -9`."""
    if not is_writer():
        yield
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / ".lock", "w")  # noqa: SIM115 - held until the process is done
    except OSError as error:
        raise UserError(f"cannot use {directory} as a run directory: {error.strerror}.") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{directory} is in use by another process.") from None
        yield


class Stopped(UserError):
    """The user asked for the end; everything done so far is on disk."""


_signals_seen: list[int] = []


@contextlib.contextmanager
def finish_iteration_on_signal() -> Iterator[None]:
    """Ctrl-C and SIGTERM no longer interrupt: they are noted, and `stop_requested` tells."""
    _signals_seen.clear()
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, lambda seen, frame: _signals_seen.append(seen))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_requested() -> bool:
    """Whether a signal was seen; of several processes, by any: all of them stop at the same place."""
    seen = np.array(bool(_signals_seen))
    return bool(seen if jax.process_count() == 1 else multihost_utils.process_allgather(seen).any())


class Progress:
    """One line that keeps moving: what is done, how it goes, and the time left."""

    def __init__(self, title: str, total: int, done: int = 0):
        self.title, self.total, self.first = title, total, done
        self.started = time.monotonic()
        self.last_shown = -math.inf
        self.live = sys.stderr.isatty()

    def due(self, done: int) -> bool:
        """Whether it is time for a new line: five times a second on a terminal, rarely in a log."""
        waited = time.monotonic() - self.last_shown
        return waited > (0.2 if self.live else 30) or done == self.total

    def update(self, done: int, **values: Any) -> None:
        now = self.last_shown = time.monotonic()
        elapsed = now - self.started
        rate = (done - self.first) / elapsed if elapsed > 0 else 0
        left = time_text((self.total - done) / rate) if rate > 0 else "?"
        filled = int(16 * done / max(self.total, 1))
        shown = "  ".join(
            f"{name} {_number_text(v)}" for name, v in values.items() if v is not None
        )
        line = f"{self.title} {'█' * filled}{'·' * (16 - filled)} {done}/{self.total}  {shown}"
        line += f"  {time_text(elapsed)} + {left} left"
        if is_writer():
            end = "" if self.live else "\n"
            print(f"\r\x1b[K{line}" if self.live else line, end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.live and is_writer():
            print(file=sys.stderr)


def _number_text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def time_text(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
