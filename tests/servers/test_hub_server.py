"""The local Hub, asked by huggingface_hub and datasets as they are."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    constants,
)
from huggingface_hub import errors as hf
from huggingface_hub.repocard import DatasetCard

from .hub_server import HubServer, check_card

ROOT = Path(__file__).parents[2]
CARD = b"---\nlicense: apache-2.0\nlanguage:\n- en\ntags:\n- preference\n---\n# Pairs\n"
PARQUET = b"PAR1" + bytes(range(256)) * 20 + b"PAR1"
TREE = {"README.md": CARD, "data/train.parquet": PARQUET, "data/more/notes.txt": b"notes"}


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def api(hub, monkeypatch):
    """A client of `me` that may write."""
    # A child process has it from `hub.environment`: uploads by Xet have no way back to LFS.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return HfApi(endpoint=hub.url, token="hf_me")


@pytest.fixture
def child(hub, tmp_path, python):
    """Runs Python code against the Hub in a process with a fresh HF_HOME, and gives its output."""
    count = 0

    def run(code, **environment):
        nonlocal count
        count += 1
        environment = {**hub.environment, "HF_HOME": str(tmp_path / f"home{count}"), **environment}
        return python("-c", textwrap.dedent(code), **environment).stdout

    return run


def add(path, data):
    return CommitOperationAdd(path_in_repo=path, path_or_fileobj=data)


def commit(api, *operations, repo="me/pairs", **options):
    options = {"commit_message": "change", "repo_type": "dataset", **options}
    return api.create_commit(repo, operations, **options)


def ask(url, path, method="GET", **headers):
    """One raw answer: status, headers and body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


# ---------------------------------------------------------------- both clients


def test_old_tag_is_loaded_after_a_second_push(hub, child):
    child(
        """
        from datasets import Dataset
        from huggingface_hub import HfApi

        for version in "v1", "v2":
            rows = {"prompt": [f"{version} {i}" for i in range(5)]}
            commit = Dataset.from_dict(rows).push_to_hub("me/pairs")
            HfApi().create_tag("me/pairs", tag=version, revision=commit.oid, repo_type="dataset")
        again = Dataset.from_dict(rows).push_to_hub("me/pairs")
        assert again.oid == commit.oid, "the same rows make no commit"
        """
    )
    load = """
        from datasets import load_dataset

        print(*load_dataset("me/pairs", revision="v1", split="train")["prompt"], sep=",")
        print(*load_dataset("me/pairs", split="train")["prompt"], sep=",")
        """
    rows = [",".join(f"{version} {i}" for i in range(5)) for version in ("v1", "v2")]
    assert child(load).splitlines() == rows
    assert list(hub.tags("me/pairs")) == ["v1", "v2"]
    newest = hub.commits("me/pairs")[0]
    assert newest.oid == hub.tags("me/pairs")["v2"]
    assert b"dataset_info" in newest.files["README.md"]


def test_datasets_knows_what_is_missing(hub, child):
    hub.add("me/pairs", {"train.jsonl": b'{"a": 1}\n'})
    missing = child(
        """
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError

        for name, revision in ("me/none", None), ("me/pairs", "v9"):
            try:
                load_dataset(name, revision=revision)
            except DatasetNotFoundError:
                print(name)
        """
    )
    assert missing.split() == ["me/none", "me/pairs"]


@pytest.mark.parametrize("kind", ["dataset", "model"])
def test_downloads_of_regular_and_lfs_files(hub, api, tmp_path, kind):
    oid = hub.add("team/things", TREE, repo_type=kind, tags=["v1"])
    options = {"repo_type": kind, "revision": "v1", "cache_dir": tmp_path}
    folder = Path(api.snapshot_download("team/things", **options))
    assert folder.name == oid
    for path, data in TREE.items():
        assert (folder / path).read_bytes() == data
        one = api.hf_hub_download("team/things", path, **{**options, "cache_dir": tmp_path / "b"})
        assert Path(one).read_bytes() == data
    # The storage is another origin: no token goes there.
    stored = [i for i, (_, path) in enumerate(hub.requests) if path.startswith(f"/{kind}/")]
    assert stored
    assert all(hub.authorizations[i] is None for i in stored)
    assert "Bearer hf_me" in hub.authorizations


