"""The whole pipeline under `kill -9`: whatever is lost, the end is the same, byte for byte.

A server process imports everything once and forks a child for each attempt, so that a hundred kills cost
minutes instead of an hour. A child goes through search, dataset and training as `qdt` does, continuing
what it finds; it dies at a random moment after it has begun to touch the run directory.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KILLS = 100

SERVER = """
import os, sys
from pathlib import Path
import cli, dataset, envs, evaluate, me_ls, pgame_ls, pipeline, qdt, training  # imported once
CHANGES = [
    "search.steps=60000", "search.checkpoint_seconds=0.0", "dataset.trajectories=256",
    "dataset.shard_size=32", "train.epochs=2", "train.batch_size=8", "train.goal_episodes=1",
    "train.evaluate_every=1", "train.checkpoint_seconds=0.0",
]
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        envs.prepare_jax()
        directory = Path(line.strip())
        plan = pipeline.make_plan("tiny", "", CHANGES)
        pipeline.do_search(directory, plan, "me-ls", seed=0)
        pipeline.do_dataset(directory, CHANGES, naive=False)
        pipeline.do_train(directory, CHANGES, naive=False, prune="")
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Pipeline:
    """Runs the pipeline in a directory, in a process that can be killed."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def run(self, directory: Path, dies_after: float | None = None) -> bool:
        """Whether it came to its end; it is killed that many seconds after its first sign of life."""
        assert self.server.stdin and self.server.stdout
        began = time.time()
        self.server.stdin.write(f"{directory}\n")
        self.server.stdin.flush()
        child = int(self.server.stdout.readline())
        if dies_after is not None:
            while not (directory / ".lock").exists() or last_change(directory) < began:
                time.sleep(0.01)
            time.sleep(dies_after)
            os.kill(child, signal.SIGKILL)  # it is not waited for yet: the number is still its own
        status = int(self.server.stdout.readline())
        assert status in (0, signal.SIGKILL)
        return status == 0


def last_change(directory: Path) -> float:
    """When the pipeline last took its lock, which it does before anything else."""
    return (directory / ".lock").stat().st_mtime


RESULTS = ("search/repertoire.qdt", "dataset/meta.json", "dataset/*.npy", "qdt/model.qdt")


def results(directory: Path) -> dict[str, bytes]:
    found = [path for pattern in RESULTS for path in directory.glob(pattern)]
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


@pytest.mark.faults
def test_a_hundred_kills_change_nothing(tmp_path: Path):
    pipeline, moments = Pipeline(), random.Random(0)
    whole = tmp_path / "whole"
    assert pipeline.run(whole)
    expected = results(whole)
    assert len(expected) > 60  # a repertoire, a model and eight arrays of each shard
    kills, lineages, stages = 0, 0, dict.fromkeys(("search", "dataset", "qdt"), 0)
    while kills < KILLS:
        directory = tmp_path / str(lineages)
        while not pipeline.run(directory, dies_after=moments.uniform(0, 5)):
            kills += 1
            reached = [stage for stage in stages if (directory / stage).exists()]
            stages[reached[-1] if reached else "search"] += 1
        lineages += 1
        assert results(directory) == expected
    print(f"{kills} kills in {lineages} lineages, by stage: {stages}")
    assert min(stages.values()) > 0
