"""Turning arrays inside out must not change what a function computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from machinery.lanes import in_lanes


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
    plain, lanes = function, in_lanes(function)
    for _ in batch:
        plain, lanes = jax.vmap(plain), jax.vmap(lanes)
    expected, found = jax.jit(plain)(*arguments), jax.jit(lanes)(*arguments)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_an_argument_that_all_share_is_allowed():
    vectors = jnp.arange(12.0).reshape(4, 3)
    lanes = jax.vmap(in_lanes(rotate), in_axes=(None, 0))
    quaternion = jnp.array([0.5, 0.5, -0.5, 0.5])
    expected = jax.vmap(rotate, in_axes=(None, 0))(quaternion, vectors)
    np.testing.assert_allclose(lanes(quaternion, vectors), expected, rtol=1e-5, atol=1e-6)


def test_not_a_number_stays_not_a_number():
    vectors = jnp.array([[1.0, 2.0, 3.0], [jnp.nan, 2.0, 3.0]])
    found = jax.vmap(in_lanes(rotate))(jnp.ones((2, 4)), vectors)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).any()
