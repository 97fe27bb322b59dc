"""The reproduction: what has to be made for all tables and figures, in which order, and what is left of it.

`reproduction.toml` says what there is: searches, variants of datasets and models, experiments, and which of
them each table or figure needs. From it and from seeds `plan_jobs` makes a list of jobs, as data. A `Maker`
does them by the stages that it is handed, and knows which are done.
Reads in this order: the file, jobs, doing them, each of them.
"""

import functools
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from machinery.driver import tell, time_text
from machinery.files import InUse, UserError, lock, read_json, write_json
from machinery.plans import Asked, Plan, Planner, plain
from machinery.runs import PLAN, Run, read_stage_config, variant

OWN = "own"  # a run's own model, whatever its kind


# --- what there is ------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """How a model beside a run's own is made: the fields in which its training differs."""

    searches: tuple[str, ...]
    dataset: str | None
    train: dict[str, Any]


class Row(NamedTuple):
    """Of a table of variants: a model, what was changed, and what it is compared with."""

    model: str
    about: str
    against: str | None = None


class Variants(NamedTuple):
    title: str
    rows: tuple[Row, ...]


class Part(NamedTuple):
    """What a table or a figure needs, beside the searches."""

    experiments: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    searches: tuple[str, ...] | None = None  # None: all of the paper's


@functools.cache
def content() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("reproduction.toml").read_text())


def datasets() -> dict[str, dict[str, Any]]:
    """By name: the fields in which a dataset beside a run's own differs."""
    return content()["datasets"]


@functools.cache
def recipes() -> dict[str, Recipe]:
    """By directory. A recipe that is `like` another one begins with all that the other says."""
    found: dict[str, Recipe] = {}
    for name, fields in content()["models"].items():
        base = found[fields["like"]] if "like" in fields else Recipe((), None, {})
        found[name] = Recipe(
            tuple(fields.get("searches", base.searches)),
            fields.get("dataset", base.dataset),
            base.train | fields.get("train", {}),
        )
    return found


def tables() -> dict[str, Variants]:
    """Of variants, each compared with what it differs from in one thing."""
    return {
        name: Variants(table["title"], tuple(Row(**row) for row in table["rows"]))
        for name, table in content()["tables"].items()
    }


def parts() -> dict[str, Part]:
    """By the name that `--only` takes."""
    named = {
        name: Part(**{field: tuple(names) for field, names in part.items()})
        for name, part in (content()["parts"] | content()["beside"]).items()
    }
    ours = {}
    for name, table in tables().items():
        models = tuple(row.model for row in table.rows)
        searches = [algo for model in models if model != OWN for algo in recipes()[model].searches]
        ours[name] = Part(("accuracy",), models, tuple(dict.fromkeys(searches)))
    return named | ours


def dataset_like(name: str | None, plan: Mapping[str, Any]) -> str | None:
    """The first dataset with the settings of this one, beginning with the run's own (None).

    What differs with one plan is the same with another, which may not filter or add noise anyway.
    """

    def settings(name: str | None) -> dict[str, Any]:
        fields = datasets()[name] if name else {}
        return plan["dataset"] | {n: None if x == "none" else x for n, x in fields.items()}

    return next(other for other in (None, *datasets()) if settings(other) == settings(name))


def model_like(name: str, plan: Mapping[str, Any]) -> str:
    """The first model with the settings of this one, beginning with the run's own."""

    def settings(name: str) -> tuple[str | None, dict[str, Any]]:
        if name == OWN:
            return None, plan["train"]
        recipe = recipes()[name]
        return dataset_like(recipe.dataset, plan), plan["train"] | training_changes(recipe, plan)

    return next(other for other in (OWN, *recipes()) if settings(other) == settings(name))


