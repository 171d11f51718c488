"""Nothing outlives the command: children end with their parent, and when they are told to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from selfsynth.processes import end

ROOT = Path(__file__).parents[2]

# Each prints a line when it is ready. Its output is the test's pipe, and it ends when all do.
CHILD = """
import os, sys, time
from selfsynth.processes import end_with_parent
end_with_parent({parent})
print("ready", os.getpid(), flush=True)
{work}
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "


def python(program, **more):
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, **more
    )


def parent_of(child):
    """A program that starts another one and waits for it."""
    return f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"


@pytest.mark.parametrize(
    "work",
    ["time.sleep(60)", "while True: pass", STUBBORN + "time.sleep(60)"],
    ids=["sleeping", "busy", "stubborn"],
)
def test_a_child_ends_with_its_parent(work):
    with python(parent_of(CHILD.format(parent="", work=work))) as parent:
        assert parent.stdout.readline().startswith("ready")
        time.sleep(0.6)  # longer than it takes to look once: it lives on while its parent lives
        assert parent.poll() is None
        began = time.monotonic()
        os.kill(parent.pid, signal.SIGKILL)
        parent.stdout.read()  # until nobody holds the other end
        assert time.monotonic() - began < 2


FORKED = """
import os, signal, time
from selfsynth.processes import end_with_parent
parent, pid = os.getpid(), os.fork()
if pid:
    print("ready", flush=True)
    signal.pause()
while os.getppid() == parent:
    time.sleep(0.01)
end_with_parent(parent)  # it died before we could look
time.sleep(60)
"""


def test_a_parent_that_died_before_the_first_look():
    with python(FORKED) as parent:
        assert parent.stdout.readline() == "ready\n"
        began = time.monotonic()
        parent.kill()
        parent.stdout.read()
        assert time.monotonic() - began < 2


def test_with_its_parent_alive_a_child_ends_as_it_likes():
    work = "time.sleep(0.6); sys.exit(7)"
    with python(CHILD.format(parent=os.getpid(), work=work)) as child:
        assert child.wait(10) == 7


@pytest.mark.parametrize(
    ("program", "patience", "low", "high", "status"),
    [
        ("import time; print(1, flush=True); time.sleep(60)", 5, 0, 2, -signal.SIGTERM),
        (STUBBORN + "print(1, flush=True); time.sleep(60)", 0.3, 0.3, 2, -signal.SIGKILL),
        ("print(1); raise SystemExit(3)", 5, 0, 2, 3),
        (
            "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(4)); "
            "print(1, flush=True); time.sleep(60)",
            5,
            0,
            2,
            4,
        ),
    ],
    ids=["obedient", "stubborn", "ended", "orderly"],
)
def test_end(program, patience, low, high, status):
    with python(program) as process:
        process.stdout.readline()
        if status == 3:
            process.wait()
        began = time.monotonic()
        end(process, patience)
        assert low <= time.monotonic() - began < high
        assert process.returncode == status
        end(process, patience)  # once more is no harm
