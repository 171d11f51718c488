"""Names of revisions become commits, against a Hub of four routes."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.revisions import fetch, load, resolve, split_revision
from tests.conftest import run_script
from tests.servers.hub_server import HubServer

NEWEST, OLDER = "aa" * 20, "0b" * 20
REVISIONS = {"main": NEWEST, "v1": OLDER, "refs/pr/1": OLDER, NEWEST: NEWEST, OLDER: OLDER}


class Hub(BaseHTTPRequestHandler):
    """Knows the dataset and model `me/thing`, the canonical model `gpt2`, and some failures."""

    def do_GET(self):
        kind, _, rest = self.path.removeprefix("/api/").partition("/")
        repo, _, revision = rest.partition("/revision/")
        revision = unquote(revision.partition("?")[0]) or "main"
        repo = repo.partition("?")[0]
        self.server.asked.append((kind, repo, revision))
        self.server.tokens.append(self.headers.get("Authorization"))
        answers = {
            "me/private": (401, {"error": "Invalid username or password."}, {}),
            "me/gated": (403, {"error": "Ask for access."}, {"X-Error-Code": "GatedRepo"}),
            "me/odd": (400, {"error": "Not like this."}, {}),
            "me/broken": (500, {"error": "Something\nbroke"}, {}),
            "me/nothing": (200, {"id": repo, "siblings": []}, {}),
            "me/garbage": (200, None, {}),
        }
        if repo in answers:
            status, body, headers = answers[repo]
        elif (kind, repo) not in (
            ("datasets", "me/thing"),
            ("models", "me/thing"),
            ("models", "gpt2"),
        ):
            status, body, headers = 404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"}
        elif revision not in REVISIONS:
            status, body = 404, {"error": "Invalid rev id"}
            headers = {"X-Error-Code": "RevisionNotFound"}
        else:
            status, headers = 200, {}
            body = {"id": repo, "sha": REVISIONS[revision], "siblings": [], "tags": []}
        data = b"<html>" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked, server.tokens = [], []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    use(monkeypatch, server.server_port)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def use(monkeypatch, port):
    # The environment variable is read when huggingface_hub is imported, which may be long ago.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")


# ---------------------------------------------------------------- splitting


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("me/thing", ("me/thing", None)),
        ("me/thing@v1", ("me/thing", "v1")),
        (f"me/thing@{OLDER}", ("me/thing", OLDER)),
        ("gpt2@main", ("gpt2", "main")),
        ("me/thing@refs/pr/1", ("me/thing", "refs/pr/1")),
        ("me/thing@a@b", ("me/thing", "a@b")),
        ("@v1", ("", "v1")),
        ("", ("", None)),
    ],
)
def test_split(spec, expected):
    assert split_revision(spec) == expected


@pytest.mark.parametrize("spec", ["me/thing@", "@"])
def test_no_revision_after_the_sign(spec):
    with pytest.raises(UsageError, match="names no revision after '@'"):
        split_revision(spec)


# ---------------------------------------------------------------- resolving


@pytest.mark.parametrize("kind", ["dataset", "model"])
@pytest.mark.parametrize(
    ("revision", "expected"),
    [
        (None, NEWEST),
        ("main", NEWEST),
        ("v1", OLDER),
        ("refs/pr/1", OLDER),
        (NEWEST, NEWEST),
        (OLDER, OLDER),
    ],
)
def test_names_and_commits_come_out_as_the_same_commit(hub, kind, revision, expected):
    assert resolve("me/thing", revision, kind) == expected
    asked = [(f"{kind}s", "me/thing", revision or "main")]
    assert hub.asked == ([] if revision in (NEWEST, OLDER) else asked)


def test_a_name_without_owner(hub):
    assert resolve("gpt2", None, "model") == NEWEST


def test_a_full_commit_needs_no_network(monkeypatch):
    use(monkeypatch, closed_port())
    assert resolve("me/thing", OLDER) == OLDER


@pytest.mark.parametrize("revision", [OLDER[:-1], OLDER + "0", OLDER.upper(), "g" * 40])
def test_what_only_looks_like_a_commit_is_looked_up(hub, revision):
    with pytest.raises(SelfsynthError, match="no such revision"):
        resolve("me/thing", revision)
    assert hub.asked == [("datasets", "me/thing", revision)]


@pytest.mark.parametrize(
    ("repo", "revision", "named"),
    [
        ("me/thing", "v9", "dataset me/thing@v9: no such revision on the Hub"),
        ("me/gone", None, "dataset me/gone: no such repository on the Hub, or HF_TOKEN may not"),
        ("me/gone", "v1", "dataset me/gone@v1: no such repository on the Hub, or HF_TOKEN"),
        ("me/private", None, "dataset me/private: .*(HF_TOKEN|401)"),
        ("me/gated", "v1", "dataset me/gated@v1: .*(HF_TOKEN|403)"),
        ("me/broken", None, "dataset me/broken: the Hub did not answer .*500"),
        ("me/odd", None, "dataset me/odd: the Hub refused .*Not like this"),
        ("me/nothing", None, "dataset me/nothing: the Hub names no commit for it"),
        ("me/garbage", None, "dataset me/garbage: the Hub did not answer"),
    ],
)
def test_failures_are_one_line(hub, monkeypatch, repo, revision, named):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    with pytest.raises(SelfsynthError, match=named) as caught:
        resolve(repo, revision)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert caught.value.exit_status == 1
    assert hub.tokens == ["Bearer hf_very_secret"]
    assert "secret" not in str(caught.value)


def closed_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_hub_that_is_down(monkeypatch):
    use(monkeypatch, closed_port())
    with pytest.raises(SelfsynthError, match="model me/thing@v1: the Hub did not answer") as caught:
        resolve("me/thing", "v1", "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "repo",
    [
        *("", "/", "me/", "/thing", "a/b/c", "./thing", "../thing", "me/thing@v1", "me thing/x"),
        *("me\n/thing", "me/thing\n", "~/thing", "-me/thing", ".me/x", "me/.thing", "C:\\thing"),
        *("https://huggingface.co/me/thing", "me/a--b", "me/a..b", "me/thing.git", "me/thing-"),
        *("naïve/thing", "me/" + "x" * 100),
    ],
)
def test_what_cannot_be_an_id_is_bad_usage(hub, repo):
    with pytest.raises(UsageError, match="is not a Hub id") as caught:
        resolve(repo)
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)
    assert hub.asked == []


# ---------------------------------------------------------------- fetching and loading


@pytest.fixture
def full_hub(tmp_path):
    """A Hub with two versions of a dataset of one column."""
    with HubServer() as server:
        for version, words in (("v1", ["old"]), ("v2", ["new", "newer"])):
            lines = "".join(json.dumps({"prompt": word}) + "\n" for word in words)
            server.add("me/thing", {"data/train.jsonl": lines.encode()}, tags=[version])
        yield server


ASK = """
import sys
from selfsynth.revisions import fetch, load
from selfsynth.errors import report
try:
    if sys.argv[1] == "load":
        rows, commit = load("me/thing", sys.argv[2], split="train")
        print(list(rows["prompt"]), commit)
    else:
        folder, commit = fetch("me/thing", sys.argv[2])
        print([line for line in (folder / "data/train.jsonl").open()], commit)
