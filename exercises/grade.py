"""Grades the exercises: says of each what is right, wrong or missing.

    make grade                              all of yours
    make grade EXERCISE="spread dispersion"   some of them
    python exercises/grade.py --solutions   the solutions instead

A check is a function of the module that it grades. What it raises is what the reader is told: `Wrong`
with a sentence, anything else as the error that it is. An exercise that is not written yet raises
NotImplementedError with a first hint.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import dataset
import evaluate
import me_ls
import pgame_ls
import qdt
import uncertain
from envs import Task, TaskConfig, make_task, rollout
from machinery import attention, machine
from machinery.runs import Stage

HERE = Path(__file__).parent
POINT = TaskConfig("point-omni", length=30, reach=1.5)


class Wrong(Exception):
    """What a check has to say about an answer."""


def require(holds: Any, sentence: str) -> None:
    if not bool(holds):
        raise Wrong(sentence)


def require_close(found: Any, right: Any, sentence: str, tolerance: float = 1e-4) -> None:
    require(found is not None, f"{sentence}: you return nothing. Is a `return` missing?")
    found, right = np.asarray(found, float), np.asarray(right, float)
    require(
        found.shape == right.shape,
        f"{sentence}: the shape is {found.shape}, it should be {right.shape}.",
    )
    far = np.abs(found - right).max(initial=0)
    worst = np.unravel_index(np.abs(found - right).argmax(), right.shape) if right.size else ()
    at = f" at index {', '.join(map(str, worst))}" if worst else ""
    require(
        far <= tolerance,  # also refuses what is not a number
        f"{sentence}: {found[worst]:.4g}{at} should be {right[worst]:.4g}.",
    )


# --- search -----------------------------------------------------------------------------------------


def check_spread(answer: ModuleType) -> None:
    require_close(answer.spread([[0, 0], [0.3, 0], [0, 0.4]]), 0.4, "spread of the example")
    require_close(answer.spread([[1.0, 2.0]]), 0.0, "spread of a single episode")
    for seed in range(3):
        cloud = np.random.default_rng(seed).normal(size=(7, 3))
        right = me_ls.spread(jnp.asarray(cloud))
        require_close(answer.spread(cloud.tolist()), right, "spread of seven episodes")


def check_dispersion(answer: ModuleType) -> None:
    require_close(answer.dispersion(jnp.array([[0.0], [2.0]])), 1.0, "dispersion of 0 and 2")
    cloud = np.random.default_rng(0).normal(size=(9, 2)) + 5
    right = np.linalg.norm(cloud - cloud.mean(axis=0), axis=1).mean()
    require_close(answer.dispersion(jnp.asarray(cloud)), right, "dispersion of nine episodes")
    a, b = (jnp.asarray(cloud, float) for cloud in answer.disagreement())
    require(me_ls.spread(a) < me_ls.spread(b), "disagreement: a must have the lower spread.")
    lower = answer.dispersion(b) < answer.dispersion(a)
    require(lower, "disagreement: b must have the lower dispersion.")


def check_geometric_median(answer: ModuleType) -> None:
    line = jnp.array([[0.0, 0.0], [1.0, 0.0], [10.0, 0.0]])
    require_close(
        answer.geometric_median(line), [1, 0], "of three points on a line, the middle one", 1e-2
    )
    same = jnp.ones((4, 2))
    require_close(answer.geometric_median(same), [1, 1], "of equal points, that point")
    for seed in range(3):
        points = jax.random.normal(jax.random.key(seed), (10, 2))
        mine, right = answer.geometric_median(points), me_ls.geometric_median(points)
        total = [float(jnp.linalg.norm(points - m, axis=1).sum()) for m in (mine, right)]
        require(
            total[0] <= total[1] + 1e-3,
            f"a point with a total distance of {total[1]:.4f} exists, yours has {total[0]:.4f}.",
        )


def check_soft_criterion(answer: ModuleType) -> None:
    def character(fitness: float, spread: float) -> me_ls.Character:
        return me_ls.Character(jnp.array(fitness), jnp.zeros(2), jnp.array(spread))

    wild, lazy = character(-8.0, 0.5), character(-12.0, 0.1)
    cheap, dear = answer.soft_criterion(1.0), answer.soft_criterion(100.0)
    require(
        cheap(wild, lazy),
        "with a price of 1, (F, ψ) = (−8, 0.5) must replace (−12, 0.1): −8.5 > −12.1.",
    )
    require(dear(lazy, wild), "with a price of 100, (−12, 0.1) must replace (−8, 0.5): −22 > −58.")
    require(not cheap(wild, wild), "an equal must not replace: the comparison is strict.")
    require(answer.soft_criterion(0.0)(wild, lazy), "with a price of 0, fitness alone counts.")


def check_insertion(answer: ModuleType) -> None:
    for seed in range(3):
        draw = np.random.default_rng(seed)
        cells = draw.integers(0, 4, 40)
        fitness, psi = draw.integers(-4, 0, 40).astype(float), draw.integers(1, 5, 40) / 4
        offers = [(int(c), float(f), float(s)) for c, f, s in zip(cells, fitness, psi, strict=True)]
        inside, accepted = answer.insert(offers)
        right, count = _inserted(cells, fitness, psi)
        require(
            set(inside) == set(right),
            f"the occupied cells are {sorted(inside)}, they should be {sorted(right)}.",
        )
        for cell, (number, *_) in inside.items():
            require(
                number == right[cell],
                f"cell {cell} should hold policy {right[cell]} of the batch, not {number}.",
            )
        require(accepted == count, f"{count} policies are accepted, you count {accepted}.")


def _inserted(
    cells: np.ndarray, fitness: np.ndarray, psi: np.ndarray
) -> tuple[dict[int, int], int]:
    """What the project does with a batch; a policy carries its number as a weight."""
    task, centroids = (
        make_task(POINT),
        jnp.array([[-1.0, 0.0], [-0.5, 0.0], [0.5, 0.0], [1.0, 0.0]]),
    )
    policies = me_ls.random_policies(task, (4,), jax.random.split(jax.random.key(0), len(cells)))
    numbers = jnp.arange(len(cells), dtype=float)
    policies = jax.tree.map(
        lambda x: jnp.zeros_like(x) + numbers.reshape(-1, *[1] * (x.ndim - 1)), policies
    )
    character = me_ls.Character(jnp.asarray(fitness), centroids[cells], jnp.asarray(psi))
    offspring = me_ls.Offspring(policies, character, jnp.ones(len(cells), bool))
    empty = me_ls.empty_repertoire(task, (4,), centroids)
    after, count = me_ls.insert(empty, offspring, me_ls.fitter_and_steadier)
    owner = np.asarray(after.policies.layers[0].weight[:, 0, 0]).astype(int)
    return {int(c): int(owner[c]) for c in np.flatnonzero(after.occupied)}, int(count)


def check_lucky_baseline(answer: ModuleType) -> None:
    rule = answer.lucky()
    fitness, ends = jnp.array([-3.0, -1.0, -2.0]), jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    found = rule.characterise(fitness, ends, ends)
    require_close(found.fitness, -1.0, "the fitness of the best episode")
    require_close(found.descriptor, ends[1], "the descriptor of the best episode")
    require_close(found.spread, me_ls.spread(ends), "the spread of all episodes")
    require(rule.several, "the rule must play several episodes.")
    lucky, once = _searched(rule, 60), _searched(me_ls.RULES["me"], 60)
    again = evaluate.reassess(make_task(POINT), lucky, key=jax.random.key(2))
    require(
        jnp.mean(lucky.fitness, where=lucky.occupied) > jnp.mean(once.fitness, where=once.occupied),
        "ten chances should promise a higher fitness than one: does the fitter one stay?",
    )
    require(
        again.after["coverage"] < again.before["coverage"],
        "in a reassessment, cells that were filled by luck should turn out empty.",
    )


def check_own_rule(answer: ModuleType) -> None:
    rule, known = answer.rule(), me_ls.RULES.values()
    ours = {r.characterise for r in known}, {r.replaces for r in known}
    require(
        rule.characterise not in ours[0] or rule.replaces not in ours[1],
        "both functions are the project's: at least one must be your own.",
    )
    iterations = 300 if rule.several else 3000
    own, lucky = (
        _distance(_searched(rule, iterations)),
        _distance(_searched(me_ls.RULES["me"], 3000)),
    )
    require(
        own <= 0.75 * lucky,
        f"its distance to the goals is {own:.3f} m; at most {0.75 * lucky:.3f} m, 0.75 of MAP-Elites'.",
    )


def _searched(rule: me_ls.Rule, iterations: int) -> me_ls.Repertoire:
    """A search on the point by a rule that is registered only meanwhile; all iterations are one loop."""
    task, name = make_task(POINT), "graded"
    me_ls.RULES[name] = rule
    try:
        config = me_ls.SearchConfig(
            name, cells=64, batch=32, episodes=10, hidden=(16,), iso_sigma=0.2, line_sigma=0.1
        )
        search = me_ls.make_search(task, config)
        loop = eqx.filter_jit(
            lambda state, keys: jax.lax.scan(
                lambda s, k: (search.step(s, k)[0], None), state, keys
            )[0]
        )
        keys = jax.random.split(jax.random.key(1), iterations)
        return loop(search.init(jax.random.key(0)), keys).repertoire
    finally:
        del me_ls.RULES[name]


def _distance(repertoire: me_ls.Repertoire) -> float:
    """From the goals, of the policies that are nearest by what the repertoire says."""
    task = make_task(POINT)
    goals = me_ls.goals(task)
    keys = jax.random.split(jax.random.key(3), (len(goals), 10))
    return float(evaluate.accuracy_of_repertoire(task, repertoire, goals, keys).distance.mean())


def check_deep_cell(answer: ModuleType) -> None:
    for fitness in (
        [-jnp.inf] * 3,
        [-1.0, -jnp.inf, -jnp.inf],
        [-1.0, -2.0, -jnp.inf],
        [-1.0, -2.0, -0.5],
    ):
        for draw in range(3):
            cell, number = jnp.array(fitness), jnp.array(draw)
            inside = uncertain.Inside(cell, jnp.ones(3, int))
            right = uncertain.crowd_in(inside, inside, number).place
            found = jax.jit(answer.crowd_in)(cell, number)
            require(
                found == right,
                f"fitness {fitness}, draw {draw}: place {right} is right, not {found}.",
            )


def check_td3_target(answer: ModuleType) -> None:
    task = make_task(POINT)
    config = pgame_ls.PGAMEConfig("pgame", batch=4, hidden=(8,), critic_hidden=(8,))
    td3 = pgame_ls.first_td3(task, config, key=jax.random.key(0))
    critics = [jax.tree.map(lambda x, i=i: x[i], td3.target_critics) for i in range(2)]
    for seed in range(4):
        keys = jax.random.split(jax.random.key(seed), 4)
        after, noise = jax.random.normal(keys[0], (3,)), 3 * jax.random.normal(keys[1], (2,))
        reward = -jax.random.uniform(keys[2])
        transition = pgame_ls.Transition(after, noise, reward, after)
        right = pgame_ls.target(config, td3, transition, noise)
        found = answer.target(reward, after, noise, td3.target_actor, critics, config.discount)
        require_close(found, right, "the target of a transition with large noise")


# --- the Transformer --------------------------------------------------------------------------------


def check_interleaving(answer: ModuleType) -> None:
    bd, o, a = jax.random.normal(jax.random.key(0), (3, 5, 4))
    tokens = answer.interleave(bd, o, a)
    require_close(tokens, qdt.interleave(bd, o, a), "interleave of three sequences of five steps")
    require_close(answer.observation_tokens(tokens), o, "the O tokens")


def check_causal_mask(answer: ModuleType) -> None:
    mask = np.asarray(answer.visible(4))
    require(mask.shape == (4, 4), f"visible(4) must be 4 × 4, it is {mask.shape}.")
    require(mask[0, 0], "visible(4)[0, 0] must be True: a token sees itself.")
    require(not mask[0, 1], "visible(4)[0, 1] must be False: the first token sees itself alone.")
    require((mask == np.tril(np.ones((4, 4)))).all(), "token i sees tokens 0 to i, and no others.")
    q, k, v = jax.random.normal(jax.random.key(1), (3, 6, 8))
    right = attention.attend(q[None], k.T[None], v.T[None], jnp.tril(jnp.ones((6, 6), bool)))[0]
    require_close(answer.attention(q, k, v), right, "attention of six tokens")


def check_key_value_cache(answer: ModuleType) -> None:
    config = qdt.QDTConfig(width=16, heads=2, layers=1, dropout=0.0)
    layer = qdt.Layer(config, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (12, 16))
    step, traced = answer.step, []

    @eqx.filter_jit
    def compiled(cache: Any, token: jax.Array) -> tuple[jax.Array, Any]:
        traced.append(token.shape)
        return step(layer, cache, token)

    cache, outputs = answer.start(layer, 12, 16), []
    for token in x:
        output, cache = compiled(cache, token)
        outputs.append(output)
    require_close(jnp.stack(outputs), layer(x), "twelve tokens, one by one, beside the full pass")
    require(
        len(traced) == 1, f"the cache changes its shape: the step was compiled {len(traced)} times."
    )


# --- one's own --------------------------------------------------------------------------------------


def check_own_task(answer: ModuleType) -> None:
    task = answer.make(TaskConfig("own", length=25))
    require(isinstance(task, Task), "make must return an envs.Task.")
    require(
        task.length == 25, f"an episode must have config.length = 25 steps, it has {task.length}."
    )
    require(
        len(task.low) == len(task.high) == len(task.axes) == 2,
        "two numbers for low, high and axes.",
    )
    keys = jax.random.split(jax.random.key(0), 64)
    starts = jax.vmap(task.reset)(keys)
    require(
        jnp.std(starts.observation, axis=0).max() > 0,
        "the start is not random: 64 starts with 64 keys look the same.",
    )
    state = task.reset(keys[0])
    after = task.step(state, jnp.zeros(task.action_size))
    same = jax.tree.map(lambda x, y: jnp.shape(x) == jnp.shape(y), state, after)
    require(jax.tree.all(same), "a step changes the shape of the state.")
    require(after.time == 1, "state.time must count the steps.")
    policies = me_ls.random_policies(task, (16,), keys)
    played = rollout(task, policies, jax.random.split(jax.random.key(1), (64, 4)))
    inside = (played.descriptor >= jnp.array(task.low)) & (
        played.descriptor <= jnp.array(task.high)
    )
    require(inside.all(), "a descriptor lies outside low ... high: clip it.")
    require(
        (played.fitness >= task.length * task.worst_reward - 1e-4).all(),
        "a reward lies below worst_reward.",
    )
    config = me_ls.SearchConfig("me-ls", cells=32, batch=64, episodes=4, hidden=(16,))
    search = me_ls.make_search(task, config)
    state = search.init(jax.random.key(2))
    for key in jax.random.split(jax.random.key(3), 5):
        state, _ = search.step(state, key)
    coverage = float(state.repertoire.occupied.mean())
    require(
        coverage >= 0.1,
        f"a short search fills only {coverage:.0%} of the cells: are low and high too far apart?",
    )


def check_own_model(answer: ModuleType) -> None:
    task, config = make_task(POINT), answer.settings()
    require(config.epochs <= 8, "at most 8 epochs.")
    sizes = dataset.Sizes.of(task)
    untrained = answer.make(config, sizes, qdt.Statistics.none(sizes), key=jax.random.key(0))
    require(
        isinstance(untrained, qdt.ConditionedPolicy), "make must return a qdt.ConditionedPolicy."
    )
    theirs = type(untrained) in (qdt.QDT, qdt.ConditionedMLP)
    require(not theirs, "that one is the project's: write your own.")
    qdt.MODELS[config.model], before = (
        qdt.Model("Own", type(config), answer.make),
        qdt.MODELS.get(config.model),
    )
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = _trained(task, config, Path(directory))
    finally:
        del qdt.MODELS[config.model]
        if before is not None:
            qdt.MODELS[config.model] = before
    goals = me_ls.goals(task)
    keys = jax.random.split(jax.random.key(3), (len(goals), 10))
    far = float(evaluate.measure(goals, qdt.play(task, model, goals, keys)).distance.mean())
    require(far <= 0.35, f"its distance to the goals is {far:.3f} m, and must be at most 0.35 m.")


def _trained(task: Task, config: qdt.TrainConfig, directory: Path) -> qdt.ConditionedPolicy:
    repertoire = _searched(me_ls.RULES["me-ls"], 300)
    wanted = dataset.DatasetConfig(trajectories=1024, zones=32)
    data = dataset.build(task, repertoire, wanted, 0, Stage(directory, {}))
    training = qdt.Training(task, config, data, seed=0)
    state = training.init(jax.random.key(0))
    for key in jax.random.split(jax.random.key(1), training.total):
        state, _ = training.step(state, key)
    return state.model


# --- grading ----------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[ModuleType], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


@dataclass(frozen=True)
class Grade:
    verdict: str  # right, wrong or missing
    sentence: str = ""


def grade(name: str, directory: Path) -> Grade:
    """The verdict on one exercise, as it stands in a directory."""
    path = directory / f"{name}.py"
    if not path.exists():
        return Grade("missing", f"there is no {path.name} here.")
    try:
        CHECKS[name](_load(path))
    except Wrong as wrong:
        return Grade("wrong", str(wrong))
    except NotImplementedError as hint:
        function = traceback.extract_tb(hint.__traceback__)[-1].name
        end = "" if str(hint).endswith("?") else "."
        return Grade("missing", f"{function} is not written yet. A hint: {hint}{end}")
    except Exception as error:  # whatever a beginner's code may raise is told, not thrown
        about = f": {str(error).splitlines()[0]}" if str(error) else ""
        return Grade("wrong", f"it raised {type(error).__name__}{_where(error, path)}{about}")
    return Grade("right")


def _where(error: Exception, path: Path) -> str:
    """The last line of the answer that was running, for whoever looks for the mistake."""
    if isinstance(error, SyntaxError):
        return f" in line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return f" in line {inside[-1]}" if inside else ""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"graded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description="Grades the exercises.")
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(CHECKS)}")
    parser.add_argument("--solutions", action="store_true", help="grade the solutions instead")
    wanted = parser.parse_args()
    if unknown := [name for name in wanted.names if name not in CHECKS]:
        parser.error(f"there is no exercise {unknown[0]}; there are {', '.join(CHECKS)}.")
    machine.prepare_jax()
    directory = HERE / "solutions" if wanted.solutions else HERE
    names = wanted.names or list(CHECKS)
    verdicts = []
    for name in names:
        start = time.perf_counter()
        verdict = grade(name, directory)
        verdicts.append(verdict.verdict)
        taken = f"({time.perf_counter() - start:.0f} s)" if verdict.verdict == "right" else ""
        print(f"{name:17} {verdict.verdict:8} {verdict.sentence}{taken}", flush=True)
    print(f"\n{verdicts.count('right')} of {len(names)} are right.")


if __name__ == "__main__":
    main()
