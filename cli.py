"""The command line: one command per stage, and `run` for the whole pipeline.

A run directory holds one lineage: a search, the dataset of its repertoire, the models trained on it, and
their evaluations. The first command writes the plan of all stages into it; later commands read that plan.
The same command again continues where it was.

JAX and the stages are imported inside the functions, so that `qdt --help` answers at once. To add a rule, a
task or a model of your own, register it and call `main()`: see "Make it yours" in the README.
Reads in this order: options, plans, runs, stages, commands.
"""

import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from dataset import Dataset, DatasetConfig
    from envs import Task, TaskConfig
    from evaluate import Film, Subject
    from machinery.demand import Cast, Setting
    from machinery.report import Found
    from machinery.viewer import Accuracy, Playback
    from me_ls import Repertoire, SearchConfig
    from qdt import ConditionedPolicy, TrainConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The Quality-Diversity Transformer: search, dataset, training, experiments.",
)

# --- options ----------------------------------------------------------------------------------------


class Prune(StrEnum):
    nothing = "nothing"
    density_50 = "density-50"
    density_30 = "density-30"
    density_10 = "density-10"
    tiles = "tiles"
    upper_half = "upper"


class Experiment(StrEnum):
    accuracy = "accuracy"
    reproducibility = "reproducibility"
    reassess = "reassess"
    generalize = "generalize"
    calibrate = "calibrate"


class RegistryCommand(TyperCommand):
    """Help that lists what is registered: JAX is imported only for those who ask."""

    def get_help(self, ctx: Any) -> str:
        fill_in_registries(self.params)
        return super().get_help(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        fill_in_registries(self.params)
        super().format_help(ctx, formatter)


def fill_in_registries(params: Sequence[Any]) -> None:
    import envs
    import pgame_ls  # noqa: F401 - registers its rules
    import uncertain  # noqa: F401 - likewise
    from me_ls import RULES

    rules = "; ".join(f"{name}: {rule.about}" for name, rule in RULES.items())
    for param in params:
        if text := getattr(param, "help", None):
            param.help = text.replace("@rules", rules).replace("@tasks", ", ".join(envs.TASKS))


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")]
PresetOption = Annotated[
    str | None,
    typer.Option(
        help="The sizes of everything. tiny: point-omni, a minute; laptop: Halfcheetah or Ant, "
        "shortened for two cores; paper: the paper's, for an accelerator.",
        show_default="laptop",
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A written plan (RUN/plan.json) instead of a preset.",
        show_default=False,
    ),
]
TaskOption = Annotated[
    str | None, typer.Option(help="One of @tasks.", show_default="the preset's own")
]
AlgoOption = Annotated[
    str | None, typer.Option(help="The algorithm. @rules.", show_default="me-ls")
]
SeedOption = Annotated[
    int | None,
    typer.Option(help="Determines every random number.", min=0, max=2**31 - 1, show_default="0"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="STAGE.FIELD=VALUE",
        help="Any field of the stages that the command makes, such as search.cells=256 or "
        "task.length=100, or of the machine, such as machine.micro_batch=32. Can be repeated; "
        "`qdt run --dry-run` lists all fields.",
        show_default="as in the preset",
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(help="A name for a variant beside the run's own.", show_default=False),
]
Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="Join a JAX cluster (SLURM and TPU pods are detected).",
        show_default="off",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Join a cluster that is not detected: the address of process 0.",
        show_default="off",
    ),
]
NumProcesses = Annotated[
    int | None, typer.Option(help="With --coordinator: how many there are.", show_default=False)
]
ProcessId = Annotated[
    int | None,
    typer.Option(help="With --coordinator: which one this is, from 0.", show_default=False),
]


