"""The numbers of a card, on rows small enough to count by hand."""

import random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub_cards.measures import measure
from selfsynth.schema import LEDGER_SCHEMA, PAIR_SCHEMA
from selfsynth.stats import wilson


def line(reason=None, prompt="What is a tide?", scores=(), verdicts=(), **more):
    """Return a row of a ledger, kept unless a reason is given."""
    empty = dict.fromkeys(LEDGER_SCHEMA.names)
    return empty | {
        "prompt": prompt,
        "scores": list(scores),
        "verdicts": list(verdicts),
        "status": "dropped" if reason else "kept",
        "reason": reason,
        **more,
    }


def pair(chosen="longer", rejected="short", prompt="Why?", tokens=(None, None), margin=None):
    """Return a row of pairs with the columns that measures look at."""
    turns = {"prompt": ("user", prompt), "chosen": ("assistant", chosen)}
    turns["rejected"] = ("assistant", rejected)
    return dict.fromkeys(PAIR_SCHEMA.names) | {
        **{name: [{"role": role, "content": text}] for name, (role, text) in turns.items()},
        "judge_margin": margin,
        "chosen_tokens": tokens[0],
        "rejected_tokens": tokens[1],
    }


def verdicts(*rows):
    """Return a ledger of rows judged by scores (numbers) or words."""
    return [
        line(
            scores=[None if isinstance(one, str) else one for one in row],
            verdicts=["1" if isinstance(one, float) else one for one in row],
        )
        for row in rows
    ]


# Each row: verdicts by order, as log-odds that the response shown first is better or as words.
PLACES = {
    "always the first": ([(2.0, 1.0), (0.5, 0.1)], (4, 4), (0, 2)),
    "always the second": ([(-2.0, -1.0)], (0, 2), (0, 1)),
    "the same response": ([(2.0, -1.0), (-1.0, 0.5)], (2, 4), (2, 2)),
    "one of each": ([(2.0, -1.0), (1.0, 1.0)], (3, 4), (1, 2)),
    "exactly even": ([(0.0, 1.0)], (1, 1), (0, 0)),
    "one order asked": ([(2.0,), (-1.0,), (3.0,)], (2, 3), (0, 0)),
    "words": ([("1", "2"), ("2.", "Response 1"), ("1", "1")], (4, 6), (2, 3)),
    "one unreadable": ([("Neither.", "2"), (None, None)], (0, 1), (0, 0)),
    "nothing judged": ([(), ()], (0, 0), (0, 0)),
}


def test_places_of_more_than_two_responses():
    # Three responses make three comparisons, each in both orders: two agree, one does not.
    found = measure([], verdicts((2.0, -1.0, 0.5, 0.1, -1.0, 3.0)), "pairwise")
    assert found["first_position_rate"] == wilson(4, 6)
    assert found["order_agreement"] == wilson(2, 3)
    one_order = measure([], verdicts((2.0, -1.0, 0.5)), "pairwise", orders=1)
    assert one_order["first_position_rate"] == wilson(2, 3)
    assert one_order["order_agreement"] is None
    unknown = measure([], verdicts((2.0, -1.0), (3.0,)), "pairwise", orders=None)
    assert unknown["first_position_rate"] == wilson(2, 3)
    assert unknown["order_agreement"] is None


def test_the_noise_floor_is_the_judges_own():
    pairs = [pair(margin=margin) for margin in (0.01, 0.05, 0.2, 0.9)]
    assert measure(pairs, [], "rating")["margins"]["noise_rate"] == wilson(1, 4)
    assert measure(pairs, [], "rating", noise=0.5)["margins"]["noise_rate"] == wilson(3, 4)


@pytest.mark.parametrize(("rows", "first", "agreement"), PLACES.values(), ids=PLACES)
def test_places(rows, first, agreement):
    found = measure([], verdicts(*rows), "pairwise")
    assert found["first_position_rate"] == wilson(*first)
    assert found["order_agreement"] == wilson(*agreement)


@pytest.mark.parametrize("mode", ["rating", "yesno"])
def test_pointwise_judgement_has_no_places(mode):
    found = measure([], verdicts((3.0, 4.0)), mode)
    assert found["first_position_rate"] is None and found["order_agreement"] is None


