"""What a long job tells of itself, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from p2pdrl.telemetry.progress import ProgressLine


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_a_terminal_gets_one_line_that_changes(clock):
    out = io.StringIO()
    with ProgressLine(out, clock, live=True) as progress:
        progress.part("playing 100 episodes")
        for done in range(1, 101):
            clock.now_s += 0.125
            progress.at(done, 100)
    text = out.getvalue()
    assert "\n" not in text
    shown = [line.strip() for line in text.split("\r") if line.strip()]
    assert shown[0] == "playing 100 episodes …"
    assert "playing 100 episodes: 50 of 100, 6 s left" in shown
    assert len(shown) == 50, "four a second, not eight"
    assert text.endswith("\r"), "the line is wiped at the end"
    assert set(text.split("\r")[-2]) == {" "}


def test_a_log_gets_a_line_every_ten_seconds_and_nothing_of_quick_jobs(clock):
    out = io.StringIO()
    with ProgressLine(out, clock, live=False) as progress:
        progress.part("quick")
        progress.at(1, 2)
        progress.part("measuring")
        for done in range(1, 1001):
            clock.now_s += 1.0
            progress.at(done, 1000)
    lines = out.getvalue().splitlines()
    assert lines[0] == "measuring: 10 of 1,000, 16 min left"
    assert len(lines) == 99


def test_what_is_left_is_told_once_it_is_known(clock):
    out = io.StringIO()
    with ProgressLine(out, clock, live=True) as progress:
        progress.part("asking")
        clock.now_s = 9.0
        progress.at(0, 10)
        assert out.getvalue().endswith("asking: 0 of 10")
        clock.now_s = 7_200.0
        progress.at(5, 10)
        assert out.getvalue().endswith("asking: 5 of 10, 2 h left")


@pytest.mark.parametrize(
    ("live", "lines"),
    [
        (True, ["tracing …", "tracing: 2 s so far", "tracing: 12 s so far"]),
        (False, ["tracing: 12 s so far"]),
    ],
)
def test_a_part_of_unknown_length_tells_how_long_it_has_taken(clock, live, lines):
    out = io.StringIO()
    progress = ProgressLine(out, clock, live=live)
    progress.tick()
    progress.part("tracing")
    for now_s in (0.5, 2.0, 2.5, 12.0):
        clock.now_s = now_s
        progress.tick()
    shown = out.getvalue().replace("\r", "\n").splitlines()
    assert [line.strip() for line in shown if line.strip()] == lines


def test_a_stream_that_is_no_terminal_is_a_log(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    streams = [("xterm", Terminal(), True), ("dumb", Terminal(), False), ("xterm", io.StringIO(), False)]
    for term, stream, shown in streams:
        monkeypatch.setenv("TERM", term)
        ProgressLine(stream, clock).part("asking")
        assert bool(stream.getvalue()) == shown
