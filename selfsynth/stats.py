"""Rates and means with their doubt: 95 % intervals.

Wilson's score interval for a rate; the percentile bootstrap for a mean, and its paired form for
the difference of two systems that answered the same prompts.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A number, its 95 % interval and the count of observations behind it."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int, z: float = 1.959963984540054) -> Estimate | None:
    """Estimate a rate by Wilson's score interval; None when nothing was observed.

    With p = successes / n, the interval is (p + z²/2n ± z·sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    (Wilson 1927, JASA 22, 209-212). `value`, `low` and `high` lie in [0, 1].

    Raises:
        ValueError: `successes` is not between 0 and `n`.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return None
    p = successes / n
    centre = p + z * z / (2 * n)
    spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At the ends the formula is exact, its floating-point value is not.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == n else (centre + spread) / scale
    return Estimate(p, low, high, n)


def bootstrap_mean(
    values: Sequence[float], seed: int = 0, resamples: int = 2000
) -> Estimate | None:
    """Estimate a mean by the percentile bootstrap; None when there are no values.

    `values` has shape (n,); one seed gives one interval (Efron & Tibshirani 1993, chapter 13).
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        return None
    generator = np.random.default_rng(seed)
    # In slices, so that a long series does not need resamples x n numbers at once.
    means = np.concatenate(
        [
            generator.choice(data, size=(rows, data.size)).mean(axis=1)
            for rows in _slices(resamples, data.size)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(data.mean()), float(low), float(high), data.size)


def paired_bootstrap(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 0, resamples: int = 2000
) -> Estimate | None:
    """Estimate mean(ours - theirs) over the same prompts, in the same order.

    Both have shape (n,). Prompts are drawn again together, so what a prompt does to both systems
    cancels (Koehn 2004, EMNLP, 388-395).

    Raises:
        ValueError: the two series differ in length.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} values against {len(theirs)}: not the same prompts")
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    return bootstrap_mean(difference, seed=seed, resamples=resamples)


def _slices(total: int, width: int, cells: int = 4_000_000) -> list[int]:
    step = max(1, cells // width)
    return [min(step, total - start) for start in range(0, total, step)]
