"""Compute time whose result entered no committed step, by cause, from peers' ledgers and the commit log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from anabranch.node.chaos.run_record import RunRecord
from anabranch.node.driver.compute_ledger import Entry
from anabranch.observe.events import Event, Rollback
from anabranch.protocol.consensus.log_replay import LogReplay

#: Seconds after a signal or the end of a freeze for which a task that was running may still end.
AFTER_S = 1.0


class WastedCompute(msgspec.Struct):
    """Seconds of compute on microbatches: in all (computed_s), and those whose result entered no committed
    step, by cause: the peer was killed (killed_s), a peer was frozen (frozen_s), the step was rolled back, or
    another reason (other_s)."""

    computed_s: float = 0.0
    killed_s: float = 0.0
    frozen_s: float = 0.0
    rolled_back_s: float = 0.0
    other_s: float = 0.0

    @property
    def wasted_s(self) -> float:
        return self.killed_s + self.frozen_s + self.rolled_back_s + self.other_s

    def share(self, seconds: float) -> float:
        return seconds / self.computed_s if self.computed_s else 0.0


def wasted_compute(
    record: RunRecord, events: Iterable[Event], history: LogReplay, ledgers: Mapping[str, Sequence[Entry]]
) -> WastedCompute:
    """Wasted compute of a run, without the iteration open at its end. record: of its faults. events: of the
    run. history: state by its commit log. ledgers: by peer id, the compute tasks in order of time."""
    useful = {
        (commit.t, stage, unit, entry.members[owner])
        for commit in history.commits
        for stage, entry in enumerate(commit.stages)
        for unit, owner in enumerate(entry.owners)
        if owner >= 0
    }
    rollbacks = [(event.time, event.t) for event in events if isinstance(event, Rollback)]
    waste = WastedCompute()
    for peer, entries in ledgers.items():
        counted: set[tuple[int, int, int, str]] = set()
        for entry in (_without_freezes(entry, peer, record) for entry in reversed(entries)):
            if entry.t > history.t:
                continue
            waste.computed_s += entry.seconds
            # If the same work was computed twice, the later result counts.
            work = (entry.t, entry.stage, entry.unit, entry.kind)
            if (*work[:3], peer) in useful and work not in counted and entry.kind != "Recount":
                counted.add(work)
            else:
                _add_to_cause(waste, peer, entry, record, rollbacks)
    return waste


def _without_freezes(entry: Entry, peer: str, record: RunRecord) -> Entry:
    """The ledger's entry, its seconds less those for which the process of `peer` was frozen meanwhile, by the
    faults in `record`."""
    frozen_s = 0.0
    for fault in record.delivered:
        if peer in fault.ids:
            woken = fault.at + fault.planned.freeze_s
            frozen_s += max(0.0, min(entry.at, woken) - max(entry.at - entry.seconds, fault.at))
    return msgspec.structs.replace(entry, seconds=max(0.0, entry.seconds - frozen_s))


def _add_to_cause(
    waste: WastedCompute, peer: str, entry: Entry, record: RunRecord, rollbacks: Iterable[tuple[float, int]]
) -> None:
    """Add the seconds of a compute task (`entry`), whose result entered no committed step, to their cause in
    `waste`: a kill in `record` of this peer during that iteration; a freeze of a peer of that stage at that
    time; else a later one of the `rollbacks` (time, step); else another reason."""
    for fault in record.delivered:
        ended = fault.at + fault.planned.freeze_s + AFTER_S
        if not fault.planned.freeze_s:
            # The killed peer worked on the iteration after the last committed one.
            if peer in fault.ids and entry.t == fault.t + 1 and entry.at <= ended:
                waste.killed_s += entry.seconds
                return
        elif fault.at <= entry.at <= ended and entry.stage == fault.stage:
            # Work of the frozen peer that came too late, or the same work of another peer in its place.
            waste.frozen_s += entry.seconds
            return
    if any(entry.at < at and entry.t > t for at, t in rollbacks):
        waste.rolled_back_s += entry.seconds
    else:
        waste.other_s += entry.seconds