def training_changes(recipe: Recipe, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which a training differs from the run's own."""
    fields = {"model": "qdt"} | recipe.train
    if fields.get("beginnings") == 0:
        fields["batch_size"] = whole_trajectories(plan)
    return fields


def whole_trajectories(plan: Mapping[str, Any]) -> int:
    """How many make up a batch that shows as many steps as the plan's with its beginnings."""
    train = plan["train"]
    length = plan["task"]["length"]
    return (
        train["batch_size"] + train["beginnings"] * min(train["beginning_steps"], length) // length
    )


def all_searches() -> list[str]:
    """The paper's, and those that are only made if their part is asked for."""
    beside = [algo for part in content()["beside"].values() for algo in part["searches"]]
    return list(dict.fromkeys([*content()["searches"], *beside]))


def own_seeds(preset: str, task: str) -> list[int]:
    """Those that are made if none are named."""
    of_preset = content()["seeds"].get(preset, {"all": "0"})
    return parse_seeds(of_preset.get(task, of_preset["all"]))


def parse_seeds(text: str) -> list[int]:
    """`0-4`, `3` or `0,2,5-7`."""
    seeds: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"seeds are numbers such as 0-4 or 0,2,5, not {text!r}.")
        if int(match[2] or match[1]) - int(match[1]) >= 1000:
            raise UserError(f"{piece.strip()} are more seeds than anybody has time for.")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return list(dict.fromkeys(seeds))


# --- jobs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One stage of one run, as data. `what` is a dataset's name, a model's directory or an experiment."""

    stage: str  # search, dataset, train, evaluate or report
    algo: str = ""
    seed: int = 0
    what: str = ""

    @property
    def title(self) -> str:
        if self.stage == "report":
            return "report"
        return f"seed {self.seed}, {self.kind}"

    @property
    def kind(self) -> str:
        """Jobs of one kind differ in their seed, and take about equally long."""
        return " ".join(part for part in (self.algo, self.stage, self.what) if part)


def plan_jobs(
    seeds: Sequence[int], only: Iterable[str] = (), searches: Iterable[str] = ()
) -> list[Job]:
    """All that the parts need, seed by seed, everything after what it needs; the report comes last.

    If no part is named, the first seeds get all of them, and those after them what the claims rest on.
    `searches`: these alone, where not all of them are wanted.
    """
    for names, known in ((only, parts()), (searches, all_searches())):
        if unknown := [name for name in names if name not in known]:
            raise UserError(f"there is no {unknown[0]!r}; there are {', '.join(known)}.")
    everything = [name for name in parts() if name not in content()["beside"]]
    algos = [algo for algo in all_searches() if algo in (list(searches) or [algo])]
    jobs = []
    for i, seed in enumerate(seeds):
        names = list(only) or (everything if i < content()["whole"] else content()["further"])
        jobs += _jobs_of_seed(seed, [parts()[name] for name in names], algos)
    if not jobs:
        raise UserError(f"what is to be made needs no {' or '.join(searches)}: see --only.")
    return [*jobs, Job("report")]


def _jobs_of_seed(seed: int, chosen: Sequence[Part], algos: Sequence[str]) -> list[Job]:
    """First all searches, then all datasets, all models, all experiments."""
    stages: dict[str, list[Job]] = {"search": [], "dataset": [], "train": [], "evaluate": []}
    for algo in algos:
        wanted = [part for part in chosen if algo in (part.searches or content()["searches"])]
        if not wanted:
            continue
        stages["search"].append(Job("search", algo, seed))
        models = {model for part in wanted for model in part.models}
        if models and algo in content()["taught"]:
            made = {n: r for n, r in recipes().items() if n in models and algo in r.searches}
            data = dict.fromkeys(["", *(recipe.dataset or "" for recipe in made.values())])
            stages["dataset"] += [Job("dataset", algo, seed, name) for name in data]
            # A run's own model comes first: it settles what the run's plan says about models.
            stages["train"] += [Job("train", algo, seed, name) for name in (OWN, *made)]
        experiments = {experiment for part in wanted for experiment in part.experiments}
        stages["evaluate"] += [
            Job("evaluate", algo, seed, experiment)
            for experiment, whose in content()["experiments"].items()
            if experiment in experiments and algo in whose
        ]
    return [job for of_stage in stages.values() for job in of_stage]


