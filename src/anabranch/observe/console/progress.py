"""Progress of work that may take longer than two seconds.

    with progress("reading the corpus", total=450) as advance:
        for path in paths:
            ...
            advance(1)

A terminal gets a bar after two seconds, whose clock goes on even if nothing advances. Elsewhere plain lines
appear, at most one every five seconds, and after a minute fewer, so that a log stays readable. Work that is
done within two seconds shows nothing. Of several that are entered at a time only the innermost shows itself.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, Any, Protocol

from anabranch.observe.console.step_line import wants_colour
from anabranch.observe.wording import duration

#: Seconds before anything is shown.
QUIET_S = 2.0
#: Least seconds between plain lines, and as a share of the time of work so far: an hour has some fifty lines.
LINE_INTERVAL_S, LINE_INTERVAL_SHARE = 5.0, 0.1
#: Seconds of work by which its pace is judged, for the time that is left.
JUDGED_S = 10.0

Advance = Callable[[float], None]
"""Function that reports an amount of work done since its last call."""


class _Moving(Protocol):
    """Line or bar that shows itself on a stream."""

    def tick(self) -> None:
        """Show what is due by now; called about each second, from a thread of its own."""

    def clear(self) -> None:
        """Remove what is shown from a terminal; plain lines stay."""


#: Lines and bars that are entered now, the innermost last.
_entered: list[_Moving] = []


def _is_innermost(one: _Moving) -> bool:
    return not _entered or _entered[-1] is one


@contextmanager
def _moved(one: _Moving) -> Iterator[None]:
    """Context in which `one` is the innermost line or bar, and its `tick` is called each second by a thread,
    as the work keeps the caller's busy. What was shown before is removed from the terminal first."""
    closed = threading.Event()

    def run() -> None:
        while not closed.wait(1.0):
            one.tick()

    if _entered:
        _entered[-1].clear()
    _entered.append(one)
    thread = threading.Thread(target=run, name="ticker", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join()
        _entered.remove(one)


@contextmanager
def progress(
    label: str,
    total: float | None,
    *,
    unit: str = "",
    stream: IO[str] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Context that shows the progress of `label`; yields the function that the work calls with the amount
    done since its last call. total: amount in all (None: unknown). It is shown on `stream` (None: stderr)
    once it has taken QUIET_S. unit: what is counted ("bytes" are shown as MB). now: clock, in seconds."""
    shown = Progress(label, total, unit, sys.stderr if stream is None else stream, now)
    with _moved(shown):
        try:
            yield shown.advance
            shown.finish()
        finally:
            shown.clear()


@contextmanager
def progress_bars(unit: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Context that yields the callback (label, done so far, total). It shows a progress bar for the label,
    and ends the bar of the label before. unit: as for `progress`."""
    with ExitStack() as stack:
        label, reached = "", 0
        advance: Advance | None = None

        def update(what: str, done: int, total: int) -> None:
            nonlocal label, reached, advance
            if advance is None or what != label:
                stack.pop_all().close()
                label, reached = what, 0
                advance = stack.enter_context(progress(what, total, unit=unit))
            advance(done - reached)
            reached = done

        yield update


class Progress:
    """Bar (on a terminal) or lines about an amount of work. Arguments as of `progress`."""

    def __init__(
        self, label: str, total: float | None, unit: str, stream: IO[str], now: Callable[[], float]
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._stream, self._now = stream, now
        self._terminal = wants_colour(stream)
        self._began, self._done = now(), 0.0
        self._bar: Any = None
        self._line_at: float | None = None
        self._lock = threading.RLock()

    def advance(self, amount: float) -> None:
        self._done += amount
        self.tick()

    def tick(self) -> None:
        now = self._now()
        if now - self._began < QUIET_S or not _is_innermost(self):
            return
        with self._lock:
            if self._terminal:
                self._bar = self._bar or self._started_bar(now - self._began)
                self._bar.update(self._bar.task_ids[0], completed=self._done)
            elif self._line_at is None or now - self._line_at >= _interval_s(now - self._began):
                self._line_at = now
                amount = _amount(self._done, self._total, self._unit)
                took = duration(now - self._began)
                left = self._left(now - self._began)
                print(f"{self._label}: {amount}, {took}{left}", file=self._stream, flush=True)

    def _left(self, took_s: float) -> str:
        """Words on the time that is left by the pace so far; "" if the total is unknown, or the work has not
        taken JUDGED_S (`took_s`: seconds so far)."""
        if not self._total or not 0 < self._done < self._total or took_s < JUDGED_S:
            return ""
        return f", about {duration(took_s * (self._total - self._done) / self._done)} left"

    def _started_bar(self, took_s: float) -> Any:
        """New bar of the rich library on the stream, already shown; the library is imported only here.
        took_s: seconds of work so far."""
        from rich import progress as rich_progress
        from rich.console import Console

        bar = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(),
            rich_progress.DownloadColumn() if self._unit == "bytes" else rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        bar.add_task(self._label, total=self._total)
        bar.tasks[0].start_time = bar.get_time() - took_s
        bar.start()
        return bar

    def finish(self) -> None:
        """Print how long the work took, if plain lines were printed about it."""
        if self._line_at is not None:
            took = duration(self._now() - self._began)
            print(f"{self._label}: done in {took}", file=self._stream, flush=True)

    def clear(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            self._bar = None


class Ticker:
    """Line on a stream (None: stderr) that says what is being done and for how long, for work whose end is
    not known, while its context is entered. `begin` names an activity. After two seconds it is shown: on a
    terminal in a line that is written anew every second, elsewhere in a line at most every five seconds, and
    fewer after a minute. `end` removes the line. plain: False to show nothing elsewhere, where other lines
    tell enough."""

    def __init__(
        self,
        stream: IO[str] | None = None,
        now: Callable[[], float] = time.monotonic,
        plain: bool = True,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._now, self._plain = now, plain
        self._terminal = wants_colour(self._stream)
        self._lock = threading.RLock()
        self._label, self._began, self._told_at = "", 0.0, -math.inf
        self._stack = ExitStack()

    def __enter__(self) -> Ticker:
        self._stack.enter_context(_moved(self))
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._stack.close()

    def begin(self, label: str) -> None:
        """End the activity before and name the one that begins now; its time counts from now."""
        self.end()
        with self._lock:
            self._label, self._began = label, self._now()

    def update(self, label: str) -> None:
        """Give the current activity another name, such as with a new count; its time goes on."""
        with self._lock:
            self._label = label

    def end(self) -> None:
        """End the current activity and remove its line from a terminal, as a result follows."""
        with self.aside():
            self._label = ""

    def clear(self) -> None:
        with self.aside():
            pass

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context in which the line is away from a terminal, so that something else can be printed; it comes
        back later."""
        with self._lock:
            if self._terminal and self._told_at > -math.inf:
                print("\r\033[K", end="", file=self._stream, flush=True)
            self._told_at = -math.inf
            yield

    def tick(self) -> None:
        with self._lock:
            now = self._now()
            took = now - self._began
            if not self._label or took < QUIET_S or not _is_innermost(self):
                return
            text = f"{self._label} ... {duration(took)}"
            if self._terminal:
                print(f"\r\033[K{text}", end="", file=self._stream, flush=True)
            elif not self._plain or now - self._told_at < _interval_s(took):
                return
            else:
                print(text, file=self._stream, flush=True)
            self._told_at = now


@contextmanager
def ticking(label: str) -> Iterator[Ticker]:
    """Context that shows `label` and its time on stderr, as `Ticker`; yields the ticker, to name further
    activities."""
    with Ticker() as ticker:
        ticker.begin(label)
        yield ticker


def _interval_s(took_s: float) -> float:
    """Least seconds between plain lines about work that has taken `took_s` so far."""
    return max(LINE_INTERVAL_S, LINE_INTERVAL_SHARE * took_s)


def _amount(done: float, total: float | None, unit: str) -> str:
    scale, form, name = (1e6, ",.1f", " MB") if unit == "bytes" else (1, ",.0f", f" {unit}".rstrip())
    if not total:
        return f"{done / scale:{form}}{name}"
    return f"{100 * done / total:.0f} % ({done / scale:{form}} of {total / scale:{form}}{name})"
