"""Personas: the built-in sampler is stable and reads well; a user's own list is taken as it is."""

import hashlib
import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import personas
from pipelines.personas import builtin, choose, distinct, load, persona
from selfsynth.errors import SelfsynthError, UsageError

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
COMMIT = "0123456789abcdef0123456789abcdef01234567"


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


# Files


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def rows(*texts):
    return "".join(json.dumps({"persona": text}) + "\n" for text in texts)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.txt", "a cook\na nurse\n", {"a cook", "a nurse"}),
        ("p.txt", "a cook\r\n\r\n  a nurse \t\r\n \n", {"a cook", "a nurse"}),
        ("p.txt", "a cook\na nurse", {"a cook", "a nurse"}),
        ("p.txt", "\ufeffa cook\na nurse\n", {"a cook", "a nurse"}),
        ("P.TXT", "a cook\na nurse\n", {"a cook", "a nurse"}),
        ("p.txt", "a cook\na nurse\na cook\n a cook \n", {"a cook", "a nurse"}),
        ("p.txt", "a\u2028cook\na\x0cnurse\n", {"a\u2028cook", "a\x0cnurse"}),
        (
            "p.txt",
            '{"persona": "a cook"}\n</judge> {x} %s\n',
            {'{"persona": "a cook"}', "</judge> {x} %s"},
        ),
        ("p.jsonl", rows("a cook", "a nurse"), {"a cook", "a nurse"}),
        ("p.jsonl", "\ufeff" + rows("a cook") + "\r\n\n" + rows("a nurse"), {"a cook", "a nurse"}),
        ("p.jsonl", rows(" a cook\n", "a cook", "a nurse"), {"a cook", "a nurse"}),
        ("p.jsonl", rows("two\nlines", "a nurse"), {"two\nlines", "a nurse"}),
        ("p.jsonl", '{"id": 1, "persona": "a cook"}\n{"persona": "b", "x": null}', {"a cook", "b"}),
    ],
)
def test_files(tmp_path, name, content, expected):
    path = write(tmp_path, name, content)
    found, origin = load(path, 0, 2)
    assert len(found) == 2
    assert set(found) == expected
    sha256 = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert origin == {"source": "file", "name": name, "sha256": sha256}


GOOD = rows("a cook")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "a cook\n", "p.txt has 1 distinct personas and 2 were asked for"),
        ("p.txt", "a cook\na cook\n", "has 1 distinct personas and 2 were asked for"),
        ("p.txt", "", "has 0 distinct personas"),
        ("p.txt", b"a cook\na \xff nurse\n", "p.txt, line 2: not UTF-8"),
        ("p.txt", "a cook\na nurse\n".encode("utf-16"), "p.txt, line 1: not UTF-8"),
        ("p.jsonl", b"\xff\n", "p.jsonl, line 1: not UTF-8"),
        ("p.jsonl", "", "has 0 distinct personas"),
        ("p.jsonl", GOOD + "{oops\n", "p.jsonl, line 2: not valid JSON"),
        ("p.jsonl", GOOD + "\n\na nurse\n", "p.jsonl, line 4: not valid JSON"),
        ("p.jsonl", "[" * 100_000, "p.jsonl, line 1: not valid JSON"),
        ("p.jsonl", GOOD + '"a nurse"\n', 'line 2: not an object with a key "persona"'),
        ("p.jsonl", "[]\n", 'line 1: not an object with a key "persona"'),
        ("p.jsonl", GOOD + '{"Persona": "a nurse"}\n', 'line 2: no key "persona"'),
        ("p.jsonl", GOOD + '{"persona": null}\n', 'line 2: "persona" is not a string'),
        ("p.jsonl", GOOD + '{"persona": 7}\n', 'line 2: "persona" is not a string'),
        ("p.jsonl", GOOD + '{"persona": ["a nurse"]}\n', 'line 2: "persona" is not a string'),
        ("p.jsonl", GOOD + '{"persona": " "}\n', 'line 2: "persona" is empty'),
        ("p.jsonl", GOOD + r'{"persona": "\ud800"}', 'line 2: "persona" is not valid Unicode'),
        ("p.csv", "persona\na cook\n", "p.csv: a file of personas is FILE.txt or FILE.jsonl"),
        ("p", "a cook\n", "p: a file of personas is FILE.txt or FILE.jsonl"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    with pytest.raises(UsageError) as caught:
        load(path, 0, 2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["folder", "folder.txt", "folder.jsonl"])
def test_a_folder_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        load(str(tmp_path / name), 0, 1)


@pytest.mark.parametrize(
    "name", ["missing.txt", "missing.jsonl", "no/such/MISSING.JSONL", "\0.txt", "x" * 300 + ".txt"]
)
def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be read"):
        load(f"{tmp_path}/{name}", 0, 1)


def test_order_is_by_hash_of_seed_and_position(tmp_path):
    texts = [f"person {number}" for number in range(30)]
    path = write(tmp_path, "p.txt", "\n\n".join(texts) + "\nperson 3\n")
    digests = [hashlib.sha256(f"5:{number}:persona".encode()).hexdigest() for number in range(30)]
    assert load(path, 5, 30)[0] == [text for _, text in sorted(zip(digests, texts, strict=True))]
    assert load(path, 6, 30)[0] != load(path, 5, 30)[0]


@given(count=st.integers(0, 40), seed=st.integers(0, 2**64))
@settings(max_examples=30, deadline=None)
def test_a_larger_count_only_adds(tmp_path_factory, count, seed):
    path = write(tmp_path_factory.mktemp("p"), "p.txt", "\n".join(f"p{n}" for n in range(40)))
    everyone, origin = load(path, seed, 40)
    assert sorted(everyone) == sorted(f"p{n}" for n in range(40))
    assert load(path, seed, count) == (everyone[:count], origin)


WEIRD = [
    "{persona} {{ x }} {% raw %} {0} %s $HOME",
    "\"quoted\" 'and' `so` \\n \\",
    "👩🏽‍🚒 é e\u0301 \u200b",
    "\u202eعالِمة آثار تكتب من اليمين\u202c",
    "</response_a> [[B]] <|im_start|>system [/INST]",
    "x" * 50_000,
    "null",
    "\ufeffstarts with a mark",
    "a\x00b\x85c\u2029d",
]
TEXT = st.text(min_size=1, max_size=60).map(str.strip).filter(bool)


def check_unchanged(folder, texts):
    """Write `texts` (distinct, stripped) in every form that can hold them; read them back."""
    files = [
        ("a.jsonl", rows(*texts)),
        ("b.jsonl", "\n".join(json.dumps({"persona": t}, ensure_ascii=False) for t in texts)),
    ]
    if not any("\n" in text for text in texts):
        files.append(("c.txt", "\ufeff" + "\n".join(texts)))
    for name, content in files:
        found, _ = load(write(folder, name, content), 0, len(texts))
        assert sorted(found) == sorted(texts)


@pytest.mark.parametrize("text", WEIRD, ids=range(len(WEIRD)))
def test_weird_texts_survive(tmp_path, text):
    check_unchanged(tmp_path, [text])


@given(st.lists(TEXT, max_size=6, unique=True))
@settings(max_examples=60, deadline=None)
def test_any_text_survives(tmp_path_factory, texts):
    check_unchanged(tmp_path_factory.mktemp("p"), texts)


def test_choose(tmp_path):
    assert choose(None, 4, 3) == (builtin(4, 3), {"source": "builtin"})
    path = write(tmp_path, "p.txt", "a cook\na nurse\n")
    assert choose(path, 4, 2) == load(path, 4, 2)


# The Hub, with its three calls replaced: what is asked of them, and what is made of the answers


@pytest.fixture
def hub(monkeypatch):
    """A Hub with one dataset; tests change its fields. `asked` holds what was asked for."""
    import datasets

    hub = SimpleNamespace(
        rows={"persona": ["a cook", " a nurse ", "a cook"], "id": [1, 2, 3]},
        configs=["default"],
        info=SimpleNamespace(card_data=SimpleNamespace(license="cc-by-4.0")),
        failure=None,
        asked=[],
    )

    def dataset_info(repo, revision):
        assert (repo, revision) == ("someone/people", COMMIT)
        return hub.info

    def load_dataset(repo, config, *, revision, split, streaming):
        hub.asked.append((repo, config, revision, split, streaming))
        if hub.failure:
            raise hub.failure
        return datasets.Dataset.from_dict(hub.rows)

    def resolve(repo, revision, repo_type):
        hub.asked.append((repo, revision, repo_type))
        return COMMIT

    monkeypatch.setattr(personas, "resolve", resolve)
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: SimpleNamespace(dataset_info=dataset_info))
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda repo, revision: hub.configs)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return hub


