"""What a critic should have said.

With the mean or the maximum, an error upwards of one critic is believed, sought out by the actor and
fed back into both: the values run away.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float


def target(
    reward: Float[Array, ""],
    after: Float[Array, " observation"],
    noise: Float[Array, " action"],
    actor: Callable[[Array], Array],
    critics: Sequence[Callable[[Array, Array], Array]],
    discount: float,
) -> Float[Array, ""]:
    epsilon = jnp.clip(0.2 * noise, -0.5, 0.5)
    action = jnp.clip(actor(after) + epsilon, -1.0, 1.0)
    lower = jnp.minimum(critics[0](after, action), critics[1](after, action))
    return reward + discount * lower
