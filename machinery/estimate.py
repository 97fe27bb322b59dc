"""What a run would cost: its settings and its costs as lists, and a stopwatch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from machinery.driver import time_text
from machinery.machine import settings
from machinery.plans import STAGES, Plan


def print_settings(plan: Plan) -> None:
    """Every field of every stage, and of the machine."""
    print(f"{plan.preset or 'a written plan'} on {plan.task.task}")
    sections = {name: vars(getattr(plan, name)) for name in STAGES}
    devices = {n: "by the device" if v is None else v for n, v in vars(settings()).items()}
    for name, fields in (sections | {"machine": devices}).items():
        print(f"\n{name}")
        for field, value in fields.items():
            print(f"  {field:<24}{value}")


@dataclass(frozen=True)
class Costs:
    """What the stages of a plan consist of, and how fast this machine is."""

    # Of each search: its iterations, the steps of one, and steps per second.
    searches: list[tuple[int, int, float]]
    policy: int  # its weights
    stored: int  # bytes of the dataset
    model: int  # its parameters
    training: int  # steps of the optimiser
    seconds_per_step: float  # of them


def print_costs(plans: list[Plan], costs: Costs) -> None:
    """Every stage with its size and its time, and the time of all: of the last plan, and all searches."""
    plan, total = plans[-1], 0.0
    search, dataset, train, length = plan.search, plan.dataset, plan.train, plan.task.length
    print()
    for each, (iterations, steps_of_one, speed) in zip(plans, costs.searches, strict=True):
        steps = iterations * steps_of_one
        total += steps / speed
        print(
            f"{each.search.algo:<8}{iterations:>12,} iterations {steps // length:>14,} episodes "
            f"{steps:>18,} steps at {speed:,.0f} per second {time_text(steps / speed):>12}"
        )
    print(
        f"        a policy has {costs.policy:,} weights; the repertoire takes "
        f"{size_text(4 * costs.policy * search.cells)}, "
        f"a batch {size_text(4 * costs.policy * search.batch)}"
    )
    steps, speed = dataset.trajectories * length, costs.searches[-1][2]
    total += steps / speed
    least = "at least " if dataset.typical else ""  # the others are played and left out
    print(
        f"dataset {dataset.trajectories:>12,} trajectories {least}{steps:>12,} steps, "
        f"{size_text(costs.stored)} on disk {time_text(steps / speed):>12}"
    )
    training = costs.training * costs.seconds_per_step
    total += training
    print(
        f"{train.model:<8}{costs.model:>12,} parameters {costs.training:,} steps of {train.batch_size} "
        f"trajectories, {1 / costs.seconds_per_step:,.1f} per second {time_text(training):>12}"
    )
    print(f"\nAbout {time_text(total)} in all, without experiments and compilation.")


def size_text(size: int | float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def second_time(work: Callable[[], Any]) -> float:
    """Seconds that some work takes when all it needs is compiled."""
    jax.block_until_ready(work())
    began = time.monotonic()
    jax.block_until_ready(work())
    return time.monotonic() - began