def start_jax(
    distributed: bool = False,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    import pgame_ls  # noqa: F401 - registers its rules
    import uncertain  # noqa: F401 - likewise
    from machinery import machine
    from machinery.files import UserError

    machine.prepare_jax()
    if not coordinator and (num_processes, process_id) != (None, None):
        raise UserError("--num-processes and --process-id go with --coordinator HOST:PORT.")
    if distributed or coordinator:
        machine.join_cluster(coordinator, num_processes, process_id)


# --- plans ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The settings of every stage. `preset` is a note: the settings are what counts."""

    preset: str | None
    seed: int
    task: "TaskConfig"
    search: "SearchConfig"
    dataset: "DatasetConfig"
    train: "TrainConfig"


STAGES = ["task", "search", "dataset", "train"]


def make_plan(
    sections: dict[str, Any],
    changes: dict[str, dict[str, str]],
    algo: str | None = None,
    seed: int | None = None,
    preset: str | None = None,
) -> Plan:
    """A plan from the sections of a preset or of a written plan, with changes from the command line."""
    from dataset import DatasetConfig
    from envs import TaskConfig, make_task
    from machinery.config import known_fields, make_config, refuse_unknown
    from machinery.files import UserError
    from me_ls import RULES, find_rule
    from qdt import MODELS, find_model

    try:
        stored = {name: dict(sections[name]) for name in STAGES}
        algo = algo or stored["search"].get("algo") or "me-ls"
        model = changes.get("train", {}).get("model") or stored["train"].get("model") or "qdt"
        seed = sections.get("seed", 0) if seed is None else seed
        preset = preset or sections.get("preset")
        sound = isinstance(seed, int) and 0 <= seed < 2**31 and isinstance(preset, str | None)
        sound &= isinstance(algo, str) and isinstance(model, str)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise UserError("the plan has not the sections that it needs: " + ", ".join(STAGES) + ".")
    kinds = {
        "task": TaskConfig,
        "search": find_rule(algo).config,
        "dataset": DatasetConfig,
        "train": find_model(model).config,
    }
    all_kinds = {name: [kind] for name, kind in kinds.items()}
    all_kinds["search"] = [rule.config for rule in RULES.values()]
    all_kinds["train"] = [kind.config for kind in MODELS.values()]
    for name, fields in stored.items():
        refuse_unknown(name, fields, all_kinds[name])
    stored["search"]["algo"], stored["train"]["model"] = algo, model
    configs = {
        name: make_config(kind, known_fields(kind, stored[name]) | changes.get(name, {}))
        for name, kind in kinds.items()
    }
    make_task(configs["task"])
    return Plan(preset, seed, **configs)


def asked_plan(
    preset: str | None,
    config: Path | None,
    task: str | None,
    algo: str | None,
    seed: int | None,
    changes: dict[str, dict[str, str]],
) -> Plan:
    """The plan that the options of a command describe."""
    from machinery.config import preset_sections
    from machinery.files import UserError
    from machinery.runs import read_plan

    if config is not None:
        if preset or task:
            raise UserError("--config is a whole plan: --preset and --task do not go with it.")
        return make_plan(read_plan(config), changes, algo, seed)
    preset = preset or "laptop"
    return make_plan(preset_sections(preset, task), changes, algo, seed, preset)


def plain(plan: Plan) -> dict[str, Any]:
    """As it is written to disk."""
    import json

    return json.loads(json.dumps(dataclasses.asdict(plan)))


def changes_of(set_: list[str] | None, stages: list[str]) -> dict[str, dict[str, str]]:
    """`--set`, by stage; those of the machine take effect at once. Another stage is refused."""
    from machinery import machine
    from machinery.config import split_changes

    changes = split_changes(set_ or [], [*stages, "machine"])
    machine.configure(changes.pop("machine", {}))
    return changes


# --- runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run directory and its plan."""

    directory: Path
    plan: Plan

    @property
    def task(self) -> "Task":
        from envs import make_task

        return make_task(self.plan.task)

    @property
    def repertoire_path(self) -> Path:
        return self.directory / "search" / "repertoire.safetensors"

    def repertoire(self) -> "Repertoire":
        import equinox as eqx
        import jax.numpy as jnp

        from machinery.files import UserError, load_arrays
        from machinery.machine import replicate
        from me_ls import empty_repertoire

        if not self.repertoire_path.exists():
            raise UserError(f"the search in {self.directory} is not finished; continue it first.")
        shape = self.plan.search.cells, self.task.descriptor_size
        like = eqx.filter_eval_shape(
            lambda: empty_repertoire(self.task, self.plan.search.hidden, jnp.zeros(shape))
        )
        return replicate(load_arrays(self.repertoire_path, like)[0])

    def dataset(self, name: str | None = None) -> "Dataset":
        from dataset import open_dataset
        from machinery.files import UserError

        directory = self.directory / variant("dataset", name)
        if not (directory / "meta.json").exists():
            raise UserError(f"{self.directory} has no {directory.name}; `qdt dataset` makes one.")
        data, task = open_dataset(directory), plain(self.plan)["task"]
        made_for = data.meta.stage.get("task", task)  # unknown where it was imported
        if made_for != task:
            raise UserError(f"{directory} was made for another task: {made_for}, not {task}.")
        return data

    def model_paths(self) -> dict[str, Path]:
        """Of all trained models, the run's own first."""
        own = self.plan.train.model
        paths = self.directory.glob("*/model.safetensors")
        found = sorted(paths, key=lambda path: (path.parent.name != own, path))
        return {path.parent.name: path for path in found}

    def model(self, name: str | None = None) -> "ConditionedPolicy":
        """The best epoch of a training."""
        import equinox as eqx
        import jax

        from machinery.config import make_config
        from machinery.files import UserError, load_arrays
        from machinery.machine import replicate
        from machinery.runs import read_stage_config
        from qdt import find_model, make_model

        name = name or self.plan.train.model
        path = self.directory / name / "model.safetensors"
        if not path.exists():
            raise UserError(f"{self.directory} has no trained {name}; `qdt train` makes one.")
        try:
            stored = read_stage_config(path.parent)["train"]
            config = make_config(find_model(stored["model"]).config, stored)
        except (KeyError, TypeError):
            raise UserError(f"{path.parent} is not the directory of a training.") from None
        like = eqx.filter_eval_shape(make_model, self.task, config, key=jax.random.key(0))
        return replicate(load_arrays(path, like)[0])

    def subject(self) -> "Subject":
        """What experiments look at."""
        from evaluate import Subject

        models = {name: self.model(name) for name in self.model_paths()}
        return Subject(self.task, self.plan.seed, self.repertoire(), models)

    def inputs(self) -> dict[str, str]:
        """What results depend on: the checksums of repertoire and models."""
        from machinery.files import read_checksum

        paths = {"repertoire": self.repertoire_path} | self.model_paths()
        return {name: read_checksum(path) for name, path in paths.items()}

    def result_path(self, experiment: str) -> Path:
        return self.directory / "evaluation" / f"{experiment}.json"

    def is_evaluated(self, experiment: str) -> bool:
        """Whether there is a result, made with the repertoire and the models that are there now."""
        from machinery.files import read_json

        path = self.result_path(experiment)
        content = read_json(path) if path.exists() else None
        return isinstance(content, dict) and content.get("inputs") == self.inputs()

    def accuracy_map(self) -> "Accuracy | None":
        """How near to every goal its own model and its repertoire come, if that was evaluated."""
        import numpy as np

        from machinery.files import read_json
        from machinery.viewer import Accuracy

        if not self.is_evaluated("accuracy"):
            return None
        result = read_json(self.result_path("accuracy"))["result"]
        own = {"model": self.plan.train.model, "repertoire": "repertoire"}
        distance = {name: np.array(result[key]["distance"], float) for name, key in own.items()}
        return Accuracy(np.array(result["repertoire"]["goals"]), distance)


def variant(stage: str, name: str | None) -> str:
    """The directory of a stage's variant."""
    return f"{stage}-{name}" if name else stage


def open_run(directory: Path) -> Run:
    from machinery.files import UserError
    from machinery.runs import PLAN, read_plan

    if not (directory / PLAN).exists():
        raise UserError(f"{directory} is not a run directory: it has no {PLAN}.")
    return Run(directory, make_plan(read_plan(directory), {}))


@contextmanager
def begin_run(directory: Path, asked: Plan) -> Iterator[Run]:
    """A run to work in: its plan is written by whoever comes first, and must be the same for all others.

    If a mistake ends the work before anything was made, the plan is forgotten again.
    """
    from machinery.config import describe_difference
    from machinery.files import UserError, is_writer, lock
    from machinery.runs import PLAN, read_plan, write_plan

    with lock(directory):
        if (directory / PLAN).exists():
            stored = make_plan(read_plan(directory), {})
            there, here = ({**plain(plan), "preset": None} for plan in (stored, asked))
            if difference := describe_difference(there, here):
                raise UserError(f"{directory} was made with another plan: {difference}.")
        else:
            stored = asked
            write_plan(directory, plain(asked))
        try:
            yield Run(directory, stored)
        except UserError:
            made = {p.name for p in directory.rglob("*") if p.is_file()} - {".lock"}
            if is_writer() and made == {PLAN}:
                (directory / PLAN).unlink()
            raise


def continued_plan(
    directory: Path,
    preset: str | None,
    config: Path | None,
    task: str | None,
    algo: str | None,
    seed: int | None,
    changes: dict[str, dict[str, str]],
) -> Plan:
    """What is asked for; what is not said is as in the plan that is there."""
    from machinery.runs import PLAN, read_plan

    if preset or config or not (directory / PLAN).exists():
        return asked_plan(preset, config, task, algo, seed, changes)
    sections = read_plan(directory)
    if task:
        changes = {**changes, "task": {**changes.get("task", {}), "task": task}}
    return make_plan(sections, changes, algo, seed)


@contextmanager
def begin_stage(
    run: Run, section: str, name: str | None, changes: dict[str, dict[str, str]]
) -> Iterator[Run]:
    """The run with changes to a stage that has not begun; a named variant has changes of its own."""
    from machinery.files import UserError, lock
    from machinery.runs import write_plan

    changed = replace(run, plan=make_plan(plain(run.plan), changes))
    with lock(run.directory):
        # A model of another kind beside the run's own is a variant, too: it has a directory of its own.
        plans = (run.plan, changed.plan)
        stages = {"dataset"} if section == "dataset" else {plan.train.model for plan in plans}
        configs = [run.directory / stage / "config.json" for stage in stages]
        new = name is None and not any(config.exists() for config in configs)
        amended = changed.plan != run.plan and new
        if amended:
            write_plan(run.directory, plain(changed.plan))
        try:
            yield changed
        except UserError:
            if amended and not any(config.exists() for config in configs):  # nothing was made
                write_plan(run.directory, plain(run.plan))
            raise


# --- stages -----------------------------------------------------------------------------------------


def do_search(directory: Path, plan: Plan) -> Run:
    from machinery.driver import drive, tell
    from machinery.files import save_arrays
    from machinery.runs import open_stage
    from machinery.streams import stream
    from me_ls import SHOWN, make_search, refuse_empty

    algo = plan.search.algo
    with begin_run(directory, plan) as run:
        search = make_search(run.task, run.plan.search)
        about = {"task": run.plan.task, "search": run.plan.search, "seed": run.plan.seed}
        with open_stage(directory / "search", about) as stage:
            if run.repertoire_path.exists():
                tell(f"{algo}: the search in {directory} is finished.")
                return run
            episodes = search.steps_per_iteration // plan.task.length
            tell(
                f"{algo}: {search.iterations:,} iterations of {episodes:,} episodes on {plan.task.task}."
            )
            state = drive(
                search,
                stage,
                init=stream(plan.seed, "search-init"),
                steps=stream(plan.seed, "search"),
                total=search.iterations,
                title=algo,
                work=("steps", search.steps_per_iteration),
                show=SHOWN,
                check=refuse_empty,
            )
            save_arrays(run.repertoire_path, state.repertoire)
    return run


def do_dataset(run: Run, changes: dict[str, dict[str, str]], name: str | None = None) -> "Dataset":
    from dataset import build
    from machinery.driver import tell
    from machinery.runs import open_stage

    with begin_stage(run, "dataset", name, changes) as run:
        plan, directory = run.plan, run.directory / variant("dataset", name)
        about = {"task": plan.task, "dataset": plan.dataset, "seed": plan.seed}
        with open_stage(directory, about) as stage:
            count, length = plan.dataset.trajectories, plan.task.length
            tell(f"{directory.name}: {count:,} trajectories of {length} steps.")
            return build(run.task, run.repertoire(), plan.dataset, plan.seed, stage)


def do_train(
    run: Run,
    changes: dict[str, dict[str, str]],
    name: str | None = None,
    data_name: str | None = None,
    prune: str | None = None,
) -> "ConditionedPolicy":
    import dataset as datasets
    from machinery.driver import drive, tell
    from machinery.files import save_arrays
    from machinery.runs import open_stage
    from machinery.streams import stream
    from qdt import SHOWN, Training, best_model, refuse_divergence

    with begin_stage(run, "train", name, changes) as run:
        plan, config = run.plan, run.plan.train
        data = run.dataset(data_name)
        directory = run.directory / variant(config.model, name)
        about = {"train": config, "dataset": data_name, "prune": prune, "seed": plan.seed}
        with open_stage(directory, about) as stage:
            path = directory / "model.safetensors"
            if path.exists():
                tell(f"{directory.name}: the training in {run.directory} is finished.")
                return run.model(directory.name)
            view = datasets.prune(data, prune, seed=plan.seed) if prune else None
            training = Training(run.task, config, data, plan.seed, view)
            tell(f"{directory.name}: {config.epochs} epochs, {training.total:,} steps.")
            state = drive(
                training,
                stage,
                init=stream(plan.seed, "model"),
                steps=stream(plan.seed, "training"),
                total=training.total,
                title=directory.name,
                work=("trajectories", config.batch_size),
                show=SHOWN,
                check=refuse_divergence,
            )
            model = best_model(state)
            save_arrays(path, model)
    return model


def do_evaluate(run: Run, experiment: str) -> dict[str, Any]:
    """Runs an experiment and writes RUN/evaluation/EXPERIMENT.json."""
    from evaluate import EXPERIMENTS, summary
    from machinery.driver import tell
    from machinery.files import write_json

    pruned = experiment == "generalize"
    result = generalize(run) if pruned else EXPERIMENTS[experiment](run.subject())
    write_json(run.result_path(experiment), {"inputs": run.inputs(), "result": result})
    for line in summary(experiment, result):
        tell(f"{run.plan.search.algo}, {line}")
    return result


def generalize(run: Run) -> dict[str, Any]:
    """Section 5.3: models of pruned datasets, trained here where they are missing."""
    from dataset import PRUNINGS, density, prune
    from evaluate import averages

    data, subject, result = run.dataset(), run.subject(), {}
    for how in (None, *PRUNINGS):
        model = do_train(run, {}, name=how, prune=how)
        view = prune(data, how, seed=run.plan.seed) if how else None
        counts, _ = density(data, view=view)
        result[how or "all"] = {"density": counts} | averages(subject.measure(model))
    return result


def found_runs(directories: Sequence[Path]) -> dict[str, list["Found"]]:
    """What the report shows, by task. A directory that holds several runs stands for all of them."""
    from machinery.files import UserError
    from machinery.report import Found, gather, with_results
    from machinery.runs import find_runs
    from me_ls import RULES
    from qdt import MODELS

    places: dict[Path, Path] = {}  # a run that is named twice is one run
    for directory in directories:
        inside = find_runs(directory)
        if not inside:
            raise UserError(f"{directory} holds no run.")
        places |= {run.resolve(): run for run in inside if run.resolve() not in places}
    titles = {name: model.title for name, model in MODELS.items()}
    runs = []
    for place in places.values():
        run = open_run(place)
        rule = RULES[run.plan.search.algo]
        found = Found(place, plain(run.plan), run.task, rule.title, rule.colour, titles)
        runs.append(with_results(found))
    return gather(runs, [rule.title for rule in RULES.values()])


# --- commands ---------------------------------------------------------------------------------------


@app.command(cls=RegistryCommand)
def run(
    preset: PresetOption = None,
    config: ConfigOption = None,
    task: TaskOption = None,
    seed: SeedOption = None,
    out: Annotated[Path, typer.Option(help="Where the runs and the report go.")] = Path("runs/new"),
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan and an estimate, do nothing.", show_default="off"
        ),
    ] = False,
    set_: SetOption = None,
) -> None:
    """The whole pipeline: ME and ME-LS, dataset, QDT, experiments, report."""
    start_jax()
    changes = changes_of(set_, STAGES)
    plans = [
        continued_plan(out / algo, preset, config, task, algo, seed, changes)
        for algo in ("me", "me-ls")
    ]
    if dry_run:
        print_plan(plans)
    else:
        run_all(plans, out)


