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
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxtyping import PyTree

import dataset as datasets
import envs
import me_ls
import pgame_ls  # noqa: F401 - registers its rules
import qdt
import uncertain  # noqa: F401 - likewise
from dataset import Dataset, DatasetConfig
from envs import Task, TaskConfig, make_task
from evaluate import (
    EXPERIMENTS,
    Film,
    Filming,
    Subject,
    averages,
    film,
    refuse_empty,
    standing,
    summary,
)
from machinery import (
    demand,
    estimate,
    machine,
    options,
    overview,
    pretrained,
    quotes,
    reproduction,
    runs,
    viewer,
)
from machinery.demand import Cast, Setting
from machinery.driver import Stopped, drive, tell, time_text
from machinery.files import UserError, lock, save_arrays, write_json, write_safely
from machinery.gather import Found, gather, print_accuracies, with_results
from machinery.options import RegistryCommand, flag, join_cluster, join_target
from machinery.plans import STAGES, Asked, Changes, Plan, Planner, changes_of, plain
from machinery.report import write_report
from machinery.reproduction import Maker, Stages
from machinery.runs import find_runs, open_stage, read_stage_config, variant
from machinery.streams import stream
from machinery.viewer import Playback
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
# What help texts name: whatever is registered by the time they are asked for.
options.LISTS.update(
    {
        "@tasks": lambda: ", ".join(envs.TASKS),
        "@rules": lambda: "; ".join(f"{name}: {rule.about}" for name, rule in RULES.items()),
        "@parts": lambda: ", ".join(reproduction.parts()),
        "@searches": lambda: ", ".join(reproduction.all_searches()),
    }
)


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
        self.refuse_outdated(directory.name)
        return data

    def model(self, name: str | None = None) -> ConditionedPolicy:
        """The best epoch of a training."""
        return load_model(self.directory / (name or self.plan.train.model), self.task)

    def subject(self, experiment: str) -> Subject:
        """What an experiment looks at."""
        models = {name: self.model(name) for name in self.models_for(experiment)}
        repertoire = None if self.is_pretrained else self.repertoire()
        return Subject(self.task, self.plan.seed, repertoire, models)


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
                examine=partial(examine, run, search.iterations),
            )
            save_arrays(run.repertoire_path, state.repertoire)
    return run


def examine(run: Run, total: int, done: int, state: Any) -> dict[str, float]:
    """What a search is worth after an eighth, a quarter, half and all of its budget, for its log."""
    if done not in {total // 8, total // 4, total // 2, total}:
        return {}
    return standing(Subject(run.task, run.plan.seed, state.repertoire, {}))


def do_dataset(run: Run, changes: Changes, name: str | None = None) -> Dataset:
    with begin_stage(run, "dataset", name, changes) as run:
        plan, directory = run.plan, run.directory / variant("dataset", name)
        run.refuse_outdated(directory.name)
        about = {"task": plan.task, "dataset": plan.dataset, "seed": plan.seed}
        about |= run.made_from(directory.name, run.source_of_datasets())
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
    """With `prune`, for as many steps as on the whole dataset: less is shown, not learned."""
    with begin_stage(run, "train", name, changes) as run:
        plan, config = run.plan, run.plan.train
        data = run.dataset(data_name)
        if prune:
            whole = Training(run.task, config, data, plan.seed)
            config = replace(config, steps_per_epoch=whole.steps_per_epoch)
        directory = run.directory / variant(config.model, name)
        run.refuse_outdated(directory.name)
        about = {"train": config, "dataset": data_name, "prune": prune, "seed": plan.seed}
        about |= run.made_from(directory.name, run.source_of_models(data_name))
        with lock(directory), open_stage(directory, about) as stage:
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
    if experiment == "generalize":
        result, inputs = generalize(run), run.inputs(experiment)  # it trains models
    else:
        subject, inputs = run.subject(experiment), run.inputs(experiment)  # as they are now
        result = EXPERIMENTS[experiment](subject)
    write_json(run.result_path(experiment), {"inputs": inputs, "result": result})
    for line in summary(experiment, result):
        tell(f"{run.plan.search.algo}, {line}")
    return result


def generalize(run: Run) -> dict[str, Any]:
    """Section 5.3: models of pruned datasets, trained here where they are missing.

    They are asked for every goal as it is. With `stay_within`, those where nothing was shown would be
    replaced by others, and nothing be generalized.
    """
    data, subject, result = run.dataset(), run.subject("reassess"), {}
    whole = Training(run.task, run.plan.train, data, run.plan.seed)
    for how in (None, *datasets.PRUNINGS):
        model = do_train(run, {}, name=how, prune=how).without_margin()
        view = datasets.prune(data, how, seed=run.plan.seed) if how else None
        counts, _ = datasets.density(data, view=view)
        removed = datasets.empty_boxes(data, how or "nothing")
        emptied = datasets.is_emptied(data, how or "nothing", np.asarray(subject.goals))
        shown = {"density": counts, "removed": removed, "emptied": emptied, "steps": whole.total}
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
        if run.is_pretrained:
            raise UserError(f"{place} is a pretrained model: its card has its numbers.")
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
    preset: options.Preset = None,
    config: options.Config = None,
    task: options.Task = None,
    seed: options.Seed = None,
    out: Annotated[Path, typer.Option(help="Where the runs and the report go.")] = Path("runs/new"),
    dry_run: Annotated[
        bool, flag("--dry-run", "Print the plan and an estimate, do nothing.")
    ] = False,
    set_: options.Set = None,
) -> None:
    """The whole pipeline: ME and ME-LS, dataset, QDT, experiments, report."""
    changes = changes_of(set_, STAGES)
    plans = [
        PLANS.continued(out / algo, Asked(preset, config, task, algo, seed, changes))
        for algo in ("me", "me-ls")
    ]
    if dry_run:
        estimate.print_settings(plans[-1])
    is_new = not (out / "me").exists()
    if dry_run or (is_new and training_work(plans[-1]) >= LONG):
        estimate.print_costs(plans, measure_costs(plans))
    if not dry_run:
        run_all(plans, out)


