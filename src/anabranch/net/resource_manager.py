"""Resource manager of a transport: budgets of memory, streams and connections, reserved before they are used.

Modelled on libp2p's resource manager. A reservation is charged to every scope that it belongs to, or to
none: the *system* (this process), the *ticket* with which the peer came, the *address block*
(`addresses.block_of`) of its connection, the *peer* (its key), and for forwarded connections (`net.circuit`)
the *circuits* of a peer instead of the peer itself. Keys are free and addresses cheap, so the
wider scopes bound what many keys can take together. One connection is one file descriptor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.addresses import block_of
from anabranch.net.errors import NetError
from anabranch.operating_system import descriptor_limit, physical_memory_bytes

#: File descriptors left to files, logs, the corpus and the crash report. A choice: a run uses about 40.
RESERVED_DESCRIPTORS = 128
#: Most connections of a process, whatever its descriptor limit: each costs about 150 KiB of buffers.
MAX_CONNECTIONS = 8192
#: Least connections of a process, so that a small descriptor limit does not close the door altogether.
MIN_CONNECTIONS = 64
#: Share of the connections and of the memory of the system that one ticket or one address block may take. A
#: choice: all volunteers of a laboratory share an address block, those of an open run a ticket.
SHARE = 0.5
#: Connections of one peer: two each of a link, of the link that replaces it, and of links that are closing.
PEER_CONNECTIONS = 16
#: Connections of one peer that are forwarded: at a carrier those of the peer, at a peer those through one
#: carrier. Two links' worth for each of 32 neighbours; `CarryLimits` has an own limit.
CIRCUITS_OF_PEER = 128
#: Address blocks whose recent connections are remembered; it bounds memory against many addresses.
BLOCKS_KEPT = 4096
#: Links whose whole memory budget the system holds. A choice: a neighbour seldom uses a tenth of its own.
FULL_LINKS = 16
#: Share of this machine's memory for unfinished payloads, but at least two links' budgets. A choice.
MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class Budget:
    """Limits of one scope at one time: bytes of unfinished payloads (memory_bytes), their number (streams),
    and connections."""

    memory_bytes: int
    streams: int
    connections: int


@dataclass(frozen=True)
class Budgets:
    """Budgets of the scopes: of this process (system), and of each ticket, address block, peer, and peer's
    circuits."""

    system: Budget
    ticket: Budget
    block: Budget
    peer: Budget
    circuits: Budget


def make_budgets(link_bytes: int, link_streams: int, connections: int = 0) -> Budgets:
    """Budgets for links that each need up to `link_bytes` of memory in `link_streams` unfinished payloads.

    connections: most of this process; 0: what its descriptor limit allows. The system's memory is that of
    FULL_LINKS links, within MEMORY_SHARE of this machine's, but two links' at least. Each ticket and each
    address block may take SHARE of the system's budget, each peer a link's.
    """
    most = min(MAX_CONNECTIONS, descriptor_limit() - RESERVED_DESCRIPTORS)
    connections = connections or max(MIN_CONNECTIONS, most)
    share_bytes = int(physical_memory_bytes() * MEMORY_SHARE)
    memory_bytes = max(2 * link_bytes, min(FULL_LINKS * link_bytes, share_bytes))
    share = Budget(
        int(memory_bytes * SHARE),
        max(link_streams, int(connections * SHARE) // 2 * link_streams),
        max(2, int(connections * SHARE)),
    )
    return Budgets(
        system=Budget(memory_bytes, connections // 2 * link_streams, connections),
        ticket=share,
        block=share,
        peer=Budget(link_bytes, link_streams, PEER_CONNECTIONS),
        circuits=Budget(0, 0, CIRCUITS_OF_PEER),
    )


class ResourceRefused(NetError):
    """A reservation that a scope has no room for; the connection is closed with this reason.

    own: True if the peer's own scope is full: it holds more than the protocol can need.
    """

    def __init__(self, reason: str, own: bool) -> None:
        super().__init__(reason)
        self.own = own


@dataclass(eq=False)
class Scope:
    """Account of one scope, such as an address block or a peer. name: its words in a refusal. memory_bytes,
    streams, connections: bytes and number of unfinished payloads, and connections, that its reservations use
    now. users: number of its reservations, also of those that hold nothing."""

    name: str
    budget: Budget
    memory_bytes: int = 0
    streams: int = 0
    connections: int = 0
    #: Reservations that belong to this scope, even if they hold nothing now.
    users: int = 0

    def lacks(self, memory_bytes: int, streams: int, connections: int) -> str:
        """Reason why this scope has no room for so many more bytes and unfinished payloads (streams) and
        connections; "" if it has. Nothing is charged."""
        budget = self.budget
        if streams and self.streams + streams > budget.streams:
            return f"{self.name} has {self.streams} unfinished payloads, of at most {budget.streams}"
        if memory_bytes and self.memory_bytes + memory_bytes > budget.memory_bytes:
            held = f"{self.memory_bytes} bytes of unfinished payloads, and {memory_bytes} more"
            return f"{self.name} has {held} exceed {budget.memory_bytes}"
        if connections and self.connections + connections > budget.connections:
            return f"{self.name} has {self.connections} connections, of at most {budget.connections}"
        return ""

    def add(self, memory_bytes: int, streams: int, connections: int) -> None:
        self.memory_bytes += memory_bytes
        self.streams += streams
        self.connections += connections


class Reservation:
    """Resources that one connection or link holds, in every scope that it belongs to. keys: (kind, name) of
    the first scopes, which it enters at once, holding nothing.

    A scope can be joined later, when the peer and its ticket are known; the reservation is charged to it as a
    whole. `release_all` gives everything back, once.
    """

    def __init__(self, manager: ResourceManager, keys: Iterable[tuple[str, str]]) -> None:
        self._manager = manager
        self._scopes: dict[tuple[str, str], Scope] = {key: manager.enter(*key) for key in keys}
        self.memory_bytes = self.streams = self.connections = 0

    def reserve(self, memory_bytes: int = 0, streams: int = 0, connections: int = 0) -> None:
        """Charge bytes of memory, unfinished payloads (streams) and connections to every scope, or raise
        ResourceRefused and charge none."""
        for (kind, _), scope in self._scopes.items():
            self._check(kind, scope, memory_bytes, streams, connections)
        for scope in self._scopes.values():
            scope.add(memory_bytes, streams, connections)
        self.memory_bytes += memory_bytes
        self.streams += streams
        self.connections += connections

    def join(self, kind: str, name: str) -> None:
        """Charge all that this reservation holds to one more scope, by kind and name; nothing if it belongs
        to that scope already. Raises ResourceRefused, and charges nothing, if the scope has no room."""
        if (kind, name) in self._scopes:
            return
        scope = self._manager.enter(kind, name)
        try:
            self._check(kind, scope, self.memory_bytes, self.streams, self.connections)
        except ResourceRefused:
            self._manager.leave(kind, name)
            raise
        scope.add(self.memory_bytes, self.streams, self.connections)
        self._scopes[kind, name] = scope

    def release(self, memory_bytes: int = 0, streams: int = 0, connections: int = 0) -> None:
        """Give back a part of what is held (bytes, unfinished payloads, connections), in every scope that it
        belongs to. The caller gives back no more than is held: that is not checked."""
        for scope in self._scopes.values():
            scope.add(-memory_bytes, -streams, -connections)
        self.memory_bytes -= memory_bytes
        self.streams -= streams
        self.connections -= connections

    def release_all(self) -> None:
        """Give everything back, and leave all scopes. A second call does nothing."""
        self.release(self.memory_bytes, self.streams, self.connections)
        for key in self._scopes:
            self._manager.leave(*key)
        self._scopes.clear()

    def _check(self, kind: str, scope: Scope, *wanted: int) -> None:
        if reason := scope.lacks(*wanted):
            self._manager.refusals[kind] += 1
            raise ResourceRefused(reason, own=kind == "peer")


class ResourceManager:
    """Scopes of one transport, within `budgets`. Whoever gets a reservation gives it back
    (`Reservation.release_all`). refusals: number of refused reservations, by kind of scope."""

    def __init__(self, budgets: Budgets) -> None:
        self.system = Scope("this process", budgets.system)
        self.refusals: Counter[str] = Counter()
        self._budgets = budgets
        self._scopes: dict[tuple[str, str], Scope] = {("system", ""): self.system}

    def use_budgets(self, budgets: Budgets) -> None:
        """Change the budgets of all scopes, present and later ones. What is held already stays held, even
        above a smaller budget."""
        self._budgets = budgets
        for (kind, _), scope in self._scopes.items():
            scope.budget = getattr(budgets, kind)

    def enter(self, kind: str, name: str) -> Scope:
        """Scope of a kind (a field of `Budgets`) and name, made if need be. The scope's count of reservations
        rises by one, so each call needs a later `leave`."""
        scope = self._scopes.get((kind, name))
        if scope is None:
            words = {"ticket": "its ticket", "block": f"the address block {name}", "peer": "this peer"}
            called = words.get(kind, "its circuits")
            scope = self._scopes[kind, name] = Scope(called, getattr(self._budgets, kind))
        scope.users += 1
        return scope

    def leave(self, kind: str, name: str) -> None:
        """Count one reservation less in a scope that was entered (`enter`); a scope without any is forgotten,
        other than the system's."""
        scope = self._scopes[kind, name]
        scope.users -= 1
        if not scope.users and scope is not self.system:
            del self._scopes[kind, name]

    def incoming(self, host: str) -> Reservation:
        """Reserve a connection from `host`, before anything is read from it. Raises ResourceRefused if this
        process, or the host's address block, has too many."""
        return self._connection(("system", ""), ("block", block_of(host)))

    def outgoing(self, peer: str) -> Reservation:
        """Reserve a connection that this side dials. Raises ResourceRefused if this process or that peer has
        too many."""
        return self._connection(("system", ""), ("peer", peer))

    def offered(self, carrier: str) -> Reservation:
        """Reserve a connection for a circuit that a carrier offers. Raises ResourceRefused if this process
        has too many, or circuits of that carrier."""
        return self._connection(("system", ""), ("circuits", carrier))

    def link(self, peer: str, ticket: str, host: str) -> Reservation:
        """Empty reservation for the payloads of a link, charged to the system, the address block of the other
        end (`host`), the peer and its ticket. ticket: its key; "" if it is not known, or for the owner's own
        peer: none is charged."""
        keys = [("system", ""), ("block", block_of(host)), ("peer", peer)]
        return Reservation(self, keys + ([("ticket", ticket)] if ticket else []))

    def _connection(self, *keys: tuple[str, str]) -> Reservation:
        reservation = Reservation(self, keys)
        try:
            reservation.reserve(connections=1)
        except ResourceRefused:
            reservation.release_all()
            raise
        return reservation


class AttemptRate:
    """Token buckets that limit the connections which each address block begins to `per_s` a second, and
    `burst` at once after a pause: refused handshakes cost time, too. The last BLOCKS_KEPT blocks are
    remembered."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, host: str, now: float) -> bool:
        """Charge a connection from `host` at time `now` (s) to its address block; False, and nothing is
        charged, if the block has begun too many."""
        may = self._left(host, now) >= 1.0
        self.charge(host, now, float(may))
        return may

    def charge(self, host: str, now: float, attempts: float) -> None:
        """Charge `attempts` connections to the address block of `host`, also if it has begun too many."""
        left, block = self._left(host, now), block_of(host)
        self._buckets.pop(block, None)
        self._buckets[block] = left - attempts, now
        if len(self._buckets) > BLOCKS_KEPT:
            del self._buckets[next(iter(self._buckets))]  # idle for longest

    def _left(self, host: str, now: float) -> float:
        """Connections that the address block of `host` may begin at time `now` (s); below 0 after a charge
        of more than it had."""
        left, at = self._buckets.get(block_of(host), (self._burst, now))
        return min(self._burst, left + self._per_s * max(0.0, now - at))