def test_ranges_and_headers(hub):
    oid = hub.add("me/pairs", TREE)
    status, headers, body = ask(hub.url, f"/datasets/me/pairs/resolve/{oid[:7]}/README.md")
    assert (status, body) == (200, CARD)
    assert headers["X-Repo-Commit"] == oid
    status, headers, body = ask(hub.url, "/datasets/me/pairs/resolve/main/data%2Ftrain.parquet")
    assert (status, body, headers["X-Repo-Commit"]) == (302, b"", oid)
    assert headers["X-Linked-Size"] == str(len(PARQUET))
    where = urlsplit(headers["Location"])
    assert where.netloc != urlsplit(hub.url).netloc
    for asked, part in {"1-3": PARQUET[1:4], "-4": b"PAR1", "5120-": PARQUET[5120:]}.items():
        status, headers, body = ask(where.geturl(), where.path, Range=f"bytes={asked}")
        assert (status, body) == (206, part)
    assert ask(where.geturl(), where.path, Range="bytes=9999-")[0] == 416
    assert ask(where.geturl(), where.path, "HEAD")[1]["Content-Length"] == str(len(PARQUET))


# ---------------------------------------------------------------- commits


def test_commit_on_a_stale_parent_is_refused(hub, api):
    parent = hub.add("me/pairs", {"a": b"1"})
    hub.add("me/pairs", {"a": b"2"})
    with pytest.raises(hf.HfHubHTTPError) as caught:
        commit(api, add("b", b"3"), parent_commit=parent)
    assert caught.value.response.status_code == 412
    assert "b" not in hub.files("me/pairs")


def test_main_can_move_between_two_requests(hub, api):
    parent = hub.add("me/pairs", {"a": b"1"})

    def before(method, path):
        if path.endswith("/commit/main"):
            hub.add("me/pairs", {"a": b"2"}, message="theirs")

    hub.before = before
    with pytest.raises(hf.HfHubHTTPError, match="412"):
        commit(api, add("b", b"3"), parent_commit=parent)
    assert hub.commits("me/pairs")[0].title == "theirs"


def test_commits_add_copy_and_delete(hub, api):
    assert hub.add("me/pairs", TREE, commit="c" * 40) == "c" * 40
    done = commit(
        api,
        add("large.bin", b"\0" * 10_000_001),
        add("empty.parquet", b""),
        CommitOperationCopy(src_path_in_repo="data/train.parquet", path_in_repo="copy.parquet"),
        CommitOperationDelete(path_in_repo="data/", is_folder=True),
        commit_message="summary",
        commit_description="and why",
    )
    newest, older, first = hub.commits("me/pairs")
    assert (newest.oid, newest.title, newest.message) == (done.oid, "summary", "and why")
    assert set(newest.files) == {
        ".gitattributes", "README.md", "large.bin", "empty.parquet", "copy.parquet"
    }  # fmt: skip
    assert newest.files["copy.parquet"] == PARQUET
    assert (older.oid, first.title) == ("c" * 40, "initial commit")
    info = api.dataset_info("me/pairs", files_metadata=True)
    files = {file.rfilename: file for file in info.siblings}
    assert files["large.bin"].lfs.size == 10_000_001
    assert files["README.md"].lfs is None
    assert info.sha == done.oid
    assert info.card_data.license == "apache-2.0"
    assert info.tags == ["license:apache-2.0", "language:en", "preference"]
    with pytest.raises(hf.EntryNotFoundError):
        commit(api, CommitOperationDelete(path_in_repo="none"))


def test_tree_and_history(hub, api):
    oid = hub.add("me/pairs", TREE)
    options = {"repo_type": "dataset", "revision": oid}
    top = {e.path for e in api.list_repo_tree("me/pairs", **options)}
    assert top == {".gitattributes", "README.md", "data"}
    below = list(api.list_repo_tree("me/pairs", "data", recursive=True, expand=True, **options))
    assert {e.path: getattr(e, "size", None) for e in below} == {
        "data/more": None,
        "data/more/notes.txt": 5,
        "data/train.parquet": len(PARQUET),
    }
    assert {e.last_commit.oid for e in below} == {oid}
    for path in "none", "README.md":
        with pytest.raises(hf.EntryNotFoundError):
            list(api.list_repo_tree("me/pairs", path, **options))
    for number in range(60):
        hub.add("me/pairs", {"count": b"%d" % number}, message=f"count {number}")
    titles = [c.title for c in api.list_repo_commits("me/pairs", repo_type="dataset")]
    assert titles == [f"count {n}" for n in reversed(range(60))] + ["Add files", "initial commit"]


