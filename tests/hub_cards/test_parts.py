"""A card's parts: what is ours is replaced, what a person wrote stays."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hub_cards.parts import BEGIN, END, generated, join_card, merge, part, put, split_card
from selfsynth.errors import SelfsynthError


def card(text="ours", **metadata):
    return join_card(metadata, f"{BEGIN}\n{text}\n{END}\n")


def metadata(text):
    return split_card(text)[0]


@pytest.mark.parametrize(
    ("new", "now", "before", "expected"),
    [
        ({"a": 2}, {"a": 1}, {"a": 1}, {"a": 2}),  # nobody touched it
        ({"a": 2}, {"a": 9}, {"a": 1}, {"a": 9}),  # a person changed it
        ({"a": 2}, {}, {"a": 1}, {}),  # a person removed it
        ({}, {"a": 1}, {"a": 1}, {}),  # we do not say it any more
        ({}, {"license": "mit"}, {}, {"license": "mit"}),  # a person added it
        ({"size_categories": ["x"]}, {"size_categories": ["y"]}, {}, {"size_categories": ["x"]}),
        (
            {"tags": ["a", "c"]},
            {"tags": ["a", "z"]},
            {"tags": ["a", "b"]},
            {"tags": ["a", "c", "z"]},
        ),
        ({"tags": ["a", "b"]}, {"tags": ["b"]}, {"tags": ["a", "b"]}, {"tags": ["b"]}),
        ({"tags": ["a"]}, {"tags": "z"}, {}, {"tags": ["a", "z"]}),
        (
            {"configs": [{"config_name": "default", "n": 2}]},
            {"configs": [{"config_name": "default", "n": 1}, {"config_name": "mine"}]},
            {"configs": [{"config_name": "default", "n": 1}]},
            {"configs": [{"config_name": "default", "n": 2}, {"config_name": "mine"}]},
        ),
    ],
)
def test_metadata(new, now, before, expected):
    assert metadata(merge(card(**new), card(**now), card(**before))) == expected


def test_without_a_card_before():
    assert merge(card(a=1), None, None) == card(a=1)
    assert metadata(merge(card(a=1), card(a=5, b=6), None)) == {"a": 5, "b": 6}


# Lines that are neither a marker nor a front matter's end.
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40).filter(
    lambda text: "selfsynth:" not in text and not text.startswith(("---", "\ufeff"))
)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_all_around_the_markers_stays(above, below, old, new):
    theirs = join_card({"a": 1}, f"x{above}\n{BEGIN}{old}{END}\n{below}")
    found = merge(card(new, a=1), theirs, theirs)
    assert found == join_card({"a": 1}, f"x{above}\n{BEGIN}\n{new}\n{END}\n{below}")
    assert merge(card(new, a=1), found, theirs) == found  # and again: nothing moves


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=30) | st.none(), max_size=4))
def test_metadata_comes_back_whatever_it_is(values):
    assert split_card(join_card(values, "text\n---\nmore")) == (values, "\ntext\n---\nmore")


@pytest.mark.parametrize("text", ["", "# Hello", "text\n---\na: 1\n---\n"])
def test_a_text_without_metadata(text):
    assert split_card(text) == ({}, text)


def test_windows_line_ends_and_a_byte_order_mark():
    assert split_card("\ufeff---\r\na: 1\r\n---\r\nHello\r\n") == ({"a": 1}, "Hello\n")


def test_their_metadata_is_broken():
    with pytest.raises(SelfsynthError, match="mend it on the Hub"):
        merge(card(), "---\na: [\n---\n", None)


def test_named_parts():
    text = "a\n<!-- selfsynth:x -->\nold\n<!-- selfsynth:/x -->\nb"
    assert part(text, "x") == "old" and part(text, "y") is None
    assert part(put(text, "x", r"\1 new"), "x") == r"\1 new"
    assert put(text, "y", "new") == text
    assert generated(text) is None and generated(card("z")) == "\nz\n"


def test_long_values_stay_on_their_line():
    value = "word " * 100
    assert f"a: {value.strip()}" in join_card({"a": value.strip()}, "").splitlines()
    assert yaml.safe_load(join_card({"a": value}, "").split("---")[1]) == {"a": value}
