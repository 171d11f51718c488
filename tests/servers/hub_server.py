"""A local Hugging Face Hub over real HTTP, for tests and benchmarks.

huggingface_hub and datasets run against it unchanged: repositories with commits, branches and
tags, cards, LFS objects from an origin of their own, tokens with roles. All of it is in memory.

In a thread of the test process:

    with HubServer() as hub:
        hub.add("me/pairs", {"README.md": b"# Pairs"}, tags=["v1"])
        HfApi(endpoint=hub.url, token="hf_me").dataset_info("me/pairs", revision="v1")
        subprocess.run(..., env={**os.environ, **hub.environment, "HF_HOME": fresh})
        hub.commits("me/pairs")[0].title, hub.requests, hub.authorizations

Scripted trouble: `hub.fault` answers a request with an error or with a closed connection, and
`hub.before` runs before a request is handled, so that main can move in between.

As a process of its own:

    python -m tests.servers.hub_server --port 0
"""

import argparse
import json
import os
import re
import signal
import socket
import sys
import threading
import traceback
from base64 import b64decode
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

import yaml

LFS_SUFFIXES = (".parquet", ".safetensors", ".png", ".gguf")
LFS_SIZE = 10_000_000  # larger files are LFS objects whatever their name
PAGES = {"commits": 50, "tree": 1000}  # items a page, as the Hub has them
GITATTRIBUTES = "".join(
    f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES
).encode()
FRONT_MATTER = re.compile(r"\A\s*---[\r\n]+([\S\s]*?)[\r\n]+---(?:\r\n|\r|\n|\Z)")
STRINGS = ("license", "language", "tags", "size_categories")  # of a card: one or a list of them
TOKENS = {
    "hf_me": {
        "name": "me",
        "role": "write",
        "orgs": [{"name": "team", "roleInOrg": "write"}],
    },
    "hf_reader": {"name": "me", "role": "read", "orgs": []},
    "hf_other": {"name": "other", "role": "write", "orgs": []},
}


class Refusal(Exception):
    """A request that is answered with an error, in the headers that huggingface_hub reads."""

    def __init__(self, status: int, message: str, code: str = "", **more):
        super().__init__(message)
        headers = {"X-Error-Message": message.splitlines()[0], **more.pop("headers", {})}
        self.reply = Reply(status, {"error": message, **more}, headers)
        if code:
            headers["X-Error-Code"] = code


@dataclass
class Reply:
    """An answer; a body that is not bytes goes out as JSON."""

    status: int = 200
    body: object = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What a route gets to see of a request."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: object
    body: bytes

    @property
    def json(self) -> dict:
        try:
            return json.loads(self.body or b"{}")
        except ValueError:
            raise Refusal(400, "Invalid JSON") from None


# ---------------------------------------------------------------- cards


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML that refuses a key twice, as the Hub's parser does."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"duplicated mapping key: {twice[0]}")
        return super().construct_mapping(node, deep)


def check_card(text: str) -> tuple[dict, list[str], list[str]]:
    """The metadata of a card, and the errors and the warnings that the Hub has about it."""
    match = FRONT_MATTER.match(text)
    if not match:
        return {}, [], ["empty or missing yaml metadata in repo card"]
    try:
        card = yaml.load(match[1], Loader)
    except yaml.YAMLError as error:
        return {}, [f"Invalid YAML: {error}"], []
    if card is None:
        return {}, [], ["empty or missing yaml metadata in repo card"]
    if not isinstance(card, dict):
        return {}, ["the YAML metadata must be an object"], []
    errors = []
    for key in STRINGS:
        values = card.get(key, [])
        values = [values] if isinstance(values, str) else values
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            errors.append(f'"{key}" must be a string or an array of strings')
    if not isinstance(card.get("tags", []), list):
        errors.append('"tags" must be an array')
    configs = card.get("configs", [])
    if not isinstance(configs, list) or not all(
        isinstance(c, dict) and isinstance(c.get("config_name"), str) for c in configs
    ):
        errors.append('"configs" must be an array of objects with a config_name')
    return card, errors, []


def tags_of(card: dict) -> list[str]:
    """The tags that the Hub derives from a card."""
    tags = []
    for key in STRINGS:
        values = card.get(key, [])
        values = [values] if isinstance(values, str) else values
        tags += values if key == "tags" else [f"{key}:{value}" for value in values]
    return tags


