"""What `python pipelines/sao.py` holds out: stops, full disks, damaged stores, odd servers."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import kills
from tests.conftest import ROOT
from tests.pipelines.test_sao import (
    answered,
    arguments,
    data_names,
    in_process,
    ledger_of,
    pairs_of,
    start,
    wait_until,
)
from tests.servers.model_server import ModelServer, server_process

N = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with ModelServer() as server:
        command = [sys.executable, *map(str, arguments(server.url, folder, n=N))]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def one_line(process):
    """The only line that says what is wrong, which is the last."""
    lines = process.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert "Traceback" not in process.stderr
    return lines[-1]


# Stops: `python -m benchmarks.kills` is the whole sweep

linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are found in /proc")


@linux
def test_stops(tmp_path):
    """While libraries load, while workers start, while requests are out, while cards are made."""
    stops = [
        ("Ctrl-C", 0.1),
        ("engine", 0.6),
        ("worker", 0.4),
        ("SIGTERM", 0.6),
        ("kill -9", 0.9),
    ]
    done = kills.sweep(stops, prompts=10, jobs=3, folder=tmp_path)
    assert [str(one) for one in done if one.faults] == []


@linux
def test_whichever_worker_dies_the_run_ends(tmp_path, undisturbed):
    """Also the process of distilabel's queues, which is the first that it starts."""
    log, environment = tmp_path / "requests.jsonl", {**os.environ, kills.MARK: "any worker"}
    with server_process("--delay", 0.05, "--log", log) as url:
        command = [sys.executable]
        command += map(str, arguments(url, tmp_path / "run", "--concurrency", 2, n=N))
        for number in (0, 1, 2, -1):
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
            )
            before = kills.answered(log).total()
            assert wait_until(lambda so_far=before: kills.answered(log).total() > so_far + 4, 60)
            os.kill(kills.workers_of(process.pid, "any worker")[number], signal.SIGKILL)
            _, said = process.communicate(timeout=20)
            assert process.returncode == 1 and "error: the pipeline ended with status" in said
            assert wait_until(lambda: not kills.marked("any worker"), 10)
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert data_names(tmp_path / "run") == data_names(undisturbed)


# Disks


