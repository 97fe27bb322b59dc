"""What a dataset costs: memory, steps per second and disk of the build; the reader's batches per second.

    python benchmarks/dataset.py [--json FILE] [--trajectories 20000] [--directory DIR]

Ant-Omni, episodes of 250 steps, a made-up repertoire of random (256, 256) policies. Build and reader
run in processes of their own, so that the peak of each is its own. The build is compared with the bare
engine (`envs.rollout` with nothing recorded, the same policies and shape) in the same process.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

import dataset as ds
import envs
import me_ls
from machinery import machine
from machinery.runs import Stage

ZONES = 100  # the paper's for Ant-Omni
QDT_APPETITE = (
    13  # trajectories per second: the fastest measured training of 250 steps on two cores
)


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def made_up_repertoire(task: envs.Task) -> me_ls.Repertoire:
    """One random policy per zone, with the zone's centroid for a descriptor: every zone has one."""
    keys = jax.random.split(jax.random.key(0), ZONES)
    centroids = me_ls.goals(task, ZONES)
    zeros = jnp.zeros(ZONES)
    policies = me_ls.random_policies(task, (256, 256), keys)
    return me_ls.Repertoire(policies, zeros, centroids, zeros, centroids)


def measure_build(directory: Path, trajectories: int, length: int) -> dict[str, float]:
    task = envs.make_task(envs.TaskConfig("ant-omni", length=length))
    config = ds.DatasetConfig(trajectories=trajectories, selection_episodes=2)
    repertoire = made_up_repertoire(task)

    shard = min(trajectories, machine.settings().shard_size)
    keys = jax.random.split(jax.random.key(1), (ZONES, max(1, shard // ZONES)))
    members = ds._members(repertoire, np.arange(ZONES))

    def engine_rate() -> float:
        began = time.monotonic()
        jax.block_until_ready(envs.rollout(task, members, keys).fitness)
        return keys.size * length / (time.monotonic() - began)

    engine_rate()  # compiles
    rates, times = [], []
    play, write = ds.play_shard, ds.write_shard

    def timed_play(*arguments):
        if len(times) % 2 == 0:
            rates.append(engine_rate())  # in between: what else the machine does is then the same
        times.append([time.monotonic()])
        return play(*arguments)

    def timed_write(*arguments):
        shard = write(*arguments)
        times[-1] += [time.monotonic(), shard.rows]
        return shard

    ds.play_shard, ds.write_shard = timed_play, timed_write
    dataset = ds.build(task, repertoire, config, 0, Stage(directory, {"dataset": config}))
    engine = float(np.median(rates))  # medians: a shared machine has hiccups
    shards = [rows * length / (end - begin) for begin, end, rows in times]
    rate = float(np.median(shards[1:] or shards))  # the first shard compiles
    stored = sum(path.stat().st_size for path in directory.glob("*.npy"))
    return {
        "engine_steps_per_second": engine,
        "build_steps_per_second": rate,
        "build_of_engine": rate / engine,
        "build_peak_gib": peak_gib(),
        "trajectories": len(dataset),
        "shards": len(dataset.meta.shards),
        "diverged": dataset.left_out["diverged"],
        "disk_bytes": stored,
        "computed_bytes": ds.bytes_on_disk(task, config),
        "bytes_per_trajectory": stored / len(dataset),
    }


def drop_page_cache(directory: Path) -> None:
    for path in directory.glob("*.npy"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_reader(directory: Path) -> dict[str, float]:
    began = time.monotonic()
    drop_page_cache(directory)
    dataset = ds.open_dataset(directory)
    numbers = {"open_seconds": time.monotonic() - began}

    def rate(batch_size: int, count: int) -> float:
        """Trajectories per second of a consumer that does nothing else."""
        batches = ds.BatchReader(dataset, batch_size, seed=0)
        began = time.monotonic()
        for step in range(count):
            batches(step)
        taken = time.monotonic() - began
        batches.background.shutdown()
        return count * batch_size / taken

    for batch_size in (8, 256):
        count = len(dataset) // batch_size
        drop_page_cache(directory)
        cold = rate(batch_size, count)
        warm = rate(batch_size, count)
        numbers |= {f"cold_trajectories_per_second_{batch_size}": cold}
        numbers |= {f"cold_batches_per_second_{batch_size}": cold / batch_size}
        numbers |= {f"warm_trajectories_per_second_{batch_size}": warm}
        numbers |= {f"warm_batches_per_second_{batch_size}": warm / batch_size}
    slowest = min(x for name, x in numbers.items() if "trajectories_per" in name)
    return numbers | {"times_the_qdt": slowest / QDT_APPETITE, "reader_peak_gib": peak_gib()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=250)
    parser.add_argument(
        "--directory", type=Path, help="where the dataset is kept; default: nowhere"
    )
    parser.add_argument("--part", choices=("build", "reader"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        machine.prepare_jax()
        if options.part == "build":
            numbers = measure_build(options.directory, options.trajectories, options.length)
        else:
            numbers = measure_reader(options.directory)
        options.json.write_text(json.dumps(numbers))
        return
    with tempfile.TemporaryDirectory() as temporary:
        numbers = {}
        directory = options.directory or Path(temporary) / "dataset"
        for part in ("build", "reader"):
            found = Path(temporary) / f"{part}.json"
            command = [sys.executable, __file__, "--part", part, "--json", str(found)]
            command += ["--directory", str(directory), "--length", str(options.length)]
            command += ["--trajectories", str(options.trajectories)]
            subprocess.run(command, check=True)
            numbers |= json.loads(found.read_text())
    for name, value in numbers.items():
        print(f"{name:<36}{value:>16,.2f}")
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
