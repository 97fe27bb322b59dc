"""The driver takes any algorithm through its steps: exactly, whatever interrupts it."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_files import same

from machinery import driver, machine
from machinery.driver import Progress, Stopped, drive
from machinery.files import UserError
from machinery.runs import Stage, read_metrics


class Walk:
    """An algorithm: a random walk that measures itself in every other step."""

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        return {"place": jax.random.normal(key, (3,)), "steps": jnp.zeros((), jnp.int32)}

    def step(self, state: dict[str, jax.Array], key: jax.Array) -> tuple[Any, dict[str, Any]]:
        place = state["place"] + jax.random.normal(key, (3,))
        steps = state["steps"] + 1
        metrics = {"far": jnp.linalg.norm(place), "place": place, "nothing": None}
        return {"place": place, "steps": steps}, metrics if steps % 2 == 0 else {}


class Disturbed(Walk):
    """The same, but something happens in one of the steps."""

    def __init__(self, number: int, disturb: Any):
        self.number, self.disturb = number, disturb

    def step(self, state: dict[str, jax.Array], key: jax.Array) -> tuple[Any, dict[str, Any]]:
        if int(state["steps"]) == self.number:
            self.disturb()
        return super().step(state, key)


def walk(directory: Path, algorithm: Walk | None = None, total: int = 9, **options: Any) -> Any:
    return drive(
        algorithm or Walk(),
        Stage(directory, {}),
        init=jax.random.key(0),
        steps=jax.random.key(1),
        total=total,
        title="walk",
        work=("metres", 5),
        show=("far", "metres"),
        **options,
    )


def by_hand(total: int = 9) -> list[dict[str, jax.Array]]:
    """All states of the walk, without a driver."""
    states = [Walk().init(jax.random.key(0))]
    for i in range(total):
        states.append(Walk().step(states[-1], jax.random.fold_in(jax.random.key(1), i))[0])
    return states


def logged(directory: Path) -> list[dict[str, Any]]:
    """The rows, without what depends on the clock."""
    rows = read_metrics(directory / "metrics.jsonl")
    assert all(row.pop("metres_per_second") > 0 for row in rows)
    return rows


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def crash() -> None:
    raise RuntimeError("a crash")


@pytest.fixture
def careful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every step."""
    monkeypatch.setattr(machine, "_current", machine.Machine(checkpoint_seconds=0.0))


def test_driving_is_stepping_with_the_key_of_each_step(tmp_path: Path) -> None:
    assert same(jax.device_get(walk(tmp_path)), jax.device_get(by_hand()[-1]))


def test_rows_are_logged_where_there_are_metrics(tmp_path: Path) -> None:
    walk(tmp_path)
    rows, states = logged(tmp_path), by_hand()
    assert [row["iteration"] for row in rows] == [1, 3, 5, 7]
    assert [row["metres"] for row in rows] == [10, 20, 30, 40]
    for row in rows:
        place = states[row["iteration"] + 1]["place"]
        np.testing.assert_array_equal(np.float32(row["place"]), place)
        assert row["far"] == pytest.approx(float(jnp.linalg.norm(place)))
        assert row["nothing"] is None


@pytest.mark.parametrize("number", range(9))
def test_a_signal_ends_the_work_after_its_step_and_the_same_call_goes_on(
    tmp_path: Path, number: int
) -> None:
    with pytest.raises(Stopped, match=f"stopped after step {number + 1} of 9; the same command"):
        walk(tmp_path / "stopped", Disturbed(number, interrupt))
    again, whole = walk(tmp_path / "stopped"), walk(tmp_path / "whole")
    assert same(jax.device_get(again), jax.device_get(whole))
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")


@pytest.mark.parametrize("number", [0, 1, 4, 8])
@pytest.mark.usefixtures("careful")
def test_after_a_crash_the_last_checkpoint_goes_on_exactly(tmp_path: Path, number: int) -> None:
    with pytest.raises(RuntimeError, match="a crash"):
        walk(tmp_path / "crashed", Disturbed(number, crash))
    seen: list[int] = []
    again = walk(tmp_path / "crashed", Disturbed(number, lambda: seen.append(number)))
    assert seen == [number]  # it was the next step to be done
    whole = walk(tmp_path / "whole")
    assert same(jax.device_get(again), jax.device_get(whole))
    assert logged(tmp_path / "crashed") == logged(tmp_path / "whole")


