"""Where the time of a PGAME iteration goes, what the buffer takes, and what sharding brings.

    python benchmarks/pgame.py [--json FILE] [--task T] [--algo pgame-ls] [--batch N] ...

Prints, and writes with --json:

    seconds        of one iteration by part, the best of `--repeats`
    replay         bytes of the buffer on each device, and what its size says
    sharding       seconds of the variation by gradient on one and on two CPU devices, each in a process
                   of its own, at equal chunks, and whether the offspring are the same bit for bit

The defaults are a small Halfcheetah; `--batch 1000 --episodes 10 --length 250 --hidden 256
--td3-batch 256` is the paper's iteration.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import envs
import me_ls
import pgame_ls
from machinery.machine import prepare_jax, replicate


def best_of(repeats: int, function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the quickest call, and what the last one returned. The first one compiles."""
    result = jax.block_until_ready(function())
    seconds = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        result = jax.block_until_ready(function())
        seconds = min(seconds, time.perf_counter() - began)
    return seconds, result


def example(arguments: argparse.Namespace) -> tuple[pgame_ls.PGAME, pgame_ls.PGAMEState]:
    """A search and a state whose repertoire is full and whose buffer holds random numbers."""
    task = envs.make_task(envs.TaskConfig(arguments.task, length=arguments.length))
    config = pgame_ls.PGAMEConfig(
        algo=arguments.algo,
        cells=256,
        batch=arguments.batch,
        episodes=arguments.episodes,
        hidden=(arguments.hidden,) * 2,
        critic_hidden=(arguments.critic_hidden or arguments.hidden,) * 2,
        td3_batch=arguments.td3_batch,
        replay=arguments.replay,
    )
    search = pgame_ls.PGAME(task, config)
    state = search.init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), config.cells)
    policies = me_ls.random_policies(task, config.hidden, keys)
    replay = state.replay
    noise = jax.random.normal(jax.random.key(2), replay.observations.shape)
    size = jnp.array(len(replay.rewards), jnp.int32)
    state = eqx.tree_at(
        lambda s: (
            s.repertoire.policies,
            s.repertoire.fitness,
            s.replay.observations,
            s.replay.size,
        ),
        state,
        (policies, jnp.zeros(config.cells), noise, size),
    )
    return search, replicate(state)


def gradient_variation(
    config: pgame_ls.PGAMEConfig, state: pgame_ls.PGAMEState, together: int | None
) -> Callable[[], me_ls.MLP]:
    parents = me_ls.select_uniformly(state.repertoire, config.by_gradient, key=jax.random.key(3))
    critic, replay, key = pgame_ls.first_of(state.td3.critics), state.replay, jax.random.key(4)
    return lambda: pgame_ls.vary_by_gradient(config, parents, critic, replay, together, key=key)


def parts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each part of an iteration, and the memory of the buffer."""
    search, state = example(arguments)
    task, config, repeats = search.task, search.config, arguments.repeats
    seconds = {}
    seconds["variation by gradient"], climbed = best_of(
        repeats, gradient_variation(config, state, arguments.together)
    )
    seconds["iso+line"], varied = best_of(
        repeats,
        lambda: search.propose(state.repertoire, config.by_variation, key=jax.random.key(5)),
    )
    seconds["critic training"], (td3, _) = best_of(
        repeats,
        lambda: pgame_ls.train(config, state.td3, state.replay, key=jax.random.key(6)),
    )
    offspring = jax.tree.map(
        lambda actor, *others: jnp.concatenate([actor[None], *others]), td3.actor, varied, climbed
    )
    seconds["episodes"], episodes = best_of(
        repeats,
        lambda: search.play(offspring, key=jax.random.key(7), record=envs.transitions),
    )
    seconds["buffer"], replay = best_of(repeats, lambda: pgame_ls.remember(state.replay, episodes))
    seconds["insertion"], _ = best_of(
        repeats, lambda: search.insert(state.repertoire, offspring, episodes)
    )
    steps = search.steps_per_iteration
    return {
        "setting": vars(arguments) | {"devices": jax.device_count(), "steps": steps},
        "seconds": seconds,
        "replay": {
            "bytes per device": held_by_one_device(replay),
            "expected bytes": expected_bytes(task, config),
        },
    }


def held_by_one_device(replay: pgame_ls.Replay) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(replay))


def expected_bytes(task: envs.Task, config: pgame_ls.PGAMEConfig) -> int:
    """Four bytes for each number: s, a and r of every transition and the last s of every episode."""
    episodes = math.ceil(config.replay / task.length)
    numbers = task.length * (task.observation_size + task.action_size + 1) + task.observation_size
    return 4 * (episodes * numbers + 2)


def sharding(arguments: argparse.Namespace) -> dict[str, Any]:
    """The variation by gradient on one and on two devices: seconds, and a digest of the offspring."""
    found = {}
    for devices in (1, 2):
        command = [sys.executable, __file__, *sys.argv[1:], "--only-gradient", str(devices)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[devices] = json.loads(done.stdout.splitlines()[-1])
    return {
        "one device": found[1]["seconds"],
        "two devices": found[2]["seconds"],
        "speed-up": found[1]["seconds"] / found[2]["seconds"],
        "same offspring": found[1]["digest"] == found[2]["digest"],
    }


def only_gradient(arguments: argparse.Namespace) -> dict[str, Any]:
    search, state = example(arguments)
    seconds, climbed = best_of(
        arguments.repeats, gradient_variation(search.config, state, arguments.together)
    )
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(climbed):
        digest.update(np.asarray(leaf).tobytes())
    return {"seconds": seconds, "digest": digest.hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--task", default="halfcheetah-uni")
    parser.add_argument("--algo", default="pgame-ls", choices=("pgame", "pgame-ls"))
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=64, help="width of both layers of a policy")
    parser.add_argument("--critic-hidden", type=int, help="of a critic; the same if not given")
    parser.add_argument("--td3-batch", type=int, default=256)
    parser.add_argument("--replay", type=int, default=1_000_000)
    parser.add_argument("--together", type=int, help="policies that climb at a time on a device")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only-gradient", type=int, metavar="DEVICES", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    prepare_jax()
    if arguments.only_gradient:
        jax.config.update("jax_num_cpu_devices", arguments.only_gradient)
        print(json.dumps(only_gradient(arguments)))
        return
    del arguments.only_gradient

    found = parts(arguments)
    found["sharding"] = sharding(arguments)
    total = sum(found["seconds"].values())
    for name, seconds in found["seconds"].items():
        print(f"{name:<24}{seconds:9.3f} s {seconds / total:7.1%}")
    print(f"{'one iteration':<24}{total:9.3f} s, {found['setting']['steps'] / total:,.0f} steps/s")
    replay, shards = found["replay"], found["sharding"]
    print(
        f"buffer: {replay['bytes per device']:,} bytes on each device "
        f"(its size says {replay['expected bytes']:,})"
    )
    same = "the same" if shards["same offspring"] else "DIFFERENT"
    print(
        f"variation by gradient: {shards['one device']:.3f} s on one device, "
        f"{shards['two devices']:.3f} s on two, × {shards['speed-up']:.2f}, {same} offspring"
    )
    if arguments.json:
        text = json.dumps(found, indent=2, default=str)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
