"""The report that people read: `report.html`, one file that opens offline, and `report.md`.

Both say what `results.json` says and what `eval.breakdown` counts. Texts of models and datasets
are material: they are escaped, characters that hide or reorder text are spelt out, and long ones
are shortened with a mark.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from eval import breakdown, pictures
from eval.results import SAME
from hub_cards.cards import environment, flat, shortened
from selfsynth import audit as auditing
from selfsynth.runs import write_whole

EXAMPLE_CHARACTERS = 1500
REGRESSION_CHARACTERS = 700


def write_report(
    folder: Path,
    results: Mapping[str, Any],
    verdicts: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    items: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> None:
    """Write `report.md`, then `report.html`.

    Args:
        folder: of the report.
        results: `results.json`.
        verdicts, answers, items: the rows of the parquet files (`eval.running`).
        provenance: what `selfsynth.provenance.build` returned.
    """
    seen = view(results, verdicts, answers, items, provenance)
    made = _environment()
    write_whole(folder / "report.md", made.get_template("report.md.j2").render(seen))
    page = made.overlay(autoescape=True).get_template("report.html.j2").render(seen)
    write_whole(folder / "report.html", page)


def view(
    results: Mapping[str, Any],
    verdicts: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
    items: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the templates show."""
    metrics, seed = results["metrics"], results["seed"]
    first = [one for one in metrics.values() if one["primary"] or one["why"]]
    wins, losses = breakdown.wins_and_losses(verdicts)
    series = {
        who: breakdown.by_length(verdicts, f"{who}_vs_baseline", seed) for who in ("model", "base")
    }
    moved = [one for one in first if one["difference"]]
    compared = any(len(lengths) for lengths, _, _ in series.values())
    baseline = (results["alpaca"] or {}).get("baseline")
    judge = results["judge"]
    return {
        **results,
        "first": first,
        "details": [one for one in metrics.values() if one not in first],
        "tested": sum(one["p_holm"] is not None for one in metrics.values()),
        "differences": _inlined(pictures.draw_differences(moved)) if moved else None,
        "by_length": _inlined(pictures.draw_win_rate_by_length(series, baseline))
        if compared
        else None,
        "datasets": breakdown.by_dataset(verdicts, seed),
        "gaps": breakdown.by_length_gap(verdicts, seed),
        "comparisons": _comparisons(results) if results["alpaca"] else {},
        "audit": judge and judge["audit"],
        "audit_sentence": judge and judge["audit"] and auditing.sentence(judge["audit"]),
        "accuracy": auditing.accuracy,
        "kinds": auditing.KINDS,
        "wins": wins,
        "losses": losses,
        "regressions": breakdown.regressions(items),
        "shortfalls": breakdown.shortfalls(answers, verdicts, items),
        "most_regressions": breakdown.MOST_REGRESSIONS,
        "labels": {name: one["label"] for name, one in metrics.items()},
        "settings": list(flat(provenance["identity"])),
        "provenance": provenance,
        "example_characters": EXAMPLE_CHARACTERS,
        "regression_characters": REGRESSION_CHARACTERS,
    }


def _comparisons(results: Mapping[str, Any]) -> dict[str, str]:
    baseline = results["alpaca"]["baseline"]
    return {
        "model_vs_baseline": f"model against {baseline}",
        "base_vs_baseline": f"base against {baseline}",
        "model_vs_base": "model against base",
    }


def _inlined(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


# ---------------------------------------------------------------- how the templates spell things


def _environment() -> Environment:
    made = environment(Path(__file__).parent / "templates")
    made.filters |= {
        "fixed": fixed,
        "interval": interval,
        "remarks": remarks,
        "shortened": shortened,
        "signed": signed,
    }
    return made


def remarks(metric: Mapping[str, Any]) -> list[str]:
    """Return what must be known beside a metric's verdict, a few words each."""
    found = [f"not to be believed: {metric['doubt']}"] if metric["doubt"] else []
    if metric["why"]:
        found.append(metric["why"])
    moved, least = metric["difference"], metric["smallest_difference"]
    if metric["verdict"] == SAME and not moved["low"] <= 0 <= moved["high"]:
        corrected = metric["p_holm"] is not None
        p = metric["p_holm"] if corrected else metric["p"]
        found.append(f"p = {p:.2g}{' after the correction' if corrected else ''}")
    elif metric["verdict"] == SAME and least:
        found.append(f"this n would have shown {fixed(least)} points")
    if metric["missing"]:
        found.append(f"{metric['missing']:,} missing")
    return found


def fixed(value: float | None) -> str:
    """Spell a number with two digits behind the point."""
    return "—" if value is None else f"{value:,.2f}".replace("-", "−")


def signed(value: float | None) -> str:
    """Spell a difference with its sign."""
    return "—" if value is None else f"{value:+,.2f}".replace("-", "−")


def interval(estimate: Mapping[str, float] | None, sign: bool = False) -> str:
    """Spell an interval: from its lower to its upper end."""
    if estimate is None:
        return "—"
    spell = signed if sign else fixed
    return f"{spell(estimate['low'])} to {spell(estimate['high'])}"
