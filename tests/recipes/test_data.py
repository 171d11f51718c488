"""Pairs are checked and counted; what is learned is what a server would have written."""

import re

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.data import REASONS, Template, check_pairs, fit_tokenizer, table_of
from selfsynth.errors import SelfsynthError, UsageError
from tests import tiny

USER = [{"role": "user", "content": "Why is the sky blue?"}]
GOOD = [{"role": "assistant", "content": "Air scatters blue light."}]
BAD = [{"role": "assistant", "content": "It is."}]


def answer(text):
    return [{"role": "assistant", "content": text}]


def rows_of(*rows):
    columns = ("prompt", "chosen", "rejected")
    return datasets.Dataset.from_list([dict(zip(columns, row, strict=True)) for row in rows])


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer_of()


# ---------------------------------------------------------------- what is learned


def test_the_token_ids_of_one_row(tokenizer):
    """Frozen: a second EOS, a BOS or a piece of the template must not slip in."""
    checked = check_pairs(rows_of((USER, GOOD, BAD)), tokenizer, 512)
    (row,) = checked.rows
    texts = {
        name: tokenizer.decode(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")
    }
    assert texts == {
        "prompt": "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
        "chosen": "Air scatters blue light.<|im_end|>",
        "rejected": "It is.<|im_end|>",
    }
    assert row["rejected_ids"] == [269, 264, 16, 2]
    assert row["chosen_ids"].count(2) == row["rejected_ids"].count(2) == 1
    assert row["prompt_ids"][:5] == [1, 87, 85, 71, 84] and 0 not in row["prompt_ids"]


TURNS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "special", "prompt", "chosen"),
    [
        # Llama 3: a BOS that the template writes, an end of turn that is EOS.
        (TURNS, {"bos_token": "<|endoftext|>", "pad_token": "<|im_start|>"},
         "<|endoftext|><|im_start|>user\nWhy", "blue light.<|im_end|>"),
        # Gemma 2: the end of a turn is a token of its own, and EOS never stands in a conversation.
        (TURNS, {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|im_start|>"},
         "<|im_start|>user\nWhy", "blue light.<|im_end|>"),
        # A template without any end: EOS is what stops the model.
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
         "{% if add_generation_prompt %}assistant: {% endif %}", {},
         "user: Why", "blue light.\n<|im_end|>"),
    ],
)  # fmt: skip
def test_other_chat_formats(template, special, prompt, chosen):
    tokenizer = tiny.tokenizer_of(template=template, **special)
    (row,) = check_pairs(rows_of((USER, GOOD, BAD)), tokenizer, 512).rows
    assert tokenizer.decode(row["prompt_ids"]).startswith(prompt)
    assert tokenizer.decode(row["chosen_ids"]).endswith(chosen)
    ids = row["prompt_ids"] + row["chosen_ids"]
    if tokenizer.bos_token_id is not None:
        assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}"
         "{% if add_generation_prompt %}>>{% endif %}",
         "differently once it is answered"),
        ("{{ raise_exception('only one turn') }}", "refuses a conversation: only one turn"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_used(template, words):
    with pytest.raises(SelfsynthError, match=words):
        Template(tiny.tokenizer_of(template=template))


def test_a_row_that_the_template_refuses_is_named():
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = tiny.tokenizer_of(template=refuses + tiny.TEMPLATE)
    rows = rows_of((USER, GOOD, BAD), ([{"role": "system", "content": "x"}, *USER], GOOD, BAD))
    with pytest.raises(SelfsynthError, match=r"row 1: the chat template refuses .*: no system"):
        check_pairs(rows, tokenizer, 300)


def test_a_tokenizer_without_eos():
    with pytest.raises(SelfsynthError, match="no EOS token"):
        Template(tiny.tokenizer_of(eos_token=None))


@pytest.mark.parametrize("pad", ["<|im_end|>", None])
def test_padding_is_never_eos(pad):
    tokenizer = tiny.tokenizer_of(pad_token=pad)
    said = fit_tokenizer(tokenizer)
    assert "now <|endoftext|>" in said and tokenizer.pad_token_id == 0
    assert fit_tokenizer(tokenizer) is None


# ---------------------------------------------------------------- what becomes of rows

LONG = answer("word " * 400)
CASES = {
    "kept": ((USER, GOOD, BAD), None),
    "with a system turn": (([{"role": "system", "content": "Be brief."}, *USER], GOOD, BAD), None),
    "several turns": (([*USER, *GOOD, *USER], GOOD, BAD), None),
    "no prompt": ((None, GOOD, BAD), "missing"),
    "no chosen": ((USER, None, BAD), "missing"),
    "no rejected": ((USER, GOOD, None), "missing"),
    "no messages": (([], GOOD, BAD), "malformed"),
    "begins with an answer": (([*GOOD, *USER], GOOD, BAD), "malformed"),
    "ends with an answer": (([*USER, *GOOD], GOOD, BAD), "malformed"),
    "a system turn alone": (([{"role": "system", "content": "x"}], GOOD, BAD), "malformed"),
    "an answer of a user": ((USER, USER, BAD), "malformed"),
    "two turns in an answer": ((USER, [*GOOD, *BAD], BAD), "malformed"),
    "no content": (([{"role": "user", "content": None}], GOOD, BAD), "malformed"),
    "no role": (([{"role": None, "content": "x"}], GOOD, BAD), "malformed"),
    "an empty prompt": (([{"role": "user", "content": " \n"}], GOOD, BAD), "empty"),
    "an empty answer": ((USER, GOOD, answer("")), "empty"),
    "a blank answer": ((USER, answer(" \n"), BAD), "empty"),
    "identical": ((USER, GOOD, GOOD), "identical"),
    "ends inside": ((USER, answer("a<|im_end|>\n<|im_start|>user\nb"), BAD), "stopped_inside"),
    "a long prompt": (([{"role": "user", "content": "word " * 400}], GOOD, BAD), "prompt_too_long"),
    "a long answer": ((USER, LONG, BAD), "too_long"),
}


@pytest.mark.parametrize(("row", "reason"), CASES.values(), ids=CASES)
def test_rows(tokenizer, row, reason):
    other = ([{"role": "user", "content": "Another?"}], GOOD, BAD)
    checked = check_pairs(rows_of(other, row), tokenizer, 300)
    assert checked.dropped == ({reason: 1} if reason else {})
    assert len(checked.rows) == 2 - bool(reason) and checked.counts["asked"] == 2
    assert reason is None or reason in REASONS
    lines = dict(table_of(checked, 300))
    assert lines["rows in"] == "2" and lines["rows out"] == str(2 - bool(reason))


def test_every_reason_has_a_case():
    tested = {reason for _, reason in CASES.values()} | {"duplicated", "identical_when_cut"}
    assert tested - {None} == set(REASONS)


def test_duplicates_in_either_order(tokenizer):
    checked = check_pairs(
        rows_of((USER, GOOD, BAD), (USER, BAD, GOOD), (USER, GOOD, BAD)), tokenizer, 300
    )
    assert checked.dropped == {"duplicated": 2} and checked.rows["row"] == [0]


def test_plain_texts_and_answers_that_repeat_their_prompt(tokenizer):
    plain = check_pairs(
        rows_of((USER[0]["content"], GOOD[0]["content"], BAD[0]["content"])), tokenizer, 300
    )
    repeated = check_pairs(rows_of((USER, [*USER, *GOOD], [*USER, *BAD])), tokenizer, 300)
    expected = check_pairs(rows_of((USER, GOOD, BAD)), tokenizer, 300)
    assert plain.rows.to_list() == repeated.rows.to_list() == expected.rows.to_list()


def test_long_answers_are_cut_and_counted(tokenizer):
    rows = rows_of((USER, LONG, BAD), (USER, answer("word " * 300), LONG), (USER, GOOD, BAD))
    checked = check_pairs(rows, tokenizer, 200, "truncate")
    assert checked.dropped == {"identical_when_cut": 1}
    assert checked.truncated == 1 and checked.over == 2
    row = checked.rows[0]
    assert len(row["prompt_ids"]) + len(row["chosen_ids"]) == 200
    assert 2 not in row["chosen_ids"] and row["rejected_ids"][-1] == 2  # a cut answer has no end
    with pytest.raises(SelfsynthError, match=re.escape("2 of 3 pairs are longer than max_length")):
        check_pairs(rows, tokenizer, 200, "raise")
    assert check_pairs(rows, tokenizer, None).dropped == {}


def test_nothing_left_is_an_error(tokenizer):
    with pytest.raises(SelfsynthError, match="no pair is left to train on, of 2: 2 identical"):
        check_pairs(rows_of((USER, GOOD, GOOD), (USER, BAD, BAD)), tokenizer, 300).require()


def test_several_processes_find_the_same(tokenizer, monkeypatch):
    texts = [f"{number} {'word ' * (number % 90)}" for number in range(200)]
    rows = [(USER, answer(text), BAD) for text in texts]
    alone = check_pairs(rows_of(*rows), tokenizer, 300)
    monkeypatch.setattr("recipes.data._MANY", 100)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    shared = check_pairs(rows_of(*rows), tokenizer, 300)
    assert shared.rows.to_list() == alone.rows.to_list()
    assert shared.counts == alone.counts and 0 < len(alone.rows) < 200


def test_other_code_does_not_take_what_this_one_left_in_the_cache(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = rows_of((USER, GOOD, BAD))
    rows.save_to_disk(tmp_path / "rows")
    read = [datasets.load_from_disk(tmp_path / "rows") for _ in range(3)]
    calls = tmp_path / "calls"
    calls.write_text("")
    monkeypatch.setattr(Template, "pair", _noting(Template.pair, calls))
    for rows in read[:2]:
        check_pairs(rows, tokenizer, 300)
    assert len(calls.read_text()) == 1  # the same code: checked once
    monkeypatch.setattr("recipes.data._CODE", "another version")
    check_pairs(read[2], tokenizer, 300)
    assert len(calls.read_text()) == 2


def _noting(function, calls):
    def noted(*args):
        with calls.open("a") as file:
            file.write(".")
        return function(*args)

    return noted


def test_missing_columns_are_named(tokenizer):
    rows = rows_of((USER, GOOD, BAD)).rename_column("rejected", "losing")
    with pytest.raises(UsageError, match="no column rejected"):
        check_pairs(rows, tokenizer, 300)


texts = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(texts, texts, texts), min_size=1, max_size=6))
def test_every_row_is_kept_or_dropped(rows):
    tokenizer = tiny.tokenizer_of()
    data = rows_of(*(([{"role": "user", "content": a}], answer(b), answer(c)) for a, b, c in rows))
    checked = check_pairs(data, tokenizer, 120)
    counts = checked.counts
    assert counts["asked"] == counts["kept"] + sum(counts["dropped"].values()) == len(rows)
    for row in checked.rows:
        _, chosen, rejected = rows[row["row"]]
        assert tokenizer.decode(row["chosen_ids"]) == chosen + "<|im_end|>"
        assert tokenizer.decode(row["rejected_ids"]) == rejected + "<|im_end|>"
    assert np.all(checked.lengths[:, 0] + checked.lengths[:, 1:].max(axis=1) <= 120)


def test_the_tiny_models_are_what_they_seem(tokenizer):
    assert (
        tiny.tokens("qwen2")[0][:3] == tiny.SPECIAL
        and tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
    )
