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

    searches: list[tuple[int, int]]  # of each: its iterations, and the steps of one
    policy: int  # its weights
    stored: int  # bytes of the dataset
    model: int  # its parameters
    steps_per_second: float
    trajectories_per_second: float


def print_costs(plans: list[Plan], costs: Costs) -> None:
    """Every stage with its size and its time, and the time of all: of the last plan, and all searches."""
    plan = plans[-1]
    speed, rate, total = costs.steps_per_second, costs.trajectories_per_second, 0.0
    search, dataset, train, length = plan.search, plan.dataset, plan.train, plan.task.length
    print(f"\nThis machine: {speed:,.0f} environment steps per second.\n")
    for each, (iterations, steps_of_one) in zip(plans, costs.searches, strict=True):
        steps = iterations * steps_of_one
        total += steps / speed
        print(
            f"{each.search.algo:<8}{iterations:>12,} iterations {steps // length:>14,} episodes "
            f"{steps:>18,} steps {time_text(steps / speed):>12}"
        )
    print(
        f"        a policy has {costs.policy:,} weights; the repertoire takes "
        f"{size_text(4 * costs.policy * search.cells)}, "
        f"a batch {size_text(4 * costs.policy * search.batch)}"
    )
    steps = dataset.trajectories * length
    total += steps / speed
    least = "at least " if dataset.typical else ""  # the others are played and left out
    print(
        f"dataset {dataset.trajectories:>12,} trajectories {least}{steps:>12,} steps, "
        f"{size_text(costs.stored)} on disk {time_text(steps / speed):>12}"
    )
    seen = train.epochs * dataset.trajectories
    total += seen / rate
    print(
        f"{train.model:<8}{costs.model:>12,} parameters {train.epochs} epochs, "
        f"{seen:,} trajectories at {rate:,.1f} per second {time_text(seen / rate):>12}"
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
