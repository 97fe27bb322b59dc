"""What each difference between brax's ant and the paper's is worth to a search.

ME and ME-LS at the paper's size (250 steps, [-15, 15]², 1,024 cells, batches of 1,000, ten episodes) on
ants that differ from the one like the paper's in one thing at a time (`docs/robots.md`):

    python benchmarks/robots.py --steps 60000000 --out robots.json

Prints a row for each ant: distance to the goals, spread at the goals, re-evaluated coverage.
"""

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # first: a qdt.py is beside this file, too

import jax
import jax.numpy as jnp

import envs
from envs import AntOmni, TaskConfig, make_task
from evaluate import Subject, evaluate_accuracy, evaluate_reassessment
from machinery import machine
from machinery.lanes import spring_step
from machinery.robot_v1 import RobotV1, description
from machinery.streams import stream
from me_ls import SearchConfig, goals, make_search


@dataclass(frozen=True)
class Variant:
    """One difference: in the description of the body, in the code of the robot, or in the task."""

    body: tuple[tuple[str, str], ...] = ()  # what is written in place of what
    methods: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)


def number(name: str, value: float) -> tuple[str, str]:
    return rf'(name="{name}" data=)"[^"]*"', rf'\1"{value}"'


LIGHT = ('mass="10"', 'mass="1"')
WEAK = (number("constraint_stiffness", 4000), number("constraint_vel_damping", 20))

VARIANTS = {
    "like v1's": Variant(),
    "torso of mass 1": Variant((LIGHT,)),
    "torque 150": Variant((('gear="350"', 'gear="150"'),)),
    "stiffness 4,000": Variant(WEAK[:1]),
    "spring damping 20": Variant(WEAK[1:]),
    "stiffness 4,000 and spring damping 20": Variant(WEAK),
    "these and a torso of mass 1": Variant((*WEAK, LIGHT)),
    "angular damping 10": Variant((number("constraint_ang_damping", 10),)),
    "a torso that sinks into the floor": Variant(
        (('<geom name="torso"', '<geom name="torso" class="for_the_eye"'),)
    ),
    "motors beyond the joints' limits": Variant(methods={"drive": lambda self, q, action: action}),
    "the framework's reward": Variant(task={"reward": "framework"}),
    "brax's own": Variant(task={"robot": "brax"}),
    "brax's own, brax's start": Variant(task={"robot": "brax", "start": "brax"}),
}


def make_variant(name: str, variant: Variant) -> envs.Task:
    """Registers the ant as a task of its own."""

    class Ant(AntOmni):
        def load(self, config: TaskConfig) -> Any:
            if config.robot == "brax":
                return super().load(config)
            kind = type("Robot", (RobotV1,), variant.methods)
            text = description("ant")
            for old, new in variant.body:
                text, count = re.subn(old, new, text)
                assert count, f"{old} is not in the description"
            env = kind("ant", text)
            env.pipeline_step = spring_step(env)
            return env

    envs.TASKS[name] = Ant
    return make_task(TaskConfig(task=name, **{"robot": "v1"} | variant.task))


def search(task: envs.Task, algo: str, steps: int, seed: int) -> dict[str, float] | None:
    """None: every episode diverges, which a repertoire does not take."""
    config = SearchConfig(algo, steps=steps, hidden=(64, 64))
    found = make_search(task, config)
    state = machine.replicate(found.init(stream(seed, "search-init")))
    for i in range(found.iterations):
        state, _ = found.step(state, jax.random.fold_in(stream(seed, "search"), i))
    if not state.repertoire.occupied.any():
        return None
    subject = Subject(task, seed, state.repertoire, {})
    accuracy = evaluate_accuracy(subject)["repertoire"]
    again = evaluate_reassessment(subject)["after"]
    numbers = accuracy["mean_distance"], accuracy["mean_spread"], again["coverage"]
    return dict(zip(("distance", "spread", "coverage"), numbers, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("robots.json"))
    arguments = parser.parse_args()
    machine.prepare_jax()
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    print("| ant | ME: distance, spread, coverage | ME-LS | ratio of distances, spreads |")
    for name, variant in VARIANTS.items():
        if name not in results:
            began, task = time.monotonic(), make_variant(name, variant)
            rows = {a: search(task, a, arguments.steps, arguments.seed) for a in ("me", "me-ls")}
            results[name] = rows | {
                "standing still": float(jnp.linalg.norm(goals(task), axis=1).mean()),
                "seconds": time.monotonic() - began,
            }
            arguments.out.write_text(json.dumps(results, indent=2) + "\n")
        me, ls = results[name]["me"], results[name]["me-ls"]
        if me is None or ls is None:
            print(f"| {name} | diverges | diverges | – |", flush=True)
            continue
        texts = [f"{r['distance']:.2f}, {r['spread']:.2f}, {r['coverage']:.0%}" for r in (me, ls)]
        ratios = [f"{ls[what] / me[what]:.2f}" for what in ("distance", "spread")]
        print(f"| {name} | {' | '.join(texts)} | {', '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
