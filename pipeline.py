"""The pipeline: presets, and what each command does to a run directory.

    RUN/search/                config, metrics, checkpoints, repertoire.qdt, maps
    RUN/dataset[-naive]/       shards and meta.json
    RUN/qdt[-naive|-PRUNE]/    config, metrics, checkpoints, model.qdt (the best epoch)
    RUN/evaluation/            one JSON file per experiment; `report.py` draws and tabulates

The stages themselves are in `me_ls.py`, `pgame_ls.py`, `dataset.py`, `qdt.py` and `evaluate.py`.
Reads in this order: presets, the plan, run directories, the stages, experiments, the whole.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import dataset as datasets
import evaluate
import me_ls
import pgame_ls
import plots
import training
import viewer
from dataset import DatasetConfig
from envs import BraxTask, Task, TaskConfig, UniTask, make_task, replicate, rollout
from me_ls import Repertoire, SearchConfig
from pgame_ls import PGAMEConfig
from qdt import QDT, QDTConfig, Trajectory, initial_state, train_step
from runs import (
    UserError,
    is_writer,
    load_tree,
    lock,
    make_config,
    open_stage,
    read_json,
    save_tree,
    time_text,
    write_json,
    write_safely,
)

# --- presets ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The configuration of every stage."""

    task: TaskConfig
    search: PGAMEConfig  # the fields of all algorithms; `search_config` takes one's own
    dataset: DatasetConfig
    train: QDTConfig
    preset: str = ""


def presets() -> dict[str, dict[str, Plan]]:
    """By preset and task; the first task of a preset is its own."""
    paper = Plan(TaskConfig(), PGAMEConfig(algo="me"), DatasetConfig(), QDTConfig())
    tiny = Plan(
        TaskConfig("point-omni", length=30, reach=1.5),
        replace(paper.search, steps=500_000, cells=64, batch=32, episodes=5, hidden=(32, 32)),
        DatasetConfig(trajectories=1024, zones=32),
        QDTConfig(layers=2, heads=2, width=32, batch_size=16, epochs=4),
    )
    small_qdt = QDTConfig(
        layers=2, heads=2, width=128, dropout=0.0, tokens="one", normalise=True, batch_size=8,
        micro_batch=4, optimiser="muon", learning_rate=1e-3, warmup_steps=100, decay=True, epochs=9,
        evaluate_every=3, held_out=0.02, disturbance=0.05,
    )  # fmt: skip
    halfcheetah = Plan(
        TaskConfig("halfcheetah-uni", length=100),
        replace(
            paper.search, steps=5_000_000, cells=128, batch=128, episodes=10, hidden=(64, 64),
            critic_hidden=(64, 64), td3_batch=64,
        ),
        DatasetConfig(trajectories=8192, typical=True, disturbance=0.05),
        small_qdt,
    )  # fmt: skip
    ant = replace(
        halfcheetah,
        task=TaskConfig("ant-omni", length=50, reach=2.0),
        search=replace(halfcheetah.search, steps=2_500_000, cells=64),
    )
    return {
        "tiny": {"point-omni": tiny},
        "laptop": {"halfcheetah-uni": halfcheetah, "ant-omni": ant},
        "paper": {
            "halfcheetah-uni": paper,
            "ant-omni": replace(paper, task=TaskConfig("ant-omni")),
        },
    }


STAGES = ("task", "search", "dataset", "train")


def preset_plan(preset: str, task: str) -> Plan:
    plans = presets()[preset]
    task = task or next(iter(plans))
    if task in plans:
        plan = plans[task]
    else:  # any other task with the sizes of the preset's own
        plan = next(iter(plans.values()))
        plan = replace(plan, task=TaskConfig(task, length=plan.task.length))
    return replace(plan, preset=str(preset))


def make_plan(preset: str, task: str, changes: list[str], stages: Sequence[str] = STAGES) -> Plan:
    """The preset's plan with `STAGE.FIELD=VALUE` changes."""
    plan = change_plan(preset_plan(preset, task), changes, stages)
    make_task(plan.task)
    return plan


