"""What a report shows beside its metrics: groups, examples, regressions, and what is missing.

All of it is counted from the rows of the parquet files: verdicts, answers and items.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from selfsynth.stats import Estimate, about_equal, bootstrap_mean

COMPARISONS = ("model_vs_baseline", "base_vs_baseline", "model_vs_base")
GAPS = ("shorter", "about equal", "longer")
EXAMPLES = 4  # wins, and as many losses
MOST_DATASETS = 20
MOST_REGRESSIONS = 50  # of one task
FEWEST_IN_BIN, MOST_BINS = 10, 8


class Group(NamedTuple):
    """The win rates of a part of the instructions.

    Attributes:
        name: of the part.
        rates: by comparison in percent, None where no verdict can be read.
    """

    name: str
    rates: dict[str, Estimate | None]


class Bin(NamedTuple):
    """Answers of about one length.

    Attributes:
        length: median length as a share of the other answer's.
        rate: win rate in percent.
    """

    length: float
    rate: Estimate


def by_dataset(verdicts: Sequence[Mapping[str, Any]], seed: int) -> list[Group]:
    """Return the win rates by the set that instructions come from, the largest sets alone."""
    sizes = Counter(row["dataset"] for row in verdicts)
    largest = [name for name, _ in sizes.most_common(MOST_DATASETS)]
    return _groups(sorted(largest), verdicts, lambda rows: [row["dataset"] for row in rows], seed)


def by_length_gap(verdicts: Sequence[Mapping[str, Any]], seed: int) -> list[Group]:
    """Return the win rates where the first-named's answer is shorter, about as long, longer.

    About equal are lengths in characters that differ by 10 % at most.
    """
    return _groups(GAPS, verdicts, _gaps, seed)


def _gaps(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    theirs, ours = _lengths(rows)
    equal = about_equal(ours, theirs)
    return [
        "about equal" if same else "longer" if longer else "shorter"
        for same, longer in zip(equal, ours > theirs, strict=True)
    ]


def _groups(
    names: Sequence[str],
    verdicts: Sequence[Mapping[str, Any]],
    name_of: Callable[[Sequence[Mapping]], Sequence[str]],
    seed: int,
) -> list[Group]:
    rates: dict[str, dict[str, Estimate | None]] = {name: {} for name in names}
    for comparison in COMPARISONS:
        rows = _readable(verdicts, comparison)
        placed = list(zip(name_of(rows), rows, strict=True))
        for name in names:
            won = [_rate(row) for group, row in placed if group == name]
            rates[name][comparison] = bootstrap_mean(won, seed)
    return [Group(name, found) for name, found in rates.items()]


def by_length(
    verdicts: Sequence[Mapping[str, Any]], comparison: str, seed: int
) -> tuple[np.ndarray, np.ndarray, list[Bin]]:
    """Return the relative length of every answer, its win rate, and both by bins of one size.

    Returns:
        Lengths as a share of the other answer's, shape (n,); win rates in percent, shape (n,);
        the bins, shortest answers first.
    """
    rows = _readable(verdicts, comparison)
    theirs, ours = _lengths(rows)
    share = np.maximum(ours, 1) / np.maximum(theirs, 1)
    rates = np.array([_rate(row) for row in rows])
    count = int(np.clip(len(rows) // FEWEST_IN_BIN, 1, MOST_BINS)) if rows else 0
    places = np.array_split(np.argsort(share, kind="stable"), count) if count else []
    bins = [
        Bin(float(np.median(share[some])), bootstrap_mean(rates[some], seed)) for some in places
    ]
    return share, rates, bins


def _readable(verdicts: Iterable[Mapping[str, Any]], comparison: str) -> list[Mapping[str, Any]]:
    return [
        row for row in verdicts if row["comparison"] == comparison and row["preference"] is not None
    ]


def _lengths(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the characters of both answers, each of shape (n,): of the other's and of ours."""
    found = [[len(row["output_1"] or ""), len(row["output_2"] or "")] for row in rows]
    return tuple(np.array(found, dtype=np.float64).reshape(-1, 2).T)


