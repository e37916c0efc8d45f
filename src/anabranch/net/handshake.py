"""Handshake after TLS, as two state machines without I/O.

    server -> client   Challenge   version, run, the server's incarnation, a fresh nonce
    client -> server   Hello       run, the client's key and incarnation, the lane, a credential, signatures,
                                   or the answer to a puzzle in place of the ticket's (an open ticket)
    server -> client   Answer      accepted, or a kind and a sentence

TLS 1.3 has proved the server's key before the first byte: its certificate is self-signed, and the client
accepts exactly the key that it dialled. The client then proves its own key by signing a statement that names
version, run, both keys, the server's nonce, both incarnations, the lane and the *binding*: bytes that only
the two ends of this TLS connection know. A Hello is therefore useless elsewhere: it cannot be replayed later
(nonce), passed on to another peer by a dishonest server (server's key), or relayed by a third party
(binding). The server reads one Hello of bounded size, and nothing else before it is verified.

The first byte of the nonce says how many bits of work an open ticket needs (`net.door`). The work is checked
before any signature. A bulk connection needs none: its control connection was paid for.

Each message is `anbr` | version u16 | length u32 | msgpack body (big-endian). The prefix never changes, so
that peers of different versions can report the mismatch."""

from __future__ import annotations

import enum
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from anabranch import PROTOCOL_VERSION
from anabranch.net import errors
from anabranch.net.door.puzzle import MOST_SOLVED, solve, work_in
from anabranch.net.errors import Refused, TicketError
from anabranch.net.identity import Identity, verify
from anabranch.net.ticket import (
    MAX_CREDENTIAL_BYTES,
    OPEN,
    Grant,
    MembershipCertificate,
    PeerIdText,
    RunId,
    Ticket,
    check_certificate,
    check_grant,
)

#: Version of the wire, which both ends of a connection must speak. It rises with PROTOCOL_VERSION, which the
#: log states too, and alone where only handshake or frames change: runs then go on with their logs. That
#: happened once: the checksum of a payload is over its hash.
WIRE_VERSION = PROTOCOL_VERSION + 1

CONTROL = "control"
BULK = "bulk"
#: Connections to a carrier (`net.circuit`): of a peer that opens a circuit, and of the peer that it reaches.
CARRY = "carry"
MEET = "meet"
NONCE_BYTES = 32
LINK_ID_BYTES = 16
MAX_BODY_BYTES = 4096
MAX_REASON_CHARS = 400

_MAGIC = b"anbr"
_PREFIX = struct.Struct("!4sHI")
_IDENTITY_PURPOSE = b"anabranch handshake"
_TICKET_PURPOSE = b"anabranch handshake ticket"

_Incarnation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Signature = Annotated[bytes, msgspec.Meta(max_length=64)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_LinkId = Annotated[bytes, msgspec.Meta(min_length=LINK_ID_BYTES, max_length=LINK_ID_BYTES)]
_Body = TypeVar("_Body", bound=msgspec.Struct)

Credential = Ticket | bytes
"""Credential of a dialling peer: a ticket, or a sealed membership certificate."""


class _State(enum.Enum):
    """States of a handshake, for both sides: the message that is awaited next, or DONE."""

    AWAIT_HELLO = "await hello"
    AWAIT_CHALLENGE = "await challenge"
    AWAIT_ANSWER = "await answer"
    DONE = "done"


#: The only transition from each state, taken when the awaited message has arrived. The server begins with
#: AWAIT_HELLO, the client with AWAIT_CHALLENGE. A refusal ends a handshake in any state.
_NEXT = {
    _State.AWAIT_HELLO: _State.DONE,
    _State.AWAIT_CHALLENGE: _State.AWAIT_ANSWER,
    _State.AWAIT_ANSWER: _State.DONE,
}


class _Challenge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    run: RunId
    incarnation: _Incarnation
    nonce: _Nonce


class _HelloBody(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Body of a Hello, the dialling side's message in a handshake; all fields are of that side. nonce:
    repeats the server's. credential_kind: "ticket", "open" (an open ticket) or "certificate". credential:
    sealed grant or certificate. ticket_signature: by the ticket's key; with an open ticket the answer to the
    puzzle instead; empty with a certificate. signature: by the peer's key."""

    run: RunId
    peer_id: PeerIdText
    incarnation: _Incarnation
    nonce: _Nonce
    lane: Annotated[str, msgspec.Meta(max_length=16)]
    link_id: _LinkId
    credential_kind: Annotated[str, msgspec.Meta(max_length=16)]
    credential: Annotated[bytes, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)]
    ticket_signature: _Signature
    signature: _Signature


class _Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    accepted: bool
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]


