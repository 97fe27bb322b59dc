"""Interleaving. Ten minutes, after lesson 4.

The QDT reads (BD, O₀, A₀, BD, O₁, A₁, ...). Make that of three sequences of embeddings, each of shape
(time, width), and write the way back: the O tokens, at which actions are predicted.
No loops: `jnp.stack` and `reshape`, and a slice with a step.
"""

from jaxtyping import Array, Float


def interleave(
    bd: Float[Array, "time width"], o: Float[Array, "time width"], a: Float[Array, "time width"]
) -> Float[Array, "tokens width"]:
    raise NotImplementedError(
        "stack the three along a new axis 1; think of what reshape reads first"
    )


def observation_tokens(tokens: Float[Array, "tokens width"]) -> Float[Array, "time width"]:
    raise NotImplementedError("every third token, from which one on?")