def change_plan(plan: Plan, changes: list[str], stages: Sequence[str] = STAGES) -> Plan:
    """A change of another stage than those that the command makes would have no effect: refused."""
    for change in changes:
        name, _, value = change.partition("=")
        stage, _, option = name.partition(".")
        if stage not in stages or not option or not value:
            raise UserError(
                f"--set takes STAGE.FIELD=VALUE, here with {' or '.join(stages)} as the stage, "
                f"not {change!r}."
            )
        old = getattr(plan, stage)
        new = make_config(type(old), dataclasses.asdict(old) | {option: value})
        plan = replace(plan, **{stage: new})
    return plan


# --- run directories --------------------------------------------------------------------------------


class Lineage(NamedTuple):
    """A run that has begun: where it lies and how its search was configured."""

    directory: Path
    plan: Plan
    seed: int

    @property
    def task(self) -> Task:
        return make_task(self.plan.task)

    @property
    def algo(self) -> str:
        return self.plan.search.algo

    def repertoire(self) -> Repertoire:
        path = self.directory / "search" / "repertoire.qdt"
        if not path.exists():
            raise UserError(f"the search in {self.directory} is not finished; continue it first.")
        like = eqx.filter_eval_shape(lambda: _empty(self.task, self.plan.search))
        return replicate(load_tree(path, like)[0])


def _empty(task: Task, config: SearchConfig) -> Repertoire:
    return me_ls.empty_repertoire(task, config, jnp.zeros((config.cells, task.descriptor_size)))


def search_config(plan: Plan, algo: str) -> SearchConfig:
    """The fields that the algorithm reads."""
    kind = PGAMEConfig if algo.startswith("pgame") else SearchConfig
    fields = {f.name: getattr(plan.search, f.name) for f in dataclasses.fields(kind)}
    return make_config(kind, fields | {"algo": algo})


def open_run(directory: Path) -> Lineage:
    """Reads what `do_search` wrote; anything else is refused."""
    path = directory / "search" / "config.json"
    if not path.exists():
        raise UserError(f"{directory} is not a run directory: it has no search.")
    stored = read_json(path)
    try:
        config = stored["config"]
        preset, seed, algo = config["preset"], config["seed"], config["search"]["algo"]
        task = make_config(TaskConfig, config["task"])
        known = isinstance(seed, int) and 0 <= seed < 2**31
        known = known and preset in presets() and algo in me_ls.RULES
    except (KeyError, TypeError):
        known = False
    if not known:
        raise UserError(f"{path} is not the config of a search.")
    plan = replace(preset_plan(preset, task.task), task=task)
    make_task(task)
    search = dataclasses.asdict(plan.search) | config["search"]
    return Lineage(directory, replace(plan, search=make_config(PGAMEConfig, search)), seed)


def tell(text: str) -> None:
    if is_writer():
        print(text, flush=True)


# --- the stages -------------------------------------------------------------------------------------


def do_search(directory: Path, plan: Plan, algo: str, seed: int) -> Lineage:
    task, config = make_task(plan.task), search_config(plan, algo)
    about = {"preset": plan.preset, "task": plan.task, "search": config, "seed": seed}
    with lock(directory), open_stage(directory / "search", about) as stage:
        path = stage.directory / "repertoire.qdt"
        if path.exists():
            tell(f"{algo}: the search in {directory} is finished.")
        else:
            tell(
                f"{algo}: {config.budget(task):,} iterations of {config.batch} policies × "
                f"{config.episodes_played} episodes on {plan.task.task}."
            )
            if isinstance(config, PGAMEConfig):
                first, iterate = pgame_ls.first_state, pgame_ls.iterate
            else:
                first, iterate = me_ls.first_state, me_ls.iterate
            save_tree(path, me_ls.search(task, config, seed, stage, first, iterate))
    return open_run(directory)


def do_dataset(directory: Path, changes: list[str], naive: bool) -> datasets.Dataset:
    lineage = open_run(directory)
    config = change_plan(lineage.plan, changes, stages=["dataset"]).dataset
    # Naive: all policies play, and all that they play is stored.
    config = replace(config, naive=naive, typical=config.typical and not naive)
    about = {"task": lineage.plan.task, "dataset": config, "seed": lineage.seed}
    name = "dataset-naive" if naive else "dataset"
    with lock(directory), open_stage(directory / name, about) as stage:
        tell(f"dataset: {config.trajectories:,} trajectories of {lineage.task.length} steps.")
        return datasets.build(lineage.task, lineage.repertoire(), config, lineage.seed, stage)