except Exception as error:
    sys.exit(report(error))
"""


@pytest.mark.parametrize("how", ["load", "fetch"])
def test_a_warm_cache_never_hands_out_another_version(full_hub, tmp_path, how):
    environment = {**full_hub.environment, "HF_HOME": str(tmp_path / "home")}

    def ask(revision, status=0, **more):
        return run_script("-c", ASK, how, revision, status=status, **{**environment, **more})

    commits = full_hub.tags("me/thing")
    for revision in ("v2", "v1", "main", commits["v2"]):
        said = ask(revision).stdout
        old = revision == "v1"
        assert ("old" in said, "newer" in said) == (old, not old)
        assert commits["v1" if old else "v2"] in said
    # The token goes bad, and the repository private: the cache is warm, and says nothing.
    full_hub.add("me/thing", {}, private=True)
    assert "error: dataset me/thing@v1" in ask("v1", status=1, HF_TOKEN="hf_other").stderr
    for revision in ("v1", "main"):
        assert ask(revision, status=1, HF_HUB_OFFLINE="1").stdout == ""
    if how == "fetch":  # a commit is what it is, offline too
        assert "old" in ask(commits["v1"], HF_HUB_OFFLINE="1").stdout
    else:
        assert "only a cache did" in ask(commits["v1"], status=1, HF_HUB_OFFLINE="1").stderr


def test_a_folder_is_a_version_of_its_own(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "here"}\n')
    rows, commit = load(str(tmp_path), split="train")
    assert (rows["prompt"][0], commit) == ("here", None)
    with pytest.raises(SelfsynthError, match=f"^{tmp_path}: (?!the Hub)"):
        load(str(tmp_path), split="x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SelfsynthError, match=r"empty: (?!the Hub)"):
        load(str(tmp_path / "empty"))
    (tmp_path / "empty" / "train.jsonl").write_text("{")
    with pytest.raises(SelfsynthError, match=r"generating the dataset: ."):
        load(str(tmp_path / "empty"))
    assert fetch(str(tmp_path)) == (tmp_path, None)
    with pytest.raises(UsageError, match="is a folder: it has no revision"):
        fetch(str(tmp_path), "v1")
    with pytest.raises(UsageError, match="names another revision than v2"):
        fetch("me/thing@v1", "v2")
