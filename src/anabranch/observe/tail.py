"""Following an event log that is being written."""

from __future__ import annotations

from pathlib import Path

import msgspec

from anabranch.observe.events import Event, Unknown, decode_event

#: Bytes that one read takes at most, and that an event may have.
CHUNK_BYTES, LINE_BYTES = 1 << 17, 1 << 20


class Tail:
    """Reads what was appended since the last read. position: where to begin (bytes)."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self.position = position
        self._rest = b""

    def read(self) -> list[Event | Unknown]:
        """The next events, in order; none when all are read, or while there is no file. Lines that are not
        events (cut off by a crash) are left out. OSError when the file cannot be read."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return []
        self.position += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= LINE_BYTES else b""
        events = []
        for line in lines:
            try:
                events.append(decode_event(line))
            except (ValueError, msgspec.DecodeError):
                continue
        return events
