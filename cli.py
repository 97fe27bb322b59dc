"""The command line: one command per stage, and `run` for the whole pipeline.

A run directory holds one lineage: a search, the dataset of its repertoire, the models trained on it, and
their evaluations. The first command writes the plan of all stages into it; later commands read that plan.
The same command again continues where it was.

To add a rule, a task or a model of your own, register it and call `main()`: "Make it yours" in the README.
Reads in this order: options, runs, stages, commands.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import typer
from typer.core import TyperCommand

import dataset as datasets
import envs
import me_ls
import pgame_ls  # noqa: F401 - registers its rules
import qdt
import uncertain  # noqa: F401 - likewise
from dataset import Dataset, DatasetConfig
from envs import Task, TaskConfig, make_task
from evaluate import EXPERIMENTS, Film, Filming, Subject, averages, film, refuse_empty, summary
from machinery import (
    demand,
    estimate,
    machine,
    plots,
    pretrained,
    quotes,
    reproduction,
    runs,
    viewer,
)
from machinery.demand import Cast, Setting
from machinery.driver import Stopped, drive, tell, time_text
from machinery.files import UserError, read_json, save_arrays, write_json, write_safely
from machinery.gather import Found, accuracies, gather, with_results
from machinery.plans import STAGES, Asked, Changes, Plan, Planner, changes_of, plain
from machinery.report import write_report
from machinery.reproduction import OWN, Job
from machinery.runs import PLAN, find_runs, open_stage, read_stage_config, variant
from machinery.streams import stream
from machinery.viewer import Accuracy, Playback
from me_ls import RULES, Repertoire, load_repertoire, make_search, repertoire_metrics, spread
from qdt import MODELS, ConditionedPolicy, Training, find_model, load_model, play

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The Quality-Diversity Transformer: search, dataset, training, experiments.",
)
PLANS = Planner(TaskConfig, RULES, DatasetConfig, MODELS, check=make_task)

# --- options ----------------------------------------------------------------------------------------

Prune = StrEnum("Prune", {name: name for name in datasets.PRUNINGS})
Experiment = StrEnum("Experiment", {name: name for name in (*EXPERIMENTS, "generalize")})


class RegistryCommand(TyperCommand):
    """Help that lists what is registered by the time it is asked for."""

    def get_help(self, ctx: Any) -> str:
        fill_in_registries(self.params)
        return super().get_help(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        fill_in_registries(self.params)
        super().format_help(ctx, formatter)


def fill_in_registries(params: Sequence[Any]) -> None:
    rules = "; ".join(f"{name}: {rule.about}" for name, rule in RULES.items())
    for param in params:
        if text := getattr(param, "help", None):
            searches = reproduction.content()["searches"]
            lists = {"@tasks": envs.TASKS, "@parts": reproduction.parts(), "@searches": searches}
            for word, names in lists.items():
                text = text.replace(word, ", ".join(names))
            param.help = text.replace("@rules", rules)


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


def join_cluster(
    distributed: bool, coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Where a command is one of several processes."""
    if not coordinator and (num_processes, process_id) != (None, None):
        raise UserError("--num-processes and --process-id go with --coordinator HOST:PORT.")
    if distributed or coordinator:
        machine.join_cluster(coordinator, num_processes, process_id)


# --- runs -------------------------------------------------------------------------------------------


class Run(runs.Run):
    """A run directory, its plan, and what the stages have left in it."""

    @property
    def task(self) -> Task:
        return make_task(self.plan.task)

    def repertoire(self) -> Repertoire:
        if self.is_pretrained:
            raise UserError(f"{self.directory} is a pretrained model: it has no repertoire.")
        if not self.repertoire_path.exists():
            raise UserError(f"the search in {self.directory} is not finished; continue it first.")
        return load_repertoire(self.repertoire_path, self.task, self.plan.search)

    def dataset(self, name: str | None = None) -> Dataset:
        directory = self.directory / variant("dataset", name)
        if not (directory / "meta.json").exists():
            raise UserError(f"{self.directory} has no {directory.name}; `qdt dataset` makes one.")
        data, task = datasets.open_dataset(directory), plain(self.plan)["task"]
        made_for = data.meta.stage.get("task", task)  # unknown where it was imported
        if made_for != task:
            raise UserError(f"{directory} was made for another task: {made_for}, not {task}.")
        return data

    def model(self, name: str | None = None) -> ConditionedPolicy:
        """The best epoch of a training."""
        return load_model(self.directory / (name or self.plan.train.model), self.task)

    def subject(self, experiment: str) -> Subject:
        """What an experiment looks at."""
        models = {name: self.model(name) for name in self.models_for(experiment)}
        repertoire = None if self.is_pretrained else self.repertoire()
        return Subject(self.task, self.plan.seed, repertoire, models)

    def accuracy_map(self) -> Accuracy | None:
        """How near to every goal its own model and its repertoire come, if that was evaluated."""
        if not self.is_evaluated("accuracy"):
            return None
        result = read_json(self.result_path("accuracy"))["result"]
        players = {"model": self.plan.train.model, "repertoire": "repertoire"}
        own = {name: result[key] for name, key in players.items() if key in result}
        distance = {name: np.array(found["distance"], float) for name, found in own.items()}
        return Accuracy(np.array(own["model"]["goals"]), distance)


