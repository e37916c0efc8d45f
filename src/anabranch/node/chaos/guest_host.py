"""Hostile guests of a chaos test: starts their processes, follows what they do and what becomes of them."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.node.chaos.fault_schedule import PlannedFault
from anabranch.node.chaos.guests import member_deeds
from anabranch.node.chaos.guests.guest_process import run_guest
from anabranch.node.chaos.guests.stranger_attacks import ATTACKS
from anabranch.node.chaos.run_record import GuestVisit, RunRecord
from anabranch.node.chaos.swarm_tracker import SwarmTracker
from anabranch.node.lifecycle.tickets import new_ticket
from anabranch.node.local_swarm.local_swarm import LocalSwarm, last_words
from anabranch.node.local_swarm.supervisor import Process
from anabranch.observe.event_log import EventLog
from anabranch.observe.events import Event, FaultDelivered, PeerRemoved

#: Seconds that a guest has to come into its role, and to do its deed in. Plain choices: a volunteer of the
#: default run serves in some seconds, and twenty seconds are many steps.
ARRIVES_S, STAYS_S = 40.0, 20.0
#: Seconds for which a guest's ticket is valid: longer than its stay.
TICKET_S = 600.0
#: Names of all deeds.
DEEDS = (*member_deeds.DEEDS, *ATTACKS)
#: Numbers of the address blocks that guests dial from.
BLOCKS = 250


@dataclass
class _Running:
    """Started guest. visit: its entry in the record. until: Unix time (s) at which its process is ended.
    read: bytes that were read of its output."""

    visit: GuestVisit
    process: Process
    until: float
    read: int = 0


class GuestHost:
    """Hostile guests of a swarm, each a process with a ticket of its own. tracker: state of the swarm, read
    here. record: gets each guest's visit. say: prints a sentence for the user."""

    def __init__(
        self, swarm: LocalSwarm, tracker: SwarmTracker, record: RunRecord, say: Callable[[str], None]
    ) -> None:
        self._swarm, self._tracker, self._record, self._say = swarm, tracker, record, say
        self._running: list[_Running] = []

    def invite(self, fault: PlannedFault) -> None:
        """Start the process of a guest that does `fault.deed`, with a ticket and (on Linux) an address block
        of its own, at the stage that `fault.pick` selects."""
        directory, number = self._swarm.directory, len(self._record.guests) + 1
        name = f"guest-{number}"
        stage = 1 + int(fault.pick * self._swarm.run.pipeline.relay_stages)
        ticket = new_ticket(directory.path, "relay", 1, TICKET_S, name)
        # Only Linux has all of 127.0.0.0/8 as addresses of its own.
        host = f"127.0.{1 + number % BLOCKS}.1" if sys.platform == "linux" else "127.0.0.1"
        home = str(directory.peer(name))
        process = self._swarm.start_other(name, [fault.deed, ticket.text, home, str(stage), host], run_guest)
        visit = GuestVisit(name, fault, stage, time.time())
        self._record.guests.append(visit)
        self._running.append(_Running(visit, process, visit.at + ARRIVES_S))

    def on_event(self, event: Event) -> None:
        if isinstance(event, PeerRemoved) and not event.reason.startswith("moves to"):
            for guest in self._running:
                if guest.visit.peer == event.subject and guest.visit.began and not guest.visit.put_out:
                    self._put_out(guest.visit, event.reason, event.time)

    def poll(self) -> None:
        """Read the guests' output. Kill each guest whose deed has not begun ARRIVES_S seconds after its
        start, and each whose deed began STAYS_S seconds ago. A guest that ends, or is killed, before its deed
        began is recorded as undelivered."""
        now = time.time()
        for guest in list(self._running):
            ended = not guest.process.running
            self._read(guest)
            if ended or now >= guest.until:
                self._end(guest, ended)

    def end(self) -> None:
        """Read the output of all guests that are left, and kill them; see `poll`."""
        for guest in list(self._running):
            self._read(guest)
            self._end(guest, not guest.process.running)

    def _end(self, guest: _Running, by_itself: bool) -> None:
        self._running.remove(guest)
        visit = guest.visit
        visit.ended, visit.ended_t = time.time(), self._tracker.t
        guest.process.signal(signal.SIGKILL)
        if not visit.began:
            words = last_words(guest.process.log)
            reason = "it never came into its role" + (f" (its last words: {words})" if by_itself else "")
            self._record.undelivered.append((visit.planned, reason))
            self._say(f"{visit.name} ({visit.planned.deed}): not delivered: {reason}")
        elif not visit.put_out:
            self._say(f"{visit.name} ({visit.planned.deed}) stayed until its end")

    def _read(self, guest: _Running) -> None:
        try:
            lines = guest.process.log.read_bytes()[guest.read :].rpartition(b"\n")[0]
        except FileNotFoundError:
            return  # the process has only just been forked
        if lines:
            guest.read += len(lines) + 1
            for line in lines.decode(errors="replace").splitlines():
                self._follow(guest, *line.partition(" ")[::2])

    def _follow(self, guest: _Running, word: str, rest: str) -> None:
        """Take in a line that a guest printed: `word` is id, begun, closed or ended, `rest` its value ("" for
        begun; see `guest_process`). closed and ended mean, once it has begun, that the run put the guest out.
        begun also writes a FaultDelivered event."""
        visit, now = guest.visit, time.time()
        if word == "id":
            visit.peer = rest
        elif word == "begun" and not visit.began:
            visit.began, visit.began_t = now, self._tracker.t
            guest.until = now + STAYS_S
            self._record.after_last = 0
            with EventLog(self._swarm.directory.events) as log:
                phase = f"after step {self._tracker.t}"
                log.write(FaultDelivered(peer=visit.peer, fault=visit.planned.kind, phase=phase))
            self._say(f"{visit.name} at stage {visit.stage} begins: {visit.planned.deed}")
        elif word == "closed":
            visit.closed += 1
        if word in ("closed", "ended") and visit.began and not visit.put_out:
            self._put_out(visit, rest, now)

    def _put_out(self, visit: GuestVisit, reason: str, at: float) -> None:
        visit.put_out, visit.put_out_s = reason, max(0.0, at - visit.began)
        visit.put_out_t = self._tracker.t
        self._say(f"{visit.name} ({visit.planned.deed}) is out after {visit.put_out_s:.1f} s: {reason}")
