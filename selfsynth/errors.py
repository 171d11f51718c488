"""Errors are one line for the user, and an exit status for the shell.

Exit statuses of every command: 0 done, 1 failed, 2 bad usage, 3 gate not passed, 4 not enough
data to tell, 130 stopped by the user.
"""

import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Annotated

import typer
from typer.exceptions import TyperException

from selfsynth.early import STOPPED


class SelfsynthError(Exception):
    """Something failed; the message says what, where, and what to do, in one line."""

    exit_status = 1


class UsageError(SelfsynthError):
    """The command was asked for something it cannot mean."""

    exit_status = 2


def require(extra: str, *packages: str) -> None:
    """Check that packages of an extra are installed, before work that needs them.

    Raises:
        SelfsynthError: one is not.
    """
    for package in packages:
        if not importlib.util.find_spec(package):
            raise SelfsynthError(f"{package} is not installed: pip install 'selfsynth[{extra}]'")


_show_tracebacks = False


def show_tracebacks(asked: bool) -> bool:
    """Show the tracebacks of errors from here on, where that is asked for."""
    global _show_tracebacks
    _show_tracebacks = _show_tracebacks or asked
    return asked


DebugOption = Annotated[
    bool, typer.Option("--debug", callback=show_tracebacks, help="show tracebacks of errors")
]


def command(app: typer.Typer | Callable[[], int | None]) -> Callable[[], None]:
    """Return `app` as a function that ends the process by the rules above.

    Errors of this project, of the command line and of the operating system become one line on
    stderr. Anything else is a fault of ours and is said to be one. With a `DebugOption` the
    traceback follows.
    """

    run = partial(app, standalone_mode=False) if isinstance(app, typer.Typer) else app

    def main() -> None:
        # A shell script starts its background jobs with SIGINT ignored: there a SIGTERM that
        # takes the way of a Ctrl-C would have no effect.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _stop)
        try:
            try:
                # Typer hands back the status of a typer.Exit, and makes one of a Ctrl-C.
                status = run() or 0
            finally:
                too_late_to_stop()
            if status == STOPPED:
                raise KeyboardInterrupt
        except BaseException as error:
            status = report(_stopped_by(error))
            if status and _show_tracebacks and not isinstance(error, SystemExit):
                traceback.print_exc()
        sys.exit(status)

    return main


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM is a wish to stop like Ctrl-C, and takes the same way out."""
    signal.raise_signal(signal.SIGINT)


def _leave_to_parent() -> None:
    """In a process forked from a `command`: only its parent takes Ctrl-C, and SIGTERM ends it.

    Libraries end their workers by SIGTERM and wait for them, and what a worker says is not asked.
    """
    if signal.getsignal(signal.SIGTERM) is _stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_to_parent)


def too_late_to_stop() -> None:
    """Ignore Ctrl-C and SIGTERM from here on, in a `command`: what is left takes no time.

    A command that has done its work must not say that it was stopped.
    """
    if signal.getsignal(signal.SIGTERM) is _stop:
        _ignored.append(_stop)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def may_stop_again() -> None:
    """Take Ctrl-C and SIGTERM again, in a `command` that goes on after what nothing should stop."""
    if _stop in _ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _stop)
        _ignored.clear()


_ignored: list[Callable] = []


def _stopped_by(error: BaseException) -> BaseException:
    """Return the Ctrl-C that a library was tidying up after when it failed, or the error itself."""
    before = error
    while before := before.__context__:
        if isinstance(before, KeyboardInterrupt):
            return before
    return error


def report(error: BaseException) -> int:
    """Print `error` as one line on stderr and return the exit status that goes with it."""
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        case typer.Exit():
            return error.exit_code
        case KeyboardInterrupt() | typer.Abort():
            line, status = "stopped", STOPPED
        case SelfsynthError():
            line, status = str(error), error.exit_status
        case TyperException():  # what the command line itself got wrong
            line, status = error.format_message(), UsageError.exit_status
        case OSError():
            line, status = str(error), 1
        case _:
            line = f"{type(error).__name__}: {error} (a fault of selfsynth; --debug shows where)"
            status = 1
    print("error: " + " ".join(line.split()), file=sys.stderr)
    return status
