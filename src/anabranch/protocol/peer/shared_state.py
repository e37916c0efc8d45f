"""State that several parts of a peer read, each with one owner class: progress along the log, summary of its
past, joining step, coordinator, end of the process. State machines are an enum and a table of transitions.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum

from anabranch.protocol.consensus.leader_view import LeaderView
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.early_buffer import EarlyBuffer
from anabranch.protocol.context.links import LostLink
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.coordinator import Coordinator
from anabranch.protocol.fleet.operator_control import FounderRequests
from anabranch.protocol.interface import events as ev
from anabranch.protocol.log.hash_chain import Position
from anabranch.protocol.log.overflow_streak import OverflowStreak
from anabranch.protocol.log.records import AnyRecord, Commit, Genesis, Rollback
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint
from anabranch.protocol.routing.flow_agent import FlowAgentDriver
from anabranch.protocol.state.download import Download
from anabranch.protocol.state.server import StateServer
from anabranch.protocol.state.snapshots import Snapshots

#: Number of past bases kept; a message on an older base is treated as one on an unknown base.
BASES_KEPT = 256
#: Rollback points remembered for a new leader: it needs those whose snapshots are still held, which are few.
POINTS_KEPT = 8


class Progress:
    """Position in the log up to which this peer applied it, and state of the run at that position.

    `committed` is the last committed iteration; `bases` are the hashes of the latest Genesis, Commit and
    Rollback entries, newest last; `closed` is True once the log has the last evaluation. Only log application
    changes these fields, line by line; `start` sets all of them when a peer begins in the middle of the log.
    """

    def __init__(self) -> None:
        self.position = Position()
        self.bases: deque[str] = deque([""], maxlen=BASES_KEPT)
        self._base_of: dict[int, str] = {0: ""}
        """Iteration -> hash of the entry that the run's present history reached it by."""
        self.committed = 0
        self.closed = False

    @property
    def base(self) -> str:
        """Hash of the last Genesis, Commit or Rollback entry."""
        return self.bases[-1]

    def start(self, position: Position, base: str, t: int, former: str = "") -> None:
        """Begin to follow the log at `position`, where `t` is the last committed iteration and `base` the
        hash of its entry. former: if iteration t + 1 is delayed, its base: the hash of the entry of t - 1;
        else ""."""
        self.position = position
        if former:
            self.bases.append(former)
        self.rebase(base, t)
        if former:
            self._base_of[t - 1] = former

    def rebase(self, base: str, t: int) -> None:
        """Note that the entry with hash `base` made `t` the last committed iteration; `t` may be an earlier
        one, after a rollback."""
        self.bases.append(base)
        known = {before: each for before, each in self._base_of.items() if t - BASES_KEPT < before < t}
        # After a rollback (or a start) nothing before it counts: iterations have another base from here on.
        self._base_of = {**known, t: base} if t == self.committed + 1 else {t: base}
        self.committed = t

    def reached(self, t: int, base: str) -> bool:
        """True if the run's present history is known to have reached iteration t by the entry with this hash;
        of iterations before the last rollback, or long ago, nothing is known."""
        return self._base_of.get(t) == base

    def base_of(self, t: int, delayed: bool) -> str:
        """Base of iteration t, which the fence of every message about it names: hash of the log entry that
        led to the state on which t is computed. That is the commit of t - 1, of a delayed iteration the one
        of t - 2, or a later rollback to that state. The oldest one known, if that is not known."""
        return self._base_of.get(t - 1 - delayed) or self._base_of[min(self._base_of)]


