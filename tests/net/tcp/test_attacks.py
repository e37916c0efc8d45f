"""Attacks of strangers on a listening TCP peer, byte by byte; after each it still serves (I7)."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from anabranch.addresses import parse_address
from anabranch.net import errors
from anabranch.net.connection_limits import Limits
from anabranch.net.errors import Refused
from anabranch.net.framing import (
    CHUNK,
    DONE,
    MESSAGE,
    Blob,
    chunk_header,
    message_frame,
    open_frame,
    pause_frame,
)
from anabranch.net.handshake import BULK, CONTROL, WIRE_VERSION, ClientHandshake, ServerHandshake
from anabranch.net.identity import peer_id_of_certificate
from support.network.net_world import (
    NOW_S,
    RUN,
    Backend,
    Inbox,
    Peer,
    World,
    backends,
    certificate,
    gate,
    identity,
    soon,
    until,
)

CALLER = identity("mallory")
LINK_ID = b"L" * 16


@pytest.fixture(params=backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.param
    assert isinstance(found, Backend)
    return found


class RawCaller:
    """A TLS connection in the test's own hands."""

    def __init__(self, server: Peer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, server: Peer, own_host: str = "127.0.0.1") -> RawCaller:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        here = (own_host, 0)
        connecting = asyncio.open_connection(server.host, server.port, ssl=context, local_addr=here)
        reader, writer = await soon(connecting)
        return cls(server, reader, writer)

    def handshake(self, lane: str, link_id: bytes, incarnation: int) -> ClientHandshake:
        tls = self.writer.get_extra_info("ssl_object")
        assert peer_id_of_certificate(tls.getpeercert(True)) == self.server.identity.peer_id
        return ClientHandshake(
            CALLER,
            incarnation,
            run=RUN,
            server=self.server.identity.peer_id,
            server_certificate_key=self.server.identity.peer_id,
            lane=lane,
            link_id=link_id,
            credential=certificate(CALLER),
            binding=tls.get_channel_binding("tls-unique"),
        )

    async def hello(
        self, lane: str = CONTROL, link_id: bytes = LINK_ID, incarnation: int = 1
    ) -> tuple[ClientHandshake, bytes]:
        """The handshake and the hello it would send now."""
        handshake = self.handshake(lane, link_id, incarnation)
        hello = b""
        while not hello:
            hello = handshake.receive(await self.read())
        return handshake, hello

    async def admit(self, lane: str = CONTROL, link_id: bytes = LINK_ID, incarnation: int = 1) -> None:
        """Run the whole handshake. Raises Refused."""
        handshake, hello = await self.hello(lane, link_id, incarnation)
        self.writer.write(hello)
        await self.answer(handshake)

    async def answer(self, handshake: ClientHandshake) -> None:
        while not handshake.accepted:
            handshake.receive(await self.read())

    async def read(self) -> bytes:
        data = await soon(self.reader.read(65536))
        assert isinstance(data, bytes)
        if not data:
            raise ConnectionError("the server closed the connection")
        return data

    async def drain_to_end(self) -> bytes:
        """Everything until the server closes, however it does."""
        data = b""
        try:
            while True:
                data += await self.read()
        except (ConnectionError, ssl.SSLError):
            return data

    def close(self) -> None:
        self.writer.transport.abort()


Attack = Callable[[Peer], Coroutine[Any, Any, None]]


def attacked(backend: Backend, attack: Attack, kind: str, *, limits: Limits | None = None) -> None:
    """Run an attack; it must be counted once, under `kind`, and told with a reason (by the link, where it
    breaks one), and an honest peer must still get in."""

    async def scenario(world: World) -> None:
        server = await world.peer("bert", limits=limits or Limits())
        told: list[tuple[str, str, str]] = []
        server.transport.on_refused = lambda *refusal: told.append(refusal)
        await attack(server)
        await until(lambda: server.transport.refusals.total() > 0)
        assert dict(server.transport.refusals) == {kind: 1}
        assert [refusal[:2] for refusal in told] == ([] if kind == errors.FRAME else [(kind, "127.0.0.1")])
        assert all(reason for _, _, reason in told)
        before = len(server.inboxes)
        honest = await (await world.peer("anna")).dial(server)
        there = await server.incoming(before)
        honest.link.send(b"hello")
        await there.count(1)

    backend.run(scenario)


