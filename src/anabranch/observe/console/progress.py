"""Progress of work that may take longer than two seconds.

    with progress("reading the corpus", total=450) as advance:
        for path in paths:
            ...
            advance(1)

A terminal gets a bar after two seconds. Elsewhere plain lines appear, at most one every five seconds, so that
a log stays readable. Work that is done within two seconds shows nothing.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from anabranch.observe.console.step_line import wants_colour
from anabranch.observe.wording import duration

#: Seconds before anything is shown.
QUIET_S = 2.0
#: Least seconds between plain lines.
LINE_INTERVAL_S = 5.0


Advance = Callable[[float], None]
"""Function that reports an amount of work done since its last call."""


@contextmanager
def progress(
    label: str,
    total: float | None,
    *,
    unit: str = "",
    stream: IO[str] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show the progress of `label` out of `total` (None: unknown); yields the function that advances it.

    `unit` names what is counted ("bytes" are shown as MB). `now` is the clock, in seconds.
    """
    stream = sys.stderr if stream is None else stream
    began, done = now(), 0.0
    bar: Any = None
    line_at: float | None = None

    def advance(amount: float) -> None:
        nonlocal done, bar, line_at
        done += amount
        if now() - began < QUIET_S:
            return
        if wants_colour(stream):
            bar = bar or _started_bar(label, total, unit, stream)
            bar.update(bar.task_ids[0], completed=done)
        elif line_at is None or now() - line_at >= LINE_INTERVAL_S:
            line_at = now()
            print(f"{label}: {_amount(done, total, unit)}", file=stream, flush=True)

    try:
        yield advance
        if line_at is not None:
            print(f"{label}: done in {duration(now() - began)}", file=stream, flush=True)
    finally:
        if bar is not None:
            bar.stop()


class Ticker:
    """Line on a stream that says what is being done and for how long, for work whose end is not known.

    `begin` names an activity. After two seconds it is shown: on a terminal in a line that is written anew
    every second, elsewhere in a line at most every five seconds. `end` removes the line. The clock runs in a
    thread of its own, as the work keeps the caller's busy.
    """

    def __init__(self, stream: IO[str] | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._now = now
        self._terminal = wants_colour(self._stream)
        self._lock = threading.Lock()
        self._label, self._began, self._told_at = "", 0.0, -math.inf
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._closed.set()
        self._thread.join()

    def begin(self, label: str) -> None:
        """Name what is done from now on."""
        self.end()
        with self._lock:
            self._label, self._began, self._told_at = label, self._now(), -math.inf

    def update(self, label: str) -> None:
        """Name the same activity anew, with its count; its time goes on."""
        with self._lock:
            self._label = label

    def end(self) -> None:
        """Remove the line, as a result follows."""
        with self._lock:
            if self._terminal and self._told_at > -math.inf:
                print("\r\033[K", end="", file=self._stream, flush=True)
            self._label, self._told_at = "", -math.inf

    def tick(self) -> None:
        """Show the line if it is due."""
        with self._lock:
            now = self._now()
            took = now - self._began
            if not self._label or took < QUIET_S:
                return
            text = f"{self._label} ... {duration(took)}"
            if self._terminal:
                print(f"\r\033[K{text}", end="", file=self._stream, flush=True)
            elif now - self._told_at < LINE_INTERVAL_S:
                return
            else:
                print(text, file=self._stream, flush=True)
            self._told_at = now

    def _run(self) -> None:
        while not self._closed.wait(1.0):
            self.tick()


def _amount(done: float, total: float | None, unit: str) -> str:
    scale, form, name = (1e6, ",.1f", " MB") if unit == "bytes" else (1, ",.0f", f" {unit}".rstrip())
    if not total:
        return f"{done / scale:{form}}{name}"
    return f"{100 * done / total:.0f} % ({done / scale:{form}} of {total / scale:{form}}{name})"


def _started_bar(label: str, total: float | None, unit: str, stream: IO[str]) -> Any:
    """Bar of the rich library, which is imported only when a bar appears."""
    from rich import progress as rich_progress
    from rich.console import Console

    bar = rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn() if unit == "bytes" else rich_progress.MofNCompleteColumn(),
        rich_progress.TimeRemainingColumn(),
        console=Console(file=stream),
        transient=True,
    )
    bar.add_task(label, total=total)
    bar.start()
    return bar
