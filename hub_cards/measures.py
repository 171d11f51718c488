"""The numbers on a dataset's card, computed from its rows alone.

Nothing here knows how the rows came about, so the same numbers can be computed again from a
published dataset and compared with its card.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from selfsynth.judge import favoured_places
from selfsynth.schema import reason_counts
from selfsynth.stats import Estimate, bootstrap_mean, paired_bootstrap, wilson

NOISE = 0.04
"""By so much the same verdict moved when llama.cpp answered it again in other company: the noise
floor where none was measured."""


_UNJUDGED = (
    "request_failed",
    "context_exceeded",
    # Rows that were judged in their run, and left when it was merged with others.
    "prompt_repeated",
    "prompt_near_duplicate",
)


def measure(
    pairs: Sequence[Mapping],
    ledger: Sequence[Mapping],
    judge_mode: str | None,
    orders: int | None = 2,
    noise: float = NOISE,
) -> dict[str, Any]:
    """Return the numbers of a dataset; a rate or a mean with nothing to observe is None.

    Args:
        pairs: rows of `selfsynth.schema.PAIR_SCHEMA`, of all splits.
        ledger: rows of `selfsynth.schema.LEDGER_SCHEMA`.
        judge_mode: how the judge was asked (`selfsynth.schema.JUDGE_MODES`); another value, or
            None where modes differ, when there is nothing to say of places.
        orders: pairwise: in how many orders each two responses were shown; None where it differs,
            and there is nothing to say of agreement.
        noise: the noise floor, in the unit of the margins.

    Returns:
        asked, kept: rows of the ledger, and those of them that are kept.
        dropped: rows by reason, in the order of `selfsynth.schema.REASONS`.
        repeated_prompt_rate, near_duplicate_rate: share of the rows with a prompt that left with
            `prompt_repeated`, `prompt_near_duplicate`.
        judged: rows of which the judge was asked, and heard.
        judged_kept, tie_rate, unreadable_rate: shares of the judged rows that are kept, that left
            with `verdict_tie`, and with `verdict_unreadable` or `verdict_missing`.
        first_position_rate: share of the verdicts that favour the response shown first; None
            unless pairwise. Two responses asked in two orders have two verdicts. A verdict that
            cannot be read, or is exactly even, is not counted.
        order_agreement: share of the comparisons with two such verdicts in which both name the
            same response; None unless pairwise. A judge that looks at places only scores 0.
        longer_wins_rate: share of the pairs in which the chosen response has more characters;
            pairs of equal length are not counted.
        lengths: by unit (`characters`, `tokens`) the means of `prompt` (characters only),
            `chosen`, `rejected` and `gap`, the mean of chosen minus rejected over the same pairs;
            and `missing`, the number of pairs left out because a count is missing.
        margins: count `n`, `minimum`, `lower_quartile`, `median`, `upper_quartile`, `maximum` and
            `noise_rate`, the share below `noise`; None when no pair has a margin.

        Rates carry Wilson's interval, means the bootstrap's (the gap: over pairs). The order of
        the rows changes nothing.
    """
    dropped = reason_counts(ledger)
    written = [row for row in ledger if (row["prompt"] or "").strip()]
    judged = [row for row in ledger if row["verdicts"] and row["reason"] not in _UNJUDGED]
    places = (
        [comparison for row in judged for comparison in _places(row, orders or 1)]
        if judge_mode == "pairwise"
        else []
    )
    return {
        "asked": len(ledger),
        "kept": sum(row["status"] == "kept" for row in ledger),
        "dropped": dropped,
        "repeated_prompt_rate": _rate(written, "prompt_repeated"),
        "near_duplicate_rate": _rate(written, "prompt_near_duplicate"),
        "judged": len(judged),
        "judged_kept": _share(row["status"] == "kept" for row in judged),
        "tie_rate": _rate(judged, "verdict_tie"),
        "unreadable_rate": _rate(judged, "verdict_unreadable", "verdict_missing"),
        "first_position_rate": _share(
            place == 0 for comparison in places for place in comparison if place is not None
        ),
        "order_agreement": _share(
            # The response shown first in one order is shown second in the other.
            comparison[0] != comparison[1]
            for comparison in places
            if len(comparison) == 2 and None not in comparison
        ),
        "longer_wins_rate": _longer_wins(pairs),
        "lengths": {"characters": _characters(pairs), "tokens": _tokens(pairs)},
        "margins": _margins(pairs, noise),
    }


def text_of(turns: Sequence[Mapping]) -> str:
    """Return what the last turn of a prompt or a response says."""
    return turns[-1]["content"]


def margins_of(pairs: Sequence[Mapping]) -> list[float]:
    """Return the judge's margins, without the missing ones."""
    return [row["judge_margin"] for row in pairs if row["judge_margin"] is not None]


def _share(hits) -> Estimate | None:  # noqa: ANN001 - an iterable of booleans
    hits = list(hits)
    return wilson(sum(hits), len(hits))


def _rate(rows: Sequence[Mapping], *reasons: str) -> Estimate | None:
    return _share(row["reason"] in reasons for row in rows)


def _places(row: Mapping, orders: int) -> list[list[int | None]]:
    """Return, for each two responses, the place that the verdict of each order favours."""
    places = favoured_places(row["scores"] or [], row["verdicts"] or [])
    return [places[start : start + orders] for start in range(0, len(places), orders)]


def _longer_wins(pairs: Sequence[Mapping]) -> Estimate | None:
    gaps = [len(text_of(row["chosen"])) - len(text_of(row["rejected"])) for row in pairs]
    return _share(gap > 0 for gap in gaps if gap)


def _characters(pairs: Sequence[Mapping]) -> dict[str, Any]:
    prompt, chosen, rejected = (
        [len(text_of(row[column])) for row in pairs] for column in ("prompt", "chosen", "rejected")
    )
    return {"prompt": bootstrap_mean(sorted(prompt)), **_both(chosen, rejected), "missing": 0}


def _tokens(pairs: Sequence[Mapping]) -> dict[str, Any]:
    counted = [
        (row["chosen_tokens"], row["rejected_tokens"])
        for row in pairs
        if row["chosen_tokens"] is not None and row["rejected_tokens"] is not None
    ]
    chosen, rejected = zip(*counted, strict=True) if counted else ((), ())
    return {"prompt": None, **_both(chosen, rejected), "missing": len(pairs) - len(counted)}


def _both(chosen: Sequence[int], rejected: Sequence[int]) -> dict[str, Estimate | None]:
    # Sorted, because the bootstrap draws by position and splits come back in another order.
    by_gap = sorted(zip(chosen, rejected, strict=True), key=lambda both: (both[0] - both[1], both))
    return {
        "chosen": bootstrap_mean(sorted(chosen)),
        "rejected": bootstrap_mean(sorted(rejected)),
        "gap": paired_bootstrap([one for one, _ in by_gap], [other for _, other in by_gap]),
    }


def _margins(pairs: Sequence[Mapping], noise: float) -> dict[str, Any] | None:
    margins = margins_of(pairs)
    if not margins:
        return None
    names = ("minimum", "lower_quartile", "median", "upper_quartile", "maximum")
    quartiles = np.quantile(margins, (0, 0.25, 0.5, 0.75, 1))
    return {
        "n": len(margins),
        **{name: float(value) for name, value in zip(names, quartiles, strict=True)},
        "noise_rate": _share(margin < noise for margin in margins),
    }