def run_all(plans: list[Plan], out: Path) -> None:
    """Search with ME and ME-LS, dataset, QDT, experiments, report; continues where it was."""
    from machinery.driver import tell, time_text
    from machinery.report import write_report

    began = time.monotonic()
    times: list[tuple[str, float]] = []

    def stage(number: int, name: str, why: str) -> None:
        now = time.monotonic()
        if times:
            times[-1] = (times[-1][0], now - times[-1][1])
        times.append((name, now))
        tell(f"\n[{number}/6] {name}: {why}")

    stage(1, "MAP-Elites", "the baseline; it keeps whatever was lucky in its only episode.")
    baseline = do_search(out / "me", plans[0])
    stage(2, "MAP-Elites Low-Spread", "keeps a policy only if it is fitter and steadier.")
    ours = do_search(out / "me-ls", plans[1])
    stage(3, "Dataset", "the steadiest policy of each zone shows its behaviour many times.")
    do_dataset(ours, {})
    stage(4, "Quality-Diversity Transformer", "one policy learns to reach any of them on demand.")
    do_train(ours, {})
    stage(
        5, "Experiments", "every goal is asked for, ten episodes each; policies are played again."
    )
    experiments = ("reassess", "accuracy", "reproducibility")
    todo = [(name, run) for run in (baseline, ours) for name in experiments]
    for experiment, run in [*todo, ("calibrate", ours)]:
        if not run.is_evaluated(experiment):
            do_evaluate(run, experiment)
    stage(6, "Report", "tables and figures beside the paper's.")
    found = found_runs([baseline.directory, ours.directory])
    page = write_report(found, out / "report")
    times[-1] = (times[-1][0], time.monotonic() - times[-1][1])

    print_accuracies(found)
    spent = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in times)
    task = ours.task
    middle = " ".join(f"{(a + b) / 2:g}" for a, b in zip(task.low, task.high, strict=True))
    tell(f"\n{time_text(time.monotonic() - began)} in all: {spent}.")
    tell(f"The report is {page}. Next, ask for a behaviour and look at it:")
    tell(f"  qdt act {ours.directory} --target {middle} --html behaviour.html")


