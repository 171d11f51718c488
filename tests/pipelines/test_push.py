"""`sao.py --push-to-hub`: refused before anything is asked, or a version at the end."""

import json

import pytest

from hub_cards.comparison import compare
from hub_cards.publish import publish
from hub_cards.verify import verify
from selfsynth.revisions import fetch
from tests.conftest import run_script
from tests.pipelines.test_sao import arguments, in_process
from tests.servers.hub_server import HubServer
from tests.servers.model_server import ModelServer

N = 8


@pytest.fixture
def servers():
    with HubServer() as hub, ModelServer() as model:
        yield hub, model


def test_a_run_ends_as_a_version(servers, tmp_path):
    hub, model = servers
    environment = {**hub.environment, "HF_HOME": str(tmp_path / "home")}
    flags = ["--push-to-hub", "--repo-id", "me/small", "--private"]
    command = arguments(model.url, tmp_path / "run", *flags, n=N)
    # The Hub fails for good when all is made: the dataset is there, and nothing has a tag.
    hub.fault = lambda method, path, number: 403 if "/commit/" in path else None
    assert "error: dataset me/small" in run_script(*command, status=1, **environment).stderr
    assert hub.tags("me/small") == {} and (tmp_path / "run/README.md").exists()
    hub.fault, asked = None, len(model.requests)
    said = run_script(*command, **environment).stderr
    assert len(model.requests) == asked  # the same command asks for nothing again
    commit = hub.tags("me/small")["v1"]
    assert said.rstrip().endswith('pairs = load_dataset("me/small", revision="v1")')
    for line in (f"url      {hub.url}/datasets/me/small/tree/v1", f"commit   {commit}"):
        assert line in said
    files = hub.files("me/small", "v1")
    assert files["provenance.json"] == (tmp_path / "run/provenance.json").read_bytes()
    text = files["README.md"] + files["provenance.json"]
    for secret in (str(tmp_path), model.url, "hf_me", "127.0.0.1"):
        assert secret.encode() not in text
    assert json.loads(files["provenance.json"])["counts"]["asked"] == N
    again = run_script(*command, **environment).stderr
    assert "v1 holds the same already" in again and list(hub.tags("me/small")) == ["v1"]


def test_the_default_name_is_ones_own(servers, tmp_path):
    hub, model = servers
    environment = {**hub.environment, "HF_HOME": str(tmp_path / "home")}
    command = arguments(model.url, tmp_path / "run", "--push-to-hub", n=N)
    run_script(*command, **environment)
    name = command[command.index("--model") + 1]
    assert list(hub.tags(f"me/sao-{name}")) == ["v1"]


def test_a_merged_run_is_a_version(hub, tmp_path):
    for name in ("one", "two"):
        with ModelServer(models=[name], salt=name) as model:
            command = arguments(model.url, tmp_path / name, n=N)
            command[command.index("scripted")] = name
            run_script(*command)
    merge = ["pipelines/sao.py", "merge", tmp_path / "one", tmp_path / "two"]
    run_script(*merge, "--output-dir", tmp_path / "both")
    first, second = publish(tmp_path / "one", "me/both"), publish(tmp_path / "both", "me/both")
    assert (first.tag, second.tag) == ("v1", "v2")
    for version in (first, second):
        folder, commit = fetch("me/both", version.tag)
        assert commit == version.commit and verify(folder)[0] == []
    found = compare(tmp_path / "one", folder)
    assert found["removed"] == [] and found["added"]


@pytest.mark.parametrize(
    ("flags", "token", "status", "words"),
    [
        ([], "", 1, "no token for the Hub"),
        ([], "hf_wrong", 1, "does not know this token"),
        ([], "hf_reader", 1, "may only read"),
        (["--repo-id", "other/x"], "hf_me", 1, "me may not write to other"),
        (["--repo-id", "me/x y"], "hf_me", 2, "--repo-id"),
        (["--repo-id", "me/public", "--private"], "hf_me", 1, "is public"),
        (["--preview", "2"], "hf_me", 2, "--preview keeps nothing"),
    ],
)
def test_nothing_is_asked_when_it_could_not_be_published(
    hub, tmp_path, monkeypatch, capsys, flags, token, status, words
):
    hub.add("me/public", {"README.md": b"x"})
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with ModelServer() as model:
        command = arguments(model.url, tmp_path / "run", "--push-to-hub", *flags, n=N)[1:]
        assert in_process(*command) == status
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: ") and words in line
        assert model.requests == []


def test_nothing_is_asked_when_the_hub_is_not_there(tmp_path):
    with ModelServer() as model:
        command = arguments(model.url, tmp_path / "run", "--push-to-hub", n=N)
        failed = run_script(*command, status=1, HF_TOKEN="hf_me")
        assert "error: the Hub did not answer" in failed.stderr and model.requests == []


def test_flags_that_need_the_push(tmp_path, capsys):
    command = arguments("http://127.0.0.1:9/v1", tmp_path / "run", "--private", n=N)[1:]
    assert in_process(*command) == 2
    assert "need --push-to-hub" in capsys.readouterr().err