@dataclass(frozen=True)
class Hello:
    """Verified self-introduction of a dialling peer: its id, incarnation and run.

    lane: kind of connection. CONTROL or BULK: one of a link's two, with the same link_id in both. CARRY: to a
    carrier, to open a circuit. MEET: to a carrier, to take part in the circuit whose token is link_id.
    credential: permissions of the ticket, or certificate, that the peer showed. work: bits of work that it
    did for an open ticket (0: it showed another credential, or none was asked).
    """

    peer_id: str
    incarnation: int
    run: str
    lane: str
    link_id: bytes
    credential: Grant | MembershipCertificate
    work: int = 0


@dataclass(frozen=True)
class Gate:
    """Admission rules of a listening peer of `run`. owner: peer id that issues tickets and membership
    certificates. authorize(hello): reason of a refusal, or None; called once per link, and for each
    connection about a circuit, after all signatures are verified."""

    run: str
    owner: str
    authorize: Callable[[Hello], str | None]


#: Peers whose incarnations a fence remembers, those admitted last: keys are free. A choice: the log knows the
#: incarnations of members, too.
INCARNATIONS_KEPT = 1 << 16


class IncarnationFence:
    """Highest incarnation (start count) noted of each peer that was admitted or dialled, of the last
    INCARNATIONS_KEPT; lower ones are stale processes or copies of the peer's files."""

    def __init__(self) -> None:
        self._highest: dict[str, int] = {}

    def check(self, peer_id: str, incarnation: int) -> None:
        """Raise Refused if a higher incarnation of this peer was noted. Nothing is noted here."""
        highest = self._highest.get(peer_id, -1)
        if incarnation < highest:
            raise Refused(
                errors.INCARNATION,
                f"incarnation {incarnation} of this peer is over, {highest} was seen: "
                "its key is in use on another machine, or its files were restored from an old copy",
            )

    def note(self, peer_id: str, incarnation: int) -> None:
        self._highest[peer_id] = max(incarnation, self._highest.pop(peer_id, -1))
        if len(self._highest) > INCARNATIONS_KEPT:
            del self._highest[next(iter(self._highest))]


