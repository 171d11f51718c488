"""Engines start as they should, say in one line why not, and never outlive the command."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from selfsynth.errors import SelfsynthError
from selfsynth.serving import Client, Request, engines, find, serve

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SPEC = f"some/model@{COMMIT}"

# What `vllm serve` is to its user: a server with a worker process, whose key comes from the
# environment. HOW says how it behaves; it notes its process ids and what it was given.
VLLM = f"""#!{sys.executable}
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

how, key, arguments = os.environ["HOW"], os.environ["VLLM_API_KEY"], sys.argv[1:]
print("INFO loading", arguments[1], flush=True)
if how == "dies":
    print("ValueError: an error: no such architecture", "Traceback ends", sep="\\n", flush=True)
    sys.exit(3)
if how == "silent":
    os._exit(1)
if how == "stubborn":  # and so is the worker, which inherits it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen(["sleep", "300"])
pids = {{"guard": os.getppid(), "vllm": os.getpid(), "worker": worker.pid}}
with open(os.environ["NOTES"] + ".part", "w") as notes:
    json.dump({{"pids": pids, "arguments": arguments, "key": key}}, notes)
os.replace(os.environ["NOTES"] + ".part", os.environ["NOTES"])


class Handler(BaseHTTPRequestHandler):
    def say(self, body, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        pages = {{"/health": "", "/version": {{"version": "0.99"}}, "/v1/models": {{"data": []}}}}
        self.say(pages.get(self.path), 200 if self.path in pages else 404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {{key}}":
            return self.say({{"error": "Unauthorized"}}, 401)
        message = {{"role": "assistant", "content": "from the stand-in"}}
        self.say({{"model": body["model"], "choices": [{{"message": message}}]}})


port = int(arguments[arguments.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def executable(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine with vllm and a GPU, and a proxy that leads nowhere."""
    executable(tmp_path / "bin" / "vllm", VLLM)
    executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: a stand-in'\n")
    (tmp_path / "bin" / "sleep").symlink_to("/bin/sleep")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HOW", "good")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def serving(folder, spec=SPEC):
    return serve(find(spec), 8, 4096, folder / "run.log")


def notes(folder):
    return json.loads((folder / "notes").read_text())


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # it has just gone, or there is no /proc
        return not Path("/proc/self").exists()


def gone(pids, seconds):
    """Which of these processes still run after so many seconds; none is what we want."""
    deadline = time.monotonic() + seconds
    while (left := [name for name, pid in pids.items() if alive(pid)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return left


def ask(end):
    """The endpoint's answer to one request."""

    async def run():
        async with Client(end, None, asyncio.Semaphore(1), first_wait=0.01) as client:
            await client.probe()
            return await client.complete(
                [Request([{"role": "user", "content": "a"}], 9, 0.6, 1.0, 1)]
            )

    (answer,) = asyncio.run(run())
    return answer


# ---------------------------------------------------------------- vllm


def test_vllm_serves(machine):
    with serving(machine) as end:
        seen = notes(machine)
        port = end.urls[0].removeprefix("http://127.0.0.1:").removesuffix("/v1")
        assert seen["arguments"][:2] == ["serve", "some/model"]
        options = dict(zip(seen["arguments"][2::2], seen["arguments"][3::2], strict=True))
        assert options == {
            "--host": "127.0.0.1",
            "--port": port,
            "--generation-config": "vllm",
            "--max-logprobs": "20",
            "--revision": COMMIT,
            "--tokenizer-revision": COMMIT,
        }
        assert "--trust-remote-code" not in seen["arguments"]
        assert end.api_key == seen["key"] and len(seen["key"]) == 32
        assert seen["key"] not in repr(end) + " ".join(seen["arguments"])
        assert (end.engine, end.name, end.model) == ("vllm 0.99", "some/model", SPEC)
        answer = ask(end)
        assert (answer.text, answer.model) == ("from the stand-in", "some/model")
        assert all(alive(pid) for pid in seen["pids"].values())
    assert gone(seen["pids"], 0.1) == []
    assert "INFO loading some/model" in (machine / "run.log").read_text()


def test_vllm_serves_a_folder(machine):
    (machine / "model").mkdir()
    (machine / "model" / "config.json").write_text('{"max_position_embeddings": 32768}')
    with serve(find(str(machine / "model")), 8, 4096, machine / "run.log", share=0.5):
        arguments = notes(machine)["arguments"]
    assert arguments[:2] == ["serve", str(machine / "model")]
    assert "--revision" not in arguments
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert (options["--max-model-len"], options["--gpu-memory-utilization"]) == ("4096", "0.45")


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ('{"max_position_embeddings": 2048}', 2048),
        ('{"text_config": {"max_position_embeddings": 2048}}', 2048),
        ("{}", None),
        ("[]", None),
        ("not JSON", None),
        ('{"max_position_embeddings": "many"}', None),
        ('{"text_config": null}', None),
        (None, None),
    ],
)
def test_longest_context(config, longest, tmp_path):
    if config:
        (tmp_path / "config.json").write_text(config)
    assert engines.longest_context(str(tmp_path), None) == longest


def test_longest_context_without_a_hub():
    """A Hub that cannot be reached is not waited for."""
    began = time.monotonic()
    assert engines.longest_context("some/model", COMMIT) is None
    assert time.monotonic() - began < 6


@pytest.mark.parametrize(
    ("take_away", "instead", "words"),
    [
        ("vllm", None, "needs vllm and a GPU, and no vllm is here"),
        ("nvidia-smi", None, "needs a GPU, and none was found"),
        ("nvidia-smi", "#!/bin/sh\nexit 9\n", "needs a GPU, and none was found"),
    ],
)
def test_without_vllm_or_a_gpu(take_away, instead, words, machine):
    (machine / "bin" / take_away).unlink()
    if instead:
        executable(machine / "bin" / take_away, instead)
    with pytest.raises(SelfsynthError) as caught, serving(machine):
        pass
    line = str(caught.value)
    assert line.startswith("serving some/model ") and words in line and "\n" not in line
    assert line.endswith("give a GGUF file, or a server's --base-url")
    assert not (machine / "notes").exists()


def test_a_gpu_of_another_maker(machine):
    (machine / "bin" / "nvidia-smi").rename(machine / "bin" / "rocm-smi")
    assert engines.gpu_found()


@pytest.mark.parametrize(
    ("how", "line"),
    [("dies", "ValueError: an error: no such architecture"), ("silent", "INFO loading some/model")],
)
def test_an_early_death_is_one_line(how, line, machine, monkeypatch):
    monkeypatch.setenv("HOW", how)
    log = machine / "run.log"
    log.write_text("an error of the day before\n")
    with pytest.raises(SelfsynthError) as caught, serving(machine):
        pass
    assert str(caught.value) == f"vllm cannot serve some/model: {line} (see {log})"


class Boom(Exception):
    pass


def test_leaving_by_an_error_ends_it_too(machine):
    with pytest.raises(Boom), serving(machine):
        raise Boom
    assert gone(notes(machine)["pids"], 0.1) == []


def test_what_ignores_sigterm_is_killed(machine, monkeypatch):
    monkeypatch.setenv("HOW", "stubborn")
    with serving(machine):
        pids = notes(machine)["pids"]
        began = time.monotonic()
    assert gone(pids, 1) == []
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["vllm", "guard"])
def test_an_engine_that_dies_is_noticed(name, machine):
    with serving(machine) as end:
        pids = notes(machine)["pids"]
        os.kill(pids[name], signal.SIGKILL)
        assert gone({"vllm": pids["vllm"]}, 5) == []
        with pytest.raises(
            SelfsynthError, match=r"the engine of some/model@.* died: see .*run\.log"
        ):
            ask_until_it_is_noticed(end)
    if name == "guard":  # which can then not look after the worker
        os.kill(pids["worker"], signal.SIGKILL)
    assert gone(pids, 5) == []


def ask_until_it_is_noticed(end):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        end.check_running()
        time.sleep(0.02)


COMMAND = """
import signal, sys, time
from pathlib import Path
from tests.selfsynth.serving.test_engines import serving

try:
    # A shell's background job starts with SIGINT ignored, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with serving(Path(sys.argv[1])):
        print("serving", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    pass
"""


@pytest.mark.parametrize(
    ("how", "number", "seconds"),
    [("good", signal.SIGKILL, 5), ("stubborn", signal.SIGKILL, 10), ("good", signal.SIGINT, 5)],
)
def test_nothing_outlives_the_command(how, number, seconds, machine, monkeypatch):
    monkeypatch.setenv("HOW", how)
    command = [sys.executable, "-c", COMMAND, str(machine)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "serving\n"
        pids = notes(machine)["pids"]
        assert all(alive(pid) for pid in pids.values())
        os.kill(process.pid, number)
    assert gone(pids, seconds) == []


def test_a_command_that_is_killed_while_its_engine_starts(machine):
    """The guard looks after a vllm that does not answer yet, too."""
    vllm = VLLM.replace("port = int", "time.sleep(60); port = int")
    executable(machine / "bin" / "vllm", vllm)
    command = [sys.executable, "-c", COMMAND, str(machine)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 20
        while not (machine / "notes").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert gone(notes(machine)["pids"], 5) == []


# ---------------------------------------------------------------- llama.cpp


@pytest.mark.parametrize(
    "data", [b"GGUF", b"GGUF" + b"\xff" * 200, b"GGUF\3\0\0\0" + b"\0" * 100], ids=len
)
def test_a_file_that_llama_cannot_read_is_one_line(data, machine):
    pytest.importorskip("xllamacpp")
    (machine / "bad.gguf").write_bytes(data)
    with pytest.raises(SelfsynthError) as caught, serving(machine, str(machine / "bad.gguf")):
        pass
    line = str(caught.value)
    assert line.startswith("llama.cpp cannot serve bad.gguf: ")
    assert line.endswith(f"(see {machine / 'run.log'})") and "\n" not in line


def test_without_xllamacpp(machine, monkeypatch):
    (machine / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with (
        pytest.raises(SelfsynthError, match=r"pip install 'selfsynth\[embedded\]'"),
        serving(machine, str(machine / "some.gguf")),
    ):
        pass
