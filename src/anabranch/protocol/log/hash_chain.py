"""Hash chain of the commit log: every entry names the hash of the one before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from anabranch.protocol.log.records import LINES_CACHED, NO_ENTRY, Entry, decode_entry, entry_hash


class LogError(ValueError):
    """Raised for a log entry that cannot be read or does not follow the one before, or a record that may not
    be proposed."""


class AlreadyApplied(LogError):
    """Raised for a log entry that was applied before."""


class Diverged(LogError):
    """Raised for the entry that is next by its index, but does not name the hash of the last applied one."""


@dataclass(frozen=True)
class Position:
    """Position in the log: index of the next entry, and hash of the entry before it."""

    index: int = 0
    previous: str = NO_ENTRY


def follow(position: Position, line: bytes) -> tuple[Entry, Position]:
    """Decode the log entry in `line`; returns the entry and the position after it. Raises LogError if it
    cannot be read or does not belong at `position`: AlreadyApplied if its index is lower, Diverged if it
    follows another entry.
    """
    try:
        entry = decode_entry(line)
    except ValueError as error:
        raise LogError(f"log entry {position.index} cannot be read: {error}") from None
    if entry.index < position.index:
        raise AlreadyApplied(f"log entry {entry.index} is known")
    if entry.index != position.index or entry.previous != position.previous:
        kind = Diverged if entry.index == position.index else LogError
        raise kind(f"log entry {entry.index} does not follow entry {position.index - 1}")
    return entry, _after(line)


@lru_cache(LINES_CACHED)
def _after(line: bytes) -> Position:
    """Position after a log line; the peers of a simulated swarm share it."""
    return Position(decode_entry(line).index + 1, entry_hash(line))
