"""Voter's copy of the commit log: committed entries never change, later ones may be truncated.

The hash of an entry covers all entries before it, so two copies that agree on one entry agree on the whole
prefix (Raft's Log Matching property, by construction).
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.protocol.log.hash_chain import LogError, Position, follow
from anabranch.protocol.log.records import Entry, Epoch, Voters, entry_hash
from anabranch.protocol.messages import MAX_MESSAGE_BYTES

#: Committed entries kept in memory for peers that fetch them. A choice: some MB.
LINES_KEPT = 4096
#: Most bytes that an entry takes in a message besides its encoded line.
LINE_OVERHEAD_BYTES = 16


class RaftLog:
    """Log of one voter, from index `start` on; earlier entries are committed and no longer in memory. lines:
    encoded entries. voters: the group's voters before the first record that sets them. Raises LogError if
    `lines` are no hash chain."""

    def __init__(
        self, lines: Iterable[bytes] = (), start: Position | None = None, voters: tuple[str, ...] = ()
    ) -> None:
        self.start = start or Position()
        self._start_term = 0
        self._lines: list[bytes] = []
        self._hashes: list[str] = []
        self._terms: list[int] = []
        self._voters: list[tuple[int, tuple[str, ...]]] = [(self.start.index - 1, voters)]
        """Index of each Voters or Epoch record and its ids; first the last one before `start`."""
        self._electors: tuple[int, frozenset[str]] | None = None
        for line in lines:
            self.append(line)

    @property
    def length(self) -> int:
        """Total number of log entries, which is the index of the next entry to append."""
        return self.start.index + len(self._lines)

    @property
    def position(self) -> Position:
        """Hash-chain position (index and previous hash) of the next entry to append."""
        return Position(self.length, self._hashes[-1] if self._hashes else self.start.previous)

    @property
    def last_term(self) -> int:
        return self._terms[-1] if self._terms else self._start_term

    @property
    def voters(self) -> tuple[str, ...]:
        """The group's voters now: a Voters or Epoch record counts as soon as it is appended, committed or
        not."""
        return self._voters[-1][1]

    @property
    def voters_since(self) -> int:
        """Index of the latest record of the log that sets the voters (Voters or Epoch), in memory or not; if
        there is none since the `start` that the log was made with, one before that."""
        return self._voters[-1][0]

    def electors(self, commit_index: int) -> frozenset[str]:
        """Voter ids whose votes may count: the voters of the last committed Voters record, and those of a
        later one that may yet be truncated. Only the last record can be uncommitted, for each is committed
        before the next is proposed (§4.1 of the thesis), even if a restarted voter knows a lower commit
        index."""
        if self._electors is None or self._electors[0] != commit_index:
            committed = [index for index, _ in self._voters if index < commit_index]
            replaced = [index for index, ids in self._voters if set(ids) != set(self.voters)]
            since = max([self._voters[0][0], *committed, *replaced])
            found = frozenset(voter for index, ids in self._voters if index >= since for voter in ids)
            self._electors = commit_index, found
        return self._electors[1]

    def term_of(self, index: int) -> int:
        return self._terms[index - self.start.index]

    def line(self, index: int) -> bytes:
        """Encoded log entry `index`, which must still be kept."""
        return self._lines[index - self.start.index]

    def hash_before(self, index: int) -> str | None:
        """Hash of log entry `index` - 1, with which entry `index` is chained; None if entry `index` - 1 is
        beyond the log's end, or its hash is no longer kept."""
        offset = index - self.start.index
        if offset == 0:
            return self.start.previous
        return self._hashes[offset - 1] if 0 < offset <= len(self._hashes) else None

    def append(self, line: bytes, term: int | None = None) -> Entry:
        """Append one encoded entry, and return it decoded. term: term of the leader that sent it; None: not
        known. Raises LogError if the entry does not follow the last one, or is of a lower term than that or
        of a higher one than `term`."""
        entry, _ = follow(self.position, line)
        if term is not None and entry.term > term:
            raise LogError(f"log entry {entry.index} is of term {entry.term}, and comes in term {term}")
        if entry.term < self.last_term:
            raise LogError(f"log entry {entry.index} is of term {entry.term}, after term {self.last_term}")
        self._lines.append(line)
        self._hashes.append(entry_hash(line))
        self._terms.append(entry.term)
        if isinstance(entry.record, Voters | Epoch):
            self._voters.append((entry.index, entry.record.ids))
            self._electors = None
        return entry

    def truncate(self, length: int) -> None:
        """Drop the entries from index `length` on, which were never committed."""
        keep = length - self.start.index
        del self._lines[keep:], self._hashes[keep:], self._terms[keep:]
        while len(self._voters) > 1 and self._voters[-1][0] >= length:
            self._voters.pop()
        self._electors = None

    def compact(self, commit_index: int) -> None:
        """Drop the oldest committed entries from memory once there are more than LINES_KEPT, an eighth of
        that at a time."""
        extra = min(len(self._lines), commit_index - self.start.index) - LINES_KEPT
        if extra < LINES_KEPT // 8:
            return
        index = self.start.index + extra
        previous = self._hashes[extra - 1]
        self._start_term = self._terms[extra - 1]
        del self._lines[:extra], self._hashes[:extra], self._terms[:extra]
        self.start = Position(index, previous)
        while len(self._voters) > 1 and self._voters[1][0] < index:
            self._voters.pop(0)
        self._electors = None

    def entries_from(self, index: int, end: int | None = None) -> tuple[bytes, ...]:
        """Encoded entries from `index` on (not before `start`) and before `end`: as many as fit one message,
        but at least one if there is any."""
        lines: list[bytes] = []
        size_bytes = 0
        for line in self._lines[index - self.start.index : None if end is None else end - self.start.index]:
            size_bytes += len(line) + LINE_OVERHEAD_BYTES
            if size_bytes > MAX_MESSAGE_BYTES // 2 and lines:
                break
            lines.append(line)
        return tuple(lines)
