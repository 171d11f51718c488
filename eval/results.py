"""What a report says in numbers: `results.json`, from verdicts and items.

Every metric has the model's value, the base's, and their difference over the same prompts, each
with a 95 % interval. A difference is called better or worse where its interval leaves zero out and
Holm's correction over the report's primary metrics leaves p at 0.05 or less.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from eval import alpaca
from selfsynth.audit import CHANCE
from selfsynth.stats import (
    Estimate,
    about_equal,
    bootstrap_mean,
    holm,
    mcnemar,
    paired_bootstrap,
    sign_flips,
    smallest_difference,
    wilson,
)

RESAMPLES = 10_000
SAME, BETTER, WORSE = "no difference seen", "better", "worse"
NOT_MEASURABLE, UNJUDGED = "not measurable", "—"
NO_LOGPROBS = "no prompt log-probabilities"

LABELS = {
    "alpaca_lc": "AlpacaEval 2.0, length-controlled win rate",
    "alpaca": "AlpacaEval 2.0, win rate",
    "alpaca_matched": "Win rate where lengths are about equal",
    "alpaca_vs_base": "Against the base, win rate",
    "alpaca_vs_base_matched": "Against the base, where lengths are about equal",
    "gsm8k": "GSM8K, accuracy",
    "gsm8k_strict": "GSM8K, strict match",
    "gsm8k_flexible": "GSM8K, flexible extract",
    "gsm8k_no_answer": "GSM8K, no answer",
    "gsm8k_cut": "GSM8K, cut by the token limit",
    "truthfulqa_mc2": "TruthfulQA, MC2",
    "arc_challenge": "ARC challenge, normalised accuracy",
    "winogrande": "Winogrande, accuracy",
    "hellaswag": "HellaSwag, normalised accuracy",
    "mmlu": "MMLU, accuracy",
}
"""What each metric is called in a report, by its name in `results.json`."""


def metric(name: str, task: str, primary: bool, **known: Any) -> dict[str, Any]:
    """Return a metric with what is known of it; the rest is None."""
    return {
        "label": LABELS.get(name, name),
        "task": task,
        "primary": primary,
        "unit": "%",
        **dict.fromkeys(("model", "base", "difference", "p", "p_holm", "smallest_difference")),
        "missing": 0,
        "higher_is_better": True,
        "verdict": UNJUDGED,
        "why": None,
        "doubt": None,
        **{key: _plain(value) for key, value in known.items()},
    }


def _plain(value: Any) -> Any:
    return value._asdict() if isinstance(value, Estimate) else value


def of_alpaca(
    verdicts: Sequence[Mapping[str, Any]],
    official: alpaca.Official | None,
    doubt: str | None,
    refits: int,
    seed: int,
) -> tuple[dict[str, dict], list[str]]:
    """Return the metrics of AlpacaEval, by name, and what must be said of them.

    Args:
        verdicts: rows of `verdicts.parquet`.
        official: for length control, None where other instructions were asked.
        doubt: why the judge is not to be believed.
        refits: resamples for the interval of the length-controlled win rate.
    """
    rows = {
        name: [row for row in verdicts if row["comparison"] == name]
        for name in ("model_vs_baseline", "base_vs_baseline", "model_vs_base")
    }
    ours, theirs = rows["model_vs_baseline"], rows["base_vs_baseline"]
    missing = sum(row["preference"] is None for row in (*ours, *theirs))
    found, notes = {}, []
    controlled = [
        alpaca.control_length([_whole(row) for row in some], official, refits, seed)
        for some in (ours, theirs)
    ]
    has_control = all(one.value is not None and one.refits is not None for one in controlled)
    if has_control:
        n = [sum(row["preference"] is not None for row in some) for some in (ours, theirs)]
        moved = controlled[0].refits - controlled[1].refits
        low, high = np.quantile(moved, (0.025, 0.975))
        beyond = min((moved <= 0).mean(), (moved >= 0).mean())
        found["alpaca_lc"] = metric(
            *("alpaca_lc", "alpaca", True),
            **{
                who: Estimate(one.value, *_interval(one.refits), count)
                for who, one, count in zip(("model", "base"), controlled, n, strict=True)
            },
            difference=Estimate(
                controlled[0].value - controlled[1].value, float(low), float(high), min(n)
            ),
            # No smaller than so many resamples can show.
            p=float(min(1.0, 2 * max(beyond, 1 / (refits + 1)))),
            smallest_difference=float(2.8 * moved.std(ddof=1)),
            missing=missing,
        )
    else:
        notes += list(dict.fromkeys(note for one in controlled for note in one.notes))
        found["alpaca_lc"] = metric(
            *("alpaca_lc", "alpaca", False), verdict=NOT_MEASURABLE, why=notes[0]
        )
    found["alpaca"] = metric(
        *("alpaca", "alpaca", not has_control),
        model=_win_rate(ours, seed),
        base=_win_rate(theirs, seed),
        missing=missing,
        **_paired(ours, theirs, seed),
    )
    if not has_control:
        found["alpaca_matched"] = metric(
            *("alpaca_matched", "alpaca", False),
            model=_win_rate(_matched(ours), seed),
            base=_win_rate(_matched(theirs), seed),
        )
    met = rows["model_vs_base"]
    against = _win_rate(met, seed)
    found["alpaca_vs_base"] = metric(
        *("alpaca_vs_base", "alpaca", True),
        model=against,
        missing=sum(row["preference"] is None for row in met),
        **_against_half(met, against, seed),
    )
    found["alpaca_vs_base_matched"] = metric(
        *("alpaca_vs_base_matched", "alpaca", False), model=_win_rate(_matched(met), seed)
    )
    for one in found.values():
        one["doubt"] = doubt
    return found, notes


def _whole(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "output_1": row["output_1"] or "", "output_2": row["output_2"] or ""}


def _rates(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return preferences in percent, by instruction, where there are any."""
    return {
        row["instruction"]: 100 * (row["preference"] - 1)
        for row in rows
        if row["preference"] is not None
    }


