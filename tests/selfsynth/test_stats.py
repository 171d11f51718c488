"""Intervals: against published values, against the formula in exact arithmetic, by simulation."""

import math
import time
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfsynth.stats import (
    Estimate,
    _slices,
    bootstrap_mean,
    holm,
    mcnemar,
    paired_bootstrap,
    sign_flips,
    smallest_difference,
    wilson,
)

fixed = settings(derandomize=True, deadline=None, database=None)
Z = Decimal("1.959963984540054")


# ---------------------------------------------------------------- Wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # Agresti & Coull 1998 and textbooks
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (1, 1, 0.2065, 1.0),
        (0, 1, 0.0, 0.7935),
        (50, 100, 0.4038, 0.5962),
    ],
)
def test_wilson_against_published_values(successes, n, low, high):
    found = wilson(successes, n)
    assert (found.value, found.n) == (successes / n, n)
    assert found.low == pytest.approx(low, abs=5.1e-5)
    assert found.high == pytest.approx(high, abs=5.1e-5)


def exact_wilson(successes, n):
    """The interval from the formula, in 50 digits."""
    getcontext().prec = 50
    p, n = Decimal(successes) / Decimal(n), Decimal(n)
    centre = p + Z * Z / (2 * n)
    spread = Z * (p * (1 - p) / n + Z * Z / (4 * n * n)).sqrt()
    return (centre - spread) / (1 + Z * Z / n), (centre + spread) / (1 + Z * Z / n)


@settings(fixed, max_examples=300)
@given(n=st.integers(1, 100_000), share=st.floats(0, 1))
def test_wilson_against_exact_arithmetic(n, share):
    successes = round(share * n)
    found = wilson(successes, n)
    low, high = exact_wilson(successes, n)
    assert found.low == pytest.approx(float(low), abs=1e-12)
    assert found.high == pytest.approx(float(high), abs=1e-12)
    assert 0 <= found.low <= found.value <= found.high <= 1
    # The ends are where the score test just fails to reject: (p - x)² = z² x(1-x)/n.
    for end in (found.low, found.high):
        if 0 < end < 1:
            left = (found.value - end) ** 2
            assert left == pytest.approx(float(Z) ** 2 * end * (1 - end) / n, rel=1e-6, abs=1e-12)
    mirrored = wilson(n - successes, n)
    assert mirrored.low == pytest.approx(1 - found.high, abs=1e-12)
    assert mirrored.high == pytest.approx(1 - found.low, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1000, 99_999])
def test_wilson_at_the_ends_is_exact(n):
    assert wilson(0, n).low == 0.0
    assert wilson(n, n).high == 1.0


