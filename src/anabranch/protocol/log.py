"""The commit log (DESIGN §3.7).

This form has a single voter: a record is chosen when that voter has it on disk. Entries, their chain of
hashes, fencing and the rule that nothing is announced before it is persisted are those of the replicated
log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.protocol.messages import MAX_MESSAGE_BYTES
from anabranch.protocol.records import NO_ENTRY, AnyRecord, Entry, decode_entry, encode_entry, entry_hash

#: Chosen lines kept in memory for peers that fetch them.
LINES_KEPT = 4096


class LogError(ValueError):
    """A log that does not continue from what is known."""


class Known(LogError):
    """An entry that was followed already."""


@dataclass(frozen=True)
class Position:
    """How much of the log is known: the next index, and the hash of the entry before it."""

    index: int = 0
    previous: str = NO_ENTRY


def follow(position: Position, line: bytes) -> tuple[Entry, Position]:
    """Check that `line` is the entry at `position`; raises LogError if it is not (Known if it is older)."""
    try:
        entry = decode_entry(line)
    except ValueError as error:
        raise LogError(f"log entry {position.index} cannot be read: {error}") from None
    if entry.index < position.index:
        raise Known(f"log entry {entry.index} is known")
    if entry.index != position.index or entry.previous != position.previous:
        raise LogError(f"log entry {entry.index} does not follow entry {position.index - 1}")
    return entry, Position(position.index + 1, entry_hash(line))


class CommitLog:
    """The voter's copy. One record is on its way to disk at a time."""

    def __init__(self, lines: Iterable[bytes] = (), term: int = 1) -> None:
        self.position = Position()
        self.term = term
        self._first = 0
        self._lines: deque[bytes] = deque()
        self._writing: bytes | None = None
        for line in lines:
            _, self.position = follow(self.position, line)
            self._remember(line)

    @property
    def busy(self) -> bool:
        return self._writing is not None

    def append(self, record: AnyRecord) -> tuple[int, bytes]:
        """Propose a record; returns (index, line) to be persisted."""
        if self._writing is not None:
            raise LogError("a record is being written already")
        entry = Entry(self.position.index, self.term, self.position.previous, record)
        self._writing = encode_entry(entry)
        return entry.index, self._writing

    def persisted(self, index: int) -> bytes:
        """The line at `index` is on disk, and so chosen (one voter); returns it."""
        line = self._writing
        if line is None or index != self.position.index:
            raise LogError(f"entry {index} was not being written")
        self._writing = None
        _, self.position = follow(self.position, line)
        self._remember(line)
        return line

    def _remember(self, line: bytes) -> None:
        self._lines.append(line)
        if len(self._lines) > LINES_KEPT:
            self._lines.popleft()
            self._first += 1

    def since(self, start: int) -> tuple[bytes, ...] | None:
        """Chosen lines from `start`, as many as fit one message; None if they are no longer kept."""
        if start < self._first:
            return None
        lines: list[bytes] = []
        size = 0
        for offset in range(start - self._first, len(self._lines)):
            line = self._lines[offset]
            size += len(line) + 16
            if size > MAX_MESSAGE_BYTES // 2 and lines:
                break
            lines.append(line)
        return tuple(lines)
