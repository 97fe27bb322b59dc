"""Weak scaling of the search: 1 process with one core, then 2 with one each and twice the batch.

    python benchmarks/cluster.py [--task ant-omni] [--json FILE]

The processes are those of `qdt search --coordinator`: JAX's distributed runtime over the loopback. Every
process has as many policies to play as the single one; with no loss it takes as long for twice the work.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
POLICIES = 125  # per process: the share of one of eight at the paper's size
ITERATIONS = 10


def steps_per_second(task: str, processes: int, place: Path) -> float:
    """Of all processes together: the median of the iterations that did not compile."""
    batch, episodes, length = POLICIES * processes, 10, 250
    out = place / str(processes)
    settings = {
        "task.length": length,
        "search.batch": batch,
        "search.episodes": episodes,
        "search.steps": ITERATIONS * batch * episodes * length,
    }
    command = [sys.executable, str(ROOT / "cli.py"), "search", "--task", task, "--out", str(out)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        address = f"localhost:{listener.getsockname()[1]}"
    running = []
    for i in range(processes):
        cluster = ["--coordinator", address, "--num-processes", str(processes)]
        running.append(
            subprocess.Popen(
                [*command, *cluster, "--process-id", str(i)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda core=i: os.sched_setaffinity(0, {core}),
            )
        )
    for process in running:
        _, errors = process.communicate()
        if process.returncode:
            sys.exit(f"a process failed: {errors}")
    rows = (out / "search" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(row)["steps_per_second"] for row in rows[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="ant-omni")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        one = steps_per_second(options.task, 1, Path(place))
        print(f"1 process   {one:>10,.0f} steps per second", flush=True)
        two = steps_per_second(options.task, 2, Path(place))
    print(f"2 processes {two:>10,.0f} steps per second, efficiency {two / (2 * one):.2f}")
    if options.json:
        options.json.write_text(json.dumps({"1": one, "2": two}) + "\n")


if __name__ == "__main__":
    main()