class _Reader:
    """Buffer for the bytes of one handshake message, of bounded size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> tuple[int, bytes] | None:
        """Add received bytes. Returns the sender's wire version and the message's body once the message
        is complete (the body is empty for another version), else None. Raises Refused for bytes of another
        protocol, and for too long a message."""
        buffer = self._buffer
        buffer += data
        if not _MAGIC.startswith(buffer[:4]):
            raise Refused(errors.MALFORMED, "this is not an anabranch peer")
        if len(buffer) < _PREFIX.size:
            return None
        _, version, length = _PREFIX.unpack_from(buffer)
        if version != WIRE_VERSION:
            return version, b""
        if length > MAX_BODY_BYTES:
            raise Refused(errors.OVERSIZED, f"a handshake message of {length} bytes exceeds {MAX_BODY_BYTES}")
        if len(buffer) < _PREFIX.size + length:
            return None
        body = bytes(buffer[_PREFIX.size : _PREFIX.size + length])
        del buffer[: _PREFIX.size + length]
        return version, body

    def rest(self) -> bytes:
        """Received bytes that follow the handshake message."""
        return bytes(self._buffer)


class ServerHandshake:
    """Listening side of a handshake. Send `greeting()`, then pass received bytes to `receive` until it
    returns a Hello, whose run, key, work and credential are verified. The caller then checks the incarnation
    and `Gate.authorize`, and sends `accept()` or `refuse(...)`. It also sends `refuse(error)` for a Refused
    that `receive` raises."""

    def __init__(
        self,
        identity: Identity,
        incarnation: int,
        gate: Gate,
        *,
        binding: bytes,
        nonce: bytes | None = None,
        price: int = 0,
    ) -> None:
        """identity, incarnation: of this peer. gate: admission rules. binding: bytes that only the two ends
        of the TLS connection know. price: bits of work that an open ticket needs. nonce: for tests, in place
        of a random one; its first byte is the price then, and `price` is ignored."""
        self._identity = identity
        self._incarnation = incarnation
        self._gate = gate
        self._binding = binding
        self._nonce = bytes((price,)) + secrets.token_bytes(NONCE_BYTES - 1) if nonce is None else nonce
        self._reader = _Reader()
        self._state = _State.AWAIT_HELLO

    def greeting(self) -> bytes:
        return _encode(_Challenge(self._gate.run, self._incarnation, self._nonce))

    def receive(self, data: bytes | memoryview, *, now_s: float) -> Hello | None:
        """Handle received bytes; returns the verified Hello once it is complete, None before. Raises Refused,
        with the reason to send, for any other Hello. now_s: Unix time, for expiry. A handshake reads one
        Hello, which uses up the nonce."""
        if self._state is _State.DONE:
            raise Refused(errors.REPLAY, "a second hello on one connection")
        message = self._reader.feed(data)
        if message is None:
            return None
        self._state = _NEXT[self._state]
        version, encoded = message
        if version != WIRE_VERSION:
            raise _version_refusal(version)
        if self._reader.rest():
            raise Refused(errors.MALFORMED, "bytes after the hello, before it was answered")
        return self._verify(_decode(_HelloBody, encoded), now_s)

    def _verify(self, hello: _HelloBody, now_s: float) -> Hello:
        gate = self._gate
        if hello.run != gate.run:
            raise Refused(errors.RUN, f"this peer belongs to run {gate.run!r}, not to {hello.run!r}")
        if hello.lane not in (CONTROL, BULK, CARRY, MEET):
            raise Refused(errors.LANE, f"there is no lane {hello.lane!r}")
        if hello.peer_id == self._identity.peer_id:
            raise Refused(errors.INCARNATION, "the caller uses this peer's own key")
        if not hmac.compare_digest(hello.nonce, self._nonce):
            raise Refused(errors.REPLAY, "the hello answers another challenge than this connection's")
        statement = _statement(
            hello, server=self._identity.peer_id, server_incarnation=self._incarnation, binding=self._binding
        )
        work = self._work_of(hello, statement)
        if not verify(hello.peer_id, _IDENTITY_PURPOSE, statement, hello.signature):
            raise Refused(errors.SIGNATURE, "the caller's signature is not valid for this connection")
        return Hello(
            hello.peer_id,
            hello.incarnation,
            hello.run,
            hello.lane,
            hello.link_id,
            self._check_credential(hello, statement, now_s),
            work,
        )

    def _work_of(self, hello: _HelloBody, statement: bytes) -> int:
        """Bits of work that the puzzle's answer in a Hello with an open ticket proves for `statement`; 0 for
        another credential, and for a bulk connection. Raises Refused if they are fewer than were asked."""
        if hello.credential_kind != OPEN or hello.lane == BULK:
            return 0
        work = work_in(statement, hello.ticket_signature)
        if work < self._nonce[0]:
            raise Refused(errors.WORK, f"{self._nonce[0]} bits of work were asked, and {work} done")
        return work

    def _check_credential(
        self, hello: _HelloBody, statement: bytes, now_s: float
    ) -> Grant | MembershipCertificate:
        gate = self._gate
        try:
            if hello.credential_kind == "ticket":
                grant = check_grant(hello.credential, run=gate.run, owner=gate.owner, now_s=now_s)
                if grant.role == OPEN:
                    raise Refused(errors.TICKET, "an open ticket is shown with work, not with its key")
                if not verify(grant.ticket_key, _TICKET_PURPOSE, statement, hello.ticket_signature):
                    raise Refused(errors.TICKET, "the caller does not hold the ticket that it shows")
                return grant
            if hello.credential_kind == OPEN:
                grant = check_grant(hello.credential, run=gate.run, owner=gate.owner, now_s=now_s)
                if grant.role != OPEN:
                    raise Refused(errors.TICKET, "work opens the door with an open ticket only")
                return grant
            if hello.credential_kind == "certificate":
                certificate = check_certificate(hello.credential, run=gate.run, now_s=now_s)
                if certificate.issuer != gate.owner:
                    raise Refused(errors.CERTIFICATE, "the certificate's issuer has no right to issue")
                if certificate.peer_id != hello.peer_id:
                    raise Refused(errors.CERTIFICATE, "the certificate belongs to another peer")
                return certificate
        except TicketError as error:
            raise Refused(error.kind, str(error)) from error
        raise Refused(errors.MALFORMED, f"there is no credential of kind {hello.credential_kind!r}")

    @staticmethod
    def accept() -> bytes:
        return _encode(_Answer(True, "", ""))

    @staticmethod
    def refuse(refusal: Refused) -> bytes:
        return _encode(_Answer(False, refusal.kind[:32], refusal.reason[:MAX_REASON_CHARS]))


class AnswerReader:
    """Reader of a further Answer after a handshake, such as a carrier's when a circuit is ready."""

    def __init__(self) -> None:
        self._reader = _Reader()

    def receive(self, data: bytes | memoryview) -> bool:
        """Handle received bytes; True once the Answer is complete and accepts, False before. Raises Refused
        if it refuses or cannot be read."""
        message = self._reader.feed(data)
        if message is None:
            return False
        answer = _decode(_Answer, message[1])
        if not answer.accepted:
            raise Refused(answer.kind, answer.reason)
        if self._reader.rest():
            raise Refused(errors.MALFORMED, "bytes after the answer, before they were asked for")
        return True


