"""What differs between two versions of a dataset: rows, settings, statistics."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hub_cards.cards import runs_of
from hub_cards.measures import measure, text_of
from selfsynth.errors import SelfsynthError
from selfsynth.provenance import changes
from selfsynth.runs import RunFolder, read_data
from selfsynth.stats import Estimate

STATISTICS = {
    "longer_wins_rate": "longer response chosen",
    "judged_kept": "kept, of the rows judged",
    "tie_rate": "ties, of the rows judged",
    "unreadable_rate": "no readable verdict, of the rows judged",
    "first_position_rate": "response shown first favoured",
    "order_agreement": "both orders agree",
    "repeated_prompt_rate": "repeated prompts",
    "near_duplicate_rate": "nearly repeated prompts",
}


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Compare the versions that two folders hold.

    Returns:
        added, removed: ids of the pairs that only the second, only the first has.
        flipped: ids of the pairs whose chosen and rejected are swapped.
        same: how many pairs are the same in both, whatever their margins.
        settings: `[key, first's value, second's value]` where the identities differ.
        statistics: by name what the two measure, `[first's, second's]`, where that differs; rates
            and means as `value`, `low`, `high` (95 %) and `n`, or None with nothing to observe.

    Raises:
        SelfsynthError: a folder holds no dataset.
    """
    one, other = _read(first), _read(second)
    there, here = one["pairs"], other["pairs"]
    both = [key for key in here if key in there]
    flipped = [key for key in both if _chosen(there[key]) != _chosen(here[key])]
    return {
        "added": [key for key in here if key not in there],
        "removed": [key for key in there if key not in here],
        "flipped": flipped,
        "same": len(both) - len(flipped),
        "settings": [list(each) for each in changes(one["identity"], other["identity"])],
        "statistics": {
            name: [one["numbers"].get(name), other["numbers"].get(name)]
            for name in dict.fromkeys([*one["numbers"], *other["numbers"]])
            if one["numbers"].get(name) != other["numbers"].get(name)
        },
    }


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """Return a comparison in words, for a terminal."""
    lines = [
        f"pairs: {len(found['added']):,} added, {len(found['removed']):,} removed, "
        f"{len(found['flipped']):,} flipped, {found['same']:,} the same"
    ]
    for name in ("added", "removed", "flipped"):
        lines += _listed(name, found[name])
    lines += ["settings:" if found["settings"] else "settings: the same"]
    lines += [f"  {key}: {_word(a)} → {_word(b)}" for key, a, b in found["settings"]]
    lines += ["statistics:" if found["statistics"] else "statistics: the same"]
    lines += [
        f"  {name}: {_cell(name, a)} → {_cell(name, b)}"
        for name, (a, b) in found["statistics"].items()
    ]
    return lines


def _listed(name: str, ids: Sequence[str]) -> list[str]:
    more = f" … and {len(ids) - 8:,} more (--json lists them)" if len(ids) > 8 else ""
    return [f"  {name}: {' '.join(ids[:8])}{more}"] if ids else []


def _read(folder: Path) -> dict[str, Any]:
    run = RunFolder(folder)
    if not run.card.is_file():
        raise SelfsynthError(f"{folder} holds no finished dataset: there is no README.md")
    made = run.published()
    judging, runs = made.get("judging") or {}, runs_of(made["identity"])
    orders = {one.get("judge_orders") for one in runs}
    pairs, ledger = read_data(folder)
    measured = measure(
        pairs, ledger, judging.get("mode"), orders.pop() if len(orders) == 1 else None
    )
    numbers = {"asked for": measured["asked"], "kept": measured["kept"]}
    numbers |= {f"dropped {reason}": count for reason, count in measured["dropped"].items()}
    numbers |= {words: _estimate(measured[name]) for name, words in STATISTICS.items()}
    for unit, means in measured["lengths"].items():
        for name in ("prompt", "chosen", "rejected", "gap"):
            numbers[f"mean length of {name}, {unit}"] = _estimate(means[name])
    numbers["median margin"] = (measured["margins"] or {}).get("median")
    return {
        "pairs": {row["id"]: row for row in pairs},
        "identity": made["identity"],
        "numbers": {name: value for name, value in numbers.items() if value is not None},
    }


def _chosen(row: Mapping) -> str:
    return text_of(row["chosen"])


def _estimate(one: Estimate | None) -> dict[str, Any] | None:
    return one and {"value": one.value, "low": one.low, "high": one.high, "n": one.n}


def _cell(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        scale, unit = (100, " %") if name in STATISTICS.values() else (1, "")
        numbers = [f"{scale * value[key]:.1f}{unit}" for key in ("value", "low", "high")]
        return f"{numbers[0]} ({numbers[1]} to {numbers[2]}, n {value['n']:,})"
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:119] + "…"
