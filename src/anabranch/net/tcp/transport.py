"""Transport of one peer, put together from its listener, dialer, links and carrier. Not here: their work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from anabranch.addresses import Address
from anabranch.net.circuit import Carrier
from anabranch.net.connection_limits import CarryLimits, Limits, LineCaps
from anabranch.net.handshake import Credential, Gate
from anabranch.net.identity import Identity
from anabranch.net.lane import TokenBucket
from anabranch.net.link import LineBuckets, Link
from anabranch.net.tcp.dialer import Dialer
from anabranch.net.tcp.endpoint import Endpoint, Engine
from anabranch.net.tcp.link_table import LinkTable
from anabranch.net.tcp.listener import Listener

#: Burst of a capped line, in seconds of its rate: short, as it is meant to leave room for others.
CAP_BURST_S = 0.25
#: Reason with which a transport closes its links, unless its owner gives another.
SHUTDOWN = "the peer is shutting down"


class TcpTransport:
    """Transport of one peer: dials other peers and accepts their connections; for use within one running
    event loop. It accepts none before `listen`."""

    def __init__(
        self,
        identity: Identity,
        incarnation: int,
        gate: Gate,
        on_link: Callable[[Link], None],
        *,
        limits: Limits | None = None,
        unix_time_s: Callable[[], float] = time.time,
        carry: CarryLimits | None = None,
        engine: Engine | None = None,
        only_engine: bool = False,
        caps: LineCaps | None = None,
    ) -> None:
        """identity, incarnation: of this peer. gate: whom it admits. `on_link` receives each link that
        another peer dialled, and must call `start` on it. unix_time_s(): Unix time, for the expiry of
        credentials. carry: limits of the circuits that this process forwards for others; None: the default
        ones, with which it carries. engine: iroh endpoint of this peer, which `close` ends; None: addresses
        through iroh are not used. only_engine: True if only those are dialled. caps: of this machine's line.
        Raises ListenError where TLS lacks channel bindings."""
        caps = caps or LineCaps()
        line = LineBuckets(_bucket(caps.up_bytes_per_s), _bucket(caps.down_bytes_per_s))
        self.engine = engine
        self.end = Endpoint(identity, incarnation, gate, limits or Limits(), engine, unix_time_s)
        #: Numbers of refused connections and broken frames, by kind (`errors.TICKET`, `errors.FRAME`, ...).
        self.refusals = self.end.refusals
        self.links = LinkTable(self.end, line, lambda link, token: self.listener.offered(link, token))
        self.dialer = Dialer(self.end, self.links, only_engine)
        self.carrier = Carrier(carry or CarryLimits(), self.links.dialled_by)
        #: Called for each refused connection, with its kind, the caller's host and the reason.
        self.on_refused: Callable[[str, str, str], None] = lambda kind, host, reason: None
        self.listener = Listener(
            self.end, self.links, self.dialer, self.carrier, on_link, lambda *told: self.on_refused(*told)
        )
        if engine is not None:
            engine.on_incoming = self.listener.take_iroh

    def use_limits(self, limits: Limits) -> None:
        """Replace the limits, once the sizes of the run are known. For links that are open already only the
        largest payload and the budgets change. The caps of connection attempts (`attempts_per_s`,
        `attempts_burst`) stay as they were."""
        self.end.limits = limits
        self.end.resources.use_budgets(limits.budgets())
        self.links.limit_payloads(limits.max_payload_bytes)

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept links at an address; returns host and port (0 picks a free port). Raises ListenError if the
        address cannot be used."""
        return await self.listener.listen(host, port)

    async def dial(self, peer_id: str, host: str, port: int, credential: Credential) -> Link:
        """Make a link to the peer `peer_id` at host:port, which reads nothing until its `start`. credential:
        shown to the peer. Raises DialError, and Refused by either side."""
        return await self.dialer.dial_any(peer_id, (Address(host, port),), credential)

    async def dial_any(self, peer_id: str, addresses: Sequence[Address], credential: Credential) -> Link:
        """Make a link to the peer `peer_id` at the first of its addresses that answers, which reads nothing
        until its `start`; arguments and errors as of `Dialer.dial_any`."""
        return await self.dialer.dial_any(peer_id, addresses, credential)

    async def probe(self, peer_id: str, address: Address) -> str:
        """Reason why a peer cannot be reached at an address, "" if it can (`Dialer.probe`)."""
        return await self.dialer.probe(peer_id, address)

    async def close(self, reason: str = SHUTDOWN) -> None:
        """Stop listening, end pending handshakes and circuits, and close every link with a reason for its
        peer; returns once the links are gone and the iroh endpoint has ended."""
        await self.listener.close()
        self.carrier.close()
        await self.links.close(reason)
        if self.engine is not None:
            await self.engine.close()


def _bucket(bytes_per_s: float) -> TokenBucket | None:
    return TokenBucket(bytes_per_s, max(1.0, CAP_BURST_S * bytes_per_s)) if bytes_per_s else None
