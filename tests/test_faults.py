"""The whole pipeline under `kill -9`, a full disk and damaged files: the end is the same, byte for byte.

For the kills, a server process imports everything once and forks a child for each attempt, so that a
hundred of them cost minutes instead of an hour. A child does one stage as `qdt` does, continuing what it
finds; it dies at a random moment of the time that the stage takes when nobody disturbs it.
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
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_dataset import build
from test_files import MANY, damaged

import dataset
from machinery.files import UserError

ROOT = Path(__file__).parents[1]
KILLS_PER_STAGE = 34

CHANGES = [
    "search.steps=60000", "dataset.trajectories=256", "train.epochs=2", "train.batch_size=8",
    "train.goal_episodes=1", "train.evaluate_every=1",
]  # fmt: skip
MACHINE = ["machine.checkpoint_seconds=0.0", "machine.shard_size=32"]  # as often as can be

SERVER = """
import os, sys
from pathlib import Path
import cli, dataset, envs, evaluate, me_ls, pgame_ls, qdt  # imported once
from machinery import machine
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        machine.prepare_jax()
        stage, directory = line.split()
        directory, changes = Path(directory), cli.changes_of(sys.argv[1:], cli.STAGES)
        if stage == "search":
            cli.do_search(directory, cli.PLANS.asked(cli.Asked("tiny", None, None, None, None, changes)))
        elif stage == "dataset":
            cli.do_dataset(cli.open_run(directory), {})
        else:
            cli.do_train(cli.open_run(directory), {})
        os._exit(0)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Stages:
    """Runs a stage of the pipeline in a directory, in a process that can be killed."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *CHANGES, *MACHINE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def run(self, stage: str, directory: Path, dies_after: float | None = None) -> bool:
        """Whether it came to its end; it is killed that many seconds after its start."""
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(f"{stage} {directory}\n")
        self.server.stdin.flush()
        child = int(self.server.stdout.readline())
        if dies_after is not None:
            time.sleep(dies_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        status = int(self.server.stdout.readline())
        assert status in (0, signal.SIGKILL)
        return status == 0


RESULTS = {
    "search": ("repertoire.safetensors",),
    "dataset": ("meta.json", "*.npy"),
    "qdt": ("model.safetensors",),
}


def results(stage: str, directory: Path) -> dict[str, bytes]:
    found = [path for pattern in RESULTS[stage] for path in (directory / stage).glob(pattern)]
    return {path.name: path.read_bytes() for path in found}


@pytest.mark.faults
def test_a_hundred_kills_change_nothing(tmp_path: Path):
    """A stage that comes to its end is compared and begun again, until it was killed often enough."""
    stages, moments = Stages(), random.Random(0)
    whole, done = tmp_path / "whole", []

    def begin(stage: str, number: int) -> Path:
        directory = tmp_path / f"{stage}-{number}"
        directory.mkdir()
        if done:
            shutil.copy(whole / "plan.json", directory)
        for earlier in done:
            (directory / earlier).symlink_to(whole / earlier)
        return directory

    for stage in RESULTS:
        assert stages.run(stage, whole)  # and compile
        began = time.monotonic()
        assert stages.run(stage, begin(stage, 0))
        seconds, kills, ends = time.monotonic() - began, 0, 0
        while kills < KILLS_PER_STAGE:
            ends += 1
            directory, finished = begin(stage, ends), False
            while not finished:
                killed_after = moments.uniform(0, seconds) if kills < KILLS_PER_STAGE else None
                finished = stages.run(stage, directory, killed_after)
                kills += not finished
            assert results(stage, directory) == results(stage, whole) != {}
        print(f"{stage}: killed {kills} times, came to its end {ends} times, takes {seconds:.1f} s")
        done.append(stage)


# --- a full disk ------------------------------------------------------------------------------------


def search(directory: Path) -> subprocess.CompletedProcess[str]:
    settings = ("search.steps=60000", "machine.checkpoint_seconds=0.0")
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, str(ROOT / "cli.py"), "search", "--preset", "tiny", *options]
    return subprocess.run([*command, "--out", str(directory)], capture_output=True, text=True)


@pytest.mark.faults
def test_a_disk_that_fills_during_a_search_loses_nothing(
    small_disk: Callable[[str], Path], tmp_path: Path
):
    disk = small_disk("800k")  # two checkpoints, but not a third beside them
    assert search(tmp_path / "whole").returncode == 0
    stopped = search(disk / "run")
    assert stopped.returncode == 1
    last_line = stopped.stderr.splitlines()[-1]
    assert last_line.startswith("qdt: cannot write") and "No space left" in last_line
    assert "Traceback" not in stopped.stderr
    small_disk("8m")
    assert search(disk / "run").returncode == 0
    path = Path("search") / "repertoire.safetensors"
    assert (disk / "run" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes()


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
            dataset.BatchReader(dataset.open_dataset(victim), 8, seed=0).prepare(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for changed in {name, "meta.json"}:
            shutil.copyfile(intact / changed, victim / changed)
    assert peak < len(content) + (4 << 20)
