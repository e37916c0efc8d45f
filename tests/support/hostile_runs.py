"""Live swarms that hostile guests come to, several at a time and in waves, and what the others must see."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from anabranch.config import RunConfig
from anabranch.net.identity import Identity
from anabranch.net.ticket import Ticket
from anabranch.node.lifecycle.tickets import new_ticket
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.node.local_swarm.supervisor import Process, Supervisor
from anabranch.observe.events import Event, PeerActive, PeerRemoved, Refused, Step
from support.guest_processes import run_further_guest
from support.local_swarms import PATIENCE_S, Swarm, created, swarm_of


def lines_of(process: Process, word: str) -> list[str]:
    """Lines that a process printed that begin with `word`, without it."""
    try:
        lines = process.log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []  # the process has only just been forked
    return [rest for first, _, rest in (line.partition(" ") for line in lines) if first == word]


@dataclass
class LiveGuest:
    """Hostile guest of a live swarm. begun: number of steps that were committed when it did its deed first
    (-1: it did not yet)."""

    deed: str
    stage: int
    process: Process
    begun: int = -1

    def words(self, word: str) -> list[str]:
        """Lines that the guest printed that begin with `word`, without it."""
        return lines_of(self.process, word)

    @property
    def peer(self) -> str:
        return (self.words("id") or [""])[-1]


def host_of(number: int) -> str:
    """IP address of a run's guest with this number; on Linux in an address block of its own."""
    return f"127.0.{1 + number}.1" if sys.platform == "linux" else "127.0.0.1"


class HostileRun:
    """Live swarm with the guests that came to it so far. target: function that runs a guest's process."""

    def __init__(self, swarm: Swarm, target: Callable[..., NoReturn] = run_further_guest) -> None:
        self.swarm, self.target = swarm, target
        self.guests: list[LiveGuest] = []

    def ticket(self, role: str = "relay", quota: int = 1) -> Ticket:
        return new_ticket(self.swarm.directory.path, role, quota, 3600.0)

    def invite(
        self, deed: str, stage: int, ticket: Ticket | None = None, first: bool = False
    ) -> LiveGuest:
        """Start a guest that does `deed`, with a ticket and, on Linux, an address block of its own. One for
        stage 0 has the corpus. first: True if its id comes before those of all peers that serve, so that
        joiners ask it first."""
        number = len(self.guests) + 1
        name, text = f"guest-{number}", (ticket or self.ticket("relay" if stage else "data")).text
        home = str(self.swarm.directory.peer(name))
        if first:
            while Identity.load_or_create(key := Path(home, "key")).peer_id > min(self.serving()):
                key.unlink()
        corpus = [] if stage else [str(self.swarm.directory.corpus)]
        arguments = [deed, text, home, str(stage), host_of(number), *corpus]
        process = self.swarm.start_other(name, arguments, self.target)
        guest = LiveGuest(deed, stage, process)
        self.guests.append(guest)
        return guest

    def until(self, reached: Callable[[], bool]) -> None:
        """Follow the run until `reached`, which is asked after each event."""

        def now(_: list[Event]) -> bool:
            for guest in self.guests:
                if guest.begun < 0 and guest.words("begun"):
                    guest.begun = self.steps
            return reached()

        self.swarm.until(now)

    @property
    def steps(self) -> int:
        return len(self.swarm.of(Step))

    def withstood(self, *guests: LiveGuest, steps: int = 5) -> Callable[[], bool]:
        """Condition: each of these guests has done its deed, and `steps` more steps were taken after it."""
        return lambda: all(guest.begun >= 0 and self.steps >= guest.begun + steps for guest in guests)

    def goes_on(self, steps: int = 3) -> None:
        """Follow the run until it has taken `steps` more steps."""
        since = self.steps
        self.until(lambda: self.steps >= since + steps)

    def told(self, words: str) -> bool:
        """True if an event tells the owner `words`."""
        texts = (getattr(event, "reason", "") or getattr(event, "text", "") for event in self.swarm.seen)
        return any(words in text for text in texts)

    def printed(self, name: str, word: str) -> list[str]:
        """Lines that the process `name` of the swarm printed that begin with `word`, without it."""
        return lines_of(self.swarm.processes[name], word)

    def out(self, guest: LiveGuest) -> str:
        """Reasons with which the guest lost its seat or its links after its deed; "" if it did not."""
        told = [e.reason for e in self.swarm.of(PeerRemoved) if e.subject == guest.peer]
        found = [*told, *guest.words("closed"), *guest.words("ended")]
        return "; ".join(found) if guest.begun >= 0 else ""

    def end(self, *guests: LiveGuest) -> None:
        """Kill these guests, and wait until none of them is a member."""
        since = time.monotonic()
        for guest in guests:
            guest.process.signal(9)
        for guest in guests:
            assert guest.process.wait(PATIENCE_S - (time.monotonic() - since))
        peers = {guest.peer for guest in guests}
        self.until(lambda: not peers & self.serving())

    def serving(self) -> set[str]:
        """Ids of the peers that serve, by the events."""
        serving: set[str] = set()
        for event in self.swarm.seen:
            if isinstance(event, PeerActive):
                serving.add(event.subject)
            elif isinstance(event, PeerRemoved):
                serving.discard(event.subject)
        return serving

    def honest_refused(self) -> list[Refused]:
        """Messages and connections of honest peers that honest peers refused. What guests report is their
        word alone."""
        guests = {guest.peer for guest in self.guests}
        refused = [e for e in self.swarm.of(Refused) if not guests & {e.peer, e.subject}]
        called = [f"a connection from {host_of(number)}:" for number in range(1, len(self.guests) + 1)]
        return [event for event in refused if not event.reason.startswith(tuple(called))]

    def honest_removed(self) -> list[PeerRemoved]:
        """Removals of members that are no guests; moves to another stage are none."""
        guests = {guest.peer for guest in self.guests}
        removed = [event for event in self.swarm.of(PeerRemoved) if event.subject not in guests]
        return [event for event in removed if not event.reason.startswith("moves to")]


@contextmanager
def hostile_run(
    path: Path, run: RunConfig, supervisor: Supervisor, target: Callable[..., NoReturn] = run_peer
) -> Iterator[HostileRun]:
    """A new run in the directory `path`, to which guests may come: its swarm has taken three steps. target:
    as for `swarm_of`."""
    with swarm_of(created(path, run), run, supervisor, target=target) as swarm:
        hostile = HostileRun(swarm)
        hostile.until(lambda: hostile.steps > 2)
        yield hostile