def print_accuracies(found: dict[str, list["Found"]]) -> None:
    import numpy as np

    from machinery.driver import tell
    from machinery.report import accuracies, reachable_goals

    for runs in found.values():
        mask = reachable_goals(runs)
        tell(f"\n{'method':<24}{'distance':>10}{'reachable goals':>18}{'spread':>10}")
        for method, (result, *_) in accuracies(runs).items():
            inside = np.nanmean(np.array(result["distance"])[mask])
            distance, spread = result["mean_distance"], result["mean_spread"]
            tell(f"{method:<24}{distance:>10.4f}{inside:>18.4f}{spread:>10.4f}")


@app.command(cls=RegistryCommand)
def search(
    out: Annotated[Path, typer.Option(help="The run directory; it continues if it is there.")],
    task: TaskOption = None,
    algo: AlgoOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    seed: SeedOption = None,
    set_: SetOption = None,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
) -> None:
    """Stage 1: policies that cover the behaviour space. Writes the plan of all stages."""
    start_jax(distributed, coordinator, num_processes, process_id)
    changes = changes_of(set_, STAGES)
    do_search(out, continued_plan(out, preset, config, task, algo, seed, changes))


@app.command()
def dataset(
    run: RunArgument,
    name: NameOption = None,
    trajectories: Annotated[
        int | None, typer.Option(help="How many are stored.", show_default="the plan's number")
    ] = None,
    naive: Annotated[
        bool,
        typer.Option(
            "--naive",
            help="The variant for which all policies play, not the best of each zone, and all that "
            "they play is stored.",
            show_default="off",
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="Only draw the density of the dataset that is there.",
            show_default="off",
        ),
    ] = False,
    set_: SetOption = None,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
) -> None:
    """Stage 2: the selected policies of a repertoire play trajectories."""
    start_jax(distributed, coordinator, num_processes, process_id)
    changes = changes_of(set_, ["dataset"])
    fields = changes.setdefault("dataset", {})
    if trajectories is not None:
        fields["trajectories"] = str(trajectories)
    if naive:
        name = name or "naive"
        fields |= {"naive": "true"} | ({} if "typical" in fields else {"typical": "false"})
    if show:
        show_dataset(open_run(run), name)
    else:
        do_dataset(open_run(run), changes, name)