def open_dataset(lineage: Lineage, naive: bool = False) -> datasets.Dataset:
    directory = lineage.directory / ("dataset-naive" if naive else "dataset")
    if not (directory / "meta.json").exists():
        raise UserError(f"{lineage.directory} has no {directory.name}; `qdt dataset` makes one.")
    data, task = datasets.open_dataset(directory), dataclasses.asdict(lineage.plan.task)
    made_for = data.meta.stage.get("task", task)  # unknown where it was imported
    if made_for != task:
        raise UserError(f"{directory} was made for another task: {made_for}, not {task}.")
    return data


def do_train(directory: Path, changes: list[str], naive: bool, prune: str) -> QDT:
    lineage = open_run(directory)
    config = change_plan(lineage.plan, changes, stages=["train"]).train
    data = open_dataset(lineage, naive)
    name = "-".join(["qdt", *(["naive"] if naive else []), *([prune] if prune else [])])
    about = {"train": config, "prune": prune, "seed": lineage.seed}
    with lock(directory), open_stage(directory / name, about) as stage:
        path = stage.directory / "model.qdt"
        if path.exists():
            tell(f"{name}: the training in {directory} is finished.")
            return load_model(lineage, name)
        view = datasets.prune(data, prune, seed=lineage.seed) if prune else None
        tell(f"{name}: {config.epochs} epochs, width {config.width}, {config.layers} layers.")
        model = training.train(lineage.task, config, data, view, lineage.seed, stage)
        save_tree(path, model)
    return model


def load_model(lineage: Lineage, name: str = "qdt") -> QDT:
    """The best epoch of a training."""
    directory = lineage.directory / name
    path = directory / "model.qdt"
    if not path.exists():
        raise UserError(f"{lineage.directory} has no trained {name}; `qdt train` makes one.")
    config = trained_config(lineage, name)
    like = eqx.filter_eval_shape(training.make_model, lineage.task, config, key=jax.random.key(0))
    return replicate(load_tree(path, like)[0])


def trained_config(lineage: Lineage, name: str = "qdt") -> QDTConfig:
    path = lineage.directory / name / "config.json"
    try:
        return make_config(QDTConfig, read_json(path)["config"]["train"])
    except (KeyError, TypeError):
        raise UserError(f"{path} is not the config of a training.") from None


def models(lineage: Lineage) -> dict[str, QDT]:
    """Every QDT that was trained in a run: `qdt`, and those of the ablations."""
    found = sorted(path.parent.name for path in lineage.directory.glob("qdt*/model.qdt"))
    return {name: load_model(lineage, name) for name in found}


# --- looking at a run -------------------------------------------------------------------------------


def do_show(directory: Path) -> None:
    """Prints what is there and draws the maps of the repertoire."""
    lineage = open_run(directory)
    task, repertoire = lineage.task, lineage.repertoire()
    metrics = {n: float(x) for n, x in me_ls.repertoire_metrics(task, repertoire).items()}
    config = lineage.plan.search
    print(f"{directory}: {config.algo} on {lineage.plan.task.task}, seed {lineage.seed}")
    print(f"  episodes of {task.length} steps, {config.episodes_played} per policy")
    print(f"  {int(repertoire.occupied.sum())} of {config.cells} cells are occupied")
    for name, value in metrics.items():
        if name != "mean_spread" or config.episodes_played > 1:
            print(f"  {name} {value:.4g}")
    for name in ("dataset", "dataset-naive"):
        if (directory / name / "meta.json").exists():
            data = open_dataset(lineage, naive=name.endswith("naive"))
            print(f"  {name}: {len(data):,} trajectories of {len(set(data.policy))} policies")
    for name, model in models(lineage).items():
        size = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        print(f"  {name}: {size:,} parameters")
    if task.descriptor_size == 2:
        for name in ("fitness", "spread"):
            if name == "spread" and config.episodes_played == 1:
                continue
            values = np.where(repertoire.occupied, getattr(repertoire, name), np.nan)
            figure = plots.cell_maps(
                {config.algo: (repertoire.centroids, values)},
                task.low,
                task.high,
                plots.axis_names(lineage.plan.task.task),
                name,
                lighter_is="high" if name == "fitness" else "low",
            )
            path = directory / "search" / f"{name}.png"
            plots.save(figure, path)
            print(f"  {path}")