def open_run(directory: Path) -> Run:
    return Run(directory, PLANS.stored(directory))


@contextmanager
def begin_stage(run: Run, section: str, name: str | None, changes: Changes) -> Iterator[Run]:
    """The run with changes to a stage that has not begun."""
    with PLANS.begin_stage(run.directory, run.plan, section, name, changes) as plan:
        yield Run(run.directory, plan)


# --- stages -----------------------------------------------------------------------------------------


def do_search(directory: Path, asked: Plan) -> Run:
    with PLANS.begin_run(directory, asked) as plan:
        run, algo = Run(directory, plan), plan.search.algo
        search = make_search(run.task, plan.search)
        about = {"task": plan.task, "search": plan.search, "seed": plan.seed}
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
                show=me_ls.SHOWN,
                check=me_ls.refuse_empty,
            )
            save_arrays(run.repertoire_path, state.repertoire)
    return run


def do_dataset(run: Run, changes: Changes, name: str | None = None) -> Dataset:
    with begin_stage(run, "dataset", name, changes) as run:
        plan, directory = run.plan, run.directory / variant("dataset", name)
        about = {"task": plan.task, "dataset": plan.dataset, "seed": plan.seed}
        with open_stage(directory, about) as stage:
            count, length = plan.dataset.trajectories, plan.task.length
            tell(f"{directory.name}: {count:,} trajectories of {length} steps.")
            return datasets.build(run.task, run.repertoire(), plan.dataset, plan.seed, stage)


def do_train(
    run: Run,
    changes: Changes,
    name: str | None = None,
    data_name: str | None = None,
    prune: str | None = None,
) -> ConditionedPolicy:
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
                show=qdt.SHOWN,
                check=qdt.refuse_divergence,
            )
            model = qdt.best_model(state)
            save_arrays(path, model)
    return model


def do_evaluate(run: Run, experiment: str) -> dict[str, Any]:
    """Runs an experiment and writes RUN/evaluation/EXPERIMENT.json."""
    pruned = experiment == "generalize"
    result = generalize(run) if pruned else EXPERIMENTS[experiment](run.subject(experiment))
    write_json(run.result_path(experiment), {"inputs": run.inputs(experiment), "result": result})
    for line in summary(experiment, result):
        tell(f"{run.plan.search.algo}, {line}")
    return result


def generalize(run: Run) -> dict[str, Any]:
    """Section 5.3: models of pruned datasets, trained here where they are missing.

    All of them learn for as many steps as the model of the whole dataset: less is shown, not learned.
    """
    data, subject, result = run.dataset(), run.subject("reassess"), {}
    whole = Training(run.task, run.plan.train, data, run.plan.seed)
    as_long = {"train": {"steps_per_epoch": str(whole.steps_per_epoch)}}
    for how in (None, *datasets.PRUNINGS):
        model = do_train(run, as_long if how else {}, name=how, prune=how)
        view = datasets.prune(data, how, seed=run.plan.seed) if how else None
        counts, _ = datasets.density(data, view=view)
        removed = datasets.empty_boxes(data, how or "nothing")
        shown = {"density": counts, "removed": removed, "steps": whole.total}
        result[how or "all"] = shown | averages(subject.measure(model))
    return result


def found_runs(directories: Sequence[Path]) -> dict[str, list[Found]]:
    """What the report shows, by task. A directory that holds several runs stands for all of them."""
    places: dict[Path, Path] = {}  # a run that is named twice is one run
    for directory in directories:
        inside = find_runs(directory)
        if not inside:
            raise UserError(f"{directory} holds no run.")
        places |= {run.resolve(): run for run in inside if run.resolve() not in places}
    titles = {name: model.title for name, model in MODELS.items()}
    found = []
    for place in places.values():
        run = open_run(place)
        rule = RULES[run.plan.search.algo]
        theirs = paper_plan(run.plan)
        about = Found(place, plain(run.plan), run.task, rule.title, rule.colour, titles, theirs)
        found.append(with_results(about))
    return gather(found, [rule.title for rule in RULES.values()])