def show_dataset(run: Run, name: str | None) -> None:
    """Prints and draws where the trajectories of a dataset ended."""
    from dataset import density
    from machinery import plots

    data, task = run.dataset(name), run.task
    counts, _ = density(data)
    zones = len(data.meta.selection.centroids)
    print(
        f"{len(data):,} trajectories of {len(set(data.policy))} policies; "
        f"{len(set(data.zone))} of {zones} zones have a policy."
    )
    for reason, count in data.left_out.items():
        print(f"{count:,} episodes were left out: {reason}.")
    if task.descriptor_size == 2:
        title = name or "all"
        figure = plots.density_map({title: counts}, task.low, task.high, task.axes)
        path = data.directory / "density.png"
        plots.save(figure, path)
        print(path)


@app.command()
def train(
    run: RunArgument,
    name: NameOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--dataset", help="The variant of the dataset to learn from.", show_default=False
        ),
    ] = None,
    prune: Annotated[Prune, typer.Option(help="Leave out a part of the dataset.")] = Prune.nothing,
    naive: Annotated[
        bool,
        typer.Option("--naive", help="Learn from the naive dataset.", show_default="off"),
    ] = False,
    set_: SetOption = None,
    distributed: Distributed = False,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
) -> None:
    """Stage 3: the Quality-Diversity Transformer learns from the dataset."""
    start_jax(distributed, coordinator, num_processes, process_id)
    changes = changes_of(set_, ["train"])
    data = data or ("naive" if naive else None)
    how = None if prune == Prune.nothing else str(prune)
    name = name or "-".join(part for part in (data, how) if part) or None
    do_train(open_run(run), changes, name, data, how)


