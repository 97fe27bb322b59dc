"""Randomness in streams with names: nothing that is drawn for one purpose is drawn for another.

JAX's keys form a tree: `split(k, n)[i]` is `fold_in(k, i)`, so that two parts of a program that both count
from 0 below the same key draw the same numbers. Every purpose therefore has a branch of its own here,
directly below the seed, and counts freely within it.
"""

import jax
import numpy as np
from jaxtyping import Array, Key

_SEARCH_INIT = 2**31 - 1


def stream(seed: int, name: str) -> Key[Array, ""]:
    root = jax.random.key(seed)
    dataset = jax.random.split(jax.random.fold_in(root, 0xDA7A5E7), 3)
    training = jax.random.split(jax.random.fold_in(root, 1))
    evaluation = jax.random.fold_in(root, 0xE7A1)
    return {
        "search-init": jax.random.fold_in(root, _SEARCH_INIT),
        "search": root,
        "zones": dataset[0],
        "selection": dataset[1],
        "trajectories": dataset[2],
        "model": root,
        "training": training[0],
        "training-goals": training[1],
        "evaluation": evaluation,
        "calibration": jax.random.fold_in(evaluation, 0xCA1),
        "act": root,
    }[name]


NUMPY = {"order": 0, "held-out": 1, "density": 2, "statistics": 3}


def generator(seed: int, name: str, *more: int) -> np.random.Generator:
    """The same for what is drawn by NumPy: orders of trajectories on disk."""
    return np.random.default_rng((seed, NUMPY[name], *more))
