"""Record of a timed run of a swarm: faults, victims, replacements, and numbers of committed steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabranch.node.chaos.fault_schedule import PlannedFault
from anabranch.node.chaos.honest_seats import LostSeat

#: Seconds after a kill, or the end of a freeze, for which a suspicion or removal is put down to the fault.
AFTERMATH_S = 15.0


@dataclass(frozen=True)
class DeliveredFault:
    """A planned fault that was delivered, and the processes that it hit. at: Unix time (s). t: last committed
    step then. stage: of the victims (-1: unknown). victims: names of their processes. ids: their peer ids, in
    the same order ("" where unknown)."""

    planned: PlannedFault
    at: float
    t: int
    stage: int
    victims: tuple[str, ...]
    ids: tuple[str, ...]


@dataclass
class GuestVisit:
    """Hostile guest that came to a run. at, began, ended: Unix time (s) at which its process started, its
    deed began (0: never), and its process ended. put_out: reason of its removal, its refusal or the end of
    its link by the run ("": it stayed until its end); put_out_s: seconds from the beginning of its deed to
    that. began_t, ended_t, put_out_t: last committed steps at these times. stage: that it asked for. peer:
    its id ("" until the guest has told it). closed: number of a stranger's links that the run closed."""

    name: str
    planned: PlannedFault
    stage: int
    at: float
    peer: str = ""
    began: float = 0.0
    began_t: int = 0
    ended: float = 0.0
    ended_t: int = 0
    put_out: str = ""
    put_out_s: float = 0.0
    put_out_t: int = 0
    closed: int = 0


@dataclass
class RunRecord:
    """Record of the timed part of a run. began, ended: Unix time (s); began_t, ended_t: last committed step
    by then. tokens: target tokens of the steps taken meanwhile, without those skipped (0 also if not known).
    after_last: steps committed since the last fault. undelivered: faults that could not be delivered, with
    the reason. replaced_s: for each replaced victim, its fault, and the seconds from that until the
    replacement was active. lost_seats: removals of honest members that no fault had hit; empty_seats: names
    of processes that were no active members at the end (both in a run with guests only). stuck: reason why
    the run was broken off ("": it was not)."""

    delivered: list[DeliveredFault] = field(default_factory=list)
    undelivered: list[tuple[PlannedFault, str]] = field(default_factory=list)
    began: float = 0.0
    began_t: int = 0
    ended: float = 0.0
    ended_t: int = 0
    tokens: int = 0
    after_last: int = 0
    replaced_s: list[tuple[DeliveredFault, float]] = field(default_factory=list)
    guests: list[GuestVisit] = field(default_factory=list)
    lost_seats: list[LostSeat] = field(default_factory=list)
    empty_seats: list[str] = field(default_factory=list)
    stuck: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def steps(self) -> int:
        return self.ended_t - self.began_t


def due_to_fault(peer: str, at: float, record: RunRecord) -> bool:
    """True if a fault explains what happened to a peer at the Unix time `at`: it hit the peer before, and no
    more than AFTERMATH_S have passed since the kill, or since the end of the freeze."""
    return any(
        peer in fault.ids and fault.at <= at <= fault.at + fault.planned.freeze_s + AFTERMATH_S
        for fault in record.delivered
    )
