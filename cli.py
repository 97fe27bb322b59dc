"""The command line: one command per stage, and `run` for the whole pipeline.

A run directory holds one lineage: a search, the dataset of its repertoire, the QDT trained on it, and
their evaluations. Given a run directory, a command continues it; the same command again resumes.

JAX and the stages are imported inside the functions, so that `qdt --help` answers at once.
What the commands do to a run directory is in `pipeline.py`.
"""

import os
import sys
import time
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="The Quality-Diversity Transformer: search, dataset, training, experiments.",
)


class PresetName(StrEnum):
    tiny = "tiny"
    laptop = "laptop"
    paper = "paper"


class Algo(StrEnum):
    me = "me"
    me_sampling = "me-sampling"
    me_ls = "me-ls"
    pgame = "pgame"
    pgame_ls = "pgame-ls"


class Prune(StrEnum):
    nothing = "nothing"
    density_50 = "density-50"
    density_30 = "density-30"
    density_10 = "density-10"
    tiles = "tiles"
    upper_part = "upper"


class Experiment(StrEnum):
    accuracy = "accuracy"
    reproducibility = "reproducibility"
    reassess = "reassess"
    generalize = "generalize"
    calibrate = "calibrate"


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
RunsArgument = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")]
PresetOption = Annotated[
    PresetName,
    typer.Option(
        help="The sizes of everything. tiny: point-omni, a minute; laptop: Halfcheetah or Ant, "
        "shortened for two cores; paper: the paper's, for an accelerator."
    ),
]
TaskOption = Annotated[
    str,
    typer.Option(
        help="ant-omni, halfcheetah-uni, point-omni or any other in `envs.py`.",
        show_default="the preset's own",
    ),
]
SeedOption = Annotated[
    int, typer.Option(help="All randomness comes from it.", min=0, max=2**31 - 1)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="STAGE.FIELD=VALUE",
        help="Any field of the stage that the command makes, such as search.cells=256 or "
        "task.length=100. Can be repeated; `qdt run --dry-run` shows all fields.",
        show_default="as in the preset",
    ),
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
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Join a cluster that is not detected: the address of process 0.",
        show_default="off",
    ),
]
NumProcesses = Annotated[
    int, typer.Option(help="With --coordinator: how many there are.", show_default=False)
]
ProcessId = Annotated[
    int, typer.Option(help="With --coordinator: which one this is, from 0.", show_default=False)
]


def start_jax(
    distributed: bool = False, coordinator: str = "", num_processes: int = 0, process_id: int = -1
) -> None:
    from envs import join_cluster, prepare_jax
    from runs import UserError

    prepare_jax()
    if not coordinator and (num_processes, process_id) != (0, -1):
        raise UserError("--num-processes and --process-id go with --coordinator HOST:PORT.")
    if distributed or coordinator:
        join_cluster(coordinator, num_processes, process_id)


@app.command()
def run(
    preset: PresetOption = PresetName.laptop,
    task: TaskOption = "",
    seed: SeedOption = 0,
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
    import pipeline

    plan = pipeline.make_plan(preset, task, set_ or [])
    if dry_run:
        pipeline.print_plan(plan)
    else:
        pipeline.run_all(plan, seed, out)


@app.command()
def search(
    out: Annotated[Path, typer.Option(help="The run directory; it continues if it is there.")],
    task: TaskOption = "",
    algo: Annotated[
        Algo,
        typer.Option(
            help="The algorithm: MAP-Elites, with several episodes (me-sampling), Low-Spread (me-ls), "
            "or with policy gradients (pgame, pgame-ls)."
        ),
    ] = Algo.me_ls,
    preset: PresetOption = PresetName.laptop,
    seed: SeedOption = 0,
    set_: SetOption = None,
    distributed: Distributed = False,
    coordinator: Coordinator = "",
    num_processes: NumProcesses = 0,
    process_id: ProcessId = -1,
) -> None:
    """Stage 1: policies that cover the behaviour space."""
    start_jax(distributed, coordinator, num_processes, process_id)
    import pipeline

    plan = pipeline.make_plan(preset, task, set_ or [], stages=["task", "search"])
    pipeline.do_search(out, plan, algo, seed)


@app.command()
def dataset(
    run: RunArgument,
    trajectories: Annotated[
        int | None, typer.Option(help="How many are stored.", show_default="the preset's number")
    ] = None,
    naive: Annotated[
        bool,
        typer.Option(
            "--naive", help="All policies play, not the best of each zone.", show_default="off"
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
    coordinator: Coordinator = "",
    num_processes: NumProcesses = 0,
    process_id: ProcessId = -1,
) -> None:
    """Stage 2: the selected policies of a repertoire play trajectories."""
    start_jax(distributed, coordinator, num_processes, process_id)
    import pipeline

    if show:
        pipeline.show_dataset(run, naive)
    else:
        changes = [
            *(set_ or []),
            *([f"dataset.trajectories={trajectories}"] if trajectories is not None else []),
        ]
        pipeline.do_dataset(run, changes, naive)


@app.command()
def train(
    run: RunArgument,
    prune: Annotated[Prune, typer.Option(help="Leave out a part of the dataset.")] = Prune.nothing,
    naive: Annotated[
        bool,
        typer.Option("--naive", help="Learn from the naive dataset.", show_default="off"),
    ] = False,
    set_: SetOption = None,
    distributed: Distributed = False,
    coordinator: Coordinator = "",
    num_processes: NumProcesses = 0,
    process_id: ProcessId = -1,
) -> None:
    """Stage 3: the Quality-Diversity Transformer learns from the dataset."""
    start_jax(distributed, coordinator, num_processes, process_id)
    import pipeline

    pipeline.do_train(run, set_ or [], naive, "" if prune == Prune.nothing else prune)


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
    import pipeline

    for run in runs:
        pipeline.do_evaluate(experiment, run)


@app.command()
def act(
    run: RunArgument,
    target: Annotated[
        str, typer.Option(metavar="X Y", help="The behaviour that is asked for, a number per axis.")
    ],
    episodes: Annotated[int, typer.Option(help="From as many random starts.")] = 5,
    seed: SeedOption = 0,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Also write a page that plays the episodes in 3D.", show_default="no page"
        ),
    ] = None,
) -> None:
    """Behaviour on demand: the QDT plays towards a target."""
    start_jax()
    import pipeline

    pipeline.do_act(run, target, episodes, seed, html)


@app.command()
def show(run: RunArgument) -> None:
    """What is in a run, with the maps of its repertoire."""
    start_jax()
    import pipeline

    pipeline.do_show(run)


@app.command()
def report(
    runs: RunsArgument,
    out: Annotated[Path, typer.Option(help="Where report.html and the tables go.")] = Path(
        "report"
    ),
) -> None:
    """Tables and figures of many runs, beside the paper's, in one page."""
    start_jax()
    from report import write_report

    path = write_report(runs, out)
    print(f"The report is {path}.")


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

        from runs import Stopped, UserError, is_lost_process

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
