"""Metrics of a run under faults, from its events and its record (docs/reference/formats.md)."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from anabranch.node.chaos.fault_schedule import TARGETS
from anabranch.node.chaos.guest_figures import Hostile, figures_of
from anabranch.node.chaos.run_record import DeliveredFault, RunRecord, due_to_fault
from anabranch.node.chaos.wasted_compute import WastedCompute
from anabranch.observe.event_log import commit_times
from anabranch.observe.events import Event, PeerJoined, PeerRemoved, Repair, Rollback, Step, Suspected

#: Version of the JSON result.
VERSION = 1
#: Iterations after the last committed one in which a repair is due to a fault: a frozen peer may have done
#: its part of the open one. Later a peer that is back is asked for what it keeps too long, for other reasons.
ITERATIONS = 2


class Spread(msgspec.Struct):
    """Distribution of durations (s): their number, median, 95th percentile (p95) and longest (`most`); zeros
    if nothing was measured."""

    count: int = 0
    median: float = 0.0
    p95: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls()
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return cls(len(ordered), statistics.median(ordered), p95, ordered[-1])


class Recovery(msgspec.Struct):
    """Seconds from a fault until each microbatch that was repaired because of it was sent to another replica
    (`next_hop`), until the next step was committed (`commit`), and until the victim's replacement was active
    (`replaced`)."""

    next_hop: Spread
    commit: Spread
    replaced: Spread


class Faults(msgspec.Struct):
    """Numbers of delivered faults by kind, of processes hit, and of undelivered faults by kind and reason."""

    delivered: dict[str, int]
    processes: int
    undelivered: dict[str, dict[str, int]]

    @property
    def total(self) -> int:
        return sum(self.delivered.values())


class Metrics(msgspec.Struct):
    """Metrics of the timed part of a run.

    faults: numbers of those delivered and not. seconds: length of that part. steps: committed, less those
    rolled back. rollbacks: their number; rolled_back: steps that they undid. repaired: microbatches sent to
    another replica. removed: removals of honest peers, moves to another stage included. falsely_suspected,
    falsely_removed: numbers of such events for honest peers that no fault had hit. peer_hours: processes
    times hours. recovery: by "killed" (SIGKILL, which resets connections) and "frozen" (SIGSTOP, which is
    silent). compute: wasted compute, of the whole run. hostile: figures of the guests.
    """

    faults: Faults
    seconds: float
    steps: int
    rollbacks: int
    rolled_back: int
    repaired: int
    removed: int
    falsely_suspected: int
    falsely_removed: int
    peer_hours: float
    recovery: dict[str, Recovery]
    compute: WastedCompute
    hostile: Hostile = msgspec.field(default_factory=Hostile)


def _faults_of(record: RunRecord) -> Faults:
    faults = [fault.planned for fault in record.delivered]
    faults += [visit.planned for visit in record.guests if visit.began]
    delivered = Counter(fault.kind for fault in faults)
    undelivered: dict[str, Counter[str]] = {}
    for planned, reason in record.undelivered:
        undelivered.setdefault(planned.kind, Counter())[reason] += 1
    order = [f"{target} {how}" for target in TARGETS for how in ("killed", "frozen")]
    order += sorted({kind for kind in (*delivered, *undelivered) if kind not in order})
    return Faults(
        {kind: delivered[kind] for kind in order if delivered[kind]},
        sum(len(fault.victims) for fault in record.delivered),
        {kind: dict(undelivered[kind]) for kind in order if kind in undelivered},
    )


def metrics_of(record: RunRecord, events: Sequence[Event], population: int, wasted: WastedCompute) -> Metrics:
    """Metrics of the timed part of the run in `record`. events: of the whole run, in order. population:
    number of processes. wasted: compute that entered no step, as `wasted_compute` found it."""
    inside = [event for event in events if record.began <= event.time <= record.ended]
    back = [(before, after) for before, after in _steps_around_rollbacks(inside) if after < before]
    guests = {visit.peer for visit in record.guests}
    honest = [e for e in inside if isinstance(e, Suspected | PeerRemoved) and e.subject not in guests]
    suspected = [e for e in honest if isinstance(e, Suspected) and e.verdict == "suspected"]
    removed = [e for e in honest if isinstance(e, PeerRemoved)]
    return Metrics(
        faults=_faults_of(record),
        seconds=record.seconds,
        steps=record.steps,
        rollbacks=sum(isinstance(event, Rollback) for event in inside),
        rolled_back=sum(before - after for before, after in back),
        repaired=sum(isinstance(event, Repair) for event in inside),
        removed=len(removed),
        falsely_suspected=sum(not due_to_fault(e.subject, e.time, record) for e in suspected),
        falsely_removed=sum(
            not due_to_fault(e.subject, e.time, record)
            for e in removed
            if not e.reason.startswith("moves to")
        ),
        peer_hours=population * record.seconds / 3600,
        recovery={
            "killed": _recovery(record, inside, [f for f in record.delivered if not f.planned.freeze_s]),
            "frozen": _recovery(record, inside, [f for f in record.delivered if f.planned.freeze_s]),
        },
        compute=wasted,
        hostile=figures_of(record),
    )


def _steps_around_rollbacks(events: Iterable[Event]) -> Iterable[tuple[int, int]]:
    """For each rollback in `events` (of a run, in order): (last committed step before it, step to which the
    run returned). A step before the first event counts as 0."""
    t = 0
    for event in events:
        if isinstance(event, Step):
            t = event.t
        elif isinstance(event, Rollback):
            yield t, event.t
            t = event.t


def _recovery(record: RunRecord, events: Sequence[Event], faults: Sequence[DeliveredFault]) -> Recovery:
    commits = sorted(at for _, at in commit_times(events))
    following = ((fault, bisect_right(commits, fault.at)) for fault in faults)
    hops = []
    latest: dict[str, DeliveredFault] = {}  # by peer id, until the peer joins again
    timeline: list[Event | DeliveredFault] = [*events, *record.delivered]
    for event in sorted(timeline, key=lambda e: e.at if isinstance(e, DeliveredFault) else e.time):
        match event:
            case DeliveredFault(ids=ids):
                latest |= dict.fromkeys(ids, event)
            case PeerJoined(subject=subject):
                latest.pop(subject, None)
            case Repair(dead=dead, t=t) if dead in latest and latest[dead] in faults:
                if t <= latest[dead].t + ITERATIONS:
                    hops.append(event.time - latest[dead].at)
    return Recovery(
        next_hop=Spread.of(hops),
        commit=Spread.of(commits[i] - fault.at for fault, i in following if i < len(commits)),
        replaced=Spread.of(seconds for fault, seconds in record.replaced_s if fault in faults),
    )
