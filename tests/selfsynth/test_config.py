"""`--config`: flags in a file, through a real command line."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

from selfsynth.config import ConfigOption, load_yaml
from selfsynth.errors import UsageError, command

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    num_prompts: Annotated[int, typer.Option(min=1)] = 3,
    temperature: float = 0.6,
    model: str = "embedded",
    base_url: list[str] | None = None,
    keep_truncated: Annotated[bool, typer.Option("--keep-truncated/--no-keep-truncated")] = False,
    output_dir: Path | None = None,
    config: ConfigOption = None,
) -> None:
    """Say what was understood, as JSON."""
    print(
        json.dumps(
            {
                "num_prompts": num_prompts,
                "temperature": temperature,
                "model": model,
                "base_url": base_url or [],
                "keep_truncated": keep_truncated,
                "output_dir": output_dir and str(output_dir),
                "config": config and config.name,
            }
        )
    )


DEFAULTS = {
    "num_prompts": 3,
    "temperature": 0.6,
    "model": "embedded",
    "base_url": [],
    "keep_truncated": False,
    "output_dir": None,
    "config": "mine.yaml",
}


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command with a file as its configuration; returns status, what it said, the error."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(text, *words):
        if text is not None:
            data = text if isinstance(text, bytes) else text.encode()
            (tmp_path / "mine.yaml").write_bytes(data)
            words = ("--config", "mine.yaml", *words)
        monkeypatch.setattr(sys, "argv", ["app", *words])
        try:
            command(app)()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        said, error = capsys.readouterr()
        return status, json.loads(said) if said else None, error

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("num_prompts: 8\n", [], {"num_prompts": 8}),
        ("num_prompts: 8\n", ["--num-prompts", "9"], {"num_prompts": 9}),  # a flag wins
        ("num_prompts: 8\n", ["--temperature", "1"], {"num_prompts": 8, "temperature": 1.0}),
        ("temperature: 1\nmodel: me/thing\n", [], {"temperature": 1.0, "model": "me/thing"}),
        ("model: 'yes'\n", [], {"model": "yes"}),
        ("model: žluťoučký 😀\n", [], {"model": "žluťoučký 😀"}),
        ("model: '{{ x }} {y}'\n", [], {"model": "{{ x }} {y}"}),
        (
            "base_url: [http://a/v1, http://b/v1]\n",
            [],
            {"base_url": ["http://a/v1", "http://b/v1"]},
        ),
        ("base_url:\n- http://a/v1\n", [], {"base_url": ["http://a/v1"]}),
        (
            "base_url: [http://a/v1]\n",
            ["--base-url", "http://b/v1", "--base-url", "http://c/v1"],
            {"base_url": ["http://b/v1", "http://c/v1"]},
        ),
        ("keep_truncated: true\n", [], {"keep_truncated": True}),
        ("keep_truncated: false\n", ["--keep-truncated"], {"keep_truncated": True}),
        ("keep_truncated: true\n", ["--no-keep-truncated"], {"keep_truncated": False}),
        ("output_dir: runs/mine\n", [], {"output_dir": "runs/mine"}),
        ("base_url: http://a/v1\n", [], {"base_url": ["http://a/v1"]}),  # a list of one
        ("base_url: []\n", [], {}),
        ("{num_prompts: 4}", [], {"num_prompts": 4}),
        ("\ufeffnum_prompts: 4\n", [], {"num_prompts": 4}),  # as Windows editors write it
        ("# a note\nnum_prompts: 4  # another\n", [], {"num_prompts": 4}),
    ],
)
def test_what_is_understood(call, text, words, expected):
    assert call(text, *words) == (0, DEFAULTS | expected, "")


def test_no_file_no_change(call):
    assert call(None) == (0, DEFAULTS | {"config": None}, "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("num_promts: 8\n", "mine.yaml: unknown keys: num_promts"),
        ("b: 1\na: 1\nmodel: x\n", "mine.yaml: unknown keys: a, b"),
        ("num-prompts: 8\n", "mine.yaml: unknown keys: num-prompts"),
        ("config: other.yaml\n", "mine.yaml: unknown keys: config"),
        ("help: true\n", "mine.yaml: unknown keys: help"),
        ("1: 2\n", "mine.yaml: unknown keys: 1"),
        ("true: 2\n", "mine.yaml: unknown keys: True"),
        ("model: x\nmodel: y\n", "mine.yaml: the key 'model' stands twice (line 2)"),
        ("model: x\nseed: 1\n'model': x\n", "mine.yaml: the key 'model' stands twice (line 3)"),
        ("model: {a: 1, a: 2}\n", "mine.yaml: the key 'a' stands twice (line 1)"),
        ("base_url:\n- {a: 1, b: {c: 1, c: 2}}\n", "mine.yaml: the key 'c' stands twice (line 2)"),
        ("", "mine.yaml must hold `flag: value` lines"),
        ("# nothing\n", "mine.yaml must hold `flag: value` lines"),
        ("- model\n", "mine.yaml must hold `flag: value` lines"),
        ("just text\n", "mine.yaml must hold `flag: value` lines"),
        ("5\n", "mine.yaml must hold `flag: value` lines"),
        ("model: [1\n", "mine.yaml is no YAML: "),
        ("model: x\n  y: z: w\n", "mine.yaml is no YAML: "),
        ("\tmodel: x\n", "mine.yaml is no YAML: "),
        ("a: 1\n---\nb: 1\n", "mine.yaml is no YAML: "),
        ("model: \x01\n", "mine.yaml is no YAML: "),
        ("model: !!python/object/apply:os.system [exit]\n", "mine.yaml is no YAML: "),
        ("? [a]\n: 1\n", "mine.yaml: a key must be a plain word"),
        ("? {a: 1}\n: 1\n", "mine.yaml: a key must be a plain word"),
        (b"model: \xff\xfe\xfd\n", "mine.yaml cannot be read: "),
        ("num_prompts: 0\n", "--num-prompts"),
        ("num_prompts: -3\n", "--num-prompts"),
        ("num_prompts: many\n", "--num-prompts"),
        ("num_prompts: 1.5\n", "--num-prompts"),
        ("num_prompts: [1, 2]\n", "prompts"),
        ("keep_truncated: maybe\n", "mine.yaml: keep_truncated must be true or false"),
        ("keep_truncated: 'true'\n", "mine.yaml: keep_truncated must be true or false"),
        ("keep_truncated: 1\n", "mine.yaml: keep_truncated must be true or false"),
        ("output_dir: {a: 1}\n", "output"),
    ],
)
def test_what_is_refused(call, text, named):
    status, said, error = call(text)
    assert (status, said) == (2, None)
    assert named in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 600


@pytest.mark.parametrize(
    ("text", "named"),
    [
        # A value that is no single word, where one belongs
        ("model: {a: 1}\n", "mine.yaml: model must be one value"),
        ("model: [a, b]\n", "mine.yaml: model must be one value"),
        ("model: null\n", "mine.yaml: model must be one value"),
        ("output_dir:\n", "mine.yaml: output_dir must be one value"),
        ("base_url: [[http://a/v1]]\n", "mine.yaml: base_url must be one value or a list"),
        ("base_url: [null]\n", "mine.yaml: base_url must be one value or a list"),
        ("base_url: {a: 1}\n", "mine.yaml: base_url must be one value or a list"),
        # YAML's `yes`, where a word or a number belongs
        ("model: yes\n", "mine.yaml: model must be a value"),
        ("num_prompts: true\n", "mine.yaml: num_prompts must be a value"),
    ],
)
def test_values_that_no_flag_could_say(call, text, named):
    test_what_is_refused(call, text, named)


@pytest.mark.parametrize("text", ["model: 2024-02-31\n", f"model: {'[' * 3000}\n"], ids=len)
def test_values_that_yaml_cannot_make(call, text):
    test_what_is_refused(call, text, "mine.yaml")


def test_a_date_is_a_name_as_it_stands(call):
    """A tag may be called like a day."""
    assert call("model: 2024-02-03\n")[1]["model"] == "2024-02-03"


@pytest.mark.parametrize("name", ["gone.yaml", ".", ""])
def test_no_such_file(call, name):
    status, said, error = call(None, "--config", name)
    assert (status, said) == (2, None)
    assert error.count("\n") == 1
    assert "cannot be read" in error


def test_a_bad_file_is_named_before_a_bad_flag(call):
    status, _, error = call("promts: 1\n", "--num-prompts", "0")
    assert status == 2
    assert "unknown keys: promts" in error


# ---------------------------------------------------------------- the loader by itself


def test_load_yaml(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &x {b: [1, {c: 2}]}\nd: *x\ne: 1e-6\n", encoding="utf-8")
    assert load_yaml(path) == {
        "a": {"b": [1, {"c": 2}]},
        "d": {"b": [1, {"c": 2}]},
        "e": "1e-6",  # YAML 1.1: a number needs its dot
    }


def test_equal_keys_of_different_maps_are_no_doubles(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: {x: 1}\nb: {x: 1}\nc: [{x: 1}, {x: 2}]\n", encoding="utf-8")
    assert load_yaml(path)["c"] == [{"x": 1}, {"x": 2}]


def test_load_yaml_raises_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        load_yaml(tmp_path / "gone.yaml")
