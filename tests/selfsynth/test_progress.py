"""Progress: a line now and then, on stderr, as the person can read it."""

import io

import pytest
from rich.console import Console

from selfsynth import progress
from selfsynth.progress import Progress, duration, say


@pytest.mark.parametrize(
    ("seconds", "spelt"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (42, "42 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (60, "1:00"),
        (187, "3:07"),
        (3599.4, "59:59"),
        (3599.6, "1:00:00"),
        (7511, "2:05:11"),
        (360_000, "100:00:00"),
    ],
)
def test_duration(seconds, spelt):
    assert duration(seconds) == spelt


@pytest.mark.parametrize(
    "message", ["plain", "[bold]no markup[/bold] [/]", "{braces} %s :smile:", "x" * 300, "žlu 😀"]
)
def test_say_prints_a_message_as_it_is(capsys, message):
    say(message)
    assert capsys.readouterr() == ("", message + "\n")


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def states():
    return iter(f"prompt {count}/9" for count in range(1, 10)).__next__


def test_elsewhere_a_line_every_30_seconds(capsys, clock):
    with Progress(states()) as shown:
        for _ in range(100):  # 100 s, a tick each
            clock.now += 1
            shown.tick()
    said, lines = capsys.readouterr()
    assert said == ""
    assert lines == "prompt 1/9\nprompt 2/9\nprompt 3/9\n"


def test_nothing_is_described_that_is_not_shown(capsys, clock):
    def never():
        raise AssertionError

    with Progress(never) as shown:
        for _ in range(1000):
            clock.now += 0.029
            shown.tick()
    assert capsys.readouterr() == ("", "")


def test_long_gaps_are_not_made_up_for(capsys, clock):
    with Progress(states(), every=10) as shown:
        clock.now += 95
        shown.tick()
        shown.tick()
        clock.now += 9
        shown.tick()
        clock.now += 1
        shown.tick()
    assert capsys.readouterr().err == "prompt 1/9\nprompt 2/9\n"


def test_on_a_terminal_one_live_line(monkeypatch, capsys, clock):
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=40, highlight=False)
    monkeypatch.setattr(progress, "console", terminal)
    with Progress(lambda: "[red]row 1[/red] " + "x" * 100) as shown:
        shown.tick()
        assert "row" not in file.getvalue()  # not yet time
        clock.now += 0.3
        shown.tick()
        shown._live.refresh()
        assert "[red]row 1[/red]" in file.getvalue()
    assert "…" in file.getvalue()
    assert "x" * 60 not in file.getvalue()  # cut to one line
    assert file.getvalue().count("\x1b[2K") >= 1  # and wiped at the end
    assert capsys.readouterr() == ("", "")


def test_an_error_inside_gives_the_terminal_back(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=file, force_terminal=True, width=40))
    with pytest.raises(ZeroDivisionError), Progress(lambda: "row 1") as shown:
        raise ZeroDivisionError
    assert not shown._live.is_started
    assert file.getvalue().endswith("\x1b[?25h") or "\x1b[?25h" in file.getvalue()  # the cursor
