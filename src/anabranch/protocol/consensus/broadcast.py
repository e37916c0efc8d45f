"""Broadcast of committed log entries to all members: each at once, or in a large swarm in batches.

With a thousand members peers join and leave all the time, and each such record is a message to every member.
A large swarm therefore logs membership changes at fixed times only, and announces those of one moment in one
message. Steps and all other records are announced without delay.
"""

from __future__ import annotations

import math

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.log.records import Members, decode_entry
from anabranch.protocol.messages import Announce

#: Period of membership changes in a large swarm, in heartbeats, and length (s) of the window in which they
#: are logged (a plain choice: a few messages per heartbeat).
EVERY_HEARTBEATS, WITHIN_S = 0.25, 0.05


class Broadcast:
    """Announcer of committed log entries to all members, at the peer that leads."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._unannounced: list[bytes] = []
        self._announce_at = math.inf

    def chosen(self, line: bytes) -> None:
        """Announce a committed log entry (`line`: encoded) to all other members. They get it now; in a large
        swarm a membership change waits for up to WITHIN_S, to be sent together with the entries that come
        meanwhile, and only the peers that it removes get it at once."""
        self._unannounced.append(line)
        record = decode_entry(line).record if self.ctx.run.near.crowded else None
        if isinstance(record, Members):
            self._announce_at = min(self._announce_at, self.ctx.clock.now + WITHIN_S)
            for peer in record.removed:  # no longer a member when the batch is sent
                self.ctx.outbox.send(peer, Announce(tuple(self._unannounced)))
        else:
            self._announce()

    def tick(self) -> None:
        if self.ctx.clock.now >= self._announce_at:
            self._announce()

    def deadline(self) -> float:
        return self._announce_at

    def _announce(self) -> None:
        message = Announce(tuple(self._unannounced))
        self._unannounced, self._announce_at = [], math.inf
        for peer in list(self.ctx.run.membership.members):
            if peer != self.ctx.me:
                self.ctx.outbox.send(peer, message)

    def changes_at(self) -> float:
        """Earliest time (s) at which a membership change may be logged: now, or in a large swarm within the
        next window (the first WITHIN_S of every EVERY_HEARTBEATS heartbeats)."""
        if not self.ctx.run.near.crowded:
            return self.ctx.clock.now
        period_s = EVERY_HEARTBEATS * self.ctx.run.settings.heartbeat_s
        since = self.ctx.clock.now % period_s
        return self.ctx.clock.now if since < WITHIN_S else self.ctx.clock.now - since + period_s
