"""A peer's live links: dialling, closing, and conversion of messages and payloads from and to bytes.

Not here: which peers to dial and what to send (`protocol`)."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from anabranch.addresses import MOST_DIALLED, Address, carrier_ways, foreign_block_of, parse_addresses
from anabranch.background import background
from anabranch.net.errors import FrameError, NetError, Refused
from anabranch.net.framing import Blob
from anabranch.net.handshake import Credential
from anabranch.net.link import Link
from anabranch.net.tcp.transport import SHUTDOWN, TcpTransport
from anabranch.net.ticket import Grant, MembershipCertificate
from anabranch.node.driver.message_turns import Turns
from anabranch.protocol.interface.events import (
    Event,
    Garbled,
    LinkDown,
    LinkUp,
    PathChanged,
    Received,
    VerifiedCredential,
)
from anabranch.protocol.interface.tasks import PIECE_BYTES, Payload
from anabranch.protocol.messages import (
    ASKED_FOR,
    PAYLOAD_PRIORITY,
    AnyMessage,
    Message,
    MessageError,
    Piece,
    decode,
    encode,
)

#: offload(work, done) runs `work()` on another thread, in turn, and calls `done(result)` on the event loop.
Offload = Callable[[Callable[[], Any], Callable[[Any], object]], None]

#: Most bytes, once they are unpacked, of a link's payloads that wait for it before the link is read no
#: further. A choice: many small parts, or a single large one.
UNPACK_BYTES = 256 << 20
#: Payloads that a peer has asked for and that wait to be packed for it; more are dropped, and it asks again.
#: A choice: honest peers ask for six at a time.
ASKED_WAITING = 16
#: Bytes of a link's payloads that may wait to be sent while the next one that its peer asked for is packed. A
#: choice: four pieces of a state, so that a quick line never waits for the packing.
ASKED_AHEAD_BYTES = 4 * PIECE_BYTES
#: Bytes of an unpacked value.
VALUE_BYTES = 8
#: Age (s) up to which a direct link is not replaced by a carried one: the longest time of a dial.
FRESH_S = 10.0


def _at_once(work: Callable[[], Any], done: Callable[[Any], object]) -> None:
    done(work())


def ticket_of(shown: Grant | MembershipCertificate) -> str:
    """Key of the ticket that the credential `shown` is, or descends from; "" for the certificate of the
    owner's own peer."""
    return shown.ticket_key if isinstance(shown, Grant) else shown.ticket


def _credential(link: Link) -> VerifiedCredential | None:
    shown = link.credential
    if shown is None:
        return None
    address = link.control.transport.get_extra_info("peername") or ("",)
    # A carrier's address says nothing, nor does that of a connection from the process of iroh.
    block = foreign_block_of("" if link.way.via else link.way.host or str(address[0]))
    return VerifiedCredential(shown.role, shown.expires_at_s, ticket_of(shown), shown.quota, block)


