"""Dedicated carrier: a process that holds no stage and forwards the bytes of members of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from anabranch.addresses import host_port
from anabranch.errors import UserError
from anabranch.net.connection_limits import CarryLimits, Limits
from anabranch.net.errors import ListenError
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity, next_incarnation
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import Ticket
from anabranch.node.driver.connections import Connections
from anabranch.node.driver.initial_dial import LASTING, Reminder
from anabranch.node.driver.peer_driver import RUN_OVER, says_run_over
from anabranch.node.lifecycle.shutdown import stop_on_signals
from anabranch.observe.wording import duration
from anabranch.protocol.interface import events as ev
from anabranch.protocol.observers.carrier_client import CarrierClient

#: Largest payload of a message to the carrier itself, which gets none but heartbeats.
_PAYLOAD_BYTES = 1 << 20
#: Seconds between two lines about what was carried.
REPORT_S = 60.0


@dataclass(frozen=True)
class CarrierOptions:
    """Options of a dedicated carrier. ticket: of the run whose members it serves. home: folder for its key
    and incarnation. host, port: where it listens (0: any free port). advertise: address that the run's peers
    dial; "" for host:port. limits: of what it forwards."""

    ticket: Ticket
    home: Path
    host: str
    port: int
    advertise: str = ""
    limits: CarryLimits = field(default_factory=CarryLimits)


class CarrierProcess:
    """Dedicated carrier in this process: drives one `CarrierClient`, which offers it to the run, and has the
    transport that forwards bytes. say: prints a sentence for the user."""

    def __init__(self, options: CarrierOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._reported_bytes = 0
        self._told = ""
        self._reminder = Reminder()

    async def run(self) -> str:
        """Carry until the run is over, the user ends it, the run's data node refuses a dial for good
        (LASTING), or the leader the offer; returns why. Raises UserError if it cannot listen there,
        IdentityError if its key cannot be used."""
        options, grant = self._options, self._options.ticket.grant
        identity = Identity.load_or_create(options.home / "key")
        gate = Gate(grant.run, grant.owner, lambda hello: None)
        incarnation = next_incarnation(options.home / "incarnation")
        limits = Limits(max_payload_bytes=_PAYLOAD_BYTES)
        transport = TcpTransport(
            identity,
            incarnation,
            gate,
            lambda link: self._links.accept(link),
            limits=limits,
            carry=options.limits,
        )
        self._carrier = transport.carrier
        self._links = Connections(transport, self._handle, options.ticket)
        try:
            host, port = await transport.listen(options.host, options.port)
        except ListenError as error:
            raise UserError(f"{error}; choose another with --port") from None
        address = options.advertise or host_port(options.host, port)
        leader, seed = options.ticket.first_peer, int(identity.peer_id[:8], 16)
        me = identity.peer_id
        self._client = CarrierClient(leader.peer_id, options.ticket.first_addresses, address, me, seed)
        self._say(f"carrier {address}/{identity.peer_id} listens at {host_port(host, port)}")
        report = self._loop.call_later(REPORT_S, self._report)
        try:
            with stop_on_signals(self, lambda: self._say("ending")):
                self._handle(ev.Started())
                return await self._ended
        finally:
            report.cancel()
            if self._timer is not None:
                self._timer.cancel()
            await self._links.close()
            self._say(f"{self._carrier.carried_bytes / 1e6:.1f} MB carried in all")

    def stop(self, reason: str) -> None:
        """End this carrier at once: `run` returns the first reason given here."""
        if not self._ended.done():
            self._ended.set_result(reason)

    abort = stop

    def _report(self) -> None:
        carried, count = self._carrier.carried_bytes, len(self._carrier.circuits)
        if carried != self._reported_bytes:
            megabytes = (carried - self._reported_bytes) / 1e6
            self._say(f"{count} circuits; {megabytes:.1f} MB carried in the last {REPORT_S:.0f} s")
        self._reported_bytes = carried
        self._loop.call_later(REPORT_S, self._report)

    def _handle(self, event: ev.Event) -> None:
        if self._ended.done():
            return
        self._note(event)
        for effect in self._client.handle(event, self._loop.time()):
            match effect:
                case ev.Dial(peer, address):
                    self._links.dial(peer, address)
                case ev.Send(peer, message):
                    self._links.send(peer, message, None)
                case ev.Stop(reason):
                    self.stop(reason)
        if self._timer is not None:
            self._timer.cancel()
        at = self._client.deadline()
        self._timer = self._loop.call_at(at, self._handle, ev.Wake()) if at < float("inf") else None

    def _note(self, event: ev.Event) -> None:
        """Tell the user when the link to the run's data node changes; end with the run, or if the data node
        refuses this process for good."""
        leader, now = self._options.ticket.first_peer, self._loop.time()
        match event:
            case ev.LinkUp(peer) if peer == leader.peer_id:
                self._told = ""
                self._say("connected to the run's data node")
            case ev.LinkDown(peer, reason) if peer == leader.peer_id and says_run_over(reason):
                self.stop(RUN_OVER)
            case ev.LinkDown(peer, reason) if peer == leader.peer_id:
                refusal = self._links.refusals.get(peer)
                if refusal is not None and refusal.kind in LASTING:
                    self.stop(f"the run's data node refuses this carrier: {refusal}")
                elif reason != self._told:
                    self._told = reason
                    self._say(f"no connection to the run's data node: {reason}; retrying")
                    self._reminder.begin(now)
                elif waited_s := self._reminder.due(now):
                    since = f"for {duration(waited_s)}"
                    self._say(f"still no connection to the run's data node {since}: {reason}; retrying")
