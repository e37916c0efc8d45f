"""A process that connects, says one word, and waits to be killed. Run by the conformance suite."""

from __future__ import annotations

import asyncio
import sys

from anabranch.net.connection_limits import Limits
from anabranch.net.framing import Blob
from anabranch.net.tcp.transport import TcpTransport
from support.network.net_world import gate, identity


async def main(peer_id: str, port: int, certificate: bytes) -> None:
    transport = TcpTransport(identity("doomed"), 1, gate(), lambda link: None, limits=Limits())
    link = await transport.dial(peer_id, "127.0.0.1", port, certificate)
    link.start(lambda message, blob: None, lambda reason: None)
    link.send(b"alive")
    # Mid-payload is where death is hardest to tell from slowness.
    link.send(b"never finished", Blob("uint8", (200 << 20,), bytes(200 << 20)))
    await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])))
