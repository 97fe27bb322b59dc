"""The gradient of a large batch, on all devices, in the memory of a small one."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from machinery.machine import devices

Model = TypeVar("Model")


def add_up(tree: PyTree[Array]) -> PyTree[Array]:
    """The sum over all devices, as one long row: devices meet once and not for every array."""
    row, restore = ravel_pytree(tree)
    return restore(jax.lax.psum(row, "device"))


def loss_and_gradient(
    errors: Callable[[Model, Any], Float[Array, " batch"]],
    model: Model,
    batch: PyTree[Array],
    micro_batch: int,
) -> tuple[Float[Array, ""], Model]:
    """`jax.value_and_grad` of the mean error of a batch of any size.

    Every device goes through its share of the batch, at most a micro-batch at a time, and adds up. Where
    the parts would not be equal, the last example fills them up and counts for nothing.
    """
    mesh, size = devices(), len(jax.tree.leaves(batch)[0])
    of_each = -(-size // mesh.size)
    parts = -(-of_each // micro_batch)
    micro_batch = -(-of_each // parts)
    at_once = mesh.size * micro_batch
    padded = -(-size // at_once) * at_once
    weight = (jnp.arange(padded) < size) / size
    if padded > size:
        index = jnp.minimum(jnp.arange(padded), size - 1)
        batch = jax.tree.map(lambda x: x[index], batch)

    def weighted_loss(model: Model, weight: Array, batch: Any) -> Array:
        return jnp.sum(weight * errors(model, batch))

    def on_device(model: Model, *share: Any) -> Any:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            further = jax.value_and_grad(weighted_loss)(model, *part)
            return jax.tree.map(jnp.add, total, further), None

        split = jax.tree.map(lambda x: x.reshape(-1, micro_batch, *x.shape[1:]), share)
        zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), model))
        total, _ = jax.lax.scan(add, zero, split)
        return add_up(total)

    split, whole = PartitionSpec("device"), PartitionSpec()
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(whole, split, split),
        out_specs=whole,
        check_vma=False,
    )(model, weight, batch)
