"""A peer whose user ends it goes in good order: as leader it hands over, and it stays until others have what
it had, its vote too (R9, R14)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from anabranch.protocol.messages import REMARK_MAX, Leave

if TYPE_CHECKING:
    from anabranch.protocol.peer import Peer

#: Seconds that a peer that wants to go waits until others have taken over.
LEAVE_S = 45.0


class Leaving:
    """reason: why it goes (None: it stays)."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.reason: str | None = None
        self._by = math.inf

    def begin(self, reason: str) -> None:
        """Go, as soon as the leader says that others have what I had."""
        peer, core = self.peer, self.peer.core
        if self.reason is None:
            self._by = core.now + LEAVE_S
        self.reason = reason[:REMARK_MAX]
        peer.voter.leaving = True
        if core.leads:
            self._hand_over()
            return
        self.repeat()
        elected = core.keeps_log(core.me) and any(map(core.keeps_log, core.links))  # one of us soon leads
        if core.me not in core.membership.active_from or (core.leader not in core.links and not elected):
            peer.stop(reason, ok=True)

    def repeat(self) -> None:
        """Say it to whoever leads (now)."""
        core = self.peer.core
        if self.reason is not None and not core.leads:
            core.send(core.leader, Leave(self.reason))

    def tick(self) -> None:
        if self.reason is None or self.peer.stopped:
            return
        if self.peer.core.now >= self._by:
            self.peer.stop(f"{self.reason}; nobody took over in {LEAVE_S:.0f} s", ok=True)
        elif self.peer.core.leads:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the lead away (it is said to the next leader that I go), if there is anybody to take it."""
        if not self.peer.voter.give_away():
            self.peer.stop(f"{self.reason}; nobody who keeps the log is in reach to take over", ok=True)

    def deadline(self) -> float:
        return self._by
