"""Long work says how far it is: a live line on a terminal, a line every 30 s elsewhere.

Everything goes to stderr; stdout belongs to results.
"""

import os
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

console = Console(stderr=True, highlight=False, soft_wrap=True)


def say(message: str) -> None:
    """Print one line for the person at the terminal, by the first of several processes."""
    if os.environ.get("RANK", "0") == "0":  # torchrun and accelerate number them
        console.print(Text(message))


class Progress:
    """Shows what `describe()` returns: on a terminal in one live line, elsewhere every 30 s.

    Call `tick()` as often as you like.
    """

    def __init__(self, describe: Callable[[], str], every: float = 30.0):
        self._describe = describe
        self._live = Live(console=console, transient=True) if console.is_terminal else None
        self._every = 0.25 if self._live else every
        self._next = time.monotonic() + self._every

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_) -> None:
        if self._live:
            self._live.stop()

    def tick(self) -> None:
        """Show the state of things when it is time to."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        if self._live:
            self._live.update(Text(self._describe(), overflow="ellipsis", no_wrap=True))
        else:
            say(self._describe())


def duration(seconds: float) -> str:
    """Spell a time: 42 s, 3:07, 2:05:11."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