def show_dataset(directory: Path, naive: bool) -> None:
    """Prints and draws where the trajectories of a dataset ended."""
    lineage = open_run(directory)
    data = open_dataset(lineage, naive)
    counts, _ = datasets.density(data)
    zones = len(data.meta.selection.centroids)
    print(
        f"{len(data):,} trajectories of {len(set(data.policy))} policies; {data.diverged} diverged "
        f"and were left out; {len(set(data.zone))} of {zones} zones have a policy."
    )
    if lineage.task.descriptor_size == 2:
        names = plots.axis_names(lineage.plan.task.task)
        title = "naive" if naive else "all"
        figure = plots.density_map({title: counts}, lineage.task.low, lineage.task.high, names)
        path = data.directory / "density.png"
        plots.save(figure, path)
        print(path)


# --- experiments ------------------------------------------------------------------------------------

CALIBRATION_SEED = 0xCA1  # apart from the episodes on which the calibration is judged
EVALUATION_SEED = 0xE7A1  # apart from everything that a search, a dataset or a training draws


def do_evaluate(experiment: str, directory: Path) -> dict[str, Any]:
    """Runs an experiment and writes RUN/evaluation/EXPERIMENT.json."""
    lineage = open_run(directory)
    path = result_path(directory, experiment)
    experiments = {
        "accuracy": evaluate_accuracy,
        "reproducibility": evaluate_reproducibility,
        "reassess": evaluate_reassessment,
        "generalize": evaluate_generalization,
        "calibrate": evaluate_calibration,
    }
    key = jax.random.fold_in(jax.random.key(lineage.seed), EVALUATION_SEED)
    result = experiments[experiment](lineage, key)
    write_json(path, result)
    for line in summary(experiment, result):
        tell(f"{lineage.algo}, {line}")
    return result


def result_path(directory: Path, experiment: str) -> Path:
    return directory / "evaluation" / f"{experiment}.json"


def is_evaluated(directory: Path, experiment: str) -> bool:
    """Whether the result is there and newer than the repertoire and every QDT of the run."""
    path = result_path(directory, experiment)
    inputs = [directory / "search" / "repertoire.qdt", *directory.glob("qdt*/model.qdt")]
    return path.exists() and path.stat().st_mtime > max(p.stat().st_mtime for p in inputs)


def goals_of(lineage: Lineage) -> jax.Array:
    return evaluate.goals(lineage.task, lineage.task.zones)


def averages(measured: evaluate.Accuracy) -> dict[str, Any]:
    """An accuracy with its means over the goals; of the fitness, the maximum, as in figure 13."""
    return measured._asdict() | {
        "mean_distance": float(jnp.nanmean(measured.distance)),
        "mean_spread": float(jnp.nanmean(measured.spread)),
        "max_fitness": float(jnp.nanmax(measured.fitness)),
    }


def evaluate_accuracy(lineage: Lineage, key: jax.Array) -> dict[str, Any]:
    """The repertoire's nearest policies, and every QDT of the run, on goals that cover the space."""
    task, goals, repertoire = lineage.task, goals_of(lineage), lineage.repertoire()
    keys = episode_keys(goals, key)
    result = {"repertoire": evaluate.accuracy_of_repertoire(task, repertoire, goals, keys)}
    for name, model in models(lineage).items():
        result[name] = evaluate.measure(goals, training.play(task, model, goals, keys))
    return {name: averages(measured) for name, measured in result.items()}


def episode_keys(goals: jax.Array, key: jax.Array) -> jax.Array:
    """The same starts for everything that is compared on the goals of a run."""
    return jax.random.split(key, (len(goals), evaluate.EPISODES))


def evaluate_reassessment(lineage: Lineage, key: jax.Array) -> dict[str, Any]:
    repertoire = lineage.repertoire()
    again = evaluate.reassess(lineage.task, repertoire, key=key)
    return {
        "centroids": repertoire.centroids,
        "fitness": jnp.where(repertoire.occupied, repertoire.fitness, jnp.nan),  # as found
        "before": again.before,
        "after": again.after,
        "spread": again.spread,
        "reachable": evaluate.reachable(goals_of(lineage), again.descriptor),
    }


