"""Ends of a circuit: the connection of two peers inside their connections to a carrier.

Each end keeps its TLS connection to the carrier and runs a second one, with the other peer, inside it. On
that one the handshake, the frames and all checks are the same as without a carrier.
"""

from __future__ import annotations

import asyncio
import ssl
import sys

from anabranch.net.errors import DialError
from anabranch.net.lane import Lane


async def upgrade(outer: Lane, context: ssl.SSLContext, *, server_side: bool, timeout_s: float) -> Lane:
    """Run TLS inside an established connection; returns the inner connection. `outer` is used up. Nothing
    is awaited before the inner connection gets the bytes that come. Raises DialError, OSError."""
    loop, below = asyncio.get_running_loop(), outer.transport
    if type(below).__module__ == "asyncio.sslproto":
        # asyncio's TLS transport fails on an error of a TLS layer above it (TypeError in _abort, until
        # Python 3.11.8 and 3.12.2): a carrier that damages bytes could end this process with it.
        below._force_close = lambda error: below.abort()  # type: ignore[attr-defined]
    if sys.version_info < (3, 11) and "uvloop" not in type(loop).__module__:
        raise DialError("circuits need Python 3.11 or uvloop: install either (pip install uvloop)")
    inner = Lane()
    transport = await loop.start_tls(
        below, inner, context, server_side=server_side, ssl_handshake_timeout=timeout_s
    )
    if transport is None:
        raise ConnectionError("the connection ended during the handshake")
    inner.use(transport)
    return inner