def paper_plan(plan: Plan) -> dict[str, Any]:
    """A plan of the same task, algorithm and model, with the paper's settings: the defaults."""
    named = {"task": plan.task.task}, {"algo": plan.search.algo}, {}, {"model": plan.train.model}
    return plain(PLANS.make(dict(zip(STAGES, named, strict=True))))


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
    changes = changes_of(set_, STAGES)
    plans = [
        PLANS.continued(out / algo, Asked(preset, config, task, algo, seed, changes))
        for algo in ("me", "me-ls")
    ]
    if dry_run:
        print_plan(plans)
    else:
        run_all(plans, out)


def run_all(plans: list[Plan], out: Path) -> None:
    """Search with ME and ME-LS, dataset, QDT, experiments, report; continues where it was."""
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


def print_accuracies(found: dict[str, list[Found]]) -> None:
    for of_task in found.values():
        good = of_task[0].task.good_distance
        tell(f"\n{'method':<38}{'distance':>10}{'goals reached':>15}{'spread':>10}")
        for method, results in accuracies(of_task).items():
            for result in results.values():
                near = np.mean(np.array(result["distance"], float) <= good)
                distance, spread = result["mean_distance"], result["mean_spread"]
                tell(f"{method:<38}{distance:>10.4f}{near:>15.0%}{spread:>10.4f}")


@app.command(cls=RegistryCommand)
def reproduce(
    preset: PresetOption = None,
    task: TaskOption = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Such as 0-4 or 0,2.", show_default="0-4; tiny: 0"),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PART,...",
            help="These alone, numbered as in the paper: @parts.",
            show_default="everything",
        ),
    ] = None,
    searches: Annotated[
        str | None,
        typer.Option(metavar="ALGO,...", help="Of @searches.", show_default="all of them"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the runs and the report go.", show_default="runs/reproduce-TASK"),
    ] = None,
    set_: SetOption = None,
) -> None:
    """All tables and figures: every search, dataset, model, variant and experiment, and the report."""
    preset, changes = preset or "laptop", changes_of(set_, STAGES)
    chosen = reproduction.parse_seeds(seeds) if seeds else reproduction.own_seeds(preset)
    names = [
        [name.strip() for name in (text or "").split(",") if text] for text in (only, searches)
    ]
    jobs = reproduction.plan_jobs(chosen, *names)
    named = PLANS.asked(Asked(preset, task=task)).task.task
    maker = Maker(
        out or Path("runs") / f"reproduce-{named}", Asked(preset, task=task, changes=changes)
    )
    reproduction.do_jobs(jobs, maker.is_done, maker.do, maker.out / "times.json")


@dataclass(frozen=True)
class Maker:
    """Does the jobs of a reproduction: OUT/seed-SEED/ALGO is a run."""

    out: Path
    asked: Asked

    def directory(self, job: Job) -> Path:
        return self.out / f"seed-{job.seed}" / job.algo

    def plan(self, job: Job) -> Plan:
        return PLANS.asked(replace(self.asked, algo=job.algo, seed=job.seed))

    def is_done(self, job: Job) -> bool:
        """Whether its result is there. A run that was made with another plan is refused."""
        directory = self.directory(job)
        if job.stage == "report" or not (directory / PLAN).exists():
            return False
        if job.stage == "search":
            with PLANS.begin_run(directory, self.plan(job)) as plan:
                return Run(directory, plan).repertoire_path.exists()
        run = open_run(directory)
        if job.stage == "dataset":
            return (directory / variant("dataset", job.what) / "meta.json").exists()
        if job.stage == "train":
            name = run.plan.train.model if job.what == OWN else job.what
            return name in run.model_paths()
        return run.repertoire_path.exists() and run.is_evaluated(job.what)

    def do(self, job: Job) -> None:
        if job.stage == "search":
            do_search(self.directory(job), self.plan(job))
        elif job.stage == "report":
            found = found_runs([self.out])
            page = write_report(found, self.out / "report")
            print_accuracies(found)
            tell(f"The report is {page}.")
        else:
            self.do_stage(open_run(self.directory(job)), job)

    def do_stage(self, run: Run, job: Job) -> None:
        if job.stage == "dataset":
            fields = reproduction.datasets().get(job.what, {})
            do_dataset(run, {"dataset": as_text(fields)}, job.what or None)
        elif job.stage == "evaluate":
            do_evaluate(run, job.what)
        elif job.what == OWN:
            do_train(run, {})
        else:
            recipe = reproduction.recipes()[job.what]
            fields = {"model": "qdt"} | recipe.train
            name = job.what.removeprefix(fields["model"]).removeprefix("-")
            do_train(run, {"train": as_text(fields)}, name or None, recipe.dataset)