def test_wilson_narrows():
    widths = [wilson(n // 2, n).high - wilson(n // 2, n).low for n in (10, 100, 1000, 10_000)]
    assert widths == sorted(widths, reverse=True)


def test_nothing_observed_is_no_rate():
    assert wilson(0, 0) is None
    assert bootstrap_mean([]) is None
    assert paired_bootstrap([], []) is None


@pytest.mark.parametrize(("successes", "n"), [(-1, 10), (11, 10), (1, 0), (0, -1)])
def test_impossible_counts(successes, n):
    with pytest.raises(ValueError, match="successes of"):
        wilson(successes, n)


# ---------------------------------------------------------------- bootstrap


def test_one_seed_gives_one_interval():
    values = np.random.default_rng(3).normal(size=50)
    first = bootstrap_mean(values, seed=1)
    assert first == bootstrap_mean(list(values), seed=1)
    assert first != bootstrap_mean(values, seed=2)
    other = paired_bootstrap(values, values[::-1], seed=1)
    assert other == paired_bootstrap(values, values[::-1], seed=1)


def test_bootstrap_values():
    values = [1.0, 2.0, 3.0, 4.0]
    found = bootstrap_mean(values)
    assert isinstance(found, Estimate)
    assert (found.value, found.n) == (2.5, 4)
    assert 1.0 <= found.low < 2.5 < found.high <= 4.0
    assert bootstrap_mean([2.0] * 9) == Estimate(2.0, 2.0, 2.0, 9)
    assert bootstrap_mean([5]) == Estimate(5.0, 5.0, 5.0, 1)
    assert bootstrap_mean([True, False]).value == 0.5


def test_bootstrap_agrees_with_theory():
    values = np.random.default_rng(5).normal(10, 3, size=400)
    found = bootstrap_mean(values, resamples=4000)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_bootstrap_covers_what_it_says():
    """Nominal 95 %; the percentile bootstrap of 40 values is known to reach a little less."""
    draw = np.random.default_rng(11)
    hits = 0
    for seed in range(300):
        found = bootstrap_mean(draw.normal(1.0, 2.0, size=40), seed=seed, resamples=400)
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / 300 <= 0.99


def test_wilson_covers_what_it_says():
    draw = np.random.default_rng(12)
    for rate in (0.05, 0.3, 0.5):
        found = [wilson(int(count), 60) for count in draw.binomial(60, rate, size=1000)]
        assert 0.92 <= sum(one.low <= rate <= one.high for one in found) / 1000 <= 0.99


def test_pairing_narrows_what_prompts_share():
    draw = np.random.default_rng(13)
    hard = draw.normal(size=200)  # what a prompt does to both systems
    ours = hard + draw.normal(0.1, 0.1, size=200)
    theirs = hard + draw.normal(0.0, 0.1, size=200)
    paired = paired_bootstrap(ours, theirs)
    alone = [bootstrap_mean(ours), bootstrap_mean(theirs)]
    assert paired.value == pytest.approx(ours.mean() - theirs.mean())
    unpaired = math.hypot(*(one.high - one.low for one in alone))
    assert paired.high - paired.low < unpaired / 3
    assert paired.low > 0  # the difference shows only when paired
    assert alone[0].low < alone[1].high
    assert paired.n == 200


def test_paired_takes_ours_minus_theirs_in_order():
    assert paired_bootstrap([3, 5], [1, 3]) == Estimate(2.0, 2.0, 2.0, 2)
    forward, backward = (
        paired_bootstrap([1, 4, 2], [2, 1, 1]),
        paired_bootstrap([2, 1, 1], [1, 4, 2]),
    )
    assert forward.value == -backward.value
    assert forward.low == pytest.approx(-backward.high, abs=0.5)


@pytest.mark.parametrize(("ours", "theirs"), [([1, 2], [1]), ([], [1]), ([1.0], [])])
def test_unequal_series_are_not_the_same_prompts(ours, theirs):
    with pytest.raises(ValueError, match="not the same prompts"):
        paired_bootstrap(ours, theirs)


@settings(fixed, max_examples=60)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 100))
def test_the_interval_lies_within_the_values(values, seed):
    found = bootstrap_mean(values, seed=seed, resamples=200)
    slack = 1e-9 * max(1.0, *map(abs, values))
    assert min(values) - slack <= found.low <= found.high <= max(values) + slack
    assert found.value == pytest.approx(sum(values) / len(values), abs=1e-6)


def test_long_series_are_drawn_in_slices():
    """A long series must not need resamples x n numbers at once."""
    for total, width in ((2000, 1), (2000, 10), (2000, 20_000), (7, 10_000_000), (2000, 4_000_000)):
        slices = _slices(total, width)
        assert sum(slices) == total
        assert all(rows * width <= max(4_000_000, width) for rows in slices)
        assert min(slices) > 0


# ---------------------------------------------------------------- two systems, several tests


def outcomes(won, lost, both=3, neither=4):
    """Right and wrong of two systems that disagree in so many items."""
    pairs = [(1, 0)] * won + [(0, 1)] * lost + [(1, 1)] * both + [(0, 0)] * neither
    return [list(one) for one in zip(*pairs, strict=True)]


