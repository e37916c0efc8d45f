"""Raft messages. `sender` and `to` are voter ids: a peer and a disk."""

from __future__ import annotations

from anabranch.protocol.messages.common import Count, Hash, Id, Message


class AskVote(Message, frozen=True, tag=60):
    """RequestVote RPC of a candidate whose log has `length` entries, the last of `last_term`.

    trial: True for a pre-vote, which does not bind the voter. forced: True if the leader handed its
    leadership over, or gave it up to be elected anew: voters may grant the vote though they hear a leader.
    """

    sender: Id
    to: Id
    term: Count
    trial: bool
    length: Count
    last_term: Count
    forced: bool = False


class Vote(Message, frozen=True, tag=61):
    """Reply to AskVote. term: that of the candidate if the vote is granted, else the voter's own."""

    sender: Id
    to: Id
    term: Count
    trial: bool
    granted: bool


class Append(Message, frozen=True, tag=62):
    """AppendEntries RPC: log lines from index `start` on, hash of the entry before them (`previous`), number
    of committed entries (`chosen`).

    round: running number of the leader's broadcasts.
    """

    sender: Id
    to: Id
    term: Count
    start: Count
    previous: Hash
    lines: tuple[bytes, ...]
    chosen: Count
    round: Count


class Appended(Message, frozen=True, tag=63):
    """Reply to Append. matches: True if the first `length` entries agree with the leader's log and are
    durable; otherwise the sender's log has `length` entries, which the sent ones do not follow, or the
    leader's term is over."""

    sender: Id
    to: Id
    term: Count
    matches: bool
    length: Count
    round: Count


class TakeOver(Message, frozen=True, tag=64):
    """TimeoutNow RPC of a leadership transfer: the receiver stands for election at once."""

    sender: Id
    to: Id
    term: Count
