"""Metrics from verdicts and items: tables of cases with a known answer."""

import pytest

from eval import breakdown, results

pytest.importorskip("alpaca_eval")


def item(system, key, correct, failure=None, **more):
    usual = {"strict": False, "flexible": bool(correct), "read": "1", "cut": False}
    return {"system": system, "task": "gsm8k", "id": str(key), "correct": float(correct),
            "failure": failure, "prompt": "?", **usual, **more}  # fmt: skip


def verdict(comparison, key, preference, lengths=(10, 10), dataset="a"):
    return {"comparison": comparison, "id": str(key), "instruction": str(key), "dataset": dataset,
            "output_1": "x" * lengths[0], "output_2": "y" * lengths[1], "preference": preference,
            "reason": None if preference else "verdict_unreadable"}  # fmt: skip


def of_items(ours, theirs):
    items = [item("model", key, value) for key, value in enumerate(ours)]
    items += [item("base", key, value) for key, value in enumerate(theirs)]
    found = results.of_task("gsm8k", items, 0)
    results.judge_metrics(found)
    return found


CASES = {
    "the same": ([1, 0] * 50, [1, 0] * 50, results.SAME),
    "better": ([1] * 80 + [0] * 20, [1] * 40 + [0] * 60, results.BETTER),
    "worse": ([1] * 40 + [0] * 60, [1] * 80 + [0] * 20, results.WORSE),
    "one more": ([1] * 51 + [0] * 49, [1] * 50 + [0] * 50, results.SAME),
}


@pytest.mark.parametrize("name", CASES)
def test_better_worse_or_neither(name):
    ours, theirs, said = CASES[name]
    found = of_items(ours, theirs)["gsm8k"]
    assert found["verdict"] == said
    assert found["difference"]["value"] == pytest.approx(sum(ours) - sum(theirs))


def test_less_no_answers_is_better():
    items = [item("model", key, 1, read="1") for key in range(60)]
    items += [item("base", key, 0, read=None) for key in range(60)]
    found = results.of_task("gsm8k", items, 0)
    results.judge_metrics(found)
    assert found["gsm8k_no_answer"]["difference"]["value"] == -100
    assert found["gsm8k_no_answer"]["verdict"] == results.BETTER


def test_what_is_missing_is_neither_right_nor_wrong():
    items = [item("model", key, 1) for key in range(10)]
    items += [item("base", key, 1, "request_failed" if key < 3 else None) for key in range(10)]
    found = results.of_task("gsm8k", items, 0)["gsm8k"]
    assert (found["missing"], found["base"]["n"], found["difference"]["n"]) == (3, 7, 7)
    assert found["base"]["value"] == 100


def test_all_missing_is_no_number():
    items = [item(who, key, 0, "request_failed") for who in ("model", "base") for key in range(3)]
    found = results.of_task("gsm8k", items, 0)
    results.judge_metrics(found)
    assert found["gsm8k"]["model"] is None and found["gsm8k"]["verdict"] == results.UNJUDGED


def test_holm_is_over_the_primary_metrics_alone():
    found = of_items([1] * 57 + [0] * 43, [1] * 50 + [0] * 50)
    assert found["gsm8k"]["p_holm"] == found["gsm8k"]["p"]
    assert found["gsm8k_strict"]["p_holm"] is None
    other = results.metric("mmlu", "mmlu", True, p=0.9)
    both = {"gsm8k": found["gsm8k"], "mmlu": other}
    results.judge_metrics(both)
    assert both["gsm8k"]["p_holm"] == pytest.approx(min(1, 2 * both["gsm8k"]["p"]))


def test_win_rates_against_the_base():
    rows = [verdict("model_vs_base", key, 2.0 if key < 30 else 1.0) for key in range(40)]
    rows += [verdict("model_vs_base", 99, None)]
    found, notes = results.of_alpaca(rows, None, None, 0, 0)
    one = found["alpaca_vs_base"]
    assert (one["model"]["value"], one["model"]["n"], one["missing"]) == (75, 40, 1)
    assert one["difference"]["value"] == 25
    assert found["alpaca_lc"]["why"] in notes


def test_groups_hold_every_verdict():
    rows = [
        verdict("model_vs_base", key, 1.5, (100, length), "ab"[key % 2])
        for key, length in enumerate((50, 89, 90, 100, 110, 111, 200))
    ]
    groups = {one.name: one.rates["model_vs_base"] for one in breakdown.by_length_gap(rows, 0)}
    assert {name: one.n for name, one in groups.items()} == {
        "shorter": 2, "about equal": 4, "longer": 1,
    }  # fmt: skip
    sets = breakdown.by_dataset(rows, 0)
    assert sum(one.rates["model_vs_base"].n for one in sets) == len(rows)
    lengths, rates, bins = breakdown.by_length(rows, "model_vs_base", 0)
    assert len(lengths) == len(rates) == sum(one.rate.n for one in bins) == 7


def test_no_verdict_at_all():
    assert breakdown.by_dataset([], 0) == []
    assert all(one.rates["model_vs_base"] is None for one in breakdown.by_length_gap([], 0))
    assert breakdown.by_length([], "model_vs_base", 0)[2] == []
    assert breakdown.wins_and_losses([]) == ([], [])


def test_wins_are_the_surest_first():
    rows = [verdict("model_vs_base", key, 1 + key / 10) for key in range(11)]
    wins, losses = breakdown.wins_and_losses(rows)
    assert [row["preference"] for row in wins] == [2.0, 1.9, 1.8, 1.7]
    assert [row["preference"] for row in losses] == [1.0, 1.1, 1.2, 1.3]


def test_regressions_are_counted_and_the_largest_first():
    items = [item("model", key, score) for key, score in enumerate((0, 0.2, 1, 1))]
    items += [item("base", key, score) for key, score in enumerate((1, 0.4, 1, 0))]
    (found,) = breakdown.regressions(items)
    assert (found.lost, found.gained, found.n) == (2, 1, 4)
    assert [ours["id"] for ours, _ in found.items] == ["0", "1"]
