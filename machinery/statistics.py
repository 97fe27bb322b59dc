"""Numbers over seeds: mean, sample deviation, and a 95 % interval by Student's t.

Methods that share a seed are compared seed by seed: what a seed makes easy or hard for both falls out of
the difference. Every interval is of one comparison by itself, not corrected for how many there are.
Reads in this order: estimates, verdicts, text.
"""

import math
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


# --- as text: as many digits as a deviation bears, which is two -------------------------------------


def rounded(value: float, decimals: int, sign: str = "") -> str:
    """With so many decimals; if negative, so many of its digits before the point are zeros."""
    text = f"{round(value, decimals) + 0.0:{sign},.{max(decimals, 0)}f}"
    return text.replace("-", "−")


def significant(value: float, digits: int = 3) -> str:
    return rounded(value, decimals_of(value, digits))


def decimals_of(value: float, digits: int) -> int:
    """How many decimals leave so many digits of a number."""
    if value == 0 or not math.isfinite(value):
        return 0
    return digits - 1 - int(f"{value:.{digits - 1}e}".partition("e")[2])


def mean_text(found: Estimate) -> str:
    """Of several values with their deviation."""
    if len(found.values) < 2:
        return significant(found.mean) if found.values else "–"
    decimals = _bearable(found)
    if decimals is None:
        return f"{significant(found.mean)} ± {rounded(found.deviation, 0)}"
    return f"{rounded(found.mean, decimals)} ± {rounded(found.deviation, decimals)}"


def interval_text(found: Estimate, sign: str = "") -> str:
    if len(found.values) < 2:
        return "–"
    low, high = (rounded(end, _decimals(found), sign) for end in (found.low, found.high))
    return f"[{low}, {high}]"


def difference_text(found: Estimate) -> str:
    return rounded(found.mean, _decimals(found), "+") if found.values else "–"


def _decimals(found: Estimate) -> int:
    """Of an interval and what it is of: no end is rounded to zero, so that each shows its side."""
    decimals = _bearable(found)
    if decimals is None:
        return decimals_of(found.mean, 3)
    smallest = min(abs(found.low), abs(found.high))
    return max(decimals, decimals_of(smallest, 1)) if smallest < 0.5 * 10**-decimals else decimals


def _bearable(found: Estimate) -> int | None:
    """Decimals that leave the deviation two digits. None: there is none, but for what floats err."""
    is_distinct = found.deviation > 1e-9 * abs(found.mean)
    return decimals_of(found.deviation, 2) if is_distinct else None
