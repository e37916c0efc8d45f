"""Conformance of every transport backend. A second backend joins by one entry in `net_world.backends`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys

import numpy as np
import pytest

from anabranch.addresses import Address
from anabranch.net import errors
from anabranch.net.connection_limits import Limits
from anabranch.net.errors import DialError, ListenError, PortInUseError, Refused
from anabranch.net.framing import DTYPES, MAX_MESSAGE_BYTES, Blob
from anabranch.net.handshake import Credential, Hello
from anabranch.net.ticket import Grant, MembershipCertificate
from support.network.net_world import (
    NOW_S,
    OWNER,
    Backend,
    Inbox,
    World,
    backends,
    certificate,
    gate,
    identity,
    iroh_backends,
    soon,
    ticket,
    until,
)

#: Request of Linux for the bytes of a connection that it has not sent yet (linux/sockios.h).
SIOCOUTQNSD = 0x894B
#: Each peer of an iroh backend has a process of its own, so that the suite takes a minute.
IROH = [pytest.param(each, marks=pytest.mark.soak) for each in iroh_backends()]


@pytest.fixture(params=[*backends(), *backends(carried=True), *IROH], ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.param
    assert isinstance(found, Backend)
    return found


@pytest.fixture(params=backends(), ids=lambda backend: backend.name)
def direct(request: pytest.FixtureRequest) -> Backend:
    """Backend without a carrier, which would refuse the caller before the peer does."""
    found = request.param
    assert isinstance(found, Backend)
    return found


def random_blob(size_bytes: int, seed: int = 0) -> Blob:
    return Blob("uint8", (size_bytes,), np.random.default_rng(seed).bytes(size_bytes))


# Messages and payloads.


def test_messages_arrive_whole_and_in_order_both_ways(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        messages = [b"", b"x" * MAX_MESSAGE_BYTES, *(b"%d" % n * (n % 300) for n in range(1000))]
        for message in messages:
            here.link.send(message)
            there.link.send(message[::-1])
        await there.count(len(messages))
        await here.count(len(messages))
        assert there.messages == messages
        assert here.messages == [message[::-1] for message in messages]
        assert there.link.control.bytes_received == here.link.control.bytes_sent
        assert there.link.bulk.bytes_received == 0

    backend.run(scenario)


@pytest.mark.parametrize("dtype", DTYPES)
def test_payloads_of_every_dtype_arrive_to_the_byte(backend: Backend, dtype: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (2, 3, 5, 7), (70_001,), (300, 1000)]

    async def scenario(world: World) -> None:
        here, there = await world.pair()
        sent = []
        for number, shape in enumerate(shapes):
            size_bytes = int(np.prod(shape)) * DTYPES[dtype]
            data = np.random.default_rng(number).bytes(size_bytes)
            sent.append((b"%d" % number, shape, data))
            # Payloads go singly: those of different sizes have no order among each other.
            here.link.send(sent[-1][0], Blob(dtype, shape, data))
            await there.count(number + 1)
        for (message, shape, data), (got_message, blob) in zip(sent, there.received, strict=True):
            assert blob is not None
            assert (got_message, blob.dtype, blob.shape, bytes(blob.data)) == (message, dtype, shape, data)
            assert not memoryview(blob.data).readonly

    backend.run(scenario)


@pytest.mark.costly(stay=1)
def test_a_heartbeat_overtakes_a_large_payload(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        there.on_message = lambda message, blob: there.link.send(b"pong " + message)
        payload = random_blob(64 << 20)
        here.link.send(b"payload", payload)
        await until(lambda: there.link.bulk.bytes_received > 0)
        for number in range(3):
            here.link.send(b"%d" % number)
            await here.count(number + 1)
        await here.count(4)
        assert here.messages == [b"pong 0", b"pong 1", b"pong 2", b"pong payload"]
        blob = there.received[-1][1]
        assert blob is not None
        assert memoryview(blob.data) == payload.data

    backend.run(scenario)


def test_a_payload_takes_the_loop_in_small_turns(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        here.link.send(b"", random_blob(16 << 20))
        before = 0
        while not there.received:
            await asyncio.sleep(0)  # a single turn of the loop
            now = here.link.bulk.bytes_sent
            assert now - before < 600 << 10
            before = now

    backend.run(scenario)


def test_payloads_of_one_size_keep_their_order_and_a_small_one_overtakes(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        for number in range(8):
            here.link.send(b"%d" % number, random_blob(1 << 20))
        here.link.send(b"small", random_blob(1000))
        await there.count(9)
        assert [message for message in there.messages if message != b"small"] == [b"%d" % n for n in range(8)]
        assert there.messages.index(b"small") == 0

    backend.run(scenario)


def test_lower_priority_numbers_go_first(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        order = [7, 3, 5, 0, 3, 7]
        for number, priority in enumerate(order):
            here.link.send(b"%d %d" % (priority, number), random_blob(300_000), priority=priority)
        await there.count(len(order))
        assert there.messages == sorted(there.messages)

    backend.run(scenario)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for what it has not sent")
def test_little_is_past_being_overtaken(direct: Backend) -> None:
    """The kernel and the transport hold less than 600 kB of a payload that are not on their way, if the other
    side does not read: an urgent payload comes before the rest. On a line of 5 Mbit/s that is a second."""
    import fcntl

    async def scenario(world: World) -> None:
        here, there = await world.pair()
        there.link.bulk.pause_reading()
        here.link.send(b"snapshot", random_blob(32 << 20), priority=7)
        transport, sent = here.link.bulk.transport, -1
        while sent != here.link.bulk.bytes_sent:
            sent = here.link.bulk.bytes_sent
            await asyncio.sleep(0.1)
        number = transport.get_extra_info("socket").fileno()
        (unsent,) = struct.unpack("i", fcntl.ioctl(number, SIOCOUTQNSD, bytes(4)))
        assert here.queued_bytes > 0 and unsent + transport.get_write_buffer_size() < 600_000
        here.link.send(b"activation", random_blob(1000), priority=0)
        there.link.bulk.resume_reading()
        await there.count(2)
        assert there.messages == [b"activation", b"snapshot"]

    direct.run(scenario)


def test_what_arrives_before_start_waits_for_it(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        here = await anna.dial(bert, start=False)
        there = await bert.incoming()
        there.link.send(b"early")
        there.link.send(b"early, too", random_blob(100_000))
        await until(lambda: there.queued_bytes == 0)
        assert here.received == []
        here.start()
        await here.count(2)

    backend.run(scenario)


# Admission of connections.


@pytest.mark.parametrize("kind", ["ticket", "certificate"])
def test_both_sides_learn_who_the_other_is(backend: Backend, kind: str) -> None:
    async def scenario(world: World) -> None:
        asked: list[Hello] = []

        def authorize(hello: Hello) -> str | None:
            asked.append(hello)
            return None

        anna = await world.peer("anna", incarnation=7)
        bert = await world.peer("bert", incarnation=9, its_gate=gate(authorize=authorize))
        credential: Credential = ticket() if kind == "ticket" else certificate(anna.identity)
        here = await anna.dial(bert, credential)
        there = await bert.incoming()
        assert (here.link.peer_id, here.link.incarnation) == (bert.identity.peer_id, 9)
        assert (there.link.peer_id, there.link.incarnation) == (anna.identity.peer_id, 7)
        assert here.link.credential is None
        shown = there.link.credential
        assert isinstance(shown, Grant if kind == "ticket" else MembershipCertificate)
        assert shown.role == "relay"
        assert [hello.peer_id for hello in asked] == [anna.identity.peer_id], "asked once per link"

    backend.run(scenario)


def refused(
    backend: Backend,
    kind: str,
    sentence: str,
    *,
    credential: Credential | None = None,
    authorize: str | None = None,
    caller_run: str = "tiny-1",
    counted: bool = True,
) -> None:
    async def scenario(world: World) -> None:
        anna = await world.peer("anna", its_gate=gate(run=caller_run))
        bert = await world.peer("bert", its_gate=gate(authorize=lambda hello: authorize))
        with pytest.raises(Refused, match=sentence) as caught:
            await anna.dial(bert, credential)
        assert caught.value.kind == kind
        if counted:
            await until(lambda: bert.transport.refusals.total() > 0)
            assert dict(bert.transport.refusals) == {kind: 1}
        assert bert.inboxes == []

    backend.run(scenario)


def test_an_expired_ticket_is_refused(direct: Backend) -> None:
    refused(direct, errors.EXPIRED, "the ticket expired 3 hours ago", credential=ticket(hours=-3))


def test_a_ticket_of_another_owner_is_refused(direct: Backend) -> None:
    credential = ticket(owner=identity("mallory"))
    refused(direct, errors.TICKET, "not issued by this run's owner", credential=credential)


def test_a_ticket_for_another_run_is_refused(direct: Backend) -> None:
    refused(direct, errors.TICKET, "for run 'tiny-2'", credential=ticket(run="tiny-2"))


def test_a_grant_without_its_key_is_refused(direct: Backend) -> None:
    mine, other = ticket(), ticket()
    stolen = type(mine)(mine.grant, mine.sealed_grant, other.key, (), "")
    refused(direct, errors.TICKET, "does not hold the ticket", credential=stolen)


def test_an_expired_certificate_is_refused(direct: Backend) -> None:
    credential = certificate(identity("anna"), hours=-1)
    refused(direct, errors.EXPIRED, "certificate expired", credential=credential)


def test_the_certificate_of_another_peer_is_refused(direct: Backend) -> None:
    credential = certificate(identity("carl"))
    refused(direct, errors.CERTIFICATE, "belongs to another peer", credential=credential)


def test_a_certificate_by_someone_without_the_right_is_refused(direct: Backend) -> None:
    credential = certificate(identity("anna"), issuer=identity("mallory"))
    refused(direct, errors.CERTIFICATE, "no right to issue", credential=credential)


def test_the_nodes_own_reason_reaches_the_caller(backend: Backend) -> None:
    refused(
        backend,
        errors.NOT_AUTHORIZED,
        "the model has 3 stages, not 4",
        authorize="the model has 3 stages, not 4",
    )


def test_another_run_is_refused(direct: Backend) -> None:
    # The caller itself hangs up, before it has signed anything.
    refused(
        direct, errors.RUN, "belongs to run 'tiny-1', not to 'tiny-2'", caller_run="tiny-2", counted=False
    )


def test_another_key_than_the_one_dialled_is_refused(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        stranger = identity("carl").peer_id
        with pytest.raises(Refused, match=r"^another peer answers") as caught:
            await soon(anna.transport.dial(stranger, bert.host, bert.port, certificate(anna.identity)))
        assert caught.value.kind == errors.SERVER_KEY
        assert bert.inboxes == []

    backend.run(scenario)


def test_a_peer_does_not_talk_to_its_own_key(direct: Backend) -> None:
    async def scenario(world: World) -> None:
        anna, copy = await world.peer("anna"), await world.peer("anna")
        with pytest.raises(Refused, match="own key") as caught:
            await anna.dial(copy)
        assert caught.value.kind == errors.INCARNATION

    direct.run(scenario)


def test_a_copied_key_with_an_old_incarnation_is_fenced(direct: Backend) -> None:
    async def scenario(world: World) -> None:
        bert = await world.peer("bert")
        second = await (await world.peer("anna", incarnation=2)).dial(bert)
        with pytest.raises(Refused, match="incarnation 1 of this peer is over, 2 was seen") as caught:
            await (await world.peer("anna", incarnation=1)).dial(bert)
        assert caught.value.kind == errors.INCARNATION
        assert second.closings == []
        await (await world.peer("anna", incarnation=3)).dial(bert)
        assert "incarnation 3 of this peer has taken over" in await second.closed()
        assert bert.transport.refusals[errors.INCARNATION] == 1
        # The same holds for a called peer: a ghost of bert is not believed by one who met the living one.
        anna = await world.peer("carl")
        await anna.dial(await world.peer("dora", incarnation=5))
        with pytest.raises(Refused, match="incarnation 4"):
            await anna.dial(await world.peer("dora", incarnation=4))

    direct.run(scenario)


# Bounds.


def test_an_oversized_message_ends_the_link(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        anna = await world.peer("anna")
        bert = await world.peer("bert", limits=Limits(max_message_bytes=1000))
        here = await anna.dial(bert)
        there = await bert.incoming()
        with pytest.raises(ValueError, match="exceeds"):
            here.link.send(bytes(MAX_MESSAGE_BYTES + 1))
        here.link.send(bytes(1000))
        await there.count(1)
        here.link.send(bytes(1001))
        assert "a message of 1001 bytes exceeds 1000" in await there.closed()
        await here.closed()
        assert len(there.received) == 1
        assert bert.transport.refusals[errors.FRAME] == 1

    backend.run(scenario)


def test_an_oversized_payload_ends_the_link_when_it_is_announced(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        anna = await world.peer("anna")
        bert = await world.peer("bert", limits=Limits(max_payload_bytes=1 << 20))
        here = await anna.dial(bert)
        there = await bert.incoming()
        here.link.send(b"", random_blob(1 << 20))
        await there.count(1)
        here.link.send(b"", random_blob((1 << 20) + 1))
        assert "a payload of 1048577 bytes exceeds 1048576" in await there.closed()
        await here.closed()

    backend.run(scenario)


def test_what_cannot_travel_is_refused_where_it_is_sent(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        for blob in (
            Blob("float16", (1,), bytes(2)),
            Blob("float32", (3,), bytes(8)),
            Blob("uint8", (1,) * 5, bytes(1)),
            Blob("uint8", (2,), memoryview(bytes(4))[::2]),
        ):
            with pytest.raises(ValueError):
                here.link.send(b"", blob)
        with pytest.raises(ValueError, match="priority 8"):
            here.link.send(b"", random_blob(1), priority=8)
        here.link.send(b"still here")
        await there.count(1)

    backend.run(scenario)


@pytest.mark.parametrize("lane", ["control", "bulk"])
def test_a_reader_that_never_reads_costs_a_bounded_queue(backend: Backend, lane: str) -> None:
    limit = 4 << 20

    async def scenario(world: World) -> None:
        limits = Limits(max_queued_control_bytes=limit, max_queued_bulk_bytes=limit, shutdown_timeout_s=0.1)
        here, _ = await world.pair(limits=limits, start=False)
        payload = random_blob(1 << 20) if lane == "bulk" else None
        message = b"" if payload else bytes(1 << 20)
        for _ in range(100):
            here.link.send(message, payload)
            await asyncio.sleep(0)
            if here.link.closed_reason:
                break
        assert "the peer reads too slowly" in await here.closed()
        assert here.queued_bytes <= limit + (2 << 20)
        here.link.send(b"after the end")
        assert len(here.closings) == 1

    backend.run(scenario)


@pytest.mark.costly(stay=1)
def test_paused_payloads_hold_up_the_sender_and_nothing_else(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        there.link.bulk.pause_reading()
        payloads = 48
        for number in range(payloads):
            here.link.send(b"%d" % number, random_blob(1 << 20))
        for number in range(20):
            here.link.send(b"heartbeat")
            await there.count(number + 1)
        assert set(there.messages) == {b"heartbeat"}
        assert here.queued_bytes > 0
        there.link.bulk.resume_reading()
        await there.count(20 + payloads)
        assert there.messages[20:] == [b"%d" % number for number in range(payloads)]
        assert here.queued_bytes == 0

    backend.run(scenario)


# How links end.


def test_both_sides_hear_why_a_link_was_closed(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        here.link.send(b"last words")
        here.link.close("the run has ended")
        here.link.close("a second reason")
        assert await here.closed() == "the run has ended"
        assert await there.closed() == "closed by the peer: the run has ended"
        assert there.messages == [b"last words"]
        assert here.link.closed_reason == "the run has ended"
        assert len(here.closings) == len(there.closings) == 1

    backend.run(scenario)


def test_closing_in_the_middle_of_a_payload_still_tells_why(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        here.link.send(b"payload", random_blob(32 << 20))
        await until(lambda: there.link.bulk.bytes_received > 0)
        here.link.close("enough")
        assert await there.closed() == "closed by the peer: enough"
        assert there.received == []

    backend.run(scenario)


def test_a_handler_may_close_the_link_between_two_messages(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        there.on_message = lambda message, blob: there.link.close("one is enough")
        for _ in range(10):
            here.link.send(b"message")
        await here.closed()
        assert len(there.received) == 1

    backend.run(scenario)


@pytest.mark.costly(stay=1)
def test_a_transport_that_closes_says_so_on_every_link(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        bert = await world.peer("bert")
        ends = [await (await world.peer(name)).dial(bert) for name in ("anna", "carl", "dora")]
        await soon(bert.transport.close())
        for end in ends:
            assert "shutting down" in await end.closed()
        with pytest.raises(DialError):
            await (await world.peer("emil")).dial(bert)

    backend.run(scenario)


def test_a_killed_peer_is_reported(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        bert = await world.peer("bert")
        doomed = identity("doomed")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "support.network.doomed_peer"]
        command += [bert.identity.peer_id, str(bert.port), certificate(doomed).hex()]
        with subprocess.Popen(command, env=environment) as process:
            try:
                there = await bert.incoming()
                await there.count(1)
                assert there.link.peer_id == doomed.peer_id
                process.send_signal(signal.SIGKILL)
                reason = await there.closed()
                assert "closed by the peer" not in reason
                assert "connection" in reason
            finally:
                process.kill()

    backend.run(scenario)


# Addresses.


def test_a_port_in_use_is_named(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        with pytest.raises(PortInUseError, match=f"port {anna.port} on 127.0.0.1 is in use"):
            await bert.transport.listen("127.0.0.1", anna.port)
        with pytest.raises(ListenError, match="cannot listen on"):
            await bert.transport.listen("no such host", 0)

    backend.run(scenario)


def test_nobody_at_the_address(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        anna = await world.peer("anna")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with pytest.raises(DialError, match=f"cannot reach 127.0.0.1:{port}"):
            await soon(anna.transport.dial(OWNER.peer_id, "127.0.0.1", port, ticket()))

    backend.run(scenario)


def test_another_machine_at_the_first_address_does_not_keep_the_second_from_being_dialled(
    direct: Backend,
) -> None:
    """A private address means other machines in other networks."""

    async def scenario(world: World) -> None:
        anna, bert, carl = [await world.peer(name) for name in ("anna", "bert", "carl")]
        shown = certificate(anna.identity)
        link = await soon(
            anna.transport.dial_any(bert.identity.peer_id, [carl.address, bert.address], shown)
        )
        assert link.peer_id == bert.identity.peer_id and link.way.address == bert.address
        Inbox(link).start()
        with pytest.raises(DialError, match=f"another peer answers at {carl.address}"):
            here = [carl.address, Address("127.0.0.1", 1)]
            await soon(anna.transport.dial_any(bert.identity.peer_id, here, shown))

    direct.run(scenario)


def test_an_address_that_does_not_answer(direct: Backend) -> None:
    async def scenario(world: World) -> None:
        anna = await world.peer("anna", limits=Limits(handshake_timeout_s=0.1))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            with pytest.raises(DialError, match=r"did not answer within 0\.1 s \(TLS\)$"):
                await soon(anna.transport.dial(OWNER.peer_id, "127.0.0.1", port, ticket()))

    direct.run(scenario)


def test_the_clock_of_these_tests_stands_still() -> None:
    # Expiry above is judged by NOW_S; certificates made for it must not depend on the day of the test.
    assert ticket(hours=1).grant.expires_at_s == NOW_S + 3600
