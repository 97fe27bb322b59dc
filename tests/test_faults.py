"""The whole pipeline under `kill -9`, a full disk and damaged files: the end is the same, byte for byte.

For the kills, a server process imports everything once and forks a child for each attempt, so that a
hundred of them cost minutes instead of an hour. A child goes through search, dataset and training as
`qdt` does, continuing what it finds; it dies at a random moment after it has touched the run directory.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_dataset import build
from test_runs import MANY, damaged

import dataset
from runs import UserError

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
        while not pipeline.run(directory, moments.uniform(0, 6) if kills < KILLS else None):
            kills += 1
            reached = [stage for stage in stages if (directory / stage).exists()]
            stages[reached[-1] if reached else "search"] += 1
        lineages += 1
        assert results(directory) == expected
    print(f"{kills} kills in {lineages} lineages, by stage: {stages}")
    assert min(stages.values()) > 0


# --- a full disk ------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds two checkpoints of the search below, but not a third beside them."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here: needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def search(directory: Path) -> subprocess.CompletedProcess[str]:
    settings = ("search.steps=60000", "search.checkpoint_seconds=0.0")
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, str(ROOT / "cli.py"), "search", "--preset", "tiny", *options]
    return subprocess.run([*command, "--out", str(directory)], capture_output=True, text=True)


@pytest.mark.faults
def test_a_disk_that_fills_during_a_search_loses_nothing(small_disk: Path, tmp_path: Path):
    assert search(tmp_path / "whole").returncode == 0
    stopped = search(small_disk / "run")
    assert stopped.returncode == 1
    last_line = stopped.stderr.splitlines()[-1]
    assert last_line.startswith("qdt: cannot write") and "No space left" in last_line
    assert "Traceback" not in stopped.stderr
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert search(small_disk / "run").returncode == 0
    path = Path("search") / "repertoire.qdt"
    assert (small_disk / "run" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()


# --- damaged datasets -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("intact") / "dataset").directory


@pytest.fixture(scope="module")
def victim(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("victim") / "dataset"
    shutil.copytree(intact, directory)
    return directory


@pytest.mark.faults
@MANY
@given(st.data())
def test_a_damaged_dataset_is_our_own_error(intact: Path, victim: Path, data: st.DataObject):
    """One file is damaged; a shard's size and checksum may be forged so that they fit the damage."""
    names = ("meta.json", "shard-00000-observations.npy", "shard-00001-zone.npy")
    name = data.draw(st.sampled_from(names))
    content = data.draw(damaged((intact / name).read_bytes()))
    (victim / name).write_bytes(content)
    if name != "meta.json" and data.draw(st.booleans()):
        meta = json.loads((intact / "meta.json").read_text())
        _, shard, array = name.removesuffix(".npy").split("-")
        meta["shards"][int(shard)]["files"][array] = [len(content), zlib.crc32(content)]
        (victim / "meta.json").write_text(json.dumps(meta))
    tracemalloc.start()
    try:
        with contextlib.suppress(UserError):
            next(dataset.batches(dataset.open_dataset(victim), 8, seed=0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for changed in {name, "meta.json"}:
            shutil.copyfile(intact / changed, victim / changed)
    assert peak < len(content) + (4 << 20)