@app.command()
def evaluate(
    experiment: Annotated[
        Experiment,
        typer.Argument(
            help="accuracy: table 1, figures 5 and 9; reproducibility: figures 2, 7 and 8; reassess: "
            "table 2; generalize: figures 6 and 12; calibrate: ours."
        ),
    ],
    runs: RunsArgument,
) -> None:
    """An experiment of the paper on every run given: RUN/evaluation/EXPERIMENT.json; `report` draws."""
    start_jax()
    for run in runs:
        do_evaluate(open_run(run), experiment)


@app.command()
def act(
    run: RunArgument,
    target: Annotated[
        list[str],
        typer.Option(
            metavar="X Y",
            help="The behaviour that is asked for, a number per axis. Can be repeated.",
        ),
    ],
    episodes: Annotated[int, typer.Option(help="From as many random starts.")] = 5,
    seed: Annotated[
        int, typer.Option(help="Determines the random starts.", min=0, max=2**31 - 1)
    ] = 0,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Also write a page that plays the episodes in 3D.", show_default="no page"
        ),
    ] = None,
    gif: Annotated[
        Path | None,
        typer.Option(
            help="Also write an animation of the first start, a field for each target.",
            show_default="no animation",
        ),
    ] = None,
    video: Annotated[
        Path | None,
        typer.Option(help="The same as an MP4; needs ffmpeg.", show_default="no video"),
    ] = None,
) -> None:
    """Behaviour on demand: the QDT plays towards a target, or several."""
    start_jax()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from evaluate import Filming
    from machinery import demand
    from machinery.files import UserError
    from machinery.streams import stream
    from me_ls import spread
    from qdt import play

    lineage, files = open_run(run), demand.Files(html, gif, video)
    task, model = lineage.task, lineage.model()
    goals = [demand.parse_target(text, task.low, task.high) for text in target]
    if episodes < 1:
        raise UserError(f"at least one episode has to be played, not {episodes}.")
    files.check(goals)
    keys = jax.random.split(stream(seed, "act"), (1, episodes))
    keys = jnp.repeat(keys, len(goals), axis=0)  # the same starts for every target
    played = play(task, model, jnp.array(goals), keys, record=Filming(task))
    spreads = jax.vmap(spread)(played.descriptor)
    numbers = map(np.asarray, (played.descriptor, played.fitness, spreads))
    for line in demand.told(goals, *numbers):
        print(line)
    films = [
        playbacks_of(jax.tree.map(lambda x, i=i: x[i], played.recorded)) for i in range(len(goals))
    ]
    files.write(setting_of(lineage), films, goals)


def setting_of(run: Run) -> "Setting":
    """What the task of a run looks like."""
    from machinery.demand import Setting

    task = run.task
    return Setting(
        run.plan.task.task, task.scene(), task.low, task.high, bool(task.is_place), task.dt
    )


def playbacks_of(film: "Film") -> "list[Playback]":
    """What was filmed, for those who show it."""
    import numpy as np

    from machinery import viewer

    arrays = film.position, film.rotation, film.path, film.contact
    return viewer.playbacks(*map(np.asarray, arrays))


