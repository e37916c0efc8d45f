"""Follower's part of log replication: entries of the leader are checked, appended and acknowledged."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.log.hash_chain import LogError, Position
from anabranch.protocol.messages import Append, Appended
from anabranch.protocol.raft.election import Election
from anabranch.protocol.raft.state import VoterState
from anabranch.protocol.raft.types import Role


class LogFollower:
    """Follower side of log replication: receiver of AppendEntries messages. step_down(term, leader): callback
    that makes this voter a follower."""

    def __init__(self, state: VoterState, election: Election, step_down: Callable[[int, str], None]) -> None:
        self._state = state
        self._election = election
        self._step_down = step_down

    def on_append(self, message: Append) -> None:
        """Handle an AppendEntries message: follow its sender, the leader of this or a later term."""
        state = self._state
        if message.term < state.term or (state.role is Role.LEADER and message.term == state.term):
            self._reply(message, None)
            return
        is_new = message.sender != state.leader or message.term > state.term
        if is_new:
            self._step_down(message.term, message.sender)
        self._election.leader_heard(is_new)
        matched = self._append(message)
        self._reply(message, matched)
        if matched is not None:
            state.commit(min(message.chosen, matched))

    def _reply(self, message: Append, matched: int | None) -> None:
        """Answer an AppendEntries message. matched: number of entries that agree with the leader's log; None:
        the sent entries do not follow this log, or the leader's term is over."""
        state = self._state
        matches, length = matched is not None, state.log.length if matched is None else matched
        state.send(Appended(state.me, message.sender, state.term, matches, length, message.round))

    def _append(self, message: Append) -> int | None:
        """Append the entries of an AppendEntries message to the log, in place of entries that differ. Returns
        the number of entries of this log that now agree with the leader's; None if the new entries do not
        follow it."""
        state = self._state
        log = state.log
        if log.length == 0 and state.me not in log.voters and 0 < message.start <= message.chosen:
            # An empty learner of a leader that keeps no older entries: those are committed.
            state.restart_log(Position(message.start, message.previous))
            log = state.log
        if message.start > state.commit_index and log.hash_before(message.start) != message.previous:
            return None
        for index, line in enumerate(message.lines, message.start):
            if index < state.commit_index or (index < log.length and log.line(index) == line):
                continue
            if index < log.length:
                log.truncate(index)
                state.persistence.truncated(index)
            try:
                log.append(line, message.term)
            except LogError:
                return None
        return max(message.start + len(message.lines), min(state.commit_index, message.chosen))
