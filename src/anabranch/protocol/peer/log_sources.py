"""Trust in other peers' word about the log: whose log lines and whose claims to lead this peer accepts."""

from __future__ import annotations

import math

from anabranch.protocol.consensus.raft_node import Voter
from anabranch.protocol.messages import Elsewhere, FetchLog, Ping
from anabranch.protocol.peer.shared_state import SharedParts
from anabranch.protocol.raft.types import peer_of, voter_id

#: Time (s) after which a leader whose log stays shorter than this peer's has lost entries. A choice: several
#: heartbeats, in which a leader that begins has read its log.
SHORT_S = 5.0
#: Time (s) without a link to any voter after which lines of other members are accepted. A choice: this peer
#: dials the voters after eight seconds (`connections.SEEK_S`), and one that answers is linked by then.
NO_VOTER_S = 10.0


class LogSources:
    """Judge of which peers are believed about the log; tells peers who leads it."""

    def __init__(self, shared: SharedParts, voter: Voter) -> None:
        self._ctx, self._progress, self._exit = shared.ctx, shared.progress, shared.exit
        self._entry, self._following, self._voter = shared.entry, shared.following, voter
        self.lost = False
        """True once the leader was found to lack entries that this peer applied."""
        self._short_since = math.inf
        """Time (s) since which the only voter's log is shorter than this peer's."""
        self._no_voter_since = math.inf
        """Time (s) since which no voter was linked, as far as this peer looked."""

    def ask_for_log(self, peer: str) -> None:
        """Ask `peer` for the log lines after this peer's position; nothing if it is not linked."""
        self._ctx.outbox.send(peer, FetchLog(self._progress.position.index))

    def lost_by(self, peer: str) -> bool:
        """Stop this peer, to join anew, and return True, if `peer` leads the log, without entries that this
        peer has applied (the caller found that): its disk lost them, or it runs a copy of the run directory.
        Returns False if `peer` is not the leader, or if this peer votes itself: then it is for Raft to say
        which entries count."""
        log = self._ctx.log
        if peer != log.leader or log.keeps_log(self._ctx.me):
            return False
        self.lost, t = True, self._progress.committed
        self._exit.stop(
            f"the run goes on from an earlier state: its data node lost log entries up to step {t}, which "
            "this machine has",
            ok=False,
            again=True,
        )
        return True

    def heard(self, peer: str, message: Ping) -> str | None:
        """Act on the log length, claim to lead and epoch in a heartbeat: ask for log lines that this peer
        lacks, follow a new leader, or stop this peer if it cannot go on. Returns the reason if the claim is
        refused.

        Only the founder is believed about a new epoch, and only voters about who leads the log.
        """
        ctx, done = self._ctx, self._entry.done
        ctx.links.announced(peer, message.epoch)
        self._look_for_voters()
        if message.epoch > ctx.run.settings.epoch > 0 and peer == ctx.run.founder:
            reason = f"the run was recovered without this machine's part of the log (epoch {message.epoch})"
            self._exit.stop(reason, ok=False, again=True)
            return None
        refusal = None
        votes = self._voter.raft.me in ctx.log.voters  # then this peer's own Raft says who leads
        if message.leads and done and ctx.log.keeps_log(peer) and not votes:
            refusal = self._following.claims(peer, message.leads)
        if message.next_index > self._progress.position.index and self._entry.done and self.believes(peer):
            self.ask_for_log(peer)
        if done and message.leads and self._is_short(peer, message):
            self.lost_by(peer)
        return refusal

    def _is_short(self, peer: str, message: Ping) -> bool:
        """True if the log's only voter has for SHORT_S seconds said that its log lacks entries which this
        peer applied: it is shorter than this peer's, or exactly as long although the voter leads in a later
        term, which begins with an entry that this peer does not have."""
        # For a moment that is so with every honest voter: a heartbeat tells the length of a moment ago.
        ctx, known = self._ctx, self._progress.position.index
        only = len(ctx.log.voters) == 1 and ctx.log.keeps_log(peer)
        newer = message.leads > self._following.proven_term
        if not only or message.next_index >= known + (1 if newer else 0):
            self._short_since = math.inf
            return False
        self._short_since = min(self._short_since, ctx.clock.now)
        return ctx.clock.now >= self._short_since + SHORT_S

    def believes(self, peer: str) -> bool:
        """True if log lines of `peer` are accepted: it leads the log or votes on it.

        A peer that is no voter and has been linked to none for NO_VOTER_S (all voters that it knew may be
        gone) accepts the lines of any member, and learns the present voters from them. Not before: a guest
        that breaks its links, or waits until they break, could have it follow a log of the guest's own.
        """
        ctx = self._ctx
        if peer == ctx.log.leader or ctx.log.keeps_log(peer):
            return True
        if peer not in ctx.run.membership.members:
            return False
        self._look_for_voters()
        return ctx.clock.now >= self._no_voter_since + NO_VOTER_S

    def _look_for_voters(self) -> None:
        """Note since when no voter has been linked; a voter, and a run with one voter, needs no other's."""
        ctx = self._ctx
        alone = ctx.run.settings.voters > 1 and not ctx.log.keeps_log(ctx.me) and not self._voter_linked()
        self._no_voter_since = min(ctx.clock.now, self._no_voter_since) if alone else math.inf

    def _voter_linked(self) -> bool:
        """True if a voter is linked. A voter is a peer and its disk: a process that the log does not have, or
        has with another disk, may have lost its copy of the log."""
        ctx, membership = self._ctx, self._ctx.run.membership
        for voter in ctx.log.voters:
            peer = peer_of(voter)
            member, known = membership.members.get(peer), membership.incarnation(peer)
            other_disk = member is not None and voter_id(peer, member.disk) != voter
            if peer in ctx.links.up and ctx.links.incarnations.get(peer, 0) <= known and not other_disk:
                return True
        return False

    def redirect(self, peer: str) -> None:
        """Tell `peer`, which takes this peer for the leader, the id and address of the leader; empty ones if
        that is unknown, or no member that this peer knows."""
        ctx = self._ctx
        member = ctx.run.membership.members.get(ctx.log.leader)
        leader, address = (ctx.log.leader, member.address) if member is not None else ("", "")
        ctx.outbox.send(peer, Elsewhere(leader, address))

    def doors(self) -> tuple[tuple[str, str], ...]:
        """(id, address) of the voters with an address, for a joiner whose leader may be gone before it is
        admitted."""
        members, log = self._ctx.run.membership.members, self._ctx.log
        return tuple((p, m.address) for p, m in members.items() if m.address and log.keeps_log(p))
