"""AlpacaEval 2.0: the win rate, and the win rate under length control.

The win rate is the mean preference for the model over the baseline (Li et al. 2023). Judges like
long answers, so a GLM explains the preferences by length, difficulty and model, and predicts them
for a length difference of zero (Dubois et al. 2024, arXiv 2404.04475, section 3). Both come from
the package `alpaca_eval`; what it looks up by row number is joined here by the instruction's text,
so that the order of the rows means nothing.
"""

import hashlib
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.revisions import fetch
from selfsynth.stats import about_equal, bootstrap_mean

if TYPE_CHECKING:
    import pandas as pd

REPO, REVISION = "tatsu-lab/alpaca_eval", "2edc6fad8be6b14ea7230aabfd08188da6b8b814"
BASELINE, GAMED = "alpaca_eval_gpt4_baseline.json", "df_gamed.csv"
ROWS = 805
GENERATOR = "gpt4_1106_preview"
GLM = "length_controlled_v1"
RESAMPLES = 10_000
COLUMNS = ("instruction", "output_1", "output_2", "preference")


@dataclass(frozen=True)
class Official:
    """What AlpacaEval 2.0 is made of, in its order: lists of 805, CC BY-NC 4.0.

    Attributes:
        instructions: what is asked.
        datasets: the set that each comes from, such as `helpful_base`.
        baseline: the answers of `gpt4_1106_preview`.
        difficulty: of each instruction, as the GLM knows it; shape (805,).
        gamed: the preferences for a concise and a verbose baseline, which the GLM is held to.
    """

    instructions: list[str]
    datasets: list[str]
    baseline: list[str]
    difficulty: np.ndarray = field(repr=False)
    gamed: "pd.DataFrame" = field(repr=False)

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each instruction."""
        return {text: place for place, text in enumerate(self.instructions)}


@dataclass(frozen=True)
class Questions:
    """What models are asked, and what they are compared with; lists of one length.

    Attributes:
        instructions: what is asked, each once.
        datasets: the set that each comes from.
        baseline: the baseline's answers.
        generator: the baseline's name.
        official: AlpacaEval's own data, where these are its instructions and all of them.
        revision: the commit of the data on the Hub, None where they came from a folder.
    """

    instructions: list[str]
    datasets: list[str]
    baseline: list[str]
    generator: str
    official: Official | None
    revision: str | None


def load_questions(folder: Path | None = None, limit: int | None = None) -> Questions:
    """Load AlpacaEval 2.0, or a folder's own questions in the same form.

    Args:
        folder: holds `BASELINE`, a JSON list of objects with `instruction` and `output`, and maybe
            `dataset` and `generator`; and for length control `GAMED`. None takes the official ones
            from the Hub.
        limit: take so many of them, whose instructions have the smallest SHA-256: the first 20 are
            among the first 50, and which they are does not depend on the order.

    Raises:
        UsageError: the folder does not hold them, or an instruction stands there twice.
        SelfsynthError: the Hub does not give them.
    """
    if folder is None:
        official = load_official()
        rows = list(zip(official.instructions, official.datasets, official.baseline, strict=True))
        generator = GENERATOR
    else:
        rows, generator = _own_questions(folder / BASELINE)
        asked = {row[0] for row in rows}
        has_all = len(asked) == ROWS and (folder / GAMED).is_file()
        official = load_official(folder) if has_all else None
    if limit is not None and limit < len(rows):
        rows = sorted(rows, key=lambda row: hashlib.sha256(row[0].encode()).digest())[:limit]
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Questions(*columns, generator, official, None if folder else REVISION)


def _own_questions(path: Path) -> tuple[list[tuple[str, str, str]], str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            (row["instruction"], str(row.get("dataset") or "own"), row["output"]) for row in found
        ]
        names = {row.get("generator") for row in found}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} holds no questions (a JSON list of objects with instruction and output): "
            f"{type(error).__name__} {error}"
        ) from None
    if not rows:
        raise UsageError(f"{path} holds no question")
    for number, (instruction, _, output) in enumerate(rows):
        if not (isinstance(instruction, str) and instruction.strip() and isinstance(output, str)):
            raise UsageError(f"{path}: row {number} has no instruction or no output")
    counted = Counter(row[0] for row in rows)
    if twice := [text for text, count in counted.items() if count > 1]:
        raise UsageError(f"{path}: {len(twice)} instructions stand there twice: {twice[0][:60]!r}")
    name = names.pop() if len(names) == 1 else None
    return rows, name if isinstance(name, str) and name else "baseline"


def load_official(folder: Path | None = None) -> Official:
    """Load the official data from a folder, or from the Hub at a pinned commit.

    Raises:
        UsageError: the folder does not hold the two files, or they are not the official ones.
        SelfsynthError: the Hub does not give them.
    """
    import pandas as pd

    if folder is None:
        folder, _ = fetch(REPO, REVISION, "dataset", [BASELINE, GAMED])
    try:
        rows = json.loads((folder / BASELINE).read_text(encoding="utf-8"))
        gamed = pd.read_csv(folder / GAMED)
        difficulty = gamed.drop_duplicates("index").set_index("index")["instruction_difficulty"]
        official = Official(
            [row["instruction"] for row in rows],
            [row["dataset"] for row in rows],
            [row["output"] for row in rows],
            difficulty.sort_index().to_numpy(),
            gamed.drop(columns=["model"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder} does not hold AlpacaEval 2.0 ({BASELINE}, {GAMED}): "
            f"{type(error).__name__} {error}"
        ) from None
    if not ROWS == len(set(official.instructions)) == len(rows) == len(official.difficulty):
        raise UsageError(f"{folder} does not hold the {ROWS} instructions of AlpacaEval 2.0")
    return official


def read_annotations(path: Path) -> list[dict[str, Any]]:
    """Read a file of annotations as AlpacaEval writes them: a JSON list of objects.

    Raises:
        UsageError: it is none, or a row lacks the instruction, an output or the preference.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} holds no annotations (a JSON list of objects)")
    if not rows:
        raise UsageError(f"{path} holds no row")
    for number, row in enumerate(rows):
        if missing := [name for name in COLUMNS if name not in row]:
            raise UsageError(f"{path}: row {number} has no {' and no '.join(missing)}")
        for name in COLUMNS[:3]:
            if not isinstance(row[name], str):
                raise UsageError(f"{path}: row {number}: {name} is no text")
    return rows


