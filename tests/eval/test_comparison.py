"""Two reports beside each other, prompt by prompt."""

import json

import pytest

from eval.__main__ import app
from tests.eval.conftest import first_of, solves, writes

pytest.importorskip("alpaca_eval")
pytest.importorskip("lm_eval")


def report(trio, folder, questions, data_dir, words, wrong, *flags):
    servers = trio({"script": first_of(solves(wrong), writes(lambda _: words))})
    servers.run(
        *("--judge", "judge", "--alpaca-data", questions, "--data-dir", data_dir),
        *("--tasks", "alpaca,gsm8k", "--output-dir", folder, "--audit-prompts", 2, *flags),
    )
    return folder


def test_two_reports_on_the_prompts_that_both_have(trio, questions, data_dir, tmp_path, in_process):
    one = report(trio, tmp_path / "one", questions, data_dir, 60, {1, 2})
    other = report(trio, tmp_path / "other", questions, data_dir, 15, {1}, "--limit", 6)
    said = in_process(app, "compare", one, other)
    found = json.loads(said.out)
    assert found["judged_alike"] and found["a"] == found["b"] == "model"
    alpaca, gsm8k = found["metrics"]["alpaca"], found["metrics"]["gsm8k"]
    assert (alpaca["difference"]["n"], alpaca["only_a"], alpaca["only_b"]) == (6, 6, 0)
    assert alpaca["difference"]["value"] > 0  # the judge likes length
    assert gsm8k["difference"]["value"] <= 0 and gsm8k["difference"]["n"] == 6
    back = json.loads(in_process(app, "compare", other, one).out)["metrics"]["alpaca"]
    assert back["difference"]["value"] == pytest.approx(-alpaca["difference"]["value"])
    same = json.loads(in_process(app, "compare", one, one).out)["metrics"]
    assert all(each["difference"]["value"] == 0 and each["p"] == 1 for each in same.values())


def test_another_judge_is_said(trio, questions, data_dir, tmp_path, in_process):
    one = report(trio, tmp_path / "one", questions, data_dir, 60, ())
    other = report(
        *(trio, tmp_path / "other", questions, data_dir, 60, ()),
        *("--judge-mode", "pairwise", "--limit", 6),
    )
    changed = json.loads((other / "results.json").read_text())
    changed["judge"]["name"] = "another judge"
    (other / "results.json").write_text(json.dumps(changed))
    said = in_process(app, "compare", one, other)
    assert not json.loads(said.out)["judged_alike"] and "not of one kind" in said.err


def test_nothing_in_common(trio, questions, data_dir, tmp_path, in_process):
    one = report(trio, tmp_path / "one", questions, data_dir, 60, ())
    for path in (one / "data").iterdir():
        path.unlink()
    assert "no prompt in common" in in_process(app, "compare", one, one, status=2).err


def test_no_report(tmp_path, in_process):
    assert "no finished report" in in_process(app, "compare", tmp_path, tmp_path, status=2).err
