"""Plans: the settings of every stage, made once and kept with a run.

A plan comes from a preset, from a written plan or from the run that is continued, with changes from the
command line on top. The first command writes it into the run's directory; whoever works there later must
mean the same plan. The `Planner` is handed what there is: the registries of rules and models, and the
configs of tasks and datasets.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machinery import machine
from machinery.config import (
    describe_difference,
    find,
    known_fields,
    make_config,
    preset_sections,
    presets,
    refuse_unknown,
    split_changes,
)
from machinery.files import UserError, is_writer, lock
from machinery.runs import PLAN, read_plan, write_plan

STAGES = ["task", "search", "dataset", "train"]
Changes = dict[str, dict[str, str]]  # by stage: fields and what the command line says about them


@dataclass(frozen=True)
class Plan:
    """The settings of every stage. `preset` is a note: the settings count, but those of a model of another
    kind beside the plan's own come from the preset."""

    preset: str | None
    seed: int
    task: Any
    search: Any
    dataset: Any
    train: Any


def plain(plan: Plan) -> dict[str, Any]:
    """As it is written to disk."""
    return json.loads(json.dumps(dataclasses.asdict(plan)))


def changes_of(set_: list[str] | None, stages: list[str]) -> Changes:
    """`--set`, by stage; those of the machine take effect at once. Another stage is refused."""
    changes = split_changes(set_ or [], [*stages, "machine"])
    machine.configure(changes.pop("machine", {}))
    return changes


@dataclass(frozen=True)
class Asked:
    """What the options of a command say; None: nothing."""

    preset: str | None = None
    config: Path | None = None
    task: str | None = None
    algo: str | None = None
    seed: int | None = None
    changes: Changes = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Planner:
    """Makes plans out of what is registered."""

    task: type  # config of a task
    rules: Mapping[str, Any]  # each with the config of its search
    dataset: type
    models: Mapping[str, Any]  # each with the config of its training
    check: Callable[[Any], Any]  # refuses a task's config that makes no sense

    def make(
        self,
        sections: dict[str, Any],
        changes: Changes | None = None,
        algo: str | None = None,
        seed: int | None = None,
        preset: str | None = None,
    ) -> Plan:
        """A plan from the sections of a preset or of a written plan, with changes."""
        changes = changes or {}
        try:
            stored = {name: dict(sections[name]) for name in STAGES}
            algo = algo or stored["search"].get("algo") or "me-ls"
            model = changes.get("train", {}).get("model") or stored["train"].get("model") or "qdt"
            seed = sections.get("seed", 0) if seed is None else seed
            preset = preset or sections.get("preset")
            sound = isinstance(seed, int) and 0 <= seed < 2**31 and isinstance(preset, str | None)
            sound &= isinstance(algo, str) and isinstance(model, str)
            sound &= isinstance(stored["task"].get("task"), str | None)
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise UserError("the plan lacks sections that it needs: " + ", ".join(STAGES) + ".")
        kinds = {
            "task": self.task,
            "search": find("algorithm", self.rules, algo).config,
            "dataset": self.dataset,
            "train": find("model", self.models, model).config,
        }
        all_kinds = {name: [kind] for name, kind in kinds.items()}
        all_kinds["search"] = [rule.config for rule in self.rules.values()]
        all_kinds["train"] = [kind.config for kind in self.models.values()]
        for name, fields in stored.items():
            refuse_unknown(name, fields, all_kinds[name])
        known = stored["train"].get("model", model)
        if model != known and preset in presets():
            # What only this kind of model has is as in the preset: a plan of another kind does not hold it.
            task = changes.get("task", {}).get("task") or stored["task"].get("task")
            stored["train"] = preset_sections(preset, task)["train"] | stored["train"]
        stored["search"]["algo"], stored["train"]["model"] = algo, model
        configs = {
            name: make_config(kind, known_fields(kind, stored[name]) | changes.get(name, {}))
            for name, kind in kinds.items()
        }
        self.check(configs["task"])
        return Plan(preset, seed, **configs)

    def asked(self, asked: Asked) -> Plan:
        """The plan that the options of a command describe."""
        if asked.config is not None:
            if asked.preset or asked.task:
                raise UserError("--config is a whole plan: --preset and --task do not go with it.")
            return self.make(read_plan(asked.config), asked.changes, asked.algo, asked.seed)
        preset = asked.preset or "laptop"
        sections = preset_sections(preset, asked.task)
        return self.make(sections, asked.changes, asked.algo, asked.seed, preset)

    def continued(self, directory: Path, asked: Asked) -> Plan:
        """What is asked for; what is not said is as in the plan that is there."""
        if asked.preset or asked.config or not (directory / PLAN).exists():
            return self.asked(asked)
        changes = asked.changes
        if asked.task:
            changes = {**changes, "task": {**changes.get("task", {}), "task": asked.task}}
        return self.make(read_plan(directory), changes, asked.algo, asked.seed)

    def stored(self, directory: Path) -> Plan:
        """The plan of a run."""
        if not (directory / PLAN).exists():
            raise UserError(f"{directory} is not a run directory: it has no {PLAN}.")
        return self.make(read_plan(directory))

    def stored_alike(self, directory: Path, asked: Plan) -> Plan:
        """The plan of a run, which must mean the same as what is asked for."""
        stored = self.stored(directory)
        there, here = ({**plain(plan), "preset": None} for plan in (stored, asked))
        if difference := describe_difference(there, here):
            raise UserError(f"{directory} was made with another plan: {difference}.")
        return stored

    @contextmanager
    def begin_run(self, directory: Path, asked: Plan) -> Iterator[Plan]:
        """The plan of a run to work in: whoever comes first writes it, and all others must mean the same.

        If a mistake ends the work before anything was made, the plan is forgotten again.
        """
        with lock(directory):
            if (directory / PLAN).exists():
                stored = self.stored_alike(directory, asked)
            else:
                stored = asked
                write_plan(directory, plain(asked))
            try:
                yield stored
            except UserError:
                made = {p.name for p in directory.rglob("*") if p.is_file()} - {".lock"}
                if is_writer() and made == {PLAN}:
                    (directory / PLAN).unlink()
                raise

    @contextmanager
    def begin_stage(
        self, directory: Path, plan: Plan, section: str, name: str | None, changes: Changes
    ) -> Iterator[Plan]:
        """The plan with changes to a stage that has not begun.

        A named variant has changes of its own and leaves the run's plan alone: several may be made at once.
        """
        changed = self.make(plain(plan), changes)
        if name is not None:
            yield changed
            return
        with lock(directory):
            # A model of another kind beside the run's own is a variant, too: it has a directory of its own.
            kinds = {plan.train.model, changed.train.model}
            stages = {"dataset"} if section == "dataset" else kinds
            configs = [directory / stage / "config.json" for stage in stages]
            new = not any(config.exists() for config in configs)
            amended = changed != plan and new
            if amended:
                write_plan(directory, plain(changed))
            try:
                yield changed
            except UserError:
                if amended and not any(config.exists() for config in configs):  # nothing was made
                    write_plan(directory, plain(plan))
                raise
