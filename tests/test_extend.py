"""Make it yours: a rule, a task and a model from outside the project go through the whole pipeline.

Each is one object in one registry. What is defined here knows the interfaces of the project alone, and no
file of the project knows it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Key
from test_cli import command, settings

import cli
import envs
import me_ls
import qdt
from dataset import Sizes, Trajectory
from envs import State, Task, TaskConfig
from machinery import machine, report, viewer
from machinery.files import read_json
from qdt import ConditionedPolicy, Statistics, TrainConfig

# --- a rule ---------------------------------------------------------------------------------------


def gently_better(new: me_ls.Character, old: me_ls.Character) -> Array:
    """Fitness minus a price for spread."""
    return new.fitness - 100.0 * new.spread > old.fitness - 100.0 * old.spread


GENTLE = me_ls.Rule(
    "ME-Gentle",
    "fitness minus a price for spread",
    "#123456",
    me_ls.characterise_by_mode,
    gently_better,
)

# --- a task ---------------------------------------------------------------------------------------


class Rooms(Task):
    """Rooms with a heater each: the descriptor is how warm they are in the end."""

    length: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    observation_size: int
    action_size: int
    dt: float
    worst_reward: float
    axes: tuple[str, ...]
    rooms: ClassVar[tuple[str, ...]] = ("kitchen", "bath")
    unit: ClassVar[str] = "°C"
    zones: ClassVar[int] = 9

    def __init__(self, config: TaskConfig):
        n = len(self.rooms)
        self.length, self.dt = config.length, 0.5
        self.low, self.high = (15.0,) * n, (25.0,) * n
        self.observation_size, self.action_size = n + 1, n
        self.worst_reward = -float(n)
        self.axes = tuple(f"{room} in the end (°C)" for room in self.rooms)

    def reset(self, key: Key[Array, ""]) -> State:
        warmth = 20.0 + jax.random.normal(key, (self.action_size,))
        return self.moment(warmth, jnp.zeros(()), jnp.zeros((), int))

    def step(self, state: State, action: Float[Array, " action"]) -> State:
        warmth = state.physics + 2.0 * action
        return self.moment(warmth, -jnp.abs(action).sum(), state.time + 1)

    def moment(self, warmth: Array, reward: Array, time: Array) -> State:
        seen = jnp.append(warmth / 10 - 2, 1.0)
        return State(warmth, seen, reward, jnp.clip(warmth, 15.0, 25.0), time)

    def scene(self) -> viewer.Scene:
        red = (0.8, 0.2, 0.2)
        boxes = [viewer.Geom("box", (0.4, 0.4, 0.4), red, i) for i in range(self.action_size)]
        return viewer.Scene([viewer.Geom("plane", (1.0, 1.0, 1.0), (0.5, 0.5, 0.5)), *boxes])

    def pose(self, state: State) -> tuple[Float[Array, "bodies 3"], Float[Array, "bodies 4"]]:
        n = self.action_size
        place = jnp.stack([jnp.arange(n), jnp.zeros(n), state.physics / 10], axis=1)
        return place, jnp.tile(jnp.array([1.0, 0.0, 0.0, 0.0]), (n, 1))


class Room(Rooms):
    """A single one: a space of one dimension."""

    rooms: ClassVar[tuple[str, ...]] = ("cellar",)


# --- a model --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearConfig(TrainConfig):
    model: str = "linear"
    ridge: float = 1e-3  # price of large weights


class Linear(ConditionedPolicy):
    """Behaviour cloning with one matrix: target and observation in, action out."""

    weight: Float[Array, "in out"]
    statistics: Statistics
    ridge: float = eqx.field(static=True)

    def __init__(
        self, config: LinearConfig, sizes: Sizes, statistics: Statistics, *, key: Key[Array, ""]
    ):
        inputs = sizes.descriptor + sizes.observation + 1
        self.weight = 0.1 * jax.random.normal(key, (inputs, sizes.action))
        self.statistics, self.ridge = statistics, config.ridge

    def __call__(
        self, target: Float[Array, " d"], observation: Float[Array, " o"]
    ) -> Float[Array, " a"]:
        seen = self.statistics.descriptor(target), self.statistics.observation(observation)
        return jnp.tanh(jnp.append(jnp.concatenate(seen), 1.0) @ self.weight)

    def error(
        self, trajectory: Trajectory, *, key: Key[Array, ""] | None = None
    ) -> Float[Array, ""]:
        predicted = jax.vmap(self, (None, 0))(trajectory.descriptor, trajectory.observations)
        wrong = jnp.mean((predicted - trajectory.actions) ** 2)
        return wrong + self.ridge * jnp.mean(self.weight**2)

    def policy(self, target: Float[Array, " d"]) -> "Towards":
        return Towards(self, target)


class Towards(eqx.Module):
    model: Linear
    target: Float[Array, " d"]

    def start(self) -> None:
        return None

    def act(self, memory: None, state: State) -> tuple[Float[Array, " a"], None]:
        return self.model(self.target, state.observation), memory


# --- through the pipeline -------------------------------------------------------------------------

SEARCH = [
    "search.iterations=6", "search.cells=16", "search.batch=16", "search.episodes=3", "search.hidden=8",
    "dataset.trajectories=64", "dataset.zones=8", "dataset.selection_episodes=2",
    "train.epochs=2", "train.evaluate_every=1", "train.goal_episodes=1",
]  # fmt: skip
SMALL_QDT = ["train.layers=1", "train.heads=1", "train.width=8"]
EXPERIMENTS = ("accuracy", "reassess", "reproducibility")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For one test: afterwards nobody knows them any more."""
    monkeypatch.setattr(machine, "_current", machine.Machine())
    monkeypatch.setitem(me_ls.RULES, "me-gentle", GENTLE)
    monkeypatch.setitem(envs.TASKS, "rooms", Rooms)
    monkeypatch.setitem(envs.TASKS, "room", Room)
    monkeypatch.setitem(qdt.MODELS, "linear", qdt.Model("Linear", LinearConfig, Linear))
    yield
    envs.make_task.cache_clear()