def _rate(row: Mapping[str, Any]) -> float:
    return 100 * (row["preference"] - 1)


def wins_and_losses(
    verdicts: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the verdicts between model and base that are surest: the model's wins, its losses."""
    rows = sorted(
        _readable(verdicts, "model_vs_base"), key=lambda row: (-row["preference"], row["id"])
    )
    wins = [row for row in rows if row["preference"] > 1.5]
    losses = [row for row in rows if row["preference"] < 1.5]
    return wins[:EXAMPLES], losses[::-1][:EXAMPLES]


class Regressions(NamedTuple):
    """The items of a task that the base got right, or more nearly so, and the model did not.

    Attributes:
        task: its name.
        lost, gained, n: items with a lower score than the base's, a higher one, and all that both
            answered.
        items: pairs (model's row, base's row) of what was lost, the largest drop first.
    """

    task: str
    lost: int
    gained: int
    n: int
    items: list[tuple[Mapping[str, Any], Mapping[str, Any]]]


def regressions(items: Sequence[Mapping[str, Any]]) -> list[Regressions]:
    """Return what was lost, task by task."""
    found = []
    for task in dict.fromkeys(row["task"] for row in items):
        ours, theirs = (
            {
                row["id"]: row
                for row in items
                if row["task"] == task and row["system"] == system and row["failure"] is None
            }
            for system in ("model", "base")
        )
        both = [(row, theirs[key]) for key, row in ours.items() if key in theirs]
        moved = [one["correct"] - other["correct"] for one, other in both]
        lost = [pair for pair, change in zip(both, moved, strict=True) if change < 0]
        lost.sort(key=lambda pair: (pair[0]["correct"] - pair[1]["correct"], pair[0]["id"]))
        gained = sum(change > 0 for change in moved)
        found.append(Regressions(task, len(lost), gained, len(both), lost[:MOST_REGRESSIONS]))
    return found


class Count(NamedTuple):
    """Something that is not as it should be: of `of`, `count` are."""

    what: str
    count: int
    of: int


def shortfalls(
    answers: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    items: Sequence[Mapping[str, Any]],
) -> list[Count]:
    """Count what is missing, empty, cut or unreadable; what does not occur is left out."""
    found = []
    for system in ("model", "base"):
        rows = [row for row in answers if row["system"] == system]
        found += [
            Count(f"{system}: answers missing ({reason})", count, len(rows))
            for reason, count in _reasons(rows, "failure")
        ]
        empty = sum(row["answer"] is not None and not row["answer"].strip() for row in rows)
        cut = sum(row["finish_reason"] == "length" for row in rows)
        found.append(Count(f"{system}: answers empty", empty, len(rows)))
        found.append(Count(f"{system}: answers cut by the token limit", cut, len(rows)))
    for comparison in COMPARISONS:
        rows = [row for row in verdicts if row["comparison"] == comparison]
        found += [
            Count(f"{comparison.replace('_', ' ')}: verdicts missing ({reason})", count, len(rows))
            for reason, count in _reasons(rows, "reason")
        ]
    for task in dict.fromkeys(row["task"] for row in items):
        for system in ("model", "base"):
            rows = [row for row in items if row["task"] == task and row["system"] == system]
            found += [
                Count(f"{system}: {task} answers missing ({reason})", count, len(rows))
                for reason, count in _reasons(rows, "failure")
            ]
            cut = sum(bool(row["cut"]) for row in rows)
            found.append(Count(f"{system}: {task} answers cut by the token limit", cut, len(rows)))
    return [one for one in found if one.count]


def _reasons(rows: Iterable[Mapping[str, Any]], column: str) -> list[tuple[str, int]]:
    counted = Counter(row[column] for row in rows if row[column])
    return sorted(counted.items())
