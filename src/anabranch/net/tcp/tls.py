"""TLS 1.3 of a transport: contexts, the key that the other side proved, channel binding. No sockets here."""

from __future__ import annotations

import ssl
import sys
from typing import Any

from anabranch.net import errors
from anabranch.net.connection_limits import Limits
from anabranch.net.errors import ListenError, Refused
from anabranch.net.identity import Identity, peer_id_of_certificate
from anabranch.net.lane import Lane
from anabranch.net.tls_overhead import CountingContext


def server_context(identity: Identity) -> ssl.SSLContext:
    """Context of the accepting side, with the key of `identity`. Raises ListenError where the TLS library
    lacks channel bindings."""
    if "tls-unique" not in ssl.CHANNEL_BINDING_TYPES:
        raise ListenError(
            "this Python's TLS library has no channel bindings (tls-unique): use another build of Python"
        )
    context = CountingContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No TLS session tickets: a resumed session does not show the certificate.
    context.num_tickets = 0
    identity.load_into(context)
    return context


def client_context() -> ssl.SSLContext:
    """Context of the dialling side. It checks no certificate: the handshake compares the key in it."""
    context = CountingContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # There is no certificate authority. The key in the certificate is compared with the dialled one instead;
    # TLS proves that the server holds it.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def tls_timeouts(limits: Limits) -> dict[str, Any]:
    """Keyword arguments of asyncio for the timeouts of TLS, from `limits` (that of the handshake a second
    longer, as the caller's own has to end it); on Python before 3.11 without the one of its shutdown."""
    # The timeout around the whole handshake ends it; this one must not be shorter.
    timeouts = {"ssl_handshake_timeout": limits.handshake_timeout_s + 1}
    if sys.version_info >= (3, 11):
        timeouts["ssl_shutdown_timeout"] = limits.shutdown_timeout_s
    return timeouts


def proved_key(lane: Lane) -> str | None:
    """Id of the peer whose key the accepting side of a connection proved; None if it showed none, or one of
    another type than Ed25519."""
    return peer_id_of_certificate(_ssl_object(lane).getpeercert(True))


def channel_binding(lane: Lane) -> bytes:
    """Bytes that only the two ends of this TLS connection know (the client's Finished message). In TLS 1.3
    they are a MAC over the whole handshake, keys included. Raises Refused if there are none."""
    binding = _ssl_object(lane).get_channel_binding("tls-unique")
    if not binding:
        raise Refused(errors.TLS, "the TLS connection has no channel binding")
    return binding


def _ssl_object(lane: Lane) -> ssl.SSLObject:
    found = lane.transport.get_extra_info("ssl_object")
    assert isinstance(found, ssl.SSLObject)
    return found
