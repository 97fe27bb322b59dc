"""Muon: gradient steps that are orthogonal matrices, for the matrices between a network's hidden layers.

An orthogonal step moves all directions of a matrix equally far, where Adam's is dominated by a few. On a
small budget a Transformer learns several times as fast with it. Optax has an implementation of its own;
this one divides the matrices among the devices, which makes a training step a fifth faster on two cores.
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from machinery.gradients import add_up
from machinery.machine import devices

RATE = 20.0  # times Adam's: the numbers of an orthogonal matrix are small


def scale_by_muon() -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(decay=0.95, nesterov=True),
        optax.stateless(lambda momentum, model: orthogonal(momentum)),
        optax.scale(RATE),
    )


def orthogonal(matrices: PyTree[Float[Array, "_ _"]]) -> PyTree[Array]:
    """`orthogonalise` of each matrix; every device takes a share of them, from small to large."""
    mesh = devices()

    def on_device(leaves):
        order = sorted(range(len(leaves)), key=lambda i: leaves[i].size)

        def share_of(device):
            mine = order[device :: mesh.size]
            return [
                orthogonalise(x) if i in mine else jnp.zeros_like(x) for i, x in enumerate(leaves)
            ]

        shares = [partial(share_of, device) for device in range(mesh.size)]
        return add_up(jax.lax.switch(jax.lax.axis_index("device"), shares))

    leaves, structure = jax.tree.flatten(matrices)
    whole = PartitionSpec()
    done = jax.shard_map(on_device, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.tree.unflatten(structure, done(leaves))


def orthogonalise(matrix: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Brings all singular values near 1 by five steps of Newton and Schulz, with Muon's polynomial."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x
