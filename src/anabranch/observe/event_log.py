"""The file `events.jsonl`: appending events, reading all of them, following a growing file, pieces for
machines that watch the run, commit times.

The events themselves are in `events.py`.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from anabranch.observe.events import Event, Rollback, Step, Timing, Unknown, decode_event, encode_event

#: Most bytes of one read of an `EventTail`: a tenth of a second of decoding.
CHUNK_BYTES = 1 << 17
#: Longest event in bytes that an `EventTail` assembles; longer ones are dropped to bound its memory.
LINE_BYTES = 1 << 20
#: Bytes of the file in one piece (`piece_of`) before compression to about a tenth.
PIECE_BYTES = 1 << 18

_E = TypeVar("_E", bound=Event)


class EventLog:
    """Append-only event file; its folder is created if missing, and a last line that a crash cut off is
    ended. Each event is one `write` call, so a crash loses no event already written. `write` raises OSError
    if the disk is full; the next event then begins a line of its own."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _end_last_line(self.path)
        # Unbuffered and in append mode: one write() per line.
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._torn = False

    def write(self, event: Event | Unknown) -> None:
        data = (b"\n" if self._torn else b"") + encode_event(event) + b"\n"
        written = self._file.write(data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EventTail:
    """Incremental reader of an event file that may still grow, from byte `position` on. `position` is where
    the next `read` begins; bytes before it that are no whole line yet are kept in memory, so another reader
    must not begin there."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self.position = position
        self._rest = b""

    def read(self) -> list[Event | Unknown]:
        """Next events in file order, from about CHUNK_BYTES further bytes; a last line that is not complete
        yet waits for a later call. Empty only at the end of the file, while there is no file, or where no
        more of it is an event. Raises OSError if it cannot be read."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                while data := file.read(CHUNK_BYTES):
                    self.position += len(data)
                    *lines, rest = (self._rest + data).split(b"\n")
                    self._rest = rest if len(rest) <= LINE_BYTES else b""
                    if events := list(decode_lines(lines)):
                        return events
        except FileNotFoundError:
            pass
        return []


def decode_lines(lines: Iterable[bytes]) -> Iterator[Event | Unknown]:
    """Yield the events of these lines of an event log; lines that are not events (cut off by a crash) are
    left out."""
    for line in lines:
        try:
            yield decode_event(line)
        except (ValueError, msgspec.DecodeError):
            continue


def read_events(path: str | Path) -> Iterator[Event | Unknown]:
    """Yield the events of a file in file order. Lines that are not events are left out. Raises OSError if the
    file cannot be read."""
    with open(path, "rb") as file:
        yield from decode_lines(file)


def events_of(path: str | Path, kind: type[_E]) -> list[_E]:
    """All events of one kind, in file order. Raises OSError as `read_events` does."""
    return [event for event in read_events(path) if isinstance(event, kind)]


def commit_times(events: Iterable[Event]) -> list[tuple[int, float]]:
    """(t, unix seconds of its commit) of each `step` event, in their order; a step that is taken again after
    a rollback comes twice. The writer of the log dates a step when it learns of it, which is late after an
    absence. But a step was committed before any peer applied it, so the earliest `timing` event of t is a
    better estimate. After a rollback, only `timing` events since the rollback and the previous step count."""
    events = list(events)
    applied: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event, Timing):
            applied.setdefault(event.t, []).append(event.time)
    times: list[tuple[int, float]] = []
    before = float("-inf")
    for event in events:
        if isinstance(event, Step):
            earlier = (at for at in applied.get(event.t, ()) if before < at < event.time)
            before = min(earlier, default=event.time)
            times.append((event.t, before))
        elif isinstance(event, Rollback):
            before = max(before, event.time)
    return times


def _end_last_line(path: Path) -> None:
    """Append a newline to a file whose last line a crash cut off, so that the next event gets a line of its
    own; nothing if the file is missing, empty or whole."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")


def piece_of(path: Path, position: int) -> tuple[bytes, int]:
    """Piece of the file from byte `position` on, at most PIECE_BYTES before it is compressed by zlib (b"" at
    the end), and the file's size in bytes; (b"", 0) if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(position)
            data = file.read(PIECE_BYTES)
    except OSError:
        return b"", 0
    return (zlib.compress(data, 1) if data else b""), size
