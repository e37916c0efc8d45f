"""Stranger at a peer's iroh endpoint: connections with keys of its own, and streams without a handshake.

    python -m support.network.iroh_stranger PEER IP:PORT KEYS STREAMS

It prints a line "ready" once all streams are open, and "closed N" when the peer has closed connection N.
Behind those with streams comes one with a stream of one direction, and one without any.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from typing import Any

from anabranch.net.iroh.wire import ALPN


async def connection_to(peer: str, where: str) -> Any:
    from iroh import EndpointAddr, EndpointBuilder, EndpointId, RelayMode

    builder = EndpointBuilder()  # type: ignore[no-untyped-call]
    builder.apply_minimal()
    builder.secret_key(secrets.token_bytes(32))
    builder.alpns([ALPN])
    builder.relay_mode(RelayMode.disabled())
    builder.bind_addr("127.0.0.1:0")
    endpoint = await builder.bind()
    there = EndpointAddr(EndpointId.from_bytes(bytes.fromhex(peer)), None, [where])
    return endpoint, await endpoint.connect(there, ALPN)


async def main(peer: str, where: str, keys: int, streams: int) -> None:
    kept: list[Any] = []
    for number in range(keys + 2):
        kept.append(await connection_to(peer, where))
        connection = kept[-1][1]

        async def watch(connection: Any = connection, number: int = number) -> None:
            await connection.closed()
            print(f"closed {number}", flush=True)

        kept.append(asyncio.ensure_future(watch()))
        for _ in range(streams if number < keys else 0):
            kept.append(await connection.open_bi())
            await kept[-1].send().write_all(b"x")
        if number == keys:
            kept.append(await connection.open_uni())
            await kept[-1].write_all(b"x")
    print("ready", flush=True)
    await asyncio.sleep(3600.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