async def linked(server: Peer) -> tuple[RawCaller, RawCaller]:
    control, bulk = await RawCaller.connect(server), await RawCaller.connect(server)
    await control.admit(CONTROL)
    await bulk.admit(BULK)
    return control, bulk


# At the door.


def test_bytes_that_are_not_tls(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await soon(reader.readexactly(1 << 20))
        writer.close()

    attacked(backend, attack, errors.TLS)


def test_an_older_tls(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):
            await soon(asyncio.open_connection(server.host, server.port, ssl=context))

    attacked(backend, attack, errors.TLS)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", errors.MALFORMED),
        (struct.pack("!4sHI", b"anbr", WIRE_VERSION, 5) + b"\xc1\xff\x00\x01\x02", errors.MALFORMED),
        (struct.pack("!4sHI", b"anbr", WIRE_VERSION, 1 << 31) + bytes(10_000), errors.OVERSIZED),
        (struct.pack("!4sHI", b"anbr", WIRE_VERSION + 1, 0), errors.VERSION),
    ],
    ids=["no handshake", "no hello", "an endless hello", "another wire version"],
)
def test_garbage_inside_tls(backend: Backend, sent: bytes, kind: str) -> None:
    async def attack(server: Peer) -> None:
        caller = await RawCaller.connect(server)
        caller.writer.write(sent)
        await caller.drain_to_end()

    attacked(backend, attack, kind)


