"""One real report: the embedded model against itself, and as its own judge."""

import json

import pytest

from eval.__main__ import app
from tests.eval.conftest import QUESTIONS

pytest.importorskip("xllamacpp")
pytest.importorskip("alpaca_eval")
pytest.importorskip("lm_eval")

MORE = (
    "Name three primary colours.", "What is recursion?", "List four fruits.", "Boil an egg.",
    "Give a tip for sleep.", "Why is the sky blue?", "Name a cat.", "Add 17 and 3.",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_twenty_questions_and_ten_items(questions, data_dir, tmp_path, in_process):
    path = questions / "alpaca_eval_gpt4_baseline.json"
    own = json.loads(path.read_text())
    own += [{**own[0], "instruction": text, "output": "I do not know."} for text in MORE]
    path.write_text(json.dumps(own))
    flags = (
        *("--against", "embedded", "--judge", "embedded", "--tasks", "alpaca,gsm8k"),
        *("--alpaca-data", questions, "--data-dir", data_dir, "--max-new-tokens", 24),
        *("--judge-mode", "yesno", "--audit-modes", "yesno", "--audit-prompts", 3),
        *("--output-dir", tmp_path / "report"),
    )
    in_process(app, "run", "embedded", *flags)
    found = json.loads((tmp_path / "report/results.json").read_text())
    assert len(QUESTIONS) + len(MORE) == 20 == found["alpaca"]["n"]
    metrics = found["metrics"]
    # The same weights gave the same answers once: they are in the store of both.
    assert metrics["alpaca_vs_base"]["model"]["value"] == pytest.approx(50)
    assert metrics["alpaca"]["model"]["n"] == 20 and 0 < metrics["alpaca"]["model"]["value"] < 100
    assert metrics["gsm8k"]["model"]["n"] == 10 and metrics["gsm8k"]["difference"]["value"] == 0
    assert found["judge"]["audit"]["contrasts"] >= 9
    origin = json.loads((tmp_path / "report/provenance.json").read_text())
    assert origin["tokens"]["base"]["requests"] == 30
    assert "llama" in json.dumps(origin["engines"]).lower()
    assert (tmp_path / "report/report.html").stat().st_size > 50_000
