"""Shutdown of a live peer by signals: after the current step, or at once if that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any, Protocol

#: Seconds that the current step may take to end after Ctrl+C.
STOP_S = 60.0


class Stoppable(Protocol):
    """Interface of what `stop_on_signals` stops: a live peer, a volunteer that joins again and again, a
    carrier."""

    def stop(self, reason: str) -> None:
        """Begin to leave the run cleanly, at the user's request; a leading founder ends the run instead, a
        carrier ends at once. Called on the event loop's thread; a second call does no harm. reason: for the
        outcome and the other peers."""

    def abort(self, reason: str) -> None:
        """Leave the run at once, without waiting for the current step, telling the run, or keeping the
        stage's state; also after `stop`. A carrier ends as with `stop`. reason: for the outcome."""


@contextlib.contextmanager
def stop_on_signals(
    live: Stoppable, announce: Callable[[], None], grace_s: float = STOP_S
) -> Iterator[list[int]]:
    """SIGINT (Ctrl+C) and SIGTERM stop the peer cleanly while the context is entered; a second signal, or a
    step that does not end within `grace_s`, stops it at once. `announce` is called at the first signal. In
    other threads than the main one there are no signals to handle. Yields the list of signals received."""
    loop = asyncio.get_running_loop()
    received: list[int] = []

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            announce()
            live.stop("stopped by its user")
            loop.call_later(grace_s, live.abort, "stopped by its user before the present step could end")
        else:
            live.abort("stopped by its user, at once")

    def caught(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(stop, number)

    formers: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, RuntimeError):  # another thread than the main one
            try:
                loop.add_signal_handler(number, stop, number)
            except NotImplementedError:  # Windows
                formers[number] = signal.signal(number, caught)
    try:
        yield received
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            if number in formers:
                signal.signal(number, formers[number])
            else:
                with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                    loop.remove_signal_handler(number)
