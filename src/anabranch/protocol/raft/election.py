"""Elections of Raft: election timer, pre-vote, candidacy, and the voter's own vote."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.counter_rng import CounterRng
from anabranch.protocol.messages import AskVote, Vote
from anabranch.protocol.raft.state import VoterState
from anabranch.protocol.raft.types import Role

#: Greatest number of doublings of the election timer after elections without a winner.
DOUBLINGS = 4


class Election:
    """Election timer, candidacy and vote of one Raft voter. heard_at: time (s) at which it last heard a
    leader, lost or not, or led itself; minus infinity: never. step_down(term, leader): callback that makes
    this voter a follower. lead(term): callback that makes it the leader."""

    def __init__(
        self,
        state: VoterState,
        rng: CounterRng,
        step_down: Callable[[int, str], None],
        lead: Callable[[int], None],
    ) -> None:
        self.deadline = float("inf")
        self._state = state
        self._dice = rng
        self._step_down = step_down
        self._lead = lead
        self._leader_heard_at = self.heard_at = float("-inf")
        self._failures = 0
        self._votes: set[str] = set()
        self._asked_at = 0.0

    # --- timer ---------------------------------------------------------------------------------

    def reset_timer(self) -> None:
        """Restart the election timer with a random delay, from a range that doubles after each vain election
        (DOUBLINGS times at most), and is longer if the owner could not lead."""
        state = self._state
        patience_s = state.timeout.patience_s * 2.0 ** min(self._failures, DOUBLINGS)
        spread = self._dice.uniform(1.0, 2.0) + (not state.campaigns)
        self.deadline = state.now + patience_s * spread

    def leader_heard(self, is_new: bool) -> None:
        """Note that a message from the current leader arrived, which postpones the election. is_new: True if
        it is the first message of that leader; else the time since the one before is a sample for the
        election timeout."""
        now = self._state.now
        if not is_new and self._leader_heard_at > float("-inf"):
            self._state.timeout.add_gap(now - self._leader_heard_at)
        self._leader_heard_at = self.heard_at = now
        self._failures = 0
        self.reset_timer()

    def leader_lost(self) -> None:
        """Note that the connection to the leader broke: the election timer has at most one more heartbeat to
        run, drawn at random (one more on top if the owner could not lead)."""
        self._leader_heard_at = float("-inf")
        soon_s = self._state.heartbeat_s * (self._dice.uniform(0.0, 1.0) + (not self._state.campaigns))
        self.deadline = min(self.deadline, self._state.now + soon_s)

    def leader_alive(self) -> bool:
        """True if the leader was heard within the election timeout."""
        state = self._state
        return state.leader != "" and state.now < self._leader_heard_at + state.timeout.patience_s

    # --- candidate -----------------------------------------------------------------------------

    def stand(self) -> None:
        """Begin a pre-vote: ask the other voters whether they would vote for this one, without raising the
        term, so that a voter that is cut off cannot raise the others' term. The only voter of a log becomes
        its leader at once, in the next term."""
        state = self._state
        if state.is_only_voter():
            self._failures = 0
            self._lead(state.term + 1)
            return
        self.reset_timer()
        self._failures += 1
        self._asked_at = state.now
        state.change_role(Role.PRE_CANDIDATE, "")
        state.transferred_by = ""
        self._votes = {state.me}
        self._request_votes(state.term + 1, trial=True, forced=False)

    def campaign(self, forced: bool = False) -> None:
        """Become a candidate: enter the next term, vote for itself, and ask the other voters for their votes.
        forced: True if they are to vote although they hear a leader, which handed its leadership to this
        voter or gave it up."""
        state = self._state
        self.reset_timer()
        self._asked_at = state.now
        state.enter_term(state.term + 1, state.me)
        state.change_role(Role.CANDIDATE, "")
        self._votes = {state.me}
        self._request_votes(state.term, trial=False, forced=forced)

    def _request_votes(self, term: int, trial: bool, forced: bool) -> None:
        state = self._state
        length, last_term = state.log.length, state.log.last_term
        for voter in state.log.voters:
            if voter != state.me:
                state.persistence.send(AskVote(state.me, voter, term, trial, length, last_term, forced))

    def on_vote(self, message: Vote) -> None:
        """Count a vote for this voter. A majority turns a pre-candidate into a candidate, and a candidate
        into the leader; a refusal from a later term makes this voter a follower."""
        state = self._state
        if not message.granted and message.term > state.term:
            self._step_down(message.term, "")
        expected = Role.PRE_CANDIDATE if message.trial else Role.CANDIDATE
        term = state.term + 1 if message.trial else state.term
        if state.role is not expected or message.term != term or not message.granted:
            return
        state.timeout.add_round_trip(state.now - self._asked_at)
        self._votes.add(message.sender)
        if not state.has_quorum(self._votes):
            return
        self._failures = 0  # answered in time: only a split vote can prevent the election
        if message.trial:
            self.campaign()
        else:
            self._lead(state.term)

    # --- voter ---------------------------------------------------------------------------------

    def on_request(self, message: AskVote) -> None:
        """Answer another voter's request for a vote or a pre-vote; only a vote binds this voter. The answer
        is no as long as this voter leads or hears a leader, unless the request is forced; if the candidate's
        log is behind this one; if the term is over (for a pre-vote: is not a later one); and if this voter
        has voted for another in it."""
        state = self._state
        if (state.role is Role.LEADER or self.leader_alive()) and not message.forced:
            granted = False
        elif message.trial:
            granted = message.term > state.term and self._is_complete(message)
        else:
            if message.term > state.term:
                self._step_down(message.term, "")
            granted = message.term == state.term and self._is_complete(message) and self.grant(message)
        term = message.term if granted else state.term
        state.persistence.send(Vote(state.me, message.sender, term, message.trial, granted))

    def _is_complete(self, message: AskVote) -> bool:
        """True if the candidate's log is at least as up to date as this voter's (§5.4.1)."""
        log = self._state.log
        return (message.last_term, message.length) >= (log.last_term, log.length)

    def grant(self, message: AskVote) -> bool:
        """Vote for the candidate that sent `message`, if this voter has not voted for another one in its
        present term; returns whether it did. The vote is written to disk, and the timer restarts."""
        state = self._state
        if state.vote not in ("", message.sender):
            return False
        state.enter_term(state.term, message.sender)
        self.reset_timer()
        return True
