"""Raft node of a peer: connects the Raft state machine with the peer's messages, disk and log application."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from anabranch.counter_rng import CounterRng
from anabranch.protocol.consensus.log_members import LogMembers
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.events import Persist
from anabranch.protocol.log.hash_chain import Position
from anabranch.protocol.log.records import AnyRecord, Member, NoOp, Voters, decode_entry
from anabranch.protocol.messages import Appended
from anabranch.protocol.raft.raft import Raft
from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.protocol.raft.types import (
    Committed,
    RaftMessage,
    Role,
    RoleChanged,
    Send,
    Write,
    majority,
    peer_of,
    voter_id,
)

#: Most terms that a message of another voter may be ahead of the own term.
TERMS_AHEAD = 1 << 16
#: Times that leadership is offered to a voter that could lead before somebody else gets a vote. A choice: one
#: may be slow once.
OFFERS = 3


@dataclass(frozen=True)
class SavedVoterState:
    """Raft state of a peer as stored on its disk: term, vote and log, and the seed of its random timeouts.
    nonce: random name of the disk; "" if it never held a log shared with other voters. lines: encoded log
    entries from `start` on. founders: voters before the first Voters record."""

    nonce: str = ""
    term: int = 0
    vote: str = ""
    lines: tuple[bytes, ...] = ()
    start: Position = field(default_factory=Position)
    founders: tuple[str, ...] = ()
    seed: int = 0


class Voter(Timer):
    """Raft node of one peer, which may be a voter, a learner, or keep no log. kept: what this peer's disk
    has. on_chosen(line): callback for each committed entry, in log order. on_became: callback for a new role
    or leader. may_lead(): True if this peer is able to coordinate the run. yields(): True if any other voter
    should rather lead."""

    def __init__(
        self,
        ctx: PeerContext,
        kept: SavedVoterState,
        on_chosen: Callable[[bytes], None],
        on_became: Callable[[RoleChanged], None],
        may_lead: Callable[[], bool],
        yields: Callable[[], bool],
    ) -> None:
        self.ctx = ctx
        log = RaftLog(kept.lines, kept.start, kept.founders)
        me = voter_id(ctx.me, kept.nonce)
        self._members = LogMembers(kept.lines)
        self._turn = 0
        self.leaving = False
        """True if this peer is leaving the run: it leads only while no other voter does."""
        alone = log.voters == (me,)
        commit_index = log.length if alone else 0
        heartbeat_s = ctx.run.settings.heartbeat_s
        self.raft = Raft(me, log, CounterRng(kept.seed), heartbeat_s, kept.term, kept.vote, commit_index)
        self._on_chosen = on_chosen
        self._on_became = on_became
        self._may_lead = may_lead
        self._yields = yields
        self._offered = Counter[str]()
        """Voter -> how often leadership was offered to it since another peer led."""
        self.aside_at = -1
        """Iteration after which this leader last transferred leadership to a voter that reaches more
        members."""

    # --- the log, for the leader ---------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if no record can be proposed now: one is not committed yet, this peer does not lead, or it is
        transferring leadership."""
        return self.raft.busy or self.raft.role is not Role.LEADER

    @property
    def knows_all(self) -> bool:
        """True if this leader has committed an entry of its own term, and so knows all that was committed
        before it led (Raft §5.4.2)."""
        return self.raft.role is Role.LEADER and self.raft.own_term_committed()

    def append(self, record: AnyRecord) -> None:
        """Propose a log record, which `on_chosen` gets once it is committed. Raises LogError if this peer may
        not propose, for example if it does not lead."""
        self.raft.propose(record, self.ctx.clock.now)
        self._settle()

    def entries_from(self, start: int) -> tuple[bytes, ...] | None:
        """Committed entries from index `start` on, encoded, as many as fit one message; () if there are none
        yet; None: they are no longer kept."""
        if start < self.raft.log.start.index:
            return None
        return self.raft.log.entries_from(start, self.raft.commit_index)

    def has(self, index: int, previous: str) -> bool:
        """True if this disk's log agrees with a reader's: its entry before `index` has the hash `previous`,
        or is no longer kept."""
        log = self.raft.log
        return log.start.index > index or log.hash_before(index) == previous

    def transfer_leadership(self, to: str) -> None:
        """Begin to transfer leadership to voter `to`. Without effect if this peer does not lead."""
        self.raft.transfer_leadership(self.ctx.clock.now, to)
        self._settle()

    def transfer_leadership_to(self, peer: str) -> bool:
        """Begin to transfer leadership to `peer`; True if that was begun. False if `peer` cannot lead now: it
        is no reachable voter, lacks a part of the log, or its present process is not in the log yet; or a
        record is being committed."""
        raft = self.raft
        for voter in self.heirs():
            known = peer_of(voter) == peer and self.ctx.knows_process(peer)
            if known and raft.caught_up(voter) and not raft.busy:
                self.transfer_leadership(voter)
                return True
        return False

    def heirs(self, going: Collection[str] = ()) -> list[str]:
        """Voter ids of other voters within reach, to which leadership can be offered. going: peers that
        leave, left out."""
        voters, ctx = self.raft.log.voters, self.ctx
        others = [voter for voter in voters if voter != self.raft.me and peer_of(voter) not in going]
        return [voter for voter in others if ctx.reachable(peer_of(voter))]

    # --- events --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the Raft node, and dial the other voters at the addresses in this disk's log: after a
        restart, this voter may be the one missing for a majority."""
        self.raft.begin(self.ctx.clock.now)
        self._use_fellows()
        for peer in self.ctx.dialer.fellows:
            self.ctx.dialer.reach(peer)
        self._settle()

    def receive(self, peer: str, message: RaftMessage) -> str | None:
        """Handle a Raft message of `peer`; one to a former disk of this peer is ignored. Returns the reason
        if it is refused: it speaks for another peer, is not of a voter or learner, or of an implausible term
        or another epoch."""
        raft = self.raft
        if peer_of(message.sender) != peer:
            return "it speaks for another peer"
        if message.to != raft.me:
            return None  # for a former disk of this peer
        learns = isinstance(message, Appended) and message.sender in raft.learners
        electors = raft.log.electors(raft.commit_index) | set(self.ctx.log.voters)
        if not (learns or message.sender in electors):
            return "it does not keep the log"
        if message.term > raft.term + TERMS_AHEAD:
            return f"nobody is in term {message.term}"
        epoch = self.ctx.run.settings.epoch
        if epoch > 1 and self.ctx.links.epochs.get(peer) != epoch:
            return f"it is not known to be in epoch {epoch}"  # voters of a former epoch were given up
        self._look()
        self.raft.receive(message, self.ctx.clock.now)
        self._settle()
        return None

    def persisted(self, number: int) -> None:
        """Note that the write `number` and all before it are on disk: send, and commit, what waited for
        them."""
        self._look()
        self.raft.persisted(number, self.ctx.clock.now)
        self._settle()

    def lost(self, peer: str) -> None:
        """Note that the link to `peer` broke; if that peer led, an election begins soon."""
        if peer_of(self.raft.leader) == peer:
            self._look()
            self.raft.leader_lost(self.raft.leader, self.ctx.clock.now)

    def tick(self) -> None:
        """Send heartbeats, stand for election, or give leadership away, if that is due. Nothing before
        `deadline`."""
        if self.ctx.clock.now >= self.raft.deadline() and self.ctx.clock.now >= self.deadline():
            self.raft.tick(self.ctx.clock.now)
            self._settle()  # the only voter is elected at once
            if self.minds and self.leads_well():
                self.raft.call_election(self.ctx.clock.now)
            elif self.minds and not self._gives_a_vote():
                self.give_away()
            if self.raft.role not in (Role.LEADER, Role.FOLLOWER):
                self._look_for_votes()
            self._settle()

    def _look_for_votes(self) -> None:
        """Dial the peers whose votes count and that are not linked, as this candidate needs a majority.
        Removed voters are among them: their votes count until the removal is committed. A voter that is no
        member itself learns the addresses of new voters from the log alone."""
        self._use_fellows()
        for voter in sorted(self.raft.log.electors(self.raft.commit_index) - {self.raft.me}):
            self.ctx.dialer.reach(peer_of(voter))

    def _use_fellows(self) -> None:
        """Tell the dialer the addresses of the other peers whose votes count, as far as the log has them."""
        raft = self.raft
        fellows = {peer_of(voter) for voter in raft.log.electors(raft.commit_index) - {raft.me}}
        self.ctx.dialer.use_fellows(self._members.addresses(fellows))

    def leads_well(self) -> bool:
        """True if this peer should lead if elected: it is able to, and no other voter should rather, or all
        others within reach that could were offered leadership in vain."""
        if not self._may_lead():
            return False
        return not self._yields() or not (self.raft.transferring or self._to_be_offered(1))

    def _to_be_offered(self, times: int) -> bool:
        """True if a voter that could lead has not been offered leadership so often yet."""
        return any(self._could_lead(heir) and self._offered[heir] < times for heir in self.heirs())

    def _could_lead(self, voter: str) -> bool:
        """False for a voter whose present process is not in the log, as it is no member until the leader
        admits it; but the founder's process can resume the run."""
        peer, members = peer_of(voter), self._members
        known = members.admitted.get(peer)
        linked = self.ctx.links.incarnations.get(peer, 0)
        return known is None or linked <= known.incarnation or peer == members.founder

    @property
    def minds(self) -> bool:
        """True if this peer was elected but does not coordinate the run, because it is not able to or another
        voter should rather. It has to give leadership away then."""
        return self.raft.role is Role.LEADER and not self.ctx.log.leads

    def give_away(self, going: Collection[str] = ()) -> None:
        """Offer leadership to another voter that could lead, each time to the next one: active members first,
        among them the founder, then the voter with most of the log. Nothing while none is reachable or a
        record is being committed. going: peers that are leaving the run."""
        ctx, raft, serves = self.ctx, self.raft, self._members.serving

        def rank(voter: str) -> tuple[bool, bool, int]:
            peer = peer_of(voter)
            return peer in serves, peer == ctx.run.founder, raft.replication.matched(voter)

        heirs = [heir for heir in self.heirs(going) if self._could_lead(heir)]
        if heirs and not raft.busy:
            heir = sorted(heirs, key=rank, reverse=True)[self._turn % len(heirs)]
            self._turn += 1
            self._offered[heir] += 1
            self.transfer_leadership(heir)

    def _gives_a_vote(self) -> bool:
        """Take the next step by which a member that serves gets a vote, so that it can lead: no voter within
        reach can. So it is where the processes of all that are left began anew, and none is a member until
        one is led. Once it has the log, who votes but is out of reach, or was offered the lead in vain as a
        member, loses its vote, and then it gets one. False: there is no such member, or somebody can be
        offered the lead; if all were in vain, they are offered it again."""
        raft = self.raft
        if self._may_lead() or raft.busy or self._to_be_offered(OFFERS):
            return False
        possible = self._possible_voters()
        names = [name for name in possible if self._offered[name] < OFFERS]
        if not names:
            self._offered.clear()
            return False
        ready = next((name for name in names if raft.caught_up(name)), None)
        if ready is None:
            raft.add_learner(next((name for name in names if name not in raft.learners), names[0]))
            return True
        voters, alive, serving = raft.log.voters, self.heard(), self._members.serving
        vain = {v for v in voters if self._offered[v] >= OFFERS and peer_of(v) in serving}
        useless = sorted((v for v in voters if v not in alive - vain), key=lambda v: v in alive)
        fewer = tuple(voter for voter in voters if voter not in useless[:1])
        self._change_voters(fewer if useless and majority(fewer, alive) else (*voters, ready))
        return True

    def _possible_voters(self) -> list[str]:
        """Voter ids of the members that serve, and of the founder, in whichever process, that are within
        reach and could vote, in the order in which they are to: data nodes first, then by the order of
        joining."""
        ctx, members = self.ctx, self._members
        found = [
            member
            for member in members.admitted.values()
            if member.disk
            and ctx.reachable(member.id)
            and (member.id == members.founder or (member.address and self._serves(member)))
        ]
        names = [voter_id(member.id, member.disk) for member in sorted(found, key=lambda m: m.stage > 0)]
        return [name for name in names if name not in self.raft.log.voters and not self.raft.lags(name)]

    def _serves(self, member: Member) -> bool:
        """True if this process of a member serves, by the log on this disk, and is the one that is linked."""
        linked = self.ctx.links.incarnations.get(member.id, 0)
        return member.id in self._members.serving and linked == member.incarnation

    def _change_voters(self, voters: tuple[str, ...]) -> None:
        """Propose these voters, unless that is not allowed now."""
        if not self.raft.change_problem(voters):
            self.ctx.outbox.note("note", text=f"the log gets other voters: {' '.join(v[:8] for v in voters)}")
            self._turn = 0
            self.append(Voters(voters))

    def heard(self) -> set[str]:
        """Voter ids of the voters and learners that this leader can reach and that answered it (or were first
        sent the log) in the last two heartbeat intervals. The leader counts as having answered."""
        raft, recently = self.raft, self.ctx.clock.now - 2.0 * self.ctx.run.settings.heartbeat_s
        names = {name for name in {*raft.log.voters, *raft.learners} if self.ctx.reachable(peer_of(name))}
        return {name for name in names if raft.replication.heard_at(name) >= recently}

    def deadline(self) -> float:
        """Time of the next `tick` (s); infinite for a peer that keeps no log, or cannot vote."""
        raft = self.raft
        if not raft.concerned:
            return math.inf  # most peers keep no log
        self._look()
        return raft.deadline()

    def _look(self) -> None:
        """Tell the Raft state machine whether this peer may stand for election without extra delay: it can
        lead, and is not about to leave."""
        self.raft.campaigns = self._may_lead() and not self.leaving

    def _settle(self) -> None:
        """Carry out the effects that the Raft state machine asks for, by messages, writes and the callbacks;
        called after each input to it."""
        for effect in self.raft.take():
            match effect:
                case Send(message):
                    self.ctx.outbox.send(peer_of(message.to), message)
                case Write(number, term, vote, start, lines):
                    self.ctx.outbox.emit(Persist(number, term, vote, start, lines))
                case Committed(_, line):
                    self._members.fold((line,))
                    if self._offered and self.raft.role is not Role.LEADER:
                        self._led(line)
                    self._on_chosen(line)
                case RoleChanged():
                    if effect.leader and self.ctx.admitted():
                        self.ctx.dialer.use_fellows({})  # a member dials members, and is dialled by others
                    self._on_became(effect)

    def _led(self, line: bytes) -> None:
        """Forget the offers of the lead if this committed line says that another peer led: it is not the one
        with which each leader begins, as who takes the lead and does nothing was offered it in vain."""
        if not isinstance(decode_entry(line).record, NoOp):
            self._offered.clear()
