"""Personas: the built-in sampler is stable and reads well."""

import re

import pytest

from pipelines import personas
from pipelines.personas import builtin, distinct, persona

FIRST_TEN = [
    "A business student in Budapest with half of the degree done who enjoys watching travel "
    "programmes. Has inherited a box of old letters in an unfamiliar language; writes in "
    "plain words and wants to know the reasons.",
    "A bricklayer in a highland town in Guatemala with about six years of experience who has "
    "long loved playing the cello and is recovering from a long bout of flu. Asks hesitantly "
    "and then follows up sharply.",
    "An agriculture student in Melbourne with a first degree in another field who has long "
    "loved practising calligraphy. Has to resit a failed exam in the autumn; writes in plain "
    "words and wants to know the reasons.",
    "A district nurse in a small town in the Peruvian Andes with half a year in the job who "
    "enjoys making dumplings and is sorting the papers of a relative who has died. Writes as "
    "if talking to an old friend.",
    "A dietitian in Kampala with a former career in another field who enjoys playing chess "
    "online and is working through a thick manual in the evenings. Gives a lot of background "
    "before the question.",
    "A seventeen-year-old in the last year of school in Seattle with little patience for "
    "homework who enjoys dancing salsa and has a history project due on Friday. Writes in a "
    "second language and prefers simple sentences.",
    "A housing officer in Istanbul with about six years of experience who has long loved "
    "making leather belts and is back at work after a long illness. Gives a lot of background"
    " before the question.",
    "A graphic designer in Cairo with three months of self-employment behind them who has "
    "long loved playing the cello and wants to cut down on paperwork. Writes bluntly and "
    "dislikes small talk.",
    "An urban planner in Lyon with more than twenty years of experience who has long loved "
    "collecting postage stamps. Wants to explain the job better to puzzled relatives; asks "
    "three questions at once.",
    "A veterinary nurse in Ulaanbaatar with long experience in two countries who has long "
    "loved playing five-a-side football and has just turned down a promotion. Wants to "
    "understand a thing fully before acting.",
]


@pytest.fixture(scope="module")
def sample():
    return builtin(1, 20_000)


# The built-in sampler


def test_first_ten():
    """Frozen: whoever changes a list changes everybody's runs, and has to change this too."""
    assert builtin(0, 10) == FIRST_TEN


def test_a_persona_does_not_depend_on_count():
    assert builtin(3, 50) == builtin(3, 200)[:50]
    assert persona(3, 49) == builtin(3, 50)[49]
    assert builtin(3, 0) == []


def test_seeds_differ():
    assert len({tuple(builtin(seed, 5)) for seed in range(200)}) == 200


def test_hardly_any_repeats(sample):
    assert len(set(sample)) >= 0.999 * len(sample)


def test_enough_to_choose_from():
    groups = [group[1:] for group in personas.GROUPS]
    occupations, places, levels, situations = (
        {option for group in groups for option in group[column]} for column in range(4)
    )
    assert len(occupations) >= 120
    assert len(places) >= 80
    assert len(personas.INTERESTS) >= 100
    assert len(situations) >= 60
    assert len(personas.TONES) >= 20
    assert len(levels) >= 20
    assert distinct() > 10**9


def test_distinct_counts_each_persona_once():
    """No option is listed twice, and groups that share occupations share no experience level."""
    assert sum(group[0] for group in personas.GROUPS) == 100
    heads = set()
    expected = 0
    for _, occupations, places, levels, situations in personas.GROUPS:
        assert len(set(situations)) == len(situations)
        heads |= {f"{o} {p} {e}" for o in occupations for p in places for e in levels}
        expected += len(occupations) * len(places) * len(levels)
    assert len(heads) == expected
    for options in (personas.INTERESTS, personas.TONES, personas.HOBBY_VERBS):
        assert len(set(options)) == len(options)


def test_every_option_is_drawn(sample):
    text = "\n".join(sample).lower()
    for _, *columns in personas.GROUPS:
        for options in (*columns, personas.INTERESTS, personas.TONES, personas.HOBBY_VERBS):
            assert [option for option in options if option.lower() not in text] == []


# Name of the fault, what finds it, a sentence that has it.
FAULTS = [
    ("double space", r"  | [.,;]", "A cook  in Porto ."),
    ("a for an", r"\b[Aa] (?!one\b|uni|use|euro)[aeiouAEIOU]", "A optician in Porto."),
    ("an for a", r"\b[Aa]n (?!hour|honest|heir)[^aeiouAEIOU\s]", "An cook in Porto."),
    ("word twice", r"\b(\w+) \1\b", "A cook in in Porto."),
    ("two articles", r"\b(?:[Aa]n?|[Tt]he) (?:an?|the)\b", "A the cook."),
    ("left over", r"[{}\[\]<>_\n\t]|\b(?:None|True|False)\b", "A cook {place}."),
    ("gendered pronoun", r"\b(?:he|she|him|her|his|hers)\b", "A cook has lost her keys."),
    ("two stops", r"[.,;][.,;]", "A cook in Porto.."),
]


@pytest.mark.parametrize(
    ("pattern", "bad"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_grammar(sample, pattern, bad):
    assert re.search(pattern, bad)
    assert [text for text in sample if re.search(pattern, text)] == []


def test_form(sample):
    """Two sentences, each with a capital first and a full stop last."""
    form = re.compile(
        r"An? [^.;]+ who (?:enjoys|has recently got into|has long loved) \w+ing\b[^.;]*"
        r"\. [A-Z][^.;]+(?:; [a-z][^.;]+)?\."
    )
    assert [text for text in sample if not form.fullmatch(text)] == []


def test_lists_are_in_the_form_that_joins():
    for _, occupations, places, levels, situations in personas.GROUPS:
        assert all(re.match(r"An? \S", option) for option in occupations)
        assert all(re.match(r"(?:in|on) \S", option) for option in places)
        assert all(option.startswith("with ") for option in levels)
        assert all(re.match(r"(?:is|has|wants|feels|would) ", option) for option in situations)
        # "who enjoys X and has Y and Z" would leave Z hanging.
        assert not any(" and " in option for option in (*situations, *personas.INTERESTS))
