"""Budgets of memory, streams, connections and descriptors: a victim in its own process, and real clients that
take what they can (I5, I7)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.addresses import block_of
from anabranch.net.chunk_queue import ChunkQueue
from anabranch.net.connection_limits import Limits, limits_of_run
from anabranch.net.errors import NetError, Refused
from anabranch.net.framing import (
    MAX_MESSAGE_BYTES,
    Blob,
    FrameReader,
    chunk_header,
    message_frame,
    open_frame,
)
from anabranch.net.link import Link
from anabranch.net.packing import size_bounds
from anabranch.net.resource_manager import (
    AttemptRate,
    ResourceManager,
    ResourceRefused,
    make_budgets,
)
from anabranch.net.tcp.transport import TcpTransport
from anabranch.node.chaos.guests.stranger_attacks import GuestDialer
from support.grids import first_of
from support.network.net_world import NOW_S, certificate, gate, identity, soon

MIB = 1 << 20


class Victim:
    """Process of `support.network.lone_peer`."""

    def __init__(self, descriptors: int, **limits: Any) -> None:
        tests = Path(__file__).parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.network.lone_peer",
             json.dumps({"limits": limits, "descriptors": descriptors})],
            cwd=tests, env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tests)])},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    async def ask(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        told = json.loads(await asyncio.get_running_loop().run_in_executor(None, self._line))
        assert isinstance(told, dict)
        return told

    async def until(self, key: str, value: object) -> dict[str, Any]:
        while (told := await self.ask())[key] != value:
            await asyncio.sleep(0.02)
        return told

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Guest(TcpTransport):
    """Client with a key and a local address of its own."""

    def __init__(self, name: str, address: str = "127.0.0.1") -> None:
        self.who = identity(name)
        super().__init__(self.who, 1, gate(), lambda link: None, unix_time_s=lambda: NOW_S)
        self.dialer = GuestDialer(self, address)

    async def link(self, victim: Victim) -> Link:
        shown = certificate(self.who)
        link = await soon(self.dial(identity("bert").peer_id, "127.0.0.1", victim.port, shown))
        assert isinstance(link, Link)
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        link.start(lambda message, blob: None, self.closed.set_result)
        return link


def unfinished(link: Link, count: int, size_bytes: int) -> None:
    """Begin payloads and send all but their last bytes."""
    body = bytes(size_bytes)
    for stream in range(count):
        link.bulk.write(open_frame(stream, b"", Blob("uint8", (size_bytes,), body), size_bytes))
        for start in range(0, size_bytes - 1, MIB):
            piece = body[start : min(start + MIB, size_bytes - 1)]
            link.bulk.write((chunk_header(stream, len(piece)), piece))


@pytest.fixture
def victim(request: pytest.FixtureRequest) -> Iterator[Victim]:
    found = Victim(**request.param)
    yield found
    found.end()


SMALL = {"descriptors": 0, "max_payload_bytes": 4 * MIB, "link_payload_bytes": 8 * MIB, "stall_s": 6.0}
#: Budget of an address block under SMALL, and allowance for buffers of connections and of the allocator.
BLOCK_BYTES, SLACK_BYTES = 64 * MIB, 48 * MIB


@pytest.mark.costly
@pytest.mark.parametrize("victim", [SMALL], indirect=True)
def test_unfinished_payloads_of_many_keys_stay_within_the_budget_and_expire(victim: Victim) -> None:
    async def scenario() -> None:
        before = await victim.ask()
        greedy = Guest("greedy")
        unfinished(await greedy.link(victim), 16, 4 * MIB)
        assert "this peer has 8388608 bytes of unfinished payloads" in await soon(greedy.closed)
        guests = [Guest(f"guest {number}") for number in range(14)]
        for guest in guests:
            unfinished(await guest.link(victim), 2, 4 * MIB)
        for guest in guests[8:]:
            assert "the address block 127.0.0.0/24 has" in await soon(guest.closed)
        held = await victim.ask()
        assert held["memory_bytes"] == BLOCK_BYTES and held["streams"] == 16
        assert held["rss_bytes"] - before["rss_bytes"] < BLOCK_BYTES + SLACK_BYTES
        honest = Guest("honest", "127.0.1.1")
        (await honest.link(victim)).send(b"", Blob("uint8", (4 * MIB,), bytes(4 * MIB)))
        await soon(victim.until("received", 1))
        for guest in guests[:8]:
            assert "no progress of 2 unfinished payloads" in await soon(guest.closed)
        await soon(victim.until("memory_bytes", 0))
        assert not honest.closed.done()
        for guest in (greedy, honest, *guests):
            await guest.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [SMALL], indirect=True)
def test_a_long_message_without_room_ends_its_link(victim: Victim) -> None:
    async def scenario() -> None:
        guest = Guest("guest")
        link = await guest.link(victim)
        unfinished(link, 2, 4 * MIB)
        await victim.until("memory_bytes", 8 * MIB)
        link.send(bytes(MAX_MESSAGE_BYTES))
        assert "this peer has 8388608 bytes" in await soon(guest.closed)
        await soon(victim.until("memory_bytes", 0))
        await guest.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [{"descriptors": 0, "max_connections": 64}], indirect=True)
def test_one_address_block_leaves_connections_for_others(victim: Victim) -> None:
    async def scenario() -> None:
        guests, refusals = [Guest(f"guest {number}", f"127.0.0.{number + 2}") for number in range(20)], []
        for guest in guests:
            try:
                await guest.link(victim)
            except NetError as error:
                refusals.append(error)
        assert len(refusals) == 4
        await soon(victim.until("connections", 32))
        honest = Guest("honest", "127.0.1.1")
        (await honest.link(victim)).send(b"hello")
        await soon(victim.until("received", 1))
        for guest in (honest, *guests):
            await guest.close()
        await soon(victim.until("connections", 0))

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [{"descriptors": 0}], indirect=True)
def test_one_key_has_few_connections(victim: Victim) -> None:
    async def scenario() -> None:
        guest = Guest("guest")
        links = [await guest.link(victim) for _ in range(8)]
        with pytest.raises(Refused, match="this peer has 16 connections, of at most 16"):
            await guest.link(victim)
        assert all(link.closed_reason is None for link in links)
        await guest.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [{"descriptors": 256}], indirect=True)
def test_files_can_be_opened_however_many_connect(victim: Victim) -> None:
    async def scenario() -> None:
        opened = []
        for number in range(300):
            there = ("127.0.0.1", victim.port)
            opened.append(await asyncio.open_connection(*there, local_addr=(f"127.0.{number % 6}.2", 0)))
        told = await victim.ask()
        assert told["connections"] <= 128 and told["openable"] == 64
        for _, writer in opened:
            writer.transport.abort()
        await soon(victim.until("connections", 0))

    asyncio.run(scenario())


# Without I/O.


def test_a_reservation_is_charged_to_every_scope_or_to_none() -> None:
    manager = ResourceManager(make_budgets(100, 4, connections=64))
    links = [manager.link(f"peer {number}", "ticket", f"10.0.{number}.1") for number in range(9)]
    for link in links[:8]:
        link.reserve(memory_bytes=100, streams=1)
    with pytest.raises(ResourceRefused, match="its ticket has 800 bytes") as refused:
        links[8].reserve(memory_bytes=1, streams=1)
    assert not refused.value.own
    assert manager.system.memory_bytes == 800 and manager.refusals == {"ticket": 1}
    with pytest.raises(ResourceRefused, match="this peer has 100 bytes") as refused:
        other = manager.link("other", "", "10.1.0.1")
        other.reserve(memory_bytes=100)
        other.reserve(memory_bytes=1)
    assert refused.value.own
    links[0].release_all()
    links[8].reserve(memory_bytes=100, streams=1)
    for link in (*links, other):
        link.release_all()
        link.release_all()
    assert (manager.system.memory_bytes, manager.system.streams, manager.system.users) == (0, 0, 0)
    assert len(manager._scopes) == 1


def test_messages_of_unfinished_payloads_and_long_frames_are_charged() -> None:
    """Sixteen payloads of one byte had sixteen messages of 1 MiB, which no budget counted: 17 MiB of each
    link, however many (I5)."""
    limits = limits_of_run(40_000, 0.5, activation_bytes=30_000, piece_bytes=50_000)
    manager = ResourceManager(limits.budgets())
    message, scope = bytes(MAX_MESSAGE_BYTES), manager.link("peer", "ticket", "10.0.0.1")
    reader = FrameReader(max_payload_bytes=limits.max_payload_bytes, reservation=scope)
    begun = [b"".join(open_frame(stream, message, Blob("uint8", (1,), b"0"), 1)) for stream in range(16)]
    with pytest.raises(ResourceRefused, match="this peer has"):
        for each in begun:
            reader.feed(each)
            assert manager.system.memory_bytes >= len(message)
    assert scope.memory_bytes == scope.streams == 0
    control = FrameReader(max_payload_bytes=0, scratch_bytes=64, reservation=scope)
    long = b"".join(message_frame(message))
    for begun_bytes in (100, len(long) - 100):
        control.feed(long[:begun_bytes])
        assert scope.memory_bytes == len(long)
        assert control.feed(long[begun_bytes:]) == [(message, None)] and not scope.memory_bytes
    control.feed(long[:100])
    control.end()
    scope.release_all()
    assert not manager.system.memory_bytes


def test_handshakes_of_an_address_block_are_limited_per_second() -> None:
    rate = AttemptRate(per_s=2.0, burst=3.0)
    assert [rate.take(f"10.0.0.{number}", 5.0) for number in range(5)] == [True] * 3 + [False] * 2
    assert rate.take("10.0.1.1", 5.0)
    assert [rate.take("10.0.0.9", 6.0) for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("seed", first_of(range(20), 5))
def test_no_honest_sender_meets_the_budget_of_its_link(seed: int) -> None:
    """Whatever an honest sender queues, at any interleaving, its unfinished payloads fit (I5)."""
    rng = random.Random(seed)
    limits = limits_of_run(40_000, 0.5, activation_bytes=30_000, piece_bytes=50_000)
    # By priority: largest input gradient, activation, part of sums, reduced gradient, piece, probe.
    sums_bytes = size_bounds(20_000)[1]
    largest = (30_000, 30_000, sums_bytes, sums_bytes, 50_000, 50_000)
    manager = ResourceManager(limits.budgets())
    scope = manager.link("peer", "ticket", "10.0.0.1")
    queue = ChunkQueue(8 << 10)
    reader = FrameReader(max_payload_bytes=limits.max_payload_bytes, reservation=scope)
    queued = finished = most = 0
    for _ in range(600):
        for _ in range(rng.randrange(3)):
            priority = rng.randrange(len(largest))
            size_bytes = rng.choice((largest[priority], rng.randrange(1, largest[priority])))
            queue.put(b"", Blob("uint8", (size_bytes,), bytes(size_bytes)), priority)
            queued += 1
        for _ in range(rng.randrange(12)):
            finished += sum(len(reader.feed(piece)) for piece in queue.next_pieces())
        most = max(most, scope.memory_bytes)
    while queue:
        finished += sum(len(reader.feed(piece)) for piece in queue.next_pieces())
    assert finished == queued and sums_bytes < most <= 4 * (sums_bytes + 30_000 + 50_000)
    assert (manager.system.memory_bytes, manager.system.streams) == (0, 0)


def test_address_blocks() -> None:
    assert block_of("192.0.2.77") == block_of("::ffff:192.0.2.1") == "192.0.2.0/24"
    assert block_of("2001:db8:1:2:3::4") == "2001:db8:1::/48"
    assert block_of("fe80::1%eth0") == "fe80::/48"
    assert block_of("example") == "example" and block_of("127.0.0.1") == "127.0.0.0/24"


def test_default_budgets_of_a_transport_are_finite() -> None:
    budgets = Limits().budgets()
    assert budgets.peer.memory_bytes == 4 * Limits().max_payload_bytes
    assert budgets.block.connections < budgets.system.connections
