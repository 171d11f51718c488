"""The results of a report on a model's card on the Hub, as its next version."""

import json

import pytest
import yaml

from eval.publishing import card_results
from hub_cards.publish import publish
from tests.eval.conftest import first_of, solves, writes
from tests.hub_cards.test_models import provenance_of
from tests.hub_cards.test_models import write as write_card

pytest.importorskip("alpaca_eval")
pytest.importorskip("lm_eval")


@pytest.fixture
def model(tmp_path):
    """A folder as recipes leave it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"{}")
    (folder / "config.json").write_bytes(b"{}")
    (folder / "provenance.json").write_text(json.dumps(provenance_of()))
    write_card(folder)
    return folder


def test_results_become_the_models_next_version(hub, model, trio, data_dir, tmp_path):
    before = (model / "README.md").read_bytes()
    assert publish(model, "me/tiny", "model").tag == "v1"
    servers = trio({"models": [str(model)]})
    flags = ("--tasks", "gsm8k", "--data-dir", data_dir, "--output-dir", tmp_path / "report")
    flags += ("--push-to-hub", "--repo-id", "me/tiny")
    # A server at a URL answers in the place of the weights: the card is that of the folder.
    servers.run(*flags, model=model)
    card = hub.files("me/tiny", "v2", repo_type="model")["README.md"].decode()
    (index,) = yaml.safe_load(card.split("---")[1])["model-index"]
    (result,) = index["results"]
    assert result["metrics"][0]["value"] == 80
    assert "GSM8K" in card and "80.0" in card and "lm_eval" in card
    assert hub.files("me/tiny", "v1", repo_type="model")["README.md"].decode() != card
    assert (model / "README.md").read_bytes() == before  # the folder stays as it was made
    servers.run(*flags, model=model)
    assert [tag for tag in hub.tags("me/tiny", "model") if tag.startswith("v")] == ["v1", "v2"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--push-to-hub"], "--repo-id NAME/REPOSITORY"),
        (["--repo-id", "me/tiny"], "needs --push-to-hub"),
    ],
)
def test_where_results_cannot_go(flags, words, hub, model, trio, tmp_path):
    servers = trio()
    said = servers.run("--tasks", "gsm8k", "--output-dir", tmp_path / "r", *flags, model=model,
                       status=2)  # fmt: skip
    assert words in said.err and servers.asked() == (0, 0)


def test_what_a_card_shows(trio, questions, data_dir, tmp_path):
    servers = trio({"script": first_of(solves(()), writes(lambda _: 30))})
    servers.run(
        *("--judge", "judge", "--alpaca-data", questions, "--data-dir", data_dir),
        *("--tasks", "alpaca,gsm8k", "--output-dir", tmp_path / "report", "--limit", 6),
    )
    found = json.loads((tmp_path / "report/results.json").read_text())
    by_name = {one.benchmark: one for one in card_results(found)}
    own = by_name["AlpacaEval questions of our own"]
    assert own.judge.startswith("judge (selfsynth ") and "against a baseline" in own.notes
    assert "of 6 items chosen by hash" in by_name["GSM8K"].notes
    assert by_name["GSM8K"].estimate.value == 100
    assert by_name["GSM8K"].dataset_id is None  # six items are nothing for a leaderboard
    found["metrics"]["gsm8k"]["model"]["n"] = 1319
    assert {one.dataset_id for one in card_results(found)} == {None, "openai/gsm8k"}
