"""Two reports beside each other: paired where the prompts are the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eval.results import LABELS, RESAMPLES
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.stats import Estimate, mcnemar, paired_bootstrap, sign_flips, smallest_difference


def read_report(folder: Path) -> dict[str, Any]:
    """Return the `results.json` of a finished report.

    Raises:
        UsageError: the folder holds no report.
        SelfsynthError: it cannot be read.
    """
    path = folder / "results.json"
    if not (path.is_file() and (folder / "report.html").is_file()):
        raise UsageError(f"{folder} holds no finished report (results.json, report.html)")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(one["label"], str) for one in found["metrics"].values()):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SelfsynthError(f"{path} cannot be read ({type(error).__name__})") from None
    return found


def compare(one: Path, other: Path, seed: int = 0) -> dict[str, Any]:
    """Compare the models of two reports on the prompts that both have.

    Returns:
        `a`, `b`: the models' names; `judged_alike`: whether judge and annotator are the same, so
        that win rates can be compared; `metrics`: by name `label`, `a`, `b` (percent, over the
        shared prompts), `difference` (a - b: value, low, high, n), `p`, `smallest_difference`,
        and `only_a`, `only_b`, the prompts that one alone has.

    Raises:
        UsageError: a folder holds no report, or they share no prompt.
    """
    found = [read_report(folder) for folder in (one, other)]
    sides = [_values(folder, results) for folder, results in zip((one, other), found, strict=True)]
    judges = [(results["judge"] or {}) for results in found]
    alike = [(judge.get("name"), judge.get("annotator")) for judge in judges]
    metrics = {}
    for name in sides[0]:
        if name not in sides[1]:
            continue
        first, second = sides[0][name], sides[1][name]
        both = [key for key in first if key in second]
        if not both:
            continue
        ours, theirs = [first[key] for key in both], [second[key] for key in both]
        moved = [a - b for a, b in zip(ours, theirs, strict=True)]
        graded = {*ours, *theirs} - {0.0, 100.0}
        metrics[name] = {
            "label": LABELS.get(name, name),
            "a": sum(ours) / len(both),
            "b": sum(theirs) / len(both),
            "difference": _estimate(paired_bootstrap(ours, theirs, seed, RESAMPLES)),
            "p": sign_flips(moved, seed, RESAMPLES) if graded else mcnemar(ours, theirs),
            "smallest_difference": smallest_difference(moved),
            "only_a": len(first) - len(both),
            "only_b": len(second) - len(both),
        }
    if not metrics:
        raise UsageError(f"{one} and {other} have no prompt in common")
    return {
        "a": found[0]["model"]["name"],
        "b": found[1]["model"]["name"],
        "judged_alike": alike[0] == alike[1],
        "metrics": metrics,
    }


def _estimate(estimate: Estimate) -> dict[str, float]:
    return estimate._asdict()


def _values(folder: Path, results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return what each prompt gave the model, in percent, by metric and prompt."""
    found: dict[str, dict[str, float]] = {}
    # A win rate is one against somebody: against another baseline it is another number.
    names = {"model_vs_baseline": "alpaca", "model_vs_base": "alpaca_vs_base"}
    if (path := folder / "data/verdicts.parquet").is_file():
        for row in pq.read_table(path).to_pylist():
            name = names.get(row["comparison"])
            if name and row["preference"] is not None:
                against = row["output_1"] if name == "alpaca" else results["base"]["name"]
                key = f"{row['instruction']}\0{against}"
                found.setdefault(name, {})[key] = 100 * (row["preference"] - 1)
    if (path := folder / "data/items.parquet").is_file():
        for row in pq.read_table(path).to_pylist():
            if row["system"] == "model" and row["failure"] is None:
                found.setdefault(row["task"], {})[row["id"]] = 100 * row["correct"]
    return found
