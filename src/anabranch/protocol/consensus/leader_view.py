"""Leader of the log as a peer knows it, and the check of other voters' claims to lead (R3, R9)."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.consensus.raft_node import TERMS_AHEAD
from anabranch.protocol.context.peer_context import PeerContext

#: Time (s) within which the log must have an entry of a claimed leader's term; after that another voter's
#: claim replaces it.
PROOF_S = 10.0


class LeaderView:
    """Leader and term that one peer follows (`ctx.log`). changed: callback for a new leader or term.

    A voter learns the leader from its own Raft node. Other peers believe a voter's claim to lead in a term
    not far beyond the known one. Since a leader first appends an entry of its own term, a claim without such
    an entry after PROOF_S gives way to that of another voter in no higher term, and is not believed again.
    """

    def __init__(self, ctx: PeerContext, changed: Callable[[], None]) -> None:
        self.ctx = ctx
        self._changed = changed
        self.proven_term = 0
        """Highest term of a committed entry that this peer applied: that term had a leader."""
        self._since = 0.0
        """Time since which claims are followed of which the log has no entry (s)."""
        self._doubted: set[str] = set()
        """Voters whose claim was given up."""

    def line(self, term: int) -> None:
        """Note that this peer applied a committed log entry of `term`, which proves that this term had a
        leader."""
        self.proven_term = max(self.proven_term, term)

    def admitted(self, term: int) -> None:
        """Take `term` as proven and as the present one, because its leader admitted this peer to the run."""
        self.proven_term = term
        self.ctx.log.follow(self.ctx.log.leader, term)

    def elected(self, leader: str, term: int) -> None:
        """Follow `leader`, whom this peer's own Raft node knows as leader of `term`; nothing if the log
        proves a later term."""
        if term >= self.proven_term:
            self._follow(leader, term)

    def claims(self, voter: str, term: int) -> str | None:
        """Handle the claim of `voter` that it leads in `term`: follow it, or ignore the claim if it is not to
        be believed. Returns the reason if it is refused, as its term is too far ahead; else None."""
        ctx = self.ctx
        if term > max(ctx.log.term, self.proven_term) + TERMS_AHEAD:
            return f"nobody is in term {term}"
        if term < self.proven_term or (term == ctx.log.term and voter == ctx.log.leader):
            return None
        proven = term == self.proven_term
        if voter in self._doubted and not proven:
            return None
        if term > ctx.log.term:
            self._follow(voter, term)
        elif ctx.log.term > self.proven_term and ctx.clock.now >= self._since + PROOF_S:
            text = f"{ctx.log.leader[:8]} says that it leads in term {ctx.log.term}"
            text += ", and the log has no line of it"
            ctx.outbox.note("note", text=f"{text}: following {voter[:8]}, term {term}")
            self._doubted.add(ctx.log.leader)
            self._follow(voter, term)
        return None

    def _follow(self, leader: str, term: int) -> None:
        ctx = self.ctx
        if (term, leader) == (ctx.log.term, ctx.log.leader):
            return
        if ctx.log.term <= self.proven_term or term <= self.proven_term:
            self._since = ctx.clock.now
        ctx.log.follow(leader, term)
        self._changed()
