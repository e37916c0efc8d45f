"""A small iroh relay for tests: it speaks the relay protocol of iroh 1.x over WebSocket, without TLS.

    python -m support.network.iroh_relay HOST PORT

Only for tests: it believes each client's key unproved. Real runs use iroh's own relay server.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import sys

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CHALLENGE, AUTH, CONFIRMED = 0, 1, 2
TO_RELAY, TO_RELAY_BATCH, TO_CLIENT, TO_CLIENT_BATCH = 4, 5, 6, 7
PING, PONG = 9, 10


class Client:
    """WebSocket of one endpoint."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> bytes:
        """Next binary message."""
        while True:
            first, second = await self._reader.readexactly(2)
            size = second & 127
            if size == 126:
                size = int.from_bytes(await self._reader.readexactly(2), "big")
            elif size == 127:
                size = int.from_bytes(await self._reader.readexactly(8), "big")
            mask = await self._reader.readexactly(4)
            data = await self._reader.readexactly(size)
            pad = (mask * (size // 4 + 1))[:size]
            data = (int.from_bytes(data, "big") ^ int.from_bytes(pad, "big")).to_bytes(size, "big")
            if first & 15 == 8:
                raise ConnectionError("closed")
            if first & 15 == 9:
                self._send(10, data)
            elif first & 15 == 2:
                return data

    def send(self, data: bytes) -> None:
        self._send(2, data)

    def _send(self, kind: int, data: bytes) -> None:
        size = len(data)
        if size < 126:
            head = bytes((128 | kind, size))
        elif size < 1 << 16:
            head = bytes((128 | kind, 126)) + size.to_bytes(2, "big")
        else:
            head = bytes((128 | kind, 127)) + size.to_bytes(8, "big")
        if self._writer.transport.get_write_buffer_size() < 1 << 20:  # datagrams may be lost
            self._writer.write(head + data)


class Relay:
    """Clients by key. forwarded: bytes of datagrams that were passed on."""

    def __init__(self) -> None:
        self.clients: dict[bytes, Client] = {}
        self.forwarded = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, ValueError):
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (each.partition(":") for each in request[1:])}
        if "sec-websocket-key" not in headers:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return
        proof = hashlib.sha1(headers["sec-websocket-key"].encode() + _GUID).digest()
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: " + base64.b64encode(proof) + b"\r\n"
            b"Sec-WebSocket-Protocol: iroh-relay-v1\r\n\r\n"
        )
        client = Client(reader, writer)
        client.send(bytes((CHALLENGE,)) + secrets.token_bytes(16))
        auth = await client.receive()
        body = auth[1:] if len(auth) == 98 else auth[2:]  # a key without, or with, its length
        key = body[:32]
        client.send(bytes((CONFIRMED,)))
        self.clients[key] = client
        try:
            await self._forward(key, client)
        finally:
            if self.clients.get(key) is client:
                del self.clients[key]

    async def _forward(self, key: bytes, client: Client) -> None:
        while True:
            frame = await client.receive()
            if frame[0] == PING:
                client.send(bytes((PONG,)) + frame[1:])
            elif frame[0] in (TO_RELAY, TO_RELAY_BATCH):
                other = self.clients.get(frame[1:33])
                if other is not None:
                    self.forwarded += len(frame)
                    other.send(bytes((frame[0] + 2,)) + key + frame[33:])


async def main(host: str, port: int) -> None:
    relay = Relay()
    server = await asyncio.start_server(relay.serve, host, port)
    print("ready", flush=True)
    async with server:
        forwarded = -1
        while True:
            await asyncio.sleep(1.0)
            if relay.forwarded != forwarded:
                forwarded = relay.forwarded
                print(f"{len(relay.clients)} clients; {forwarded} bytes forwarded", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
