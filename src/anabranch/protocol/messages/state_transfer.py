"""Messages to fetch gradients and stage states, and to keep copies of states at other peers.

Tags 77 and 78 are retired: an earlier release kept gradients at other peers. They must not be used again.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.protocol.messages.common import Count, CountOrNone, Hash, Id, Message, StageNumber


class FetchGradient(Message, frozen=True, tag=47):
    """Request for the reduced gradient of iteration t at `stage`; answered by Gradient."""

    t: Count
    stage: StageNumber


class Gradient(Message, frozen=True, tag=48):
    """Reply to FetchGradient. Payload: the flat reduced gradient; none if the sender does not have it (any
    more)."""

    t: Count
    stage: StageNumber


class FetchState(Message, frozen=True, tag=49):
    """Request for the state of `stage` after iteration t (-1: the latest), answered by StateOffer."""

    stage: StageNumber
    t: CountOrNone


class StateOffer(Message, frozen=True, tag=50):
    """Reply to FetchState: the sender holds the state of `stage` after iteration t, with this fingerprint, in
    `pieces` pieces (0: the sender does not hold it). hashes: of the pieces; empty if only the whole state can
    be verified."""

    stage: StageNumber
    t: CountOrNone
    fingerprint: Hash
    pieces: Count
    hashes: tuple[Hash, ...] = ()


class FetchPiece(Message, frozen=True, tag=51):
    """Request for one piece of an offered state."""

    stage: StageNumber
    t: Count
    piece: Count


class Piece(Message, frozen=True, tag=52):
    """Reply to FetchPiece. Payload: bytes of piece number `piece` of the state. (A peer without the state
    answers with a StateOffer of 0 pieces.)"""

    stage: StageNumber
    t: Count
    piece: Count


class Keep(Message, frozen=True, tag=70):
    """Order of the leader to keep a copy of the state of `stage` after iteration t. fingerprint: its hash.
    sources: peers to fetch it from."""

    stage: StageNumber
    t: Count
    fingerprint: Hash
    sources: tuple[Id, ...]


class Held(msgspec.Struct, array_like=True, frozen=True):
    """Entry of Holds: the state of `stage` after iteration t that a peer holds. fingerprint "": the leader
    ordered it, but the peer has no room for it."""

    stage: StageNumber
    t: Count
    fingerprint: Hash


class Holds(Message, frozen=True, tag=71):
    """Full list of the snapshots (of any stage) that the sender holds, and of those for which it has no room.
    number: running number of these reports; late ones are ignored. gradients: always empty, formerly kept
    gradients."""

    states: tuple[Held, ...]
    number: Count
    gradients: tuple[()] = ()


class Complete(Message, frozen=True, tag=72):
    """Leader's notice that enough peers hold all states after iteration t: older snapshots may be dropped."""

    t: Count


class WhoHas(Message, frozen=True, tag=73):
    """Request for the holders of the state of `stage` after iteration t (-1: the last committed one);
    answered by Holders."""

    stage: StageNumber
    t: CountOrNone


class Holders(Message, frozen=True, tag=74):
    """Reply to WhoHas. peers: known holders of the state of `stage` after iteration t. fingerprint: of that
    state; "", without peers, if the run cannot go back to t. Without peers, to a joiner that reported itself
    ready: the state that it has after t is not the run's. Without peers, to a replica that serves and asked
    by `Ready`: the fingerprint that is agreed, "" if none is yet."""

    stage: StageNumber
    t: Count
    fingerprint: Hash
    peers: tuple[Id, ...]


class Behind(Message, frozen=True, tag=75):
    """Report of a replica of `stage` that it cannot get what it needs to apply step t (R12); the leader may
    roll the run back. step: always 0, formerly the step whose kept gradient was missing."""

    t: Count
    stage: StageNumber
    step: Literal[0] = 0


class Spoilt(Message, frozen=True, tag=76):
    """Report to the leader that the bytes which peer `holder` delivered are not the state of `stage` after
    iteration t."""

    stage: StageNumber
    t: Count
    holder: Id
