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
    """First bytes of a local connection, from the iroh process to the peer's own process. secret: shows that
    the iroh process made it. dial: number of the dial that the connection answers; 0: another peer dialled.
    peer: id of the remote peer whose stream the connection carries."""
    return json.dumps({"secret": secret, "dial": dial, "peer": peer}).encode().ljust(HEADER_BYTES)


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def parse(data: bytes) -> dict[str, Any]:
    """Decoded JSON object of a local connection's header, or of a line between a peer and its iroh process.
    Raises ValueError for anything else."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found
