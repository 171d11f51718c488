"""Tasks of lm-eval with data of our own: what is asked, of whom, and in which order."""

import json

import pytest

from eval import tasks
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.serving import Completion

pytest.importorskip("lm_eval")


def says(text, **more):
    return Completion(text=text, finish_reason="stop", prompt_tokens=1, completion_tokens=1, **more)


def test_the_prompt_is_lm_evals_as_a_conversation(data_dir):
    (loaded,) = tasks.load(["gsm8k"], data_dir, None)
    seen = []

    def ask(requests):
        seen.extend(requests)
        return [says("#### 4")] * len(requests)

    items = tasks.generate(loaded, ask)
    assert len(items) == len(seen) == 10
    first = seen[0].messages
    # Five examples, the first ones of their split, each a question and its answer.
    assert [one["role"] for one in first] == ["user", "assistant"] * 5 + ["user"]
    assert "Ann has 100 apples" in first[0]["content"] and "#### 202" in first[1]["content"]
    assert "Ann has 1 apples" in first[-1]["content"]
    assert seen[0].temperature == 0 and 0 < len(seen[0].stop) <= 4
    assert [one["correct"] for one in items] == [1.0] + [0.0] * 9
    assert items[0]["strict"] and items[0]["flexible"]


def test_a_limit_takes_items_by_hash_and_nests(data_dir):
    ids = [tasks.load(["gsm8k"], data_dir, limit)[0].ids for limit in (3, 6, None)]
    assert [len(one) for one in ids] == [3, 6, 10]
    assert set(ids[0]) < set(ids[1]) < set(ids[2])
    path = data_dir / "gsm8k/test.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    again = tasks.load(["gsm8k"], data_dir, 3)[0].ids
    assert set(again) == set(ids[0])


def test_an_item_keeps_its_id_and_its_answer(data_dir):
    """Items, answers and ids belong together, also where a part of them is asked."""
    for limit in (4, None):
        (loaded,) = tasks.load(["gsm8k"], data_dir, limit)

        def ask(requests):
            return [says(one.messages[-1]["content"].split()[3]) for one in requests]

        for row in tasks.generate(loaded, ask):
            assert row["prompt"].split()[2] == row["answer"]


def test_what_did_not_come_is_no_wrong_answer(data_dir):
    (loaded,) = tasks.load(["gsm8k"], data_dir, 3)
    gone = [Completion(text=None, failure="request_failed"), says(None), says("4")]
    items = tasks.generate(loaded, lambda requests: gone)
    assert [one["failure"] for one in items] == ["request_failed", "response_missing", None]


def test_stops_are_kept_where_a_server_ignores_them(data_dir):
    (loaded,) = tasks.load(["gsm8k"], data_dir, 1)
    (item,) = tasks.generate(loaded, lambda requests: [says("#### 5\n\nQuestion: more?")])
    assert "Question:" not in item["answer"]


QUESTION = {"question": "Is the sea blue?", "answer": "#### 1"}
BAD = {
    "no test split": ({"gsm8k/train.jsonl": [QUESTION]}, UsageError, "test"),
    "no examples": ({"gsm8k/test.jsonl": [QUESTION]}, UsageError, "train"),
    "other columns": (
        {"gsm8k/train.jsonl": [{"q": "?"}], "gsm8k/test.jsonl": [{"q": "?"}]}, SelfsynthError,
        "question",
    ),
    "empty": ({"gsm8k/train.jsonl": [QUESTION], "gsm8k/test.jsonl": []}, SelfsynthError, "gsm8k"),
    "no JSON": (
        {"gsm8k/train.jsonl": [QUESTION], "gsm8k/test.jsonl": "what?"}, SelfsynthError, "gsm8k",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_data_that_are_not_the_tasks(name, tmp_path):
    files, error, words = BAD[name]
    for path, lines in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        text = lines if isinstance(lines, str) else "".join(json.dumps(one) + "\n" for one in lines)
        (tmp_path / path).write_text(text)
    with pytest.raises(error, match=words):
        tasks.load(["gsm8k"], tmp_path, None)


def test_the_hub_does_not_answer():
    with pytest.raises(SelfsynthError, match="gsm8k"):
        tasks.load(["gsm8k"], None, None)


def test_truthfulqa_as_its_authors_publish_it(tmp_path):
    """By log-likelihood of a small random model: each item's score is a share of probability."""
    from tests.tiny import save_model

    (tmp_path / "truthfulqa").mkdir()
    (tmp_path / "truthfulqa/TruthfulQA.csv").write_text(
        "Question,Best Answer,Correct Answers,Incorrect Answers\n"
        "What is the capital?,Paris,Paris; It is Paris,France\n"
        "What is 1234?,years,years; 1234 years,old; the capital\n"
    )
    (loaded,) = tasks.load(["truthfulqa_mc2"], tmp_path, None)
    assert not loaded.generates
    items = tasks.likelihood(loaded, str(save_model(tmp_path / "model")))
    assert [one["prompt"] for one in items] == ["What is the capital?", "What is 1234?"]
    assert all(0 < one["correct"] < 1 for one in items)
    assert items == tasks.likelihood(loaded, str(tmp_path / "model"))


def test_a_table_that_is_not_truthfulqas(tmp_path):
    (tmp_path / "truthfulqa").mkdir()
    (tmp_path / "truthfulqa/TruthfulQA.csv").write_text("Question,Answer\nWhat?,That\n")
    with pytest.raises(UsageError, match="Correct Answers"):
        tasks.load(["truthfulqa_mc2"], tmp_path, None)
