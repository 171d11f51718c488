"""Prompts that stand in a benchmark are found, whatever their spelling, and leave by name."""

import hashlib
import json
import random
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import contamination
from pipelines.contamination import SETS, Evaluation, load, ngrams
from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.schema import check_dataset
from tests.pipelines.test_sao import arguments, in_process, ledger_of, pairs_of
from tests.servers.model_server import ModelServer

DUCKS = "Janet's ducks lay sixteen eggs per day. She eats three for breakfast."
DUCKS_ALONE = "Janet's ducks lay sixteen eggs per day"  # 8 words: Janet, s, ducks, …


@pytest.mark.parametrize(
    ("evaluation", "prompt", "n", "threshold", "held"),
    [
        (DUCKS, DUCKS, 8, 0, True),
        (DUCKS, f"Solve this: {DUCKS_ALONE}!", 8, 0, True),
        (DUCKS, "JANET’S **ducks** lay, sixteen: eggs_per_day", 8, 0, True),
        (DUCKS, "Janet's ducks lay sixteen eggs per week, and no more of them", 8, 0, False),
        (DUCKS, "Janet's ducks lay sixteen eggs per week, and no more of them", 7, 0, True),
        (DUCKS, "day per eggs sixteen lay ducks s Janet", 8, 0, False),
        # spelling of the same letters
        ("one ﬁne Straße é two three", "ONE FINE STRASSE e\u0301 TWO THREE", 6, 0, True),
        ("one t\u00adwo three", "one two thr\u200bee", 3, 0, True),
        ("ｏｎｅ ｔｗｏ ｔｈｒｅｅ", "one two three", 3, 0, True),
        ("मैं हिन्दी सीखना चाहता हूँ", "मैं हिन्दी सीखना चाहता हूँ।", 5, 0, True),
        # scripts without blanks, next to others or not
        ("请用 Python 写一个排序函数", "谢谢，请用Python写一个排序函数吧！", 8, 0, True),
        ("日本で一番高い山は何ですか", "日本で一番高い川は何ですか", 8, 0, False),
        # fewer words than n: only the whole
        ("What is love?", "what is love", 8, 0, True),
        ("What is love?", "what is love then", 8, 0, False),
        ("What is love?", "love is what", 8, 0, False),
        (DUCKS, "ducks lay sixteen eggs", 8, 0, False),
        ("What is love?", "what is love", 8, 1, True),
        # nothing to compare
        ("?!", "…", 8, 0, False),
        ("", DUCKS, 8, 0, False),
        # shares: a b c d e has three 3-grams, a b c d x two of them at most
        ("a b c d e", "a b c x y z", 3, 1 / 3, True),
        ("a b c d e", "a b c x y z", 3, 0.34, False),
        ("a b c d e f g h", "x a b c d", 3, 2 / 3, True),
        ("a b c d e f g h", "x a b c d", 3, 1, False),
        ("a b c d e f g h", "c d e f", 3, 1, True),
        ("c d e f", "a b c d e f g h", 3, 1, True),
    ],
)
def test_overlap(evaluation, prompt, n, threshold, held):
    assert Evaluation([evaluation, "something else"], n, threshold).holds(prompt) is held


def test_the_share_is_that_of_one_evaluation_prompt():
    prompt = "a b c d e f g"
    assert Evaluation(["a b c d", "d e f g"], 3, 0.5).holds(prompt)
    assert not Evaluation(["a b c x y", "v w e f g"], 3, 0.5).holds(prompt)
    assert Evaluation(["a b c x y", "v w e f g"], 3, 0.3).holds(prompt)


