"""The rows of a dataset: names, splits, and every way in which a row can be wrong."""

import copy
import random

import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from selfsynth.schema import (
    JUDGE_MODES,
    LABELLED_BY,
    LEDGER_SCHEMA,
    PAIR_SCHEMA,
    REASONS,
    check_dataset,
    check_ledger_row,
    check_pair,
    pair_id,
    reason_counts,
    split_of,
)

fixed = settings(derandomize=True, deadline=None, database=None)


def pair(prompt="What is a tide?", chosen="The sea rises and falls.", rejected="Ask.", **columns):
    """A sound row of pairs."""
    return {
        "id": pair_id(prompt, chosen, rejected),
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
        "persona": "A fisher.",
        "judge_margin": 1.5,
        "judge_margin_forward": 2.0,
        "judge_margin_backward": 1.0,
        "judge_mode": "pairwise",
        "chosen_tokens": 7,
        "rejected_tokens": 2,
        "model": "me/model@0123",
        "judge": "me/model@0123",
    } | columns


def line(index=0, of=None, reason=None, **columns):
    """A sound line of the ledger: the one of a pair, or dropped for a reason."""
    of = of or pair()
    return {
        "index": index,
        "persona": "A fisher.",
        "prompt": of["prompt"][0]["content"],
        "responses": [of["chosen"][0]["content"], of["rejected"][0]["content"]],
        "finish_reasons": ["stop", "stop"],
        "response_tokens": [7, 2],
        "scores": [2.0, -1.0],
        "verdicts": ["1", "2"],
        "pair_id": None if reason else of["id"],
        "status": "dropped" if reason else "kept",
        "reason": reason,
    } | columns


def turn(role, content):
    return [{"role": role, "content": content}]


# ---------------------------------------------------------------- names of pairs


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("What is a tide?", "The sea rises and falls.", "Ask the moon."), "544064c94399538d"),
        (("", "", ""), "9d908ecfb6b256de"),
        (("¿Qué?", "😀", "a"), "917c16647ac799d6"),
    ],
)
def test_pair_ids_are_frozen(texts, expected):
    """Datasets that are out there carry them."""
    assert pair_id(*texts) == expected


@settings(fixed, max_examples=300)
@given(prompt=st.text(), one=st.text(), other=st.text())
def test_a_flipped_pair_keeps_its_id(prompt, one, other):
    name = pair_id(prompt, one, other)
    assert name == pair_id(prompt, other, one)
    assert len(name) == 16
    assert set(name) <= set("0123456789abcdef")


@settings(fixed, max_examples=300)
@given(texts=st.tuples(*[st.text(max_size=5)] * 3), others=st.tuples(*[st.text(max_size=5)] * 3))
def test_other_texts_have_another_id(texts, others):
    assume((texts[0], *sorted(texts[1:])) != (others[0], *sorted(others[1:])))
    assert pair_id(*texts) != pair_id(*others)


def test_text_that_moves_from_field_to_field_changes_the_id():
    whole = "abcdefghij"
    names = {
        pair_id(whole[:one], whole[one:two], whole[two:])
        for one in range(len(whole))
        for two in range(one, len(whole))
    }
    assert len(names) == 55
    assert pair_id("a", "b", "c") != pair_id("b", "a", "c")  # the prompt has a place of its own
    assert pair_id("a\n", "b", "c") != pair_id("a", "\nb", "c")


# ---------------------------------------------------------------- splits


def test_splits_are_frozen():
    """A prompt never changes sides, or somebody's test rows become training rows."""
    assert [n for n in range(200) if split_of(f"Prompt number {n}") == "test"] == [
        *(81, 101, 147, 148, 160)
    ]
    assert split_of("What is a tide?") == split_of("") == split_of("你好") == "train"


def test_about_five_percent_are_test_rows():
    draw = random.Random(20)
    prompts = {"".join(draw.choices("abcdefgh ", k=30)) for _ in range(20_000)}
    assert len(prompts) > 19_990
    share = sum(split_of(prompt) == "test" for prompt in prompts) / len(prompts)
    assert abs(share - 0.05) < 4 * (0.05 * 0.95 / len(prompts)) ** 0.5


