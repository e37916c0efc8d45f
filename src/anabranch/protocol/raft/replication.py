"""Leader's part of Raft: log replication and commitment, leadership transfer, check-quorum."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.log.records import AnyRecord, Entry, NoOp, Voters, encode_entry
from anabranch.protocol.messages import Append, Appended, TakeOver
from anabranch.protocol.raft.progress import Progress
from anabranch.protocol.raft.state import VoterState
from anabranch.protocol.raft.types import Role

#: Broadcasts whose send time is kept to measure round trips. A choice: later replies say nothing new.
ROUNDS_KEPT = 64


class Replication:
    """Leader side of Raft: replicates one voter's log while that voter leads. step_down(term, leader):
    callback that makes the voter a follower. heartbeat_at: time of the next broadcast (s)."""

    def __init__(self, state: VoterState, step_down: Callable[[int, str], None]) -> None:
        self.progress: dict[str, Progress] = {}
        """Other voter, or learner -> its progress."""
        self._round = 0
        """Running number of the broadcasts."""
        self._sent_at: dict[int, float] = {}
        self.heartbeat_at = 0.0
        self.transferee = ""
        """Voter to which leadership is being transferred, until `_transfer_until` (s)."""
        self._transfer_until = 0.0
        self._state = state
        self._step_down = step_down

    def begin(self) -> None:
        """Start to lead: track the logs of all other voters and learners, append a NoOp record (unless the
        log is empty), and send the first broadcast."""
        state = self._state
        others = (set(state.log.voters) | state.learners) - {state.me}
        self.progress = {voter: Progress(state.log.length, state.now) for voter in sorted(others)}
        if state.log.length:
            self.append(NoOp())  # entries of earlier terms are committed only with one of this term (§5.4.2)
        self.broadcast()

    def end(self) -> None:
        """Stop leading, as the voter steps down: forget others' progress, learners and a transfer."""
        self.progress = {}
        self._state.transferring = False
        self._state.learners.clear()

    def tick(self) -> None:
        """Step down if no majority of voters answered lately; otherwise send the heartbeat if it is due. A
        transfer of leadership that took too long is given up."""
        state = self._state
        if not self._quorum_heard():
            self._step_down(state.term, "")
        state.transferring = state.transferring and state.now < self._transfer_until
        if state.role is Role.LEADER and state.now >= self.heartbeat_at:
            self.broadcast()

    def _quorum_heard(self) -> bool:
        """True if a majority of voters answered within two election timeouts (check-quorum, thesis §6.2)."""
        since = self._state.now - 2.0 * self._state.timeout.patience_s
        return self._state.has_quorum({v for v in self._state.log.voters if self.heard_at(v) >= since})

    def heard_at(self, voter: str) -> float:
        """Time (s) when `voter` last answered this leader, or was first sent the log; -inf: neither; now for
        this leader itself."""
        if voter == self._state.me:
            return self._state.now
        known = self.progress.get(voter)
        return known.heard_at if known is not None else float("-inf")

    def matched(self, voter: str) -> int:
        """Number of log entries of `voter` that certainly agree with the leader's (0: not tracked)."""
        known = self.progress.get(voter)
        return known.matched if known is not None else 0

    # --- entries -------------------------------------------------------------------------------

    def append(self, record: AnyRecord) -> Entry:
        """Append a record to this leader's own log, and return its entry; `broadcast` sends it. Voters that
        it adds are tracked from then on."""
        state = self._state
        position = state.log.position
        entry = Entry(index=position.index, term=state.term, previous=position.previous, record=record)
        state.log.append(encode_entry(entry))
        if isinstance(record, Voters):
            for voter in record.ids:
                if voter != state.me:
                    self.progress.setdefault(voter, Progress(state.log.length, state.now))
            state.learners -= set(record.ids)
        return entry

    def broadcast(self) -> None:
        """Send each voter and learner the log entries that it lacks, or an empty heartbeat; drop the progress
        of peers that vote no longer."""
        state = self._state
        self._round += 1
        self._sent_at[self._round] = state.now
        self._sent_at.pop(self._round - ROUNDS_KEPT, None)
        self.heartbeat_at = state.now + self._state.heartbeat_s
        for voter in sorted(self.progress):
            if voter in state.log.voters or voter in state.learners:
                self._replicate(voter)
            else:
                del self.progress[voter]

    def add_learner(self, learner: str) -> None:
        """Begin to replicate the log to `learner`, which is to become a voter; on a voter that does not lead,
        once it leads. Nothing if it is a learner already."""
        state = self._state
        if learner not in state.learners:
            state.learners.add(learner)
            if state.role is Role.LEADER and learner not in self.progress:
                self.progress[learner] = Progress(state.log.start.index, state.now)
                self._replicate(learner)

    def _replicate(self, voter: str) -> None:
        """Send `voter` the log entries that it lacks, as many as fit one message, or an empty heartbeat."""
        state, known = self._state, self.progress[voter]
        start = known.match_index = max(known.match_index, state.log.start.index)
        previous = state.log.hash_before(start)
        assert previous is not None
        lines = state.log.entries_from(start) if start < state.log.length else ()
        known.next_index = start + len(lines)
        append = Append(state.me, voter, state.term, start, previous, lines, state.commit_index, self._round)
        state.persistence.send(append, after_log=False)

    def on_appended(self, message: Appended) -> None:
        """Handle a follower's reply to AppendEntries: update its progress, advance the commit index, and send
        it further entries. A reply of a later term ends this leader's lead."""
        state = self._state
        if message.term > state.term:
            self._step_down(message.term, "")
        known = self.progress.get(message.sender)
        if state.role is not Role.LEADER or message.term != state.term or known is None:
            return
        known.heard_at = state.now
        if message.round > known.round and message.round in self._sent_at:
            state.timeout.add_round_trip(state.now - self._sent_at[message.round])
        known.round = max(known.round, message.round)
        if message.matches and message.length <= state.log.length:
            known.accepted(message.length)
            self.advance_commit()
            self._offer_leadership()
            if known.next_index <= known.match_index < state.log.length:
                self._replicate(message.sender)
        elif not message.matches and known.rejected(message.length, state.log.start.index):
            self._replicate(message.sender)

    def advance_commit(self) -> None:
        """Commit all entries that a majority of voters has on disk, if the last of them is of this term, and
        tell the voters. A leader that such an entry removes from the voters steps down."""
        state = self._state
        lengths = {voter: self.matched(voter) for voter in state.log.voters}
        lengths[state.me] = state.persistence.durable
        for length in sorted({lengths[voter] for voter in state.log.voters}, reverse=True):
            holders = {voter for voter in state.log.voters if lengths[voter] >= length}
            if length > state.commit_index and state.has_quorum(holders) and self.is_own_term(length):
                state.commit(length)
                self._committed()
                return

    def is_own_term(self, length: int) -> bool:
        """True if entry `length` - 1 is of the leader's present term: entries of older terms are committed
        only together with a later one of this term (§5.4.2)."""
        return self._state.log.term_of(length - 1) == self._state.term

    def _committed(self) -> None:
        state = self._state
        removed = state.me not in state.log.voters and state.commit_index > state.log.voters_since
        self.broadcast()  # a leader that is no voter any more announces the commit before it steps down
        if removed:
            self._step_down(state.term, "")

    # --- leadership transfer -------------------------------------------------------------------

    def transfer(self, to: str) -> None:
        """Hand leadership to voter `to` once that has the whole log; give up after one election timeout.
        Without effect if this voter does not lead."""
        state = self._state
        state.transferring = state.role is Role.LEADER
        self.transferee = to
        self._transfer_until = state.now + self._state.timeout.patience_s
        self._offer_leadership()

    def _offer_leadership(self) -> None:
        state, to = self._state, self.transferee
        known = self.progress.get(to)
        whole = known is not None and not known.probing and known.match_index == state.log.length
        if state.transferring and whole and to in state.log.voters:
            state.persistence.send(TakeOver(state.me, to, state.term))