@app.command()
def serve(
    run: RunArgument,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    starts: Annotated[
        int, typer.Option(help="From as many random starts at once.", min=1, max=32)
    ] = 4,
    seed: Annotated[
        int, typer.Option(help="Determines the first random starts.", min=0, max=2**31 - 1)
    ] = 0,
) -> None:
    """Behaviour on demand, live: a page on which a click asks for a behaviour."""
    start_jax()
    from machinery import demand
    from machinery.driver import tell

    cast = cast_of(open_run(run), starts)
    if cast.accuracy is None:
        tell(f"The map stays white; `qdt evaluate accuracy {run}` gives it its colours.")
    demand.serve(cast, host, port, seed)


def cast_of(run: Run, starts: int) -> "Cast":
    """The run's own model, and whoever of its repertoire is nearest to a target."""
    import jax
    import jax.numpy as jnp

    from evaluate import film, refuse_empty
    from machinery.demand import Cast
    from machinery.streams import stream
    from qdt import find_model

    task, model, repertoire = run.task, run.model(), run.repertoire()
    refuse_empty(repertoire)
    players = {"model": model, "repertoire": repertoire}
    titles = {"model": find_model(run.plan.train.model).title, "repertoire": "nearest policy"}

    def play(who: str, target: Sequence[float], seed: int, noise: float) -> "list[Playback]":
        (keys,) = jax.random.split(stream(seed, "act"), (1, starts))  # as `qdt act` has them
        return playbacks_of(film(task, players[who], jnp.array(target, float), keys, noise))

    noise = float(model.statistics.action_noise)
    return Cast(setting_of(run), titles, noise, play, run.accuracy_map())


@app.command()
def show(run: RunArgument) -> None:
    """What is in a run, with the maps of its repertoire."""
    start_jax()
    import equinox as eqx
    import jax
    import numpy as np

    from machinery import plots
    from me_ls import make_search, repertoire_metrics

    lineage = open_run(run)
    task, repertoire, config = lineage.task, lineage.repertoire(), lineage.plan.search
    episodes = make_search(task, config).episodes
    print(f"{run}: {config.algo} on {lineage.plan.task.task}, seed {lineage.plan.seed}")
    print(f"  episodes of {task.length} steps, {episodes} per policy")
    print(f"  {int(repertoire.occupied.sum())} of {config.cells} cells are occupied")
    for name, value in repertoire_metrics(task, repertoire).items():
        if name != "mean_spread" or episodes > 1:
            print(f"  {name} {float(value):.4g}")
    for path in sorted(run.glob("dataset*/meta.json")):
        name = path.parent.name.removeprefix("dataset").removeprefix("-")
        data = lineage.dataset(name or None)
        print(
            f"  {path.parent.name}: {len(data):,} trajectories of {len(set(data.policy))} policies"
        )
    for name in lineage.model_paths():
        arrays = jax.tree.leaves(eqx.filter(lineage.model(name), eqx.is_array))
        print(f"  {name}: {sum(x.size for x in arrays):,} parameters")
    if task.descriptor_size == 2:
        for name in ("fitness", "spread") if episodes > 1 else ("fitness",):
            values = np.where(repertoire.occupied, getattr(repertoire, name), np.nan)
            figure = plots.cell_maps(
                {config.algo: (repertoire.centroids, values)},
                task.low,
                task.high,
                task.axes,
                name,
                lighter_is="high" if name == "fitness" else "low",
            )
            path = run / "search" / f"{name}.png"
            plots.save(figure, path)
            print(f"  {path}")


@app.command()
def report(
    runs: RunsArgument,
    out: Annotated[Path, typer.Option(help="Where report.html and the tables go.")] = Path(
        "report"
    ),
) -> None:
    """Tables and figures of many runs, beside the paper's, in one page."""
    start_jax()
    from machinery.report import write_report

    print(f"The report is {write_report(found_runs(runs), out)}.")


# --- what a run would cost --------------------------------------------------------------------------


