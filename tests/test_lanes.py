"""Turning arrays inside out must not change what a function computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envs import TaskConfig, make_task
from machinery import lanes, native
from machinery.lanes import in_lanes


@pytest.fixture(params=["C", "XLA"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Formulas are computed by a C compiler where there is one, and by XLA elsewhere."""
    if request.param == "C" and native.c_compiler() is None:
        pytest.skip("there is no C compiler")
    if request.param == "XLA":
        monkeypatch.setattr(lanes, "compiled", lambda inputs, results: None)
    return request.param


def rotate(quaternion: jax.Array, vector: jax.Array) -> jax.Array:
    """Small-array arithmetic as physics has it: products, cross products, norms, comparisons."""
    s, u = quaternion[0], quaternion[1:]
    turned = 2 * u * (u @ vector) + (s * s - u @ u) * vector + 2 * s * jnp.cross(u, vector)
    return jnp.where(turned > 0, turned, 0.5 * turned) / (1e-6 + jnp.linalg.norm(quaternion) ** 2)


def loop(matrix: jax.Array, vector: jax.Array) -> dict[str, jax.Array]:
    def step(v: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(matrix @ v) + 0.1 * v[::-1], None

    end, _ = jax.lax.scan(step, vector, length=5)
    moved = jnp.zeros((2, 3)).at[jnp.array([1, 0, 1])].add(jnp.stack([end, 2 * end, end**2]))
    return {"end": end, "moved": moved, "fixed": jnp.arange(3.0), "any": (end > 0).any()}


@pytest.mark.parametrize(
    ("function", "shapes"), [(rotate, ((4,), (3,))), (loop, ((3, 3), (3,)))], ids=["rotate", "loop"]
)
@pytest.mark.parametrize("batch", [(7,), (2, 5)], ids=["one vmap", "two vmaps"])
def test_in_lanes_computes_the_same(function, shapes, batch):
    random = np.random.default_rng(0)
    arguments = [jnp.array(random.normal(size=(*batch, *s)), jnp.float32) for s in shapes]
    plain, turned = function, in_lanes(function)
    for _ in batch:
        plain, turned = jax.vmap(plain), jax.vmap(turned)
    expected, found = jax.jit(plain)(*arguments), jax.jit(turned)(*arguments)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_an_argument_that_all_share_is_allowed():
    vectors = jnp.arange(12.0).reshape(4, 3)
    turned = jax.vmap(in_lanes(rotate), in_axes=(None, 0))
    quaternion = jnp.array([0.5, 0.5, -0.5, 0.5])
    expected = jax.vmap(rotate, in_axes=(None, 0))(quaternion, vectors)
    np.testing.assert_allclose(turned(quaternion, vectors), expected, rtol=1e-5, atol=1e-6)


def test_not_a_number_stays_not_a_number():
    vectors = jnp.array([[1.0, 2.0, 3.0], [jnp.nan, 2.0, 3.0]])
    found = jax.vmap(in_lanes(rotate))(jnp.ones((2, 4)), vectors)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).any()


def every_operation(x: jax.Array, y: jax.Array, yes: jax.Array, n: jax.Array) -> list[jax.Array]:
    """At least once all that C is written for."""
    whole, steps = jnp.abs(x) + 0.1, n * 2 - n
    return [
        *(x + y, x - y, x * y, x / y, -x, abs(x), jnp.sign(x), x**3, jnp.square(y)),
        *(
            x < y,
            x > y,
            x <= y,
            x >= y,
            x == y,
            x != y,
            yes & (x > 0),
            yes | (y > 0),
            yes ^ (x > 0),
        ),
        *(~yes, jnp.where(yes, x, y), jnp.where(yes, x > 0, y > 0), jnp.where(yes, n, 3)),
        *(jnp.maximum(x, y), jnp.minimum(x, 0.25), jnp.clip(x, -0.5, 0.5)),
        *(jnp.sqrt(whole), jnp.exp(x), jnp.log(whole), jnp.sin(x), jnp.cos(x), jnp.tan(x)),
        *(jnp.tanh(x), jnp.arctan(x), jnp.expm1(x), jnp.log1p(whole), jnp.floor(x), jnp.ceil(x)),
        *(jnp.arcsin(x / 10), jnp.arccos(x / 10), jnp.arctan2(y, x), jnp.arctan2(y, 0 * x)),
        *(steps, -n, n.astype(float), yes.astype(float), yes.astype(int), x.astype(bool), n > 1),
        *(jnp.zeros(()), jnp.array(True), jnp.array(-3), jnp.maximum(x, -jnp.inf)),
    ]


