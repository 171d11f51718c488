"""The gate: did the model lose more than it may, and win what it must?

A drop is a regression where its interval lies below zero and the estimate is past what is allowed
(a test of difference); it is allowed where the whole interval is within what is allowed (a test of
non-inferiority). Between the two the data are not enough to tell.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from selfsynth.errors import UsageError

PASSED, FAILED, UNCLEAR = "passed", "failed", "not enough data to tell"


class Outcome(NamedTuple):
    """What became of one rule.

    Attributes:
        rule: as the user wrote it, such as `--max-drop gsm8k=2`.
        verdict: PASSED, FAILED or UNCLEAR.
        reason: in words, with the numbers.
    """

    rule: str
    verdict: str
    reason: str


def read_rules(flag: str, texts: list[str] | None) -> dict[str, float]:
    """Return limits by metric, in points, from texts such as `gsm8k=2`.

    Raises:
        UsageError: one is not of this form, is no number from 0 to 100, or names a metric again.
    """
    found = {}
    for text in texts or ():
        name, sign, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not (name.strip() and sign and 0 <= value <= 100):
            raise UsageError(f"{flag} {text}: it takes METRIC=POINTS, such as gsm8k=2")
        if name in found:
            raise UsageError(f"{flag} names {name} twice")
        found[name] = value
    return found


def check(
    metrics: Mapping[str, Mapping[str, Any]],
    max_drop: Mapping[str, float],
    min_win: Mapping[str, float],
) -> list[Outcome]:
    """Hold the metrics of a report against limits.

    Args:
        metrics: of `results.json`.
        max_drop: points that the model may be worse than the base.
        min_win: percent that the lower end of the model's interval must reach.

    Raises:
        UsageError: the report has no such metric, or `min_win` names one that is no win rate.
    """
    for name in (*max_drop, *min_win):
        if name not in metrics:
            raise UsageError(f"the report has no {name}, only {', '.join(metrics)}")
    for name in min_win:
        if metrics[name]["task"] != "alpaca":
            raise UsageError(f"--min-win {name}: it is no win rate")
    outcomes = [_drop(name, metrics[name], limit) for name, limit in max_drop.items()]
    return outcomes + [_win(name, metrics[name], limit) for name, limit in min_win.items()]


def _drop(name: str, metric: Mapping[str, Any], allowed: float) -> Outcome:
    rule, moved = f"--max-drop {name}={allowed:g}", metric["difference"]
    if unknown := _unknown(metric, moved):
        return Outcome(rule, UNCLEAR, f"{name}: {unknown}")
    # Of what should be low, a drop is a rise.
    sign = 1 if metric["higher_is_better"] else -1
    value = sign * moved["value"]
    low, high = sorted((sign * moved["low"], sign * moved["high"]))
    said = f"{name} moved by {value:+.2f} ({low:+.2f} to {high:+.2f}, n = {moved['n']:,})"
    if high < 0 and value < -allowed:
        return Outcome(rule, FAILED, f"{said}: a drop of more than {allowed:g}")
    if low >= -allowed:
        return Outcome(rule, PASSED, said)
    return Outcome(rule, UNCLEAR, f"{said}: a drop of more than {allowed:g} is not ruled out")


def _win(name: str, metric: Mapping[str, Any], least: float) -> Outcome:
    rule, rate = f"--min-win {name}={least:g}", metric["model"]
    if unknown := _unknown(metric, rate):
        return Outcome(rule, UNCLEAR, f"{name}: {unknown}")
    low, high = rate["low"], rate["high"]
    said = f"{name} is {rate['value']:.2f} ({low:.2f} to {high:.2f}, n = {rate['n']:,})"
    if low >= least:
        return Outcome(rule, PASSED, said)
    if rate["value"] < least:
        return Outcome(rule, FAILED, f"{said}: below {least:g}")
    return Outcome(rule, UNCLEAR, f"{said}: that it is below {least:g} is not ruled out")


def _unknown(metric: Mapping[str, Any], estimate: Mapping[str, Any] | None) -> str | None:
    if metric["doubt"]:
        return metric["doubt"]
    return None if estimate else metric["why"] or "there is no estimate"
