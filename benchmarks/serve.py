"""What `qdt serve` costs: its start, a click, and a crowd.

    python benchmarks/serve.py RUN... [--json FILE] [--pictures DIR]

For every run, starts the server in a process of its own, twice: cold, with an empty cache of compiled
programs, and warm, with what the first start left there. Of the second one it measures, in a real Chromium
(with chromedriver), the time from a click on the map to the first frame in which the robot has moved,
median of 20; what is refused; and a hundred requests at once, three times, with the server's memory.
`--pictures` keeps screenshots: before, during and after a click, and of a narrow window.
"""

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from test_server import CLICK_AND_WATCH
from webdriver import Browser

ROOT = Path(__file__).parents[1]
CLICKS = 20
CROWD = 100


@contextmanager
def served(run: Path, cache: Path) -> Iterator[tuple[subprocess.Popen, int, dict[str, float]]]:
    """The process, its port, and after how many seconds it could be opened."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(cache)}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), "serve", str(run), "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | own,
    )
    try:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Open"):
                break
        else:
            raise SystemExit("".join(said))  # why it did not start
        seconds = time.monotonic() - began
        spent = processor_seconds(process)
        yield process, port, {"seconds": seconds, "processor_seconds": spent}
    finally:
        process.terminate()
        process.wait(60)


def processor_seconds(process: subprocess.Popen) -> float:
    """That it has used so far: beside other work, a better measure than the clock."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(process: subprocess.Popen) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


# --- in a browser -----------------------------------------------------------------------------------


def measure_clicks(browser: Browser, url: str) -> dict[str, Any]:
    browser.open(url)
    browser.wait_for(lambda: "Click on the map" in browser.text("#status"))
    places = [
        (0.25 + 0.5 * (7 * i % CLICKS) / CLICKS, 0.2 + 0.5 * i / CLICKS) for i in range(CLICKS)
    ]
    times = [browser.run_async(CLICK_AND_WATCH, *place) for place in places]
    return {
        "click_to_movement_ms": {
            "median": statistics.median(times),
            "least": min(times),
            "most": max(times),
        },
        "console": browser.console(),
        "addresses": sorted(set(browser.requests())),
    }


def take_pictures(browser: Browser, url: str, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    browser.resize(1280, 800)
    browser.open(url)
    browser.wait_for(lambda: "Click on the map" in browser.text("#status"))
    browser.screenshot(folder / f"{name}-1-before.png")
    browser.click("#chart", 0.7, 0.3)
    browser.wait_for(lambda: "played in" in browser.text("#status"))
    browser.wait_for(lambda: browser.run("return Number(time.value) > 2"))
    browser.screenshot(folder / f"{name}-2-during.png")
    browser.run("speed.value = '4'")
    browser.wait_for(lambda: browser.text("#play") == "Replay")
    browser.screenshot(folder / f"{name}-3-after.png")
    browser.click("#camera")
    browser.screenshot(folder / f"{name}-4-overview.png")
    if browser.run("return who.options.length > 1"):
        browser.run(
            "who.selectedIndex = who.options.length - 1; "
            "who.dispatchEvent(new Event('change', {bubbles: true})); ghosts.click()"
        )
        browser.wait_for(lambda: " and " in browser.text("#status"))
        browser.wait_for(lambda: browser.text("#play") == "Replay")
        browser.screenshot(folder / f"{name}-5-both-with-ghosts.png")
    browser.resize(400, 900)
    time.sleep(0.5)
    browser.screenshot(folder / f"{name}-6-narrow.png")


# --- over the network -------------------------------------------------------------------------------


def ask(port: int, body: bytes, headers: dict[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        asked = {"Content-Type": "application/json"} | (headers or {})
        connection.request("POST", "/play", body, asked)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def wish(target: Any) -> bytes:
    players = ["model"]
    return json.dumps({"targets": [target], "players": players, "seed": 0, "noise": False}).encode()


def measure_refusals(port: int, target: list[float]) -> dict[str, int]:
    good = wish(target)
    return {
        "as the page asks": ask(port, good),
        "another Host": ask(port, good, {"Host": "evil.example"}),
        "another Origin": ask(port, good, {"Origin": "http://evil.example"}),
        "a target outside": ask(port, wish([1e6] * len(target))),
        "NaN": ask(port, wish([float("nan")] * len(target))),
        "text for a number": ask(port, wish(["0.5"] * len(target))),
        "no JSON": ask(port, b"hello"),
        "a form": ask(port, good, {"Content-Type": "text/plain"}),
        "10 MB": ask(port, b" " * 10_000_000),
    }


def measure_crowd(process: subprocess.Popen, port: int, target: list[float]) -> dict[str, Any]:
    rounds = []
    for _ in range(3):
        with ThreadPoolExecutor(CROWD) as pool:
            statuses = Counter(pool.map(lambda _: ask(port, wish(target)), range(CROWD)))
        rounds.append({"answers": dict(statuses), "memory_mib": memory_mib(process)})
    return {"crowd": rounds}


def measure(run: Path, pictures: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as profile:
        with served(run, Path(cache)) as (_, _, cold):
            pass
        with served(run, Path(cache)) as (process, port, warm):
            result: dict[str, Any] = {"cold_start": cold, "warm_start": warm}
            url = f"http://127.0.0.1:{port}/"
            with Browser(Path(profile)) as browser:
                result |= measure_clicks(browser, url)
                target = json.loads(browser.text("#data"))["played"]["target"]
                if pictures:
                    take_pictures(browser, url, pictures, run.name)
            result["memory_mib"] = memory_mib(process)
            result["refused"] = measure_refusals(port, target)
            return result | measure_crowd(process, port, target)


def summary(run: Path, result: dict[str, Any]) -> Iterator[str]:
    """In words what the numbers say."""
    click = result["click_to_movement_ms"]
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    yield f"{run} (the machine's load: {load})"
    for kind in ("cold", "warm"):
        start = result[f"{kind}_start"]
        yield (
            f"  {kind} start        {start['seconds']:.1f} s "
            f"({start['processor_seconds']:.1f} s of processor time)"
        )
    yield (
        f"  click to movement {click['median']:.0f} ms, median of {CLICKS} "
        f"(least {click['least']:.0f}, most {click['most']:.0f})"
    )
    yield f"  console           {len(result['console'])} messages"
    yield f"  asked for         {', '.join(result['addresses'])}"
    for what, status in result["refused"].items():
        yield f"  {what:17s} {status}"
    yield f"  memory            {result['memory_mib']:.0f} MiB"
    for crowd in result["crowd"]:
        answers = ", ".join(f"{n} x {status}" for status, n in sorted(crowd["answers"].items()))
        yield f"  {CROWD} at once       {answers}; then {crowd['memory_mib']:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path)
    asked = parser.parse_args()
    results = {}
    for run in asked.runs:
        results[str(run)] = measure(run, asked.pictures)
        print("\n".join(summary(run, results[str(run)])), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