def _win_rate(rows: Iterable[Mapping[str, Any]], seed: int) -> Estimate | None:
    return bootstrap_mean(list(_rates(rows).values()), seed, RESAMPLES)


def _matched(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    lengths = np.array([[len(row["output_1"] or ""), len(row["output_2"] or "")] for row in rows])
    if not len(lengths):
        return []
    return [row for row, equal in zip(rows, about_equal(*lengths.T), strict=True) if equal]


def _paired(ours: Sequence[Mapping], theirs: Sequence[Mapping], seed: int) -> dict[str, Any]:
    one, other = _rates(ours), _rates(theirs)
    both = [text for text in one if text in other]
    if not both:
        return {}
    moved = [one[text] - other[text] for text in both]
    return {
        "difference": paired_bootstrap(
            [one[text] for text in both], [other[text] for text in both], seed, RESAMPLES
        ),
        "p": sign_flips(moved, seed, RESAMPLES),
        "smallest_difference": smallest_difference(moved),
    }


def _against_half(rows: Sequence[Mapping], rate: Estimate | None, seed: int) -> dict[str, Any]:
    if rate is None:
        return {}
    moved = [value - 50 for value in _rates(rows).values()]
    return {
        "difference": Estimate(rate.value - 50, rate.low - 50, rate.high - 50, rate.n),
        "p": sign_flips(moved, seed, RESAMPLES),
        "smallest_difference": smallest_difference(moved),
    }


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


# ---------------------------------------------------------------- tasks of right and wrong


def of_task(
    task: str, items: Sequence[Mapping[str, Any]], seed: int, why: str | None = None
) -> dict[str, dict]:
    """Return the metrics of a task of lm-eval, by name.

    Args:
        items: rows of `items.parquet`, of this task and both systems.
        why: why it cannot be measured, where it cannot.
    """
    if why:
        return {task: metric(task, task, True, verdict=NOT_MEASURABLE, why=why)}
    systems = [
        {row["id"]: row for row in items if row["system"] == who} for who in ("model", "base")
    ]
    # An answer that is missing is missing: it is neither right nor wrong.
    missing = sum(row["failure"] is not None for one in systems for row in one.values())
    found = {task: _of_items(task, task, systems, seed, missing, lambda row: row["correct"])}
    if task != "gsm8k":
        return found
    details = {
        "gsm8k_strict": lambda row: float(row["strict"]),
        "gsm8k_flexible": lambda row: float(row["flexible"]),
        "gsm8k_no_answer": lambda row: float(row["read"] is None),
        "gsm8k_cut": lambda row: float(bool(row["cut"])),
    }
    for name, value in details.items():
        found[name] = _of_items(name, task, systems, seed, missing, value)
        found[name] |= {"primary": False, "higher_is_better": name not in _COUNTS}
    return found


_COUNTS = ("gsm8k_no_answer", "gsm8k_cut")


def _of_items(
    name: str, task: str, systems: Sequence[Mapping], seed: int, missing: int, value: Any
) -> dict[str, Any]:
    values = [
        {key: 100 * value(row) for key, row in one.items() if row["failure"] is None}
        for one in systems
    ]
    both = [key for key in values[0] if key in values[1]]
    ours, theirs = ([one[key] for key in both] for one in values)
    paired = {}
    if both:
        moved = [one - other for one, other in zip(ours, theirs, strict=True)]
        graded = {*ours, *theirs} - {0.0, 100.0}
        paired = {
            "difference": paired_bootstrap(ours, theirs, seed, RESAMPLES),
            "p": sign_flips(moved, seed, RESAMPLES) if graded else mcnemar(ours, theirs),
            "smallest_difference": smallest_difference(moved),
        }
    return metric(
        *(name, task, True),
        model=_share(list(values[0].values()), seed),
        base=_share(list(values[1].values()), seed),
        missing=missing,
        **paired,
    )


def _share(values: Sequence[float], seed: int) -> Estimate | None:
    """Estimate a share in percent: Wilson's interval for right and wrong, else the bootstrap's."""
    if set(values) <= {0.0, 100.0}:
        rate = wilson(sum(value > 0 for value in values), len(values))
        return rate and Estimate(100 * rate.value, 100 * rate.low, 100 * rate.high, rate.n)
    return bootstrap_mean(values, seed, RESAMPLES)


# ---------------------------------------------------------------- verdicts on the metrics


def judge_metrics(metrics: Mapping[str, dict]) -> None:
    """Set `p_holm` and `verdict` of the metrics, in place."""
    primary = [one for one in metrics.values() if one["primary"] and one["p"] is not None]
    for one, p in zip(primary, holm([one["p"] for one in primary]), strict=True):
        one["p_holm"] = p
    for one in metrics.values():
        moved = one["difference"]
        if one["verdict"] == NOT_MEASURABLE or moved is None:
            continue
        p = one["p"] if one["p_holm"] is None else one["p_holm"]
        up = moved["low"] > 0
        if (up or moved["high"] < 0) and p <= 0.05:
            one["verdict"] = BETTER if up == one["higher_is_better"] else WORSE
        else:
            one["verdict"] = SAME


def doubt_of(audited: Mapping[str, Any] | None) -> str | None:
    """Return why a judge's verdicts are not to be believed, None where nothing speaks against."""
    if audited and audited["verdict"] == CHANCE:
        return "the judge is no better than chance"
    return None


def versions() -> dict[str, str]:
    """Return the versions of the packages that the numbers come from."""
    return {"alpaca_eval": version("alpaca-eval"), "lm_eval": version("lm-eval")}