# --- doing them ---------------------------------------------------------------------------------------

STAGES = ("search", "dataset", "train", "evaluate", "report")
PATIENCE = 1.0  # seconds until somebody who waits for other processes looks again


def comes_after(job: Job, other: Job) -> bool:
    """Whether a job needs what the other makes: the earlier stages of its run; the report, everything."""
    if job.stage == "report":
        return other.stage != "report"
    own_first = job.stage == other.stage == "train" and job.what != OWN == other.what
    is_earlier = STAGES.index(other.stage) < STAGES.index(job.stage)
    return (job.algo, job.seed) == (other.algo, other.seed) and (is_earlier or own_first)


def do_jobs(
    jobs: Sequence[Job],
    is_done: Callable[[Job], bool],
    do: Callable[[Job], None],
    claim: Callable[[Job], AbstractContextManager[bool]],
    times: Path,
) -> None:
    """Does what is not done, in order, and says what is done, what is running, what is left and how long.

    Several processes may do so at once: `claim` holds a job if nobody else does. Who finds nothing to do
    waits for what others make, and leaves once only the report comes after it. Whether a job is done is
    asked when what it needs is done: a new model makes experiments stale. `times` keeps how long each kind
    of job took.
    """
    needs = {job: {other for other in jobs if comes_after(job, other)} for job in jobs}
    done: set[Job] = set()

    def look_again() -> list[Job]:
        for job in jobs:
            if job not in done and needs[job] <= done and is_done(job):
                done.add(job)
        return [job for job in jobs if job not in done]

    left = look_again()
    tell(f"{len(done)} of {len(jobs)} jobs are done.")
    while left:
        for job in left:
            if not needs[job] <= done:
                continue
            with claim(job) as is_mine:
                if not is_mine:
                    continue
                if not is_done(job):  # somebody may just have done it
                    expected = time_left(left, read_times(times))
                    tell(f"\n[{len(done) + 1}/{len(jobs)}] {job.title}; {expected} left")
                    began = time.monotonic()
                    do(job)
                    note_time(times, job, time.monotonic() - began)
            done.add(job)
            break
        else:
            if all(needs[job] <= done or job.stage == "report" for job in left):
                tell("Other processes are making what is left.")
                return
            time.sleep(PATIENCE)
        left = look_again()


def note_time(path: Path, job: Job, seconds: float) -> None:
    """Unless another process notes one just now: it only helps to tell the time left."""
    with suppress(InUse), lock(path.parent):
        write_json(path, read_times(path) | {job.kind: round(seconds, 1)})


def read_times(path: Path) -> dict[str, float]:
    """In seconds, by kind of job. Nothing of somebody else's file: times are measured again."""
    noted = read_json(path) if path.exists() else {}
    is_sound = isinstance(noted, dict) and all(isinstance(x, float | int) for x in noted.values())
    return noted if is_sound else {}


def time_left(jobs: Sequence[Job], known: Mapping[str, float]) -> str:
    """By what jobs of the same kind took; those of a kind that was never timed are counted."""
    seconds = sum(known.get(job.kind, 0.0) for job in jobs)
    untimed = sum(job.kind not in known for job in jobs)
    counted = f"{untimed} job{'s' * (untimed > 1)}"
    if untimed == len(jobs):
        return counted
    return f"about {time_text(seconds)}" + (f" and {counted} not timed yet" if untimed else "")


# --- each of them -----------------------------------------------------------------------------------


class Stages(NamedTuple):
    """The stages as the command line does them; each continues where it was."""

    open_run: Callable[[Path], Run]
    search: Callable[[Path, Plan], Any]
    dataset: Callable[..., Any]  # of a run, changes, and the name of a variant
    train: Callable[..., Any]  # likewise, and the name of the dataset
    evaluate: Callable[..., Any]  # of a run and an experiment
    report: Callable[[Path], Any]  # on all runs in a directory