def run_all(plans: list[Plan], out: Path) -> None:
    """Search with ME and ME-LS, dataset, QDT, experiments, report; continues where it was."""
    began: list[tuple[str, float]] = []

    def stage(number: int, name: str, why: str) -> None:
        began.append((name, time.monotonic()))
        tell(f"\n[{number}/6] {name}: {why}")

    stage(1, "MAP-Elites", "the baseline; it keeps whatever was lucky in its only episode.")
    baseline = do_search(out / "me", plans[0])
    stage(2, "MAP-Elites Low-Spread", "keeps a policy only if it is fitter and steadier.")
    ours = do_search(out / "me-ls", plans[1])
    if not ours.model_paths():
        report_all(out)  # on what is there: the next stages may take long
    stage(3, "Dataset", "in each zone, a policy that often ends there shows it many times.")
    do_dataset(ours, {})
    stage(4, "Quality-Diversity Transformer", "one policy learns to reach any of them on demand.")
    do_train(ours, {})
    stage(
        5, "Experiments", "every goal is asked for, ten episodes each; policies are played again."
    )
    experiments = ("reassess", "accuracy", "reproducibility")
    todo = [(name, run) for run in (baseline, ours) for name in experiments]
    for experiment, run in [*todo, ("elsewhere", ours), ("calibrate", ours)]:
        if not run.is_evaluated(experiment):
            do_evaluate(run, experiment)
    stage(6, "Report", "tables and figures beside the paper's.")
    found = found_runs([baseline.directory, ours.directory])
    page = write_report(found, out / "report")
    began.append(("end", time.monotonic()))

    print_accuracies(found)
    spent = ", ".join(f"{name} {time_text(b - a)}" for (name, a), (_, b) in pairwise(began))
    task = ours.task
    middle = " ".join(f"{(a + b) / 2:g}" for a, b in zip(task.low, task.high, strict=True))
    tell(f"\n{time_text(began[-1][1] - began[0][1])} in all: {spent}.")
    tell(f"The report is {page}. Next, ask for a behaviour and look at it:")
    tell(f"  qdt act {ours.directory} --target {middle} --html behaviour.html")


