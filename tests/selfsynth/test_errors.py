"""One line and an exit status for whatever ends a command."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer

from selfsynth import errors
from selfsynth.errors import STOPPED, DebugOption, SelfsynthError, UsageError, command, report

ROOT = Path(__file__).parents[2]


class GateFailed(SelfsynthError):
    exit_status = 3


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (SelfsynthError("no server at x"), 1, "error: no server at x"),
        (UsageError("--seed must be a number"), 2, "error: --seed must be a number"),
        (GateFailed("too low"), 3, "error: too low"),
        (SelfsynthError("two\n  lines\tand  blanks "), 1, "error: two lines and blanks"),
        (KeyboardInterrupt(), 130, "error: stopped"),
        (typer.Abort(), 130, "error: stopped"),
        (typer.BadParameter("no good"), 2, "error: Invalid value: no good"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: [Errno 28] No space left on"),
        (
            FileNotFoundError(2, "No such file", "x.txt"),
            1,
            "error: [Errno 2] No such file: 'x.txt'",
        ),
        (PermissionError(13, "Permission denied"), 1, "error: [Errno 13] Permission denied"),
        (ValueError("x\ny"), 1, "error: ValueError: x y (a fault of selfsynth; --debug shows"),
        (KeyError("x"), 1, "error: KeyError: 'x' (a fault of selfsynth"),
        (AssertionError(), 1, "error: AssertionError: (a fault of selfsynth"),
        (MemoryError(), 1, "error: MemoryError: (a fault of selfsynth"),
        (SystemExit(0), 0, None),
        (SystemExit(None), 0, None),
        (SystemExit(4), 4, None),
        (typer.Exit(0), 0, None),
        (typer.Exit(3), 3, None),
    ],
)
def test_report(capsys, error, status, line):
    assert report(error) == status
    said, complaint = capsys.readouterr()
    assert said == ""  # stdout is for results
    if line is None:
        assert complaint == ""
    else:
        assert complaint.startswith(line)
        assert complaint.count("\n") == 1


def test_statuses():
    assert (SelfsynthError.exit_status, UsageError.exit_status, STOPPED) == (1, 2, 130)
    assert issubclass(UsageError, SelfsynthError)


# ---------------------------------------------------------------- through a command line

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(what: str, number: int = 0, debug: DebugOption = False) -> None:
    """Do what is asked for, which is mostly to fail."""
    raised = {
        "own": SelfsynthError("no server"),
        "usage": UsageError("cannot mean that"),
        "gate": GateFailed("too low"),
        "exit": typer.Exit(4),
        "quiet": typer.Exit(),
        "abort": typer.Abort(),
        "stop": KeyboardInterrupt(),
        "disk": OSError(errno.ENOSPC, "No space left on device"),
        "fault": ZeroDivisionError("division by zero"),
        "system": SystemExit(5),
    }
    if what in raised:
        raise raised[what]
    print("done")


@pytest.fixture
def call(monkeypatch, capsys):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(errors, "_show_tracebacks", False)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["app", *words])
        try:
            command(app)()
            status = 0
        except SystemExit as end:
            status = end.code or 0
        return status, *capsys.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["fine"], 0, None),
        (["quiet"], 0, None),
        (["own"], 1, "error: no server\n"),
        (["usage"], 2, "error: cannot mean that\n"),
        (["gate"], 3, "error: too low\n"),
        (["exit"], 4, None),
        (["system"], 5, None),
        (["abort"], 130, "error: stopped\n"),
        (["stop"], 130, "error: stopped\n"),
        (["disk"], 1, "error: [Errno 28] No space left on device\n"),
        (["fault"], 1, "error: ZeroDivisionError: division by zero (a fault of selfsynth; --debug"),
        ([], 2, "error: "),
        (["fine", "--unknown"], 2, "error: "),
        (["fine", "--number", "x"], 2, "error: "),
        (["fine", "more"], 2, "error: "),
        (["fine", "--number"], 2, "error: "),
    ],
)
def test_every_end(call, words, status, line):
    ended, said, complaint = call(*words)
    assert ended == status
    assert said == ("done\n" if words == ["fine"] else "")
    if line is None:
        assert complaint == ""
    else:
        assert complaint.startswith(line)
        assert complaint.count("\n") == 1
        assert "Traceback" not in complaint


def test_unknown_flags_are_named(call):
    assert "--unknown" in call("fine", "--unknown")[2]


@pytest.mark.parametrize("what", ["own", "fault", "disk"])
def test_debug_shows_the_traceback(call, what):
    status, said, complaint = call(what, "--debug")
    assert (status, said) == (1, "")
    lines = complaint.splitlines()
    assert lines[0].startswith("error: ")
    assert lines[1] == "Traceback (most recent call last):"
    assert "raise raised[what]" in complaint


def test_help_is_no_error(call):
    status, said, complaint = call("--help")
    assert (status, complaint) == (0, "")
    assert "--number" in said


# ---------------------------------------------------------------- signals, in a process of its own

SLEEPER = """
    import sys, time
    import typer
    from selfsynth.errors import command

    app = typer.Typer(add_completion=False)

    @app.command()
    def main():
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("tidied up", flush=True)

    command(app)()
"""
WAITER = """
    import asyncio
    import typer
    from selfsynth.errors import command

    app = typer.Typer(add_completion=False)

    async def work():
        try:
            print("ready", flush=True)
            await asyncio.sleep(60)
        finally:
            print("tidied up", flush=True)

    @app.command()
    def main():
        asyncio.run(work())

    command(app)()
"""


def started(code, **options):
    """Python code that runs in a process of its own, with pipes to it."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, cwd=ROOT, **options)


def ignore_ctrl_c():
    """As a shell without job control does for a command that it starts with `&`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize("code", [SLEEPER, WAITER], ids=["plain", "asyncio"])
@pytest.mark.parametrize(
    ("number", "background"),
    [(signal.SIGINT, None), (signal.SIGTERM, None), (signal.SIGTERM, ignore_ctrl_c)],
    ids=["ctrl-c", "sigterm", "sigterm in the background"],
)
def test_a_stop_ends_the_command_tidily(code, number, background):
    unbuffered = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = started(code, env=unbuffered, preexec_fn=background)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        said, complaint = process.communicate(timeout=10)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert said == "tidied up\n"
    assert complaint.strip() == "error: stopped"


POOL = """
    import multiprocessing, time
    from selfsynth.errors import command

    def main():
        with multiprocessing.get_context("fork").Pool(2) as pool:
            started = pool.imap_unordered(time.sleep, [0, 60, 60])
            next(started)
            print("ready", flush=True)
            try:
                next(started)
            finally:
                raise TimeoutError  # as datasets does when it tidies up after a stop

    command(main)()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_for_the_command_and_its_workers_say_nothing(number):
    with started(POOL, start_new_session=True) as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, number) if number == signal.SIGINT else process.terminate()
        try:
            assert process.communicate(timeout=20) == ("", "error: stopped\n")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130


LATE = """
    import sys, time
    import typer
    from selfsynth.errors import command, too_late_to_stop

    app = typer.Typer(add_completion=False)

    @app.command()
    def main():
        too_late_to_stop()
        print("ready", flush=True)
        time.sleep(0.5)
        print("done", flush=True)

    command(app)()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_that_comes_too_late_changes_nothing(number):
    with started(LATE) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=10) == ("done\n", "")
    assert process.returncode == 0


def test_outside_of_a_command_nothing_is_too_late():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    errors.too_late_to_stop()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