class ClientHandshake:
    """Dialling side of a handshake. Pass received bytes to `receive` and send what it returns, until
    `accepted` is True."""

    def __init__(
        self,
        identity: Identity,
        incarnation: int,
        *,
        run: str,
        server: str,
        server_certificate_key: str | None,
        lane: str,
        link_id: bytes,
        credential: Credential,
        binding: bytes,
    ) -> None:
        """identity, incarnation: of this peer. server: the dialled peer id. server_certificate_key: the one
        in the TLS certificate. lane, link_id: as in `Hello`. credential: ticket or certificate to show.
        binding: bytes that only the two ends of the TLS connection know. Raises Refused if the server's two
        ids differ, before anything is sent."""
        if server_certificate_key != server:
            who = "another peer" if server_certificate_key else "a server without a peer's key"
            raise Refused(errors.SERVER_KEY, f"{who} answers at this address")
        self._identity = identity
        self._incarnation = incarnation
        self._run = run
        self._server = server
        self._lane = lane
        self._link_id = link_id
        self._credential = credential
        self._binding = binding
        self._reader = _Reader()
        self._state = _State.AWAIT_CHALLENGE
        #: The server's incarnation, once its challenge has arrived.
        self.server_incarnation = 0

    @property
    def accepted(self) -> bool:
        return self._state is _State.DONE

    @property
    def works(self) -> bool:
        """True if the next `receive` may compute for seconds, to solve the puzzle of the door."""
        return self._state is _State.AWAIT_CHALLENGE and self._is_open and self._lane != BULK

    @property
    def _is_open(self) -> bool:
        return isinstance(self._credential, Ticket) and self._credential.grant.role == OPEN

    def receive(self, data: bytes | memoryview) -> bytes:
        """Handle received bytes; returns bytes to send, perhaps none. May block for seconds (`works`). Raises
        Refused if the server refused, or if this side refuses its message."""
        message = self._reader.feed(data)
        if message is None:
            return b""
        version, encoded = message
        if version != WIRE_VERSION:
            raise _version_refusal(version)
        reply = b""
        if self._state is _State.AWAIT_CHALLENGE:
            reply = self._answer_challenge(_decode(_Challenge, encoded))
        else:
            answer = _decode(_Answer, encoded)
            if not answer.accepted:
                raise Refused(answer.kind, answer.reason)
        self._state = _NEXT[self._state]
        return reply

    def farewell(self) -> bytes:
        """Message after a version mismatch: without a body, it tells the server this side's version."""
        return _PREFIX.pack(_MAGIC, WIRE_VERSION, 0)

    def rest(self) -> bytes:
        """Received bytes that follow the handshake, and belong to the first frames."""
        return self._reader.rest()

    def _answer_challenge(self, challenge: _Challenge) -> bytes:
        if challenge.run != self._run:
            reason = f"the other peer belongs to run {challenge.run!r}, not to {self._run!r}"
            raise Refused(errors.RUN, reason)
        self.server_incarnation = challenge.incarnation
        if isinstance(self._credential, Ticket):
            ticket, shown = self._credential, self._credential.sealed_grant
        else:
            ticket, shown = None, self._credential
        unsigned = _HelloBody(
            run=self._run,
            peer_id=self._identity.peer_id,
            incarnation=self._incarnation,
            nonce=challenge.nonce,
            lane=self._lane,
            link_id=self._link_id,
            credential_kind="certificate" if ticket is None else OPEN if self._is_open else "ticket",
            credential=shown,
            ticket_signature=b"",
            signature=b"",
        )
        statement = _statement(
            unsigned, server=self._server, server_incarnation=challenge.incarnation, binding=self._binding
        )
        return _encode(
            msgspec.structs.replace(
                unsigned,
                ticket_signature=self._proof(ticket, statement, challenge.nonce[0]),
                signature=self._identity.sign(_IDENTITY_PURPOSE, statement),
            )
        )

    def _proof(self, ticket: Ticket | None, statement: bytes, price: int) -> bytes:
        """Proof that goes with the credential: a ticket's signature of `statement`, or with an open ticket
        the answer to the puzzle, which may take seconds. b"" for a certificate (`ticket` is None), and on the
        bulk connection of an open ticket. price: bits of work that the server asks. Raises Refused if they
        are more than MOST_SOLVED."""
        if ticket is None or (self._is_open and self._lane == BULK):
            return b""
        if not self._is_open:
            return ticket.key.sign(_TICKET_PURPOSE, statement)
        if price > MOST_SOLVED:
            raise Refused(errors.WORK, f"the other peer asks for {price} bits of work: too many")
        return solve(statement, price)


def _statement(hello: _HelloBody, *, server: str, server_incarnation: int, binding: bytes) -> bytes:
    """Bytes that the dialling peer signs to prove its key: all fields of the Hello but its signatures, the
    server's id and incarnation, and `binding`, the bytes that only the two ends of this connection know."""
    return msgspec.msgpack.encode(
        (
            WIRE_VERSION,
            hello.run,
            server,
            server_incarnation,
            hello.peer_id,
            hello.incarnation,
            hello.nonce,
            hello.lane,
            hello.link_id,
            hello.credential_kind,
            hello.credential,
            binding,
        )
    )


def _version_refusal(theirs: int) -> Refused:
    return Refused(
        errors.VERSION,
        f"one peer speaks wire version {theirs}, the other {WIRE_VERSION}: "
        "install the same anabranch on both",
    )


def _encode(body: msgspec.Struct) -> bytes:
    encoded = msgspec.msgpack.encode(body)
    return _PREFIX.pack(_MAGIC, WIRE_VERSION, len(encoded)) + encoded


def _decode(kind: type[_Body], encoded: bytes) -> _Body:
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(errors.MALFORMED, f"a handshake message cannot be read: {error}") from error
