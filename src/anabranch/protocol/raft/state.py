"""State shared by the parts of one voter: term, vote, role, leader, log, commit index."""

from __future__ import annotations

from anabranch.protocol.log.hash_chain import Position
from anabranch.protocol.raft.election_timeout import ElectionTimeout
from anabranch.protocol.raft.persistence import Persistence
from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.protocol.raft.types import (
    TRANSITIONS,
    Committed,
    Effect,
    Role,
    RoleChanged,
    majority,
)


class VoterState:
    """Raft state of one voter. Only the methods here change term, vote, role, leader and commit index.
    heartbeat_s: seconds between the leader's broadcasts. timeout: measured election timeout. now: time of the
    present input (s). effects: orders and notices for the owner, in order. campaigns: False if the owner
    could not lead (written by the owner); such a voter waits longer before it stands for election, which it
    still does in case its log is the longest. transferred_by: leader that transferred its leadership to this
    voter ("": none). transferring: True while this leader transfers its leadership. learners: peers without a
    vote to which this leader sends the log."""

    def __init__(
        self, me: str, log: RaftLog, heartbeat_s: float, term: int, vote: str, commit_index: int
    ) -> None:
        self.me = me
        self.log = log
        self.term = max(term, log.last_term)
        self.vote = vote if self.term == term else ""
        self.role = Role.FOLLOWER
        self.leader = ""
        self.commit_index = max(commit_index, log.start.index)
        self.heartbeat_s = heartbeat_s
        self.timeout = ElectionTimeout(heartbeat_s)
        self.campaigns = True
        self.transferred_by = ""
        self.transferring = False
        self.learners: set[str] = set()
        self.now = 0.0
        self.effects: list[Effect] = []
        self.persistence = Persistence(log.length)
        self._announced_term = 0

    def enter_term(self, term: int, vote: str) -> None:
        """Enter `term` with a vote for `vote` in it ("": none yet), to be written to disk."""
        if (term, vote) != (self.term, self.vote):
            self.term, self.vote = term, vote
            self.persistence.term_changed()

    def change_role(self, role: Role, leader: str) -> None:
        """Change the voter's role and known leader, and report the change to the owner; nothing if neither
        these nor the term changed. Raises RuntimeError if TRANSITIONS has no such change."""
        if role is not self.role and role not in TRANSITIONS[self.role]:
            raise RuntimeError(f"a {self.role.value} does not become a {role.value}")
        became = RoleChanged(role, self.term, leader)
        if became != RoleChanged(self.role, self._announced_term, self.leader):
            self.role, self.leader, self._announced_term = role, leader, self.term
            self.effects.append(became)

    def commit(self, index: int) -> None:
        """Advance the commit index to `index`, report the new entries to the owner, and drop the oldest
        committed entries from memory. A lower index changes nothing."""
        while self.commit_index < index:
            self.effects.append(Committed(self.commit_index, self.log.line(self.commit_index)))
            self.commit_index += 1
        self.log.compact(self.commit_index)

    def restart_log(self, start: Position) -> None:
        """Replace the log by an empty one that begins at `start`; all entries before it are committed."""
        self.log = RaftLog(start=start)
        self.persistence.restarted(start.index)
        self.commit_index = start.index

    def has_quorum(self, voters: set[str]) -> bool:
        """True if `voters` include a majority of the present voters."""
        return majority(self.log.voters, voters)

    def is_only_voter(self) -> bool:
        return self.log.voters == (self.me,)

    def may_stand(self) -> bool:
        """True if this voter may stand for election. A removed voter may until its removal is committed,
        because its log may be the longest (thesis §4.2.2); its own vote does not count then."""
        return self.me in self.log.electors(self.commit_index)

    def own_term_committed(self) -> bool:
        """True if the last committed entry is of the present term. Then this leader has all entries that were
        committed before it led (§5.4.2)."""
        index = self.commit_index - 1
        return index >= self.log.start.index and self.log.term_of(index) == self.term
