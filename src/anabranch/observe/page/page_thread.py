"""Page of a run: a thread that folds the event log into the recording, and the server that shows it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from anabranch.observe.event_log import EventTail
from anabranch.observe.events import Event, Unknown
from anabranch.observe.page.server import Owner, PageServer
from anabranch.observe.view.log_preview import preview
from anabranch.observe.view.recording import Recording

#: Seconds between reads of the log.
POLL_S = 0.25
#: Longest time in seconds of folding without giving other threads a turn.
SLICE_S = 0.01
#: Seconds after which `close` is noticed.
SHUTDOWN_POLL_S = 0.2
#: Seconds before a long log is read: a browser that opens the page at once gets the preview first.
PREVIEW_S = 1.5


class PageThread:
    """Thread that serves a run's web page from `start`, which may be called once, until `close`. events: path
    of its event log. host, port, secret, owner: as for `PageServer`."""

    def __init__(
        self,
        events: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: str = "",
        owner: Owner | None = None,
    ) -> None:
        self.address = self.owner_address = ""
        """Addresses of the page for everybody and for the owner; empty before `start`."""
        self._options = host, port, secret, owner
        self._events = events
        self._server: PageServer | None = None

    def start(self) -> str:
        """Begin to serve the page, in threads of its own; returns its address. Raises UserError if it cannot
        be served."""
        self._server = server = PageServer(Recording(), *self._options)
        self.address, self.owner_address = server.address, server.owner_address
        tail = EventTail(self._events)
        for task in (lambda: server.serve_forever(SHUTDOWN_POLL_S), lambda: _follow(tail, server)):
            threading.Thread(target=task, name="anabranch page", daemon=True).start()
        return self.address

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _follow(tail: EventTail, server: PageServer) -> None:
    """Update the server's recording from the log as the log grows, until the server ends. While a long log is
    read, a preview of its end is shown."""
    whole = server.recording
    partial = preview(tail.path)
    if partial is not None:
        _follow_long(tail, server, whole, partial)
    while not server.ended.is_set():
        events = tail.read()
        _fold(server, whole, events)
        if not events:
            server.ended.wait(POLL_S)


def _follow_long(tail: EventTail, server: PageServer, whole: Recording, partial: Recording) -> None:
    """Read the whole log into `whole` while the preview `partial` is shown and kept up to date; then show
    `whole`."""
    preview_tail = EventTail(tail.path, tail.path.stat().st_size)
    _show(server, partial, 0.0)
    server.ended.wait(PREVIEW_S)
    while not server.ended.is_set() and (events := tail.read()):
        _fold(server, whole, events, cut=False)  # frames as dense as the run's own time asks for
        _fold(server, partial, preview_tail.read())
        _show(server, partial, tail.position / max(tail.path.stat().st_size, 1))
    with server.changed:
        whole.cut()
    _show(server, whole, None)


def _show(server: PageServer, recording: Recording, reading: float | None) -> None:
    """Let the page show `recording` from now on. reading: fraction (0 to 1) of the log that was read so far;
    None: all."""
    with server.changed:
        server.recording, server.reading = recording, reading
        server.notify()


def _fold(server: PageServer, recording: Recording, events: list[Event | Unknown], cut: bool = True) -> None:
    """Apply events to a recording in short slices of time; the page's readers are served in between. cut:
    True to end the recording's frame in the making after them, which shows the changes to the readers."""
    position = 0
    while position < len(events):
        with server.changed:
            began = time.monotonic()
            while position < len(events) and time.monotonic() - began < SLICE_S:
                recording.take(events[position])
                position += 1
            if position == len(events) and cut:
                recording.cut()
                server.notify()
        time.sleep(0.0005)  # a thread that waits for the lock gets it
