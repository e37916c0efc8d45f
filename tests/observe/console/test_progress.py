"""Progress: silent when quick, plain lines off the terminal, a bar on it."""

from __future__ import annotations

import io
import threading

import pytest

from anabranch.observe.console.progress import Ticker, progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_quick_work_shows_nothing(kind: type[io.StringIO]) -> None:
    out, clock = kind(), Clock()
    with progress("corpus", 10, stream=out, now=clock) as advance:
        for _ in range(10):
            clock.now += 0.1
            advance(1)
    assert out.getvalue() == ""


def test_plain_lines_are_few() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("corpus", 80, unit="files", stream=out, now=clock) as advance:
        for _ in range(80):
            clock.now += 0.125  # exact in binary
            advance(1)
    assert out.getvalue().splitlines() == [
        "corpus: 20 % (16 of 80 files)",
        "corpus: 70 % (56 of 80 files)",
        "corpus: done in 0:10",
    ]


def test_bytes_and_unknown_totals() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("state", None, unit="bytes", stream=out, now=clock) as advance:
        clock.now = 3.0
        advance(2_500_000)
    assert out.getvalue().splitlines() == ["state: 2.5 MB", "state: done in 0:03"]


def test_work_that_fails_is_not_called_done() -> None:
    out, clock = io.StringIO(), Clock()
    with pytest.raises(RuntimeError), progress("state", 5, stream=out, now=clock) as advance:
        clock.now = 3.0
        advance(1)
        raise RuntimeError
    assert out.getvalue().splitlines() == ["state: 20 % (1 of 5)"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out, clock = Terminal(), Clock()
    with progress("verifying", 4, stream=out, now=clock) as advance:
        for _ in range(4):
            clock.now += 1.0
            advance(1)
    assert "verifying" in out.getvalue() and "4/4" in out.getvalue()


def test_a_ticker_tells_how_long_work_has_been_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = io.StringIO(), Clock()
    ticker = Ticker(out, clock)
    ticker.begin("importing torch")
    clock.now = 1.5
    ticker.tick()
    ticker.begin("measuring stage 1")
    for _ in range(8):
        clock.now += 1.0
        ticker.tick()
    ticker.end()
    clock.now += 100.0
    ticker.tick()
    assert out.getvalue().splitlines() == ["measuring stage 1 ... 0:02", "measuring stage 1 ... 0:07"]

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    out, clock = Terminal(), Clock()
    ticker = Ticker(out, clock)
    ticker.begin("measuring stage 1")
    for _ in range(4):
        clock.now += 1.0
        ticker.tick()
    ticker.end()
    line = "\r\033[Kmeasuring stage 1 ... 0:0"
    assert out.getvalue() == f"{line}2{line}3{line}4\r\033[K", "one line that moves, and goes"


def test_a_tickers_thread_ends_with_it() -> None:
    with Ticker(io.StringIO()) as ticker:
        ticker.begin("work")
    assert not any(thread.name == "ticker" for thread in threading.enumerate())
