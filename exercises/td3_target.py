"""What a critic should have said. Twenty minutes, after lesson 3.

TD3 trains both critics on y = r + γ · min(Q₁', Q₂')(s', π'(s') + ε), with ε = clip(0.2 · noise, −0.5,
0.5) and the disturbed action clipped to [−1, 1]. Write it for one transition. `actor` takes an
observation, `critics` are two functions of an observation and an action, `noise` comes from N(0, I).

Think of what goes wrong with the mean, or the maximum, of the two critics.
"""

from collections.abc import Callable, Sequence

from jaxtyping import Array, Float


def target(
    reward: Float[Array, ""],
    after: Float[Array, " observation"],
    noise: Float[Array, " action"],
    actor: Callable[[Array], Array],
    critics: Sequence[Callable[[Array, Array], Array]],
    discount: float,
) -> Float[Array, ""]:
    raise NotImplementedError(
        "first the disturbed and clipped action in `after`, then the lower critic"
    )
