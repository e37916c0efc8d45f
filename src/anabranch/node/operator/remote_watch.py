"""Watching a run on another machine: a ticket suffices to copy the run's event log into a local file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from anabranch.addresses import host_port
from anabranch.errors import UserError, words_of
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity, next_incarnation
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import Ticket
from anabranch.node.driver.connections import Connections
from anabranch.node.driver.initial_dial import TRANSIENT
from anabranch.node.driver.peer_driver import RUN_OVER, Outcome, says_run_over
from anabranch.operating_system import lock, write_at
from anabranch.protocol.interface import events as ev
from anabranch.protocol.observers.event_log_client import EventLogClient


class RemoteWatch:
    """Copies the event log of the run that a ticket names into home/events.jsonl until the run is over, its
    data node refuses this machine, its log does not continue the file, or the file cannot be written; started
    again, it continues where the file ends.

    Driver of one `EventLogClient`, which decides what to fetch. say: prints a sentence for the user. Raises
    UserError if another process has locked the file.
    """

    def __init__(self, ticket: Ticket, home: Path, say: Callable[[str], None]) -> None:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.events = home / "events.jsonl"
        self._founder = ticket.first_peer
        self._ticket, self._home, self._say = ticket, home, say
        self._outage_reported = False
        self._file = os.open(self.events, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
        try:
            lock(self._file)
        except OSError:
            os.close(self._file)
            raise UserError(f"another process watches this run already, and holds {self.events}") from None

    async def run(self) -> Outcome:
        """Copy events until the run's data node says that the run is over (`Outcome.over`), refuses this
        machine (other than for the moment) or answers what cannot continue the file, or the file cannot be
        written. To be called once: it closes the file. Raises IdentityError or OSError if its key cannot be
        used."""
        try:
            return await self._copy()
        finally:
            os.close(self._file)

    async def _copy(self) -> Outcome:
        identity = Identity.load_or_create(self._home / "key")
        incarnation = next_incarnation(self._home / "incarnation")
        grant, founder = self._ticket.grant, self._founder
        nobody = "this peer only watches the run"  # it does not listen, so nobody gets this answer
        gate = Gate(grant.run, grant.owner, lambda hello: nobody)
        transport = TcpTransport(identity, incarnation, gate, lambda link: link.close(nobody))
        self._links = Connections(transport, self._handle, self._ticket)
        size, seed = os.fstat(self._file).st_size, int(identity.peer_id[:8], 16)
        self._onlooker = EventLogClient(founder.peer_id, self._ticket.first_addresses, size, seed)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[Outcome] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        try:
            self._handle(ev.Started())
            return await self._ended
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._links.close()

    def _handle(self, event: ev.Event) -> None:
        if self._ended.done():
            return
        self._report(event)
        for effect in self._onlooker.handle(event, self._loop.time()):
            match effect:
                case ev.Dial(peer, address):
                    self._links.dial(peer, address)
                case ev.Send(peer, message):
                    self._links.send(peer, message, None)
                case ev.HangUp(peer, reason):
                    self._links.hang_up(peer, reason)
                case ev.Showed(position, data):
                    self._write(data, position)
                case ev.Stop(reason):
                    self._end(Outcome(reason, ok=False))
        if self._timer is not None:
            self._timer.cancel()
        at = self._onlooker.deadline()
        self._timer = self._loop.call_at(at, self._handle, ev.Wake()) if at < float("inf") else None

    def _write(self, data: bytes, position: int) -> None:
        """Write a piece of the event log at its position; end if the disk refuses it."""
        try:
            write_at(self._file, data, position)
        except OSError as error:
            self._end(Outcome(f"{self.events} cannot be written: {words_of(error)}", ok=False))

    def _report(self, event: ev.Event) -> None:
        """Tell the user of a lost connection, once until it is back; end if the run is over, or its data node
        refuses this machine for another than the TRANSIENT reasons."""
        match event:
            case ev.LinkUp():
                self._outage_reported = False
            case ev.LinkDown(reason=reason) if says_run_over(reason):
                self._end(Outcome(RUN_OVER, ok=True, over=True))
            case ev.LinkDown(peer, reason):
                refusal = self._links.refusals.get(peer)
                if refusal is not None and refusal.kind not in TRANSIENT:
                    why = f"the run's data node refuses this machine: {refusal}"
                    self._end(Outcome(why, ok=False))
                elif not self._outage_reported:
                    self._outage_reported = True
                    where = host_port(self._founder.host, self._founder.port)
                    self._say(f"no connection to the run's data node at {where}: {reason}; retrying")

    def _end(self, outcome: Outcome) -> None:
        if not self._ended.done():
            self._ended.set_result(outcome)