def test_tags_and_branches(hub, api):
    options = {"repo_type": "dataset"}
    first = hub.add("me/pairs", {"a": b"1"})
    last = hub.add("me/pairs", {"a": b"2"})
    api.create_tag("me/pairs", tag="v1", revision=first, **options)
    with pytest.raises(hf.HfHubHTTPError, match="409"):
        api.create_tag("me/pairs", tag="v1", **options)
    api.create_branch("me/pairs", branch="old/data", revision=first, **options)
    refs = api.list_repo_refs("me/pairs", **options)
    assert {b.name: b.target_commit for b in refs.branches} == {"main": last, "old/data": first}
    assert [(t.name, t.ref, t.target_commit) for t in refs.tags] == [("v1", "refs/tags/v1", first)]
    commit(api, add("b", b"1"), revision="old/data")
    assert hub.files("me/pairs", "old/data")["b"] == b"1"
    assert hub.files("me/pairs", "v1")["a"] == b"1"
    with pytest.raises(hf.BadRequestError):
        commit(api, add("b", b"1"), revision="v1")
    api.delete_branch("me/pairs", branch="old/data", **options)
    api.delete_tag("me/pairs", tag="v1", **options)
    assert hub.tags("me/pairs") == {}
    hub.tag("me/pairs", "v2", first[:7])
    assert hub.tags("me/pairs") == {"v2": first}
    with pytest.raises(hf.RevisionNotFoundError):
        api.delete_tag("me/pairs", tag="v1", **options)


def test_repositories_are_made_moved_hidden_and_deleted(hub, api):
    url = api.create_repo("team/model", private=True)
    assert (url, url.repo_id, url.repo_type) == (f"{hub.url}/team/model", "team/model", "model")
    assert api.create_repo("team/model", exist_ok=True).repo_id == "team/model"
    with pytest.raises(hf.HfHubHTTPError, match="409"):
        api.create_repo("team/model")
    assert api.model_info("team/model").private
    api.update_repo_settings("team/model", private=False)
    assert not api.model_info("team/model").private
    api.move_repo("team/model", "me/model")
    assert api.model_info("team/model").id == "me/model"
    assert [m.id for m in api.list_models(author="me")] == ["me/model"]
    api.delete_repo("me/model")
    assert not api.repo_exists("me/model")


# ---------------------------------------------------------------- refusals


def test_missing_things(hub, api, tmp_path):
    hub.add("me/pairs", TREE)
    options = {"repo_type": "dataset", "cache_dir": tmp_path}
    with pytest.raises(hf.RemoteEntryNotFoundError):
        api.hf_hub_download("me/pairs", "none.txt", **options)
    with pytest.raises(hf.RevisionNotFoundError):
        api.hf_hub_download("me/pairs", "README.md", revision="v9", **options)
    with pytest.raises(hf.RevisionNotFoundError):
        api.dataset_info("me/pairs", revision="v9")
    with pytest.raises(hf.RepositoryNotFoundError):
        api.dataset_info("me/none")
    with pytest.raises(hf.RepositoryNotFoundError):
        api.model_info("me/pairs")


def status_of(call, *arguments, **options):
    with pytest.raises(hf.HfHubHTTPError) as caught:
        call(*arguments, **options)
    return caught.value.response.status_code


def test_tokens(hub, api):
    hub.add("me/secret", TREE, private=True)
    hub.add("me/pairs", TREE)
    reader, other, nobody, wrong = (
        HfApi(endpoint=hub.url, token=t) for t in ("hf_reader", "hf_other", False, "hf_wrong")
    )
    assert api.whoami()["auth"]["accessToken"]["role"] == "write"
    assert reader.whoami()["auth"]["accessToken"]["role"] == "read"
    assert [org["name"] for org in api.whoami()["orgs"]] == ["team"]
    assert status_of(wrong.whoami) == 401
    assert status_of(wrong.dataset_info, "me/pairs") == 401
    assert reader.dataset_info("me/secret").private
    for client, status in (other, 404), (nobody, 401):
        with pytest.raises(hf.RepositoryNotFoundError) as caught:
            client.dataset_info("me/secret")
        assert caught.value.response.status_code == status
        assert client.dataset_info("me/pairs").sha
        assert [d.id for d in client.list_datasets(author="me")] == ["me/pairs"]
    data = {"repo_type": "dataset"}
    for client in reader, other:
        assert status_of(client.create_repo, "me/new", **data) == 403
        assert status_of(commit, client, add("a", b"1")) == 403
        assert status_of(client.create_tag, "me/pairs", tag="v1", **data) == 403
        assert status_of(client.update_repo_settings, "me/pairs", private=True, **data) == 403
        assert status_of(client.delete_repo, "me/pairs", **data) in (403, 404)
    assert status_of(commit, nobody, add("a", b"1")) == 401
    assert status_of(api.create_repo, "other/new") == 403


