"""Randomness in streams with names: nothing that is drawn for one purpose is drawn for another.

JAX's keys form a tree in which `split(k, n)[i]` is `fold_in(k, i)`: two parts of a program that both count
from 0 below the same key draw the same numbers. Every purpose therefore has a branch of its own here,
directly below the seed, and counts freely within it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt32

# The numbers are part of every result: a stream that goes leaves its number unused.
STREAMS = {
    "search-init": 0,  # cells of the repertoire, networks of TD3
    "search": 1,  # one key per iteration: selection, variation, episodes
    "selection": 3,  # episodes of the candidates for a dataset
    "trajectories": 4,  # one key per trajectory
    "model": 5,  # initial weights
    "training": 6,  # one key per step: dropout
    "training-goals": 7,  # episodes of the evaluations that choose the best epoch
    "goals": 8,  # and zones; of seed 0, whatever the run's: all runs are asked for the same
    "accuracy": 9,
    "reassessment": 10,
    "reproducibility": 11,
    "calibration": 12,
    "act": 13,
    "second-look": 14,  # episodes after which a repertoire's policy is chosen for each goal
    "alike": 15,  # episodes in whose states the candidates for a dataset are compared
    "elsewhere": 16,  # goals for which no demonstrator is selected; of seed 0, too
}
# Orders of trajectories on disk are drawn by NumPy.
ORDERS = {"order": 0, "held-out": 1, "density": 2, "statistics": 3, "beginnings": 4}


def stream(seed: int, name: str) -> Key[Array, ""]:
    return jax.random.fold_in(jax.random.key(seed), STREAMS[name])


def generator(seed: int, name: str, *more: int) -> np.random.Generator:
    return np.random.default_rng((seed, ORDERS[name], *more))


# --- much noise, cheaply ------------------------------------------------------------------------------

Seed = UInt32[Array, "2"]


def bits(seed: Seed, number: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Random bits for every element, from a hash of the seed and the element's number.

    The hash ("lowbias32": every output bit depends on every input bit) is a handful of integer operations
    that XLA fuses into whatever reads the bits. JAX's own generator goes over arrays in memory again and
    again.
    """
    x = number ^ seed[0]
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    # A second word of seed, so that the streams of two seeds are not permutations of each other.
    x = (x ^ (x >> 15) ^ seed[1]) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def numbers(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """0, 1, 2, ... for the elements of an array."""
    return jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)


def normals(seed: Seed, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Numbers from N(0, 1), for noise of which there is so much that `jax.random.normal` is too slow."""
    # 24 bits and a half: strictly between -1 and 1, and exact in single precision.
    uniform = (bits(seed, numbers(shape)) >> 8).astype(jnp.float32) * 2.0**-23 + (2.0**-24 - 1)
    return math.sqrt(2) * jax.lax.erf_inv(uniform)
