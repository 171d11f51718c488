"""A stop in the seconds that a command takes to load ends it like any other stop."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# Some libraries swallow whatever comes up while they are imported.
LOADING = """
from selfsynth.early import stop_at_once
stop_at_once()
print("loading", flush=True)
import time
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["front", "background"])
def test_a_stop_while_loading(number, handler):
    with subprocess.Popen(
        [sys.executable, "-c", LOADING],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    ) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
    assert (process.returncode, said) == (130, "error: stopped\n")


def test_it_takes_no_time_itself():
    code = "import sys; import selfsynth.early; print('typer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n"