class LogSummary:
    """Facts from the log's past that a new leader needs.

    adam_step: step count of the optimizer. fingerprints: state hashes of all stages after the last step
    (empty: not known yet). overflows: streak of steps that overflows skipped, up to the last step.
    """

    def __init__(self) -> None:
        self.adam_step = 0
        self.fingerprints: tuple[str, ...] = ()
        self.overflows = OverflowStreak()
        self._points: dict[int, RestorePoint] = {}
        self._checkpoint: RestorePoint | None = None

    def start(self, adam_step: int, fingerprints: tuple[str, ...] = ()) -> None:
        """Set the facts as they are after the last step, when a peer begins in the middle of the log
        (arguments as the attributes)."""
        self.adam_step, self.fingerprints = adam_step, fingerprints

    def has_checkpoint(self, point: RestorePoint) -> None:
        """Note in memory a checkpoint on this machine's disk, to which the run can be rolled back."""
        self._checkpoint = point

    def points(self, committed: int) -> dict[int, RestorePoint]:
        """Points to which the run can be rolled back, by iteration: those remembered, and the checkpoint on
        this machine's disk unless it is later than `committed`, the last committed iteration."""
        points = dict(self._points)
        if self._checkpoint is not None and self._checkpoint.t <= committed:
            points[self._checkpoint.t] = self._checkpoint
        return points

    def fold(self, record: AnyRecord, snapshots_before: bool) -> None:
        """Update the facts by the next record of the log; records other than Genesis, Rollback and Commit
        change none. snapshots_before: True if the stages took snapshots of the state before this step."""
        if isinstance(record, Genesis):
            self.fingerprints = record.fingerprints
        elif isinstance(record, Rollback):
            t = record.t
            self._points = {at: point for at, point in self._points.items() if at < t}
            if self._checkpoint is not None and self._checkpoint.t > t:
                self._checkpoint = None
            self._points[t] = RestorePoint(t, record.fingerprints, record.adam_step)
            self.start(record.adam_step, record.fingerprints)
            self.overflows = self.overflows.after(record)
        elif isinstance(record, Commit):
            if record.stages and snapshots_before:
                before = tuple(stage.fingerprint_before for stage in record.stages)
                self._points[record.t - 1] = RestorePoint(record.t - 1, before, self.adam_step)
                self._points.pop(min(self._points) if len(self._points) > POINTS_KEPT else -1, None)
            self.start(record.adam_step)
            self.overflows = self.overflows.after(record)


class Exit:
    """Switch with which any part of a peer ends the peer's part in the run. From then on the peer handles no
    event. The driver gets `Stop` at each use, and ends the process, or joins again if `Stop` allows it.
    stopped: True once it was used."""

    def __init__(self, ctx: PeerContext) -> None:
        self._outbox = ctx.outbox
        self.stopped = False

    def stop(self, reason: str, ok: bool, again: bool = False, over: bool = False) -> None:
        """End this peer's part in the run: it handles no more events, and the driver gets `Stop`, at each
        call. reason: for the user. ok: False if neither its user nor the run's owner wanted it. again: True
        if this machine may join the run again. over: True if the log ended the run because all steps are
        committed."""
        self.stopped = True
        self._outbox.emit(ev.Stop(reason, ok, again, over))


class Step(Enum):
    """Steps by which a stranger becomes a serving replica; `NEXT_STEPS` has the transitions (R14)."""

    STRANGER = "not connected to the leader"
    ENQUIRED = "asked what the run is"
    DESCRIBING = "measuring this machine"
    REQUESTED = "asked to be admitted"
    BUILDING = "making the stage"
    FETCHING = "fetching the state"
    LOADING = "loading the state"
    READY = "has the state"


_OUTSIDE = frozenset({Step.STRANGER, Step.ENQUIRED, Step.REQUESTED})
_INSIDE = frozenset({Step.BUILDING, Step.FETCHING, Step.LOADING, Step.READY})
#: Allowed transitions. A founder that is elected goes from any step before admission to REQUESTED, and back
#: to STRANGER if it loses the lead; a member that is moved to another stage goes back to BUILDING.
NEXT_STEPS = {
    Step.STRANGER: _OUTSIDE,
    Step.ENQUIRED: _OUTSIDE | {Step.DESCRIBING},
    Step.DESCRIBING: _OUTSIDE - {Step.ENQUIRED},
    Step.REQUESTED: frozenset({Step.STRANGER, Step.REQUESTED, Step.BUILDING}),
    Step.BUILDING: _INSIDE,
    Step.FETCHING: _INSIDE,
    Step.LOADING: _INSIDE,
    Step.READY: _INSIDE,
}


