"""Texts that users bring along are taken as they are, or refused with the line that is wrong."""

import hashlib
import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources import load
from selfsynth.errors import SelfsynthError, UsageError


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
    found, origin = load(path, "persona", 0, 2)
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
        load(path, "persona", 0, 2)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_column_and_all_of_it(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"prompt": "Why?"}\n{"prompt": "How?"}\n')
    found, _ = load(path, "prompt", 0, None)
    assert sorted(found) == ["How?", "Why?"]
    with pytest.raises(UsageError, match='no key "persona"'):
        load(path, "persona", 0, None)
    with pytest.raises(UsageError, match="has 0 distinct prompts and 1 were asked for"):
        load(write(tmp_path, "e.txt", "\n"), "prompt", 0, None)


@pytest.mark.parametrize("name", ["folder", "folder.txt", "folder.jsonl"])
def test_a_folder_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        load(str(tmp_path / name), "persona", 0, 1)


@pytest.mark.parametrize(
    "name", ["missing.txt", "missing.jsonl", "no/such/MISSING.JSONL", "\0.txt", "x" * 300 + ".txt"]
)
def test_a_missing_file_is_not_looked_for_on_the_hub(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be read"):
        load(f"{tmp_path}/{name}", "persona", 0, 1)


def test_order_is_by_hash_of_seed_and_position(tmp_path):
    texts = [f"person {number}" for number in range(30)]
    path = write(tmp_path, "p.txt", "\n\n".join(texts) + "\nperson 3\n")
    digests = [hashlib.sha256(f"5:{number}:persona".encode()).hexdigest() for number in range(30)]
    assert load(path, "persona", 5, 30)[0] == [
        text for _, text in sorted(zip(digests, texts, strict=True))
    ]
    assert load(path, "persona", 6, 30)[0] != load(path, "persona", 5, 30)[0]


@given(count=st.integers(0, 40), seed=st.integers(0, 2**64))
@settings(max_examples=30, deadline=None)
def test_a_larger_count_only_adds(tmp_path_factory, count, seed):
    path = write(tmp_path_factory.mktemp("p"), "p.txt", "\n".join(f"p{n}" for n in range(40)))
    everyone, origin = load(path, "persona", seed, 40)
    assert sorted(everyone) == sorted(f"p{n}" for n in range(40))
    assert load(path, "persona", seed, count) == (everyone[:count], origin)


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
        found, _ = load(write(folder, name, content), "persona", 0, len(texts))
        assert sorted(found) == sorted(texts)


@pytest.mark.parametrize("text", WEIRD, ids=range(len(WEIRD)))
def test_weird_texts_survive(tmp_path, text):
    check_unchanged(tmp_path, [text])


@given(st.lists(TEXT, max_size=6, unique=True))
@settings(max_examples=60, deadline=None)
def test_any_text_survives(tmp_path_factory, texts):
    check_unchanged(tmp_path_factory.mktemp("p"), texts)


# Datasets of the Hub

ROWS = {"persona": ["a cook", "a nurse", "a sailor"]}


def add(hub, rows=ROWS, configs=("default",), card=""):
    """Put a dataset of one split on the Hub, and return its commit."""
    lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    named = [{"config_name": name, "data_files": f"{name}.jsonl"} for name in configs]
    front = f"---\n{yaml.safe_dump({'configs': named})}{card}---\n"
    files = {f"{name}.jsonl": text.encode() for name in configs}
    return hub.add("me/people", {"README.md": front.encode(), **files}, tags=["v2"])


def test_hub(hub):
    commit = add(hub, card="license: cc-by-4.0\n")
    hub.add("me/people", {"default.jsonl": b'{"persona": "a later one"}\n'})
    found, origin = load("me/people@v2", "persona", 0, 2)
    assert len(set(found)) == 2 and set(found) < set(ROWS["persona"])
    assert origin == {
        "source": "hub",
        "repo": "me/people",
        "revision": commit,
        "config": "default",
        "licence": "cc-by-4.0",
    }


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (["en"], "en"),
        (["instruction", "persona", "default"], "persona"),
        (["en", "default"], "default"),
    ],
)
def test_hub_configuration(hub, configs, expected):
    add(hub, configs=configs)
    assert load("me/people", "persona", 0, 1)[1]["config"] == expected


def test_hub_configuration_is_not_guessed(hub):
    add(hub, configs=["en", "de"])
    with pytest.raises(UsageError, match=r'none is called "persona": (en, de|de, en)'):
        load("me/people", "persona", 0, 1)


@pytest.mark.parametrize(
    ("card", "expected"),
    [("", None), ("license: mit\n", "mit"), ("license: [mit, cc0-1.0]\n", "mit, cc0-1.0")],
)
def test_hub_licence(hub, card, expected):
    add(hub, card=card)
    assert load("me/people", "persona", 0, 1)[1]["licence"] == expected


def test_hub_without_card(hub):
    hub.add("me/people", {"train.jsonl": b'{"persona": "a cook"}\n'})
    assert load("me/people", "persona", 0, 1)[1]["licence"] is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"text": ["a cook"], "id": [1]}, 'no column "persona" (it has text, id)'),
        ({"persona": ["a cook", None]}, 'row 1: "persona" is not a string'),
        ({"persona": [1, 2]}, 'row 0: "persona" is not a string'),
        ({"persona": ["a cook"]}, "has 1 distinct personas and 2 were asked for"),
    ],
)
def test_hub_bad_rows(hub, rows, message):
    add(hub, rows)
    with pytest.raises(UsageError) as caught:
        load("me/people", "persona", 0, 2)
    assert message in str(caught.value)


def test_hub_failure_is_one_line(hub):
    hub.add("me/people", {"test.jsonl": b'{"persona": "a cook"}\n'})
    for name, words in (("me/people", "train"), ("me/people@v9", "no such revision")):
        with pytest.raises(SelfsynthError, match=words) as caught:
            load(name, "persona", 0, 1)
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, UsageError)