def test_every_operation_of_the_compiler_is_right(by: str) -> None:
    random = np.random.default_rng(1)
    x, y = jnp.array(random.normal(size=(2, 37)), jnp.float32)  # 37 fills no vector
    y = y.at[:4].set(jnp.array([0.0, -0.0, jnp.inf, jnp.nan]))
    arguments = x, y, jnp.arange(37) % 3 == 0, jnp.arange(37, dtype=jnp.int32) - 5
    expected = jax.jit(jax.vmap(every_operation))(*arguments)
    found = jax.jit(jax.vmap(in_lanes(every_operation)))(*arguments)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-7)
    hlo = jax.jit(jax.vmap(in_lanes(every_operation))).lower(*arguments).as_text()
    assert ("native-" in hlo) == (by == "C")


def test_a_lane_does_not_see_its_neighbours() -> None:
    """Whatever the episodes beside it, and wherever in a vector: the same numbers."""
    arguments = jnp.array(np.random.default_rng(2).normal(size=(45, 3, 3)), jnp.float32)
    step = jax.jit(jax.vmap(in_lanes(loop)))
    together, alone = step(arguments, arguments[:, 0]), step(arguments[40:], arguments[40:, 0])
    np.testing.assert_allclose(together["end"][40:], alone["end"], rtol=1e-6)


def test_what_cannot_be_written_in_c_is_left_to_xla() -> None:
    vectors = jnp.arange(12.0).reshape(4, 3)
    found = jax.jit(jax.vmap(in_lanes(lambda v: jnp.nextafter(v, 2 * v))))(vectors)
    np.testing.assert_array_equal(found, jnp.nextafter(vectors, 2 * vectors))


@pytest.mark.parametrize("robot", ["brax", "v1"])
@pytest.mark.parametrize("task", ["ant-omni", "halfcheetah-uni"])
def test_an_episode_is_step_by_step_that_of_the_robot_itself(
    task: str, robot: str, by: str
) -> None:
    """Every step starts from the same state, so that what differs is the rounding of one step.

    A foot that just touches the ground may do so a sub-step earlier, so a few steps may differ more.
    """
    if by == "XLA":
        pytest.skip("the tests of the engine compare this one")
    from brax.spring import pipeline

    env: Any = vars(make_task(TaskConfig(task, robot=robot)))["env"]
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), 5)).pipeline_state

    @jax.jit
    @jax.vmap
    def own_step(state: Any, action: jax.Array) -> Any:
        if robot == "v1":
            return type(env).pipeline_step(env, state, action)

        def substep(state: Any, _: None) -> tuple[Any, None]:
            return pipeline.step(env.sys, state, action), None

        return jax.lax.scan(substep, state, length=env._n_frames)[0]

    step, differences = jax.jit(jax.vmap(env.pipeline_step)), []
    for time in range(100):
        action = jax.random.uniform(jax.random.key(time), (5, env.action_size), minval=-1.0)
        expected, state = own_step(state, action), step(state, action)
        expected = expected.replace(i_inv=state.i_inv)  # brax leaves that of a sub-step before
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
            scale = 1 + np.abs(one).max()
            differences += [np.abs(a - b).max() / scale for a, b in zip(one, other, strict=True)]
    assert np.median(differences) < 2e-6
    assert np.quantile(differences, 0.95) < 1e-4
