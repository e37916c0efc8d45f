"""Link test between two machines: round trip, clock offset, bandwidth, observed address, and dialling back.

One machine answers (`anabranch doctor --answer`), the other asks. Each question is a connection: one line
with the code and the question, then the data of the test, if it has any, and, but for the bandwidth
downwards, one line of JSON. Bytes and seconds are bounded, and without the code nothing is answered."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anabranch.addresses import plain_host

#: Most bytes and seconds of a bandwidth test, and bytes of one block of it.
MAX_BYTES, MAX_S, BLOCK_BYTES = 16 << 20, 2.0, 1 << 16
#: Seconds to wait for an answer, and for a connection that is dialled back.
TIMEOUT_S, DIAL_BACK_S = 10.0, 3.0
#: Longest question in bytes, and most questions that are answered at once.
LINE_BYTES, MAX_QUESTIONS = 256, 8
_NO_ANSWER = "it does not answer: the code is wrong, or it is busy with other machines"


class LinkTestError(Exception):
    """Raised when a link test failed; the message is a sentence for the user."""


def listening(host: str, port: int) -> socket.socket:
    """Socket that listens at host:port (0: any free port); at :: also over IPv4. Raises OSError if that
    address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, dualstack_ipv6=both)


class LinkTestServer:
    """Answers link tests of machines that know `code`, at most MAX_QUESTIONS at a time; the connections of
    others are closed without an answer."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._answers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen for link tests at host:port (0: any free port); returns the port. Raises OSError as
        `listening` does."""
        found = listening(host, port)
        self._server = await asyncio.start_server(self._accept, sock=found, limit=BLOCK_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop answering link tests, and break off those in progress."""
        if self._server is None:
            return
        self._server.close()
        for task in self._answers:
            task.cancel()
        await asyncio.gather(*self._answers)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answers.add(task)
        try:
            if len(self._answers) <= MAX_QUESTIONS:
                await asyncio.wait_for(self._answer(reader, writer), TIMEOUT_S)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), TIMEOUT_S)
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            pass  # the other machine went away, sent no valid question, or does not read the answer
        except asyncio.CancelledError:
            pass  # cancelled by `close`, which waits for this task
        finally:
            self._answers.discard(task)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        words = line[:LINE_BYTES].decode("ascii").split()
        if len(words) < 2 or not hmac.compare_digest(words[0], self._code):
            return
        host, port = writer.get_extra_info("peername")[:2]
        host = plain_host(host)
        answer: dict[str, Any] = {}
        match words[1:]:
            case ["hello"]:
                answer = {"time": time.time(), "host": host, "port": port}
            case ["up"]:
                answer = await self._receive_blocks(reader)
            case ["down"]:
                await self._send_blocks(writer)
                return
            case ["dial", back] if back.isdecimal() and 0 < int(back[:6]) < 65536:
                answer = {"reached": await self._reaches(host, int(back))}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()

    async def _receive_blocks(self, reader: asyncio.StreamReader) -> dict[str, float]:
        began, count = time.monotonic(), 0
        while count < MAX_BYTES and (block := await reader.read(BLOCK_BYTES)):
            count += len(block)
        return {"bytes": count, "seconds": time.monotonic() - began}

    async def _send_blocks(self, writer: asyncio.StreamWriter) -> None:
        began, block = time.monotonic(), bytes(BLOCK_BYTES)
        for _ in range(MAX_BYTES // BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
            if time.monotonic() - began > MAX_S:
                return

    async def _reaches(self, host: str, port: int) -> bool:
        """True if this machine can connect to a port of the machine that asks."""
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), DIAL_BACK_S)
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True


@dataclass(frozen=True)
class Greeting:
    """Answer to "hello": round trip (s), offset of the other machine's clock (s; positive: ahead of this
    one), and this machine's address and port as the other machine sees them."""

    trip_s: float
    clock_s: float
    host: str
    port: int