@pytest.mark.parametrize(
    ("won", "lost", "p"),
    [
        (10, 0, 2 / 1024),
        (0, 10, 2 / 1024),
        (5, 5, 1.0),
        (0, 0, 1.0),
        (1, 0, 1.0),
        (8, 2, 112 / 1024),
    ],
)
def test_mcnemar(won, lost, p):
    assert mcnemar(*outcomes(won, lost)) == pytest.approx(p)


@fixed
@given(st.integers(0, 400), st.integers(0, 400))
def test_mcnemar_is_the_binomial_test(won, lost):
    stats = pytest.importorskip("scipy.stats")
    expected = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert mcnemar(*outcomes(won, lost)) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_many_items_and_of_unequal_series():
    assert 0 < mcnemar(*outcomes(7100, 6900)) < 0.1
    with pytest.raises(ValueError, match="not the same items"):
        mcnemar([True], [])


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == [] and holm([0.2]) == [0.2] and holm([0.9, 0.8]) == [1.0, 1.0]


@fixed
@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_only_raises_and_keeps_the_order(values):
    adjusted = holm(values)
    assert all(value <= one <= 1 for value, one in zip(values, adjusted, strict=True))
    ranked = [one for _, one in sorted(zip(values, adjusted, strict=True))]
    assert ranked == sorted(ranked)


def test_the_smallest_difference_is_found_in_80_percent_of_the_tries():
    draw = np.random.default_rng(3)
    n, spread = 400, 0.7
    smallest = smallest_difference(spread * draw.standard_normal(100_000)) * math.sqrt(100_000 / n)
    found = [
        bootstrap_mean(smallest + spread * draw.standard_normal(n), seed, 500).low > 0
        for seed in range(300)
    ]
    assert 0.73 <= np.mean(found) <= 0.87
    assert smallest_difference([1.0]) is None and smallest_difference([2.0, 2.0]) == 0


def test_a_drop_of_5_points_at_the_size_of_gsm8k_is_found_in_most_runs():
    """Of 1,319 items the base gets 60 % right; 15 % change sides either way, and 5 % more."""
    draw = np.random.default_rng(4)
    found = 0
    for seed in range(100):
        base = draw.random(1319) < 0.6
        lost = base & (draw.random(1319) < (0.075 + 0.05) / 0.6)
        won = ~base & (draw.random(1319) < 0.075 / 0.4)
        model = (base & ~lost) | won
        estimate = paired_bootstrap(model, base, seed, 1000)
        found += estimate.high < 0 and mcnemar(model, base) < 0.05
    assert found > 80


def test_10000_resamples_of_805_prompts_take_less_than_a_second():
    values = np.random.default_rng(0).random(805)
    start = time.perf_counter()
    paired_bootstrap(values, values[::-1], resamples=10_000)
    assert time.perf_counter() - start < 3  # a third of it on a machine that does nothing else


# ---------------------------------------------------------------- flipped signs


def test_flipped_signs_of_one_sided_differences():
    """Of 2^8 ways to set the signs, two are as far from zero as eight equal gains."""
    assert sign_flips([1.0] * 8, seed=0, resamples=100_000) == pytest.approx(2 / 2**8, rel=0.1)


@pytest.mark.parametrize("differences", [[], [0.0] * 9])
def test_nothing_moved_is_no_evidence(differences):
    assert sign_flips(differences) == 1.0


@fixed
@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.integers(0, 5))
def test_flipped_signs_know_no_direction(values, seed):
    p = sign_flips(values, seed, 200)
    assert 0 < p <= 1
    assert p == sign_flips([-value for value in values], seed, 200)


def test_flipped_signs_reject_a_true_zero_in_5_percent():
    draw = np.random.default_rng(0)
    missed = sum(sign_flips(draw.normal(size=40), trial, 400) <= 0.05 for trial in range(400))
    assert 8 <= missed <= 36
