"""What can go wrong between two peers, one class per thing a caller may want to tell apart."""

from __future__ import annotations


class NetError(Exception):
    """Base of every error of this package; the message is a sentence for a person."""


class IdentityError(NetError):
    """A key or incarnation file that cannot be used."""


class TicketError(NetError):
    """A ticket or certificate that is damaged, forged, expired or made for something else."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class FrameError(NetError):
    """The other side sent bytes that the framing does not allow. The connection is useless after it."""


class ListenError(NetError):
    """The address to listen on cannot be used."""


class PortInUseError(ListenError):
    """Another program listens on the port."""


class DialError(NetError):
    """No encrypted connection came about: nobody there, no TLS, or no answer in time."""


class Refused(NetError):
    """One side of a handshake turned the other down.

    `kind` is one of the constants below, which is what refusals are counted by.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


BUSY = "busy"
CERTIFICATE = "certificate"
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
