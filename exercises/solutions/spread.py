"""Spread, by hand."""

import math
from collections.abc import Sequence


def spread(descriptors: Sequence[Sequence[float]]) -> float:
    total, pairs = 0.0, 0
    for i in range(len(descriptors)):
        for j in range(i + 1, len(descriptors)):
            total += math.dist(descriptors[i], descriptors[j])
            pairs += 1
    return total / pairs if pairs else 0.0
