"""Numbers over seeds: mean, sample deviation, and a 95 % interval by Student's t.

Methods that share a seed are compared seed by seed: what a seed makes easy or hard for both falls out of
the difference. Every interval is of one comparison by itself, not corrected for how many there are.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """Of a mean over seeds. One seed has no deviation and no interval: NaN."""

    values: tuple[float, ...]
    mean: float
    deviation: float  # of a sample
    low: float
    high: float

    @property
    def is_distinct(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def estimate(values: Sequence[float]) -> Estimate:
    count = len(values)
    mean = float(np.mean(values)) if count else np.nan
    if count < 2:
        return Estimate(tuple(values), mean, np.nan, np.nan, np.nan)
    deviation = float(np.std(values, ddof=1))
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * deviation / count**0.5
    return Estimate(tuple(values), mean, deviation, mean - half, mean + half)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate:
    """Of the difference one − other, over the seeds that both have."""
    return estimate([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def verdict(difference: Estimate, below: str = "lower", above: str = "higher") -> str:
    """What a difference says, in words."""
    if not difference.values:
        return "–"
    word = below if difference.mean < 0 else above
    if len(difference.values) == 1:
        return f"{word}, one seed"
    return word if difference.is_distinct else "not distinguishable"


def mean_text(found: Estimate) -> str:
    if not found.values:
        return "–"
    more = f" ± {found.deviation:.2g}" if len(found.values) > 1 else ""
    return f"{found.mean:.4g}{more}"


def interval_text(found: Estimate) -> str:
    return f"[{found.low:.3g}, {found.high:.3g}]" if len(found.values) > 1 else "–"


def difference_text(found: Estimate) -> str:
    return f"{found.mean:+.3g}" if found.values else "–"