def as_text(fields: dict[str, Any]) -> dict[str, str]:
    """Fields of a file as the command line would give them."""
    return {name: str(value) for name, value in fields.items()}


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
    join_cluster(distributed, coordinator, num_processes, process_id)
    changes = changes_of(set_, STAGES)
    do_search(out, PLANS.continued(out, Asked(preset, config, task, algo, seed, changes)))


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
    join_cluster(distributed, coordinator, num_processes, process_id)
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
    data, task = run.dataset(name), run.task
    counts, _ = datasets.density(data)
    zones = len(data.meta.selection.centroids)
    print(
        f"{len(data):,} trajectories of {len(set(data.policy))} policies; "
        f"{len(set(data.zone))} of {zones} zones have a policy."
    )
    if (hits := data.meta.selection.hits) is not None:
        tried = data.meta.config.selection_episodes
        print(
            f"Of {tried} episodes before the selection, {hits.mean():.1f} ended in the zone of "
            f"their policy (least {hits.min()}, most {hits.max()})."
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
    prune: Annotated[
        Prune | None, typer.Option(help="Leave out a part of the dataset.", show_default=False)
    ] = None,
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
    join_cluster(distributed, coordinator, num_processes, process_id)
    changes = changes_of(set_, ["train"])
    data = data or ("naive" if naive else None)
    how = str(prune) if prune else None
    name = name or "-".join(part for part in (data, how) if part) or None
    do_train(open_run(run), changes, name, data, how)


@app.command()
def evaluate(
    experiment: Annotated[
        Experiment,
        typer.Argument(
            help="accuracy: table 1, figures 6 and 12; reproducibility: figures 3, 8 and 9; reassess: "
            "table 5; generalize: figures 7 and 13; calibrate: ours."
        ),
    ],
    runs: RunsArgument,
) -> None:
    """An experiment of the paper on every run given: RUN/evaluation/EXPERIMENT.json; `report` draws."""
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


def setting_of(run: Run) -> Setting:
    """What the task of a run looks like."""
    task = run.task
    return Setting(
        run.plan.task.task, task.scene(), task.low, task.high, bool(task.is_place), task.dt
    )


def playbacks_of(film: Film) -> list[Playback]:
    """What was filmed, for those who show it."""
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
    cast = cast_of(open_run(run), starts)
    if cast.accuracy is None:
        tell(f"The map stays white; `qdt evaluate accuracy {run}` gives it its colours.")
    demand.serve(cast, host, port, seed)


def cast_of(run: Run, starts: int) -> Cast:
    """The run's own model, and whoever of its repertoire is nearest to a target."""
    task, model = run.task, run.model()
    players: dict[str, ConditionedPolicy | Repertoire] = {"model": model}
    titles = {"model": find_model(run.plan.train.model).title}
    if not run.is_pretrained:
        players["repertoire"], titles["repertoire"] = run.repertoire(), "nearest policy"
        refuse_empty(players["repertoire"])

    def play(
        who: str, targets: Sequence[Sequence[float]], seed: int, noise: float
    ) -> list[Playback]:
        (keys,) = jax.random.split(stream(seed, "act"), (1, starts))  # as `qdt act` has them
        return playbacks_of(film(task, players[who], jnp.array(targets, float), keys, noise))

    noise = float(model.statistics.action_noise)
    return Cast(setting_of(run), titles, noise, play, run.accuracy_map())


@app.command()
def export(
    run: RunArgument,
    out: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where it goes, such as pretrained/ant-omni.")
    ],
) -> None:
    """The run's model to hand on: a small directory for `act`, `serve` and `evaluate accuracy`."""
    lineage = open_run(run)
    task, name = lineage.task, lineage.plan.train.model
    lineage.model()  # is there, and can be read
    data = lineage.dataset(read_stage_config(run / name).get("dataset"))
    who = data.meta.selection
    about = pretrained.About(
        find_model(name).title,
        getattr(task, "robot", None),
        getattr(task, "robot_kind", None),
        task.axes,
        task.low,
        task.high,
        task.unit,
    )
    there = {"zone": who.zone, "descriptor": who.descriptor, "centroids": who.centroids}
    pretrained.export(lineage, out, about, there)
    print(f"{out} holds the model and its card, {out / 'README.md'}.")


