"""Ids of voters, their roles and the transitions of these, and the effects that a voter asks its owner to
carry out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from anabranch.protocol.messages import Append, Appended, AskVote, TakeOver, Vote

RaftMessage = AskVote | Vote | Append | Appended | TakeOver


def majority(voters: Collection[str], those: Collection[str]) -> bool:
    """True if `those` include a majority of the peers `voters`."""
    return 2 * sum(voter in those for voter in voters) > len(voters)


def voter_id(peer: str, nonce: str) -> str:
    """Voter id of `peer` with the disk named `nonce`. A peer that lost its disk gets another id."""
    return f"{peer}/{nonce}" if nonce else peer


def peer_of(voter: str) -> str:
    """Id of the peer to which a voter id belongs."""
    return voter.partition("/")[0]


class Role(Enum):
    """Role of a voter. A learner is a follower without a vote."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


#: Allowed changes of role. A follower skips the pre-vote if the leader transfers its leadership to it, and
#: the vote if it is the only voter; a leader has to step down before it stands again.
TRANSITIONS = {
    Role.FOLLOWER: {Role.PRE_CANDIDATE, Role.CANDIDATE, Role.LEADER},
    Role.PRE_CANDIDATE: {Role.FOLLOWER, Role.CANDIDATE, Role.LEADER},
    Role.CANDIDATE: {Role.FOLLOWER, Role.PRE_CANDIDATE, Role.LEADER},
    Role.LEADER: {Role.FOLLOWER},
}


@dataclass(frozen=True)
class Send:
    """Effect: send `message` to the voter or learner that it names."""

    message: RaftMessage


@dataclass(frozen=True)
class Write:
    """Effect: write term and vote, truncate the log at entry `start` and append `lines`, durably. The owner
    calls `Raft.persisted(number)` when this is on disk."""

    number: int
    term: int
    vote: str
    start: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class Committed:
    """Effect: entry `index` is committed. These effects come in log order."""

    index: int
    line: bytes


@dataclass(frozen=True)
class RoleChanged:
    """Effect: the voter's role, its term in that role, or the known leader ("": none) changed."""

    role: Role
    term: int
    leader: str


Effect = Send | Write | Committed | RoleChanged