def test_hub(hub):
    found, origin = load("someone/people@v2", 0, 2)
    assert sorted(found) == ["a cook", "a nurse"]
    assert origin == {
        "source": "hub",
        "repo": "someone/people",
        "revision": COMMIT,
        "config": "default",
        "licence": "cc-by-4.0",
    }
    assert hub.asked == [
        ("someone/people", "v2", "dataset"),
        ("someone/people", "default", COMMIT, "train", False),
    ]


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (["en"], "en"),
        (["instruction", "persona", "default"], "persona"),
        (["en", "default"], "default"),
    ],
)
def test_hub_configuration(hub, configs, expected):
    hub.configs = configs
    assert load("someone/people", 0, 1)[1]["config"] == expected


def test_hub_configuration_is_not_guessed(hub):
    hub.configs = ["en", "de"]
    with pytest.raises(UsageError, match='none is called "persona": en, de'):
        load("someone/people", 0, 1)


@pytest.mark.parametrize(
    ("licence", "expected"), [(None, None), ("mit", "mit"), (["mit", "cc0-1.0"], "mit, cc0-1.0")]
)
def test_hub_licence(hub, licence, expected):
    hub.info.card_data.license = licence
    assert load("someone/people", 0, 1)[1]["licence"] == expected


def test_hub_without_card(hub):
    hub.info.card_data = None
    assert load("someone/people", 0, 1)[1]["licence"] is None


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"text": ["a cook"], "id": [1]}, 'no column "persona" (it has text, id)'),
        ({"persona": ["a cook", None]}, 'row 1: "persona" is not a string'),
        ({"persona": [1, 2]}, 'row 0: "persona" is not a string'),
        ({"persona": ["a cook"]}, "has 1 distinct personas and 2 were asked for"),
    ],
)
def test_hub_bad_rows(hub, column, message):
    hub.rows = column
    with pytest.raises(UsageError) as caught:
        load("someone/people", 0, 2)
    assert message in str(caught.value)


def test_hub_failure_is_one_line(hub):
    hub.failure = ValueError('Unknown split "train".\nShould be one of ["test"].')
    with pytest.raises(
        SelfsynthError, match="someone/people@v2: the dataset cannot be loaded"
    ) as e:
        load("someone/people@v2", 0, 1)
    assert "\n" not in str(e.value)
    assert not isinstance(e.value, UsageError)
