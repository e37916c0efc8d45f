"""Credentials: tickets, with which strangers join a run, and certificates, which members show each other.

A ticket is one line of text that a run's owner gives away. It holds a private key of its own, whose public
half the owner signed together with its permissions (the *grant*). In the handshake the joining peer shows the
grant and signs the server's challenge with the ticket's key. The key itself is never sent, so an eavesdropper
cannot use the ticket.

An *open* ticket is no secret: it may stand on a web page, and whoever reads it may come, for the work that
the run's door asks (`net.door`)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec
from blake3 import blake3

from anabranch.addresses import IROH_KINDS, MOST_ADDRESSES, Address
from anabranch.net.errors import CERTIFICATE, EXPIRED, MALFORMED, TICKET, TicketError
from anabranch.net.identity import SIGNATURE_BYTES, Identity, verify

TICKET_PREFIX = "anabranch1:"
MAX_TICKET_PEERS = 16
MAX_CREDENTIAL_BYTES = 2048
#: Roles of the tickets that a run has from its start.
ROLES = ("relay", "data", "watch")
#: Role of walk-ins, who solve a puzzle instead of keeping a secret.
OPEN = "open"
#: Role of auditors, whose findings the owner trusts.
AUDITOR = "auditor"

_MAX_TICKET_CHARS = 8192
_CHECK_BYTES = 8
_GRANT = b"anabranch ticket grant"
_TICKET = b"anabranch ticket"
_CERTIFICATE = b"anabranch membership certificate"

PeerIdText = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
RunId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_Role = Annotated[str, msgspec.Meta(pattern="^(relay|data|watch|open|auditor)$")]
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Quota = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class PeerAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Address at which the peer `peer_id` can be dialled. via: id of the carrier that listens at host:port,
    or kind of an address through iroh (`addresses`); "": the peer listens there."""

    peer_id: PeerIdText
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    via: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64}|iroh|iroh\+http|udp)?$")] = ""


def _address(peer: PeerAddress) -> Address:
    is_kind = peer.via in IROH_KINDS
    return Address(peer.host, peer.port, "" if is_kind else peer.via, peer.via if is_kind else "")


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Permissions of a ticket, as the owner of `run` signed them. role: "relay", "data", "watch", "open" (for
    walk-ins, who prove work) or "auditor". expires_at_s: Unix time. quota: number of peers that may be
    members with the ticket at one time (0: any number). ticket_key: public key of the ticket."""

    run: RunId
    owner: PeerIdText
    role: _Role
    expires_at_s: _Seconds
    quota: _Quota
    ticket_key: PeerIdText


class MembershipCertificate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Statement by `issuer` that `peer_id` is a member of `run` in a role until `expires_at_s` (Unix time).
    role: that of the ticket ("relay", "data", ...). ticket: key of the ticket with which the peer came ("":
    the owner's own peer). quota: as in the ticket's grant."""

    run: RunId
    peer_id: PeerIdText
    role: _Role
    expires_at_s: _Seconds
    issuer: PeerIdText
    ticket: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")] = ""
    quota: _Quota = 0


class _TicketBody(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    grant: Annotated[bytes, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)]
    peers: Annotated[tuple[PeerAddress, ...], msgspec.Meta(max_length=MAX_TICKET_PEERS)]
    seed: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


@dataclass(frozen=True)
class Ticket:
    """A parsed ticket, whose `text` (the line that the owner gave away) and `key` are secrets. grant: its
    permissions. sealed_grant: these with the owner's signature, as shown in the handshake. key: the ticket's
    own key. peers: addresses to dial."""

    grant: Grant
    sealed_grant: bytes
    key: Identity
    peers: tuple[PeerAddress, ...]
    text: str

    def __repr__(self) -> str:
        # The text is a secret, which must not reach a log in a traceback.
        return f"Ticket({self.grant!r})"

    @property
    def first_peer(self) -> PeerAddress:
        """Address of the peer to dial first. Raises TicketError if the ticket names none."""
        if not self.peers:
            raise TicketError(MALFORMED, "the ticket names no peer to dial; ask for a new one")
        return self.peers[0]

    @property
    def first_addresses(self) -> str:
        """Addresses of the peer to dial first, in order of preference, as text (`anabranch.addresses`).
        Raises TicketError if the ticket names no peer."""
        found = self.addresses_of_peers[self.first_peer.peer_id]
        return ",".join(map(str, found[:MOST_ADDRESSES]))

    @property
    def addresses_of_peers(self) -> dict[str, list[Address]]:
        """Addresses of each peer that the ticket names, in order of preference."""
        found: dict[str, list[Address]] = {}
        for each in self.peers:
            found.setdefault(each.peer_id, []).append(_address(each))
        return found


def issue_ticket(
    owner: Identity, *, run: str, role: str, expires_at_s: int, quota: int = 0, peers: Sequence[PeerAddress]
) -> Ticket:
    """Issue a ticket for `run`, signed by its owner. Each call makes a new key, whose private half is in the
    ticket: it is a secret, unless the role is "open". role: as in `Grant`. expires_at_s: Unix time; a past
    one is not refused. quota: most peers that may be members with it at one time; 0: any number. peers: those
    that its holder dials first. Raises TicketError for a value out of its range, such as an unknown role."""
    key = Identity.generate()
    grant = Grant(run, owner.peer_id, role, expires_at_s, quota, key.peer_id)
    sealed_grant = _seal(owner, _GRANT, grant)
    body = _TicketBody(sealed_grant, tuple(peers), key.seed())
    sealed = _seal(owner, _TICKET, body)
    check = blake3(sealed).digest(length=_CHECK_BYTES)
    text = TICKET_PREFIX + base64.urlsafe_b64encode(check + sealed).decode().rstrip("=")
    return parse_ticket(text, now_s=0)


