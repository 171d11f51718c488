"""A stop while a command still loads its libraries, which takes seconds.

Imports nothing that takes time itself: a script calls `stop_at_once` before its other imports.
"""

import os
import signal
from types import FrameType

STOPPED = 130
"""The exit status when the user stopped the command (Ctrl-C or SIGTERM)."""


def stop_at_once() -> None:
    """Let Ctrl-C and SIGTERM end this process at once, as a `selfsynth.errors.command` ends.

    Nothing has been started or written yet. An exception would not do: it would come up inside
    of somebody else's import, and some of them catch everything.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    os.write(2, b"error: stopped\n")
    os._exit(STOPPED)
