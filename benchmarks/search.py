"""What a search costs besides its episodes: `python benchmarks/search.py [--json FILE]`.

One generation of ME-LS at the size of the paper's policies and repertoire: variation, episodes,
characterisation, insertion, metrics and logging, each timed by itself until its result is there. The
physics should be nearly all of it: everything else has to stay under 5 %.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import envs
import me_ls
from machinery.files import save_arrays
from machinery.machine import prepare_jax, replicate
from machinery.runs import Stage

LIMIT = 0.05  # share of a generation that is not episodes


def timed(work: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """The median of several times in seconds, without the first one, which compiles; and a result."""
    result = jax.block_until_ready(work())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = jax.block_until_ready(work())
        times.append(time.perf_counter() - began)
    return statistics.median(times), result


def measure(task_config: envs.TaskConfig, config: me_ls.SearchConfig, repeats: int) -> dict:
    task, rule = envs.make_task(task_config), me_ls.find_rule(config.algo)
    search = me_ls.make_search(task, config)
    began = time.perf_counter()
    state = replicate(search.init(jax.random.key(0)))
    jax.block_until_ready(state)
    start = time.perf_counter() - began
    state, _ = search.step(state, jax.random.key(1))
    before = state.repertoire

    seconds = {}
    seconds["variation"], policies = timed(
        lambda: search.propose(before, config.batch, key=jax.random.key(3)), 10
    )
    seconds["episodes"], episodes = timed(
        lambda: search.play(policies, key=jax.random.key(2)), repeats
    )
    seconds["characterisation"], described = timed(
        lambda: me_ls.characterise(rule, episodes, before.centroids), 10
    )
    offspring = me_ls.Offspring(policies, *described)
    seconds["insertion"], (repertoire, _) = timed(
        lambda: me_ls.insert(before, offspring, rule.replaces), 10
    )

    def metrics() -> dict[str, float]:
        found = me_ls.repertoire_metrics(task, repertoire)
        return {name: x.item() for name, x in found.items()}

    seconds["metrics"], row = timed(metrics, 10)
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(Path(directory), {})
        seconds["logging"], _ = timed(lambda: stage.log(row | {"iteration": 0}), 10)
        path = Path(directory) / "checkpoint"
        checkpoint, _ = timed(lambda: save_arrays(path, repertoire), 3)

    total = sum(seconds.values())
    return {
        "seconds": seconds,
        "generation": total,
        "overhead": 1 - seconds["episodes"] / total,
        "steps_per_second": search.steps_per_iteration / total,
        "checkpoint": checkpoint,  # every two minutes, so not part of a generation
        "start": start,  # tessellation and empty repertoire, compiled: once
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", type=Path, help="also write the figures to this file")
    options.add_argument("--task", default="ant-omni")
    options.add_argument("--length", type=int, default=250)
    options.add_argument("--batch", type=int, default=128)
    options.add_argument("--cells", type=int, default=1024)
    options.add_argument(
        "--repeats", type=int, default=2, help="times that the episodes are played"
    )
    chosen = options.parse_args()

    prepare_jax()
    task_config = envs.TaskConfig(chosen.task, chosen.length)
    config = me_ls.SearchConfig("me-ls", batch=chosen.batch, cells=chosen.cells)
    found = measure(task_config, config, chosen.repeats)

    print(
        f"{chosen.task}, {config.batch} policies {config.hidden} × {config.episodes} episodes × "
        f"{chosen.length} steps, {config.cells} cells, {jax.device_count()} devices"
    )
    for name, seconds in found["seconds"].items():
        share = seconds / found["generation"]
        print(f"  {name:<18}{1000 * seconds:>10.1f} ms{100 * share:>8.2f} %")
    print(f"  {'generation':<18}{1000 * found['generation']:>10.1f} ms")
    print(f"  steps per second  {found['steps_per_second']:>10,.0f}")
    print(f"  a checkpoint      {1000 * found['checkpoint']:>10.1f} ms")
    print(f"  the start         {1000 * found['start']:>10.1f} ms")
    verdict = "under" if found["overhead"] < LIMIT else "OVER"
    print(f"everything but the episodes: {100 * found['overhead']:.2f} %, {verdict} {LIMIT:.0%}")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
