"""Options that several commands share, and help texts that list what is registered.

An option is a type: a command with a parameter of that type has the option.
Reads in this order: help, what a command works on, clusters, targets.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from machinery import machine
from machinery.files import UserError

# --- help ---------------------------------------------------------------------------------------------

# By the word that stands for it in a help text: a list that is made when help is asked for.
LISTS: dict[str, Callable[[], str]] = {}


class RegistryCommand(TyperCommand):
    """Help that lists what is registered by the time it is asked for."""

    def get_help(self, ctx: Any) -> str:
        self.fill_in()
        return super().get_help(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.fill_in()
        super().format_help(ctx, formatter)

    def fill_in(self) -> None:
        params: list[Any] = self.params
        for param in params:
            for word, listed in LISTS.items():
                if word in (getattr(param, "help", None) or ""):
                    param.help = param.help.replace(word, listed())


# --- what a command works on --------------------------------------------------------------------------


def flag(name: str, help: str) -> Any:
    """An option that is off unless it is named."""
    return typer.Option(name, help=help, show_default="off")


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")]
Preset = Annotated[
    str | None,
    typer.Option(
        help="The sizes of everything. tiny: point-omni, a minute; laptop: Halfcheetah or Ant with small "
        "policies, on two cores; overnight: the paper's search on two cores; paper: the paper's, for an "
        "accelerator.",
        show_default="laptop",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A written plan (RUN/plan.json) instead of a preset.",
        show_default=False,
    ),
]
Task = Annotated[str | None, typer.Option(help="One of @tasks.", show_default="the preset's own")]
Algo = Annotated[str | None, typer.Option(help="The algorithm. @rules.", show_default="me-ls")]
Seed = Annotated[
    int | None,
    typer.Option(help="Determines every random number.", min=0, max=2**31 - 1, show_default="0"),
]
Set = Annotated[
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
Name = Annotated[
    str | None,
    typer.Option(help="A name for a variant beside the run's own.", show_default=False),
]

# --- a cluster ----------------------------------------------------------------------------------------

Distributed = Annotated[
    bool, flag("--distributed", "Join a JAX cluster (SLURM and TPU pods are detected).")
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
    """For a command that is one of several processes."""
    if not coordinator and (num_processes, process_id) != (None, None):
        raise UserError("--num-processes and --process-id go with --coordinator HOST:PORT.")
    if distributed or coordinator:
        machine.join_cluster(coordinator, num_processes, process_id)


# --- targets ------------------------------------------------------------------------------------------


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
