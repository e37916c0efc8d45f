"""Order between disk and network: numbered writes, and messages held back until these are durable."""

from __future__ import annotations

from collections import deque

from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.protocol.raft.types import Effect, RaftMessage, Send, Write


class Persistence:
    """Writes of one voter that are not on disk yet, and the outgoing messages that wait for them: a message
    must not state anything that the disk does not hold. durable: number of log entries on disk."""

    def __init__(self, length: int) -> None:
        self.durable = length
        self._issued = 0
        """Number of the latest write."""
        self._done = 0
        """Number of the latest durable write."""
        self._written = length
        """Length of the log after all issued writes."""
        self._term_write = 0
        """Number of the write that contains the present term and vote."""
        self._due = False
        """True if term or vote changed, or the log was truncated, since the latest write."""
        self._lengths: deque[tuple[int, int]] = deque()
        """Writes under way: number, length of the log after it."""
        self._outbox: list[tuple[RaftMessage, bool]] = []
        """Messages sent since the last `flush`, and whether each waits for the log as well."""
        self._waiting: deque[tuple[int, Send]] = deque()
        """Number of the write that a message waits for, message."""

    def term_changed(self) -> None:
        """Plan a write of the voter's term and vote, which changed."""
        self._due = True

    def truncated(self, length: int) -> None:
        """Note that the log was truncated to `length` entries, and plan to write that. `durable` is at most
        `length` until the next write is on disk."""
        self._written = min(self._written, length)
        self._shorten(length)
        self._due = True

    def restarted(self, length: int) -> None:
        """Note that the log was replaced by an empty one that begins at index `length`, and plan no write for
        that: the next write of entries begins there. `durable` is at most `length` until that one is on disk.
        Writes under way go on, and messages that wait for them are sent after them."""
        self._written = length
        self._shorten(length)

    def _shorten(self, length: int) -> None:
        """Forget that entries from index `length` on are on disk or being written."""
        self.durable = min(self.durable, length)
        self._lengths = deque((number, min(lines, length)) for number, lines in self._lengths)

    def send(self, message: RaftMessage, after_log: bool = True) -> None:
        """Queue a message to be sent once the term and vote that it reports are on disk; with `after_log` the
        log's entries so far, too."""
        self._outbox.append((message, after_log))

    def flush(self, term: int, vote: str, log: RaftLog) -> list[Effect]:
        """Effects to carry out now: a write, if term, vote or log changed since the last one, and the queued
        messages that wait for no write. The other messages come from `persisted` later."""
        effects: list[Effect] = []
        if self._due or self._written < log.length:
            lines = tuple(log.line(index) for index in range(self._written, log.length))
            self._issued += 1
            effects.append(Write(self._issued, term, vote, self._written, lines))
            self._written = log.length
            self._lengths.append((self._issued, log.length))
            if self._due:
                self._term_write = self._issued
            self._due = False
        outbox, self._outbox = self._outbox, []
        for message, after_log in outbox:
            needed = self._issued if after_log else self._term_write
            if needed <= self._done:
                effects.append(Send(message))
            else:
                self._waiting.append((needed, Send(message)))
        return effects

    def persisted(self, number: int) -> list[Effect]:
        """Effects that became possible because the writes up to `number` are on disk: the messages that
        waited for them."""
        self._done = max(self._done, number)
        while self._lengths and self._lengths[0][0] <= number:
            self.durable = self._lengths.popleft()[1]
        effects: list[Effect] = []
        while self._waiting and self._waiting[0][0] <= self._done:
            effects.append(self._waiting.popleft()[1])
        return effects
