"""`sao.py --push-to-hub`: refused before anything is asked, or a version at the end."""

import json

import pytest

from tests.conftest import run_script
from tests.pipelines.test_sao import arguments
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


@pytest.mark.parametrize(
    ("flags", "environment", "status", "words"),
    [
        ([], {"HF_TOKEN": ""}, 1, "no token for the Hub"),
        ([], {"HF_TOKEN": "hf_wrong"}, 1, "does not know this token"),
        ([], {"HF_TOKEN": "hf_reader"}, 1, "may only read"),
        (["--repo-id", "other/x"], {}, 1, "me may not write to other"),
        (["--repo-id", "me/x y"], {}, 2, "--repo-id"),
        (["--repo-id", "me/public", "--private"], {}, 1, "is public"),
        (["--preview", "2"], {}, 2, "--preview keeps nothing"),
        ([], {"HF_ENDPOINT": "http://127.0.0.1:9"}, 1, "the Hub did not answer"),
    ],
)
def test_nothing_is_asked_when_it_could_not_be_published(
    servers, tmp_path, flags, environment, status, words
):
    hub, model = servers
    hub.add("me/public", {"README.md": b"x"})
    home = {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN_PATH": str(tmp_path / "none")}
    command = arguments(model.url, tmp_path / "run", "--push-to-hub", *flags, n=N)
    done = run_script(*command, status=status, **{**hub.environment, **home, **environment})
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("error: ") and words in lines[-1]
    assert model.requests == []


def test_flags_that_need_the_push(servers, tmp_path):
    command = arguments(servers[1].url, tmp_path / "run", "--private", n=N)
    assert "need --push-to-hub" in run_script(*command, status=2).stderr