def test_fine_grained_token(hub):
    scope = {"entity": {"type": "dataset", "name": "me/pairs"}, "permissions": ["repo.write"]}
    hub.tokens["hf_fine"] = {"name": "me", "role": "fineGrained", "orgs": [], "scoped": [scope]}
    hub.add("me/pairs", {})
    hub.add("me/secret", {}, private=True)
    api = HfApi(endpoint=hub.url, token="hf_fine")
    assert api.whoami()["auth"]["accessToken"]["fineGrained"]["scoped"] == [scope]
    assert commit(api, add("a", b"1")).oid == hub.commits("me/pairs")[0].oid
    assert status_of(api.create_repo, "me/new") == 403
    assert status_of(api.dataset_info, "me/secret") == 404


@pytest.mark.parametrize(
    ("metadata", "sound"),
    [
        ("license: mit\nlanguage: [en, de]\ntags: [a]\nsize_categories: n<1K", True),
        ("license: [unclosed", False),
        ("license: 1", False),
        ("language: no", False),
        ("tags: text", False),
        ("tags: [1.5]", False),
        ("license: mit\nlicense: mit", False),
        ("- a list", False),
        ("configs:\n- data_files: x", False),
    ],
)
def test_cards_are_checked(hub, api, monkeypatch, metadata, sound):
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    text = f"---\n{metadata}\n---\n# Title\n"
    hub.add("me/pairs", {})
    assert bool(check_card(text)[1]) != sound
    header = {"key": "header", "value": {"summary": "card"}}
    file = {"key": "file", "value": {"path": "README.md", "content": text}}
    answer = httpx2.post(
        f"{hub.url}/api/datasets/me/pairs/commit/main",
        content="\n".join(map(json.dumps, [header, file])),
        headers={"Authorization": "Bearer hf_me"},
    )
    assert answer.status_code == (200 if sound else 400)
    if sound:
        DatasetCard(text).validate()
        commit(api, add("README.md", text.encode() + b"more"))
        return
    with pytest.raises(ValueError, match="Invalid metadata in README"):
        commit(api, add("README.md", text.encode()))
    assert len(hub.commits("me/pairs")) == 2


def test_a_card_without_metadata_is_warned_of(hub, api):
    hub.add("me/pairs", {})
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        commit(api, add("README.md", b"# Title\n"))


# ---------------------------------------------------------------- faults


def at_commit(fault):
    return lambda method, path, number: fault if "/commit/" in path else None


@pytest.mark.parametrize("status", [429, 500, 503])
def test_fault_status(hub, api, status):
    hub.add("me/pairs", {})
    hub.fault = at_commit(status)
    with pytest.raises(hf.HfHubHTTPError) as caught:
        commit(api, add("a", b"1"))
    assert caught.value.response.status_code == status
    assert caught.value.response.headers.get("Retry-After") == (None if status == 500 else "0")
    assert len(hub.commits("me/pairs")) == 2


@pytest.mark.parametrize(("fault", "made"), [("drop", 2), ("late", 3)])
def test_fault_closes_the_connection(hub, api, fault, made):
    hub.add("me/pairs", {})
    hub.fault = at_commit(fault)
    with pytest.raises(httpx2.TransportError):
        commit(api, add("a", b"1"))
    assert len(hub.commits("me/pairs")) == made
    hub.fault = None
    commit(api, add("a", b"1"))
    assert hub.files("me/pairs")["a"] == b"1"


def test_faults_of_the_storage_and_their_numbers(hub, api):
    hub.add("me/pairs", {})
    numbers = []

    def fault(method, path, number):
        numbers.append(number)
        return 503 if method == "PUT" and len(numbers) < 5 else None

    hub.fault = fault
    commit(api, add("a.parquet", PARQUET))
    assert hub.files("me/pairs")["a.parquet"] == PARQUET
    assert numbers == list(range(1, len(hub.requests) + 1))
    assert [method for method, _ in hub.requests].count("PUT") >= 2


# ---------------------------------------------------------------- as a process


def test_process_serves_until_it_is_stopped():
    command = [sys.executable, "-m", "tests.servers.hub_server", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=os.environ) as process:
        url = json.loads(process.stdout.readline())["url"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        api = HfApi(endpoint=url, token="hf_me")
        api.create_repo("me/pairs", repo_type="dataset")
        assert api.list_repo_files("me/pairs", repo_type="dataset") == [".gitattributes"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