@dataclass(frozen=True)
class LinkTestClient:
    """Link tests with another machine, which answers them (`LinkTestServer`) at host:port to whoever knows
    its `code`. Each raises LinkTestError if the machine cannot be reached, does not answer, or answers
    something else."""

    host: str
    port: int
    code: str

    @classmethod
    def parse(cls, text: str) -> LinkTestClient:
        """Client for HOST:PORT/CODE. Raises ValueError for another text or an invalid port."""
        found = re.fullmatch(r"\[?([^\]/]+)\]?:(\d+)/([0-9A-Za-z]+)", text)
        if found is None:
            raise ValueError(f"{text!r} is not HOST:PORT/CODE, as `anabranch doctor --answer` prints it")
        if not 0 < int(found[2]) < 65536:
            raise ValueError(f"port {found[2]} is not in 1..65535")
        return cls(found[1], int(found[2]), found[3])

    def hello(self, own_port: int = 0) -> Greeting:
        """Measure round trip and clock offset, from port `own_port` (0: any)."""
        with self._connected("hello", own_port) as connection:
            sent = time.time()
            begun = time.monotonic()
            self._say(connection, "hello")
            answer = self._read_answer(connection)
            trip_s = time.monotonic() - begun
        with _valid_answer():
            clock_s = float(answer["time"]) - (sent + trip_s / 2)
            return Greeting(trip_s, clock_s, str(answer["host"]), int(answer["port"]))

    def up_bps(self) -> float:
        """Measure the bandwidth from this machine to the other, in bit/s, by sending at most MAX_BYTES within
        MAX_S seconds. Blocks."""
        with self._connected("up") as connection:
            self._say(connection, "up")
            block, count, begun = bytes(BLOCK_BYTES), 0, time.monotonic()
            while count < MAX_BYTES and time.monotonic() - begun < MAX_S:
                connection.sendall(block)
                count += len(block)
            connection.shutdown(socket.SHUT_WR)
            answer = self._read_answer(connection)
        with _valid_answer():
            return 8 * float(answer["bytes"]) / max(1e-6, float(answer["seconds"]))

    def down_bps(self) -> float:
        """Measure the bandwidth from the other machine to this one, in bit/s, by receiving at most MAX_BYTES
        within MAX_S seconds. Blocks."""
        with self._connected("down") as connection:
            self._say(connection, "down")
            count, first = len(connection.recv(BLOCK_BYTES)), time.monotonic()
            if not count:
                raise LinkTestError(_NO_ANSWER)
            total = count
            while total < MAX_BYTES and (block := connection.recv(BLOCK_BYTES)):
                total += len(block)
        return 8 * max(1, total - count) / max(1e-6, time.monotonic() - first)

    def dials_back(self, port: int) -> bool:
        """True if the other machine, which tries it now, can connect to a port of this one."""
        with self._connected("dial") as connection:
            self._say(connection, f"dial {port}")
            return self._read_answer(connection).get("reached") is True

    @contextlib.contextmanager
    def _connected(self, question: str, own_port: int = 0) -> Iterator[socket.socket]:
        try:
            with self._connect(own_port) as connection:
                yield connection
        except OSError as error:
            raise LinkTestError(f"{question}: {error.strerror or error}") from None

    def _connect(self, own_port: int) -> socket.socket:
        """Connection from port `own_port` (0: any) to the first address of the host that answers. Raises
        OSError if none does."""
        ends = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        failure = OSError("the name has no address")
        for family, kind, protocol, _, address in ends:
            connection = socket.socket(family, kind, protocol)
            connection.settimeout(TIMEOUT_S)
            try:
                if own_port:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    connection.bind(("", own_port))
                connection.connect(address)
            except OSError as error:
                connection.close()
                failure = error
            else:
                return connection
        raise failure

    def _say(self, connection: socket.socket, question: str) -> None:
        connection.sendall(f"{self.code} {question}\n".encode())

    def _read_answer(self, connection: socket.socket) -> dict[str, Any]:
        data = b""
        while not data.endswith(b"\n") and len(data) < 4096:
            block = connection.recv(4096)
            if not block:
                break
            data += block
        if not data:
            raise LinkTestError(_NO_ANSWER)
        with _valid_answer():
            answer: dict[str, Any] = json.loads(data)
            return dict(answer)


@contextlib.contextmanager
def _valid_answer() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LinkTestError("its answer is not one of this program") from None
