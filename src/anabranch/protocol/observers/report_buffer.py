"""Buffer of peers' reports for the run's event log while its founder is away.

The leader keeps the latest reports in memory and sends them to the founder when that is a member again.
Events carry their own time, so late lines of the event log still tell what happened.
"""

from __future__ import annotations

import math
from collections import deque

from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import Report

#: Lines kept, and their bytes; the oldest reports go first. It bounds the leader's memory.
LINES_MAX, BYTES_MAX = 8192, 4 << 20
#: Batch that is sent to the founder at once (bytes, lines; at least one report), and pause (s) after it: no
#: more lines per second than the founder accepts from one peer (`rate_limits_and_bans.LINES`).
BYTES_AT_ONCE, LINES_AT_ONCE, PAUSE_S = 64 << 10, 128, 0.5


class ReportBuffer(Timer):
    """Buffer of reports (event-log lines) that wait for the founder, with senders, in order of arrival."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._kept: deque[tuple[str, tuple[bytes, ...]]] = deque()
        self._lines, self._size_bytes = 0, 0
        self._at = 0.0

    def keep(self, peer: str, lines: tuple[bytes, ...]) -> None:
        """Store a report of `peer`; if there are too many, the oldest are dropped."""
        if not lines:
            return
        self._kept.append((peer, lines))
        self._lines += len(lines)
        self._size_bytes += sum(map(len, lines))
        while self._lines > LINES_MAX or self._size_bytes > BYTES_MAX:
            self._next()

    def tick(self) -> None:
        """Send a batch of reports to the founder if it serves and is reachable, PAUSE_S after the batch
        before. Nothing while this peer is no voter, as the founder takes them from voters alone; the reports
        stay."""
        ctx = self.ctx
        if not self._kept or ctx.clock.now < self._at:
            return
        self._at = ctx.clock.now + PAUSE_S
        if not ctx.log.keeps_log(ctx.me):
            return
        if ctx.run.founder not in ctx.run.membership.active_from or not ctx.reachable(ctx.run.founder):
            return
        sent_bytes = sent_lines = 0
        while self._kept and sent_bytes < BYTES_AT_ONCE and sent_lines < LINES_AT_ONCE:
            peer, lines = self._next()
            sent_lines += len(lines)
            sent_bytes += sum(map(len, lines))
            ctx.outbox.send(ctx.run.founder, Report(lines, peer))

    def deadline(self) -> float:
        return self._at if self._kept else math.inf

    def _next(self) -> tuple[str, tuple[bytes, ...]]:
        peer, lines = self._kept.popleft()
        self._lines -= len(lines)
        self._size_bytes -= sum(map(len, lines))
        return peer, lines