@app.command(cls=RegistryCommand)
def reproduce(
    preset: options.Preset = None,
    task: options.Task = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Such as 0-4 or 0,2. Those after the third get tables 1 and 5 unless --only names a part.",
            show_default="laptop: 0-4, on ant-omni 2-6; paper: 0-4; else 0",
        ),
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
        typer.Option(
            metavar="ALGO,...", help="Of @searches.", show_default="all that the parts need"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the runs and the report go.", show_default="runs/reproduce-TASK"),
    ] = None,
    set_: options.Set = None,
) -> None:
    """All tables and figures: every search, dataset, model, variant and experiment, and the report.

    Started several times, each on a core of its own, it shares the work.
    """
    preset, changes = preset or "laptop", changes_of(set_, STAGES)
    names = [
        [name.strip() for name in (text or "").split(",") if text] for text in (only, searches)
    ]
    named = PLANS.asked(Asked(preset, task=task, changes=changes)).task.task
    chosen = reproduction.parse_seeds(seeds) if seeds else reproduction.own_seeds(preset, named)
    jobs = reproduction.plan_jobs(chosen, *names)
    out = out or Path("runs") / f"reproduce-{named}"
    stages = Stages(open_run, do_search, do_dataset, do_train, do_evaluate, report_all)
    maker = Maker(out, Asked(preset, task=task, changes=changes), PLANS, stages)
    needed = [job for job in jobs if maker.is_needed(job)]
    reproduction.do_jobs(needed, maker.is_done, maker.do, maker.claim, out / "times.json")


def report_all(out: Path) -> None:
    """The report on all runs in a directory."""
    found = found_runs([out])
    page = write_report(found, out / "report")
    print_accuracies(found)
    tell(f"The report is {page}.")


@app.command(cls=RegistryCommand)
def search(
    out: Annotated[Path, typer.Option(help="The run directory; it continues if it is there.")],
    task: options.Task = None,
    algo: options.Algo = None,
    preset: options.Preset = None,
    config: options.Config = None,
    seed: options.Seed = None,
    set_: options.Set = None,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
) -> None:
    """Stage 1: policies that cover the behaviour space. Writes the plan of all stages."""
    join_cluster(distributed, coordinator, num_processes, process_id)
    changes = changes_of(set_, STAGES)
    do_search(out, PLANS.continued(out, Asked(preset, config, task, algo, seed, changes)))


@app.command()
def dataset(
    run: options.Run,
    name: options.Name = None,
    trajectories: Annotated[
        int | None, typer.Option(help="How many are stored.", show_default="the plan's number")
    ] = None,
    naive: Annotated[
        bool,
        flag(
            "--naive",
            "The variant for which all policies play, not the best of each zone, and all that they "
            "play is stored.",
        ),
    ] = False,
    show: Annotated[
        bool, flag("--show", "Only draw the density of the dataset that is there.")
    ] = False,
    set_: options.Set = None,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
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
        lineage = open_run(run)
        data = lineage.dataset(name)
        overview.show_dataset(lineage.task, data, datasets.density(data)[0], name)
    else:
        do_dataset(open_run(run), changes, name)


@app.command()
def train(
    run: options.Run,
    name: options.Name = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--dataset", help="The variant of the dataset to learn from.", show_default=False
        ),
    ] = None,
    prune: Annotated[
        Prune | None, typer.Option(help="Leave out a part of the dataset.", show_default=False)
    ] = None,
    naive: Annotated[bool, flag("--naive", "Learn from the naive dataset.")] = False,
    set_: options.Set = None,
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
) -> None:
    """Stage 3: the Quality-Diversity Transformer learns from the dataset."""
    join_cluster(distributed, coordinator, num_processes, process_id)
    changes = changes_of(set_, ["train"])
    if naive and data not in (None, "naive"):
        raise UserError(f"--naive is --dataset naive; --dataset {data} does not go with it.")
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
            "table 5; generalize: figures 7 and 13; elsewhere and calibrate: ours."
        ),
    ],
    runs: options.Runs,
) -> None:
    """An experiment of the paper on every run given: RUN/evaluation/EXPERIMENT.json; `report` draws."""
    for run in runs:
        do_evaluate(open_run(run), experiment)


@app.command()
def act(
    run: options.Run,
    target: Annotated[
        list[str],
        typer.Option(
            metavar="X Y",
            help="The behaviour that is asked for, a number per axis. Can be repeated.",
        ),
    ],
    episodes: Annotated[int, typer.Option(help="From how many random starts.")] = 5,
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
    seconds: Annotated[
        float | None,
        typer.Option(
            help="Show only this many seconds, from the start.",
            show_default="the whole episode",
        ),
    ] = None,
) -> None:
    """Behaviour on demand: the QDT plays towards a target, or several."""
    lineage, files = open_run(run), demand.Files(html, gif, video, seconds)
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
    run: options.Run,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is all of this machine's.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    starts: Annotated[
        int, typer.Option(help="From how many random starts at once.", min=1, max=32)
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
    return Cast(setting_of(run), titles, noise, play, demand.accuracy_map(run))