@app.command()
def show(run: RunArgument) -> None:
    """What is in a run, with the maps of its repertoire."""
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
    fill: Annotated[
        Path | None,
        typer.Option(
            metavar="PAGE",
            help="Also bring the marked tables and numbers of a Markdown page up to date.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Tables and figures of many runs, beside the paper's, in one page."""
    found = found_runs(runs)
    print(f"The report is {write_report(found, out)}.")
    if fill is not None:
        if not fill.is_file():
            raise UserError(f"there is no page {fill}.")
        filled = quotes.fill(fill.read_text(), fill.parent, found)
        with write_safely(fill) as file:
            file.write(filled.encode())


# --- what a run would cost --------------------------------------------------------------------------


def print_plan(plans: list[Plan]) -> None:
    """What `run` would do, and how long it would take here by a short measurement."""
    plan = plans[-1]
    config, played = plan.search, make_task(plan.task)
    print(f"{plan.preset or 'a written plan'} on {plan.task.task}")
    estimate.print_settings(plan)
    speed = measure_steps_per_second(plan)
    print(f"\nThis machine: {speed:,.0f} environment steps per second.\n")
    total = 0.0
    for each in plans:
        search = make_search(played, each.search)
        steps = search.iterations * search.steps_per_iteration
        total += steps / speed
        print(
            f"{each.search.algo:<8}{search.iterations:>12,} iterations "
            f"{steps // played.length:>14,} episodes {steps:>18,} steps "
            f"{time_text(steps / speed):>12}"
        )
    state = eqx.filter_eval_shape(make_search(played, config).init, jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(state.repertoire.policies)) // config.cells
    print(
        f"        a policy has {size:,} weights; the repertoire takes "
        f"{estimate.size_text(4 * size * config.cells)}, "
        f"a batch {estimate.size_text(4 * size * config.batch)}"
    )
    steps = plan.dataset.trajectories * played.length
    total += steps / speed
    least = "at least " if plan.dataset.typical else ""  # the others are played and left out
    print(
        f"dataset {plan.dataset.trajectories:>12,} trajectories {least}{steps:>12,} steps, "
        f"{estimate.size_text(datasets.bytes_on_disk(played, plan.dataset))} on disk "
        f"{time_text(steps / speed):>12}"
    )
    model = eqx.filter_eval_shape(qdt.make_model, played, plan.train, key=jax.random.key(0))
    parameters = sum(x.size for x in jax.tree.leaves(model))
    rate = measure_trajectories_per_second(plan)
    seen = plan.train.epochs * plan.dataset.trajectories
    total += seen / rate
    print(
        f"{plan.train.model:<8}{parameters:>12,} parameters {plan.train.epochs} epochs, "
        f"{seen:,} trajectories at {rate:,.1f} per second {time_text(seen / rate):>12}"
    )
    print(f"\nAbout {time_text(total)} in all, without experiments and compilation.")


def measure_steps_per_second(plan: Plan) -> float:
    """One batch of the engine with short episodes."""
    task = make_task(replace(plan.task, length=min(plan.task.length, 25)))
    episodes = plan.search.episodes
    count = max(1, 64 // episodes) * jax.device_count()
    keys = jax.random.split(jax.random.key(0), count)
    policies = machine.replicate(me_ls.random_policies(task, plan.search.hidden, keys))
    starts = jax.random.split(keys[0], (count, episodes))
    play = partial(envs.rollout, task, policies, starts)
    return starts.size * task.length / estimate.second_time(play)


def measure_trajectories_per_second(plan: Plan) -> float:
    """One small step of training."""
    task, config = make_task(plan.task), plan.train
    micro_batch = machine.micro_batch(task.length)
    batch = jax.device_count() * micro_batch
    sizes = task.descriptor_size, task.observation_size, task.action_size, task.descriptor_size
    descriptor, *steps = (jnp.zeros((batch, task.length, size)) for size in sizes)
    zeros = datasets.Trajectory(descriptor[:, 0], *steps)
    model = machine.replicate(qdt.make_model(task, config, key=jax.random.key(0)))
    moments = qdt.optimiser(config, 1).init(model)
    how = {"config": config, "total": 1, "micro_batch": micro_batch}
    step = partial(qdt.train_step, model, moments, zeros, jax.random.key(0), **how)
    return batch / estimate.second_time(step)


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
        machine.prepare_jax()
        app(join_target(sys.argv[1:]), prog_name="qdt")
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C between two stages
            print("qdt: interrupted; what was on disk stays as it is.", file=sys.stderr)
        raise
    except Exception as error:
        code = 130 if isinstance(error, Stopped) else 1
        if machine.is_lost_process(error):
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