def print_plan(plans: list[Plan]) -> None:
    """What `run` would do, and how long it would take here by a short measurement."""
    import equinox as eqx
    import jax

    from dataset import bytes_on_disk
    from machinery.driver import time_text
    from machinery.machine import settings
    from me_ls import make_search
    from qdt import make_model

    plan = plans[-1]
    task, config = plan.task.task, plan.search
    print(f"{plan.preset or 'a written plan'} on {task}")
    for name in STAGES:
        print(f"\n{name}")
        for field, value in vars(getattr(plan, name)).items():
            print(f"  {field:<24}{value}")
    print("\nmachine")
    for field, value in vars(settings()).items():
        print(f"  {field:<24}{'by the device' if value is None else value}")
    played = Run(Path(), plan).task
    speed = measure_steps_per_second(plan)
    print(f"\nThis machine: {speed:,.0f} environment steps per second.\n")
    total = 0.0
    for plan in plans:
        search = make_search(played, plan.search)
        steps = search.iterations * search.steps_per_iteration
        total += steps / speed
        print(
            f"{plan.search.algo:<8}{search.iterations:>12,} iterations "
            f"{steps // played.length:>14,} episodes {steps:>18,} steps "
            f"{time_text(steps / speed):>12}"
        )
    state = eqx.filter_eval_shape(make_search(played, config).init, jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(state.repertoire.policies)) // config.cells
    print(
        f"        a policy has {size:,} weights; the repertoire takes "
        f"{size_text(4 * size * config.cells)}, a batch {size_text(4 * size * config.batch)}"
    )
    steps = plan.dataset.trajectories * played.length
    total += steps / speed
    least = "at least " if plan.dataset.typical else ""  # the others are played and left out
    print(
        f"dataset {plan.dataset.trajectories:>12,} trajectories {least}{steps:>12,} steps, "
        f"{size_text(bytes_on_disk(played, plan.dataset))} on disk "
        f"{time_text(steps / speed):>12}"
    )
    model = eqx.filter_eval_shape(make_model, played, plan.train, key=jax.random.key(0))
    parameters = sum(x.size for x in jax.tree.leaves(model))
    rate = measure_trajectories_per_second(plan)
    seen = plan.train.epochs * plan.dataset.trajectories
    total += seen / rate
    print(
        f"{plan.train.model:<8}{parameters:>12,} parameters {plan.train.epochs} epochs, "
        f"{seen:,} trajectories at {rate:,.1f} per second {time_text(seen / rate):>12}"
    )
    print(f"\nAbout {time_text(total)} in all, without experiments and compilation.")


def size_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def measure_steps_per_second(plan: Plan) -> float:
    """One batch of the engine with short episodes, twice; the second time counts."""
    import jax

    from envs import make_task, rollout
    from machinery.machine import replicate
    from me_ls import random_policies

    task = make_task(replace(plan.task, length=min(plan.task.length, 25)))
    episodes = plan.search.episodes
    count = max(1, 64 // episodes) * jax.device_count()
    keys = jax.random.split(jax.random.key(0), count)
    policies = replicate(random_policies(task, plan.search.hidden, keys))
    starts = jax.random.split(keys[0], (count, episodes))
    return starts.size * task.length / second_time(lambda: rollout(task, policies, starts))


def measure_trajectories_per_second(plan: Plan) -> float:
    """One small step of training, twice; the second time counts."""
    import jax
    import jax.numpy as jnp

    from dataset import Trajectory
    from envs import make_task
    from machinery import machine
    from qdt import make_model, optimiser, train_step

    task, config = make_task(plan.task), plan.train
    micro_batch = machine.micro_batch(task.length)
    batch = jax.device_count() * micro_batch
    zeros = Trajectory(
        jnp.zeros((batch, task.descriptor_size)),
        jnp.zeros((batch, task.length, task.observation_size)),
        jnp.zeros((batch, task.length, task.action_size)),
        jnp.zeros((batch, task.length, task.descriptor_size)),
    )
    model = machine.replicate(make_model(task, config, key=jax.random.key(0)))
    moments = optimiser(config, 1).init(model)
    how = {"config": config, "total": 1, "micro_batch": micro_batch}
    step = lambda: train_step(model, moments, zeros, jax.random.key(0), **how)  # noqa: E731
    return batch / second_time(step)


def second_time(work: Any) -> float:
    import jax

    jax.block_until_ready(work())
    began = time.monotonic()
    jax.block_until_ready(work())
    return time.monotonic() - began


# --- the command line itself ------------------------------------------------------------------------


def join_target(arguments: list[str]) -> list[str]:
    """`--target -3 4` as `--target "-3 4"`: as many numbers as follow, negative ones too."""
    joined: list[str] = []
    rest = list(arguments)
    while rest:
        joined.append(rest.pop(0))
        if joined[-1] == "--target":
            numbers = []
            while rest and _is_number(rest[0]):
                numbers.append(rest.pop(0))
            joined += [" ".join(numbers)] if numbers else []
    return joined


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def main() -> None:
    """Runs a command; what the user can put right is one sentence and exit code 1."""
    try:
        app(join_target(sys.argv[1:]), prog_name="qdt")
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C between two stages
            print("qdt: interrupted; what was on disk stays as it is.", file=sys.stderr)
        raise
    except Exception as error:
        import jax

        from machinery.driver import Stopped
        from machinery.files import UserError
        from machinery.machine import is_lost_process

        code = 130 if isinstance(error, Stopped) else 1
        if is_lost_process(error):
            error = UserError(
                "another process of the cluster is gone, or cannot be reached any more; "
                "start all of them again, and the run continues."
            )
        if isinstance(error, UserError):
            print(f"qdt: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        if jax.distributed.is_initialized() and not isinstance(error, Stopped):
            time.sleep(1)  # the others may be about to say the same
            os._exit(code)  # a normal end would wait for those that still work or are gone
        sys.exit(code)


if __name__ == "__main__":
    main()
