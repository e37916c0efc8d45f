"""Injection of planned faults into a local swarm, and replacement of the processes that the faults end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.node.chaos.fault_schedule import DATA, GUEST, RELAY, STAGE, PlannedFault
from anabranch.node.chaos.guest_host import GuestHost
from anabranch.node.chaos.honest_seats import HonestSeats
from anabranch.node.chaos.run_record import DeliveredFault, RunRecord, due_to_fault
from anabranch.node.chaos.swarm_tracker import SwarmTracker, voters_of
from anabranch.node.chaos.victims import Candidate, choose_victims
from anabranch.node.local_swarm.local_swarm import LEADER, LocalSwarm
from anabranch.observe.event_log import EventLog
from anabranch.observe.events import Event, FaultDelivered, PeerActive, Step
from anabranch.observe.wording import duration

#: Seconds for which a fault without a possible victim is postponed before it is given up.
POSTPONE_S = 10.0
#: Seconds for which a process may run without being a member of the run before it is replaced.
ABSENT_S = 2.0
#: The same for a process that no fault hit, in a run with guests: it ends by itself and returns with its key.
UNHIT_ABSENT_S = 10.0


@dataclass
class Seat:
    """Position in a swarm of constant size, whose process is replaced when it is lost. name: of its present
    process. role: DATA or RELAY. hit_by: fault that hit that process (None: none). replaces_victim_of: fault
    that hit the former process, until the present one is an active member. joined: True once the present one
    has been a member. absent_at: Unix time (s) since when it has not run or not been a member (0: it is one).
    due: Unix time (s) at which the next process starts (0: none is needed)."""

    name: str
    role: str
    hit_by: DeliveredFault | None = None
    replaces_victim_of: DeliveredFault | None = None
    joined: bool = False
    absent_at: float = 0.0
    due: float = 0.0

    @property
    def killed(self) -> bool:
        """True if the seat's process was sent SIGKILL, until the next process starts: the system may take a
        moment to say that the killed one has ended."""
        return self.hit_by is not None and not self.hit_by.planned.freeze_s


class ChaosSwarm(LocalSwarm):
    """Local swarm that outlives the end of its founding process, for faults that kill and restart that
    process: only after `stop`, with exit status 0 or with fewer than three voters does its end end the
    swarm's run."""

    def over(self) -> bool:
        ended = super().over()
        return ended and (self.stopping or self.leader.status == 0 or len(self.voters()) < 3)

    def voters(self) -> set[str]:
        """Peer ids of the voters, from the founder's copy of the commit log."""
        return voters_of(self.directory.log.read_bytes())