@app.command()
def export(
    run: options.Run,
    out: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where it goes, such as pretrained/ant-omni.")
    ],
) -> None:
    """The run's model to hand on: a small directory for `act`, `serve` and `evaluate accuracy`."""
    lineage = open_run(run)
    task, name = lineage.task, lineage.plan.train.model
    lineage.model()  # is there, and can be read
    lineage.refuse_outdated(name)
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
def show(run: options.Run) -> None:
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
        parameters = count(eqx.filter(lineage.model(name), eqx.is_array))
        print(f"  {name}: {parameters:,} parameters")
    overview.draw_maps(task, repertoire, config.algo, run / "search", with_spread=episodes > 1)


@app.command()
def report(
    runs: options.Runs,
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
    try:
        page = None if fill is None else fill.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise UserError(f"there is no page {fill}, or it is no text.") from None
    found = found_runs(runs)
    print(f"The report is {write_report(found, out)}.")
    if fill is not None and page is not None:
        filled = quotes.fill(page, fill.parent, found)
        with write_safely(fill) as file:
            file.write(filled.encode())


# --- what a run would cost --------------------------------------------------------------------------


LONG = 10_000_000_000  # parameters × steps of a training; a longer run says beforehand how long


def training_work(plan: Plan) -> int:
    return training_steps(plan) * parameters(plan)


def parameters(plan: Plan) -> int:
    """Of the model."""
    task = make_task(plan.task)
    return count(eqx.filter_eval_shape(qdt.make_model, task, plan.train, key=jax.random.key(0)))


def training_steps(plan: Plan) -> int:
    train, trajectories = plan.train, plan.dataset.trajectories
    learned = trajectories - int(train.held_out * trajectories)
    return train.epochs * (train.steps_per_epoch or learned // train.batch_size)


def measure_costs(plans: list[Plan]) -> estimate.Costs:
    """What `run` would do, and how long it would take here by short measurements."""
    plan, task = plans[-1], make_task(plans[-1].task)
    searches = [make_search(task, each.search) for each in plans]
    state = eqx.filter_eval_shape(searches[-1].init, jax.random.key(0))
    return estimate.Costs(
        [
            (each.iterations, each.steps_per_iteration, measure_steps_per_second(task, each))
            for each in searches
        ],
        policy=count(state.repertoire.policies) // plan.search.cells,
        stored=datasets.bytes_on_disk(task, plan.dataset),
        model=parameters(plan),
        training=training_steps(plan),
        seconds_per_step=measure_training_step(task, plan.train),
    )


def count(arrays: PyTree) -> int:
    return sum(x.size for x in jax.tree.leaves(arrays))


def measure_steps_per_second(task: envs.Task, search: me_ls.MapElites) -> float:
    """A few chunks of the engine, with as many episodes of a policy as the search plays."""
    episodes = search.episodes
    count = max(1, 2 * min(machine.chunk(), 1024) // episodes) * jax.device_count()
    keys = jax.random.split(jax.random.key(0), count)
    policies = machine.replicate(me_ls.random_policies(task, search.config.hidden, keys))
    starts = jax.random.split(keys[0], (count, episodes))
    play = partial(envs.rollout, task, policies, starts)
    return starts.size * task.length / estimate.second_time(play)


def measure_training_step(task: envs.Task, config: qdt.TrainConfig) -> float:
    """Seconds of a step of the optimiser, from one with a small batch."""
    micro_batch = machine.micro_batch(task.length)
    batch = min(config.batch_size, 4 * jax.device_count() * micro_batch)
    share = batch / config.batch_size
    sizes = task.descriptor_size, task.observation_size, task.action_size, task.descriptor_size

    def zeros(count: int) -> datasets.Trajectory:
        descriptor, *steps = (jnp.zeros((count, task.length, size)) for size in sizes)
        return datasets.Trajectory(descriptor[:, 0], *steps)

    further = round(share * config.beginnings)
    beginnings = zeros(further).beginning(config.beginning_steps) if further else None
    model = machine.replicate(qdt.make_model(task, config, key=jax.random.key(0)))
    moments = qdt.optimiser(config, 1).init(model)
    how = {"config": config, "total": 1, "micro_batch": micro_batch}
    arguments = model, moments, zeros(batch), jax.random.key(0), beginnings
    return estimate.second_time(partial(qdt.train_step, *arguments, **how)) / share


# --- the command line itself ------------------------------------------------------------------------


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