def test_prompts_are_counted_among_rows_that_have_one():
    ledger = [line("prompt_missing", prompt=None), line("prompt_empty", prompt=" \n")]
    ledger += [line("prompt_repeated"), line("prompt_near_duplicate"), line(), line()]
    found = measure([], ledger, "rating")
    assert found["repeated_prompt_rate"] == wilson(1, 4)
    assert found["near_duplicate_rate"] == wilson(1, 4)


def test_outcomes_of_judgement():
    ledger = [line(verdicts=["4", "5"]) for _ in range(3)]
    ledger += [line("verdict_tie", verdicts=["4", "4"])]
    ledger += [line("verdict_unreadable", verdicts=["?"]), line("verdict_missing", verdicts=[None])]
    ledger += [line("response_empty"), line("prompt_empty") | {"verdicts": None}]
    found = measure([], ledger, "rating")
    assert (found["asked"], found["kept"], found["judged"]) == (8, 3, 6)
    assert found["judged_kept"] == wilson(3, 6)
    assert found["tie_rate"] == wilson(1, 6)
    assert found["unreadable_rate"] == wilson(2, 6)
    assert list(found["dropped"]) == ["prompt_empty", "response_empty", "verdict_missing",
                                      "verdict_unreadable", "verdict_tie"]  # fmt: skip


def test_longer_wins_by_characters():
    # Bytes would say otherwise: each of these four letters has three of them.
    pairs = [pair("aaaaaa", "日本語字"), pair("ab", "cd"), pair("a", "bb"), pair("ccc", "d")]
    assert measure(pairs, [], "rating")["longer_wins_rate"] == wilson(2, 3)


def test_lengths():
    pairs = [
        pair("abcd", "ab", prompt="What?", tokens=(10, 4)),
        pair("abcdef", "abc", prompt="Why", tokens=(20, 8)),
        pair("ab", "abc", prompt="How", tokens=(None, 9)),
    ]
    lengths = measure(pairs, [], "rating")["lengths"]
    means = {
        unit: {name: one.value for name, one in found.items() if name != "missing" and one}
        for unit, found in lengths.items()
    }
    assert means == {
        "characters": {
            "prompt": pytest.approx(11 / 3),
            "chosen": 4,
            "rejected": pytest.approx(8 / 3),
            "gap": pytest.approx(4 / 3),
        },
        "tokens": {"chosen": 15, "rejected": 6, "gap": 9},
    }
    assert (lengths["characters"]["missing"], lengths["tokens"]["missing"]) == (0, 1)
    gap = lengths["tokens"]["gap"]
    assert (gap.low, gap.high, gap.n) == (6, 12, 2)


def test_margins():
    pairs = [pair(margin=margin) for margin in (0.01, 0.5, 1.0, 2.0, 4.0, None)]
    margins = measure(pairs, [], "rating")["margins"]
    assert margins.pop("noise_rate") == wilson(1, 5)
    assert margins == {
        "n": 5,
        "minimum": 0.01,
        "lower_quartile": 0.5,
        "median": 1.0,
        "upper_quartile": 2.0,
        "maximum": 4.0,
    }
    assert measure([pair()], [], "rating")["margins"] is None


texts = st.text(min_size=1, max_size=20)
any_pairs = st.lists(
    st.builds(
        lambda chosen, rejected, one, other, margin: pair(
            chosen, rejected, tokens=(one, other), margin=margin
        ),
        texts,
        texts,
        st.none() | st.integers(0, 99),
        st.none() | st.integers(0, 99),
        st.none() | st.floats(1e-6, 20),
    ),
    max_size=12,
)
any_ledger = st.lists(
    st.builds(
        lambda row, reason: verdicts(row)[0] | {"reason": reason, "status": "dropped"},
        st.lists(st.none() | st.floats(-9, 9) | st.sampled_from(["1", "2", "?"]), max_size=2),
        st.sampled_from(["prompt_repeated", "verdict_tie", "request_failed"]),
    ),
    max_size=12,
)


@given(any_pairs, any_ledger, st.randoms(use_true_random=False))
def test_published_rows_give_the_same_numbers(pairs, ledger, order: random.Random):
    """As parquet and in another order, as they come back from the Hub."""
    found = measure(pairs, ledger, "pairwise")
    again = [
        pa.Table.from_pylist(rows, schema).to_pylist()
        for rows, schema in ((pairs, PAIR_SCHEMA), (ledger, LEDGER_SCHEMA))
    ]
    for rows in again:
        order.shuffle(rows)
    assert measure(*again, "pairwise") == found