class Entry:
    """Progress of this peer from stranger to serving replica, and the run's genesis record once it is known.

    done: True once the peer follows the log. repeat_at: time (s) at which its last request or report is sent
    again.
    """

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self._genesis: Genesis | None = None
        self.step = Step.STRANGER
        self.done = False
        self.repeat_at = math.inf

    def advance(self, step: Step) -> None:
        """Go on to another step, which `NEXT_STEPS` must allow after the present one (AssertionError)."""
        assert step in NEXT_STEPS[self.step], f"{self.step.name} to {step.name}"
        self.step = step

    @property
    def genesis(self) -> Genesis:
        if self._genesis is None:
            raise RuntimeError("the run's genesis is not known yet")
        return self._genesis

    def learn_genesis(self, genesis: Genesis) -> None:
        self._genesis = genesis
        self._ctx.run.found_by(genesis.leader)


class LeadRole(Enum):
    """States of `Coordination`: this peer's part in leading the log."""

    FOLLOWER = "another peer leads, or none"
    ELECTED = "elected; has yet to take the run up from its disk"
    COORDINATOR = "runs the coordinator, or will once it is elected"


NEXT_ROLES = {
    LeadRole.FOLLOWER: frozenset({LeadRole.ELECTED, LeadRole.COORDINATOR}),
    LeadRole.ELECTED: frozenset(LeadRole),
    LeadRole.COORDINATOR: frozenset({LeadRole.FOLLOWER}),
}


class Coordination(Timer):
    """This peer's role in leading the log, and its coordinator while it leads (None otherwise)."""

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self.role = LeadRole.FOLLOWER
        self.coordinator: Coordinator | None = None

    def _become(self, role: LeadRole) -> None:
        assert role in NEXT_ROLES[self.role], f"{self.role.name} to {role.name}"
        self.role = role

    def elected(self, term: int) -> None:
        """Note that the voters elected this peer in `term`: it leads the log. Until it has a coordinator its
        role is ELECTED."""
        self._ctx.log.take_lead(term)
        if self.coordinator is None:
            self._become(LeadRole.ELECTED)

    def install(self, coordinator: Coordinator) -> None:
        self._become(LeadRole.COORDINATOR)
        self.coordinator = coordinator

    def resign(self) -> None:
        """Give up the lead of the log: drop the coordinator; the leader is not known then, unless this peer
        has heard of its successor. Only of a peer that was elected (AssertionError)."""
        log = self._ctx.log
        log.take_lead(0)
        if log.leader == self._ctx.me:
            log.follow_leader("")
        self._become(LeadRole.FOLLOWER)
        self.coordinator = None

    def read_checkpoint(self, t: int, stage: int) -> bool:
        """Request the reading of a stage's state from the checkpoint of iteration `t` (-1: the newest);
        `CheckpointRead` has the result. False, and nothing is requested, if this peer does not lead with the
        run's directory."""
        if self.coordinator is None or not self.coordinator.has_directory:
            return False
        self._ctx.outbox.emit(ev.ReadCheckpoint(t, stage))
        return True

    def downloads(self) -> list[Download]:
        """Running downloads of the stages' states for the checkpoint in progress."""
        return [] if self.coordinator is None else self.coordinator.checkpoints.downloads

    # --- timer and link observer ---------------------------------------------------------------

    def deadline(self) -> float:
        return math.inf if self.coordinator is None else self.coordinator.deadline()

    def tick(self) -> None:
        if self.coordinator is not None:
            self.coordinator.tick()

    def link_up(self, peer: str) -> None:
        if self.coordinator is not None:
            self.coordinator.admission.link_up(peer)
            self.coordinator.repeat(peer)

    def link_down(self, lost: LostLink) -> None:
        if self.coordinator is not None and lost.peer != self._ctx.me:
            admission = self.coordinator.admission
            admission.link_down(lost.peer, lost.reason, lost.refused, lost.patience_s)
            self.coordinator.catalog.forget(lost.peer)


@dataclass(frozen=True)
class SharedParts:
    """Parts of one peer that several of its other parts use. They hold no reference to those other parts."""

    ctx: PeerContext
    progress: Progress
    summary: LogSummary
    exit: Exit
    entry: Entry
    coordination: Coordination
    following: LeaderView
    early: EarlyBuffer
    founder_requests: FounderRequests
    router: FlowAgentDriver
    states: StateServer
    snapshots: Snapshots
