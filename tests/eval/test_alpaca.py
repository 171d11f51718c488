"""AlpacaEval's scores: those of the leaderboard, of any order of rows, and never NaN.

What is compared with published numbers reads the folder named by SELFSYNTH_EVAL_DATA; the rest
makes 805 instructions of its own.
"""

import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from eval import alpaca, results
from eval.__main__ import app
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.stats import bootstrap_mean

pytest.importorskip("alpaca_eval")
pd = pytest.importorskip("pandas")

PUBLISHED = ("claude-2.1", "gemma-7b-it", "vicuna-13b")
COUNTS = ("n_wins", "n_wins_base", "n_draws", "n_total")


@pytest.fixture(scope="module")
def shared():
    folder = os.environ.get("SELFSYNTH_EVAL_DATA")
    if not folder:
        pytest.skip("SELFSYNTH_EVAL_DATA names no folder")
    return Path(folder) / "alpaca_eval"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A stand-in for the official data: 805 instructions and two gamed baselines."""
    folder = tmp_path_factory.mktemp("alpaca")
    draw = np.random.default_rng(0)
    rows = [
        {
            "instruction": f"Question {number}?",
            "dataset": "made",
            "output": "a" * int(draw.integers(200, 2000)),
            "generator": "baseline",
        }
        for number in range(alpaca.ROWS)
    ]
    (folder / alpaca.BASELINE).write_text(json.dumps(rows))
    difficulty = draw.normal(size=alpaca.ROWS)
    gamed = [
        {
            "index": number,
            "preference": 1
            / (1 + math.exp(sign * (1.5 * math.tanh(2) + 0.1 * difficulty[number]))),
            "std_delta_len": sign * 2.0,
            "instruction_difficulty": difficulty[number],
            "not_gamed_baseline": False,
            "model": name,
        }
        for name, sign in (("concise", 1), ("verbose", -1))
        for number in range(alpaca.ROWS)
    ]
    pd.DataFrame(gamed).to_csv(folder / alpaca.GAMED, index=False)
    return folder


@pytest.fixture(scope="module")
def official(folder):
    return alpaca.load_official(folder)


def annotations(official, skill=-1.0, length=1.0, seed=1):
    """Annotations by a judge who likes `skill` and, `length` times as much, long answers."""
    draw = np.random.default_rng(seed)
    rows = []
    for text, baseline in zip(official.instructions, official.baseline, strict=True):
        output = "b" * int(draw.integers(200, 2000))
        logit = skill + length * (len(output) - len(baseline)) / 750 + draw.normal()
        row = {"instruction": text, "output_1": baseline, "output_2": output}
        names = {"generator_1": "baseline", "generator_2": "model", "annotator": "judge"}
        rows.append(row | names | {"preference": 1 + 1 / (1 + math.exp(-logit))})
    return rows


# ---------------------------------------------------------------- published numbers


@pytest.mark.parametrize("name", PUBLISHED)
def test_score_is_the_leaderboards(name, shared, in_process):
    file = shared / f"annotations_{name}.json"
    found = json.loads(in_process(app, "score", file, "--alpaca-data", shared).out)
    published = pd.read_csv(shared / "leaderboard_published.csv", index_col=0).loc[name]
    for key in ("win_rate", "standard_error", "discrete_win_rate", *COUNTS):
        assert found[key] == pytest.approx(published[key], abs=1e-6)
    controlled = published["length_controlled_winrate"]
    assert found["length_controlled_win_rate"] == pytest.approx(controlled, abs=0.35)
    assert int(found["avg_length"]) == published["avg_length"]
    low, high = found["win_rate_ci"]
    assert low < found["win_rate"] < high
    # Of normal errors the bootstrap's interval is 2 · 1.96 of them wide.
    assert (high - low) / (3.92 * found["standard_error"]) == pytest.approx(1, abs=0.05)
    assert found["generator"] == name and found["notes"] == []
    assert found["length_controlled_ci"] is None and found["n_unreadable"] == 0


def test_published_weights_give_published_rates(shared):
    official = alpaca.load_official(shared)
    weights = pd.read_csv(shared / "glm_weights_published.csv", index_col=0)
    published = pd.read_csv(shared / "leaderboard_published.csv", index_col=0)
    both = weights.index.intersection(published.index)
    assert len(both) > 100
    off = [
        abs(
            alpaca.win_rate_of_weights(weights.loc[name], official.difficulty)
            - published.loc[name, "length_controlled_winrate"]
        )
        for name in both
    ]
    assert np.median(off) < 1e-6


# ---------------------------------------------------------------- length control


def test_order_and_names_mean_nothing(official):
    rows = annotations(official)
    whole = alpaca.score(rows, official)
    shuffled = random.Random(0).sample(rows, len(rows))
    bare = [{key: row[key] for key in alpaca.COLUMNS} for row in shuffled]
    found = alpaca.score(bare, official)
    for names in ("generator", "baseline", "annotator"):
        assert whole.pop(names) and found.pop(names) is None
    assert found == whole
    assert alpaca.score(shuffled, official) == alpaca.score(rows, official)


def test_what_length_won_is_taken_away(official):
    """As good as the baseline but for a judge who likes length; and twice as long."""
    rows = annotations(official, skill=0.0, length=1.5)
    for row in rows:
        row["preference"] = min(2.0, row["preference"] + 0.15)
        row["output_2"] += "b" * 1000
    found = alpaca.score(rows, official)
    assert found["length_controlled_win_rate"] < found["win_rate"] - 3


def test_the_interval_of_refits(official):
    rows = annotations(official)
    found = alpaca.score(rows, official, refits=12)
    low, high = found["length_controlled_ci"]
    assert low < found["length_controlled_win_rate"] < high and high - low < 8
    assert alpaca.score(rows, official, refits=12)["length_controlled_ci"] == [low, high]
    assert found["n_total"] == alpaca.ROWS


def test_against_itself(official):
    rows = [row | {"output_2": row["output_1"], "preference": 1.5} for row in annotations(official)]
    found = alpaca.score(rows, official, refits=5)
    assert found["win_rate"] == found["length_controlled_win_rate"] == 50
    assert found["n_draws"] == alpaca.ROWS and found["length_controlled_ci"] == [50, 50]


def test_whole_preferences_are_alpaca_evals(official):
    from alpaca_eval.metrics import get_winrate

    rows = [row | {"preference": round(row["preference"])} for row in annotations(official)]
    rows[0]["preference"] = 0  # a draw, as AlpacaEval writes it
    found = alpaca.score(rows, official)
    theirs = get_winrate(rows)
    assert {key: found[key] for key in theirs} == pytest.approx(theirs)
    assert found["n_draws"] == 1 and found["win_rate"] == found["discrete_win_rate"]


# ---------------------------------------------------------------- what can still be said

LEFT = {
    "804 rows": (lambda rows: rows[1:], "804 of them are here, and 0 others", False),
    "another instruction": (
        lambda rows: [rows[0] | {"instruction": "Other?"}, *rows[1:]],
        "804 of them are here, and 1 others",
        False,
    ),
    "duplicates": (lambda rows: rows + rows[:3], "3 of 808 rows repeat an instruction", True),
    "NaN": (
        lambda rows: [rows[0] | {"preference": math.nan}, *rows[1:]],
        "1 of 805 preferences cannot be read",
        True,
    ),
    "no number": (
        lambda rows: (
            [row | {"preference": bad} for row, bad in zip(rows, ODD, strict=False)]
            + rows[len(ODD) :]
        ),
        "6 of 805 preferences cannot be read",
        True,
    ),
    "equal gaps": (
        lambda rows: [row | {"output_2": row["output_1"] + "!"} for row in rows],
        "all answers differ by the same length",
        False,
    ),
    "one row": (lambda rows: rows[:1], "1 of them are here", False),
}
ODD = (None, True, "2", 2.5, -1, math.inf)


@pytest.mark.parametrize(("change", "note", "controlled"), LEFT.values(), ids=LEFT)
def test_what_is_wrong_is_said(change, note, controlled, official):
    found = alpaca.score(change(annotations(official)), official, refits=2)
    assert note in " ".join(found["notes"])
    assert (found["length_controlled_win_rate"] is not None) == controlled
    assert (found["length_controlled_ci"] is not None) == controlled
    json.dumps(found, allow_nan=False)


def test_no_preference_at_all(official):
    rows = [row | {"preference": None} for row in annotations(official)]
    with pytest.raises(SelfsynthError, match="none of the 805 preferences can be read"):
        alpaca.score(rows, official)


def test_without_the_official_data_there_is_a_win_rate(official):
    found = alpaca.score(annotations(official), None)
    assert found["length_controlled_win_rate"] is None and found["n_total"] == alpaca.ROWS
    assert found["length_matched_n"] > 20 and 0 < found["length_matched_win_rate"] < 100


ROW = {"instruction": "a", "output_1": "b", "output_2": "c", "preference": 2}
BAD_FILES = {
    "no JSON": ("{", "cannot be read"),
    "no list": (json.dumps(ROW), "holds no annotations"),
    "no rows": ("[]", "holds no row"),
    "no objects": ("[1]", "holds no annotations"),
    "no preference": ('[{"instruction": "a", "output_1": "b", "output_2": "c"}]', "no preference"),
    "no text": (json.dumps([ROW | {"output_2": None}]), "row 0: output_2 is no text"),
}


@pytest.mark.parametrize(("text", "words"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_are_no_annotations(text, words, folder, tmp_path, in_process):
    path = tmp_path / "annotations.json"
    path.write_text(text)
    said = in_process(app, "score", path, "--alpaca-data", folder, status=2)
    assert said.out == "" and words in said.err and said.err.count("\n") == 1


def test_folders_that_are_not_the_official_data(folder, tmp_path):
    with pytest.raises(UsageError, match="does not hold AlpacaEval"):
        alpaca.load_official(tmp_path)
    rows = json.loads((folder / alpaca.BASELINE).read_text())
    (tmp_path / alpaca.BASELINE).write_text(json.dumps([*rows[1:], rows[1]]))
    (tmp_path / alpaca.GAMED).write_text((folder / alpaca.GAMED).read_text())
    with pytest.raises(UsageError, match="does not hold the 805"):
        alpaca.load_official(tmp_path)


def test_the_hub_does_not_answer(folder, official, tmp_path, in_process, monkeypatch):
    def down(*_):
        raise SelfsynthError("the Hub did not answer")

    monkeypatch.setattr(alpaca, "fetch", down)
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(annotations(official)[:10]))
    said = in_process(app, "score", path)
    assert "give --alpaca-data DIR" in said.err
    assert json.loads(said.out)["length_controlled_win_rate"] is None


# ---------------------------------------------------------------- intervals


def test_a_model_against_itself_is_50_as_often_as_it_should(official):
    """Of 200 comparisons between equals, the 95 % interval misses 50 in 2 to 9 %."""
    draw = np.random.default_rng(5)
    missed = 0
    for number in range(200):
        rates = 100 / (1 + np.exp(-draw.normal(scale=1.5, size=alpaca.ROWS)))
        found = bootstrap_mean(rates, seed=number, resamples=1000)
        missed += not found.low <= 50 <= found.high
    assert 4 <= missed <= 18


def test_length_control_in_a_report(official):
    """Of what the model won by length alone, less is left once length is controlled for."""
    draw = np.random.default_rng(1)
    verdicts = []
    for comparison, longer in (("model_vs_baseline", 4), ("base_vs_baseline", 1)):
        for text, theirs in zip(official.instructions, official.baseline, strict=True):
            ours = "b" * int(len(theirs) * longer * draw.uniform(0.5, 1.5))
            lean = math.tanh((len(ours) - len(theirs)) / 1000)
            preference = 1 + 1 / (1 + math.exp(-3 * lean + draw.normal()))
            verdicts.append(
                {"comparison": comparison, "instruction": text, "output_1": theirs,
                 "output_2": ours, "preference": preference}
            )  # fmt: skip
    found, notes = results.of_alpaca(verdicts, official, None, 10, 0)
    results.judge_metrics(found)
    controlled, plain = found["alpaca_lc"], found["alpaca"]
    assert controlled["primary"] and not plain["primary"] and notes == []
    assert plain["difference"]["value"] > 10 and plain["difference"]["low"] > 0
    assert controlled["difference"]["value"] < 0.8 * plain["difference"]["value"]
    for who in ("model", "base", "difference"):
        one = controlled[who]
        assert one["low"] <= one["high"] and one["n"] == alpaca.ROWS
    assert "alpaca_matched" not in found
    assert found["alpaca_vs_base"]["model"] is None  # nobody compared them