def preference_of(value: Any) -> float:
    """Return a preference in [1, 2], where 1.5 (AlpacaEval also writes 0) is a draw; NaN if none.

    2 means that the model's answer (`output_2`) is better, 1 that the baseline's is.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    value = 1.5 if value == 0 else float(value)
    return value if 1 <= value <= 2 else math.nan


def score(
    rows: Sequence[Mapping[str, Any]], official: Official | None, refits: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Return the scores of annotations, as the leaderboard prints them.

    Args:
        rows: annotations, with the keys of `COLUMNS`; `generator_1`, `generator_2` and `annotator`
            may be there. The order means nothing.
        official: None leaves length control out.
        refits: bootstrap resamples that the GLM is fitted on again, for the interval.

    Returns:
        Rates are percentages; what cannot be said is None, and `notes` says why:

        win_rate, standard_error, n_wins, n_wins_base, n_draws, n_total, discrete_win_rate: of the
            readable preferences, by `alpaca_eval`.
        avg_length: mean characters of the model's answers.
        win_rate_ci, length_controlled_ci: 95 % percentile bootstrap over instructions.
        length_controlled_win_rate: where exactly the official instructions were asked.
        length_matched_win_rate, length_matched_n: of pairs whose lengths differ by 10 % at most.
        n_unreadable: rows without a preference, which no rate counts.
        generator, baseline, annotator: None where the rows do not name one and only one.
        alpaca_eval_version, notes.

    Raises:
        SelfsynthError: no preference can be read.
    """
    notes = []
    first = {row["instruction"]: row for row in reversed(rows)}
    if repeated := len(rows) - len(first):
        notes.append(
            f"{repeated} of {len(rows)} rows repeat an instruction: the first of each counts"
        )
    rows = _in_order(first.values(), official)
    preferences = np.array([preference_of(row["preference"]) for row in rows])
    readable = ~np.isnan(preferences)
    if not readable.any():
        raise SelfsynthError(f"none of the {len(rows)} preferences can be read (1 to 2)")
    if not readable.all():
        notes.append(
            f"{(~readable).sum()} of {len(rows)} preferences cannot be read: no rate counts them"
        )
    lengths = np.array([[len(row["output_1"]), len(row["output_2"])] for row in rows])
    matched = readable & about_equal(*lengths.T)
    rates = 100 * (preferences - 1)
    found = _win_rate(preferences[readable])
    interval = bootstrap_mean(rates[readable], seed, RESAMPLES)
    controlled = control_length(rows, official, refits, seed)
    notes += controlled.notes
    low_high = None if controlled.refits is None else np.quantile(controlled.refits, (0.025, 0.975))
    return {
        **found,
        "avg_length": float(lengths[:, 1].mean()),
        "win_rate_ci": [interval.low, interval.high],
        "length_controlled_win_rate": controlled.value,
        "length_controlled_ci": None if low_high is None else low_high.tolist(),
        "length_matched_win_rate": float(rates[matched].mean()) if matched.any() else None,
        "length_matched_n": int(matched.sum()),
        "n_unreadable": int((~readable).sum()),
        "generator": _only(rows, "generator_2"),
        "baseline": _only(rows, "generator_1"),
        "annotator": _only(rows, "annotator"),
        "alpaca_eval_version": version("alpaca-eval"),
        "notes": notes,
    }


def _in_order(
    rows: Iterable[Mapping[str, Any]], official: Official | None
) -> list[Mapping[str, Any]]:
    """Return rows in the official order: the folds of the GLM's cross-validation go by it."""
    places = official.places if official else {}
    return sorted(
        rows, key=lambda row: (places.get(row["instruction"], len(places)), row["instruction"])
    )


