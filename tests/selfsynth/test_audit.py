"""The judge audit: judges of known worth get the verdict they deserve, in every mode."""

import asyncio
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfsynth import audit
from selfsynth.audit import (
    BELIEVED,
    CHANCE,
    ENOUGH,
    FEW,
    KINDS,
    Answer,
    affordable,
    contrasts,
    decide,
    report,
    requests_a_prompt,
    sentence,
)
from selfsynth.serving import Completion
from selfsynth.stats import wilson
from tests.servers.model_server import ModelServer

MODES = ("pairwise", "rating", "yesno")
MANNER = {"orders": 2, "logprobs": True, "criteria": None, "thinking": 0}


def answers(count, words=30):
    """Prompts with answers that are all different and long enough to be spoilt."""
    return [
        Answer(f"Question {n}?", " ".join(f"word{n}x{k}" for k in range(words)), n)
        for n in range(count)
    ]


# The contrasts


def test_each_answer_meets_its_four_spoilt_ones():
    given_answers = answers(3)
    made = contrasts(given_answers)
    assert [one.kind for one in made] == list(KINDS) * 3
    for number, one in enumerate(made):
        own = given_answers[number // 4]
        assert one.responses[one.place] == own.response
        assert (one.prompt, one.seed) == (own.prompt, own.seed)
    spoilt = {one.kind: one.responses[1 - one.place] for one in made[:4]}
    assert spoilt["off-topic"] == given_answers[1].response
    assert spoilt["cut"] == " ".join(given_answers[0].response.split()[:8])
    assert sorted(spoilt["shuffled"].split()) == sorted(given_answers[0].response.split())
    assert spoilt["shuffled"] != given_answers[0].response
    assert spoilt["refusal"] == audit.REFUSAL


def test_no_place_holds_more_right_answers_than_the_other():
    made = contrasts(answers(10))
    for kind in KINDS:
        assert [one.place for one in made if one.kind == kind].count(0) == 5


@pytest.mark.parametrize(
    ("responses", "kinds"),
    [
        (["one two"], {"shuffled", "refusal"}),  # or its shuffle is the same
        (["one"], {"refusal"}),
        ([audit.REFUSAL, "x y z"], {"off-topic", "shuffled", "refusal"}),
        (["same words", "same  words"], {"shuffled", "refusal"}),
        (["これは" * 30, "それは" * 30], set(KINDS)),
    ],
)
def test_what_cannot_be_spoilt_is_left_out(responses, kinds):
    made = contrasts([Answer("Why?", text, 0) for text in responses])
    assert {one.kind for one in made} <= kinds
    assert all(one.responses[0].split() != one.responses[1].split() for one in made)


@given(st.lists(st.text(min_size=1).filter(str.strip), max_size=5))
def test_any_answers_give_the_same_contrasts_twice(texts):
    given_answers = [Answer("Why?", text, 0) for text in texts]
    assert contrasts(given_answers) == contrasts(given_answers)
    assert len(contrasts(given_answers)) <= 4 * len(texts)


# What it costs


@pytest.mark.parametrize("run", [5, 40, 500, 5000, 50_000])
@pytest.mark.parametrize("modes", [MODES, ("rating", "yesno"), ("pairwise",)])
@pytest.mark.parametrize("orders", [1, 2])
def test_an_audit_costs_at_most_its_share(run, modes, orders):
    asked = []

    async def ask(requests):
        asked.extend(requests)
        return [Completion("1", top_logprobs=[["1", -0.1]])] * len(requests)

    given_answers = answers(affordable(run, modes, orders))
    asyncio.run(audit.audit(ask, given_answers, modes, MANNER | {"orders": orders}, "rating"))
    distinct = {json.dumps(request) for request in asked}
    assert len(distinct) <= max(200, run * 15 / 100)
    assert len(contrasts(given_answers)) >= ENOUGH
    assert requests_a_prompt(modes, orders) * len(given_answers) <= len(distinct)


# Judges of known worth, over a real connection to the scripted server's answers


def judged(judge, modes=MODES, count=12, orders=2, logprobs=True, **server):
    """The audit of a scripted judge, and all requests that it got."""
    scripted, asked = ModelServer(judge=judge, **server), []

    async def ask(requests):
        asked.extend(requests)
        return [answer(scripted, request) for request in requests]

    manner = MANNER | {"orders": orders, "logprobs": logprobs}
    return asyncio.run(audit.audit(ask, answers(count), modes, manner, "pairwise")), asked


def answer(server, request):
    body = {"model": "scripted", "messages": request.messages, "max_tokens": request.max_tokens}
    body |= {"logprobs": bool(request.top_logprobs), "top_logprobs": request.top_logprobs}
    choice = server.answer(body)["choices"][0]
    listed = (choice["logprobs"] or {}).get("content")
    top = listed and [[one["token"], one["logprob"]] for one in listed[0]["top_logprobs"]]
    return Completion(choice["message"]["content"], top_logprobs=top or None)


def judge_right(question):
    """The response that is no refusal, is long enough and keeps to its prompt, in order."""
    number = re.search(r"Question (\d+)\?", question.prompt)[1]

    def worth(text):
        numbers = [int(one) for one in re.findall(rf"word{number}x(\d+)", text)]
        return (numbers == list(range(30))) + len(numbers) / 100

    worths = [worth(text) for text in question.responses]
    if question.mode == "pairwise":
        first = 0.9 if worths[0] > worths[1] else 0.1
        return {"1": first, "2": 1 - first}
    good = 0.1 + 0.6 * worths[0]
    if question.mode == "yesno":
        return {"Yes": good, "No": 1 - good}
    return {"1": 1 - good, "5": good}


def test_a_good_judge_is_believed_in_every_mode():
    found, _ = judged(judge_right)
    for mode in MODES:
        assert found["modes"][mode]["right"] == found["modes"][mode]["asked"] == 48
        assert decide(found, "pairwise", mode) == (mode, BELIEVED)
    assert found["modes"]["pairwise"]["first"] == [48, 96]
    assert found["noise"] == {"asked": 10, "spread": 0.0, "flipped": 0}


@pytest.mark.parametrize("orders", [1, 2])
def test_a_judge_that_names_the_first_is_no_better_than_chance(orders):
    found, _ = judged("always_first", ["pairwise"], orders=orders)
    tried = found["modes"]["pairwise"]
    # In one order it is right half the time; in both, its two verdicts cancel.
    assert tried["right"] == (24 if orders == 1 else 0)
    assert tried["first"] == [48 * orders] * 2
    assert decide(found, "pairwise", None) == ("pairwise", CHANCE)


@pytest.mark.parametrize("judge", ["hash", "tie", "neither"])
def test_judges_without_an_opinion(judge):
    found, _ = judged(judge)
    mode, verdict = decide(found, "pairwise", None)
    assert verdict == CHANCE and mode == found["best"]
    if judge != "hash":
        assert all(tried["undecided"] == tried["asked"] for tried in found["modes"].values())


def test_words_are_verdicts_too():
    found, asked = judged(judge_right, logprobs=False)
    assert found["modes"]["pairwise"]["right"] == 48
    assert found["noise"]["spread"] is None and found["noise"]["flipped"] == 0
    assert {request.top_logprobs for request in asked} == {0}


def test_requests_that_fail_are_nobodys_fault():
    async def ask(requests):
        return [
            Completion(None, failure="request_failed") if number % 2 else Completion("1")
            for number, _ in enumerate(requests)
        ]

    found = asyncio.run(audit.audit(ask, answers(12), ["rating"], MANNER, "rating"))
    assert found["modes"]["rating"]["asked"] == 0 and found["best"] is None
    assert found["noise"] is None
    assert decide(found, "rating", None) == ("rating", FEW)


def test_a_mode_that_no_request_fits_is_left_out():
    async def ask(requests):
        return [
            Completion(None, failure="context_exceeded")
            if "<response_1>" in request.messages[0]["content"]
            else Completion("1", top_logprobs=[["5", -0.5 - len(str(request)) / 9999], ["1", -1]])
            for request in requests
        ]

    found = asyncio.run(audit.audit(ask, answers(12), MODES[:2], MANNER, "pairwise"))
    assert found["modes"]["pairwise"]["asked"] == 0 and found["mode"] == "rating"
    assert "0 of 0" in report(found)[1]


def test_verdicts_are_asked_again_as_other_requests():
    _, asked = judged(judge_right, ["rating"])
    first = [request for request in asked if not request.repeat]
    again = [request for request in asked if request.repeat]
    assert len(again) == 20 and len({json.dumps(one) for one in again}) <= 20
    assert {json.dumps(one._replace(repeat=0)) for one in again} <= set(map(json.dumps, first))


def test_a_judge_that_moves_has_a_noise_floor():
    calls = 0

    async def ask(requests):
        nonlocal calls
        calls += 1
        shift = 0.3 if requests[0].repeat else 0.0
        return [
            Completion("1", top_logprobs=[["1", -1.0 + shift * (place % 2)], ["2", -1.5]])
            for place, _ in enumerate(requests)
        ]

    found = asyncio.run(audit.audit(ask, answers(12), ["pairwise"], MANNER, "pairwise"))
    assert found["noise"]["spread"] == pytest.approx(0.15)
    assert audit.noise_floor(found) == found["noise"]["spread"]


def test_the_noise_floor_is_that_of_the_mode_in_use():
    async def ask(requests):
        return [Completion("1", top_logprobs=[["1", -1.0], ["2", -1.5]]) for _ in requests]

    async def tried(count, named):
        found = await audit.audit(ask, answers(count), MODES, MANNER, "rating", named)
        return found["mode"], found["noise"] and found["noise"]["asked"]

    assert asyncio.run(tried(2, None)) == ("rating", 8)
    assert asyncio.run(tried(12, "yesno")) == ("yesno", 10)
    assert asyncio.run(tried(0, None)) == ("rating", None)


# The decision


def audited(asked=44, **right):
    """An audit in which modes were right so often."""
    modes = {
        mode: {"right": hits, "asked": asked, "undecided": 0, "first": None,
               "kinds": {kind: [hits // 4, asked // 4] for kind in KINDS}}
        for mode, hits in right.items()
    }  # fmt: skip
    best = max(right, key=right.get, default=None)
    return {"prompts": asked // 4, "contrasts": asked, "modes": modes, "best": best, "noise": None}


@pytest.mark.parametrize(
    ("found", "default", "named", "expected"),
    [
        (audited(pairwise=20, rating=40, yesno=35), "pairwise", None, ("rating", BELIEVED)),
        (audited(pairwise=40, rating=40), "pairwise", None, ("pairwise", BELIEVED)),
        # 50 % inside the interval: 28 of 44 is 64 %, from 49 % on.
        (audited(pairwise=20, rating=28), "pairwise", None, ("rating", CHANCE)),
        (audited(pairwise=20, rating=29), "pairwise", None, ("rating", BELIEVED)),
        (audited(pairwise=0, rating=2), "pairwise", None, ("rating", CHANCE)),
        # A mode that was named is on trial itself.
        (audited(pairwise=20, rating=40), "pairwise", "pairwise", ("pairwise", CHANCE)),
        (audited(pairwise=20, rating=40), "pairwise", "rating", ("rating", BELIEVED)),
        # Few contrasts: the usual mode stays.
        (audited(12, rating=7, yesno=11), "rating", None, ("rating", FEW)),
        (audited(12, rating=5, yesno=11), "rating", None, ("rating", FEW)),  # which few can be
        (audited(12, rating=5, yesno=6), "rating", None, ("rating", CHANCE)),
        (audited(12, rating=5, yesno=7), "pairwise", None, ("yesno", FEW)),  # it was not tried
        (audited(39, rating=39), "rating", None, ("rating", FEW)),
        (audited(40, rating=27), "rating", None, ("rating", BELIEVED)),
        (audited(0), "pairwise", None, ("pairwise", FEW)),
        (audited(12, rating=12), "rating", "pairwise", ("pairwise", FEW)),  # named, not tried
    ],
)
def test_decide(found, default, named, expected):
    assert decide(found, default, named) == expected


def test_what_is_said_of_it():
    found = audited(pairwise=20, rating=40)
    lines = report(found)
    assert lines[0].split()[:2] == ["mode", "right"]
    assert "40 of 44 (91%)" in lines[2] and "10/11" in lines[2]
    low, high = wilson(40, 44)[1:3]
    assert sentence(found | {"mode": "rating"}) == (
        "in mode rating the judge was right in 40 of 44 contrasts "
        f"(90.9 %, 95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
    )
    assert "nothing to try" in sentence(audited(0) | {"mode": "pairwise"})
    assert report(audited(0)) == report(audited(0))[:1]


def test_an_audit_is_plain_json():
    found, _ = judged("hash", count=2)
    assert json.loads(json.dumps(found)) == found
