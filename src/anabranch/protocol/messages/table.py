"""Table of all message types: fence, permitted sender, rate, payload priority, handler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from anabranch.protocol.messages import (
    audit,
    commit,
    liveness_and_routing,
    membership,
    operator,
    pipeline,
    raft,
)
from anabranch.protocol.messages import state_transfer as state
from anabranch.protocol.messages.common import Message


class FenceCheck(Enum):
    """Checks of a message's Fence by the receiver, before the handler runs; each type of message has one of
    them."""

    NONE = auto()
    #: Incarnation of the sending member. A message of a former incarnation is refused.
    INCARNATION = auto()
    #: The whole fence. A message about a past iteration is dropped, one about a later iteration kept until
    #: then.
    ITERATION = auto()


class Sender(Enum):
    """Peers that may send a message; the receiver refuses it from others before the handler runs."""

    #: Every admitted peer, member or not. The handler checks what else it needs.
    ANYONE = auto()
    #: The same and observers, who may send nothing else.
    OBSERVER = auto()
    #: Members that serve the stage after, before, or on either side of the receiver's in the open iteration.
    NEXT_STAGE = auto()
    PREVIOUS_STAGE = auto()
    ADJACENT_STAGE = auto()
    #: Participants of a stage's reduce: its members and, from adjacent stages, its helpers.
    REDUCE_GROUP = auto()
    #: The log's leader.
    LEADER = auto()
    #: Electors and learners of the log; the handler itself refuses others.
    VOTER = auto()


class Rate(Enum):
    """Kinds of budget, one for each type of message: a message is charged to its sender's budget of that
    kind, before anything else is looked at."""

    #: Heartbeats. They are no sign of work, so nothing else is looked at after them.
    HEARTBEAT = auto()
    #: Messages of which a microbatch causes a few.
    WORK = auto()
    #: Letters of the flow agents and probes: about many peers at once when many fall silent together.
    ROUTING = auto()
    #: Parts of sums and pieces of states.
    TRANSFER = auto()
    #: Messages of which a step or a change of membership causes a few.
    ORDINARY = auto()
    #: Short question with a long answer: refused beyond its budget, as honest peers may ask in vain for long.
    COSTLY = auto()
    #: Also charged by the number of events in it.
    EVENTS = auto()


@dataclass(frozen=True, eq=False)
class Allowance:
    """Budget of one sender: `burst` messages at once, and `per_s` more per second; of some budgets lines, or
    bytes, instead of messages."""

    burst: float
    per_s: float


#: Budget of each rate for each sender. The link to a peer that exceeds it is closed and the peer banned, but
#: for COSTLY. By `simtest` and `simulate`, honest peers need at most 200 messages of a type at once.
ALLOWANCES: Mapping[Rate, Allowance] = {
    Rate.HEARTBEAT: Allowance(512.0, 64.0),
    Rate.WORK: Allowance(8192.0, 2048.0),
    Rate.ROUTING: Allowance(4096.0, 1024.0),
    Rate.TRANSFER: Allowance(4096.0, 1024.0),
    Rate.ORDINARY: Allowance(2048.0, 256.0),
    Rate.COSTLY: Allowance(64.0, 8.0),
    # As many as lines: a voter hands on the reports of all others while the founder was away, line by line.
    Rate.EVENTS: Allowance(8192.0, 256.0),
}
#: Budget of payloads that answer no request. Honest peers send none, but to a process that has started anew:
#: two pieces, a gradient and an input of an audit.
UNASKED = Allowance(8.0, 1.0 / 60.0)
#: Budget of the payloads of bandwidth probes, which are not asked for, in trials of the run's size. An honest
#: peer sends one over each link, and one over each that comes in its place until one is answered.
PROBES = Allowance(32.0, 1.0 / 60.0)
#: Budget of messages about past iterations, besides that of their rate: all units of an iteration may be late
#: at once, seldom.
PAST = Allowance(4096.0, 64.0)


#: Any message type; within `Row` the name `type` is taken.
AnyType = type[Message]


@dataclass(frozen=True)
class Row:
    """Properties of one message type.

    handler: name of the function that handles the message (`protocol.peer.handlers.HANDLERS`). sender: peers
    that may send it. fence: check of its Fence. rate: budget to which it is charged. to_leader: True if only
    the log's leader acts on it. per_connection: True if the message is void once its connection broke.
    priority: of the payload among a connection's bulk transfers, lowest first; None: no payload. answers:
    request of the receiver that the payload answers (None: none); a sender packs one such payload at a time.
    """

    type: type[Message]
    handler: str
    sender: Sender = Sender.ANYONE
    fence: FenceCheck = FenceCheck.NONE
    rate: Rate = Rate.ORDINARY
    to_leader: bool = False
    per_connection: bool = False
    priority: int | None = None
    answers: AnyType | None = None


_ITERATION, _INCARNATION = FenceCheck.ITERATION, FenceCheck.INCARNATION
_COSTLY, _WORK, _ROUTING, _TRANSFER = Rate.COSTLY, Rate.WORK, Rate.ROUTING, Rate.TRANSFER

#: Rows, one for each message type. Payloads are sent in this order: input gradients, activations, reduce
#: parts, gradients for replicas that catch up, snapshots and audited work, bandwidth probes.
ROWS = (
    Row(pipeline.Slots, "slots", Sender.NEXT_STAGE, _ITERATION, rate=_WORK, per_connection=True),
    Row(pipeline.Ask, "ask", Sender.PREVIOUS_STAGE, _ITERATION, rate=_WORK, per_connection=True),
    Row(pipeline.Return, "return_slots", Sender.PREVIOUS_STAGE, _ITERATION, rate=_WORK, per_connection=True),
    Row(pipeline.Forward, "forward", Sender.PREVIOUS_STAGE, _ITERATION, rate=_WORK, priority=1),
    Row(pipeline.Backward, "backward", Sender.NEXT_STAGE, _ITERATION, rate=_WORK, priority=0),
    Row(
        *(pipeline.InnerActivation, "inner", Sender.PREVIOUS_STAGE, _ITERATION),
        rate=_WORK,
        priority=1,
    ),
    Row(pipeline.InnerGradient, "inner", Sender.NEXT_STAGE, _ITERATION, rate=_WORK, priority=0),
    Row(pipeline.Want, "want", Sender.PREVIOUS_STAGE, _ITERATION, rate=_WORK),
    Row(pipeline.Have, "have", Sender.NEXT_STAGE, _ITERATION, rate=_WORK),
    Row(pipeline.Lack, "lack", Sender.NEXT_STAGE, _ITERATION, rate=_WORK),
    Row(pipeline.CallBack, "call_back", Sender.PREVIOUS_STAGE, _ITERATION, rate=_WORK),
    Row(pipeline.Got, "got", Sender.ADJACENT_STAGE, _ITERATION, rate=_WORK),
    Row(pipeline.Overflow, "overflow", fence=_INCARNATION, to_leader=True),
    Row(commit.Claim, "claim", fence=_INCARNATION, rate=_WORK, to_leader=True),
    Row(commit.ContributionDigests, "digests", fence=_INCARNATION, rate=_WORK, to_leader=True),
    Row(commit.Attempt, "attempt", Sender.LEADER, _ITERATION),
    Row(commit.ReducePart, "reduce_part", Sender.REDUCE_GROUP, _ITERATION, rate=_TRANSFER, priority=2),
    Row(commit.ReducedPart, "reduce_part", Sender.REDUCE_GROUP, _ITERATION, rate=_TRANSFER, priority=2),
    Row(commit.Prepared, "prepared", fence=_INCARNATION, to_leader=True),
    Row(commit.Applied, "applied", fence=_INCARNATION, to_leader=True),
    Row(commit.Vouch, "vouch", fence=_INCARNATION, to_leader=True),
    Row(commit.Release, "release", Sender.LEADER),
    Row(commit.Announce, "announce", Sender.LEADER),
    Row(commit.FetchLog, "fetch_log", rate=_COSTLY),
    Row(commit.Missing, "missing", Sender.LEADER, _ITERATION),
    Row(commit.Spared, "spared", Sender.LEADER),
    Row(commit.Measured, "measured", to_leader=True),
    Row(membership.Enquire, "enquire", rate=_COSTLY, to_leader=True),
    Row(membership.About, "about", Sender.LEADER),
    Row(membership.Reached, "reached", Sender.LEADER),
    Row(membership.JoinRequest, "join_request", rate=_COSTLY, to_leader=True),
    Row(membership.Welcome, "welcome", Sender.LEADER),
    Row(membership.Refused, "refused", Sender.LEADER),
    Row(membership.Ready, "ready", to_leader=True),
    Row(membership.Leave, "leave", to_leader=True),
    Row(membership.Elsewhere, "elsewhere"),
    Row(membership.Carry, "carry", rate=_COSTLY, to_leader=True),
    Row(liveness_and_routing.Ping, "ping", rate=Rate.HEARTBEAT),
    Row(liveness_and_routing.Pong, "pong", rate=Rate.HEARTBEAT),
    Row(liveness_and_routing.Route, "route", rate=_ROUTING),
    Row(liveness_and_routing.Bargain, "route", rate=_ROUTING),
    Row(liveness_and_routing.Burst, "route", rate=_ROUTING, priority=5),
    Row(liveness_and_routing.GotBurst, "route", rate=_ROUTING),
    Row(liveness_and_routing.Probe, "indirect_probe", rate=_ROUTING),
    Row(liveness_and_routing.Probed, "indirect_probe", rate=_ROUTING),
    Row(state.FetchGradient, "fetch_gradient", rate=_COSTLY),
    Row(state.Gradient, "gradient", rate=_TRANSFER, priority=3, answers=state.FetchGradient),
    Row(state.FetchState, "fetch_state", rate=_COSTLY),
    Row(state.StateOffer, "state_offer", rate=_TRANSFER),
    Row(state.FetchPiece, "fetch_piece", rate=_TRANSFER),
    Row(state.Piece, "piece", rate=_TRANSFER, priority=4, answers=state.FetchPiece),
    Row(state.Keep, "keep", Sender.LEADER),
    Row(state.Holds, "holds", to_leader=True),
    Row(state.Complete, "complete", Sender.LEADER),
    Row(state.WhoHas, "who_has", rate=_COSTLY, to_leader=True),
    Row(state.Holders, "holders", Sender.LEADER),
    Row(state.Behind, "behind", to_leader=True),
    Row(state.Spoilt, "spoilt", to_leader=True),
    Row(audit.FetchWork, "fetch_work", rate=_TRANSFER),
    Row(audit.Work, "work", rate=_TRANSFER, priority=4, answers=audit.FetchWork),
    Row(audit.Audited, "audited", to_leader=True),
    Row(audit.Audit, "audit", Sender.LEADER),
    Row(operator.Report, "report", rate=Rate.EVENTS, to_leader=True),
    Row(operator.Wish, "wish", to_leader=True),
    Row(operator.Watch, "watch", Sender.OBSERVER, rate=_COSTLY),
    Row(operator.Shown, "shown"),
    Row(raft.AskVote, "raft", Sender.VOTER),
    Row(raft.Vote, "raft", Sender.VOTER),
    Row(raft.Append, "raft", Sender.VOTER),
    Row(raft.Appended, "raft", Sender.VOTER),
    Row(raft.TakeOver, "raft", Sender.VOTER),
)

ROW_OF: dict[type[Message], Row] = {row.type: row for row in ROWS}
ALLOWANCE_OF: dict[type[Message], Allowance] = {row.type: ALLOWANCES[row.rate] for row in ROWS}
#: Types that may carry a payload, with its priority.
PAYLOAD_PRIORITY = {row.type: row.priority for row in ROWS if row.priority is not None}
#: Type of a request -> type of its answer, which may carry a payload.
ANSWER_OF: dict[AnyType, AnyType] = {
    answers: row.type for row in ROWS if (answers := row.answers) is not None
}
ASKED_FOR = frozenset(ANSWER_OF.values())
HEARTBEATS = frozenset(row.type for row in ROWS if row.rate is Rate.HEARTBEAT)
#: Types that are void once their connection broke: both ends of the next connection count credits anew.
PER_CONNECTION = frozenset(row.type for row in ROWS if row.per_connection)