# ---------------------------------------------------------------- columns


def test_no_column_is_called_margin():
    """TRL's RewardTrainer would subtract it inside its loss."""
    assert "margin" not in PAIR_SCHEMA.names
    assert "margin" not in LEDGER_SCHEMA.names


def test_prompt_and_answers_are_what_trl_takes():
    turns = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    for column in ("prompt", "chosen", "rejected"):
        assert PAIR_SCHEMA.field(column).type == turns
    row = pa.Table.from_pylist([pair()], PAIR_SCHEMA).to_pylist()[0]
    assert row == pair()
    assert [one["role"] for one in row["prompt"]] == ["user"]
    for column in ("chosen", "rejected"):
        assert [one["role"] for one in row[column]] == ["assistant"]


def test_columns_of_the_design():
    assert PAIR_SCHEMA.names == list(pair())
    assert LEDGER_SCHEMA.names == list(line())
    for column in ("judge_margin", "judge_margin_forward", "judge_margin_backward"):
        assert PAIR_SCHEMA.field(column).type == pa.float64()
    assert LEDGER_SCHEMA.field("responses").type == pa.list_(pa.string())
    assert LEDGER_SCHEMA.field("scores").type == pa.list_(pa.float64())


def test_reasons_of_the_design():
    assert list(REASONS) == [
        *("prompt_missing", "prompt_empty", "prompt_too_short"),
        *("prompt_truncated", "prompt_refused"),
        *("prompt_repeated", "prompt_near_duplicate", "prompt_contaminated"),
        *("response_missing", "response_empty", "response_truncated", "responses_identical"),
        *("verdict_missing", "verdict_unreadable", "verdict_tie"),
        *("persona_too_long", "context_exceeded", "request_failed"),
        *("human_disagreed", "human_both_bad", "human_prompt_bad"),
    ]
    assert JUDGE_MODES == ("pairwise", "rating", "yesno")
    assert LABELLED_BY == ("pairwise", "rating", "yesno", "random", "longer")


# ---------------------------------------------------------------- pairs