def test_the_reason_is_told_to_another_version(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        caller = await RawCaller.connect(server)
        handshake, _ = await caller.hello()
        caller.writer.write(struct.pack("!4sHI", b"anbr", WIRE_VERSION + 1, 0))
        with pytest.raises(Refused, match=f"version {WIRE_VERSION + 1}, the other {WIRE_VERSION}"):
            await caller.answer(handshake)

    attacked(backend, attack, errors.VERSION)


def test_a_server_of_another_version(backend: Backend) -> None:
    """Refusal is mutual: the dialler hangs up by itself, and tells its own version."""

    async def scenario(world: World) -> None:
        anna = await world.peer("anna")
        heard: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(struct.pack("!4sHI", b"anbr", WIRE_VERSION + 1, 3) + b"new")
            heard.append(await reader.read())
            writer.close()

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        identity("future").load_into(context)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        host, port = server.sockets[0].getsockname()
        with pytest.raises(Refused, match="wire version") as caught:
            future = identity("future").peer_id
            await soon(anna.transport.dial(future, host, port, certificate(anna.identity)))
        assert caught.value.kind == errors.VERSION
        await until(lambda: bool(heard))
        assert heard == [struct.pack("!4sHI", b"anbr", WIRE_VERSION, 0)]
        server.close()
        await server.wait_closed()

    backend.run(scenario)


def test_a_replayed_hello(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        first = await RawCaller.connect(server)
        _, hello = await first.hello()
        first.writer.write(hello)
        await first.read()
        second = await RawCaller.connect(server)
        handshake, _ = await second.hello()
        second.writer.write(hello)
        with pytest.raises(Refused, match="another challenge") as caught:
            await second.answer(handshake)
        assert caught.value.kind == errors.REPLAY
        first.close()

    attacked(backend, attack, errors.REPLAY)


def test_a_hello_passed_on_by_someone_between(backend: Backend) -> None:
    """Even one who holds the server's key and shows its nonce cannot use a caller's hello elsewhere."""

    async def attack(server: Peer) -> None:
        outer = await RawCaller.connect(server)
        victim = ClientHandshake(
            CALLER,
            1,
            run=RUN,
            server=server.identity.peer_id,
            server_certificate_key=server.identity.peer_id,
            lane=CONTROL,
            link_id=LINK_ID,
            credential=certificate(CALLER),
            binding=b"the victim's own TLS connection",
        )
        hello = victim.receive(await outer.read())
        outer.writer.write(hello)
        with pytest.raises(Refused, match="not valid for this connection") as caught:
            await outer.answer(victim)
        assert caught.value.kind == errors.SIGNATURE

    attacked(backend, attack, errors.SIGNATURE)


def test_bytes_that_do_not_wait_for_the_answer(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        caller = await RawCaller.connect(server)
        handshake, hello = await caller.hello()
        caller.writer.write(hello + b"".join(message_frame(b"let me in")))
        with pytest.raises(Refused, match="before it was answered"):
            await caller.answer(handshake)

    attacked(backend, attack, errors.MALFORMED)


def test_a_caller_that_says_nothing(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        await soon(reader.read())  # until the server has lost patience
        writer.close()

    attacked(backend, attack, errors.TIMEOUT, limits=Limits(handshake_timeout_s=0.2))


def test_a_caller_that_stops_after_tls(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        caller = await RawCaller.connect(server)
        await caller.drain_to_end()

    attacked(backend, attack, errors.TIMEOUT, limits=Limits(handshake_timeout_s=0.2))


def test_a_control_connection_without_its_bulk_connection(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        caller = await RawCaller.connect(server)
        await caller.admit()
        await caller.drain_to_end()
        assert server.inboxes == []

    attacked(backend, attack, errors.TIMEOUT, limits=Limits(handshake_timeout_s=0.3))


def test_a_bulk_connection_without_its_control_connection(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        caller = await RawCaller.connect(server)
        with pytest.raises(Refused, match="no control connection"):
            await caller.admit(BULK)

    attacked(backend, attack, errors.LANE)


@pytest.mark.parametrize(("link_id", "incarnation"), [(b"M" * 16, 1), (LINK_ID, 2)])
def test_a_bulk_connection_that_does_not_match(backend: Backend, link_id: bytes, incarnation: int) -> None:
    async def attack(server: Peer) -> None:
        control, bulk = await RawCaller.connect(server), await RawCaller.connect(server)
        await control.admit(CONTROL)
        with pytest.raises(Refused, match="no control connection"):
            await bulk.admit(BULK, link_id, incarnation)
        assert server.inboxes == []

    attacked(backend, attack, errors.LANE)


def test_a_link_outlives_the_time_limit_of_its_handshake(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        control, _ = await linked(server)
        inbox = await server.incoming()
        # Another caller, who came later, has used up the same time.
        reader, writer = await asyncio.open_connection(server.host, server.port)
        await soon(reader.read())
        writer.close()
        control.writer.write(b"".join(message_frame(b"still here")))
        await inbox.count(1)

    attacked(backend, attack, errors.TIMEOUT, limits=Limits(handshake_timeout_s=0.3))


def test_sessions_are_not_resumed(backend: Backend) -> None:
    """A resumed session shows no certificate; so the server gives out nothing to resume."""

    async def scenario(world: World) -> None:
        caller = await RawCaller.connect(await world.peer("bert"))
        await caller.admit()
        session = caller.writer.get_extra_info("ssl_object").session
        assert session is None or not session.has_ticket
        caller.close()

    backend.run(scenario)


def test_a_server_that_speaks_with_its_acceptance(backend: Backend) -> None:
    """Frames may follow the acceptance in one packet; none of their bytes get lost."""

    async def scenario(world: World) -> None:
        anna = await world.peer("anna")
        eager = identity("eager")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            binding = writer.get_extra_info("ssl_object").get_channel_binding("tls-unique")
            handshake = ServerHandshake(eager, 1, gate(), binding=binding)
            writer.write(handshake.greeting())
            hello = None
            while hello is None:
                hello = handshake.receive(await reader.read(65536), now_s=NOW_S)
            spoken = b"".join(message_frame(b"welcome")) if hello.lane == CONTROL else b""
            writer.write(handshake.accept() + spoken)
            await reader.read()
            writer.close()

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        eager.load_into(context)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        host, port = server.sockets[0].getsockname()
        link = await soon(anna.transport.dial(eager.peer_id, host, port, certificate(anna.identity)))
        inbox = Inbox(link).start()
        await inbox.count(1)
        assert inbox.messages == [b"welcome"]
        link.close("heard")
        await inbox.closed()
        server.close()
        await server.wait_closed()

    backend.run(scenario)


def test_a_second_bulk_connection(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        await linked(server)
        third = await RawCaller.connect(server)
        with pytest.raises(Refused, match="no control connection"):
            await third.admit(BULK)

    attacked(backend, attack, errors.LANE)


def test_a_second_control_connection_of_one_link(backend: Backend) -> None:
    async def attack(server: Peer) -> None:
        first, second = await RawCaller.connect(server), await RawCaller.connect(server)
        await first.admit()
        with pytest.raises(Refused, match="already"):
            await second.admit()

    attacked(backend, attack, errors.LANE)


def test_more_callers_than_can_be_heard_at_once(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        server = await world.peer("bert", limits=Limits(max_pending_handshakes=2))
        silent = [await asyncio.open_connection(server.host, server.port) for _ in range(3)]
        # The third is turned away at once; the first two keep their places until they leave.
        assert await soon(silent[2][0].read()) == b""
        assert dict(server.transport.refusals) == {errors.BUSY: 1}
        for _, writer in silent:
            writer.transport.abort()
        await until(lambda: server.transport.refusals.total() == 3)
        await (await world.peer("anna")).dial(server)

    backend.run(scenario)


def test_links_that_stay_half_open_keep_nobody_out(backend: Backend) -> None:
    """Control connections without their bulk connection: the oldest of the network with most of them go."""

    async def scenario(world: World) -> None:
        server = await world.peer("bert", limits=Limits(max_pending_handshakes=3, max_pending_of_host=3))
        alone = await RawCaller.connect(server)
        await alone.admit()
        flood = []
        for number in range(4):
            flood.append(await RawCaller.connect(server, "127.0.9.1"))
            await flood[-1].admit(link_id=bytes([number]) * 16)
        for dropped in flood[:2]:
            assert await soon(dropped.reader.read()) == b""
        assert dict(server.transport.refusals) == {errors.BUSY: 2}
        await (await world.peer("anna")).dial(server)
        assert await soon(flood[2].reader.read()) == b""
        bulk = await RawCaller.connect(server)
        await bulk.admit(BULK)

    backend.run(scenario)


def test_one_address_keeps_nobody_else_out(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        server = await world.peer("bert", limits=Limits(max_pending_of_host=2))
        opened = []
        for number, host in enumerate(["127.0.0.1"] * 3 + ["127.0.0.2"] * 3):
            there = (server.host, server.port)
            opened.append(await asyncio.open_connection(*there, local_addr=(host, 0)))
            if number % 3 == 2:  # two of each address are listened to
                assert await soon(opened[-1][0].read()) == b""
                assert dict(server.transport.refusals) == {errors.BUSY: 1 + number // 3}
        for _, writer in opened:
            writer.transport.abort()

    backend.run(scenario)


def test_silent_callers_of_some_addresses_keep_nobody_out(backend: Backend) -> None:
    """Addresses cost nothing, those of IPv6 at least. The oldest connection of the network with most of them
    gives way, and one more of that network is turned away."""

    async def scenario(world: World) -> None:
        server = await world.peer("bert", limits=Limits(max_pending_handshakes=4, max_pending_of_host=2))
        silent = []
        for number in range(5):
            there, here = (server.host, server.port), (f"127.0.9.{1 + number}", 0)
            silent.append(await asyncio.open_connection(*there, local_addr=here))
        assert await soon(silent[4][0].read()) == b""
        assert dict(server.transport.refusals) == {errors.BUSY: 1}
        await (await world.peer("anna")).dial(server)
        assert await soon(silent[0][0].read()) == b""
        assert len(server.transport.listener.pending) == 3
        assert server.transport.end.resources.system.connections == 5  # three silent ones, and a link's two
        for _, writer in silent:
            writer.transport.abort()

    backend.run(scenario)


# Past the door: an admitted peer that does not keep to the framing.


def lawless(backend: Backend, lane: str, sent: bytes, sentence: str) -> None:
    async def attack(server: Peer) -> None:
        control, bulk = await linked(server)
        inbox = await server.incoming()
        honest_first = b"".join(message_frame(b"first"))
        control.writer.write(honest_first)
        await inbox.count(1)
        (control if lane == CONTROL else bulk).writer.write(sent)
        reason = await inbox.closed()
        assert sentence in reason
        assert inbox.messages == [b"first"]
        await control.drain_to_end()
        await bulk.drain_to_end()

    attacked(backend, attack, errors.FRAME)


def frame(kind: int, stream: int, length: int, body: bytes = b"") -> bytes:
    return struct.pack("!BBHI", kind, 0, stream, length) + body


@pytest.mark.parametrize("lane", [CONTROL, BULK])
def test_garbage_frames(backend: Backend, lane: str) -> None:
    lawless(backend, lane, b"\xff" * 5000, "broken frame")


def test_a_message_announced_as_huge(backend: Backend) -> None:
    lawless(backend, CONTROL, frame(MESSAGE, 0, 0xFFFFFFFF), "a message of 4294967295 bytes")


def test_a_payload_on_the_control_lane(backend: Backend) -> None:
    sent = b"".join(open_frame(0, b"", Blob("uint8", (4,), b"data"), 4))
    lawless(backend, CONTROL, sent, "carries no payloads")


def test_a_chunk_of_a_stream_never_opened(backend: Backend) -> None:
    lawless(backend, BULK, frame(CHUNK, 3, 4, b"data"), "stream 3, which is not open")


def test_more_bytes_than_announced(backend: Backend) -> None:
    sent = b"".join(open_frame(0, b"", Blob("uint8", (4,), b"data"), 4)) + chunk_header(0, 5) + b"data!"
    lawless(backend, BULK, sent, "more than its 4 bytes")


def test_a_chunk_of_a_byte_that_is_not_the_last(backend: Backend) -> None:
    """The shortest chunk may be smaller only where it ends its payload."""
    opening = b"".join(open_frame(0, b"", Blob("uint8", (8192,), bytes(8192)), 8192))
    ending = chunk_header(0, 4096) + bytes(4096) + chunk_header(0, 4095) + bytes(4095)
    lawless(backend, BULK, opening + ending, "a chunk of 4095 bytes is not the last of stream 0")


def test_pauses_without_end(backend: Backend) -> None:
    lawless(backend, BULK, pause_frame() * 101, "more than 100 pauses between two payloads")


def test_pauses_that_pass_for_progress(backend: Backend) -> None:
    opening = b"".join(open_frame(0, b"", Blob("uint8", (4,), b"data"), 4))
    lawless(backend, BULK, opening + pause_frame(), "a pause within a payload")


def test_a_damaged_payload(backend: Backend) -> None:
    opening = b"".join(open_frame(0, b"", Blob("uint8", (4,), b"data"), 4))
    sent = opening + chunk_header(0, 4) + b"dada" + frame(DONE, 0, 16, bytes(16))
    lawless(backend, BULK, sent, "checksum is wrong")


def test_a_connection_that_comes_while_the_peer_closes_leaves_nothing(
    backend: Backend, recwarn: pytest.WarningsRecorder
) -> None:
    """Its handshake is cancelled before it began: no coroutine stays that nobody awaits."""

    async def scenario(world: World) -> None:
        server = await world.peer("bert")
        near, far = socket.socketpair()
        server.transport.listener.take_iroh(near, "", "")
        assert len(server.transport.listener.pending) == 1
        await server.transport.close()
        far.close()

    backend.run(scenario)
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


def test_an_address_of_another_peer_is_not_believed(backend: Backend) -> None:
    """A joiner names it as its own. It costs the other peer one TLS connection, which proves another key."""

    async def scenario(world: World) -> None:
        leader, other = await world.peer("anna"), await world.peer("bert")
        said = await soon(leader.transport.probe(CALLER.peer_id, other.address))
        assert said == f"another machine answers at {other.address}"
        assert await soon(leader.transport.probe(other.identity.peer_id, other.address)) == ""
        assert other.inboxes == [] and leader.inboxes == []

    backend.run(scenario)


@pytest.mark.parametrize("name", ["x..y", ".a", "a" * 64 + ".b"])
def test_what_is_no_name_of_a_host_is_an_address_that_fails(backend: Backend, name: str) -> None:
    """The system's look-up raises no OSError for it, and the leader ended: a joiner chooses what it dials."""

    async def scenario(world: World) -> None:
        leader = await world.peer("anna")
        said = await soon(leader.transport.probe(CALLER.peer_id, parse_address(f"{name}:80")))
        assert "it is no name of a host" in said

    backend.run(scenario)
