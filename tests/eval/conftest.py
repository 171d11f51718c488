"""Questions, GSM8K items and scripted models for reports."""

import json
import re
from hashlib import sha256

import pytest

from eval import alpaca
from eval.__main__ import app
from selfsynth.audit import REPEATED
from tests.servers.model_server import ModelServer, last_user

QUESTIONS = [f"Tell me about the {word}." for word in (
    "sea", "moon", "forest", "city", "river", "desert", "garden", "kitchen",
    "market", "school", "winter", "harbour",
)]  # fmt: skip


@pytest.fixture
def questions(tmp_path):
    """A folder of twelve questions of our own, in the form of AlpacaEval's."""
    folder = tmp_path / "questions"
    folder.mkdir()
    rows = [
        {
            "instruction": text,
            "output": " ".join(["word"] * (10 + 6 * place)),
            "dataset": ("sights", "life")[place % 2],
            "generator": "a baseline",
        }
        for place, text in enumerate(QUESTIONS)
    ]
    (folder / alpaca.BASELINE).write_text(json.dumps(rows))
    return folder


@pytest.fixture
def data_dir(tmp_path):
    """GSM8K as it lies in a `--data-dir`: five examples, ten items."""
    folder = tmp_path / "data/gsm8k"
    folder.mkdir(parents=True)
    for split, first, count in (("train", 100, 5), ("test", 1, 10)):
        lines = [
            json.dumps(
                {
                    "question": f"Ann has {number} apples and buys {number + 2} more. How many?",
                    "answer": f"{number} + {number + 2} = {2 * number + 2}\n#### {2 * number + 2}",
                }
            )
            for number in range(first, first + count)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder.parent


def answered(text, finish_reason="stop", top_logprobs=None):
    """Return a chat completion that says `text`."""
    logprobs = top_logprobs and {
        "content": [
            {
                "token": top_logprobs[0]["token"],
                "logprob": top_logprobs[0]["logprob"],
                "top_logprobs": top_logprobs,
            }
        ]
    }
    return {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
                "logprobs": logprobs,
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16},
    }


def solves(wrong):
    """Return a script that answers GSM8K's items, those of `wrong` numbers wrongly."""

    def script(body):
        found = re.search(r"Question: Ann has (\d+) apples", last_user(body["messages"]))
        if not found:
            return None
        number = int(found[1])
        return answered(f"She has **{2 * number + 2 + (number in wrong)}** apples, as of 2024.")

    return script


def writes(length):
    """Return a script that answers questions with `length(question)` words."""

    def script(body):
        text = last_user(body["messages"])
        if text not in QUESTIONS:
            return None
        # Words of the question's own, so that no two answers are alike.
        own = sha256(text.encode()).hexdigest()
        return answered(" ".join(f"{own[:4]}{place}" for place in range(length(text))))

    return script


def first_of(*scripts):
    """Return a script that gives what the first of others gives."""

    def script(body):
        return next((found for one in scripts if (found := one(body)) is not None), None)

    return script


class Trio:
    """Three scripted servers, and the command that compares the first two by the third."""

    def __init__(self, model, base, judge, in_process):
        self.model, self.base, self.judge, self._in_process = model, base, judge, in_process

    def run(self, *arguments, model="model", status=0):
        """Run `eval run` with the three."""
        urls = {"--base-url": self.model, "--against-base-url": self.base}
        urls |= {"--judge-base-url": self.judge} if "--judge" in arguments else {}
        flags = [part for flag, one in urls.items() for part in (flag, one.url)]
        who = ("run", model, "--against", "base")
        return self._in_process(app, *who, *arguments, *flags, status=status)

    def asked(self):
        """Return how many requests came in, and how many of them for nothing.

        The audit asks some of its contrasts again on purpose.
        """
        counts = [one.counts() for one in (self.model, self.base, self.judge)]
        on_purpose = 2 * REPEATED if self.judge.counts()["repeats"] else 0
        repeats = sum(one["repeats"] for one in counts) - on_purpose
        return sum(one["requests"] for one in counts), repeats


@pytest.fixture
def trio(in_process):
    """Return a function that makes three servers; their settings by role replace the usual ones.

    The model writes 40 words and misses two of GSM8K's items; the base writes 20 and misses none;
    the judge likes the longer answer.
    """
    servers = []

    def make(model=None, base=None, judge=None):
        usual = (
            ({"script": first_of(solves({3, 4}), writes(lambda _: 40))}, model),
            ({"script": first_of(solves(()), writes(lambda _: 20))}, base),
            ({"judge": "longer"}, judge),
        )
        for name, (settings, changed) in zip(("model", "base", "judge"), usual, strict=True):
            server = ModelServer(**{"models": [name], "salt": name} | settings | (changed or {}))
            servers.append(server.__enter__())
        return Trio(*servers[-3:], in_process)

    yield make
    for server in servers:
        server.__exit__(None, None, None)
