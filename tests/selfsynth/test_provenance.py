"""Provenance is published: what it says, and what it must never say."""

import json
import os
import re
import shlex
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import selfsynth
from selfsynth.provenance import build, commit, cut, differences, libraries

fixed = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """A folder with a script, a model and a list of personas."""
    for name in ("pipelines/sao.py", "models/base.gguf", "people/mine.txt", "my/model/config.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # paths
        (["python", "/home/me/selfsynth/pipelines/sao.py"], "python sao.py"),
        (["python", "pipelines/sao.py", "--seed", "3"], "python sao.py --seed 3"),
        (["./pipelines/sao.py"], "sao.py"),
        (["../elsewhere/sao.py"], "sao.py"),
        (["--personas", "~/people/mine.txt"], "--personas mine.txt"),
        (["--personas", "~me/mine.txt"], "--personas mine.txt"),
        (["--personas", "people/mine.txt"], "--personas mine.txt"),
        (["--personas=people/mine.txt"], "--personas=mine.txt"),
        (["--personas", "gone/people.jsonl"], "--personas people.jsonl"),
        (["--model", "my/model"], "--model model"),  # a folder here, whatever the Hub has
        (["--model", "my/model/"], "--model model"),
        (["--model", "/data/a folder/m"], "--model m"),
        (["--model", "/data/models/q w.gguf"], "--model 'q w.gguf'"),
        (["--model=/data/m.gguf"], "--model=m.gguf"),
        (["--output-dir", "runs/mine"], "--output-dir mine"),  # looks like a Hub id, is none
        (["--output-dir=runs/mine"], "--output-dir=mine"),
        (["--output-dir", "runs/sao/x-8-s0/"], "--output-dir x-8-s0"),
        (["--reuse", "runs/one", "--reuse", "runs/two"], "--reuse one --reuse two"),
        (["--config", "recipes/mine"], "--config mine"),
        (["--decontaminate", "/evals/mine.txt"], "--decontaminate mine.txt"),
        (["--decontaminate", "gone/mine.JSONL"], "--decontaminate mine.JSONL"),
        (["--decontaminate=gone/mine"], "--decontaminate=mine"),
        (["--decontaminate", "alpaca_eval"], "--decontaminate alpaca_eval"),
        (["--personas", ".hidden/people"], "--personas people"),
        (["--criteria", "it says /etc/passwd/shadow, or so"], "--criteria 'shadow, or so'"),
        # adapters
        (["--model", "models/base.gguf+/home/me/lora.gguf"], "--model base.gguf+lora.gguf"),
        (["--model", "gone/base.gguf+gone/lora.gguf"], "--model base.gguf+lora.gguf"),
        (["--model", "embedded+runs/me/lora.gguf"], "--model embedded+lora.gguf"),
        (["--judge=embedded-1.5b+/home/me/lora.gguf"], "--judge=embedded-1.5b+lora.gguf"),
        (["--model=./base.gguf+../lora.gguf"], "--model=base.gguf+lora.gguf"),
        (["--model", "me/repo:q8.gguf+./lora.gguf"], "--model me/repo:q8.gguf+lora.gguf"),
        (["--model", "/home/a+b/c.gguf"], "--model c.gguf"),
        # URLs
        (["--base-url", "https://host.example/v1"], "--base-url '<url>'"),
        (["--base-url=https://host.example/v1"], "'--base-url=<url>'"),
        (["--system-prompt", "yes and/or no"], "--system-prompt 'yes and/or no'"),
        (["--judge-base-url", "http://me:secret@10.0.0.1:8000/v1"], "--judge-base-url '<url>'"),
        (["--judge-base-url=http://me:secret@10.0.0.1/v1"], "'--judge-base-url=<url>'"),
        (
            ["--base-url", "me:secret@host:8000"],
            "--base-url '<url>'",
        ),  # no scheme: our flag's anyway
        (["--base-url", "HTTP://HOST/v1?key=a,b"], "--base-url '<url>'"),
        (["--x", "https://a/v1,https://b/v1"], "--x '<url>'"),
        (["file:///home/me/x.txt"], "'<url>'"),
        (["--criteria", "see https://host/secret for it"], "--criteria 'see <url> for it'"),
        # public names and plain words stay
        (["--model", "Qwen/Qwen2.5-7B-Instruct"], "--model Qwen/Qwen2.5-7B-Instruct"),
        (["--model", "Qwen/Qwen2.5@v1.0"], "--model Qwen/Qwen2.5@v1.0"),
        (["--dataset=me/pairs@refs/pr/1"], "--dataset=me/pairs@refs/pr/1"),
        (["--model", "me/repo:sub/q8_0.gguf"], "--model me/repo:sub/q8_0.gguf"),
        (["--model", "me/repo@v1:q8_0.gguf"], "--model me/repo@v1:q8_0.gguf"),
        (["--model", "embedded-1.5b"], "--model embedded-1.5b"),
        (["--model", "gpt-4+x"], "--model gpt-4+x"),
        (["--api-key-env", "MY_KEY"], "--api-key-env MY_KEY"),
        (["--temperature=0.6", "--keep-truncated"], "--temperature=0.6 --keep-truncated"),
        (["--language", "it's"], "--language 'it'\"'\"'s'"),
        ([], ""),
        (["--x", ""], "--x ''"),
    ],
)
def test_cut(words, expected):
    assert cut(words) == expected