def evaluate_reproducibility(lineage: Lineage, key: jax.Array) -> dict[str, Any]:
    played = evaluate.reproducibility(lineage.task, lineage.repertoire(), key=key)
    return played._asdict()


def evaluate_calibration(lineage: Lineage, key: jax.Array) -> dict[str, Any]:
    task, model, goals = lineage.task, load_model(lineage), goals_of(lineage)
    found = evaluate.calibrate(
        task,
        lambda targets, keys: training.play(task, model, targets, keys),
        goals,
        test=episode_keys(goals, key),
        key=jax.random.fold_in(key, CALIBRATION_SEED),
    )
    return {
        "targets": found.targets,
        "before": averages(found.before),
        "after": averages(found.after),
        "episodes": found.episodes,
    }


def evaluate_generalization(lineage: Lineage, key: jax.Array) -> dict[str, Any]:
    """QDTs on pruned datasets, trained here where they are missing, as the run's own QDT was."""
    task, goals, data = lineage.task, goals_of(lineage), open_dataset(lineage)
    trained = (lineage.directory / "qdt" / "config.json").exists()
    config = trained_config(lineage) if trained else lineage.plan.train
    changes = [f"train.{n}={v}" for n, v in _changes(config)]
    keys = episode_keys(goals, key)
    result = {}
    for how in ("", *datasets.PRUNINGS):
        model = do_train(lineage.directory, changes, naive=False, prune=how)
        view = datasets.prune(data, how, seed=lineage.seed) if how else None
        counts, _ = datasets.density(data, view=view)
        measured = evaluate.measure(goals, training.play(task, model, goals, keys))
        result[how or "all"] = {"density": counts} | averages(measured)
    return result


def summary(experiment: str, result: dict[str, Any]) -> list[str]:
    """One line for each number that an experiment is about."""
    if experiment in ("accuracy", "generalize"):
        return [
            f"{name}: distance {r['mean_distance']:.4g}, spread {r['mean_spread']:.4g}"
            + (f", {int(r['diverged'])} episodes diverged" if r["diverged"] else "")
            for name, r in result.items()
        ]
    if experiment == "reassess":
        before, after = result["before"], result["after"]
        names = ("coverage", "max_fitness", "qd_score")
        return [f"{n}: {before[n]:.4g}, re-evaluated {after[n]:.4g}" for n in names] + [
            f"spread, re-evaluated: {result['spread']:.4g}"
        ]
    if experiment == "calibrate":
        before, after = result["before"]["mean_distance"], result["after"]["mean_distance"]
        cost = result["episodes"]
        return [f"distance {before:.4g}, calibrated {after:.4g}, found in {cost:,} episodes"]
    return [f"spread of three policies: {', '.join(f'{float(s):.4g}' for s in result['spread'])}"]


# --- behaviour on demand ----------------------------------------------------------------------------


def parse_target(text: str, task: Task) -> jax.Array:
    try:
        target = [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"a target is numbers such as 0.4 0.7, not {text!r}.") from None
    if len(target) != task.descriptor_size:
        raise UserError(
            f"a target of this task has {task.descriptor_size} numbers, not {len(target)}."
        )
    for number, low, high in zip(target, task.low, task.high, strict=True):
        if not low <= number <= high:
            raise UserError(
                f"{number:g} lies outside the space, which goes from {low:g} to {high:g}."
            )
    return jnp.array(target)


def do_act(directory: Path, text: str, episodes: int, seed: int, page: Path | None) -> None:
    """Plays a few episodes towards a target and prints what was reached."""
    lineage = open_run(directory)
    task, model = lineage.task, load_model(lineage)
    target = parse_target(text, task)
    if episodes < 1:
        raise UserError(f"at least one episode has to be played, not {episodes}.")
    keys = jax.random.split(jax.random.key(seed), episodes)
    policy = training.Conditioned(model, target)
    film = evaluate.film(task, policy, keys, model.config.disturbance)
    reached, fitness = film.path[:, -1], film.reward.sum(axis=1)
    far = jnp.linalg.norm(reached - target, axis=1)
    for i in range(episodes):
        place = " ".join(f"{x:.3f}" for x in reached[i])
        print(f"start {i + 1}: reached {place}, distance {far[i]:.3f}, fitness {fitness[i]:.1f}")
    print(f"mean distance {far.mean():.3f}, spread {me_ls.spread(reached):.3f}")
    if page is not None:
        write_page(page, lineage, film, target)
        print(f"{page} plays the episodes.")


