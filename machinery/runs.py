"""A run on disk: its plan, and the directory of each stage.

RUN/plan.json              seed and settings of all stages, written once by the first command
RUN/search/                config, metrics, checkpoints, repertoire.safetensors, maps
RUN/dataset[-NAME]/        config, shards and meta.json
RUN/MODEL[-NAME]/          config, metrics, checkpoints, model.safetensors (the best epoch)
RUN/evaluation/            one JSON file per experiment
"""

import contextlib
import functools
import importlib.metadata
import json
import math
import platform
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machinery.config import describe_difference
from machinery.files import (
    UserError,
    is_writer,
    load_arrays,
    read_checksum,
    read_json,
    save_arrays,
    to_plain,
    write_json,
    write_safely,
)

PLAN = "plan.json"
# Of experiments that once measured something else: results that do not say this are not up to date.
MEASURED = {"generalize": "goals as they are"}


def find_runs(directory: Path) -> list[Path]:
    """All runs in a directory, itself included."""
    return sorted(path.parent for path in directory.glob(f"**/{PLAN}"))


def read_plan(path: Path) -> dict[str, Any]:
    """The sections of a written plan: a plan.json, or the run directory that holds one."""
    path = path / PLAN if path.is_dir() else path
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("plan"), dict):
        raise UserError(f"{path} is not the plan of a run.")
    return content["plan"]


def write_plan(directory: Path, plan: dict[str, Any]) -> None:
    write_json(directory / PLAN, {"plan": plan, "versions": versions()})


def versions() -> dict[str, str]:
    """With what something was made: Python, the libraries, and the commit where there is one."""
    names = ("quality-diversity-transformer", "jax", "equinox", "brax", "optax", "numpy")
    found = {"python": platform.python_version()}
    found |= {name: importlib.metadata.version(name) for name in names}
    here = commit()
    return found | ({"commit": here} if here else {})


@functools.cache
def commit() -> str | None:
    """Of the source that runs, if it is a clone; it says so if files were changed since."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty=-changed", "--abbrev=12"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def read_versions(path: Path) -> dict[str, str]:
    """What stands beside a plan or a stage's config."""
    content = read_json(path)
    found = content.get("versions") if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Run:
    """A run directory and its plan: what lies where, and whether results are up to date."""

    directory: Path
    plan: Any

    @property
    def repertoire_path(self) -> Path:
        return self.directory / "search" / "repertoire.safetensors"

    @property
    def is_pretrained(self) -> bool:
        """Whether it is a model without the search it came from (`machinery/pretrained.py`)."""
        return not self.repertoire_path.parent.exists() and bool(self.model_paths())

    def model_paths(self) -> dict[str, Path]:
        """Of all trained models, the run's own first."""
        own = self.plan.train.model
        paths = self.directory.glob("*/model.safetensors")
        found = sorted(paths, key=lambda path: (path.parent.name != own, path))
        return {path.parent.name: path for path in found}

    def models_for(self, experiment: str) -> list[str]:
        """Who an experiment is about; models of pruned datasets are generalization's alone."""
        own, names = self.plan.train.model, list(self.model_paths())
        if experiment in ("reassess", "reproducibility"):
            return []
        if experiment == "calibrate":
            return [name for name in names if name == own]
        pruned = [name for name in names if read_stage_config(self.directory / name).get("prune")]
        if experiment == "generalize":
            return [name for name in names if name == own or name in pruned]
        return [name for name in names if name not in pruned]

    def source_of_datasets(self) -> str | None:
        """Which repertoire is there."""
        return read_checksum(self.repertoire_path) if self.repertoire_path.exists() else None

    def source_of_models(self, dataset: str | None) -> str | None:
        """Which dataset is there: who plays in it, and the checksums of its shards."""
        path = self.directory / variant("dataset", dataset) / "meta.json"
        if not path.exists():
            return None
        meta = read_json(path)
        parts = [meta.get(x) for x in ("repertoire", "selection", "shards")]
        return f"{zlib.crc32(json.dumps(parts).encode()):08x}"

    def is_outdated(self, stage: str) -> bool:
        """Whether a dataset or a model was made from something else than is there now.

        Those of earlier versions, and what was imported, do not say.
        """
        if not (self.directory / stage / "config.json").exists():
            return False
        config = read_stage_config(self.directory / stage)
        is_dataset = f"{stage}-".startswith("dataset-")
        there = (
            self.source_of_datasets()
            if is_dataset
            else self.source_of_models(config.get("dataset"))
        )
        return None not in (config.get("made_from"), there) and config["made_from"] != there

    def refuse_outdated(self, stage: str) -> None:
        if self.is_outdated(stage):
            made, source = self.directory / stage, "dataset"
            if stage.startswith("dataset"):
                source = "repertoire"
            raise UserError(
                f"{made} was made from another {source} than is there now; remove it to make it again."
            )

    def made_from(self, stage: str, source: str | None) -> dict[str, str]:
        """What a stage's config says of its source; that of an earlier version says nothing."""
        path = self.directory / stage / "config.json"
        is_silent = path.exists() and "made_from" not in read_stage_config(path.parent)
        return {} if source is None or is_silent else {"made_from": source}

    def inputs(self, experiment: str) -> dict[str, str]:
        """What a result depends on: the checksums of repertoire and models, and how it is measured."""
        repertoire = {} if self.is_pretrained else {"repertoire": self.repertoire_path}
        models = {name: self.model_paths()[name] for name in self.models_for(experiment)}
        found = {name: read_checksum(path) for name, path in (repertoire | models).items()}
        return found | ({"measured": MEASURED[experiment]} if experiment in MEASURED else {})

    def result_path(self, experiment: str) -> Path:
        return self.directory / "evaluation" / f"{experiment}.json"

    def is_evaluated(self, experiment: str) -> bool:
        """Whether there is a result, made with the repertoire and the models that are there now."""
        path = self.result_path(experiment)
        content = read_json(path) if path.exists() else None
        return isinstance(content, dict) and content.get("inputs") == self.inputs(experiment)


