"""A real Chromium, driven through chromedriver's own protocol: as much of it as the tests need.

https://www.w3.org/TR/webdriver2/ is HTTP with JSON, which the standard library speaks. Nothing here knows
the project.
"""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # what the standard calls an element in JSON


class Browser:
    """A browser with a profile of its own in `folder`; ends with the block."""

    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 800)):
        assert CHROMIUM and CHROMEDRIVER
        self._driver = subprocess.Popen(
            [CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._driver.stdout is not None
        started = next(line for line in self._driver.stdout if "successfully on port" in line)
        port = started.split("on port")[1].strip(" .\n")
        self._url = f"http://127.0.0.1:{port}/session"
        options = {
            "binary": CHROMIUM,
            "args": [
                *FLAGS.split(),
                f"--user-data-dir={folder / 'profile'}",
                f"--window-size={size[0]},{size[1]}",
            ],
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        try:
            made = self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        except Exception:
            self._driver.terminate()
            raise
        self._url += f"/{made['sessionId']}"
        self.open("about:blank")
        self.requests()  # of a new tab's own page

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def _send(self, method: str, path: str, content: Any = None) -> Any:
        body = None if method != "POST" else json.dumps(content or {}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self._url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the script returns."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str, *arguments: Any) -> Any:
        """What the script hands to the function that is its last argument."""
        return self._send("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """With the mouse, at these shares of the element's width and height from its top left."""
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        box = self.run(
            "const e = arguments[0]; e.scrollIntoView({block: 'nearest'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
            {ELEMENT: found[ELEMENT]},
        )
        where = {"x": round(box[0] + x * box[2]), "y": round(box[1] + y * box[3])}
        steps = [
            {"type": "pointerMove", "duration": 0, "origin": "viewport", **where},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        mouse = {"type": "pointer", "id": "mouse", "actions": steps}
        self._send("POST", "/actions", {"actions": [mouse]})

    def wait_for(self, what: Callable[[], Any], seconds: float = 60.0) -> Any:
        """The first answer of `what` that is true."""
        until = time.monotonic() + seconds
        while not (answer := what()):
            assert time.monotonic() < until, "it did not happen in time"
            time.sleep(0.02)
        return answer

    def resize(self, width: int, height: int) -> None:
        self._send("POST", "/window/rect", {"width": width, "height": height})

    def new_window(self) -> str:
        return self._send("POST", "/window/new", {"type": "window"})["handle"]

    def window(self) -> str:
        return self._send("GET", "/window")

    def close_window(self) -> None:
        self._send("DELETE", "/window")

    def switch_to(self, window: str) -> None:
        self._send("POST", "/window", {"handle": window})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def console(self) -> list[str]:
        """What was said since the last time."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last time."""
        log = self._send("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in log]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]
