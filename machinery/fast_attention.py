"""Causal attention as one C function, where there is a compiler: `attention.c` on a CPU.

XLA goes over the scores of a block of queries again and again: once for the mask, the largest, the
exponential, the sum, the dropout, and as often in the gradient. In C they stay in the first-level cache.
What it gains is in `docs/journal.md`; `causal_attention` in `attention.py` says what is computed.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from machinery import native
from machinery.machine import on_cpu
from machinery.streams import Seed

SOURCE = Path(__file__).with_name("attention.c")


@functools.cache
def _compiled(heads: int, size: int, rate: float) -> Callable[..., Array] | None:
    """Attention of queries, keys, values, a seed, and which tokens ask: the first, and the step.

    Nothing where there is no compiler, or no CPU.
    """
    constants = {"HEADS": heads, "SIZE": size, "RATE": rate}
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    source = native.HEAD + defined + SOURCE.read_text()
    names = native.build("attention", source, "forward", "backward") if on_cpu() else None
    if names is None:
        return None
    forward, backward = names

    def run(q: Array, *others: Array) -> Sequence[Array]:
        """The output, and of every query the logarithm of the sum under its softmax."""
        shapes = [jax.ShapeDtypeStruct(shape, q.dtype) for shape in (q.shape, q.shape[:2])]
        return jax.ffi.ffi_call(forward, shapes, vmap_method="broadcast_all")(q, *others)

    @jax.custom_vjp
    def attention(q: Array, k: Array, v: Array, seed: Array, asking: Array) -> Array:
        return run(q, k, v, seed, asking)[0]

    def keep(*inputs: Array) -> tuple[Array, tuple[Array, ...]]:
        output, total = run(*inputs)
        return output, (*inputs, output, total)

    def slopes(kept: tuple[Array, ...], slope: Array) -> tuple[Array | None, ...]:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept[:3]]
        call = jax.ffi.ffi_call(backward, shapes, vmap_method="broadcast_all")
        return (*call(*kept, slope), None, None)

    attention.defvjp(keep, slopes)
    return attention


def fast_attention(
    q: Float[Array, "head query d"],
    k: Float[Array, "head d token"],
    v: Float[Array, "head d token"],
    seed: Seed | None,
    rate: float,
    first: int,
    stride: int,
) -> Float[Array, "head query d"] | None:
    """`causal_attention`, or nothing where it cannot be compiled."""
    if not q.dtype == k.dtype == v.dtype == jnp.float32:
        return None
    attention = _compiled(q.shape[0], q.shape[2], rate if seed is not None else 0.0)
    if attention is None:
        return None
    asking = jnp.array([first, stride], jnp.int32)
    return attention(q, k, v, jnp.zeros(2, jnp.uint32) if seed is None else seed, asking)
