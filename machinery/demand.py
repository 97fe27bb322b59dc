"""Behaviour on demand: what `qdt act` tells and writes, and what `qdt serve` serves.

It stands between the method, which plays, and those who show it: the viewer's page, the pictures and the
server. Who plays is handed in as a function, so that nothing here knows the method.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from machinery import pictures, server, viewer
from machinery.driver import tell
from machinery.files import UserError, read_json, write_safely
from machinery.runs import Run
from machinery.viewer import Accuracy, Playback, Scene

PARTS = 25  # of an episode that is served; in each of them another target may be asked for


@dataclass(frozen=True)
class Setting:
    """What a task looks like, for the page and for pictures."""

    name: str
    scene: Scene
    low: Sequence[float]
    high: Sequence[float]
    is_place: bool  # whether a descriptor is where the robot is on the ground
    dt: float

    @property
    def kind(self) -> Literal["omni", "uni"]:
        return "omni" if self.is_place else "uni"


def parse_target(text: str, low: Sequence[float], high: Sequence[float]) -> list[float]:
    """A target as it is typed: one number per axis, inside the space."""
    try:
        target = [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"a target is numbers such as 0.4 0.7, not {text!r}.") from None
    if len(target) != len(low):
        raise UserError(f"a target of this task has {len(low)} numbers, not {len(target)}.")
    for number, least, most in zip(target, low, high, strict=True):
        if not least <= number <= most:
            raise UserError(
                f"{number:g} lies outside the space, which goes from {least:g} to {most:g}."
            )
    return target


# --- what `act` tells and writes --------------------------------------------------------------------


def told(
    targets: Sequence[Sequence[float]],
    reached: Float[np.ndarray, "targets episodes d"],
    fitness: Float[np.ndarray, "targets episodes"],
    spread: Float[np.ndarray, " targets"],
) -> Iterator[str]:
    """A line for every episode, and their mean for every target."""
    for i, target in enumerate(targets):
        far = np.linalg.norm(reached[i] - np.array(target), axis=1)
        if len(targets) > 1:
            yield "target " + " ".join(f"{x:g}" for x in target)
        for k, (end, distance, value) in enumerate(zip(reached[i], far, fitness[i], strict=True)):
            place = " ".join(f"{x:.3f}" for x in end)
            yield f"start {k + 1}: reached {place}, distance {distance:.3f}, fitness {value:.1f}"
        yield f"mean distance {far.mean():.3f}, spread {spread[i]:.3f}"


@dataclass(frozen=True)
class Files:
    """What `act` is asked to write beside what it prints."""

    html: Path | None = None
    gif: Path | None = None
    video: Path | None = None
    seconds: float | None = None  # of an animation or a video; None: the whole episode

    def check(self, targets: Sequence[Sequence[float]]) -> None:
        """Before anything is played."""
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UserError(f"an animation takes some seconds, more than 0, not {self.seconds:g}.")
        if self.html is not None and len(targets) > 1:
            raise UserError("a page shows one target; --gif and --video show several.")
        if self.video is not None:
            pictures.require_ffmpeg()

    def write(
        self,
        setting: Setting,
        films: Sequence[Sequence[Playback]],
        targets: Sequence[Sequence[float]],
    ) -> None:
        """Of the starts that were filmed for each target."""
        with told_if_diverged():
            if self.html is not None:
                text = make_page(setting, films[0], targets[0])
                with write_safely(self.html) as file:
                    file.write(text.encode())
                print(f"{self.html} plays the episodes.")
            for path, write in (
                (self.gif, pictures.write_gif),
                (self.video, pictures.write_video),
            ):
                if path is not None:
                    firsts, bounds = [film[0] for film in films], (setting.low, setting.high)
                    if self.seconds is not None:
                        steps = 1 + math.ceil(self.seconds / setting.dt)
                        firsts = [viewer.beginning(playback, steps) for playback in firsts]
                    shown = (setting.scene, firsts, targets, bounds, setting.kind, setting.dt)
                    write(path, pictures.Animation(*shown))
                    print(f"{path} plays the first start towards each target.")


def make_page(
    setting: Setting,
    playbacks: Sequence[Playback],
    target: Sequence[float],
    live: viewer.Live | None = None,
) -> str:
    title, bounds = f"{setting.name}: behaviour on demand", (setting.low, setting.high)
    kind, dt = setting.kind, setting.dt
    return viewer.page(title, setting.scene, playbacks, target, bounds, kind, dt, live=live)


@contextmanager
def told_if_diverged() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"it cannot be shown. {error}") from None


# --- what `serve` serves ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """Who can play before the page. Whatever JAX computes for it, one thread asks for."""

    setting: Setting
    titles: dict[str, str]  # by the names they are asked for by; the first one opens the page
    noise: float  # on the actions, if it is switched on
    # Of who plays, the targets of all parts of the episode, the seed of the starts, and the noise.
    film: Callable[[str, Sequence[Sequence[float]], int, float], list[Playback]]
    accuracy: Accuracy | None = None

    def play(self, wish: server.Wish) -> dict[str, Any]:
        noise = self.noise if wish.noise else 0.0
        *before, last = wish.targets
        targets = [*before, *[last] * (PARTS - len(before))]  # the program has all parts
        films = {who: self.film(who, targets, wish.seed, noise) for who in wish.players}
        with told_if_diverged():
            return viewer.pack(self.setting.scene, films, last)


def accuracy_map(run: Run) -> Accuracy | None:
    """How near to every goal the model and the repertoire of a run come, if that was evaluated."""
    if not run.is_evaluated("accuracy"):
        return None
    result = read_json(run.result_path("accuracy"))["result"]
    players = {"model": run.plan.train.model, "repertoire": "repertoire"}
    own = {name: result[key] for name, key in players.items() if key in result}
    distance = {name: np.array(found["distance"], float) for name, found in own.items()}
    return Accuracy(np.array(own["model"]["goals"]), distance)


def serve(cast: Cast, host: str, port: int, seed: int) -> None:
    """Everybody rehearses once, which compiles; then the page is served until Ctrl-C."""
    setting = cast.setting
    # Not the middle, where a robot that goes from place to place would stand still.
    welcome = [
        low + 0.7 * (high - low) for low, high in zip(setting.low, setting.high, strict=True)
    ]
    films: dict[str, list[Playback]] = {}
    with server.reserve(host, port) as reserved, server.Worker() as worker:
        for who, title in cast.titles.items():
            tell(f"{title} gets ready to play; this compiles, once.")
            began = time.monotonic()
            rehearsal = partial(cast.film, who, [welcome] * PARTS, seed, cast.noise)
            films[who] = worker.submit(rehearsal).result()
            tell(f"Ready after {time.monotonic() - began:.1f} s.")
        opening = next(iter(films.values()))
        with told_if_diverged():
            live = viewer.Live(cast.titles, seed, cast.noise, PARTS, cast.accuracy)
            page = make_page(setting, opening, welcome, live)
        space = server.Space(setting.low, setting.high, list(cast.titles), PARTS)
        policy, own = viewer.security_policy(live=True), server.own_names(host, port)
        app = server.make_app(page, policy, space, cast.play, worker, own)
        running = server.make_http_server(app, reserved)
        shown = f"[{host}]" if ":" in host else host
        tell(f"Open http://{shown}:{port}/ in a browser. Ctrl-C ends it.")
        running.serve_forever()
    tell("Ended.")
