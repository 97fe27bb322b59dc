"""The geometric median. Half an hour, after lesson 2.

ME-Sampling describes a policy by the geometric median of its descriptors: the point m that minimises Σᵢ
‖ξᵢ − m‖. There is no formula for it. Weiszfeld's algorithm starts somewhere, say at the mean, and
repeats

    m ← Σᵢ wᵢ ξᵢ / Σᵢ wᵢ,   wᵢ = 1 / ‖ξᵢ − m‖ .

Write it. Beware of m falling on a data point (a division by zero), and of clouds in which a data point
is the median itself: there the iteration becomes slow, so let the data points be candidates as well.
"""

from jaxtyping import Array, Float


def geometric_median(points: Float[Array, "n d"]) -> Float[Array, " d"]:
    raise NotImplementedError(
        "start at points.mean(axis=0) and repeat the step above a hundred times"
    )
