"""Messages between a peer and its iroh process: JSON lines on standard input and output, and the header of
each local connection."""

from __future__ import annotations

import json
from typing import Any

#: Protocol name (ALPN) of a connection between the iroh processes of two peers.
ALPN = b"anabranch/1"
#: Bytes of the header of a local connection: JSON, padded with spaces.
HEADER_BYTES = 256
#: Bytes of the secret that proves a local connection to come from the iroh process.
SECRET_BYTES = 16


def header(secret: str, dial: int, peer: str) -> bytes:
    """Header of a local connection. dial: number of the dial that it answers; 0: another peer dialled. peer:
    id of the peer at the other end."""
    return json.dumps({"secret": secret, "dial": dial, "peer": peer}).encode().ljust(HEADER_BYTES)


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def parse(data: bytes) -> dict[str, Any]:
    """Message of a header or line. Raises ValueError."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found