def write_page(path: Path, lineage: Lineage, film: evaluate.Film, target: jax.Array) -> None:
    task: Any = lineage.task
    name = lineage.plan.task.task
    frames = jax.tree.map(np.asarray, film[:4])
    playbacks = [
        viewer.Playback(position, rotation, path, contact if contact.shape[1] else None)
        for position, rotation, path, contact in zip(*frames, strict=True)
    ]
    if isinstance(task, UniTask):
        scene = viewer.scene_from_brax(task.env.sys, task.feet)
    elif isinstance(task, BraxTask):
        scene = viewer.scene_from_brax(task.env.sys)
    else:
        scene = viewer.point_scene(0.02 * (task.high[0] - task.low[0]))
    kind = "uni" if isinstance(task, UniTask) else "omni"
    title, bounds = f"{name}: behaviour on demand", (task.low, task.high)
    try:
        text = viewer.page(title, scene, playbacks, np.asarray(target), bounds, kind, task.dt)
    except ValueError as error:  # an episode that diverged
        raise UserError(f"{path} is not written. {error}") from None
    with write_safely(path) as file:
        file.write(text.encode())


# --- the whole --------------------------------------------------------------------------------------


def run_all(plan: Plan, seed: int, out: Path) -> None:
    """Search with ME and ME-LS, dataset, QDT, experiments, report; continues where it was."""
    from report import accuracies, gather, reachable_goals, write_report

    began = time.monotonic()
    times: list[tuple[str, float]] = []

    def stage(number: int, name: str, why: str) -> None:
        now = time.monotonic()
        if times:
            times[-1] = (times[-1][0], now - times[-1][1])
        times.append((name, now))
        tell(f"\n[{number}/6] {name}: {why}")

    baseline, ours = out / "me", out / "me-ls"
    stage(1, "MAP-Elites", "the baseline; it keeps whatever was lucky in its only episode.")
    do_search(baseline, plan, "me", seed)
    stage(2, "MAP-Elites Low-Spread", "keeps a policy only if it is fitter and steadier.")
    do_search(ours, plan, "me-ls", seed)
    stage(3, "Dataset", "the steadiest policy of each zone shows its behaviour many times.")
    do_dataset(ours, [f"dataset.{n}={v}" for n, v in _changes(plan.dataset)], naive=False)
    stage(4, "Quality-Diversity Transformer", "one policy learns to reach any of them on demand.")
    do_train(ours, [f"train.{n}={v}" for n, v in _changes(plan.train)], naive=False, prune="")
    stage(
        5, "Experiments", "every goal is asked for, ten episodes each; policies are played again."
    )
    experiments = ("reassess", "accuracy", "reproducibility")
    todo = [(name, run) for run in (baseline, ours) for name in experiments]
    for experiment, directory in [*todo, ("calibrate", ours)]:
        if not is_evaluated(directory, experiment):
            do_evaluate(experiment, directory)
    stage(6, "Report", "tables and figures beside the paper's.")
    page = write_report([baseline, ours], out / "report")
    times[-1] = (times[-1][0], time.monotonic() - times[-1][1])

    (runs,) = gather([baseline, ours]).values()
    mask = reachable_goals(runs)
    tell(f"\n{'method':<24}{'distance':>10}{'reachable goals':>18}{'spread':>10}")
    for method, (result, *_) in accuracies(runs).items():
        inside = np.nanmean(np.array(result["distance"])[mask])
        distance, spread = result["mean_distance"], result["mean_spread"]
        tell(f"{method:<24}{distance:>10.4f}{inside:>18.4f}{spread:>10.4f}")
    spent = ", ".join(f"{name} {time_text(seconds)}" for name, seconds in times)
    middle = " ".join(f"{(a + b) / 2:g}" for a, b in zip(*bounds_of(plan), strict=True))
    tell(f"\n{time_text(time.monotonic() - began)} in all: {spent}.")
    tell(f"The report is {page}. Next, ask for a behaviour and look at it:")
    tell(f"  qdt act {ours} --target {middle} --html behaviour.html")


