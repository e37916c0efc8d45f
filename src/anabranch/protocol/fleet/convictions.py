"""Convictions at the leader: keys and tickets of proven liars are revoked, and the log goes back to a state
before the false step. Not here: how a lie is proven (`coordinator.step_receipts`, `coordinator.audit_cases`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from anabranch.protocol.context.peer_context import PeerContext


@dataclass(eq=False)
class Convictions:
    """Peers that were convicted, and what the log has to do about it. revoke(target, reason): asks that the
    log revokes a key or a ticket. returns: reason why the log has to go back to a snapshot, "" if it need
    not. returns_before: first iteration that is void then. settled: True if the liar was found, and is
    revoked or removed; else the same dispute may come again after the return."""

    ctx: PeerContext
    revoke: Callable[[str, str], None]
    returns: str = ""
    returns_before: int = 0
    settled: bool = False
    _tickets: dict[str, set[str]] = field(default_factory=dict)
    """Ticket -> its convicted peers."""

    def go_back(self, reason: str, t: int) -> None:
        """Note that the log has to go back to a state before iteration t (`returns`). Of several calls the
        first reason and the earliest iteration stay."""
        self.returns_before = min(self.returns_before, t) if self.returns else t
        self.returns = self.returns or reason

    def convict(self, peer: str, reason: str, t: int) -> None:
        """Have the key of `peer` revoked, and the log go back to a state before iteration t. A second
        conviction with a ticket revokes that, too, unless it is an open one."""
        member = self.ctx.run.membership.members.get(peer)
        self.revoke(peer, reason)
        if member is not None and member.ticket and member.walk_in is not True:
            convicted = self._tickets.setdefault(member.ticket, set())
            convicted.add(peer)
            if len(convicted) > 1:
                self.revoke(member.ticket, f"two of its peers were convicted; the last: {reason}")
        self.go_back(reason, t)
        self.settled = True

    def rolled_back(self) -> None:
        """Forget the return, as the log went back. Who was convicted stays known."""
        self.returns, self.settled = "", False