NO_ORDERS = {"judge_margin_forward": None, "judge_margin_backward": None}


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"judge_margin": 2.0, "judge_margin_backward": None},  # one order, chosen first
        {"judge_margin": 1.0, "judge_margin_forward": None},  # one order, chosen second
        {"judge_margin": 0.5, "judge_margin_backward": -1.0},  # the orders disagree
        {"judge_margin": None, **NO_ORDERS},  # verdicts in words
        {"judge_mode": "rating", "judge_margin": 0.25, **NO_ORDERS},
        {"judge_mode": "yesno", "judge_margin": None, **NO_ORDERS},
        {"judge_mode": "random", "judge_margin": None, **NO_ORDERS, "judge": None},
        {"judge_mode": "longer", "judge_margin": None, **NO_ORDERS, "judge": None},
        {"chosen_tokens": None, "rejected_tokens": None},  # the server counted nothing
        {"chosen_tokens": 0},
        {"persona": None},
        {"prompt": [*turn("system", "Be short."), *turn("user", "What is a tide?")]},
    ],
)
def test_sound_pairs(columns):
    assert check_pair(pair() | columns) == []


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"margin": 1.0}, "columns missing or unknown: margin"),
        ({"prompt": "What is a tide?"}, "prompt does not end in a turn of the user with text"),
        ({"prompt": None}, "prompt does not end in a turn of the user with text"),
        ({"prompt": []}, "prompt does not end in a turn of the user with text"),
        (
            {"prompt": turn("assistant", "Why?")},
            "prompt does not end in a turn of the user with text",
        ),
        ({"prompt": turn("user", " \n")}, "prompt does not end in a turn of the user with text"),
        ({"prompt": turn("user", None)}, "prompt does not end in a turn of the user with text"),
        ({"prompt": [{"role": "user"}]}, "prompt does not end in a turn of the user with text"),
        (
            {"chosen": turn("user", "Hm.")},
            "chosen does not end in a turn of the assistant with text",
        ),
        (
            {"rejected": turn("assistant", "")},
            "rejected does not end in a turn of the assistant with text",
        ),
        ({"rejected": "Ask."}, "rejected does not end in a turn of the assistant with text"),
        (
            {"chosen": [*turn("user", "Why?"), *turn("assistant", "So.")]},
            "chosen holds 2 turns, not one",
        ),
        ({"chosen": turn("assistant", "Ask.")}, "chosen and rejected are the same"),
        ({"id": "0" * 16}, "id 0000000000000000 is not that of its texts"),
        ({"id": None}, "id None is not that of its texts"),
        ({"judge_mode": "auto"}, "unknown judge_mode 'auto'"),
        ({"judge_mode": None, **NO_ORDERS}, "unknown judge_mode None"),
        ({"judge_margin": 0.0}, "judge_margin 0.0 is not above 0"),
        ({"judge_margin": -1.5}, "judge_margin -1.5 is not above 0"),
        ({"judge_margin": float("nan")}, "judge_margin nan is not above 0"),
        ({"judge_margin": float("inf")}, "judge_margin inf is not above 0"),
        ({"judge_margin": "1.5"}, "judge_margin is no number: '1.5'"),
        ({"judge_margin": 3.0}, "judge_margin 3.0 is not the mean of the orders asked"),
        ({"judge_margin": None}, "are there together or not at all"),
        (NO_ORDERS, "are there together or not at all"),
        ({"judge_mode": "rating"}, "margins by order belong to pairwise judgement only"),
        ({"judge_mode": "random"}, "judge_margin belongs to a judge, not to random labels"),
        ({"judge_mode": "longer"}, "margins by order belong to pairwise judgement only"),
        ({"chosen_tokens": -1}, "chosen_tokens is no count: -1"),
        ({"rejected_tokens": 1.5}, "rejected_tokens is no count: 1.5"),
        ({"model": ""}, "model is empty"),
        ({"model": None}, "model is empty"),
        ({"judge": None}, "judge is empty"),
    ],
)
def test_wrong_pairs_are_named(columns, named):
    assert any(named in problem for problem in check_pair(pair() | columns))


@pytest.mark.parametrize("column", PAIR_SCHEMA.names)
def test_a_missing_column_of_a_pair_is_named(column):
    row = pair()
    del row[column]
    assert check_pair(row) == [f"columns missing or unknown: {column}"]


# ---------------------------------------------------------------- the ledger


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_sound(reason):
    assert check_ledger_row(line(reason=reason)) == []


def test_sound_lines():
    assert check_ledger_row(line()) == []
    nothing = {"responses": [], "finish_reasons": [], "response_tokens": []}
    assert check_ledger_row(line(reason="prompt_missing", prompt=None, **nothing)) == []
    assert check_ledger_row(line(reason="human_disagreed", pair_id="0" * 16)) == []


LISTS = "responses, finish_reasons and response_tokens"


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"margin": 1.0}, "columns missing or unknown: margin"),
        ({"status": "dropped"}, "a dropped row needs a known reason, not None"),
        ({"status": "dropped", "reason": "bad"}, "a dropped row needs a known reason, not 'bad'"),
        ({"reason": "verdict_tie"}, "a kept row has a pair_id and no reason"),
        ({"pair_id": None}, "a kept row has a pair_id and no reason"),
        ({"status": "lost"}, "unknown status 'lost'"),
        ({"status": None}, "unknown status None"),
        ({"finish_reasons": ["stop"]}, f"{LISTS} differ in length"),
        ({"response_tokens": []}, f"{LISTS} differ in length"),
        ({"responses": None}, f"{LISTS} are not all lists"),
        ({"responses": "ab"}, f"{LISTS} are not all lists"),
    ],
)
def test_wrong_lines_are_named(columns, named):
    assert check_ledger_row(line() | columns) == [named]


