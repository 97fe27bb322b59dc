"""A cache of keys and values. An hour, after lesson 4.

A `qdt.py::Layer` maps all tokens of a trajectory at once: `layer(x)`, with x of shape (tokens, width).
When an episode is played, tokens come one by one, and the keys and values of the old ones do not
change. Write the step: given a cache and **one** new token, the layer's output for it, and the cache
for the next one.

What you can use: `layer.project(x)` returns queries (head, token, d), keys (head, d, token) and values
(head, d, token) of the tokens x; `layer.finish(x, attended)` takes the tokens and what they attended to,
(head, token, d), and returns the layer's output. What lies between is yours.

The check feeds 12 random tokens and compares with `layer(x)`. `step` is compiled once: the cache must
keep its shapes, so make room for all tokens at the start and remember how many are there.
"""

from typing import Any

from jaxtyping import Array, Float

from qdt import Layer


def start(layer: Layer, tokens: int, width: int) -> Any:
    """An empty cache with room for so many tokens."""
    raise NotImplementedError("zeros for keys and values, and a counter")


def step(
    layer: Layer, cache: Any, token: Float[Array, " width"]
) -> tuple[Float[Array, " width"], Any]:
    raise NotImplementedError(
        "project token[None], write at the counter, attend to what is there, finish"
    )