# ---------------------------------------------------------------- repositories


@dataclass
class Blob:
    """A file's content, with the ids that git and LFS give it."""

    data: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git itself keeps of an LFS object."""
        version = "version https://git-lfs.github.com/spec/v1"
        return f"{version}\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()

    @cached_property
    def oid(self) -> str:
        content = self.pointer if self.lfs else self.data
        return sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def described(self, sha_key: str) -> dict:
        """Its size and, of an LFS object, the ids."""
        if not self.lfs:
            return {"size": len(self.data)}
        entry = {"size": len(self.data), "pointerSize": len(self.pointer), sha_key: self.sha256}
        return {"size": len(self.data), "lfs": entry}


@dataclass
class Commit:
    """One commit, with the whole tree that it leaves behind."""

    oid: str
    title: str
    message: str
    date: str
    author: str
    parent: "Commit | None"
    blobs: dict[str, Blob]

    @property
    def files(self) -> dict[str, bytes]:
        return {path: blob.data for path, blob in self.blobs.items()}

    def history(self) -> "list[Commit]":
        """The commit and its ancestors, newest first."""
        commits, commit = [], self
        while commit:
            commits.append(commit)
            commit = commit.parent
        return commits

    def summary(self) -> dict:
        return {"id": self.oid, "title": self.title, "date": self.date}


@dataclass
class Repo:
    """A repository: refs into commits, and the LFS objects that were uploaded to it."""

    kind: str
    id: str
    private: bool
    author: str
    gated: object = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, Commit] = field(default_factory=dict)
    tags: dict[str, Commit] = field(default_factory=dict)
    objects: dict[str, Blob] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        return self.id.partition("/")[0]

    @property
    def path(self) -> str:
        """Where people see it, below the Hub's URL."""
        return f"/{self.id}" if self.kind == "model" else f"/{self.kind}s/{self.id}"

    def resolve(self, revision: str) -> Commit:
        """The commit of a branch, a tag, or a commit id of which seven digits are enough."""
        name = re.sub(r"^refs/(heads|tags)/", "", revision)
        if found := self.branches.get(name) or self.tags.get(name) or self.commits.get(name):
            return found
        if re.fullmatch(r"[0-9a-f]{7,39}", name):
            matches = [commit for oid, commit in self.commits.items() if oid.startswith(name)]
            if len(matches) == 1:
                return matches[0]
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def commit(self, branch, blobs, title, message="", author="system", oid=None) -> Commit:
        """Put a commit on top of a branch, which need not exist."""
        parent = self.branches.get(branch)
        if oid is None:
            parts = [self.kind, self.id, parent and parent.oid, len(self.commits), title, message]
            parts += sorted((path, blob.oid) for path, blob in blobs.items())
            oid = sha1(json.dumps(parts).encode()).hexdigest()
        date = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        commit = Commit(oid, title, message, date, author, parent, blobs)
        self.commits[oid] = self.branches[branch] = commit
        self.objects |= {blob.sha256: blob for blob in blobs.values() if blob.lfs}
        return commit


def upload_mode(path: str, size: int) -> str:
    """Whether the Hub keeps a file as an LFS object."""
    large = size > LFS_SIZE or path.lower().endswith(LFS_SUFFIXES)
    return "lfs" if large and size else "regular"


def entries_of(commit: Commit, expand: bool) -> dict[str, dict]:
    """Every file and directory of a commit by its path, as the tree is listed."""
    entries = {}
    for path, blob in sorted(commit.blobs.items()):
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            oid = sha1(f"{commit.oid}/{folder}".encode()).hexdigest()
            entry = {"type": "directory", "oid": oid, "size": 0, "path": folder}
            entries.setdefault(folder, entry)
        entries[path] = {"type": "file", "oid": blob.oid, "path": path, **blob.described("oid")}
    if expand:
        history = commit.history()
        for path, entry in entries.items():
            # The oldest commit in a row of those that have the file as it is now.
            last = commit
            for older in history[1:]:
                if path in commit.blobs and older.blobs.get(path) != commit.blobs[path]:
                    break
                last = older if path in older.blobs else last
            entry["lastCommit"] = last.summary()
    return entries


