"""TLS messages without content: strangers, members and carried peers that send them alone are cut (I7)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable

import pytest

from anabranch.net import errors
from anabranch.net.connection_limits import Limits
from anabranch.net.framing import message_frame
from anabranch.net.handshake import BULK, CARRY, CONTROL, AnswerReader, ClientHandshake
from anabranch.net.tcp import tls
from anabranch.net.tcp.listener import FLOOD_ATTEMPTS
from anabranch.net.tls_overhead import RECORD_BYTES, STRANGER_BYTES, CountedTls, TlsFlood
from support.network import key_updates
from support.network.key_updates import KeyUpdates
from support.network.net_world import (
    PATIENCE_S,
    RUN,
    Backend,
    Peer,
    World,
    backends,
    certificate,
    circuit_backends,
    identity,
    soon,
    until,
)

CALLER = identity("mallory")
LINK_ID = b"L" * 16
#: KeyUpdates of a flood: 54 kB, twice what is taken.
FLOOD = 2000

pytestmark = pytest.mark.skipif(key_updates.LIBRARY is None, reason="the system has no OpenSSL")


@pytest.fixture(params=backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.param
    assert isinstance(found, Backend)
    return found


@pytest.fixture(params=circuit_backends(), ids=lambda backend: backend.name)
def circuit_backend(request: pytest.FixtureRequest) -> Backend:
    found = request.param
    assert isinstance(found, Backend)
    return found


async def connect(server: Peer) -> KeyUpdates:
    return await asyncio.to_thread(KeyUpdates.dial, server.host, server.port)


async def admitted(server: Peer, lane: str) -> KeyUpdates:
    """Connection with the whole handshake, over the tests' own OpenSSL."""
    caller = await connect(server)
    handshake = ClientHandshake(
        CALLER,
        1,
        run=RUN,
        server=server.identity.peer_id,
        server_certificate_key=server.identity.peer_id,
        lane=lane,
        link_id=LINK_ID,
        credential=certificate(CALLER),
        binding=caller.binding(),
    )
    while not handshake.accepted:
        if hello := handshake.receive(await asyncio.to_thread(caller.read)):
            caller.write([hello])
    return caller


async def still_served(world: World, server: Peer) -> None:
    before = len(server.inboxes)
    honest = await (await world.peer("anna")).dial(server)
    there = await server.incoming(before)
    honest.link.send(b"hello")
    await there.count(1)


def sends_key_updates(caller: KeyUpdates) -> None:
    caller.send(FLOOD)


def sends_answered_key_updates(caller: KeyUpdates) -> None:
    caller.send(FLOOD, answered=True)


def sends_records_of_a_byte(caller: KeyUpdates) -> None:
    caller.write([b"\1"] * FLOOD)


def sends_key_updates_between_records(caller: KeyUpdates) -> None:
    for _ in range(FLOOD):
        caller.send(1)
        caller.write([b"".join(message_frame(b"eight more"))])


STRANGERS = [sends_key_updates, sends_answered_key_updates, sends_records_of_a_byte]


@pytest.mark.parametrize("flood", STRANGERS)
def test_a_stranger_is_cut(backend: Backend, flood: Callable[[KeyUpdates], None]) -> None:
    async def scenario(world: World) -> None:
        server = await world.peer("bert")
        told: list[tuple[str, str, str]] = []
        server.transport.on_refused = lambda *refusal: told.append(refusal)
        caller = await connect(server)
        await asyncio.to_thread(flood, caller)
        await until(lambda: bool(told))
        assert told == [(errors.TLS, "127.0.0.1", "it sends TLS messages without content")]
        assert not server.transport.listener.pending
        await still_served(world, server)

    backend.run(scenario)


@pytest.mark.parametrize("lane", [CONTROL, BULK])
@pytest.mark.parametrize("flood", [*STRANGERS[:2], sends_key_updates_between_records])
def test_a_member_loses_its_link(backend: Backend, flood: Callable[[KeyUpdates], None], lane: str) -> None:
    async def scenario(world: World) -> None:
        server = await world.peer("bert")
        control = await admitted(server, CONTROL)
        bulk = await admitted(server, BULK)
        inbox = await server.incoming()
        await asyncio.to_thread(flood, control if lane == CONTROL else bulk)
        assert "TLS messages without content" in await inbox.closed()
        assert inbox.link.broke_framing
        assert dict(server.transport.refusals) == {errors.FRAME: 1}
        await still_served(world, server)

    backend.run(scenario)


async def opened(carrier: Peer, target: Peer) -> KeyUpdates:
    """Connection to a carrier that is a circuit to `target` now."""
    outer = await admitted(carrier, CARRY)
    outer.write([bytes.fromhex(target.identity.peer_id)])
    answer = AnswerReader()
    while not answer.receive(await asyncio.to_thread(outer.read)):
        pass
    return outer


async def behind(world: World) -> tuple[Peer, Peer]:
    """Carrier, and a peer that it leads to."""
    carrier, peer = await world.peer("carrier"), await world.peer("bert", listens=False)
    await peer.dial(carrier)
    await carrier.incoming()
    peer.via(carrier)
    return carrier, peer


