"""Rates, means and differences with their doubt.

Wilson's score interval for a rate; the percentile bootstrap for a mean, and its paired form for
the difference of two systems that answered the same prompts; McNemar's test for paired right and
wrong, flipped signs for other pairs, Holm's correction for several tests, and the difference that
so many prompts could show.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ABOUT_EQUAL = 0.1
"""Lengths that differ by at most this share of the longer count as equal."""

_Z_TWO_SIDED, _Z_POWER = 1.959963984540054, 0.8416212335729143
"""Quantiles of the normal distribution: 97.5 %, for 95 % intervals, and 80 %."""


class Estimate(NamedTuple):
    """A number, its 95 % interval and the count of observations behind it."""

    value: float
    low: float
    high: float
    n: int


def wilson(successes: int, n: int, z: float = _Z_TWO_SIDED) -> Estimate | None:
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


def mcnemar(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Return the two-sided p-value of two systems being right equally often, exactly.

    Both have shape (n,), in the same order of items. Of the b + c items that one system alone got
    right, b is binomial with 1/2: p = 2 · P(X <= min(b, c)), at most 1 (McNemar 1947, Psychometrika
    12, 153-157, in its exact form). Where the two never disagree it is 1.

    Raises:
        ValueError: the two series differ in length.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} values against {len(theirs)}: not the same items")
    pairs = [(bool(one), bool(other)) for one, other in zip(ours, theirs, strict=True)]
    won, lost = pairs.count((True, False)), pairs.count((False, True))
    n = won + lost
    tail, term = 0, 1  # in whole numbers: 2^-n is no float where n is large
    for k in range(min(won, lost) + 1):
        tail += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n)


def sign_flips(differences: Sequence[float], seed: int = 0, resamples: int = 10_000) -> float:
    """Return the two-sided p-value of paired differences with mean zero, by flipping their signs.

    If neither system is better, each difference, of shape (n,), is as likely with the other sign.
    p = (1 + the flips whose mean is at least as far from zero) / (1 + flips), so it is never zero
    (Fisher 1935, The Design of Experiments, section 21; Phipson & Smyth 2010, equation 2). Where
    all differences are zero, or there are none, it is 1.
    """
    data = np.asarray(differences, dtype=np.float64)
    if not data.any():
        return 1.0
    generator, reached = np.random.default_rng(seed), 0
    limit = abs(data.sum()) * (1 - 1e-12)
    for rows in _slices(resamples, data.size):
        signs = generator.integers(2, size=(rows, data.size), dtype=np.int8) * 2 - 1
        reached += int((np.abs(signs @ data) >= limit).sum())
    return (1 + reached) / (1 + resamples)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number, in their order, by Holm's step-down rule.

    The k-th smallest of m is multiplied by m - k + 1, and none is smaller than the one before
    (Holm 1979, Scandinavian Journal of Statistics 6, 65-70). Those at most alpha are rejected
    together with a family-wise error of alpha.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def smallest_difference(differences: Sequence[float]) -> float | None:
    """Return the mean difference that so many prompts would have shown in 80 % of the tries.

    With a two-sided test at 5 %: (z_0.975 + z_0.8) · s / sqrt(n), s being the standard deviation of
    the paired differences, of shape (n,) (Miller 2024, arXiv 2411.00640, equation 9). In the unit
    of the differences; None for less than two.
    """
    data = np.asarray(differences, dtype=np.float64)
    if data.size < 2:
        return None
    return float((_Z_TWO_SIDED + _Z_POWER) * data.std(ddof=1) / math.sqrt(data.size))


def about_equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return of which pairs the lengths are about equal, so that length cannot decide.

    Both, and what is returned, have shape (n,); lengths may be in any unit.
    """
    return np.abs(one - other) <= ABOUT_EQUAL * np.maximum(one, other)


def _slices(total: int, width: int, cells: int = 4_000_000) -> list[int]:
    step = max(1, cells // width)
    return [min(step, total - start) for start in range(0, total, step)]