def slice_of(data: bytes, asked: str | None, headers: dict[str, str]) -> Reply:
    """The answer with the part of the data that a Range header asks for, all of it without one."""
    headers["Accept-Ranges"] = "bytes"
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked or "")
    if not match or not (match[1] or match[2]):
        return Reply(200, data, headers)
    size = len(data)
    if match[1]:
        start, stop = int(match[1]), min(int(match[2] or size) + 1, size)
    else:
        start, stop = max(size - int(match[2]), 0), size
    if start >= stop:
        return Reply(416, b"", {**headers, "Content-Range": f"bytes */{size}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Reply(206, memoryview(data)[start:stop], headers)


# ---------------------------------------------------------------- HTTP


class Origin(ThreadingHTTPServer):
    """One port of the Hub: `answer` makes a Reply of a Request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: "HubServer", port: int, answer: Callable[[Request], Reply]):
        super().__init__(("127.0.0.1", port), Handler)
        self.hub, self.answer, self.connections = hub, answer, set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever, args=[0.05], daemon=True)

    def handle_error(self, request, address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, address)

    def close(self):
        """Stop, and cut the connections that clients keep open."""
        self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    """Reads a request, lets faults and hooks have their way, and sends the answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every small answer takes 40 ms

    def setup(self):
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self):
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, *args):
        """No log: `hub.requests` has it all."""

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def serve(self):
        hub, url = self.server.hub, urlsplit(self.path)
        number = hub.record(self.command, url.path, self.headers.get("Authorization"))
        fault = hub.fault and hub.fault(self.command, url.path, number)
        if fault == "drop":
            return self.cut()
        request = Request(
            self.command,
            url.path,
            parse_qs(url.query, keep_blank_values=True),
            self.headers,
            self.read_body(),
        )
        if isinstance(fault, int):
            headers = {"Retry-After": "0"} if fault in (429, 503) else {}
            return self.send(Reply(fault, {"error": f"scripted fault {fault}"}, headers))
        try:
            if hub.before:
                hub.before(self.command, url.path)
            reply = self.server.answer(request)
        except Refusal as refusal:
            reply = refusal.reply
        except Exception:
            traceback.print_exc()
            reply = Reply(500, {"error": traceback.format_exc()})
        return self.cut() if fault == "late" else self.send(reply)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve

    def cut(self):
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def send(self, reply: Reply):
        body, kind = reply.body, "application/octet-stream"
        if not isinstance(body, bytes | memoryview):
            body, kind = json.dumps(body, default=str).encode(), "application/json; charset=utf-8"
        self.send_response(reply.status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body)), **reply.headers}
        for name, value in headers.items():
            self.send_header(name, value.encode("ascii", "replace").decode())
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


# ---------------------------------------------------------------- the Hub