def test_what_was_logged_beyond_the_last_checkpoint_is_logged_once(tmp_path: Path) -> None:
    """Without a checkpoint in between, the work begins anew, and so do its metrics."""
    with pytest.raises(RuntimeError, match="a crash"):
        walk(tmp_path / "crashed", Disturbed(7, crash))
    assert len(read_metrics(tmp_path / "crashed" / "metrics.jsonl")) == 3
    walk(tmp_path / "crashed")
    walk(tmp_path / "whole")
    assert logged(tmp_path / "crashed") == logged(tmp_path / "whole")


def test_what_is_finished_is_not_done_again(tmp_path: Path) -> None:
    whole = walk(tmp_path)
    rows = (tmp_path / "metrics.jsonl").read_bytes()
    again = walk(tmp_path, Disturbed(9, crash))
    assert same(jax.device_get(again), jax.device_get(whole))
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows


def test_more_steps_go_on_from_where_fewer_ended(tmp_path: Path) -> None:
    walk(tmp_path / "a", total=5)
    further, whole = walk(tmp_path / "a"), walk(tmp_path / "b")
    assert same(jax.device_get(further), jax.device_get(whole))


def test_a_check_sees_every_row_and_may_refuse_to_go_on(tmp_path: Path) -> None:
    checked: list[dict[str, Any]] = []

    def check(row: dict[str, Any]) -> None:
        checked.append(row)
        if len(checked) == 3:
            raise UserError("far enough.")

    with pytest.raises(UserError, match="far enough"):
        walk(tmp_path, check=check)
    assert [type(row["far"]) for row in checked] == [float] * 3
    assert len(logged(tmp_path)) == 2  # what is refused is not kept


def test_what_is_found_in_a_state_stands_in_the_row_of_its_step(tmp_path: Path) -> None:
    def examine(done: int, state: dict[str, jax.Array]) -> dict[str, Any]:
        return {"seen": float(state["place"][0])} if done == 4 else {}

    walk(tmp_path, examine=examine)
    seen = {row["iteration"]: row["seen"] for row in logged(tmp_path) if "seen" in row}
    assert seen == {3: float(by_hand(4)[-1]["place"][0])}


def test_another_state_than_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    class Wider(Walk):
        def init(self, key: jax.Array) -> dict[str, jax.Array]:
            return {"place": jnp.zeros(4), "steps": jnp.zeros((), jnp.int32)}

    walk(tmp_path, total=4)
    with pytest.raises(UserError, match=r"no checkpoint .* can be read.*needed is float32\[4\]"):
        walk(tmp_path, Wider())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_does_not_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with driver.finish_step_on_signal():
        assert not driver.stop_requested()
        os.kill(os.getpid(), number)
        assert driver.stop_requested()
    assert signal.getsignal(number) is before


def test_progress_is_one_line_with_what_is_done_and_how_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walk(tmp_path)
    before, first, *_, last = capsys.readouterr().err.splitlines()
    assert before.startswith("walk ") and "getting ready" in before
    assert first.startswith("walk ") and "1/9" in first
    assert "9/9" in last and "metres 40" in last and "far " in last
    assert last.endswith("left")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0:00"), (59.6, "1:00"), (61.0, "1:01"), (3600.0, "1:00:00")]
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert driver.time_text(seconds) == text


def test_the_time_left_leaves_out_what_came_before_the_first_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that an earlier process did, and the compilation that the first step waits for."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress("late", total=100)
    now = 60.0
    progress.update(90)
    assert capsys.readouterr().err.rstrip().endswith("1:00")
    now = 70.0
    progress.update(95, loss=0.12345678, steps=12_345)
    line = capsys.readouterr().err
    assert "loss 0.1235" in line and "steps 12,345" in line
    assert "1:10 + 0:10 left" in line