class Disk:
    """A small filesystem that only a shell and what it runs can see, and we by way of it.

    A mount namespace of its own needs no root, and takes the filesystem with it when it ends.
    """

    def __init__(self, folder):
        self.seen = folder / "disk"
        self.seen.mkdir()
        self.said = folder / "stderr"
        for flags in ("-rm", "-m"):
            self.shell = subprocess.Popen(
                ["unshare", flags, "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            if self._do(f"mount -t tmpfs -o size=20m tmpfs {shlex.quote(str(self.seen))}") == 0:
                break
            self.close()
        else:
            pytest.skip("this machine lets nobody mount a filesystem")
        self.path = Path(f"/proc/{self.shell.pid}/root{self.seen}")

    def close(self):
        self.shell.stdin.close()
        self.shell.wait(10)
        self.shell.stdout.close()

    def _do(self, line):
        try:
            print(f"{line}; echo $?", file=self.shell.stdin, flush=True)
            return int(self.shell.stdout.readline() or 1)
        except BrokenPipeError:  # there was no such namespace
            return 1

    def let(self, mode):
        """Make it read-only (`ro`), or not (`rw`)."""
        assert self._do(f"mount -o remount,bind,{mode} {shlex.quote(str(self.seen))}") == 0

    def fill(self, leave=0):
        """Leave so many bytes of space, or none."""
        state = os.statvfs(self.path)
        with (self.path / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            for _ in range((state.f_bavail * state.f_frsize - leave) // 4096 + (not leave)):
                filler.write(b"x" * 4096)

    def clear(self):
        (self.path / "filler").unlink()

    def python(self, *command):
        """Run the command, and return the finished process."""
        line = shlex.join([sys.executable, *map(str, command)])
        status = self._do(f"cd {shlex.quote(str(ROOT))} && {line} 2> {shlex.quote(str(self.said))}")
        return subprocess.CompletedProcess(command, status, "", self.said.read_text())


@pytest.fixture
def disk(tmp_path):
    made = Disk(tmp_path)
    yield made
    made.close()


FULL_DISK = (  # the store says so, or whoever else came first
    "run/requests/store.sqlite cannot be written: database or disk is full",
    "run cannot be written: No space left on device; once there is space, the same command goes on",
)


@pytest.mark.parametrize(
    "when",
    [
        lambda run, server: len(server.requests) >= 10,
        lambda run, server: (run / ".new").exists(),
    ],
    ids=["while answers are stored", "while the dataset is written"],
)
def test_a_disk_that_fills_up(disk, undisturbed, when):
    run = disk.path / "run"
    with ModelServer(delay=0.05) as server, ThreadPoolExecutor() as pool:
        command = arguments(server.url, disk.seen / "run", "--concurrency", 4, n=N)
        filled = pool.submit(lambda: wait_until(lambda: when(run, server), 60) and disk.fill())
        stopped = disk.python(*command)
        filled.result()
        assert stopped.returncode == 1
        assert one_line(stopped).endswith(FULL_DISK)
        assert {path.name for path in run.iterdir()} == {"config.yaml", "requests", "run.log"}
        disk.clear()
        assert disk.python(*command).returncode == 0
        assert server.counts()["repeats"] <= 4
    assert data_names(run) == data_names(undisturbed)


def test_a_disk_that_is_too_small_for_the_workers(disk, undisturbed):
    disk.fill(leave=520_000)
    with ModelServer() as server:
        command = arguments(server.url, disk.seen / "run", n=N)
        stopped = disk.python(*command)
        assert stopped.returncode == 1
        assert one_line(stopped).endswith(FULL_DISK)
        disk.clear()
        assert disk.python(*command).returncode == 0
    assert data_names(disk.path / "run") == data_names(undisturbed)


def test_a_disk_that_is_read_only(disk, undisturbed):
    disk.let("ro")
    with ModelServer() as server:
        command = arguments(server.url, disk.seen / "run", n=N)
        refused = disk.python(*command)
        assert refused.returncode == 1
        line = f"error: {disk.seen}/run cannot be written: Read-only file system"
        assert refused.stderr == line + "\n"
        assert server.requests == []
        disk.let("rw")
        assert disk.python(*command).returncode == 0
    assert data_names(disk.path / "run") == data_names(undisturbed)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(tmp_path, capsys):
    (tmp_path / "run").mkdir(mode=0o555)
    command = ["--model", "scripted", "--base-url", "http://127.0.0.1:9/v1"]
    assert in_process(*command, "--output-dir", tmp_path / "run") == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path}/run cannot be written: Permission denied\n"
    )


def test_a_store_that_is_cut_beside_its_dataset(python, tmp_path, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    store = folder / "requests/store.sqlite"
    os.truncate(store, store.stat().st_size // 2)
    with ModelServer() as server:
        command = arguments(server.url, folder, n=N)
        assert f"{store} is damaged" in one_line(python(*command, status=1))
        assert "finished already: nothing was asked" in python(*command).stderr
        assert len(server.requests) == 1  # is this the same model?
    assert data_names(folder) == data_names(undisturbed)


def test_a_store_that_is_cut_in_half(python, tmp_path, undisturbed):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    (folder / "README.md").unlink()
    store = folder / "requests/store.sqlite"
    os.truncate(store, store.stat().st_size // 2)
    half = store.read_bytes()
    with ModelServer() as server:
        command = arguments(server.url, folder, n=N)
        line = one_line(python(*command, status=1))
        assert line.startswith(f"error: {store} is damaged (")
        assert "now lies aside as store.sqlite.damaged-1; the same command starts again" in line
        assert server.requests == []
        python(*command)
        assert server.counts()["distinct"] == 5 * N + 1  # nothing of it was used
    assert store.with_name("store.sqlite.damaged-1").read_bytes() == half
    assert data_names(folder) == data_names(undisturbed)


# Two commands on one folder


def test_of_commands_that_start_together_one_works(tmp_path, undisturbed):
    log = tmp_path / "requests.jsonl"
    with server_process("--delay", 0.1, "--log", log) as url:
        command = arguments(url, tmp_path / "run", n=N)
        several = [start(command) for _ in range(3)]
        ends = [(process.communicate(timeout=60)[1], process.returncode) for process in several]
    assert sorted(status for _, status in ends) == [0, 1, 1]
    for said, status in ends:
        if status:
            assert said == f"error: another command is at work in {tmp_path / 'run'}\n"
    assert set(answered(log).values()) == {1}
    assert data_names(tmp_path / "run") == data_names(undisturbed)


# Servers that are wrong about one request of many

# The command with short waits between tries: it is about what happens, not about how long.
QUICK = """
import runpy, sys
from selfsynth.serving import client
client._LONGEST_WAIT = 0.05
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("hang", "no whole answer within 1 s (3 tries)"),
        ("trickle", "no whole answer within 1 s (3 tries)"),
        ("huge", "an answer of more than 8 MB (3 tries)"),
        ("bad_utf8", "not a chat completion (UnicodeDecodeError: "),
    ],
)
def test_a_request_that_gets_no_answer(python, tmp_path, undisturbed, fault, said):
    folder, ledger = tmp_path / "run", ledger_of(undisturbed)
    wrong = re.escape(ledger[4]["prompt"])
    with ModelServer(odd=[("response", wrong, fault)]) as server:
        command = arguments(server.url, folder, "--timeout", 1, n=N)
        ended = python("-c", QUICK, *command)
    assert re.search(rf"^2 requests failed, the last one: {re.escape(said)}", ended.stderr, re.M)
    found = ledger_of(folder)
    assert [row["reason"] for row in found] == [
        "request_failed" if row["index"] == 4 else row["reason"] for row in ledger
    ]
    assert found[:4] + found[5:] == ledger[:4] + ledger[5:]
    assert len(pairs_of(folder)) == sum(row["status"] == "kept" for row in found)
    if fault != "hang":
        return
    with ModelServer() as server:  # the same command asks again for what is missing alone
        python(*command[:4], server.url, *command[5:])
        assert len(server.requests) == 1 + 4
    assert data_names(folder) == data_names(undisturbed)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (lambda body: "hang", "no whole answer within 0.5 s (3 tries)"),
        (lambda body: "trickle", "no whole answer within 0.5 s (3 tries)"),
        (lambda body: "huge", "an answer of more than 8 MB (3 tries)"),
        (lambda body: "bad_utf8", "not a chat completion (UnicodeDecodeError: "),
    ],
    ids=["hang", "trickle", "huge", "bad_utf8"],
)
def test_a_first_question_that_gets_no_answer(tmp_path, capsys, script, said):
    with ModelServer(script=script) as server:
        command = arguments(server.url, tmp_path / "run", "--timeout", 0.5)[1:]
        began = time.monotonic()
        assert in_process(*command) == 1
        assert time.monotonic() - began < 20
        assert capsys.readouterr().err.startswith(f"error: scripted at {server.url}: {said}")


def test_a_server_that_takes_connections_and_says_nothing(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        command = arguments(url, tmp_path / "run", "--timeout", 0.5)[1:]
        began = time.monotonic()
        assert in_process(*command) == 1
        assert time.monotonic() - began < 5
    assert capsys.readouterr().err == f"error: scripted at {url}: no answer within 0.5 s\n"


def test_a_server_that_hangs_for_good_ends_the_run(python, tmp_path, undisturbed):
    """Not after ten tries of every request, but after three of twenty."""
    with ModelServer(odd=[("response", "", "hang")]) as server:
        command = arguments(server.url, tmp_path / "run", "--timeout", 0.5, n=N)
        line = one_line(python(*command, status=1))
        assert line == (
            "error: 20 requests in a row failed, the last one: no whole answer within 0.5 s "
            "(3 tries); the same command asks them again"
        )
    with ModelServer() as server:
        python(*command[:4], server.url, *command[5:])
    assert data_names(tmp_path / "run") == data_names(undisturbed)


def test_a_server_that_becomes_another_model(python, tmp_path, undisturbed):
    wrong = re.escape(ledger_of(undisturbed)[4]["prompt"])
    with ModelServer(odd=[("response", wrong, "wrong_model")]) as server:
        command = arguments(server.url, tmp_path / "run", n=N)
        line = one_line(python(*command, status=1))
        assert line == (
            f"error: {server.url} answers as 'another-model', where it was 'scripted': another "
            "model needs another --output-dir"
        )
    assert not (tmp_path / "run/README.md").exists()
    with ModelServer() as server:
        python(*command[:4], server.url, *command[5:])
    assert data_names(tmp_path / "run") == data_names(undisturbed)