def parse_ticket(text: str, *, now_s: float) -> Ticket:
    """Parse and verify a ticket's text, in which mail may have put line breaks, spaces and quotation marks.

    now_s: Unix time. Raises TicketError with the reason if the text is damaged, forged or expired.
    """
    text = re.sub(r"[\s>\u200b\ufeff\"'`]+", "", text)  # no ticket has any of these characters
    sealed = _dearmored(text)
    body = _decode(_TicketBody, sealed, "the ticket")
    grant = _decode(Grant, body.grant, "the ticket's grant")
    if not verify(grant.owner, _TICKET, sealed[SIGNATURE_BYTES:], sealed[:SIGNATURE_BYTES]):
        raise TicketError(TICKET, "the ticket is forged: its owner did not sign it")
    check_grant(body.grant, run=grant.run, owner=grant.owner, now_s=now_s)
    key = Identity.from_seed(body.seed)
    if key.peer_id != grant.ticket_key:
        raise TicketError(TICKET, "the ticket is forged: its key is not the one that its owner signed")
    return Ticket(grant, body.grant, key, body.peers, text)


def check_grant(sealed: bytes, *, run: str, owner: str, now_s: float) -> Grant:
    """Verify a ticket's permissions (`sealed`: with the owner's signature) that were shown to a peer of
    `run`, whose owner is `owner`; returns them. now_s: Unix time. Raises TicketError if they are of another
    run or owner, forged or expired."""
    grant = _decode(Grant, sealed, "the ticket's grant")
    if grant.run != run:
        raise TicketError(TICKET, f"the ticket is for run {grant.run!r}, not for {run!r}")
    if grant.owner != owner:
        raise TicketError(TICKET, "the ticket was not issued by this run's owner")
    if not verify(owner, _GRANT, sealed[SIGNATURE_BYTES:], sealed[:SIGNATURE_BYTES]):
        raise TicketError(TICKET, "the ticket is forged: its owner did not sign the grant")
    if now_s >= grant.expires_at_s:
        ago = _duration(now_s - grant.expires_at_s)
        raise TicketError(EXPIRED, f"the ticket expired {ago} ago: ask for a new one")
    return grant


def issue_certificate(
    issuer: Identity,
    *,
    run: str,
    peer_id: str,
    role: str,
    expires_at_s: int,
    ticket: str = "",
    quota: int = 0,
) -> bytes:
    """Make a membership certificate (sealed bytes) for `peer_id`, signed by `issuer`; peers accept only those
    of the run's owner. The other arguments are fields of `MembershipCertificate`. Raises TicketError for a
    value out of its range."""
    certificate = MembershipCertificate(run, peer_id, role, expires_at_s, issuer.peer_id, ticket, quota)
    sealed = _seal(issuer, _CERTIFICATE, certificate)
    _decode(MembershipCertificate, sealed, "the certificate")
    return sealed


def check_certificate(sealed: bytes, *, run: str, now_s: float) -> MembershipCertificate:
    """Verify a certificate (`sealed`: with its issuer's signature) for `run`; returns its content. now_s:
    Unix time. Raises TicketError if it is of another run, forged or expired. The caller checks that the
    issuer may issue certificates, and that the holder presents it."""
    certificate = _decode(MembershipCertificate, sealed, "the certificate")
    if certificate.run != run:
        raise TicketError(CERTIFICATE, f"the certificate is for run {certificate.run!r}, not for {run!r}")
    if not verify(certificate.issuer, _CERTIFICATE, sealed[SIGNATURE_BYTES:], sealed[:SIGNATURE_BYTES]):
        raise TicketError(CERTIFICATE, "the certificate is forged: its issuer did not sign it")
    if now_s >= certificate.expires_at_s:
        ago = _duration(now_s - certificate.expires_at_s)
        raise TicketError(EXPIRED, f"the certificate expired {ago} ago")
    return certificate


def _seal(signer: Identity, purpose: bytes, body: msgspec.Struct) -> bytes:
    """Sign `body` as `signer`, for one purpose: returns the signature (64 bytes) and the signed msgpack
    bytes, joined."""
    encoded = msgspec.msgpack.encode(body)
    return signer.sign(purpose, encoded) + encoded


def _decode(kind: type[_Struct], sealed: bytes, name: str) -> _Struct:
    try:
        return msgspec.msgpack.decode(sealed[SIGNATURE_BYTES:], type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TicketError(MALFORMED, f"{name} cannot be read: {error}") from error


def _dearmored(text: str) -> bytes:
    if not text.startswith(TICKET_PREFIX):
        if text.startswith("anabranch"):
            raise TicketError(
                MALFORMED,
                "this ticket was made by another version of anabranch: install the run's version",
            )
        raise TicketError(MALFORMED, f"this is not a ticket: a ticket begins with {TICKET_PREFIX}")
    if len(text) > _MAX_TICKET_CHARS:
        raise TicketError(MALFORMED, "this is not a ticket: it is far too long")
    encoded = text[len(TICKET_PREFIX) :]
    try:
        raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise TicketError(MALFORMED, "the ticket is damaged: copy the whole line again") from error
    check, sealed = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
    if blake3(sealed).digest(length=_CHECK_BYTES) != check:
        raise TicketError(MALFORMED, "the ticket is damaged: copy the whole line again")
    return sealed


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} seconds"
