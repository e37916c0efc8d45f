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
#: Bytes that are read and written at once. iroh takes as much memory for each read that waits, so the first
#: ones of a stream, in its handshake, are shorter.
_PIECE_BYTES, _FIRST_BYTES = 256 << 10, 4 << 10
#: Receive window (bytes) of a connection: 8 MiB hold 100 Mbit/s at 0.6 s.
_WINDOW_BYTES = 8 << 20
#: Streams of one connection that are passed on at once. Each takes a descriptor here and in the peer's own
#: process, which allows one peer no more connections (`net.resource_manager.PEER_CONNECTIONS`).
STREAMS_OF_CONNECTION = 16
#: Connections that other peers made, at once. Keys are free: with more, the one without a stream for longest
#: gives way. A choice: more than any peer has neighbours.
INCOMING_MOST = 1024
#: Seconds without a stream after which a connection that another peer made is closed. A choice: links have
#: streams as long as they last.
IDLE_S = 10.0
#: Seconds in which the far end must end a stream that the peer's own process has closed.
REST_S = 5.0
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


class _Usage:
    """Use of a connection. streams: of the far end that are passed on. idle_at: time (s, of the loop) since
    which it has none. connection: None until its handshake is over."""

    def __init__(self) -> None:
        self.connection: Any = None
        self.streams = 0
        self.idle_at = asyncio.get_running_loop().time()


class EngineProcess:
    """iroh endpoint of one peer, which connects each of its streams to the peer's local TCP port `port`.
    secret: shown at the beginning of each such connection, to prove where it comes from."""

    def __init__(self, endpoint: Any, port: int, secret: str) -> None:
        self._endpoint, self._port, self._secret = endpoint, port, secret
        #: Connections that other peers made.
        self._incoming: set[_Usage] = set()
        self._connections: dict[str, Any] = {}
        self._dialling: dict[tuple[str, ...], asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, commands: asyncio.StreamReader) -> None:
        """Serve the dials that come as lines of standard input (`commands`), and the connections of other
        peers, until standard input ends."""
        self._spawn(self._accept())
        self._spawn(self._close_idle())
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
        usage = _Usage()
        with contextlib.suppress(Exception):  # a stranger's broken handshake, of whatever kind
            if len(self._incoming) >= INCOMING_MOST and not self._make_room():
                await incoming.refuse()
                return
            self._incoming.add(usage)
            try:
                accepting = await incoming.accept()
                usage.connection = await asyncio.wait_for(accepting.connect(), DIAL_S)
                await self._streams(usage.connection.remote_id().to_bytes().hex(), usage)
            finally:
                self._incoming.discard(usage)

    def _make_room(self) -> bool:
        """Close the incoming connection that has had no stream for longest; False if all have streams, or are
        in their handshakes."""
        idle = [each for each in self._incoming if each.connection is not None and not each.streams]
        oldest = min(idle, key=lambda each: each.idle_at, default=None)
        if oldest is None:
            return False
        self._incoming.discard(oldest)
        oldest.connection.close(0, b"idle")
        return True

    async def _close_idle(self) -> None:
        """Close incoming connections that have had no stream for IDLE_S, until cancelled."""
        while True:
            await asyncio.sleep(IDLE_S / 4)
            before = asyncio.get_running_loop().time() - IDLE_S
            for each in list(self._incoming):
                if each.connection is not None and not each.streams and each.idle_at < before:
                    self._incoming.discard(each)
                    each.connection.close(0, b"idle")

    async def _streams(self, peer: str, usage: _Usage) -> None:
        """Pass on the streams that the other side of a connection opens, each over a new local connection,
        until the connection ends, and count them in `usage`. Streams beyond STREAMS_OF_CONNECTION are
        reset."""
        connection = usage.connection
        connection.set_receive_window(_WINDOW_BYTES)
        self._spawn(self._watch(peer, connection))
        self._spawn(self._quietly(self._refuse_others(connection)))
        while True:
            stream = await connection.accept_bi()
            if usage.streams < STREAMS_OF_CONNECTION:
                self._spawn(self._serve_stream(stream, peer, usage))
            else:
                self._spawn(self._quietly(_reset(stream)))

    async def _serve_stream(self, stream: Any, peer: str, usage: _Usage) -> None:
        usage.streams += 1
        try:
            await self._pass(stream, 0, peer)
        finally:
            usage.streams -= 1
            usage.idle_at = asyncio.get_running_loop().time()

    @staticmethod
    async def _refuse_others(connection: Any) -> None:
        """Close a connection whose far end opens a stream of one direction, which no peer does: nobody would
        read it, and it would fill the receive window."""
        await connection.accept_uni()
        connection.close(1, b"a stream of one direction")

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
        """New stream to a peer, over the connection to it. If there is none, one is made, through the relay
        or to the addresses that `command` names, within DIAL_S; dials of the same peer, relay and addresses
        at one time share it."""
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
        usage = _Usage()
        usage.connection = connection
        self._spawn(self._quietly(self._streams(peer, usage)))
        return connection

    @staticmethod
    async def _quietly(work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(Exception):
            await work

    async def _pass(self, stream: Any, dial: int, peer: str) -> None:
        """Pass bytes on between a stream and a new connection to the peer's local port, until either ends.
        dial, peer: as in `wire.header`. When the peer's process has closed the connection, the far end has
        REST_S to end the stream."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            await self._quietly(_reset(stream))
            return
        writer.write(header(self._secret, dial, peer))
        send, receive = stream.send(), stream.recv()

        async def outwards() -> None:
            while data := await reader.read(_PIECE_BYTES):
                await send.write_all(data)
            await send.finish()

        async def inwards() -> None:
            size_bytes = _FIRST_BYTES
            while data := await receive.read(size_bytes):
                size_bytes = min(_PIECE_BYTES, 2 * size_bytes)
                writer.write(data)
                await writer.drain()
            writer.write_eof()

        out, into = (asyncio.ensure_future(each) for each in (outwards(), inwards()))
        await asyncio.wait((out, into), return_when=asyncio.FIRST_COMPLETED)
        if into.done() and not into.exception():
            await asyncio.wait((out,))
        broken = not out.done() or out.exception() is not None
        for task in (out, into):
            task.cancel()
        await asyncio.gather(out, into, return_exceptions=True)
        if broken:
            with contextlib.suppress(Exception):
                await send.reset(1)
            writer.transport.abort()
        else:
            writer.close()
            if not into.done() or into.cancelled():
                self._spawn(self._quietly(_rest(receive)))


async def _reset(stream: Any) -> None:
    """Refuse a stream that the far end opened: reset both of its directions."""
    await stream.send().reset(1)
    await stream.recv().stop(1)


async def _rest(receive: Any) -> None:
    """Read what still comes of a stream that nobody wants any more, until it ends, REST_S at most: the far
    end would take a stop for an error, and lose the last bytes that were sent to it."""
    try:
        await asyncio.wait_for(_drained(receive), REST_S)
    except asyncio.TimeoutError:
        await receive.stop(1)


async def _drained(receive: Any) -> None:
    while await receive.read(_FIRST_BYTES):
        pass


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
