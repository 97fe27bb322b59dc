"""Environment steps per second: bare physics, the engine with policies, and QDax beside it.

    python benchmarks/rollout.py [--json FILE] [--qdax-python PY] [--policies 64] [--length 250]

`PY` is a Python of its own in which QDax is installed (`pip install qdax==0.5.0`); it is never a
dependency of this project. Everything is measured in one run, in turns, because machines are noisy; the
ratios count. What is played: 64 policies of (256, 256) × 10 episodes × 250 steps, as one generation of
MAP-Elites Low-Spread. "bare" is the same episodes with constant actions instead of policies; "limit" is the
share of what the machine could do: the scalar operations that `lanes` leaves of a step's physics, times the
bare steps per second, over the measured peak of multiplications and additions on vectors. "single" is the
speed of ten times as many policies with one episode each, as MAP-Elites plays them, over the engine's.
Each task twice: with brax's robot, which is QDax's too, and with the one like the paper's (v1).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASKS = {"ant-omni": "ant_omni", "halfcheetah-uni": "halfcheetah_uni"}
EPISODES = 10


def ours(policies: int, length: int, repeats: int) -> dict[str, dict[str, float]]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    import envs
    import me_ls
    from machinery.machine import prepare_jax, replicate

    prepare_jax()

    class Constant(eqx.Module):
        """A policy that costs nothing."""

        action: jax.Array

        def start(self) -> None:
            return None

        def act(self, memory: None, state: envs.State) -> tuple[jax.Array, None]:
            return self.action, memory

    def work(task: envs.Task) -> dict[str, Callable[[], Any]]:
        keys = replicate(jax.random.split(jax.random.key(0), (policies, EPISODES)))
        networks = replicate(me_ls.random_policies(task, (256, 256), keys[:, 0]))
        constant = replicate(Constant(jnp.full((policies, task.action_size), 0.1)))
        alone = replicate(keys.reshape(-1, 1))
        many = replicate(me_ls.random_policies(task, (256, 256), alone[:, 0]))
        return {
            "bare": lambda: envs.rollout(task, constant, keys),
            "engine": lambda: envs.rollout(task, networks, keys),
            "single": lambda: envs.rollout(task, many, alone),
        }

    results = {}
    for name in TASKS:
        robots: dict[str, Any] = {name: "brax", f"{name}, v1": "v1"}
        tasks = {
            row: envs.make_task(envs.TaskConfig(name, length=length, robot=robot))
            for row, robot in robots.items()
        }
        both = {(row, what): do for row in tasks for what, do in work(tasks[row]).items()}
        seconds = in_turns(both, repeats)
        peak = vector_peak()
        for row, task in tasks.items():
            steps = policies * EPISODES * length
            numbers = {what: steps / s for (whose, what), s in seconds.items() if whose == row}
            numbers["operations"] = operations_of_a_step(task)
            numbers["limit"] = numbers["bare"] * numbers["operations"] / peak
            results[row] = numbers
    return results


def operations_of_a_step(task: Any) -> int:
    """Scalar operations of one step's physics."""
    import jax

    from machinery import lanes

    state = jax.eval_shape(task.reset, jax.random.key(0))
    action = jax.ShapeDtypeStruct((task.action_size,), "float32")
    return lanes.count(task.step, state, action)


def vector_peak(chains: int = 12, length: int = 1000, episodes: int = 4096) -> float:
    """Multiplications and additions per second of all devices, on numbers that stay in registers."""
    import jax
    import jax.numpy as jnp

    from machinery import lanes

    @lanes.in_lanes
    def work(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (0.5 * x + 1.0, None), x, length=length)[0]

    numbers = jnp.ones((episodes, chains))
    shares = [jax.device_put(numbers, device) for device in jax.local_devices()]
    once = jax.jit(jax.vmap(work))

    def all_devices() -> list[jax.Array]:
        return [once(x) for x in shares]

    seconds = in_turns({"peak": all_devices}, 9)["peak"]
    return len(shares) * episodes * lanes.count(work, numbers[0]) / seconds