names = st.text("abcXYZ019._-~+=@: é", min_size=1, max_size=8)
absolute = st.lists(names, min_size=2, max_size=4).map(lambda parts: "/" + "/".join(parts))
options = st.sampled_from(["", "--model=", "--personas=", "--base-url=", "--x="])
words = st.builds(
    "".join,
    st.tuples(
        options,
        st.sampled_from(["", "", "", "a", "x,", "~", "..", ".", "see ", "+", "b.gguf+", "https:/"]),
        absolute,
        st.sampled_from(["", "", "/", "+/c/d.gguf", ",/e/f", "://g/h", "\n/i/j"]),
    ),
)


@settings(fixed, max_examples=1000)
@given(words=st.lists(words, min_size=1, max_size=3))
def test_no_folder_and_no_url_survives(words):
    found = shlex.split(cut(words))
    assert len(found) == len(words)
    for word, made in zip(words, found, strict=True):
        assert "://" not in made
        assert not re.search(r"(^|[^\w.@:-])/", made), (word, made)
        # The only slashes left are those of what the Hub could hold.
        value = re.sub(r"^--[\w-]+=", "", made)
        for part in re.split(r"(?<=\.gguf)\+", value):
            assert "/" not in part or re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.:@/-]+", part)


@settings(fixed, max_examples=300)
@given(
    host=st.text("abcdefgh.-0123", min_size=3, max_size=12).map(lambda text: "host" + text),
    password=st.text("qrstuv0123!$&;,+~%", min_size=3, max_size=8).map(lambda text: "pw" + text),
    where=st.sampled_from(["{}", "--base-url={}", "--x={}", "a,{}", "{},{}", "see {} now", "({})"]),
)
def test_no_host_and_no_password_survives(host, password, where):
    made = cut(["python", where.replace("{}", f"https://me:{password}@{host}/v1/{password}?k=1")])
    assert host not in made
    assert password not in made
    assert "<url>" in made


# ---------------------------------------------------------------- identities


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({}, {}, []),
        ({"a": 1, "b": {"c": [1]}}, {"b": {"c": [1]}, "a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a: 1 there, 2 here"]),
        ({"a": 1}, {"a": "1"}, ["a: 1 there, '1' here"]),
        ({"a": 1}, {}, ["a: 1 there, 'none' here"]),
        ({}, {"a": 1}, ["a: 'none' there, 1 here"]),
        ({"a": 1, "b": 2}, {"c": 3, "b": 5}, None),
        ({"b": {"c": 1}}, {"b": {"c": 2}}, ["b.c: 1 there, 2 here"]),
    ],
)
def test_differences(old, new, expected):
    if expected is None:
        expected = [
            "a: 1 there, 'none' here",
            "b: 2 there, 5 here",
            "c: 'none' there, 3 here",
        ]
    assert differences(old, new) == expected