@pytest.mark.parametrize("column", LEDGER_SCHEMA.names)
def test_a_missing_column_of_the_ledger_is_named(column):
    row = line()
    del row[column]
    assert check_ledger_row(row) == [f"columns missing or unknown: {column}"]


def test_reason_counts():
    ledger = [
        line(),
        *(line(reason="verdict_tie") for _ in range(3)),
        line(reason="prompt_refused"),
        line(reason="request_failed"),
    ]
    counts = reason_counts(ledger)
    assert counts == {"prompt_refused": 1, "verdict_tie": 3, "request_failed": 1}
    assert list(counts) == ["prompt_refused", "verdict_tie", "request_failed"]  # in stage order
    assert reason_counts([]) == {}


# ---------------------------------------------------------------- the whole


def dataset(kept=4, dropped=("verdict_tie", "prompt_refused")):
    pairs = [pair(prompt=f"What is tide {number}?") for number in range(kept)]
    ledger = [line(index, of=one) for index, one in enumerate(pairs)]
    ledger += [line(kept + index, reason=reason) for index, reason in enumerate(dropped)]
    return pairs, ledger


def test_a_sound_dataset():
    assert check_dataset(*dataset()) == []
    assert check_dataset(*map(iter, dataset())) == []
    assert check_dataset(*map(reversed, dataset())) == []  # the order is nobody's business
    assert check_dataset([], []) == []


def drop_pair(pairs, ledger):
    del pairs[1]


def double_pair(pairs, ledger):
    pairs.append(copy.deepcopy(pairs[0]))


def drop_line(pairs, ledger):
    del ledger[0]


def foreign_pair(pairs, ledger):
    pairs[0] = pair(prompt="Something else?")


def double_index(pairs, ledger):
    ledger[1]["index"] = 0


def lose_reason(pairs, ledger):
    ledger[-1]["reason"] = None


def lose_status(pairs, ledger):
    del ledger[-1]["status"]


def lose_id(pairs, ledger):
    del pairs[2]["id"]


IDS = "the ids of the pairs are not those of the kept ledger rows"


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (drop_pair, [IDS, "6 asked for, but 3 kept and 2 dropped"]),
        (double_pair, [IDS, "6 asked for, but 5 kept and 2 dropped"]),
        (drop_line, [IDS, "5 asked for, but 4 kept and 2 dropped"]),
        (foreign_pair, [IDS]),
        (double_index, ["the ledger holds index 0 more than once"]),
        (
            lose_reason,
            [
                "ledger row 5: a dropped row needs a known reason, not None",
                "6 asked for, but 4 kept and 1 dropped",
            ],
        ),
        (
            lose_status,
            [
                "ledger row 5: columns missing or unknown: status",
                "6 asked for, but 4 kept and 1 dropped",
            ],
        ),
        (lose_id, ["pair row 2: columns missing or unknown: id", IDS]),
    ],
)
def test_every_harm_is_named(harm, named):
    pairs, ledger = dataset()
    harm(pairs, ledger)
    assert check_dataset(pairs, ledger) == named


@settings(fixed, max_examples=100)
@given(st.lists(st.sampled_from([None, *REASONS]), max_size=30), st.data())
def test_asked_for_is_kept_and_dropped(reasons, data):
    pairs, ledger = [], []
    for index, reason in enumerate(reasons):
        made = pair(prompt=f"What is tide {index}?")
        ledger.append(line(index, of=made, reason=reason))
        if reason is None:
            pairs.append(made)
    assert check_dataset(pairs, ledger) == []
    assert len(ledger) == len(pairs) + sum(reason_counts(ledger).values())
    if ledger:  # one lost line is noticed, whichever it is, unless nothing depends on it
        lost = ledger.pop(data.draw(st.integers(0, len(ledger) - 1)))
        assert bool(check_dataset(pairs, ledger)) == (lost["status"] == "kept")