def in_turns(work: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Median seconds of each, measured alternately; the first time, which compiles, does not count."""
    import jax

    seconds: dict[Any, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 1):
        for name, do in work.items():
            began = time.perf_counter()
            jax.block_until_ready(do())
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def qdax(python: str, task: str, policies: int, length: int) -> float:
    """Steps per second of a MAP-Elites Low-Spread generation in QDax, by this very file under PY."""
    command = [python, __file__, "--peer", TASKS[task], "--policies", str(policies)]
    done = subprocess.run([*command, "--length", str(length)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"QDax did not run: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.strip().splitlines()[-1])


def peer(name: str, policies: int, length: int) -> None:
    """Runs under the peer's Python: prints QDax's steps per second."""
    import functools
    import warnings

    warnings.filterwarnings("ignore")
    import jax
    import jax.numpy as jnp

    clip = jnp.clip  # QDax 0.5.0 calls it with argument names that JAX has dropped

    def old_clip(
        x: Any, min: Any = None, max: Any = None, a_min: Any = None, a_max: Any = None
    ) -> Any:
        return clip(x, min if a_min is None else a_min, max if a_max is None else a_max)

    jnp.clip = old_clip
    import qdax.tasks.brax.v2 as tasks
    from qdax.core.containers.mapelites_repertoire import compute_cvt_centroids
    from qdax.core.emitters.mutation_operators import isoline_variation
    from qdax.core.emitters.standard_emitters import MixingEmitter
    from qdax.core.mels import MELS
    from qdax.core.neuroevolution.networks.networks import MLP
    from qdax.tasks.brax.v2.env_creators import create_brax_scoring_fn
    from qdax.utils.metrics import default_qd_metrics

    key = jax.random.key(0)
    env = tasks.create(name, episode_length=length)
    network = MLP(layer_sizes=(256, 256, env.action_size), final_activation=jnp.tanh)
    keys, blank = jax.random.split(key, policies), jnp.zeros((policies, env.observation_size))
    describe = tasks.descriptor_extractor[name]
    search = MELS(
        scoring_function=create_brax_scoring_fn(
            env, network, describe, key, episode_length=length, deterministic=False
        ),
        emitter=MixingEmitter(
            mutation_fn=None,
            variation_fn=functools.partial(isoline_variation, iso_sigma=0.005, line_sigma=0.05),
            variation_percentage=1.0,
            batch_size=policies,
        ),
        metrics_function=functools.partial(default_qd_metrics, qd_offset=0.0),
        num_samples=EPISODES,
    )
    low, high = (-15.0, 15.0) if "omni" in name else (0.0, 1.0)
    centroids = compute_cvt_centroids(
        num_descriptors=env.descriptor_length,
        num_init_cvt_samples=50_000,
        num_centroids=1024,
        minval=low,
        maxval=high,
        key=key,
    )
    repertoire, emitter, _ = search.init(jax.vmap(network.init)(keys, blank), centroids, key)
    update = jax.jit(search.update)
    jax.block_until_ready(update(repertoire, emitter, key))
    seconds = []
    for i in range(2):
        began = time.perf_counter()
        jax.block_until_ready(update(repertoire, emitter, jax.random.fold_in(key, i)))
        seconds.append(time.perf_counter() - began)
    print(policies * EPISODES * length / min(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--qdax-python", help="a Python with QDax, to be measured in the same run")
    parser.add_argument("--policies", type=int, default=64)
    parser.add_argument("--length", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(options.peer, options.policies, options.length)
        return
    results = ours(options.policies, options.length, options.repeats)
    titles = f"{'steps per second':<22}{'bare':>10}{'limit':>8}{'engine':>10}{'single':>8}"
    print(f"{titles}{'QDax':>10}{'ratio':>8}")
    for name, row in results.items():
        line = f"{name:<22}{row['bare']:>10,.0f}{row['limit']:>8.1%}{row['engine']:>10,.0f}"
        line += f"{row['single'] / row['engine']:>8.2f}"
        if options.qdax_python and name in TASKS:
            row["qdax"] = qdax(options.qdax_python, name, options.policies, options.length)
            line += f"{row['qdax']:>10,.0f}{row['engine'] / row['qdax']:>8.2f}"
        print(line, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