class HubServer:
    """The Hub, as a context manager; see the module's docstring."""

    def __init__(self, port: int = 0):
        self.tokens = deepcopy(TOKENS)
        self.requests: list[tuple[str, str]] = []  # method, path as it was sent, without the query
        self.authorizations: list[str | None] = []  # the header that went with each request
        self.fault: Callable[[str, str, int], int | str | None] | None = None
        self.before: Callable[[str, str], None] | None = None
        self.repos: dict[tuple[str, str], Repo] = {}
        self.moved: dict[tuple[str, str], str] = {}
        self.lock, self.log_lock = threading.RLock(), threading.Lock()
        self.api = Origin(self, port, self.answer)
        # Another origin: the client follows redirects within one, and would lose X-Repo-Commit.
        self.storage = Origin(self, 0, self.answer_storage)
        self.url = self.api.url

    def __enter__(self) -> "HubServer":
        self.api.thread.start()
        self.storage.thread.start()
        return self

    def __exit__(self, *exception):
        self.api.close()
        self.storage.close()

    @property
    def environment(self) -> dict[str, str]:
        """What a child process needs, besides an HF_HOME of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "hf_me",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        }

    def record(self, method: str, path: str, authorization: str | None) -> int:
        """Keep a request, and say which one it is, from 1."""
        with self.log_lock:
            self.requests.append((method, path))
            self.authorizations.append(authorization)
            return len(self.requests)

    # ------------------------------------------------ for tests: no request, no token

    def add(
        self,
        repo_id: str,
        files: dict[str, bytes | None],
        repo_type: str = "dataset",
        private: bool = False,
        commit: str | None = None,
        tags: Iterable[str] = (),
        message: str = "Add files",
    ) -> str:
        """Commit files to main, None deletes one, of a repository that is made if need be."""
        with self.lock:
            repo = self.repos.get((repo_type, repo_id))
            if not repo:
                repo = self.create(repo_type, repo_id, private, repo_id.partition("/")[0])
            repo.private |= private
            new = {
                path: Blob(data, upload_mode(path, len(data)) == "lfs")
                for path, data in files.items()
                if data is not None
            }
            old = repo.branches["main"].blobs
            blobs = {path: blob for path, blob in old.items() if path not in files} | new
            title, _, body = message.partition("\n\n")
            made = repo.commit("main", blobs, title, body, repo.author, commit)
            repo.tags |= dict.fromkeys(tags, made)
            return made.oid

    def commits(self, repo_id: str, repo_type: str = "dataset") -> list[Commit]:
        """The commits of main, newest first."""
        with self.lock:
            return self.repos[repo_type, repo_id].branches["main"].history()

    def tags(self, repo_id: str, repo_type: str = "dataset") -> dict[str, str]:
        """The commit id of each tag."""
        with self.lock:
            return {tag: c.oid for tag, c in self.repos[repo_type, repo_id].tags.items()}

    def files(
        self, repo_id: str, revision: str = "main", repo_type: str = "dataset"
    ) -> dict[str, bytes]:
        """The files of a revision."""
        with self.lock:
            return self.repos[repo_type, repo_id].resolve(revision).files

    def tag(self, repo_id: str, tag: str, commit: str = "main", repo_type: str = "dataset"):
        """Set a tag, or move it."""
        with self.lock:
            repo = self.repos[repo_type, repo_id]
            repo.tags[tag] = repo.resolve(commit)

    def copy(self, repo_id: str, to: str, repo_type: str = "dataset"):
        """Make another repository of the same commits, branches and tags."""
        with self.lock:
            copy = self.repos[repo_type, to] = deepcopy(self.repos[repo_type, repo_id])
            copy.id = to

    def delete(self, repo_id: str, repo_type: str = "dataset"):
        """Take a repository away."""
        with self.lock:
            del self.repos[repo_type, repo_id]

    # ------------------------------------------------ who may do what

    def create(self, kind: str, repo_id: str, private: bool, author: str) -> Repo:
        repo = self.repos[kind, repo_id] = Repo(kind, repo_id, private, author)
        self.moved.pop((kind, repo_id), None)
        repo.commit("main", {".gitattributes": Blob(GITATTRIBUTES, False)}, "initial commit")
        return repo

    def account(self, request: Request, needed: bool = True) -> dict | None:
        """The facts of the token, None without one; an unknown one is always refused."""
        scheme, _, token = (request.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and token:
            if token not in self.tokens:
                raise Refusal(401, "Invalid credentials in Authorization header")
            return self.tokens[token]
        if needed:
            raise Refusal(401, "Invalid username or password.")
        return None

    @staticmethod
    def permits(account: dict, repo_id: str, action: str, author: str = "") -> bool:
        """Whether a token may read or write what is private in the namespace of a repository."""
        namespace = repo_id.partition("/")[0]
        roles = {org["name"]: org.get("roleInOrg", "read") for org in account.get("orgs", ())}
        roles[account["name"]] = "admin"
        if namespace not in roles:
            return False
        if account["role"] == "fineGrained":
            wanted = {"repo.write"} | ({"repo.content.read"} if action == "read" else set())
            return any(
                scope["entity"]["name"] in (namespace, repo_id)
                and wanted & set(scope["permissions"])
                for scope in account.get("scoped", ())
            )
        if action == "read":
            return True
        mine = roles[namespace] == "contributor" and author in ("", account["name"])
        return account["role"] == "write" and (mine or roles[namespace] in ("write", "admin"))

    def repo(self, request: Request, kind: str, repo_id: str, write: bool = False) -> Repo:
        """A repository that the request may read, or write."""
        if new := self.moved.get((kind, repo_id)):
            where = request.path.replace(repo_id, new, 1)
            if query := urlencode(request.query, doseq=True):
                where += "?" + query
            raise Refusal(307, f"Moved to {new}", headers={"Location": where})
        account = self.account(request, needed=False)
        repo = self.repos.get((kind, repo_id))
        if not repo or (repo.private and not (account and self.permits(account, repo_id, "read"))):
            if account:
                raise Refusal(404, "Repository not found", "RepoNotFound")
            raise Refusal(401, "Invalid username or password.", "RepoNotFound")
        if write:
            self.check_write(self.account(request), repo_id, repo.author)
        return repo

    def check_write(self, account: dict, repo_id: str, author: str = ""):
        if not self.permits(account, repo_id, "write", author):
            message = "you must use a write token with the rights to write to this repository"
            raise Refusal(403, f"Forbidden: {message} ({repo_id})")

    # ------------------------------------------------ routes

    def answer(self, request: Request) -> Reply:
        """The answer of the API's port; one request at a time."""
        with self.lock:
            for method, pattern, route in ROUTES:
                match = pattern.fullmatch(request.path)
                if match and request.method in method.split():
                    groups = {k: unquote(v or "") for k, v in match.groupdict().items()}
                    if "kind" in groups:
                        groups["kind"] = groups["kind"].rstrip("s") or "model"
                    return route(self, request, **groups)
        code = "RepoNotFound" if request.path.startswith("/api/") else ""
        raise Refusal(404, f"Sorry, no {request.method} {request.path} here", code)

    def answer_storage(self, request: Request) -> Reply:
        """The answer of the storage's port, whose addresses are their own permission."""
        _, kind, namespace, name, oid = unquote(request.path).split("/")
        repo = self.repos.get((kind, f"{namespace}/{name}"))
        if not repo:
            raise Refusal(404, "No such repository")
        if request.method == "PUT":
            blob = Blob(request.body, True)
            if blob.sha256 != oid:
                raise Refusal(400, "The content does not have this SHA-256")
            with self.lock:
                repo.objects[oid] = blob
            return Reply()
        blob = repo.objects.get(oid)
        if not blob:
            raise Refusal(404, "No such object")
        return slice_of(blob.data, request.headers.get("Range"), {"ETag": f'"{oid}"'})

    def object_url(self, repo: Repo, oid: str) -> str:
        return f"{self.storage.url}/{repo.kind}/{quote(repo.id)}/{oid}"

    def paged(self, request: Request, kind: str, items: list) -> Reply:
        """A page of a list, with a Link to the next one."""
        size = int(request.query.get("limit", [PAGES[kind]])[0])
        start = int(request.query.get("cursor", ["0"])[0])
        headers = {}
        if start + size < len(items):
            query = {**request.query, "cursor": [start + size]}
            target = f"{self.url}{request.path}?{urlencode(query, doseq=True)}"
            headers["Link"] = f'<{target}>; rel="next"'
        return Reply(200, items[start : start + size], headers)

    def whoami(self, request: Request) -> Reply:
        account = self.account(request)
        token = {"displayName": "token", "role": account["role"]}
        if account["role"] == "fineGrained":
            token["fineGrained"] = {"global": [], "scoped": account.get("scoped", [])}
        name = account["name"]
        orgs = [{"type": "org", "fullname": org["name"], **org} for org in account.get("orgs", ())]
        auth = {"type": "access_token", "accessToken": token}
        facts = {"type": "user", "id": name, "name": name, "fullname": name, "isPro": False}
        return Reply(200, {**facts, "orgs": orgs, "auth": auth})

    def validate_yaml(self, request: Request) -> Reply:
        _, errors, warnings = check_card(request.json.get("content") or "")
        answer = {
            "errors": [{"message": message} for message in errors],
            "warnings": [{"message": message} for message in warnings],
        }
        return Reply(400 if errors else 200, answer)

    def target(self, request: Request) -> tuple[str, str]:
        """The kind and the id of the repository that a body of /api/repos names."""
        account, body = self.account(request), request.json
        namespace = body.get("organization") or account["name"]
        return body.get("type") or "model", f"{namespace}/{body['name']}"

    def repos_create(self, request: Request) -> Reply:
        account, (kind, repo_id) = self.account(request), self.target(request)
        self.check_write(account, repo_id)
        body = request.json
        exists = (kind, repo_id) in self.repos
        if not exists:
            private = body.get("visibility") == "private" or bool(body.get("private"))
            self.create(kind, repo_id, private, account["name"])
        repo = self.repos[kind, repo_id]
        facts = {"url": self.url + repo.path, "name": repo_id, "id": repo_id}
        if exists:
            raise Refusal(409, f"You already created this {kind} repo", **facts)
        return Reply(200, facts)

    def repos_delete(self, request: Request) -> Reply:
        kind, repo_id = self.target(request)
        self.repo(request, kind, repo_id, write=True)
        del self.repos[kind, repo_id]
        return Reply()

    def repos_move(self, request: Request) -> Reply:
        body = request.json
        kind, old, new = body.get("type") or "model", body["fromRepo"], body["toRepo"]
        repo = self.repo(request, kind, old, write=True)
        self.check_write(self.account(request), new)
        if (kind, new) in self.repos:
            raise Refusal(409, "A repository of this name exists already")
        self.repos[kind, new] = self.repos.pop((kind, old))
        repo.id = new
        self.moved.pop((kind, new), None)
        self.moved[kind, old] = new
        return Reply()

    def settings(self, request: Request, kind: str, repo_id: str) -> Reply:
        repo, body = self.repo(request, kind, repo_id, write=True), request.json
        if "visibility" in body or "private" in body:
            repo.private = body.get("visibility") == "private" or bool(body.get("private"))
        repo.gated = body.get("gated", repo.gated)
        return Reply(200, {"private": repo.private, "gated": repo.gated})

    def auth_check(self, request: Request, kind: str, repo_id: str, write: str) -> Reply:
        self.repo(request, kind, repo_id, write=bool(write))
        return Reply(200, {})

    def listing(self, request: Request, kind: str) -> Reply:
        account = self.account(request, needed=False)
        author = request.query.get("author", [""])[0]
        found = [
            self.facts(repo, repo.branches["main"], False)
            for (repo_kind, repo_id), repo in self.repos.items()
            if repo_kind == kind and author in ("", repo.namespace)
            if not repo.private or (account and self.permits(account, repo_id, "read"))
        ]
        return Reply(200, found)

    def facts(self, repo: Repo, commit: Commit, blobs: bool) -> dict:
        readme = commit.blobs.get("README.md")
        text = readme.data.decode("utf-8", "replace") if readme else ""
        card, errors, _ = check_card(text)  # `add` lets an unsound one in
        siblings = [
            {"rfilename": path, **({"blobId": b.oid, **b.described("sha256")} if blobs else {})}
            for path, b in sorted(commit.blobs.items())
        ]
        return {
            "_id": sha1(repo.id.encode()).hexdigest()[:24],
            "id": repo.id,
            "author": repo.namespace,
            "sha": commit.oid,
            "createdAt": commit.history()[-1].date,
            "lastModified": commit.date,
            "private": repo.private,
            "gated": repo.gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [] if errors else tags_of(card),
            "cardData": card,
            "siblings": siblings,
        }

    def info(self, request: Request, kind: str, repo_id: str, revision: str = "main") -> Reply:
        repo = self.repo(request, kind, repo_id)
        blobs = request.query.get("blobs", ["false"])[0].lower() in ("true", "1")
        return Reply(200, self.facts(repo, repo.resolve(revision or "main"), blobs))

    def preupload(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        repo = self.repo(request, kind, repo_id, write=True)
        old, files = repo.resolve(revision).blobs, []
        for file in request.json["files"]:
            blob = old.get(file["path"])
            entry = {"path": file["path"], "shouldIgnore": False}
            entry["uploadMode"] = upload_mode(file["path"], file["size"])
            if blob:  # by which the client sees that a file has not changed
                entry["oid"] = blob.sha256 if blob.lfs else blob.oid
            files.append(entry)
        return Reply(200, {"files": files, "commitOid": repo.resolve(revision).oid})

    def lfs_batch(self, request: Request, kind: str, repo_id: str) -> Reply:
        body = request.json
        upload = body.get("operation") == "upload"
        repo, objects = self.repo(request, kind, repo_id, write=upload), []
        for wanted in body["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            href = self.object_url(repo, wanted["oid"])
            if not upload:
                entry["actions"] = {"download": {"href": href}}
            elif wanted["oid"] not in repo.objects:
                verify = f"{self.url}{quote(repo.path)}.git/info/lfs/verify"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": verify}}
            objects.append(entry)
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        return Reply(200, {"transfer": "basic", "objects": objects}, headers)

    def lfs_verify(self, request: Request, kind: str, repo_id: str) -> Reply:
        blob = self.repo(request, kind, repo_id, write=True).objects.get(request.json["oid"])
        if not blob or len(blob.data) != request.json["size"]:
            raise Refusal(404, "No such object")
        return Reply(200, {})

    def commit(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        repo = self.repo(request, kind, repo_id, write=True)
        if "create_pr" in request.query:
            raise Refusal(400, "This Hub has no pull requests")
        head = repo.branches.get(revision)
        if not head:
            repo.resolve(revision)
            raise Refusal(400, f"{revision} is not a branch")
        try:
            steps = [json.loads(line) for line in request.body.splitlines() if line.strip()]
        except ValueError:
            raise Refusal(400, "Invalid NDJSON") from None
        header = next((step["value"] for step in steps if step["key"] == "header"), None)
        if not header or not header.get("summary"):
            raise Refusal(400, "A commit needs a summary")
        if header.get("parentCommit") not in (None, head.oid):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        blobs = dict(head.blobs)
        for step in steps:
            if step["key"] != "header":
                self.apply(repo, blobs, step["key"], step["value"])
        readme = blobs.get("README.md")
        if readme and readme is not head.blobs.get("README.md"):
            _, errors, _ = check_card(readme.data.decode("utf-8", "replace"))
            if errors:
                raise Refusal(400, "Invalid metadata in README.md: " + "; ".join(errors))
        author, text = self.account(request)["name"], header.get("description") or ""
        made = repo.commit(revision, blobs, header["summary"], text, author)
        url = f"{self.url}{repo.path}/commit/{made.oid}"
        return Reply(200, {"success": True, "commitOid": made.oid, "commitUrl": url})

    @staticmethod
    def apply(repo: Repo, blobs: dict[str, Blob], key: str, value: dict):
        """One step of a commit."""
        path = value["path"]
        if key == "file":
            content = value.get("content", "")
            encoded = value.get("encoding") == "base64"
            blobs[path] = Blob(b64decode(content) if encoded else content.encode(), False)
        elif key == "lfsFile":
            if value["oid"] not in repo.objects:
                raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {path}")
            blobs[path] = repo.objects[value["oid"]]
        elif key in ("deletedFile", "deletedFolder"):
            if key == "deletedFolder":
                gone = [name for name in blobs if name.startswith(path.rstrip("/") + "/")]
            else:
                gone = [name for name in blobs if name == path]
            if not gone:
                raise Refusal(404, f"{path} does not exist", "EntryNotFound")
            for name in gone:
                del blobs[name]
        else:
            raise Refusal(400, f"Unknown step of a commit: {key}")

    def tree(self, request: Request, kind: str, repo_id: str, revision: str, path: str) -> Reply:
        commit = self.repo(request, kind, repo_id).resolve(revision)
        asked = {key: values[0].lower() in ("true", "1") for key, values in request.query.items()}
        entries, path = entries_of(commit, asked.get("expand", False)), path.strip("/")
        if path and entries.get(path, {}).get("type") != "directory":
            headers = {"X-Repo-Commit": commit.oid}
            raise Refusal(404, f"{path} does not exist", "EntryNotFound", headers=headers)
        start = f"{path}/" if path else ""
        below = [
            entry
            for name, entry in entries.items()
            if name.startswith(start)
            if asked.get("recursive") or "/" not in name[len(start) :]
        ]
        return self.paged(request, "tree", below)

    def paths_info(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        commit = self.repo(request, kind, repo_id).resolve(revision)
        if "json" in request.headers.get("Content-Type", ""):
            paths, expand = request.json["paths"], request.json.get("expand", False)
        else:
            form = parse_qs(request.body.decode())
            paths, expand = form.get("paths", []), form.get("expand", [""])[0].lower() == "true"
        entries = entries_of(commit, expand)
        return Reply(200, [entries[path] for path in paths if path in entries])

    def resolve(self, request: Request, kind: str, repo_id: str, revision: str, path: str) -> Reply:
        repo = self.repo(request, kind, repo_id)
        commit = repo.resolve(revision)
        headers = {"X-Repo-Commit": commit.oid}
        blob = commit.blobs.get(path)
        if not blob:
            raise Refusal(404, f"{path} does not exist", "EntryNotFound", headers=headers)
        if not blob.lfs:
            headers["ETag"] = f'"{blob.oid}"'
            return slice_of(blob.data, request.headers.get("Range"), headers)
        headers |= {
            "Location": self.object_url(repo, blob.sha256),
            "X-Linked-Size": str(len(blob.data)),
            "X-Linked-Etag": f'"{blob.sha256}"',
        }
        return Reply(302, b"", headers)

    def refs(self, request: Request, kind: str, repo_id: str) -> Reply:
        repo = self.repo(request, kind, repo_id)

        def listed(refs: dict[str, Commit], folder: str) -> list[dict]:
            return [
                {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": commit.oid}
                for name, commit in refs.items()
            ]

        answer = {"branches": listed(repo.branches, "heads"), "tags": listed(repo.tags, "tags")}
        return Reply(200, {**answer, "converts": [], "pullRequests": []})

    def history(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        commits = self.repo(request, kind, repo_id).resolve(revision).history()
        listed = [
            {**commit.summary(), "message": commit.message, "authors": [{"user": commit.author}]}
            for commit in commits
        ]
        return self.paged(request, "commits", listed)

    def tag_refs(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        repo = self.repo(request, kind, repo_id, write=True)
        if request.method == "DELETE":
            if revision not in repo.tags:
                raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            del repo.tags[revision]
            return Reply()
        commit, tag = repo.resolve(revision), request.json["tag"]
        if tag in repo.tags:
            raise Refusal(409, "Tag reference exists already")
        repo.tags[tag] = commit
        return Reply(200, {})

    def branch_refs(self, request: Request, kind: str, repo_id: str, revision: str) -> Reply:
        repo = self.repo(request, kind, repo_id, write=True)
        if request.method == "DELETE":
            if revision == "main":
                raise Refusal(403, "The branch main cannot be deleted")
            if revision not in repo.branches:
                raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            del repo.branches[revision]
            return Reply()
        if revision.startswith("refs/"):
            raise Refusal(400, f"Invalid reference for a branch: {revision}")
        commit = repo.resolve(request.json.get("startingPoint") or "main")
        if revision in repo.branches:
            raise Refusal(409, "Branch reference exists already")
        repo.branches[revision] = commit
        return Reply(200, {})


API = "/api/(?P<kind>models|datasets|spaces)/(?P<repo_id>[^/]+/[^/]+)"
WEB = "/(?:(?P<kind>datasets|spaces)/)?(?P<repo_id>[^/]+/[^/]+)"
REV = "/(?P<revision>[^/]+)"
ROUTES = [
    (methods, re.compile(pattern), route)
    for methods, pattern, route in [
        ("GET", "/api/whoami-v2", HubServer.whoami),
        ("POST", "/api/validate-yaml", HubServer.validate_yaml),
        ("POST", "/api/repos/create", HubServer.repos_create),
        ("DELETE", "/api/repos/delete", HubServer.repos_delete),
        ("POST", "/api/repos/move", HubServer.repos_move),
        ("GET", "/api/(?P<kind>models|datasets|spaces)", HubServer.listing),
        ("GET", API, HubServer.info),
        ("GET", f"{API}/revision{REV}", HubServer.info),
        ("POST", f"{API}/preupload{REV}", HubServer.preupload),
        ("POST", f"{API}/commit{REV}", HubServer.commit),
        ("GET", f"{API}/tree{REV}(?P<path>/.*)?", HubServer.tree),
        ("POST", f"{API}/paths-info{REV}", HubServer.paths_info),
        ("GET", f"{API}/refs", HubServer.refs),
        ("GET", f"{API}/commits{REV}", HubServer.history),
        ("POST DELETE", f"{API}/tag{REV}", HubServer.tag_refs),
        ("POST DELETE", f"{API}/branch{REV}", HubServer.branch_refs),
        ("PUT", f"{API}/settings", HubServer.settings),
        ("GET", f"{API}/auth-check(?P<write>/write)?", HubServer.auth_check),
        ("GET HEAD", f"{WEB}/resolve{REV}/(?P<path>.+)", HubServer.resolve),
        ("POST", rf"{WEB}\.git/info/lfs/objects/batch", HubServer.lfs_batch),
        ("POST", rf"{WEB}\.git/info/lfs/verify", HubServer.lfs_verify),
    ]
]


def main(port: int, with_parent: bool):
    """Serve until SIGTERM, SIGINT or, if asked to, the end of the parent process."""
    stopped, parent = threading.Event(), os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with HubServer(port) as hub:
        print(json.dumps({"url": hub.url}), flush=True)
        while not stopped.wait(0.2):
            if with_parent and os.getppid() != parent:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--with-parent", action="store_true", help="end with it")
    main(**vars(parser.parse_args()))