def whole_pipeline(out: Path, *options: str, target: tuple[float, ...] = (0.0, 0.0)) -> Path:
    """Every stage as a command; returns the run."""
    run, page = out / "run", out / "page.html"
    assert command("search", "--preset", "tiny", "--out", run, *settings(SEARCH), *options) == 0
    assert command("dataset", run) == 0
    assert command("train", run) == 0
    for experiment in EXPERIMENTS:
        assert command("evaluate", experiment, run) == 0
    assert command("act", run, "--target", *target, "--episodes", 2, "--html", page) == 0
    assert "<canvas" in page.read_text()
    assert command("show", run) == 0
    assert command("report", run, "--out", out / "report") == 0
    return run


def drawn(run: Path) -> dict[str, Any]:
    """The figures of its report."""
    ((task, found),) = cli.found_runs([run]).items()
    return {name: figure for name, (_, figure) in report.figures(task, found).items()}


def colours(figure: Any) -> set[str]:
    return {line.get_color() for axes in figure.axes for line in axes.get_lines()}


def test_a_rule_of_ones_own(tmp_path: Path) -> None:
    small = settings([*SMALL_QDT, "task.length=6"])
    run = whole_pipeline(tmp_path, "--algo", "me-gentle", *small)
    page = (tmp_path / "report" / "report.html").read_text()
    assert ">ME-Gentle</td>" in page and ">QDT(ME-Gentle)</td>" in page
    assert "ME-Gentle, seed 0" in page
    figures = drawn(run)
    assert colours(figures["search"]) == colours(figures["training"]) == {"#123456"}
    assert figures["coverage"].axes[0].get_title().startswith("ME-Gentle, seed 0\n")


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    small = settings([*SMALL_QDT, "task.length=6"])
    run = whole_pipeline(tmp_path, "--task", "rooms", *small, target=(18.0, 22.0))
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<h2>rooms</h2>" in page and "Accuracy on rooms (table 1)" in page
    figures = drawn(run)
    *panels, bar = figures["accuracy"].axes
    assert "kitchen in the end (°C)" in {panel.get_xlabel() for panel in panels}
    assert {panel.get_ylabel() for panel in panels} == {"bath in the end (°C)"}
    assert bar.get_ylabel() == "distance to the goal (°C),\nup to the 98th percentile"
    assert len(read_json(run / "evaluation" / "accuracy.json")["result"]["qdt"]["goals"]) == 9
    assert (run / "search" / "fitness.png").exists()