@pytest.mark.parametrize("flood", STRANGERS)
def test_a_stranger_within_a_circuit_is_cut(
    circuit_backend: Backend, flood: Callable[[KeyUpdates], None]
) -> None:
    """The carrier passes on what it cannot read; the peer at the end counts its own layer."""

    async def scenario(world: World) -> None:
        carrier, peer = await behind(world)
        outer = await opened(carrier, peer)
        inner = await asyncio.to_thread(KeyUpdates.inside, outer)
        await asyncio.to_thread(flood, inner)
        await until(lambda: peer.transport.refusals.total() > 0)
        assert dict(peer.transport.refusals) == {errors.TLS: 1}
        await until(lambda: not carrier.transport.carrier.circuits)
        await still_served(world, peer)

    circuit_backend.run(scenario)


def test_an_opener_of_a_circuit_is_cut(circuit_backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier, peer = await behind(world)
        outer = await opened(carrier, peer)
        assert carrier.transport.carrier.circuits
        await asyncio.to_thread(outer.send, FLOOD)
        await until(lambda: not carrier.transport.carrier.circuits)
        await still_served(world, peer)

    circuit_backend.run(scenario)


def test_a_flood_of_one_that_was_let_in_counts_as_many_connections(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        server = await world.peer("bert", limits=Limits(attempts_burst=FLOOD_ATTEMPTS, attempts_per_s=1e-6))
        stranger = await connect(server)
        await asyncio.to_thread(stranger.send, FLOOD)
        await until(lambda: server.transport.refusals[errors.TLS] > 0)
        control, _ = await admitted(server, CONTROL), await admitted(server, BULK)
        await server.incoming()
        await asyncio.to_thread(control.send, FLOOD)
        await until(lambda: server.transport.refusals[errors.FRAME] > 0)
        with pytest.raises(OSError):
            await connect(server)
        assert server.transport.refusals[errors.BUSY] == 1

    backend.run(scenario)


def test_a_link_that_closes_takes_no_flood(backend: Backend) -> None:
    """The end of TLS, for which the other side is waited, reads its messages, too."""

    async def scenario(world: World) -> None:
        server = await world.peer("bert", limits=Limits(shutdown_timeout_s=10 * PATIENCE_S))
        control, _ = await admitted(server, CONTROL), await admitted(server, BULK)
        link = (await server.incoming()).link
        link.close("enough")
        await asyncio.to_thread(control.send, FLOOD)
        await soon(link.wait_gone())

    backend.run(scenario)


# Honest connections.


class Ends:
    """Both ends of a TLS connection in memory, after their handshake. sent: bytes of the client that have not
    arrived yet."""

    def __init__(self) -> None:
        self.sent, arrived, back = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO()
        client = tls.client_context().wrap_bio(back, self.sent)
        server = tls.server_context(CALLER).wrap_bio(arrived, back, server_side=True)
        assert isinstance(client, CountedTls) and isinstance(server, CountedTls)
        self.client, self.server = client, server
        for end in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
            self.deliver(self.sent.pending)

    def deliver(self, size_bytes: int) -> None:
        self.server.incoming.write(self.sent.read(size_bytes) if size_bytes else b"")

    def read(self, size_bytes: int) -> int:
        """Bytes that the server has read, at most `size_bytes` at once, until nothing is left."""
        count = 0
        with contextlib.suppress(ssl.SSLWantReadError):
            while True:
                count += self.server.read(size_bytes, bytearray(size_bytes))
        return count


@pytest.mark.parametrize("size_bytes", [8, 24, 16_385, 0], ids=["headers", "ends", "tails", "of any length"])
def test_no_honest_sender_meets_the_budget(size_bytes: int) -> None:
    """Writes as links make them, of a frame's header and more, that come in pieces of any length and are read
    into buffers of any length."""
    rng, ends = random.Random(size_bytes), Ends()
    ends.server.stranger = False
    written = read = 0
    for _ in range(4000):
        piece = bytes(size_bytes or rng.choice((8, 30, 4_096, 16_384 + rng.randrange(9), 262_144)))
        written += ends.client.write(piece)
        ends.deliver(rng.randrange(2 * len(piece) + 100))
        read += ends.read(rng.choice((1, 8 << 10, 256 << 10)) if len(piece) < 1000 else 64 << 10)
    ends.deliver(ends.sent.pending)
    assert read + ends.read(1 << 16) == written


def test_what_a_stranger_sends_is_refused_before_it_is_decrypted() -> None:
    ends = Ends()
    for _ in range(STRANGER_BYTES // (8 + RECORD_BYTES) + 1):
        ends.client.write(bytes(8))
    ends.deliver(ends.sent.pending)
    waiting = ends.server.incoming.pending
    for step in (ends.server.read, ends.server.unwrap, ends.server.do_handshake, ends.server.read):
        with pytest.raises(TlsFlood):
            step()
    assert ends.server.flooded and ends.server.incoming.pending == waiting
