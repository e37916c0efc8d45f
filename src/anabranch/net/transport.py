"""The small interface between a peer and its wires. A backend fulfils it; nothing above knows which.

A *link* joins two peers, as two ordered lanes: messages without a payload travel on `control`,
messages with one on `bulk`, so that a heartbeat never waits behind a tensor. There is no order
between the lanes, nor among payloads of different priority or size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from anabranch.net.framing import MAX_MESSAGE_BYTES, Blob
from anabranch.net.handshake import Credential
from anabranch.net.ticket import Grant, MembershipCertificate

OnMessage = Callable[[bytes, Blob | None], None]
OnClosed = Callable[[str], None]


@dataclass(frozen=True)
class Limits:
    """Bounds that hold whatever the other side does."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_payload_bytes: int = 256 << 20
    """Largest payload accepted. At most `framing.MAX_OPEN_STREAMS` arrive at once."""
    max_queued_control_bytes: int = 8 << 20
    """More waiting control messages than this: the peer reads too slowly and the link is closed."""
    max_queued_bulk_bytes: int = 1 << 30
    """The same for payloads. A sender looks at `Link.queued_bytes` to stay well below."""
    chunk_bytes: int = 256 << 10
    """Payloads are sent in pieces of this size (at most `framing.MAX_CHUNK_BYTES`)."""
    handshake_timeout_s: float = 10.0
    max_pending_handshakes: int = 128
    max_pending_of_host: int = 64
    """Of these, from one address: nobody alone keeps all others out."""
    shutdown_timeout_s: float = 2.0
    """How long a closing link tries to send what it still holds, its reason included."""


@dataclass
class LaneCounters:
    """Bytes include framing, not TLS."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass
class LinkCounters:
    control: LaneCounters = field(default_factory=LaneCounters)
    bulk: LaneCounters = field(default_factory=LaneCounters)


class Link(Protocol):
    """A live connection to one authenticated peer.

    Nothing is read until `start`. After the link has closed, `send` does nothing: the closing is
    reported by `on_closed`, and a sender cannot know better at that moment.
    """

    @property
    def peer_id(self) -> str: ...

    @property
    def incarnation(self) -> int:
        """The other side's incarnation."""

    @property
    def credential(self) -> Grant | MembershipCertificate | None:
        """What the other side showed when it dialled; None if this side dialled."""

    @property
    def counters(self) -> LinkCounters: ...

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent, on both lanes."""

    @property
    def broke_framing(self) -> bool:
        """Whether the link closed because the other side sent bytes that the framing does not allow."""

    @property
    def closed_reason(self) -> str | None:
        """Why the link closed, as a sentence; None while it is open."""

    def start(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Begin to read. `on_closed(reason)` is called exactly once, after the last `on_message`."""

    def send(self, message: bytes, payload: Blob | None = None, *, priority: int = 0) -> None:
        """Queue a message; returns at once. The payload's buffer must not change until it is sent.

        `priority` 0..7 orders payloads, lower first. Raises ValueError for what can never be sent
        (a message over the limit, a blob whose length does not fit its shape).
        """

    def pause_bulk(self) -> None:
        """Read no payloads until `resume_bulk`; the sender is held up by flow control."""

    def resume_bulk(self) -> None: ...

    def close(self, reason: str) -> None:
        """Close, and tell the other side why. What is queued may be lost."""


class Transport(Protocol):
    """One peer's access to the network."""

    @property
    def peer_id(self) -> str: ...

    on_refused: Callable[[str, str, str], None]
    """Called for each connection that is turned away: its kind, the caller's host, the reason."""

    @property
    def refusals(self) -> Counter[str]:
        """Refused connections and broken frames by kind (`errors.TICKET`, `errors.FRAME`, ...)."""

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept links; returns the address in use (`port` 0 picks a free one). Raises ListenError."""

    async def dial(self, peer_id: str, host: str, port: int, credential: Credential) -> Link:
        """Connect to exactly this peer. Raises DialError or Refused."""

    async def close(self) -> None:
        """Stop listening and close every link, telling the other side."""
