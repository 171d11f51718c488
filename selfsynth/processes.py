"""Nothing outlives the command: children that end when their parent does, however it ends.

A process cannot be told that its parent was killed, so each of ours looks who its parent is,
twice a second. (Linux has a signal for it, but only for the thread that forked, and macOS has
none.)
"""

import os
import subprocess
import threading
import time

_LOOK_EVERY = 0.5  # seconds


def end_with_parent(parent: int | None = None) -> None:
    """End this process at once when its parent is gone.

    Args:
        parent: the parent's process id, when the caller knows it from before the fork; a parent
            that died in between is then noticed too.
    """
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def end(process: subprocess.Popen, patience: float = 5.0) -> None:
    """Ask a child to end, and make it end when it has not after `patience` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