class FaultInjector:
    """Injects the faults of `schedule` into a running swarm and keeps the number of its processes constant.

    `on_event` must get the swarm's events. After `begin`, `poll` must be called about ten times a second; it
    delivers faults, wakes frozen processes and starts replacements that are due. say: prints a sentence for
    the user.
    """

    def __init__(
        self, swarm: ChaosSwarm, schedule: Sequence[PlannedFault], say: Callable[[str], None]
    ) -> None:
        self.swarm = swarm
        self.tracker = SwarmTracker()
        self.record = RunRecord()
        self._pending = list(schedule)
        self._say = say
        self._seats = [Seat(name, DATA if "data" in name else RELAY) for name in swarm.processes]
        self._frozen: dict[str, float] = {}
        self._strangers = 0
        self._hostile = any(fault.target == GUEST for fault in schedule)
        self._guests = GuestHost(swarm, self.tracker, self.record, self._report)
        self._honest = HonestSeats(self._honest_name, self._was_hit)

    def begin(self) -> None:
        """Start the clock by which scheduled faults are delivered, and with it the timed part of the
        record."""
        self.record.began, self.record.began_t = time.time(), self.tracker.t

    def end(self) -> None:
        """Stop injecting: record undelivered faults, end the guests and wake frozen processes. `poll` still
        replaces ended processes: one that was removed while it was frozen learns so now, and ends."""
        for fault in self._pending:
            victims = () if fault.target == GUEST else self._victims_of(fault)
            reason = victims if isinstance(victims, str) else "no time was left"
            self.record.undelivered.append((fault, reason))
        self._pending = []
        self._guests.end()
        self.record.ended, self.record.ended_t = time.time(), self.tracker.t
        for name in list(self._frozen):
            self._wake(name)

    @property
    def complete(self) -> bool:
        """True if every seat (position in the swarm, see `Seat`) is taken by an active member of the run."""
        return all(seat.name in self.tracker.serving for seat in self._seats)

    @property
    def settled(self) -> bool:
        """True if every seat of the swarm (`Seat`) is taken by an active member and every honest member that
        was removed without a fault is back; always true in a run without hostile guests."""
        return not self._hostile or (self.complete and not self._honest.waiting)

    def close(self) -> None:
        """Enter in the record of a run with hostile guests: removals of honest members that no fault had hit,
        and seats (`Seat`) whose process is no active member now."""
        if self._hostile:
            self.record.lost_seats = self._honest.lost
            serving = self.tracker.serving
            self.record.empty_seats = [seat.name for seat in self._seats if seat.name not in serving]

    def _honest_name(self, peer: str) -> str | None:
        name = self.tracker.names.get(peer)
        return name if any(seat.name == name for seat in self._seats) else None

    def _was_hit(self, peer: str, at: float) -> bool:
        return due_to_fault(peer, at, self.record)

    def on_event(self, event: Event) -> None:
        self._honest.on_event(event)
        self._guests.on_event(event)
        self.tracker.on_event(event)
        if isinstance(event, Step):
            self.record.after_last += 1
        elif isinstance(event, PeerActive):
            name = self.tracker.names.get(event.subject)
            for seat in self._seats:
                if seat.name == name and seat.replaces_victim_of is not None:
                    fault = seat.replaces_victim_of
                    self.record.replaced_s.append((fault, event.time - fault.at))
                    seat.replaces_victim_of = None

    def poll(self) -> None:
        now = time.time()
        for name, until in list(self._frozen.items()):
            if now >= until:
                self._wake(name)
        if self.record.ended:
            if not self.swarm.stopping:
                self._refill_all(now)
            return
        self._guests.poll()
        for fault in [each for each in self._pending if now >= self.record.began + each.at_s]:
            victims = () if fault.target == GUEST else self._victims_of(fault)
            if fault.target == GUEST:
                self._guests.invite(fault)
            elif not isinstance(victims, str):
                self._deliver(fault, victims)
            elif now < self.record.began + fault.at_s + POSTPONE_S:
                continue
            else:
                self.record.undelivered.append((fault, victims))
                self._report(f"{fault.kind}: not delivered: {victims}")
            self._pending.remove(fault)
        self._refill_all(now)

    def _refill_all(self, now: float) -> None:
        for seat in self._seats:
            self._refill(seat, now)

    def _victims_of(self, fault: PlannedFault) -> tuple[str, ...] | str:
        tracker, swarm = self.tracker, self.swarm
        voters = swarm.voters()
        voting = {tracker.names.get(voter) for voter in voters}
        candidates = [
            Candidate(
                name=seat.name,
                stage=tracker.stages.get(seat.name, 0 if seat.role == DATA else -1),
                serves=seat.name in tracker.serving,
                awake=seat.name not in self._frozen,
                votes=seat.name in voting,
            )
            for seat in self._seats
            if swarm.processes[seat.name].running and not seat.killed
        ]
        return choose_victims(fault, candidates, len(voters))

    def _deliver(self, fault: PlannedFault, victims: tuple[str, ...]) -> None:
        id_of = {name: peer for peer, name in self.tracker.names.items()}
        ids = tuple(id_of.get(name, "") for name in victims)
        stage, at = self.tracker.stages.get(victims[0], -1), time.time()
        delivered = DeliveredFault(fault, at, self.tracker.t, stage, victims, ids)
        for name in victims:
            process = self.swarm.processes[name]
            if fault.freeze_s:
                process.signal(signal.SIGSTOP)
                self._frozen[name] = at + fault.freeze_s
            else:
                self._frozen.pop(name, None)
                process.signal(signal.SIGKILL)
            next(seat for seat in self._seats if seat.name == name).hit_by = delivered
        for peer in ids:
            self._honest.struck(peer)
        self.record.delivered.append(delivered)
        self.record.after_last = 0
        kind, phase = "freeze" if fault.freeze_s else "kill", f"after step {self.tracker.t}"
        with EventLog(self.swarm.directory.events) as log:
            for peer in ids:
                log.write(FaultDelivered(peer=peer, fault=kind, phase=phase))
        what = f"frozen for {fault.freeze_s:.1f} s" if fault.freeze_s else "killed"
        whole = f"all of stage {stage}, " if fault.target == STAGE else ""
        self._report(f"{whole}{', '.join(victims)} {what}")

    def _wake(self, name: str) -> None:
        del self._frozen[name]
        self.swarm.processes[name].signal(signal.SIGCONT)

    def _refill(self, seat: Seat, now: float) -> None:
        """Start the next process of a swarm position (`Seat`) when due: the process there ended, or its peer
        was removed from the run and stays out for ABSENT_S (UNHIT_ABSENT_S if no fault hit it), and the
        fault's delay has passed.

        The founder is replaced only after its process ended. A process that was removed while it was frozen
        learns so when it wakes, and ends.
        """
        process = self.swarm.processes[seat.name]
        member = seat.name in self.tracker.stages
        seat.joined = seat.joined or member
        gone = not process.running
        if gone or (seat.joined and not member):
            seat.absent_at = seat.absent_at or now
        else:
            seat.absent_at = seat.due = 0.0
            return
        ids = [peer for peer, name in self.tracker.names.items() if name == seat.name]
        unhit = self._hostile and not any(self._was_hit(peer, now) for peer in ids)
        if not gone and now < seat.absent_at + (UNHIT_ABSENT_S if unhit else ABSENT_S):
            return
        if not seat.due:
            seat.due = now + (seat.hit_by.planned.replace_s if seat.hit_by else 0.0)
        founder = seat.name == LEADER
        if now >= seat.due and (gone or not founder):
            # The founder's run directory exists once, so the founder itself must return.
            returns = unhit or (seat.hit_by is not None and seat.hit_by.planned.returns)
            self._replace(seat, founder or (gone and returns))

    def _replace(self, seat: Seat, returns: bool) -> None:
        """Start the next process of a seat, whose `hit_by`, `joined`, `absent_at` and `due` are reset for it.
        returns: True for the same peer with its key, False for a new peer with another name, at the same
        place of an emulated network."""
        former = seat.name
        if not returns:
            self._strangers += 1
            seat.name = f"{'data' if seat.role == DATA else 'relay'}-x{self._strangers}"
            self.swarm.hand_over(former, seat.name)
        seat.replaces_victim_of = seat.hit_by or seat.replaces_victim_of
        seat.hit_by, seat.joined, seat.absent_at, seat.due = None, False, 0.0, 0.0
        swarm = self.swarm
        if seat.name == LEADER:
            swarm.restart_leader()
        elif seat.role == DATA:
            swarm.join(seat.name, swarm.ticket("data"), ["--corpus", str(swarm.directory.corpus)])
        else:
            swarm.join(seat.name, swarm.ticket("relay"))
        self._report(f"{seat.name} {'returns' if returns else f'replaces {former}'}")

    def _report(self, text: str) -> None:
        self._say(f"{duration(time.time() - self.record.began)} step {self.tracker.t}: {text}")
