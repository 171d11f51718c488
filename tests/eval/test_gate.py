"""The gate: what passes, fails and stays unclear, and how it ends."""

import json

import pytest

from eval import gate, results
from eval.__main__ import app
from selfsynth.errors import UsageError


def metric(low, value, high, *, task="gsm8k", model=None, **more):
    moved = {"value": value, "low": low, "high": high, "n": 100}
    return results.metric("x", task, True, difference=moved, model=model, **more)


def rate(low, value, high, **more):
    estimate = {"value": value, "low": low, "high": high, "n": 100}
    return metric(low - 50, value - 50, high - 50, task="alpaca", model=estimate, **more)


DROPS = {
    "gain": (metric(1, 3, 5), 2, gate.PASSED),
    "no change": (metric(-1.5, 0, 1.5), 2, gate.PASSED),
    "a drop within the limit": (metric(-1.9, -1, -0.1), 2, gate.PASSED),
    "a drop past the limit": (metric(-6, -4, -2), 2, gate.FAILED),
    "past the limit, but zero is possible": (metric(-9, -4, 1), 2, gate.UNCLEAR),
    "within the limit, but more is possible": (metric(-4, -1, 2), 2, gate.UNCLEAR),
    "a sure drop, not surely past the limit": (metric(-5, -1.5, -0.5), 2, gate.UNCLEAR),
    "no drop allowed, none seen": (metric(0, 0, 0), 0, gate.PASSED),
    "no drop allowed, one seen": (metric(-3, -2, -1), 0, gate.FAILED),
    "a rise of what should be low": (metric(2, 4, 6, higher_is_better=False), 2, gate.FAILED),
    "a fall of what should be low": (metric(-6, -4, -2, higher_is_better=False), 2, gate.PASSED),
    "in doubt": (metric(1, 3, 5, doubt="the judge is no better than chance"), 2, gate.UNCLEAR),
    "not measurable": (results.metric("x", "gsm8k", True, why="no"), 2, gate.UNCLEAR),
}


@pytest.mark.parametrize("name", DROPS)
def test_drops(name):
    one, allowed, verdict = DROPS[name]
    (outcome,) = gate.check({"x": one}, {"x": allowed}, {})
    assert outcome.verdict == verdict and "\n" not in outcome.reason


WINS = {
    "surely above": (rate(51, 55, 59), 50, gate.PASSED),
    "just so": (rate(50, 55, 60), 50, gate.PASSED),
    "above, not surely": (rate(48, 52, 56), 50, gate.UNCLEAR),
    "below": (rate(40, 45, 51), 50, gate.FAILED),
    "in doubt": (rate(60, 70, 80, doubt="chance"), 50, gate.UNCLEAR),
}


@pytest.mark.parametrize("name", WINS)
def test_wins(name):
    one, least, verdict = WINS[name]
    (outcome,) = gate.check({"x": one}, {}, {"x": least})
    assert outcome.verdict == verdict


@pytest.mark.parametrize(
    "text", ["gsm8k", "gsm8k=", "=2", "gsm8k=two", "gsm8k=-1", "gsm8k=nan", "gsm8k=101", ""]
)
def test_rules_that_are_none(text):
    with pytest.raises(UsageError, match="METRIC=POINTS"):
        gate.read_rules("--max-drop", [text])


def test_a_rule_twice():
    with pytest.raises(UsageError, match="twice"):
        gate.read_rules("--max-drop", ["gsm8k=1", "gsm8k=2"])


@pytest.fixture
def report(tmp_path):
    metrics = {
        "gsm8k": metric(-6, -4, -2),
        "arc_challenge": metric(-1, 0, 1),
        "hellaswag": metric(-9, -4, 1),
        "alpaca": rate(51, 55, 59),
    }
    (tmp_path / "results.json").write_text(json.dumps({"metrics": metrics}))
    (tmp_path / "report.html").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--max-drop", "arc_challenge=2", "--min-win", "alpaca=50"], 0, "passed"),
        (["--max-drop", "gsm8k=2", "--max-drop", "hellaswag=2"], 3, "gsm8k moved by -4.00"),
        (["--max-drop", "hellaswag=2"], 4, "not enough data to tell"),
        (["--max-drop", "hellaswag=2", "--allow-unclear"], 0, "not enough data to tell"),
        (["--max-drop", "gsm8k=2", "--allow-unclear"], 3, "failed"),
        (["--max-drop", "mmlu=2"], 2, "gsm8k, arc_challenge, hellaswag, alpaca"),
        (["--min-win", "gsm8k=50"], 2, "no win rate"),
        ([], 2, "needs a rule"),
    ],
)
def test_how_it_ends(flags, status, words, report, in_process):
    said = in_process(app, "gate", report, *flags, status=status)
    assert words in said.err
    if status != 2:
        found = json.loads(said.out)
        assert found["passed"] == (status == 0 and "--allow-unclear" not in flags)


@pytest.mark.parametrize(
    ("text", "status"), [(None, 2), ("{}", 1), ("[]", 1), ("{", 1), ('{"metrics": {"a": 1}}', 1)]
)
def test_a_folder_that_holds_no_report(text, status, tmp_path, in_process):
    if text is not None:
        (tmp_path / "results.json").write_text(text)
        (tmp_path / "report.html").write_text("")
    in_process(app, "gate", tmp_path, "--max-drop", "gsm8k=2", status=status)
