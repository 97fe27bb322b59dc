"""Spread, by hand. Ten minutes, after lesson 1.

Equation 1 of the paper: ψ is the mean distance between all pairs of descriptors, avg over 1 ≤ i < j ≤ K
of ‖ξᵢ − ξⱼ‖₂. Write it with two loops in plain Python, as a child would measure it on a map. A single
episode has no pairs: its spread is 0.

    spread([[0, 0], [0.3, 0], [0, 0.4]])  ->  0.4
"""

from collections.abc import Sequence


def spread(descriptors: Sequence[Sequence[float]]) -> float:
    raise NotImplementedError("loop over i, over j > i, and add up math.dist(...)")