def variant(stage: str, name: str | None) -> str:
    """The directory of a stage's variant."""
    return f"{stage}-{name}" if name else stage


class Stage:
    """The directory of one stage: `config.json`, `metrics.jsonl` and `checkpoint-*.safetensors`.

    Opening an existing stage with another config is refused with the difference shown.
    """

    def __init__(self, directory: Path, config: dict[str, Any]):
        self.directory = directory
        self.config = json.loads(json.dumps(config, default=to_plain))
        path = directory / "config.json"
        if path.exists():
            try:
                difference = describe_difference(read_stage_config(directory), self.config)
            except RecursionError:
                raise UserError(f"{path} is no config: it is nested too deeply.") from None
            if difference:
                raise UserError(f"{directory} was made with another configuration: {difference}.")
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
        """Appends a row. JSON has no word for what is not a number: null."""
        if is_writer():
            number = lambda x: None if isinstance(x, float) and not math.isfinite(x) else x  # noqa: E731
            row = {name: number(value) for name, value in row.items()}
            try:
                with open(self.metrics_path, "a") as file:
                    file.write(json.dumps(row, default=to_plain) + "\n")
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
        path = self.directory / f"checkpoint-{iteration:09d}.safetensors"
        save_arrays(path, tree, {"iteration": iteration})
        if is_writer():
            for _, old in self._checkpoints()[2:]:
                old.unlink(missing_ok=True)

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """The newest readable checkpoint as (iteration, tree); None where there is none at all."""
        problems = []
        for iteration, path in self._checkpoints():
            try:
                tree, _ = load_arrays(path, like)
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
        for path in self.directory.glob("checkpoint-*.safetensors"):
            if match := re.fullmatch(r"checkpoint-(\d+)\.safetensors", path.name):
                found.append((int(match[1]), path))
        return sorted(found, reverse=True)


def read_stage_config(directory: Path) -> dict[str, Any]:
    """What a stage was made with."""
    path = directory / "config.json"
    stored = read_json(path)
    if not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
        raise UserError(f"{path} is not a stage's config.")
    return stored["config"]


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