@settings(fixed, max_examples=100)
@given(*[st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2))] * 2)
def test_every_difference_is_named_once(old, new):
    keys = [text.partition(":")[0] for text in differences(old, new)]
    assert sorted(keys) == sorted(
        key for key in {*old, *new} if (key in old, old.get(key)) != (key in new, new.get(key))
    )


# ---------------------------------------------------------------- the whole


def made(**changes):
    parts = {
        "identity": {"method": "sao", "seed": 0},
        "seeds": {"seed": 0},
        "engines": {"model": "llama.cpp 1"},
        "counts": {"asked": 3, "kept": 1, "dropped": {"verdict_tie": 2}},
        "tokens": {"judge": {"prompt_tokens": 5, "completion_tokens": 1}},
        "seconds": 12.3456,
        "command": [str(Path(selfsynth.__file__).parents[1] / "pipelines/sao.py"), "--seed", "3"],
    }
    return build(**parts | changes)


def test_keys_are_those_of_the_design():
    found = made(parents=[{"repo": "me/pairs", "commit": "ab" * 20}])
    assert list(found) == [
        *("selfsynth", "identity", "seeds", "engines", "libraries", "parents"),
        *("judging", "facts", "counts", "tokens", "wall_seconds", "command"),
    ]
    assert found["selfsynth"]["version"] == selfsynth.__version__
    assert set(found["selfsynth"]) == {"version", "commit"}
    assert found["parents"] == [{"repo": "me/pairs", "commit": "ab" * 20}]
    assert found["counts"] == {"asked": 3, "kept": 1, "dropped": {"verdict_tie": 2}}
    assert found["wall_seconds"] == 12.3
    assert found["command"] == "python pipelines/sao.py --seed 3"
    assert found["identity"] == {"method": "sao", "seed": 0}
    assert made()["parents"] == []
    assert json.loads(json.dumps(found)) == found


def test_no_environment_and_no_place(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    home = Path.home()
    found = json.dumps(
        made(
            command=[
                *("python", str(tmp_path / "pipelines/sao.py"), "--api-key-env", "MY_KEY"),
                *("--base-url", f"http://me:secret@{socket.gethostname()}.local:8000/v1"),
                *("--output-dir", str(home / "runs/mine"), "--personas=~/people/mine.txt"),
                *("--config", f"{os.getcwd()}/mine.yaml", "--model", f"{home}/m.gguf"),
            ]
        )
    )
    for secret in ("secret", str(tmp_path), os.getcwd(), str(home / "runs"), f"{home}/"):
        assert secret not in found
    if len(socket.gethostname()) > 3:
        assert socket.gethostname() not in found
    for word in ("mine.yaml", "m.gguf", "mine.txt", "MY_KEY", "sao.py", "<url>"):
        assert word in found


def test_libraries_are_those_installed():
    found = libraries()
    assert {"datasets", "huggingface_hub", "distilabel"} <= set(found)
    assert all(re.match(r"\d+\.\d+", version) for version in found.values())


def test_libraries_that_are_not_installed_are_left_out(monkeypatch):
    monkeypatch.setattr("selfsynth.provenance.LIBRARIES", ("numpy", "no-such-library"))
    assert list(libraries()) == ["numpy"]


# ---------------------------------------------------------------- the commit

HEAD = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("git", "expected"),
    [
        (f'case "$*" in *rev-parse*) echo {HEAD};; esac', HEAD),
        (f'case "$*" in *rev-parse*) echo {HEAD};; *) echo " M a.py";; esac', f"{HEAD}-dirty"),
        ("exit 128", None),  # a broken repository, or one of another user
        (f'case "$*" in *rev-parse*) echo {HEAD};; *) exit 1;; esac', None),
        (None, None),  # no git here
    ],
)
def test_commit(tmp_path, monkeypatch, git, expected):
    (tmp_path / ".git").mkdir()
    (tmp_path / "bin").mkdir()
    if git:
        (tmp_path / "bin/git").write_text(f"#!/bin/sh\n{git}\n")
        (tmp_path / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(selfsynth, "__file__", str(tmp_path / "selfsynth/__init__.py"))
    assert commit() == expected


def test_no_checkout_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(selfsynth, "__file__", str(tmp_path / "selfsynth/__init__.py"))
    assert commit() is None