words = st.text("abcdéßжя7", min_size=1, max_size=5)
between = st.sampled_from([" ", "  ", ", ", "\n", " — ", "; ", "!\t", " _", "** "])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(data=st.data(), n=st.integers(1, 9))
def test_n_words_in_a_row_are_always_found(data, n):
    others = data.draw(st.lists(st.lists(words, max_size=12).map(" ".join), max_size=4))
    asked = data.draw(st.lists(words, min_size=n, max_size=20))
    start = data.draw(st.integers(0, len(asked) - n))
    around = [data.draw(st.lists(words, max_size=4)) for _ in "ab"]
    run = [*around[0], *asked[start : start + n], *around[1]]
    run = [data.draw(st.sampled_from([one, one.upper(), one.title()])) for one in run]
    prompt = "".join(one + data.draw(between) for one in run)
    everything = [*others, " ".join(asked)]
    assert Evaluation(everything, n).holds(prompt)
    assert Evaluation(everything[::-1], n).holds(prompt)
    # And nothing else is: what is held shares an n-gram.
    assert Evaluation(others, n).holds(prompt) == any(
        ngrams(one, n) & ngrams(prompt, n) for one in others
    )


def test_thousands_are_compared_in_seconds():
    dice = random.Random(0)
    vocabulary = [f"word{number}" for number in range(500)]
    texts = [" ".join(dice.choices(vocabulary, k=60)) for _ in range(13_000)]
    began = time.monotonic()
    evaluation = Evaluation(texts[:3000])
    assert sum(map(evaluation.holds, texts[3000:])) == 0 and evaluation.holds(texts[7])
    assert time.monotonic() - began < 5


# Where the evaluation prompts come from