@dataclass(frozen=True)
class Maker:
    """Does the jobs of a reproduction: OUT/seed-SEED/ALGO is a run."""

    out: Path
    asked: Asked
    plans: Planner
    stages: Stages

    def directory(self, job: Job) -> Path:
        return self.out / f"seed-{job.seed}" / job.algo

    def plan(self, job: Job) -> Plan:
        return self.plans.asked(replace(self.asked, algo=job.algo, seed=job.seed))

    def is_needed(self, job: Job) -> bool:
        """Whether it makes something that no other job makes."""
        if job.stage == "dataset" and job.what:
            return dataset_like(job.what, plain(self.plan(job))) == job.what
        if job.stage == "train":
            return model_like(job.what, plain(self.plan(job))) == job.what
        return True

    def is_done(self, job: Job) -> bool:
        """Whether its result is there. A run that was made with another plan is refused."""
        directory = self.directory(job)
        if job.stage == "report" or not (directory / PLAN).exists():
            return False
        if job.stage == "search":
            plan = self.plans.stored_alike(directory, self.plan(job))
            return Run(directory, plan).repertoire_path.exists()
        run = Run(directory, self.plans.stored(directory))
        if job.stage == "dataset":
            made = directory / variant("dataset", job.what)
            is_made = (made / "meta.json").exists() and self.is_as_planned(run, job, made)
            return is_made and not run.is_outdated(made.name)
        if job.stage == "train":
            name = run.plan.train.model if job.what == OWN else job.what
            made = directory / name
            if name not in run.model_paths() or not self.is_as_planned(run, job, made):
                return False
            return read_stage_config(made).get("dataset") == self.shown(run, job) and (
                not run.is_outdated(name)
            )
        return run.repertoire_path.exists() and run.is_evaluated(job.what)

    def is_as_planned(self, run: Run, job: Job, made: Path) -> bool:
        """Whether what is there was made by today's recipe; if not, its stage says what differs."""
        section = job.stage
        planned = self.plans.make(plain(run.plan), {section: self.fields(run, job)})
        return read_stage_config(made).get(section) == plain(planned)[section]

    def fields(self, run: Run, job: Job) -> dict[str, str]:
        """In which a variant's dataset or training differs from the run's own."""
        if job.stage == "dataset":
            return as_text(datasets().get(job.what, {}))
        return (
            {}
            if job.what == OWN
            else as_text(training_changes(recipes()[job.what], plain(run.plan)))
        )

    def shown(self, run: Run, job: Job) -> str | None:
        """The dataset that a model learns from."""
        if job.what == OWN:
            return None
        return dataset_like(recipes()[job.what].dataset, plain(run.plan))

    @contextmanager
    def claim(self, job: Job) -> Iterator[bool]:
        """Whether no other process is at it; until the end of this, none will be."""
        name = "-".join(["job", str(job.seed), *job.kind.split()])
        with ExitStack() as held:
            try:
                held.enter_context(lock(self.out / ".claims" / name))
            except InUse:
                yield False
                return
            yield True

    def do(self, job: Job) -> None:
        if job.stage == "search":
            self.stages.search(self.directory(job), self.plan(job))
        elif job.stage == "report":
            self.stages.report(self.out)
        else:
            self.do_in_run(self.stages.open_run(self.directory(job)), job)

    def do_in_run(self, run: Run, job: Job) -> None:
        if job.stage == "evaluate":
            self.stages.evaluate(run, job.what)
        elif job.stage == "dataset":
            self.stages.dataset(run, {"dataset": self.fields(run, job)}, job.what or None)
        elif job.what == OWN:
            self.stages.train(run, {})
        else:
            fields = self.fields(run, job)
            name = job.what.removeprefix(fields["model"]).removeprefix("-")
            self.stages.train(run, {"train": fields}, name or None, self.shown(run, job))


def as_text(fields: dict[str, Any]) -> dict[str, str]:
    """Fields of a file as the command line would give them."""
    return {name: str(value) for name, value in fields.items()}