def bounds_of(plan: Plan) -> tuple[tuple[float, ...], tuple[float, ...]]:
    task = make_task(plan.task)
    return task.low, task.high


def _changes(config: Any) -> list[tuple[str, str]]:
    """A config as the values that `--set` takes."""
    values = dataclasses.asdict(config)
    return [
        (n, ",".join(map(str, v)) if isinstance(v, tuple) else str(v)) for n, v in values.items()
    ]


# --- the plan ---------------------------------------------------------------------------------------


def print_plan(plan: Plan) -> None:
    """What `run` would do, and how long it would take here by a short measurement."""
    task, config = make_task(plan.task), plan.search
    print(f"{plan.preset} on {plan.task.task}")
    for name in ("task", "search", "dataset", "train"):
        print(f"\n{name}")
        for field, value in _changes(getattr(plan, name)):
            print(f"  {field:<24}{value}")
    speed = measure_steps_per_second(plan)
    print(f"\nThis machine: {speed:,.0f} environment steps per second.\n")
    total = 0.0
    for algo in ("me", "me-ls"):
        chosen = search_config(plan, algo)
        iterations = chosen.budget(task)
        episodes = iterations * chosen.batch * chosen.episodes_played
        seconds = episodes * task.length / speed
        total += seconds
        print(
            f"{algo:<8}{iterations:>12,} iterations {episodes:>14,} episodes "
            f"{episodes * task.length:>18,} steps {time_text(seconds):>12}"
        )
    policy = eqx.filter_eval_shape(lambda: _empty(task, config)).policies
    size = sum(x.size for x in jax.tree.leaves(policy)) // config.cells
    print(
        f"        a policy has {size:,} weights; the repertoire takes "
        f"{_size_text(4 * size * config.cells)}, a batch {_size_text(4 * size * config.batch)}"
    )
    steps = plan.dataset.trajectories * task.length
    total += steps / speed
    least = "at least " if plan.dataset.typical else ""  # the others are played and left out
    print(
        f"dataset {plan.dataset.trajectories:>12,} trajectories {least}{steps:>12,} steps, "
        f"{_size_text(datasets.bytes_on_disk(task, plan.dataset))} on disk "
        f"{time_text(steps / speed):>12}"
    )
    model = eqx.filter_eval_shape(training.make_model, task, plan.train, key=jax.random.key(0))
    parameters = sum(x.size for x in jax.tree.leaves(model))
    rate = measure_trajectories_per_second(plan)
    seen = plan.train.epochs * plan.dataset.trajectories
    total += seen / rate
    print(
        f"qdt     {parameters:>12,} parameters {plan.train.epochs} epochs, {seen:,} trajectories at "
        f"{rate:,.1f} per second {time_text(seen / rate):>12}"
    )
    print(f"\nAbout {time_text(total)} in all, without experiments and compilation.")


def _size_text(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError


def measure_steps_per_second(plan: Plan) -> float:
    """One row of the engine with short episodes, twice; the second time counts."""
    task = make_task(replace(plan.task, length=min(plan.task.length, 25)))
    episodes = plan.search.episodes
    count = max(1, 64 // episodes) * jax.device_count()
    keys = jax.random.split(jax.random.key(0), count)
    policies = replicate(me_ls.random_policies(task, plan.search.hidden, keys))
    starts = jax.random.split(keys[0], (count, episodes))
    return starts.size * task.length / _second_time(lambda: rollout(task, policies, starts))


def measure_trajectories_per_second(plan: Plan) -> float:
    """One small step of training, twice; the second time counts."""
    task, config = make_task(plan.task), plan.train
    batch = jax.device_count() * config.micro_batch
    zeros = Trajectory(
        jnp.zeros((batch, task.descriptor_size)),
        jnp.zeros((batch, task.length, task.observation_size)),
        jnp.zeros((batch, task.length, task.action_size)),
        jnp.zeros((batch, task.length, task.descriptor_size)),
    )
    state = replicate(initial_state(training.make_model(task, config, key=jax.random.key(0))))
    return batch / _second_time(lambda: train_step(state, zeros, jax.random.key(0), 0.0))


def _second_time(work: Callable[[], Any]) -> float:
    jax.block_until_ready(work())
    began = time.monotonic()
    jax.block_until_ready(work())
    return time.monotonic() - began
