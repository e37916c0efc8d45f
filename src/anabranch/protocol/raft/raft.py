"""Raft voter as a state machine without I/O: its inputs, queries and requests.

Ongaro and Ousterhout, "In Search of an Understandable Consensus Algorithm", USENIX ATC 2014; pre-vote and
check-quorum from Ongaro's thesis, 2014, §6.2, §9.6; one change of voters at a time, §4.1, with the correction
that a leader first needs a committed entry of its own term.

A voter is a peer *and a disk*: a peer that comes back without its disk has another voter id, so that it
cannot vote twice in a term. A message that states what the disk holds is sent only once the disk holds it.
"""

from __future__ import annotations

from anabranch.counter_rng import CounterRng
from anabranch.protocol.log.hash_chain import LogError, Position
from anabranch.protocol.log.records import AnyRecord, Entry, Voters
from anabranch.protocol.messages import Append, Appended, AskVote, TakeOver, Vote
from anabranch.protocol.raft.election import Election
from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.protocol.raft.replication import Replication
from anabranch.protocol.raft.state import VoterState
from anabranch.protocol.raft.term_claims import TermClaims
from anabranch.protocol.raft.types import Effect, RaftMessage, Role


class Raft(VoterState):
    """Raft state machine of one voter, or of a learner (a copy of the log without a vote). log, term, vote:
    as on disk. heartbeat_s: seconds between the leader's broadcasts.

    The owner calls `begin` once, then the other methods as events happen, each with the time `now` (s). After
    each call it carries out the effects that `take` returns.
    """

    def __init__(
        self,
        me: str,
        log: RaftLog,
        rng: CounterRng,
        heartbeat_s: float,
        term: int = 0,
        vote: str = "",
        commit_index: int = 0,
    ) -> None:
        super().__init__(me, log, heartbeat_s, term, vote, commit_index)
        self.election = Election(self, rng, self._step_down, self._lead)
        self.replication = Replication(self, self._step_down)
        self._claims = TermClaims()

    # --- inputs --------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Start the voter; if it is the only voter of the group, it leads at once."""
        self.now = now
        self.election.reset_timer()
        if self.is_only_voter():
            self._lead(self.term + 1)
        self._flush()

    def take(self) -> list[Effect]:
        """Return and clear the effects that the owner has to carry out since the last call."""
        effects, self.effects = self.effects, []
        return effects

    def deadline(self) -> float:
        """Time at which `tick` must be called next (s); infinite for never."""
        if self.role is Role.LEADER:
            return self.replication.heartbeat_at
        return self.election.deadline if self.may_stand() else float("inf")

    def tick(self, now: float) -> None:
        """Act on a deadline that has passed: send the leader's heartbeat, step down if no majority answers
        it, or stand for election. Nothing before the deadline of a voter that does not lead."""
        self._advance(now)
        if self.role is Role.LEADER:
            self.replication.tick()
        elif self.may_stand() and self.now >= self.election.deadline:
            self.election.stand()
        self._flush()

    def persisted(self, number: int, now: float) -> None:
        """Note that the write `number` and all before it are on disk: send the messages that waited for them,
        and commit what a majority has."""
        self._advance(now)
        self.effects += self.persistence.persisted(number)
        if self.role is Role.LEADER:
            self.replication.advance_commit()
        self._flush()

    def receive(self, message: RaftMessage, now: float) -> None:
        """Handle a Raft message of another voter. Ignored are a message to an earlier disk of this peer, and
        a later term named by a voter that does so too often while this one has a leader."""
        self._advance(now)
        if message.to != self.me or not self._hears(message):
            return
        match message:
            case AskVote():
                self.election.on_request(message)
            case Vote():
                self.election.on_vote(message)
            case Append():
                self._on_append(message)
            case Appended():
                self.replication.on_appended(message)
            case TakeOver():
                valid = message.term == self.term and message.sender == self.leader
                if valid and self.campaigns and self.may_stand():
                    self.transferred_by = message.sender
                    self.election.campaign(forced=True)
        self._flush()

    def _hears(self, message: RaftMessage) -> bool:
        """True if a message is to be handled. False if it would end the present leader's term, and its sender
        named later terms too often lately; each one that is heard is counted. The voter to which this one
        hands its leadership is always heard."""
        if self.transferring and message.sender == self.replication.transferee:
            return True
        raises = not message.trial and message.forced if isinstance(message, AskVote) else True
        granted = isinstance(message, Vote) and message.granted
        if message.term <= self.term or not raises or granted or not self.has_leader():
            return True
        return self._claims.hears(message.sender, self.now, self.timeout.patience_s)

    def leader_lost(self, voter: str, now: float) -> None:
        """Note that the connection to `voter` broke; if it was the leader, stand for election soon."""
        self._advance(now)
        if voter == self.leader and self.role is Role.FOLLOWER:
            self.election.leader_lost()

    def _advance(self, now: float) -> None:
        self.now = max(self.now, now)

    def _flush(self) -> None:
        self.effects += self.persistence.flush(self.term, self.vote, self.log)

    # --- roles ---------------------------------------------------------------------------------

    def _step_down(self, term: int, leader: str) -> None:
        """Become a follower of `leader` ("": not known) in `term`, the present one or a later one."""
        if term > self.term:
            self.enter_term(term, "")
        if self.role is Role.LEADER:
            self.replication.end()
            self.election.heard_at = self.now
            self.election.reset_timer()
        self.change_role(Role.FOLLOWER, leader)

    def _lead(self, term: int) -> None:
        self.enter_term(term, self.me)
        self.change_role(Role.LEADER, self.me)
        self.replication.begin()

    # --- follower ------------------------------------------------------------------------------

    def _on_append(self, message: Append) -> None:
        """Handle an AppendEntries message: follow its sender as the leader of this or a later term, append
        its entries, commit as far as it has, and reply. A message of an earlier term is refused."""
        if message.term < self.term or (self.role is Role.LEADER and message.term == self.term):
            self._reply(message, None)
            return
        is_new = message.sender != self.leader or message.term > self.term
        if is_new:
            self._step_down(message.term, message.sender)
        self.election.leader_heard(is_new)
        matched = self._append_entries(message)
        self._reply(message, matched)
        if matched is not None:
            self.commit(min(message.chosen, matched))

    def _reply(self, message: Append, matched: int | None) -> None:
        """Answer an AppendEntries message. matched: number of entries that agree with the leader's log; None:
        the sent entries do not follow this log, or the leader's term is over."""
        matches, length = matched is not None, self.log.length if matched is None else matched
        self.persistence.send(Appended(self.me, message.sender, self.term, matches, length, message.round))

    def _append_entries(self, message: Append) -> int | None:
        """Append the entries of an AppendEntries message to the log, in place of entries that differ. Returns
        the number of entries of this log that now agree with the leader's; None if the new entries do not
        follow it."""
        log = self.log
        if log.length == 0 and self.me not in log.voters and 0 < message.start <= message.chosen:
            # An empty learner of a leader that keeps no older entries: those are committed.
            self.restart_log(Position(message.start, message.previous))
            log = self.log
        if message.start > self.commit_index and log.hash_before(message.start) != message.previous:
            return None
        for index, line in enumerate(message.lines, message.start):
            if index < self.commit_index or (index < log.length and log.line(index) == line):
                continue
            if index < log.length:
                log.truncate(index)
                self.persistence.truncated(index)
            try:
                log.append(line, message.term)
            except LogError:
                return None
        return max(message.start + len(message.lines), min(self.commit_index, message.chosen))

    # --- questions -----------------------------------------------------------------------------

    @property
    def concerned(self) -> bool:
        """True if this voter ever needs `tick`: it leads or may stand for election."""
        return self.role is Role.LEADER or self.may_stand()

    def has_leader(self) -> bool:
        """True if this voter leads or heard the leader within the election timeout."""
        return self.role is Role.LEADER or self.election.leader_alive()

    @property
    def busy(self) -> bool:
        """True if no record should be proposed now: entries are not committed yet, or leadership is being
        transferred."""
        return self.transferring or self.commit_index < self.log.length

    def change_problem(self, voters: tuple[str, ...]) -> str:
        """Reason why the leader may not change the voters to `voters` now; "": it may, or they are the voters
        already."""
        if set(voters) == set(self.log.voters):
            return ""
        if not voters or len(set(voters) ^ set(self.log.voters)) > 1:
            return "voters change one at a time"
        if self.commit_index <= self.log.voters_since:
            return "the last change of voters is not chosen yet"
        if not self.own_term_committed():
            return "no entry of this leader's own term is chosen yet"
        return ""

    def caught_up(self, learner: str) -> bool:
        """True if `learner`, another voter or a learner, has all committed entries on its disk, as far as
        this leader knows. False on a voter that does not lead."""
        known = self.replication.progress.get(learner)
        return known is not None and not known.probing and known.match_index >= self.commit_index

    def lags(self, learner: str) -> bool:
        """True if the log of `learner`, another voter or a learner, ends before the first entry that this
        leader keeps: it cannot catch up. False on a voter that does not lead."""
        known = self.replication.progress.get(learner)
        return known is not None and known.beyond_reach

    # --- requests to the leader ----------------------------------------------------------------

    def propose(self, record: AnyRecord, now: float) -> Entry:
        """Append a record to the log as the leader and send it to the other voters; returns its entry, which
        is not committed yet. Raises LogError if this voter does not lead, is transferring leadership, or the
        change of voters that `record` makes is not allowed now (`change_problem`)."""
        self._advance(now)
        if self.role is not Role.LEADER or self.transferring:
            raise LogError("only the leader proposes, and not while it transfers leadership")
        if isinstance(record, Voters) and (problem := self.change_problem(record.ids)):
            raise LogError(problem)
        entry = self.replication.append(record)
        self.replication.broadcast()
        self._flush()
        return entry

    def add_learner(self, learner: str) -> None:
        """Begin to replicate the log to `learner`, which is to become a voter; on a voter that does not lead,
        once it leads."""
        self.replication.add_learner(learner)
        self._flush()

    def transfer_leadership(self, now: float, to: str) -> None:
        """Begin to hand leadership to voter `to`. Until that leads, or for one election timeout, nothing is
        proposed. Without effect if this voter does not lead."""
        self._advance(now)
        self.replication.transfer(to)
        self._flush()

    def call_election(self, now: float) -> None:
        """Give up leadership and stand for election at once, so that this voter leads in a new term: its
        owner became able to lead only now. Nothing if it does not lead."""
        self._advance(now)
        if self.role is Role.LEADER:
            self._step_down(self.term, "")
            if self.is_only_voter():
                self._lead(self.term + 1)
            else:
                self.election.campaign(forced=True)
            self._flush()
