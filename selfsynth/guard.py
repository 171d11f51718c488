"""Run a command as a child that ends when our parent does, with all its children.

    python -m selfsynth.guard PARENT_PID COMMAND [ARGUMENT ...]

The child gets a process group of its own. When the parent is gone or asks this process to end,
the group is asked to end, and killed three seconds later.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

PATIENCE = 3.0  # seconds


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":  # elsewhere there is no such thing
        ctypes.CDLL(None).prctl(option, value)


def _end_on_our_death() -> None:
    # In the child, before the command runs: should this guard be killed itself, Linux kills the
    # child.
    _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> int:
    """Run the command; return its exit status, or 1 when it was made to end."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.append(True))
    # The command's orphans come to us, not to a process 1 that may never reap them.
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    child = subprocess.Popen(command, process_group=0, preexec_fn=_end_on_our_death)
    while child.poll() is None and os.getppid() == parent and not asked:
        time.sleep(0.2)
    status = child.poll()
    for number, wait in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, PATIENCE)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and _alive(child):
            time.sleep(0.1)
    return status if status is not None else 1


def _alive(child: subprocess.Popen) -> bool:
    if child.poll() is not None:
        with suppress(ChildProcessError):
            while os.waitpid(-child.pid, os.WNOHANG) != (0, 0):
                pass
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
