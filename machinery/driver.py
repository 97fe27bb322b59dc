"""The driver: what surrounds every search and every training.

An algorithm is a value with `init(key) -> state` and `step(state, key) -> (state, metrics)`, pure functions
that know nothing of directories, signals or time. `drive` takes them through all steps and owns the rest:
the last checkpoint is restored, metrics are logged, progress is shown, checkpoints are written, and Ctrl-C
ends the work after the step that is being done. Step i draws from `fold_in(key, i)` alone, so that a run
that was killed and resumed ends with exactly the state of one that was not.
"""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Key

from machinery import machine
from machinery.files import UserError, is_writer
from machinery.machine import replicate
from machinery.runs import Stage


@runtime_checkable
class Algorithm(Protocol):
    """Something that goes on step by step. Metrics are numbers and arrays; none: not logged.

    `advance`, if there is one, is a step that may use the state up: for states too large to copy.
    """

    def init(self, key: Key[Array, ""]) -> Any: ...

    def step(self, state: Any, key: Key[Array, ""]) -> tuple[Any, dict[str, Any]]: ...


def drive(
    algorithm: Algorithm,
    stage: Stage,
    *,
    init: Key[Array, ""],
    steps: Key[Array, ""],
    total: int,
    title: str,
    work: tuple[str, int],
    show: tuple[str, ...],
    check: Callable[[dict[str, Any]], None] = lambda row: None,
    examine: Callable[[int, Any], dict[str, Any]] = lambda done, state: {},
) -> Any:
    """All `total` steps, from the last checkpoint if there is one; returns the last state.

    `work` is what a step accomplishes, such as ("steps", 320000): it is logged as a total and as a rate.
    `show` names the metrics for the progress line; `check` may refuse to go on; `examine` adds to the
    log what it finds in the state after so many steps, and draws no randomness of the algorithm's.
    """
    state = algorithm.init(init)
    restored = stage.restore(state)
    start, state = restored if restored else (0, state)
    state = replicate(state)
    stage.rewind_metrics(before=start)
    show_line(f"{title:<11} getting ready; the first time on a machine, programs are compiled")
    progress = Progress(title, total)
    saved_at = logged_at = time.monotonic()
    logged, shown = start, {}

    advance = getattr(algorithm, "advance", algorithm.step)
    with finish_step_on_signal():
        for i in range(start, total):
            state, metrics = advance(state, jax.random.fold_in(steps, i))
            done = i + 1
            if metrics:
                row = {name: _plain(value) for name, value in metrics.items()}
                check(row)
                unit, amount = work
                row |= {"iteration": i, unit: done * amount}
                taken = time.monotonic() - logged_at
                row[f"{unit}_per_second"] = (done - logged) * amount / taken
                row |= examine(done, state)
                stage.log(row)
                logged, logged_at = done, time.monotonic()
                shown |= {name: row[name] for name in show if row.get(name) is not None}
            if progress.due(done):
                progress.update(done, **shown)
            stopping = stop_requested()
            overdue = time.monotonic() - saved_at > machine.settings().checkpoint_seconds
            if done == total or stopping or overdue:
                stage.save_checkpoint(done, state)
                saved_at = time.monotonic()
            if stopping:
                progress.close()
                raise Stopped(f"stopped after step {done} of {total}; the same command continues.")
    progress.close()
    return state


def _plain(value: Any) -> Any:
    return None if value is None else np.asarray(value).tolist()


# --- signals ----------------------------------------------------------------------------------------


class Stopped(UserError):
    """The user asked for the end; everything done so far is on disk."""


_signals_seen: list[int] = []


@contextlib.contextmanager
def finish_step_on_signal() -> Iterator[None]:
    """Ctrl-C and SIGTERM no longer interrupt: they are noted, and `stop_requested` tells."""
    _signals_seen.clear()
    previous = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    for number in previous:
        signal.signal(number, lambda seen, frame: _signals_seen.append(seen))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_requested() -> bool:
    """Whether a signal was seen, by any of several processes: all of them stop at the same place."""
    seen = np.array(bool(_signals_seen))
    return bool(seen if jax.process_count() == 1 else multihost_utils.process_allgather(seen).any())


# --- progress ---------------------------------------------------------------------------------------


class Progress:
    """One line that keeps moving: what is done, how it goes, and the time left.

    The first line comes after programs were compiled: how fast it goes is measured from there.
    """

    def __init__(self, title: str, total: int):
        self.title, self.total = title, total
        self.started = time.monotonic()
        self.first: tuple[int, float] | None = None  # what was done by the first line, and when
        self.last_shown = -math.inf

    def due(self, done: int) -> bool:
        """Whether it is time for a new line: five times a second on a terminal, rarely in a log."""
        waited = time.monotonic() - self.last_shown
        return waited > (0.2 if sys.stderr.isatty() else 30) or done == self.total

    def update(self, done: int, **values: Any) -> None:
        now = self.last_shown = time.monotonic()
        self.first = self.first or (done, now)
        newly, seconds = done - self.first[0], now - self.first[1]
        filled = int(16 * done / max(self.total, 1))
        shown = "  ".join(f"{name} {_number_text(v)}" for name, v in values.items())
        line = f"{self.title:<11} {'█' * filled}{'·' * (16 - filled)} {done}/{self.total}  {shown}"
        line += f"  {time_text(now - self.started)}"
        if newly:
            line += f" + {time_text((self.total - done) * seconds / newly)} left"
        show_line(line)

    def close(self) -> None:
        if sys.stderr.isatty() and is_writer():
            print(file=sys.stderr)


def show_line(line: str) -> None:
    """In place of the line before on a terminal, below it in a log."""
    live = sys.stderr.isatty()
    if is_writer():
        end = "" if live else "\n"
        print(f"\r\x1b[K{line}" if live else line, end=end, file=sys.stderr, flush=True)


def _number_text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def time_text(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def tell(text: str) -> None:
    if is_writer():
        print(text, flush=True)
