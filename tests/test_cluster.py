"""Two processes with two devices each are one process with four, on JAX's own distributed runtime."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from cli import open_run
from machinery.files import read_json

ROOT = Path(__file__).parents[1]
CHANGES = [
    "search.steps=150000", "dataset.trajectories=256", "train.epochs=1", "train.batch_size=8",
    "train.goal_episodes=1",
]  # fmt: skip

# The commands of `qdt`, with a number of devices that does not depend on the machine's cores.
COMMAND = """
import sys
import jax
import cli
from machinery import machine
devices, prepare = int(sys.argv.pop(1)), machine.prepare_jax
def prepare_jax():
    prepare()
    jax.config.update("jax_num_cpu_devices", devices)
machine.prepare_jax = prepare_jax
cli.main()
"""


def start(devices: int, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(devices), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def member(address: str, number: int) -> tuple[object, ...]:
    return ("--coordinator", address, "--num-processes", 2, "--process-id", number)


def start_two(*arguments: object) -> list[subprocess.Popen[str]]:
    address = f"localhost:{free_port()}"
    return [start(2, *arguments, *member(address, i)) for i in range(2)]


def stages(directory: Path) -> list[tuple[object, ...]]:
    """The commands of a lineage."""

    def settings(stage: str) -> list[str]:
        own = [change for change in CHANGES if change.startswith(stage)]
        return [part for change in own for part in ("--set", change)]

    return [
        ("search", "--preset", "tiny", "--out", directory, *settings("search")),
        ("dataset", directory, *settings("dataset")),
        ("train", directory, *settings("train")),
    ]


@pytest.mark.faults
def test_two_processes_are_one_with_as_many_devices(tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    for arguments in stages(one):
        finish(start(4, *arguments))
    for arguments in stages(two):
        finish(*start_two(*arguments))
    for pattern in ("search/repertoire.safetensors", "dataset/*.npy"):
        paths = sorted(one.glob(pattern))
        assert paths
        for path in paths:
            assert path.read_bytes() == (two / path.relative_to(one)).read_bytes(), path.name
    first, second = (open_run(run).model() for run in (one, two))
    leaves = zip(*map(jax.tree_util.tree_leaves_with_path, (first, second)), strict=True)
    for (path, one_leaf), (_, two_leaf) in leaves:
        name = jax.tree_util.keystr(path)
        # The softmax does not feel the biases of keys: their gradients are nothing but rounding errors.
        tolerance = 1e-5 if name.endswith("query_key_value.bias") else 1e-6
        np.testing.assert_allclose(one_leaf, two_leaf, rtol=1e-4, atol=tolerance, err_msg=name)


@pytest.mark.faults
def test_two_processes_search_with_a_robot(tmp_path: Path):
    """Robots are arrays, too: each process needs them on a device of its own."""
    changes = ("task.length=5", "search.batch=16", "search.episodes=2", "search.iterations=2")
    settings = [part for change in changes for part in ("--set", change)]
    one, two = (("search", "--task", "ant-omni", "--out", tmp_path / n, *settings) for n in "12")
    finish(start(4, *one))
    finish(*start_two(*two))
    first, second = (tmp_path / n / "search" / "repertoire.safetensors" for n in "12")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.faults
def test_where_one_process_fails_the_other_ends(tmp_path: Path):
    address = f"localhost:{free_port()}"
    arguments = ("search", "--preset", "tiny", "--out", tmp_path, "--set")
    sound = start(2, *arguments, "search.steps=40000000", *member(address, 0))
    failing = start(2, *arguments, "search.batch=0", *member(address, 1))
    _, errors = failing.communicate(timeout=120)
    assert failing.returncode == 1 and errors.splitlines()[-1].startswith("qdt: "), errors
    _, errors = sound.communicate(timeout=180)  # raises if it hangs
    assert sound.returncode != 0
    assert "another process" in errors or "another task died" in errors, errors[-2000:]


@pytest.mark.faults
def test_all_processes_stop_where_one_of_them_is_asked_to(tmp_path: Path):
    arguments = ("search", "--preset", "tiny", "--out", tmp_path, "--set", "search.steps=4000000")
    processes = start_two(*arguments)
    metrics, deadline = tmp_path / "search" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert "the same command continues" in errors.splitlines()[-1]
    assert list(tmp_path.glob("search/checkpoint-*.safetensors"))


@pytest.mark.faults
@pytest.mark.parametrize("killed", [0, 1])
def test_where_one_process_dies_the_other_ends_and_the_run_goes_on(tmp_path: Path, killed: int):
    """The survivor is told by its broken connection, or at the latest by the missing heartbeat.

    Process 0 holds JAX's own service: where it dies, JAX may end the others before we can, in its words.
    """
    settings = ("--set", "search.steps=4000000", "--set", "machine.checkpoint_seconds=0.0")
    run = tmp_path / "run"
    arguments = ("search", "--preset", "tiny", "--out", run, *settings)
    processes = start_two(*arguments)
    dying, other = processes[killed], processes[1 - killed]
    deadline = time.monotonic() + 120
    while not list(run.glob("search/checkpoint-*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.1)
    dying.send_signal(signal.SIGKILL)
    _, errors = other.communicate(timeout=180)  # raises if it hangs
    dying.communicate()
    assert other.returncode != 0
    if killed == 0 and "another task died" in errors:
        assert "Traceback" not in errors
    else:
        assert "another process" in errors.splitlines()[-1], errors[-2000:]
    assert not (run / "search" / "repertoire.safetensors").exists()
    last = max(run.glob("search/checkpoint-*.safetensors"))
    os.truncate(run / "search" / "metrics.jsonl", 100)  # a line cut in half does not matter either
    finish(*start_two(*arguments))
    assert read_json(run / "search" / "config.json")
    assert (run / "search" / "repertoire.safetensors").exists() and not last.exists()