def test_files_are_taken_once_and_in_an_order_of_their_own(tmp_path):
    (tmp_path / "b.txt").write_text("One question?\nOne question?\n\nAnother?\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "A third?", "id": 3}))
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")
    sets, prompts = load([b, a, b])
    assert (sets, prompts) == load([a, b])
    assert prompts == ["A third?", "One question?", "One question?", "Another?"]
    sha256 = hashlib.sha256((tmp_path / "b.txt").read_bytes()).hexdigest()
    assert sets[1] == {"source": "file", "name": "b.txt", "sha256": sha256, "prompts": 3}
    assert str(tmp_path) not in json.dumps(sets)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that holds two questions of every set; returns what it was asked for."""
    asked = []

    def download(repo, file, repo_type, revision):
        asked.append((repo, repo_type, revision))
        (one,) = [one for one in SETS.values() if (one.repo, one.file) == (repo, file)]
        rows = [{one.field: f"Question {number} of {repo}?", "x": 1} for number in (1, 2)]
        path = tmp_path / file.replace("/", "-")
        if file.endswith(".json"):
            path.write_text(json.dumps(rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    return asked


def test_named_sets_come_at_their_commits(hub):
    sets, prompts = load(["truthfulqa", "all", "gsm8k"])
    assert [one["name"] for one in sets] == ["alpaca_eval", "gsm8k", "truthfulqa"]
    assert len(hub) == 3 and len(prompts) == 6
    assert hub == [(one["repo"], "dataset", one["revision"]) for one in sets]
    assert all(len(one["revision"]) == 40 and one["prompts"] == 2 for one in sets)
    assert "Question 2 of openai/gsm8k?" in prompts


def test_a_set_that_is_empty_or_another_is_an_error(hub, monkeypatch):
    monkeypatch.setattr(contamination, "_column", lambda path, field: [])
    with pytest.raises(SelfsynthError, match=r"gsm8k.*it holds no prompts"):
        load(["gsm8k"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("e.txt", "\n \n", "e.txt holds no prompts"),
        ("e.jsonl", '{"question": "x"}', 'line 1: no key "prompt"'),
        ("e.txt", b"\xff", "line 1: not UTF-8"),
        ("e.csv", "prompt", "is none of alpaca_eval, gsm8k, truthfulqa, all"),
    ],
)
def test_files_of_no_use(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        load(["gsm8k", str(path)])  # before the Hub is asked


# The command

BAD = {
    "n alone": (["--decontaminate-n", "5"], "need --decontaminate"),
    "threshold alone": (["--decontaminate-threshold", "0"], "need --decontaminate"),
    "n": (["--decontaminate", "all", "--decontaminate-n", "0"], "--decontaminate-n"),
    "share": (["--decontaminate", "all", "--decontaminate-threshold", "1.5"], "threshold"),
    "no number": (["--decontaminate", "all", "--decontaminate-threshold", "nan"], "threshold"),
    "name": (["--decontaminate", "mmlu"], "'mmlu' is none of"),
    "empty": (["--decontaminate", ""], "--decontaminate is empty"),
    "file": (["--decontaminate", "no-such-file.txt"], "cannot be read"),
}


@pytest.mark.parametrize(("flags", "said"), BAD.values(), ids=BAD)
def test_bad_usage(tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    start = ["--model", "scripted", "--base-url", "http://127.0.0.1:9/v1"]
    assert in_process(*start, *flags) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and said in message
    assert list(tmp_path.iterdir()) == []


def test_without_the_hub_nothing_is_asked(tmp_path, capsys):
    with ModelServer() as server:
        command = arguments(server.url, tmp_path / "run", "--decontaminate", "gsm8k", n=3)[1:]
        assert in_process(*command) == 1
        assert server.requests == []
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: --decontaminate gsm8k: ") and "openai/gsm8k" in message
    assert not (tmp_path / "run").exists()


def test_a_prompt_of_a_benchmark_leaves_by_name(python, tmp_path):
    with ModelServer() as server:
        python(*arguments(server.url, tmp_path / "plain", n=6))
        prompts = [row["prompt"] for row in ledger_of(tmp_path / "plain")]
        (tmp_path / "evals").mkdir()
        (tmp_path / "evals/mine.txt").write_text(f"Please: {prompts[2].upper()}\n")
        before = len(server.requests)
        command = arguments(
            *(server.url, tmp_path / "run", "--reuse", tmp_path / "plain"),
            *("--decontaminate", tmp_path / "evals/mine.txt", "--decontaminate-n", 3),
            *("--decontaminate-threshold", 0.9),
            n=6,
        )
        python(*command)
        assert len(server.requests) == before  # what is left was asked for already
        other = [*command, "--decontaminate-n", 4]
        assert "decontaminate.n: 3 there, 4 here" in python(*other, status=2).stderr
        (tmp_path / "evals/mine.txt").write_text("Another question?\n")
        assert "decontaminate.sets: [" in python(*command, status=2).stderr
        without = arguments(server.url, tmp_path / "run", n=6)
        assert "decontaminate: {" in python(*without, status=2).stderr
    ledger = ledger_of(tmp_path / "run")
    assert check_dataset(pairs_of(tmp_path / "run"), ledger) == []
    (left,) = [row for row in ledger if row["reason"] == "prompt_contaminated"]
    assert left["prompt"] == prompts[2] and left["responses"] == []
    told = json.loads((tmp_path / "run/provenance.json").read_text())
    (one,) = told["identity"]["decontaminate"]["sets"]
    assert one["name"] == "mine.txt" and "evals" not in json.dumps(told)
    card = (tmp_path / "run/README.md").read_text()
    section = card.split("## Decontamination")[1].split("\n## ")[0]
    assert "1 of 6 rows left" in section and "90.0 % of the 3-grams" in section
    assert f"| `mine.txt` | SHA-256 `{one['sha256']}` | 1 |" in section
    plain = tmp_path / "plain"
    assert "Decontamination" not in (plain / "README.md").read_text()
    merged = ["pipelines/sao.py", "merge", tmp_path / "run", plain, "--output-dir", tmp_path / "m"]
    python(*merged)
    section = (tmp_path / "m/README.md").read_text().split("## Decontamination")[1]
    assert "shared in `run`: 90.0 %" in section and "compared in `plain`" in section


def test_own_prompts_are_compared_too(python, tmp_path):
    (tmp_path / "own.txt").write_text("Why is the sky blue today?\nWho wrote this letter to me?\n")
    (tmp_path / "evals.txt").write_text("why is the SKY blue today\n")
    with ModelServer() as server:
        command = arguments(server.url, tmp_path / "run", "--prompts", tmp_path / "own.txt",
                            "--decontaminate", tmp_path / "evals.txt", n=2)  # fmt: skip
        python(*command)
        assert [one.kind for one in server.requests].count("response") == 2
    reasons = {row["prompt"]: row["reason"] for row in ledger_of(tmp_path / "run")}
    assert reasons["Why is the sky blue today?"] == "prompt_contaminated"
    assert reasons["Who wrote this letter to me?"] != "prompt_contaminated"
