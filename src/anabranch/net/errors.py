"""Errors of connections between peers, one class for each case that callers treat differently."""

from __future__ import annotations


class NetError(Exception):
    """Base of every error of this package. The message is a sentence for the user."""


class IdentityError(NetError):
    """Raised for a key or incarnation file that cannot be used."""


class TicketError(NetError):
    """Raised for a ticket or certificate that is damaged, forged, expired or issued for something else.

    kind: one of the kinds of refusal at the end of this module.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class FrameError(NetError):
    """Raised for bytes that the framing or the packing of a payload does not allow, and for a wrong checksum.
    The connection cannot be used any more."""


class ListenError(NetError):
    """Raised when a peer cannot accept connections: its address cannot be used, or its TLS library, or
    iroh."""


class PortInUseError(ListenError):
    """Raised when another program listens on the port."""


class DialError(NetError):
    """Raised when a dial failed: nobody listens at the address, or no TLS server does, or the other end did
    not answer in time, or no way leads there. step: of the dial that failed, one of those at the end of this
    module; "" for a dial of several addresses."""

    def __init__(self, reason: str, step: str = "") -> None:
        super().__init__(reason)
        self.step = step


class Refused(NetError):
    """Raised when a side refused the connection in its handshake. kind: one of the constants below."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


# Kinds of refusal; a transport counts refused connections by kind.
BUSY = "busy"
CARRIER = "carrier"
CERTIFICATE = "certificate"
DEFECT = "defect"
EXPIRED = "expired"
FRAME = "frame"
INCARNATION = "incarnation"
LANE = "lane"
MALFORMED = "malformed"
NOT_AUTHORIZED = "not authorized"
OVERSIZED = "oversized"
REPLAY = "replay"
RUN = "run"
SERVER_KEY = "server key"
SIGNATURE = "signature"
TICKET = "ticket"
TIMEOUT = "timeout"
TLS = "tls"
VANISHED = "vanished"
VERSION = "version"
WORK = "work"

# Steps of a dial. Through a carrier, TCP and TLS_STEP are those with the carrier, CIRCUIT is the carrier's
# answer, and INNER_TLS the connection inside with the peer.
NAME = "name of the host"
TCP = "TCP connection"
TLS_STEP = "TLS"
CIRCUIT = "carrier's circuit"
INNER_TLS = "TLS through the carrier"
IROH = "iroh"
HANDSHAKE = "handshake"