def test_a_task_of_one_dimension(tmp_path: Path) -> None:
    """Nothing to draw on a map, everything else as ever."""
    small = settings([*SMALL_QDT, "task.length=6"])
    run = whole_pipeline(tmp_path, "--task", "room", *small, target=(18.0,))
    figures = drawn(run)
    assert set(figures) == {"search", "budget", "training", "seeds"}
    assert figures["training"].axes[0].get_title() == "distance to the goal (°C)"
    assert command("dataset", run, "--show") == 0


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_model_of_ones_own(tmp_path: Path, optimiser: str) -> None:
    """On a task where it suffices: it comes nearer to its goals than chance."""
    own = ["train.model=linear", "train.ridge=0.01", f"train.optimiser={optimiser}"]
    fast = ["train.learning_rate=0.05", "train.batch_size=8", "train.epochs=20", "task.length=6"]
    run = whole_pipeline(tmp_path, "--task", "rooms", *settings([*own, *fast]), target=(18.0, 22.0))
    assert (run / "linear" / "model.safetensors").exists()
    opened = cli.open_run(run)
    assert isinstance(opened.model(), Linear) and opened.plan.train.ridge == 0.01
    page = (tmp_path / "report" / "report.html").read_text()
    assert ">Linear(ME-LS)</td>" in page and "QDT" not in page.replace("QDT training", "")
    assert colours(drawn(run)["training"]) == {me_ls.RULES["me-ls"].colour}
    result = read_json(run / "evaluation" / "accuracy.json")["result"]["linear"]
    goals = np.array(result["goals"])
    chance = np.linalg.norm(goals[:, None] - goals[None], axis=-1).mean()
    assert result["mean_distance"] < 0.7 * chance


def test_two_kinds_of_models_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A named variant of another kind stands beside the run's own, and is known by its own name."""
    run = tmp_path / "run"
    small = settings([*SEARCH, *SMALL_QDT, "task.length=6", "train.epochs=1"])
    assert command("search", "--preset", "tiny", "--task", "rooms", "--out", run, *small) == 0
    assert command("dataset", run) == 0
    assert command("train", run) == 0
    assert command("train", run, "--set", "train.model=linear") == 0
    assert command("train", run, "--name", "plain", "--set", "train.model=linear") == 0
    opened = cli.open_run(run)
    assert opened.plan.train.model == "qdt" and isinstance(opened.model(), qdt.QDT)
    assert list(opened.model_paths()) == ["qdt", "linear", "linear-plain"]
    assert command("evaluate", "accuracy", run) == 0
    assert command("report", run, "--out", tmp_path / "report") == 0
    table = (tmp_path / "report" / "accuracy-rooms.md").read_text()
    assert "| QDT(ME-LS) |" in table and "| Linear(ME-LS, plain) |" in table
    assert "| Linear(ME-LS) |" in table

    monkeypatch.delitem(qdt.MODELS, "linear")  # somebody else's machine
    assert command("report", run, "--out", tmp_path / "report") == 0
    capsys.readouterr()
    assert command("evaluate", "accuracy", run) == 1
    assert "unknown model 'linear'; there are qdt" in capsys.readouterr().err
    monkeypatch.delitem(envs.TASKS, "rooms")
    envs.make_task.cache_clear()
    assert command("show", run) == 1
    assert "unknown task 'rooms'" in capsys.readouterr().err


def test_a_rule_that_needs_two_episodes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(me_ls.RULES, "me-gentle", replace(GENTLE, least_episodes=2))
    one = settings([*SEARCH, "search.episodes=1"])
    assert (
        command("search", "--preset", "tiny", "--algo", "me-gentle", "--out", tmp_path, *one) == 1
    )
    assert "me-gentle compares episodes: it needs at least 2" in capsys.readouterr().err