def _only(rows: Sequence[Mapping[str, Any]], key: str) -> str | None:
    names = {row.get(key) for row in rows}
    return names.pop() if len(names) == 1 else None


def _win_rate(preferences: np.ndarray) -> dict[str, Any]:
    with _quietly():
        from alpaca_eval.metrics import get_winrate

        found = get_winrate([{"preference": value} for value in preferences.tolist()])
    counts = ("n_wins", "n_wins_base", "n_draws", "n_total")
    return {
        key: int(value) if key in counts else None if math.isnan(value) else float(value)
        for key, value in found.items()
    }


# ---------------------------------------------------------------- length control


@dataclass(frozen=True)
class Controlled:
    """The length-controlled win rate in percent, None where it is not defined: `notes` say why.

    Attributes:
        refits: the same of bootstrap resamples, shape (refits,); the k-th of two models with one
            seed are of the same instructions. None where none were asked for.
    """

    value: float | None = None
    refits: np.ndarray | None = None
    notes: list[str] = field(default_factory=list)


def control_length(
    rows: Sequence[Mapping[str, Any]], official: Official | None, refits: int = 0, seed: int = 0
) -> Controlled:
    """Return the length-controlled win rate of annotations, each instruction once; see `score`."""
    if official is None:
        return Controlled(notes=["no length control: AlpacaEval's own data were not at hand"])
    known = Counter(row["instruction"] in official.places for row in rows)
    if known[False] or known[True] != ROWS:
        return Controlled(
            notes=[
                f"length control is defined on the {ROWS} official instructions alone: "
                f"{known[True]} of them are here, and {known[False]} others"
            ]
        )
    rows = _in_order(rows, official)
    preferences = np.array([preference_of(row["preference"]) for row in rows])
    lengths = np.array([[len(row["output_1"]), len(row["output_2"])] for row in rows])
    gap = lengths[:, 0] - lengths[:, 1]
    if all(row["output_1"] == row["output_2"] for row in rows):
        same = np.full(refits, 50.0) if refits else None
        return Controlled(50.0, same, ["both gave the same answers"])
    if np.ptp(gap) == 0:
        return Controlled(notes=["no length control: all answers differ by the same length"])
    value = length_controlled(preferences, gap, official.difficulty, official.gamed)
    values = None
    if refits:
        draw = np.random.default_rng(seed)
        values = []
        while len(values) < refits:
            some = draw.integers(ROWS, size=ROWS)
            if np.ptp(gap[some]) and not np.isnan(preferences[some]).all():
                picked = (preferences[some], gap[some], official.difficulty[some])
                values.append(length_controlled(*picked, official.gamed))
    return Controlled(value, values and np.array(values))


def length_controlled(
    preferences: np.ndarray, gap: np.ndarray, difficulty: np.ndarray, gamed: "pd.DataFrame"
) -> float:
    """Return the length-controlled win rate, in percent, by alpaca_eval's own GLM.

    Args:
        preferences: in [1, 2], NaN where there is none; shape (n,).
        gap: characters of the baseline's answer less those of the model's; shape (n,).
        difficulty: of the instructions; shape (n,).
        gamed: see `Official`.
    """
    import pandas as pd

    with _quietly():
        from alpaca_eval.metrics.glm_winrate import (
            GLM_INFO,
            fit_LogisticRegressionCV,
            make_dmatrix_for_model,
        )

        glm = GLM_INFO[GLM]
        ours = pd.DataFrame(
            {
                "preference": preferences - 1,
                "std_delta_len": gap / gap.std(ddof=1),
                "instruction_difficulty": difficulty,
                "not_gamed_baseline": True,
            }
        )
        known = ours[ours["preference"].notna()]
        train = pd.concat([gamed[ours.columns], known], ignore_index=True)
        features, asked = make_dmatrix_for_model(
            train, ours.assign(std_delta_len=0.0), formula=glm["formula"]
        )
        is_ours = train["not_gamed_baseline"].astype(bool)
        # Two gamed baselines share the weight.
        weight = np.where(is_ours, 1.0, glm["regularize_to_baseline_lambda"] / 2)
        model = fit_LogisticRegressionCV(
            features, "preference", is_ytrue_proba=True, sample_weight=weight, **glm["kwargs"]
        )
    return float(model.predict_proba(asked)[:, 1].mean() * 100)


def win_rate_of_weights(weights: Mapping[str, float], difficulty: np.ndarray) -> float:
    """Return the length-controlled win rate, in percent, of published GLM weights.

    The mean over instructions of logistic(w_difficulty · difficulty + w_model), for a length
    difference of zero (arXiv 2404.04475, equation 3).
    """
    logit = weights["instruction_difficulty"] * difficulty
    logit = logit + weights["not_gamed_baseline.astype(float)"]
    return float(100 * np.mean(1 / (1 + np.exp(-logit))))


def _quietly() -> warnings.catch_warnings:
    """Without the warnings of libraries about libraries."""
    return warnings.catch_warnings(action="ignore")
