"""Process that holds the iroh endpoint of one peer, and passes bytes between its streams and local sockets.

    python -m anabranch.net.iroh.engine_process

An own process, started anew: iroh's runtime does not survive a fork, and its Python calls would hold up the
peer's event loop. The first line of standard input is the configuration, later ones are dials; the process
ends with its standard input. Each stream becomes a connection to the peer's local port. The bytes are those
of TLS between the two peers, so this process and the relay read nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
from collections.abc import Coroutine
from typing import Any

from anabranch.net.iroh.wire import ALPN, header, line, parse

#: Longest time (s) of a dial: iroh itself gives up after 30 s.
DIAL_S = 10.0
#: Bytes that are read and written at once.
_PIECE_BYTES = 256 << 10
#: Receive window (bytes) of a connection: 8 MiB hold 100 Mbit/s at 0.6 s.
_WINDOW_BYTES = 8 << 20
#: Seconds between looks at the paths of a new connection, which begins at the relay and may move.
_LOOK_S = 0.5
#: Releases of iroh whose Python wheel writes buffers byte by byte (its issue 229).
_SLOW_RELEASES = ("1.0.", "1.1.", "1.2.")


def quicken() -> str:
    """Let iroh's wheel copy buffers as a whole, where it copies byte by byte; returns the outcome.

    Only releases known to need it are changed, and only if a trial gives the same bytes.
    """
    from importlib.metadata import version

    from iroh import iroh_ffi

    release = version("iroh")
    if not release.startswith(_SLOW_RELEASES):
        return f"iroh {release}: as it is"
    builder: Any = iroh_ffi._UniffiRustBufferBuilder
    slow = builder.write

    def write(self: Any, value: bytes) -> None:
        with self._reserve(len(value)):
            to = ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len
            ctypes.memmove(to, bytes(value), len(value))

    def written() -> bytes:
        made = builder()
        for piece in (b"x", bytes(range(256)) * 40, b"", b"end"):
            made.write(piece)
        content = bytes(made.rbuf.data[: made.rbuf.len])
        made.discard()
        return content

    expected = written()
    builder.write = write
    if written() != expected:
        builder.write = slow
        return f"iroh {release}: its buffers could not be made quick"
    return f"iroh {release}: buffers are copied as a whole"


class EngineProcess:
    """iroh endpoint of one peer, which connects each of its streams to the peer's local TCP port `port`.
    secret: shown at the beginning of each such connection, to prove where it comes from."""

    def __init__(self, endpoint: Any, port: int, secret: str) -> None:
        self._endpoint, self._port, self._secret = endpoint, port, secret
        self._connections: dict[str, Any] = {}
        self._dialling: dict[tuple[str, ...], asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, commands: asyncio.StreamReader) -> None:
        """Serve dials, and connections of others, until standard input ends."""
        self._spawn(self._accept())
        while data := await commands.readline():
            self._spawn(self._serve_dial(parse(data)))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while (incoming := await self._endpoint.accept_next()) is not None:
            self._spawn(self._welcome(incoming))

    async def _welcome(self, incoming: Any) -> None:
        with contextlib.suppress(Exception):  # a stranger's broken handshake, of whatever kind
            accepting = await incoming.accept()
            connection = await asyncio.wait_for(accepting.connect(), DIAL_S)
            await self._streams(connection.remote_id().to_bytes().hex(), connection)

    async def _streams(self, peer: str, connection: Any) -> None:
        """Pass on the streams that the other side opens, each over a new local connection, until the
        connection ends."""
        connection.set_receive_window(_WINDOW_BYTES)
        self._spawn(self._watch(peer, connection))
        while True:
            stream = await connection.accept_bi()
            self._spawn(self._pass(stream, 0, peer))

    async def _watch(self, peer: str, connection: Any) -> None:
        """Tell the peer's process the path of a connection, at the start and at each change; forget the
        connection when it ends."""
        ended = asyncio.ensure_future(connection.closed())
        told = ""
        while not ended.done():
            selected = [path for path in connection.paths() if path.is_selected]
            found = ("relay" if selected[0].is_relay else selected[0].remote_addr) if selected else told
            if found != told:
                told = found
                say({"path": found, "peer": peer})
            await asyncio.wait((ended,), timeout=_LOOK_S)
        if self._connections.get(peer) is connection:
            del self._connections[peer]

    async def _serve_dial(self, command: dict[str, Any]) -> None:
        dial, peer = command["dial"], command["peer"]
        try:
            stream = await asyncio.wait_for(self._open(peer, command), DIAL_S)
        except asyncio.TimeoutError:
            say({"dial": dial, "failed": f"no answer within {DIAL_S:.0f} s"})
        except Exception as error:
            message = error.message() if hasattr(error, "message") else str(error)
            say({"dial": dial, "failed": message[:300]})
        else:
            await self._pass(stream, dial, peer)

    async def _open(self, peer: str, command: dict[str, Any]) -> Any:
        """New stream to a peer, over the connection to it. If there is none, it is made by the relay and
        addresses in `command`."""
        known = self._connections.get(peer)
        if known is not None and known.close_reason() is None:
            return await known.open_bi()
        key = (peer, command["relay"], *command["addresses"])
        task = self._dialling.get(key)
        if task is None:
            task = self._dialling[key] = asyncio.ensure_future(self._connect(peer, command))
            task.add_done_callback(lambda _: self._dialling.pop(key, None))
        connection = await asyncio.shield(task)
        return await connection.open_bi()

    async def _connect(self, peer: str, command: dict[str, Any]) -> Any:
        from iroh import EndpointAddr, EndpointId

        where = EndpointAddr(
            EndpointId.from_bytes(bytes.fromhex(peer)), command["relay"] or None, command["addresses"]
        )
        connection = await asyncio.wait_for(self._endpoint.connect(where, ALPN), DIAL_S)
        self._connections[peer] = connection
        self._spawn(self._quietly(self._streams(peer, connection)))
        return connection

    @staticmethod
    async def _quietly(work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(Exception):
            await work

    async def _pass(self, stream: Any, dial: int, peer: str) -> None:
        """Pass bytes on between a stream and a new connection to the peer's local port, until either ends.
        dial, peer: as in `wire.header`."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return
        writer.write(header(self._secret, dial, peer))
        send, receive = stream.send(), stream.recv()

        async def outwards() -> None:
            while data := await reader.read(_PIECE_BYTES):
                await send.write_all(data)
            await send.finish()

        async def inwards() -> None:
            while data := await receive.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

        tasks = [asyncio.ensure_future(each) for each in (outwards(), inwards())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        broken = any(task.exception() for task in done)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if broken:
            with contextlib.suppress(Exception):
                await send.reset(1)
            writer.transport.abort()
        else:
            writer.close()


def say(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(line(message))
    sys.stdout.buffer.flush()


async def run() -> None:
    from iroh import EndpointBuilder, RelayMode

    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    config = parse(await loop.run_in_executor(None, sys.stdin.buffer.readline))

    def read() -> None:
        while data := sys.stdin.buffer.readline():
            loop.call_soon_threadsafe(commands.feed_data, data)
        loop.call_soon_threadsafe(commands.feed_eof)

    outcome = quicken()
    relays = config["relays"]
    builder = EndpointBuilder()  # type: ignore[no-untyped-call]
    builder.apply_minimal()
    builder.secret_key(bytes.fromhex(config["key"]))
    builder.alpns([ALPN])
    builder.relay_mode(RelayMode.custom_from_urls(relays) if relays else RelayMode.disabled())
    for address in config["bind"]:  # iroh has one socket of each IP version
        builder.bind_addr(address)
    endpoint = await builder.bind()
    for address in config["external"]:
        await endpoint.add_external_addr(address)
    say({"ready": endpoint.bound_sockets(), "iroh": outcome})
    loop.run_in_executor(None, read)
    try:
        await EngineProcess(endpoint, config["port"], config["secret"]).serve(commands)
    finally:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(endpoint.close(), 2.0)


if __name__ == "__main__":
    asyncio.run(run())