class Connections:
    """Links of this peer to other peers, by peer id.

    transport: makes them. handle: gets the events of the links. credential: shown to every peer that this one
    dials. offload(work, done): runs the packing and unpacking of payloads, which takes too long for an event
    loop, and hands the result to `done` on it. seated(peer): True if the peer is a member, whose payloads are
    unpacked before those of strangers. sent_bytes: payload bytes sent, by message type. refusals: by peer,
    the refusal of the last dial of it that failed, if that was refused; dials beside a carried link do not
    count.
    """

    def __init__(
        self,
        transport: TcpTransport,
        handle: Callable[[Event], None],
        credential: Credential,
        offload: Offload = _at_once,
        seated: Callable[[str], bool] = lambda peer: True,
    ) -> None:
        self.transport = transport
        self.credential = credential
        self._handle = handle
        self._offload = offload
        self._seated = seated
        self._links: dict[str, Link] = {}
        self._made_at: weakref.WeakKeyDictionary[Link, float] = weakref.WeakKeyDictionary()
        self._loop = asyncio.get_running_loop()
        self._dialling: dict[str, asyncio.Task[None]] = {}
        #: Tries to dial a peer directly whose link a carrier forwards.
        self._direct: dict[str, asyncio.Task[None]] = {}
        #: Received bytes that wait to be unpacked, by link.
        self._waiting: Counter[Link] = Counter()
        #: Payloads that wait to be unpacked, by link, as (work, done); the link whose turn is next is first.
        self._to_unpack: dict[Link, deque[tuple[Callable[[], Any], Callable[[Any], object]]]] = {}
        self._unpacking = False
        self._turns = Turns(seated)
        #: Payloads that a peer asked for and that wait to be packed, by link; the first is being packed.
        self._asked: dict[Link, deque[tuple[Message, Payload]]] = {}
        #: Payload bytes sent, by message type.
        self.sent_bytes: Counter[str] = Counter()
        #: Refusal of the last dial that failed, by peer, if it was refused.
        self.refusals: dict[str, Refused] = {}

    def accept(self, link: Link) -> None:
        """Take over a new link, dialled by either side, and report it to the protocol.

        An older link to the same peer is closed as replaced. Only a fresh direct link stays: then a new link
        through a carrier is closed instead (see `_keeps`). An older one that has ended by itself, and whose
        end waits for its turn, is reported with its own reason first; messages of it that wait are dropped.
        """
        older = self._links.get(link.peer_id)
        if older is not None and older.closed_reason is not None:
            self._closed(older, older.closed_reason)
            older = None
        if older is not None and self._keeps(older, link):
            link.start(lambda message, blob: None, lambda reason: None)
            link.close("there is a direct connection already")
            return
        if older is not None:
            del self._links[link.peer_id]
            self._handle(LinkDown(link.peer_id, "replaced by a new connection"))
            older.close("replaced by a new connection")
        self._links[link.peer_id] = link
        self._made_at[link] = self._loop.time()
        via = link.way.via or ("iroh" if link.way.iroh else "")
        self._handle(LinkUp(link.peer_id, link.incarnation, _credential(link), via))
        engine = self.transport.engine
        if link.way.iroh and engine is not None and link.peer_id in engine.paths:
            self._handle(PathChanged(link.peer_id, engine.paths[link.peer_id]))
        link.start(
            lambda message, blob: self._arrived(link, message, blob),
            lambda reason: self._turns.put(link, lambda: self._closed(link, reason)),
        )

    def _keeps(self, older: Link, link: Link) -> bool:
        """True if the new `link` is to be closed and the older one stays: `link` goes through a carrier, and
        the older one is direct, made less than FRESH_S ago, and to the same process of the peer
        (incarnation). Both sides then dialled at once. An older direct link may be dead."""
        fresh = self._loop.time() < self._made_at.get(older, 0.0) + FRESH_S
        return bool(link.way.via) and not older.way.via and fresh and older.incarnation == link.incarnation

    def _is_current(self, link: Link) -> bool:
        return self._links.get(link.peer_id) is link

    def _arrived(self, link: Link, data: bytes, blob: Blob | None) -> None:
        size_bytes = len(data) + (0 if blob is None else memoryview(blob.data).nbytes)
        self._turns.put(link, lambda: self._received(link, data, blob), size_bytes)

    def _received(self, link: Link, data: bytes, blob: Blob | None) -> None:
        if not self._is_current(link):
            return
        try:
            message = decode(data)
        except MessageError as error:
            self._garbled(link, str(error))
            return
        if blob is None:
            self._handle(Received(link.peer_id, message, None))
            return
        if type(message) not in PAYLOAD_PRIORITY:
            self._garbled(link, f"a {type(message).__name__} with a payload")
            return
        from anabranch.node.driver.tensor_codec import from_blob, inflated, is_slow

        of_state = isinstance(message, Piece)

        def unpack() -> object:
            try:
                return inflated(from_blob(blob), PIECE_BYTES) if of_state else from_blob(blob)
            except FrameError as error:
                return error

        if not of_state and not is_slow(blob):
            self._unpacked(link, message, unpack(), memoryview(blob.data).nbytes)
            return
        # Packed zeros take almost none.
        size_bytes = PIECE_BYTES if of_state else VALUE_BYTES * math.prod(blob.shape)
        self._wait(link, size_bytes)

        def unpacked(payload: object) -> None:
            self._wait(link, -size_bytes)
            self._unpacked(link, message, payload, size_bytes)

        self._to_unpack.setdefault(link, deque()).append((unpack, unpacked))
        self._unpack_next()

    def _unpack_next(self) -> None:
        """Unpack one payload, if none is being unpacked: of a member, before those of strangers; links take
        turns. The next one follows by itself. A payload of few bytes may take a second, and a stranger's is
        refused only afterwards, so a flood would hold up the parts of a reduce. Those of links that are gone
        are dropped."""
        for gone in [link for link in self._to_unpack if not self._is_current(link)]:
            for _, drop in self._to_unpack.pop(gone):
                drop(None)
        if self._unpacking or not self._to_unpack:
            return
        members = (link for link in self._to_unpack if self._seated(link.peer_id))
        link = next(members, None) or next(iter(self._to_unpack))
        waiting = self._to_unpack.pop(link)
        work, then = waiting.popleft()
        if waiting:
            self._to_unpack[link] = waiting
        self._unpacking = True

        def done(payload: Any) -> None:
            self._unpacking = False
            then(payload)
            self._unpack_next()

        self._offload(work, done)

    def _wait(self, link: Link, size_bytes: int) -> None:
        """Add `size_bytes` (negative: subtract) to the unpacked bytes of a link's payloads that wait to be
        unpacked. While they exceed UNPACK_BYTES, no payloads are read from the link."""
        before, self._waiting[link] = self._waiting[link], self._waiting[link] + size_bytes
        held, hold = before > UNPACK_BYTES, self._waiting[link] > UNPACK_BYTES
        if hold != held:
            link.hold_payloads(hold)
        if not self._waiting[link]:
            del self._waiting[link]

    def _unpacked(self, link: Link, message: AnyMessage, payload: object, size_bytes: int) -> None:
        if not self._is_current(link):
            return
        if isinstance(payload, FrameError):
            self._garbled(link, f"broken payload: {payload}")
        else:
            share = size_bytes / link.max_payload_bytes
            self._handle(Received(link.peer_id, message, payload, share, size_bytes))

    def _garbled(self, link: Link, reason: str) -> None:
        del self._links[link.peer_id]
        link.close(reason)
        self._handle(Garbled(link.peer_id, reason))

    def _closed(self, link: Link, reason: str) -> None:
        if self._is_current(link):
            del self._links[link.peer_id]
            self._handle((Garbled if link.broke_framing else LinkDown)(link.peer_id, reason))

    def send(self, peer: str, message: Message, payload: Payload | None) -> None:
        link = self._links.get(peer)
        if link is None:
            return
        if payload is None:
            link.send(encode(message))
            return
        from anabranch.node.driver.tensor_codec import is_slow, to_blob

        if type(message) in ASKED_FOR:
            asked = self._asked.setdefault(link, deque())
            if len(asked) < ASKED_WAITING:
                asked.append((message, payload))
            if len(asked) == 1:
                self._pack_asked(link)
            return
        convert = self._offload if is_slow(payload) else _at_once
        # A peer that makes its link anew gets its parts again: those of the former link are not packed.
        work = lambda: to_blob(payload) if self._is_current(link) else None  # noqa: E731
        convert(work, lambda blob: self._packed(link, message, blob))

    def _pack_asked(self, link: Link) -> None:
        """Pack the payloads that a peer asked for, one after the other: a request is cheap, and the parts of
        a reduce must not wait behind thousands of answers. The next is packed once the link has little left
        to send (ASKED_AHEAD_BYTES): a peer that reads nothing holds little memory here."""
        from anabranch.node.driver.tensor_codec import deflated, to_blob

        message, payload = self._asked[link][0]
        of_state = isinstance(message, Piece)

        def pack() -> Blob | None:
            if not self._is_current(link):
                return None
            return to_blob(deflated(payload) if of_state else payload)

        def packed(blob: Blob | None) -> None:
            self._packed(link, message, blob)
            link.when_room(ASKED_AHEAD_BYTES, sent)

        def sent() -> None:
            self._asked[link].popleft()
            if self._asked[link] and self._is_current(link):
                self._pack_asked(link)
            else:
                del self._asked[link]

        self._offload(pack, packed)

    def _packed(self, link: Link, message: Message, blob: Blob | None) -> None:
        """Queue a packed payload if its link is still there. blob: None if it was gone before the packing."""
        if blob is not None and self._is_current(link):
            self.sent_bytes[type(message).__name__] += memoryview(blob.data).nbytes
            link.send(encode(message), blob, priority=PAYLOAD_PRIORITY.get(type(message), 0))

    def dial(self, peer: str, address: str) -> None:
        """Carry out the effect Dial: dial a peer at its addresses `address`, in a task of its own. The
        outcome is an event, LinkUp or LinkDown. Nothing is done while the peer is being dialled, or linked as
        well as `address` permits. A peer whose link a carrier forwards is dialled beside that link, and a
        failure is no event then; if the link ends meanwhile, the next dial takes the place of this one."""
        linked = peer in self._links
        if peer in (self._direct if linked else self._dialling):
            return
        if not self._betters(peer, bool(carrier_ways(address))):
            return
        if not linked and peer in self._direct:
            self._direct.pop(peer).cancel()
        tasks = self._direct if linked else self._dialling
        tasks[peer] = background(self._dial(peer, address, tasks))

    async def _dial(self, peer: str, address: str, tasks: dict[str, asyncio.Task[None]]) -> None:
        try:
            link = await self.transport.dial_any(
                peer, parse_addresses(address, MOST_DIALLED), self.credential
            )
        except Exception as error:  # other errors than NetError are defects, which cost this dial alone
            tasks.pop(peer, None)
            if tasks is self._direct:
                return
            self.refusals.pop(peer, None)
            if isinstance(error, Refused):
                self.refusals[peer] = error
            refused = isinstance(error.__cause__, ConnectionRefusedError)
            if peer not in self._links:
                named = isinstance(error, NetError | ValueError)
                reason = str(error) if named else f"{type(error).__name__}: {error}"
                reason = f"refused: {error}" if isinstance(error, Refused) else reason
                self._handle(LinkDown(peer, reason, refused=refused))
            return
        tasks.pop(peer, None)
        if not self._betters(peer, bool(link.way.via)):
            link.start(lambda message, blob: None, lambda reason: None)
            link.close("there is a connection already")
        else:
            self.accept(link)

    def _betters(self, peer: str, carried: bool) -> bool:
        """True if a new link to a peer, through a carrier or not (`carried`), is better than what there is:
        no link, one that has ended, or a carried one where the new one is not."""
        held = self._links.get(peer)
        if held is None or held.closed_reason is not None:
            return True
        return bool(held.way.via) and not carried

    async def dial_back(self, peer: str, addresses: str) -> tuple[str, str]:
        """Test which addresses of a peer (joined by commas) answer with its key, by connections that are
        closed at once.

        Returns those addresses, joined by commas, and the other ones' reasons, joined by "; ". Raises
        ValueError if the addresses cannot be parsed.
        """
        parsed = parse_addresses(addresses)
        reasons = await asyncio.gather(*(self.transport.probe(peer, address) for address in parsed))
        answered = [str(address) for address, reason in zip(parsed, reasons, strict=True) if not reason]
        return ",".join(answered), "; ".join(filter(None, reasons))

    def dialled_at(self, peer: str) -> Address | None:
        """Address at which this side dialled a linked peer; None if the peer dialled, or is not linked."""
        link = self._links.get(peer)
        return None if link is None else link.way.address

    def hang_up(self, peer: str, reason: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            link.close(reason)

    async def close(self, reason: str = SHUTDOWN) -> None:
        """Cancel dials, stop listening and close every link with a reason for its peer."""
        for task in (*self._dialling.values(), *self._direct.values()):
            task.cancel()
        await self.transport.close(reason)
