"""Joining a run by ticket: a volunteer's machine, from its first dial to the end of its last part.

A part ends when the peer is removed or fails, when the run's owner stops the run, and when the machine's
hours end or a pause begins. The machine then joins again by itself, as the protocol's `Return` decides, or
once it is lent again."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from anabranch import lending
from anabranch.addresses import on_loopback
from anabranch.counter_rng import CounterRng
from anabranch.errors import UserError
from anabranch.hours import Hours, WhenIdle
from anabranch.net.connection_limits import CarryLimits, Limits, LineCaps
from anabranch.net.errors import ListenError
from anabranch.net.handshake import Gate, Hello
from anabranch.net.identity import Identity, IdentitySigner, next_incarnation
from anabranch.net.iroh.engine import IrohEngine
from anabranch.net.tcp.sockets import BBR_REMEDY, bbr_missing
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import Ticket
from anabranch.node.driver.allocator import free_former_peer
from anabranch.node.driver.connections import ticket_of
from anabranch.node.driver.initial_dial import InitialDial, left
from anabranch.node.driver.peer_driver import LivePeer, Outcome
from anabranch.node.driver.raft_storage import RaftStorage
from anabranch.node.driver.state_cache import StateCache
from anabranch.node.lifecycle.addresses import bind_port, reachable_address, relay_of, started_engine
from anabranch.node.lifecycle.shutdown import STOP_S, stop_on_signals
from anabranch.node.lifecycle.training_machine import FROZEN, TrainingMachine
from anabranch.node.lifecycle.volunteer_console import VolunteerConsole
from anabranch.node.private_data.machine_data import CONTRIBUTIONS, OwnFolders
from anabranch.observe.wording import ID_DIGITS, NAME_MAX, plain, with_names
from anabranch.operating_system import UNLIMITED_BYTES
from anabranch.protocol.context.revocations import Revocations
from anabranch.protocol.interface.events import Admitted, Effect, Stop
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member
from anabranch.protocol.peer.leave import LEAVE_S, Return
from anabranch.protocol.peer.peer import Peer

#: Largest payload that a volunteer accepts, and most of one peer, before it knows the size of the model; the
#: run's own limits follow with the first log record (`limits_of_run`).
MAX_PAYLOAD_BYTES = 1 << 31
#: Folder, in a volunteer's own, of stages' states for its next process.
STATES = "states"


@dataclass(frozen=True)
class JoinOptions:
    """Options with which a volunteer joins a run.

    home: folder for key and logs, of this process alone. name, region: of this machine, as others see it.
    stage: wished stage, -1 for any. host, port: address to listen on (port 0: any free one). advertise:
    host:port at which others dial this machine, "" for its own. corpus: of a data node. device: compute
    device, "" for the run file's. patience_s: seconds to try to reach the run for the first time. once: True
    to end with the first part in the run, also if a pause or the hours end it. grace_s: seconds to leave
    after a signal. listens: False to accept no connection: others reach this machine through a carrier.
    hours: at which this machine is lent; None: always. carry: limits of what it carries for others.
    transport: "tcp", "iroh", or "auto": TCP, and iroh if the ticket names a relay and iroh is installed.
    caps: of this machine's line. cache_bytes: most bytes of stages' states that it keeps on its disk for its
    next process. threads: of torch, 0 for the run file's. memory_bytes: to plan with, of this machine and of
    each of its GPUs; 0: what is free. nice: priority of its computing, 0 to 19
    (`operating_system.lower_priority`). private_data: prepared corpus of this machine alone, for a run on
    private data. contribution_bytes: most bytes of its contributions that it keeps in such a run.
    """

    ticket: Ticket
    home: Path
    name: str = ""
    region: str = ""
    stage: int = -1
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    corpus: Path | None = None
    device: str = ""
    patience_s: float = 120.0
    once: bool = False
    grace_s: float = STOP_S
    listens: bool = True
    hours: Hours | WhenIdle | None = None
    carry: CarryLimits = field(default_factory=CarryLimits)
    transport: str = "auto"
    caps: LineCaps = field(default_factory=LineCaps)
    cache_bytes: int = 0
    threads: int = 0
    memory_bytes: int = 0
    nice: int = 0
    private_data: Path | None = None
    contribution_bytes: int = 0


def door_of(peer: Peer, pending: Mapping[str, str] = MappingProxyType({})) -> Callable[[Hello], str | None]:
    """Make the function with which a peer refuses revoked callers: it returns the reason, or None for a
    caller that is not revoked, by the commit log as far as the peer knows it.

    pending: further revocations that the owner asked for: key of a ticket or id of a peer -> reason.
    """
    asked = Revocations()
    asked.add(pending)

    def refusal(hello: Hello) -> str | None:
        who = hello.peer_id, ticket_of(hello.credential)
        return peer.ctx.run.revoked.refusal(*who) or asked.refusal(*who)

    return refusal


def _ended_by(reason: str, outcome: Outcome) -> bool:
    """True if the part that ended with `outcome` did so while this machine left for `reason` ("": it did not
    leave), and not with the run. The run may have removed the machine for another reason meanwhile; that is
    as planned, too."""
    return bool(reason) and not outcome.over and (outcome.ok or reason in outcome.reason)


async def join(
    options: JoinOptions,
    say: Callable[[str], None],
    driver: type[LivePeer] = LivePeer,
    transport: type[TcpTransport] = TcpTransport,
) -> Outcome:
    """Lend this machine to a run until the run is over, the user stops or the ticket lets it in no more; with
    `once`, until its first part in the run ends. say: prints a sentence for the user. driver, transport:
    classes of the peer's driver and of its connections.

    Raises UserError if the address or an option cannot be used in the first part, TicketError if the ticket
    names no peer, IdentityError if the key in `home` cannot be used.
    """
    volunteer = Volunteer(options, say, driver, transport)
    words = f"leaving the run; others take over first, within {LEAVE_S:.0f} s (Ctrl+C again leaves at once)"
    with stop_on_signals(volunteer, lambda: say(words), options.grace_s) as received:
        outcome = await volunteer.stay()
    told = (signal.SIGTERM in received and volunteer.left_early(outcome)) or volunteer.was_not_lent(outcome)
    return replace(outcome, terminated=told)


class Volunteer:
    """Machine that is lent to a run: it joins, and joins again whenever its part ends and the protocol's
    `Return` permits it. Each part has a peer of its own, with the same key and a higher incarnation. say:
    prints a sentence for the user. driver, transport: classes of each peer's driver and connections. The key
    is read, or made, and the port is chosen at once."""

    def __init__(
        self,
        options: JoinOptions,
        say: Callable[[str], None],
        driver: type[LivePeer],
        transport: type[TcpTransport],
    ) -> None:
        self._options, self._print = options, say
        self._driver, self._transport = driver, transport
        self._identity = Identity.load_or_create(options.home / "key")
        self._port = bind_port(options.host, options.port) if options.listens else 0
        self._console = VolunteerConsole(self._identity.peer_id, self._say, self._steps)
        self._return = Return(CounterRng(time.time_ns()), options.ticket.grant.expires_at_s)
        self._live: LivePeer | None = None
        self._reached = False
        self._doors: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._admitted_at = math.inf
        self._left = asyncio.Event()
        self._lending = lending.Lending(options.home, options.hours)
        self._not_lent = ""
        """Reason for which this part was left, as the machine is not lent now; "" if it was not."""
        self._next_look: asyncio.TimerHandle | None = None
        self._why_left = ""
        self._ended = options.home / "ended"
        """File with the sentence on how the run ended, once it did."""

    def _steps(self) -> int:
        return self._live.peer.ctx.run.steps if self._live is not None else 0

    def _say(self, text: str) -> None:
        self._print(self._named(text))

    def _named(self, text: str) -> str:
        """`text` with the names of members in place of the beginnings of their ids, as far as this machine
        has learnt them."""
        if self._live is not None:
            members = self._live.peer.ctx.run.membership.members
            self._names |= {peer[:ID_DIGITS]: plain(one.name, NAME_MAX) for peer, one in members.items()}
        return with_names(text, self._names)

    def stop(self, reason: str) -> None:
        """Leave the run cleanly and for good, at the user's request, also while no part is under way. reason:
        for the outcome."""
        self._leave(reason)
        if self._live is not None:
            self._live.stop(reason)

    def abort(self, reason: str) -> None:
        """Leave the run at once and for good: without waiting for the current step, telling the run, or
        keeping the stage's state for the next process. reason: for the outcome, which is not ok if a part was
        under way."""
        self._leave(reason)
        if self._live is not None:
            self._live.abort(reason)

    def left_early(self, outcome: Outcome) -> bool:
        """True if the part that ended with `outcome` did so because the user had this machine leave, and not
        with the run; also if the run removed the machine for another reason meanwhile, or the part never
        began."""
        return _ended_by(self._why_left, outcome)

    def _leave(self, reason: str) -> None:
        self._why_left = reason
        self._left.set()

    async def stay(self) -> Outcome:
        """Join the run, again after each part in it, until the protocol's `Return` says no, the user stops,
        or the options say `once`; returns how the last part ended. Raises UserError if the first part cannot
        begin."""
        try:
            outcome = await self._parts()
            return replace(outcome, reason=self._named(outcome.reason))
        finally:
            self._console.end()

    async def _parts(self) -> Outcome:
        await self._until_lent()
        outcome = await self._take_next_part() if self._left.is_set() else await self._take_part()
        while not self._options.once and not self._left.is_set():
            if self.was_not_lent(outcome):
                outcome = await self._take_next_part()
                continue
            member_s = max(0.0, time.monotonic() - self._admitted_at)
            end = Stop(outcome.reason, outcome.ok, outcome.again)
            wait_s = self._return.wait_s(end, member_s, time.time())
            if wait_s is None:
                if outcome.again:
                    expired = "the ticket has expired: ask the run's owner for a new one"
                    outcome = Outcome(f"{outcome.reason}; {expired}", ok=False)
                break
            when = f"in {wait_s:.0f} s" if wait_s >= 2.0 else "now"
            good = f"the ticket is good for {left(self._options.ticket)}"
            self._say(f"{outcome.reason}; joining again {when} ({good}; Ctrl+C leaves)")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._left.wait(), wait_s)
            outcome = await self._take_next_part()
        if outcome.over and not self._ended.exists():
            self._ended.write_text(outcome.reason, "utf-8")
        return outcome

    async def _until_lent(self) -> None:
        """Wait until this machine is lent, by its hours and pauses, or until the user leaves; returns at once
        if it is."""
        said = ""
        while not self._left.is_set() and (why := self._lending.refusal()) is not None:
            if why.waiting != said:
                said = why.waiting
                self._say(f"{said}; waiting until then (Ctrl+C ends)")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._left.wait(), lending.LOOK_S)
        self._not_lent = ""

    def _watch_lending(self, live: LivePeer) -> None:
        """Leave the run if this machine is no longer lent: other peers take over its work. Otherwise look
        again in LOOK_S. Nothing once the user leaves for good."""
        if self._left.is_set():
            return
        why = self._lending.refusal()
        if why is None:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(lending.LOOK_S, self._watch_lending, live)
            return
        self._not_lent = why.leaving
        live.stop(why.leaving)

    def was_not_lent(self, outcome: Outcome) -> bool:
        """True if the part with this outcome ended because the machine's hours or a pause had it leave, and
        not with the run; also if the run removed the machine for another reason meanwhile."""
        return _ended_by(self._not_lent, outcome)

    async def _take_next_part(self) -> Outcome:
        await self._until_lent()
        if self._left.is_set():
            return Outcome(self._why_left, ok=True)
        free_former_peer()
        try:
            return await self._take_part()
        except (UserError, OSError) as error:  # such as a full disk, which may have room later
            return Outcome(str(error), ok=False, internal=True, again=True)

    async def _take_part(self) -> Outcome:
        options, leader = self._options, self._options.ticket.first_peer
        live = self._new_peer(await self._engine())
        self._console.begin()
        self._admitted_at = math.inf
        live.listeners += [self._console.on_effect, self._on_effect]
        live.journal.on_event = self._console.on_event
        over = self._ended.read_text("utf-8") if self._ended.is_file() else ""
        dial = InitialDial(live, options.ticket, options.patience_s, self._say, self._reached, over)
        live.watchers += [self._console.watch, dial.watch]
        if options.listens:
            try:
                await live.links.transport.listen(options.host, self._port)
            except ListenError as error:
                raise UserError(f"{error}; choose another with --port, or 0 for any free one") from None
        address = options.ticket.first_addresses
        if not self._reached:
            if bbr_missing() and not on_loopback(leader.host):
                slow = "this kernel's TCP has no BBR, so long links are slow after pauses and losses"
                self._say(f"{slow}; {BBR_REMEDY}")
            self._say(f"connecting to the run's data node at {address}")
            if not self._address():
                self._say("this machine has no address for others: it dials them, or meets them at a carrier")
        self._live = live
        self._watch_lending(live)
        if self._left.is_set():
            live.stop(self._why_left)
        try:
            return await live.run((leader.peer_id, address))
        finally:
            if self._next_look is not None:
                self._next_look.cancel()
            dial.close()
            self._named("")  # keeps the names beyond this part
            self._live, self._reached = None, dial.reached
            if dial.reached:
                self._ended.unlink(missing_ok=True)
            doors = live.peer.joining.doors
            self._doors = dict(doors) if doors.keys() - {leader.peer_id} else {}

    def _own_folders(self) -> OwnFolders:
        """Folders of this machine's private data; sentences about them are told on the event loop."""
        options, loop = self._options, asyncio.get_running_loop()

        def tell(text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._say, text)

        kept, most_bytes = options.home / CONTRIBUTIONS, options.contribution_bytes
        return OwnFolders(options.private_data, kept, most_bytes, tell, options.nice)

    def _on_effect(self, effect: Effect) -> None:
        if isinstance(effect, Admitted):
            self._admitted_at = time.monotonic()

    def _address(self) -> str:
        """Addresses at which others dial this machine; "" if it does not listen, or on loopback alone while
        the data node is on another machine."""
        options, leader = self._options, self._options.ticket.first_peer
        if not options.listens:
            return ""
        return options.advertise or reachable_address(options.host, self._port, leader.host)

    async def _engine(self) -> IrohEngine | None:
        """Start this machine's iroh endpoint; None: not to be used, or not installed. Raises UserError if it
        cannot start, or --transport iroh cannot be met."""
        options = self._options
        relay = None if options.transport == "tcp" else relay_of(options.ticket.first_addresses)
        if relay is None:
            if options.transport == "iroh":
                raise UserError("--transport iroh: the ticket names no iroh relay; the run uses TCP")
            return None
        must = options.transport == "iroh"
        return await started_engine(self._identity, relay, options.advertise, must, self._say)

    def _new_peer(self, engine: IrohEngine | None) -> LivePeer:
        options, identity, grant = self._options, self._identity, self._options.ticket.grant
        leader = options.ticket.first_peer
        incarnation = next_incarnation(options.home / "incarnation")
        stage = 0 if grant.role == "data" else options.stage
        relay = relay_of(options.ticket.first_addresses) if engine is not None else None
        address = ",".join(str(one) for one in (self._address(), relay) if one)
        disk = RaftStorage(options.home / "log.jsonl", options.home / "vote.json")
        kept = disk.load()
        me = Member(
            id=identity.peer_id,
            stage=max(0, stage),
            incarnation=incarnation,
            numerics_class="",
            capacity=1,
            name=options.name,
            region=options.region,
            address=address,
            disk=kept.nonce,
        )
        settings = Settings(run=grant.run, epoch=0, stages=1, microbatches=1, steps=0)
        peer = Peer(
            identity.peer_id, incarnation, leader.peer_id, settings, stage, kept,
            doors=self._doors, signer=IdentitySigner(identity), address=me.address,
        )  # fmt: skip
        gate = Gate(grant.run, grant.owner, door_of(peer))
        limits = Limits(max_payload_bytes=MAX_PAYLOAD_BYTES, link_payload_bytes=MAX_PAYLOAD_BYTES)
        return self._driver(
            peer,
            TrainingMachine(
                me,
                options.corpus,
                options.device,
                options.home / FROZEN,
                options.threads,
                options.memory_bytes or UNLIMITED_BYTES,
                self._own_folders(),
            ),
            lambda accept: self._transport(
                identity,
                incarnation,
                gate,
                accept,
                limits=limits,
                carry=options.carry,
                engine=engine,
                only_engine=options.transport == "iroh",
                caps=options.caps,
            ),
            options.ticket,
            options.home / "events.jsonl",
            disk=disk,
            cache=StateCache(options.home / STATES, options.cache_bytes),
            nice=options.nice,
        )
