"""Circuits: links that a third peer carries, end to end, within the carrier's limits (I7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from anabranch.addresses import Address
from anabranch.net import errors
from anabranch.net import link as link_module
from anabranch.net.circuit import TARGET_BYTES, Carrier, Circuit, Opener, _Wish
from anabranch.net.connection_limits import CarryLimits, Limits
from anabranch.net.errors import DialError, Refused
from anabranch.net.framing import MAX_PAUSES, TOKEN_BYTES, Blob, offer_frame, pause_frame
from anabranch.net.handshake import CARRY, ClientHandshake, Credential, Hello
from anabranch.net.lane import Lane
from anabranch.net.link import Link
from anabranch.net.tcp import dialer
from anabranch.net.tcp.dialer import introduce
from support.network.net_world import (
    PATIENCE_S,
    Backend,
    Inbox,
    Peer,
    World,
    certificate,
    circuit_backends,
    identity,
    soon,
    ticket,
    until,
)

BODY = bytes(range(256)) * 4096


@pytest.fixture(params=circuit_backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.param
    assert isinstance(found, Backend)
    return found


async def behind(world: World, name: str, carrier: Peer) -> Peer:
    """Peer that listens nowhere, with a link to a carrier."""
    peer = await world.peer(name, listens=False)
    seen = len(carrier.inboxes)
    await peer.dial(carrier)
    await carrier.incoming(seen)
    peer.via(carrier)
    return peer


async def carried(world: World) -> tuple[Peer, Inbox, Inbox]:
    """Carrier, and both ends of a link that it carries."""
    carrier = await world.peer("carrier")
    anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
    here = await anna.dial(bert)
    return carrier, here, await bert.incoming()


def circuits(carrier: Peer) -> set[Circuit]:
    return carrier.transport.carrier.circuits


def limit(carrier: Peer, limits: CarryLimits) -> None:
    carrier.transport.carrier.limits = limits


def test_pauses_of_a_carried_link_are_bridged_where_the_kernel_forgets(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end knows its own connection to the carrier; the carrier passes the frames on."""

    def forgets(lane: Lane) -> None:
        lane.forgets_rate = True

    monkeypatch.setattr(dialer, "tune", forgets)
    monkeypatch.setattr(link_module, "_WARM_S", 0.001)

    async def scenario(world: World) -> None:
        _, here, there = await carried(world)
        here.link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
        await there.count(1)
        sent, received = here.link.bulk, there.link.bulk
        payload = sent.bytes_sent - here.link._pauses * len(pause_frame())
        await until(lambda: received.bytes_received == payload + MAX_PAUSES * len(pause_frame()))
        assert sent.bytes_sent == received.bytes_received and not there.closings

    backend.run(scenario)


def test_two_peers_without_addresses_are_linked_through_a_carrier(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier, here, there = await carried(world)
        assert here.link.peer_id == identity("bert").peer_id
        assert there.link.peer_id == identity("anna").peer_id
        assert here.link.way.via == there.link.way.via == carrier.identity.peer_id
        for number in range(8):
            here.link.send(b"ping %d" % number)
            here.link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
            there.link.send(b"back", Blob("uint8", (len(BODY),), BODY))
        await there.count(16)
        await here.count(8)
        assert all(blob is None or bytes(blob.data) == BODY for _, blob in there.received + here.received)
        assert carrier.transport.carrier.carried_bytes > 16 * len(BODY)
        assert len(circuits(carrier)) == 2
        here.link.close("enough")
        assert await there.closed() == "closed by the peer: enough"
        await until(lambda: not circuits(carrier))

    backend.run(scenario)


def test_the_next_address_is_used_when_a_carrier_dies(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        one, other = await world.peer("one"), await world.peer("other")
        anna, bert = await behind(world, "anna", one), await behind(world, "bert", one)
        seen = len(other.inboxes)
        await bert.dial(other)
        await other.incoming(seen)
        ways = [Address(p.host, p.port, p.identity.peer_id) for p in (one, other)]
        link = await soon(anna.transport.dial_any(bert.identity.peer_id, ways, certificate(anna.identity)))
        here, there = Inbox(link).start(), await bert.incoming()
        assert link.way.via == one.identity.peer_id
        await one.transport.close()
        await here.closed()
        await there.closed()
        again = await soon(anna.transport.dial_any(bert.identity.peer_id, ways, certificate(anna.identity)))
        assert again.way.via == other.identity.peer_id
        Inbox(again).start().link.send(b"still here")
        await (await bert.incoming(1)).count(1)

    backend.run(scenario)


def test_a_direct_address_is_preferred_to_a_carrier(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier, bert = await world.peer("carrier"), await world.peer("bert")
        anna = await world.peer("anna", listens=False)
        await bert.dial(carrier)
        closed = await world.peer("closed")
        await closed.transport.close()
        ways = [
            Address(closed.host, closed.port),
            Address(bert.host, bert.port),
            Address(carrier.host, carrier.port, carrier.identity.peer_id),
        ]
        link = await soon(anna.transport.dial_any(bert.identity.peer_id, ways, certificate(anna.identity)))
        assert link.way.address == ways[1] and not link.way.via
        Inbox(link).start()

    backend.run(scenario)


# Attacks on a carrier.


def test_a_circuit_leads_only_to_a_peer_that_dialled_the_carrier(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier, outside = await world.peer("carrier"), await world.peer("outside")
        limit(carrier, CarryLimits(link_s=0.0))
        anna = await behind(world, "anna", carrier)
        await carrier.dial(outside)  # it did not dial the carrier itself
        for target in (outside.identity.peer_id, identity("nobody").peer_id, anna.identity.peer_id):
            way = Address(carrier.host, carrier.port, carrier.identity.peer_id)
            with pytest.raises(DialError, match=r"carrier at .*: the peer to reach has not connected to it"):
                await soon(anna.transport.dial_any(target, [way], certificate(anna.identity)))
        assert not outside.inboxes[1:] and not circuits(carrier)

    backend.run(scenario)


def test_a_stranger_opens_no_circuit(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        bert, stranger = await behind(world, "bert", carrier), await world.peer("stranger", listens=False)
        forged = certificate(stranger.identity, issuer=stranger.identity)
        with pytest.raises(DialError, match="no right to issue"):
            await soon(stranger.transport.dial_any(bert.identity.peer_id, [bert.address], forged))
        assert not carrier.transport.carrier._offers

    backend.run(scenario)


def test_circuits_of_one_peer_and_of_all_are_limited(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        peers = [await behind(world, name, carrier) for name in ("anna", "bert", "cleo", "dora")]
        limit(carrier, CarryLimits(circuits=6, circuits_of_peer=4))
        await peers[0].dial(peers[1])
        await peers[0].dial(peers[2])
        with pytest.raises(DialError, match="has 4 circuits"):
            await peers[0].dial(peers[3])
        await peers[1].dial(peers[2])
        with pytest.raises(DialError, match="will not carry more"):
            await peers[3].dial(peers[1])
        assert len(circuits(carrier)) == 6
        limit(carrier, CarryLimits(circuits_of_pair=2))
        with pytest.raises(DialError, match="the two peers have 2 circuits already"):
            await peers[0].dial(peers[1])
        limit(carrier, CarryLimits(circuits=0))
        with pytest.raises(DialError, match="will not carry more"):
            await peers[3].dial(peers[1])

    backend.run(scenario)


def test_a_circuit_that_nobody_meets_expires(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        limit(carrier, CarryLimits(offer_s=0.05))
        anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
        silent(bert, monkeypatch)
        with pytest.raises(DialError, match="did not come"):
            await anna.dial(bert)
        relay = carrier.transport.carrier
        assert not relay._offers and not relay.circuits and not relay._wishes

    backend.run(scenario)


def test_idle_circuits_end(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier, here, there = await carried(world)
        limit(carrier, CarryLimits(idle_s=0.01))
        carrier.transport.carrier._check_idle()
        await here.closed()
        await there.closed()
        assert not circuits(carrier)

    backend.run(scenario)


def test_a_circuit_inside_a_circuit_is_refused(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
        transport, shown = anna.transport, certificate(anna.identity)
        inner = await soon(transport.dialer.reach(bert.identity.peer_id, bert.address, shown))
        hello: ClientHandshake = transport.dialer.introduction(
            bert.identity.peer_id, inner, CARRY, bytes(16), shown
        )
        with pytest.raises(Refused) as caught:
            await soon(introduce(inner, hello))
        assert caught.value.kind == errors.CARRIER
        inner.transport.abort()

    backend.run(scenario)


def test_a_carrier_that_is_gone_is_no_sign_that_the_peer_is(backend: Backend) -> None:
    """Its leader would remove a member at whose only address nobody listens any more."""

    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        anna, bert = await world.peer("anna"), await behind(world, "bert", carrier)
        await carrier.transport.close()
        with pytest.raises(DialError, match="cannot reach") as failed:
            await anna.dial(bert)
        assert failed.value.__cause__ is None

    backend.run(scenario)


def test_a_carried_peer_can_offer_no_circuit(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        _, here, there = await carried(world)
        there.link._queue_control((offer_frame(bytes(TOKEN_BYTES)),))
        assert "there is no frame of kind 6" in await here.closed()
        assert here.link.broke_framing

    backend.run(scenario)


def test_offers_without_end_cost_a_peer_no_more_than_its_limit(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        bert = await behind(world, "bert", carrier)
        link = carrier.inboxes[0].link
        for number in range(1000):
            link.offer(number.to_bytes(TOKEN_BYTES, "big"))
        link.send(b"after all of them")
        transport = bert.transport
        await until(lambda: sum(transport.refusals.values()) == 1000 and not transport.listener.pending)
        assert transport.refusals[errors.BUSY] >= 1000 - transport.end.limits.attempts_burst
        assert not carrier.transport.carrier.circuits

    backend.run(scenario)


def silent(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a peer come for no circuit."""
    monkeypatch.setattr(peer.transport.listener, "_begin", lambda *_: True)


def test_openers_that_wait_take_no_place_of_a_handshake(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Circuits that nobody meets are no pending handshakes, or two addresses could keep all others out."""

    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier", limits=Limits(max_pending_of_host=2))
        anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
        silent(bert, monkeypatch)
        limit(carrier, CarryLimits(offer_s=60.0))
        dials = []
        for number in range(4):
            dials.append(asyncio.ensure_future(anna.dial(bert)))
            await until(lambda number=number: len(carrier.transport.carrier._offers) > number)  # type: ignore
        cleo = await world.peer("cleo", listens=False)
        await cleo.dial(carrier)
        for dial in dials:
            dial.cancel()
        await until(lambda: not carrier.transport.carrier._wishes)

    backend.run(scenario)


def test_a_circuit_ends_at_once_when_its_opener_leaves_before_it_is_met(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
        silent(bert, monkeypatch)
        limit(carrier, CarryLimits(offer_s=PATIENCE_S))
        relay = carrier.transport.carrier
        dial = asyncio.ensure_future(anna.dial(bert))
        await until(lambda: bool(relay._offers))
        dial.cancel()
        await until(lambda: not relay._offers and not relay._wishes)
        assert not relay.circuits

    backend.run(scenario)


def test_a_target_that_comes_as_the_opener_leaves_is_let_go(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
        relay, far = carrier.transport.carrier, []

        async def meet(lane: Lane, hello: Hello) -> None:
            wish = relay._offers[hello.link_id]
            await honest(lane, hello)
            far.append(lane)
            wish.near.transport.abort()
            await until(wish.near.lost.done)

        honest = relay.meet
        relay.meet = meet  # type: ignore[method-assign]
        with pytest.raises(DialError):
            await anna.dial(bert)
        await until(lambda: bool(far) and far[0].lost.done())
        assert not relay.circuits

    backend.run(scenario)


async def opened(world: World, carrier: Peer, name: str, target: Peer, credential: Credential) -> None:
    """Link of a new peer to `target` through the carrier, with this credential."""
    peer = await world.peer(name, listens=False)
    await peer.dial(target, credential)


def test_guests_give_way_to_members(backend: Backend) -> None:
    """Keys that one ticket makes without end cannot take a carrier, or a target, from members."""

    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        bert = await behind(world, "bert", carrier)
        limit(carrier, CarryLimits(circuits_of_peer=4))
        for number in range(2):
            await opened(world, carrier, f"guest {number}", bert, ticket())
        with pytest.raises(DialError, match="has 4 circuits"):
            await opened(world, carrier, "guest 2", bert, ticket())
        anna = await behind(world, "anna", carrier)
        there = len(bert.inboxes)
        (await anna.dial(bert)).link.send(b"a member's")
        await (await bert.incoming(there)).count(1)
        limit(carrier, CarryLimits(circuits=4))
        cleo = await behind(world, "cleo", carrier)
        await cleo.dial(bert)
        with pytest.raises(DialError, match="will not carry more"):
            await (await behind(world, "dora", carrier)).dial(bert)
        assert all(not circuit.opener.guest for circuit in circuits(carrier))

    backend.run(scenario)


def full_relay(*openers: Opener) -> tuple[Carrier, Lane]:
    """Carrier that is full of members' circuits to each other, as many of each opener, and a connection."""
    relay = Carrier(CarryLimits(), lambda peer: cast(Link, SimpleNamespace()))
    lane = cast(Lane, SimpleNamespace(transport=SimpleNamespace(abort=lambda: None)))
    count = len(openers)
    for circuit in range(relay.limits.circuits):
        near, step = circuit % count, 1 + circuit // count % (count - 1)
        wish = _Wish(openers[near], lane, cast("asyncio.Future[Lane]", None))
        relay._check_opener(wish)
        wish.target = openers[(near + step) % count].peer
        asyncio.run(relay._check_target(wish))
        relay._wishes.add(wish)
    assert len(relay._wishes) == relay.limits.circuits
    return relay, lane


def takes(relay: Carrier, lane: Lane, opener: Opener) -> bool:
    """True if a full carrier takes one more circuit of this opener, and then as many as before are there."""
    wish = _Wish(opener, lane, cast("asyncio.Future[Lane]", None))
    try:
        relay._check_opener(wish)
    except Refused as error:
        assert "will not carry more" in str(error)
        return False
    relay._wishes.add(wish)
    assert len(relay._wishes) == relay.limits.circuits
    return True


BLOCK, OTHER_BLOCK = "203.0.113.0/24", "198.51.100.0/24"


def test_eight_members_leave_a_place_for_a_ninth() -> None:
    """They opened circuits to each other, 64 of each, which is all that a carrier forwards. Those of one
    ticket give way to another ticket, and to another address block."""
    eight = [Opener(f"member {number}", False, BLOCK, "ticket") for number in range(8)]
    for block, key in ((OTHER_BLOCK, "ticket"), (BLOCK, "other ticket"), (BLOCK, "")):
        relay, lane = full_relay(*eight)
        ninth = Opener("ninth", False, block, key)
        assert [takes(relay, lane, ninth) for _ in range(32)] == [True] * 32
        assert not takes(relay, lane, eight[0]) and takes(relay, lane, ninth)
    relay, lane = full_relay(*eight)
    assert not takes(relay, lane, Opener("ninth", False, BLOCK, "ticket"))
    assert not takes(relay, lane, Opener("guest", True, OTHER_BLOCK, "other ticket"))


def test_a_ticket_with_many_address_blocks_takes_no_more_than_its_share_of_a_carrier() -> None:
    honest = [Opener(f"honest {number}", False, f"198.51.{number}.0/24", "honest") for number in range(8)]
    relay, lane = full_relay(*honest)
    for number in range(300):
        takes(relay, lane, Opener(f"seat {number}", False, f"203.0.{number}.0/24", "liar's"))
    of_ticket = Counter(wish.opener.ticket for wish in relay._wishes)
    assert of_ticket["honest"] >= relay.limits.circuits // 2 - 1
    assert max(Counter(wish.opener.peer for wish in relay._wishes).values()) <= 17  # all lose alike


def test_many_keys_of_one_address_block_are_worth_no_more_than_another_block() -> None:
    relay = Carrier(CarryLimits(circuits=4), lambda peer: None)
    ended: list[str] = []

    def wish(name: str, block: str) -> _Wish:
        transport = SimpleNamespace(abort=lambda: ended.append(name))
        lane = SimpleNamespace(transport=transport)
        return _Wish(Opener(name, True, block), lane, None)  # type: ignore[arg-type]

    for number in range(4):
        relay._wishes.add(wish(f"sybil {number}", "203.0.113.0/24"))
    relay._check_opener(first := wish("first", "198.51.100.0/24"))
    assert len(ended) == 1
    relay._wishes.add(first)
    relay._check_opener(second := wish("second", "198.51.100.0/24"))
    relay._wishes.add(second)
    with pytest.raises(Refused, match="will not carry more"):
        relay._check_opener(wish("third", "198.51.100.0/24"))
    with pytest.raises(Refused, match="will not carry more"):
        relay._check_opener(wish("sybil 4", "203.0.113.0/24"))
    assert len(ended) == 2 and all(name.startswith("sybil") for name in ended)


def test_a_carrier_that_lets_only_the_first_connection_pass_is_passed_by(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, the first carrier in the list could keep two peers apart for ever."""

    async def scenario(world: World) -> None:
        bad, good = await world.peer("bad"), await world.peer("good")
        anna, bert = await behind(world, "anna", bad), await behind(world, "bert", bad)
        seen = len(good.inboxes)
        await bert.dial(good)
        await good.incoming(seen)
        honest = bad.transport.carrier.carry

        async def carry(near: Lane, opener: Opener) -> None:
            if circuits(bad):
                raise Refused(errors.CARRIER, "no more")
            await honest(near, opener)

        bad.transport.carrier.carry = carry  # type: ignore[method-assign]
        ways = [Address(p.host, p.port, p.identity.peer_id) for p in (bad, good)]
        link = await soon(anna.transport.dial_any(bert.identity.peer_id, ways, certificate(anna.identity)))
        assert link.way.via == good.identity.peer_id

    backend.run(scenario)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("honest", [0, 1])
def test_a_carrier_that_accepts_circuits_and_forwards_nothing_is_passed_by(
    backend: Backend, honest: int
) -> None:
    """From the first circuit on it costs a moment, as the next address is tried; from the second on, which is
    to be the link's other connection, the time for a handshake."""

    async def scenario(world: World) -> None:
        bad, good = await world.peer("bad"), await world.peer("good")
        anna = await world.peer("anna", listens=False, limits=Limits(handshake_timeout_s=2.0))
        bert = await behind(world, "bert", bad)
        await bert.dial(good)
        relay, connect = bad.transport.carrier, bad.transport.carrier._connect
        connected: list[Circuit] = []

        def swallow(circuit: Circuit) -> None:
            connected.append(circuit)
            if len(connected) > honest:
                for lane in (circuit.near, circuit.far):
                    lane._forwarded = lambda other, count: None  # type: ignore[method-assign]
            connect(circuit)

        relay._connect = swallow  # type: ignore[method-assign]
        ways = [Address(p.host, p.port, p.identity.peer_id) for p in (bad, good)]
        link = await soon(anna.transport.dial_any(bert.identity.peer_id, ways, certificate(anna.identity)))
        assert link.way.via == good.identity.peer_id and len(connected) == honest + 1
        here, there = Inbox(link).start(), await bert.incoming()
        here.link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
        await there.count(1)
        await until(lambda: not circuits(bad))

    backend.run(scenario)


def test_a_reader_that_stops_costs_a_carrier_little_memory_and_ends_with_its_circuit(
    backend: Backend,
) -> None:
    """Buffers of a carrier for a circuit are bounded, also while one end sends and the other reads not."""

    async def scenario(world: World) -> None:
        carrier, here, there = await carried(world)
        there.link.bulk.pause_reading()
        for _ in range(24):
            here.link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
        await until(
            lambda: any("full" in lane._read_pauses for c in circuits(carrier) for lane in (c.near, c.far))
        )
        held = [
            lane.transport.get_write_buffer_size() + len(lane._inbox) + len(lane._buffer)
            for c in circuits(carrier)
            for lane in (c.near, c.far)
        ]
        assert max(held) < 1 << 20 and sum(held) < 2 << 20, held
        lanes = [lane for c in circuits(carrier) for lane in (c.near, c.far)]
        here.link.abort()
        await until(lambda: all(lane.lost.done() for lane in lanes))
        assert not circuits(carrier)

    backend.run(scenario)


def flip(data: bytes) -> list[bytes]:
    return [data[:-1] + bytes((data[-1] ^ 1,))]


def replay(data: bytes) -> list[bytes]:
    return [data, data]


def cut(data: bytes) -> list[bytes]:
    return [data[: len(data) // 2]]


@pytest.mark.parametrize("alter", [flip, replay, cut])
def test_a_carrier_that_alters_bytes_breaks_the_link_and_nothing_else(
    backend: Backend, alter: Callable[[bytes], list[bytes]]
) -> None:
    async def scenario(world: World) -> None:
        carrier, here, there = await carried(world)
        here.link.send(b"before")
        await there.count(1)

        def forwarded(lane: Lane, other: Lane, count: int) -> None:
            other.write(alter(bytes(lane._buffer[:count])))

        for circuit in circuits(carrier):
            for lane in (circuit.near, circuit.far):
                lane._forwarded = lambda other, count, lane=lane: forwarded(lane, other, count)  # type: ignore
        for number in range(50):
            here.link.send(b"after %d" % number)
            here.link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
        await there.closed()
        await here.closed()
        assert there.messages == [b"before"]

    backend.run(scenario)


def test_a_carrier_that_looks_on_reads_nothing(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier, here, there = await carried(world)
        seen = bytearray()

        def forwarded(lane: Lane, other: Lane, count: int) -> None:
            seen.extend(lane._buffer[:count])
            honest(lane, other, count)

        honest = Lane._forwarded
        for circuit in circuits(carrier):
            for lane in (circuit.near, circuit.far):
                lane._forwarded = lambda other, count, lane=lane: forwarded(lane, other, count)  # type: ignore
        here.link.send(b"a secret of sixteen bytes and more", Blob("uint8", (len(BODY),), BODY))
        there.link.send(b"another secret of the other end", None)
        await there.count(1)
        await here.count(1)
        assert len(seen) > len(BODY)
        assert b"secret" not in seen and all(BODY[at : at + 16] not in seen for at in range(0, 256, 16))

    backend.run(scenario)


def test_a_carrier_in_the_middle_cannot_take_the_place_of_a_peer(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
        mallory = await behind(world, "mallory", carrier)
        relay, link_of = carrier.transport.carrier, carrier.transport.links.dialled_by

        async def divert(near: Lane, opener: object) -> None:
            near._inbox[:TARGET_BYTES] = bytes.fromhex(mallory.identity.peer_id)

        honest = relay.carry

        async def carry(near: Lane, opener: object) -> None:
            await until(lambda: len(near._inbox) >= TARGET_BYTES)
            await divert(near, opener)
            await honest(near, opener)  # type: ignore[arg-type]

        relay.carry = carry  # type: ignore[method-assign,assignment]
        assert isinstance(link_of(mallory.identity.peer_id), Link)
        with pytest.raises(Refused) as caught:
            await anna.dial(bert)
        assert caught.value.kind == errors.SERVER_KEY
        assert not mallory.inboxes and not bert.inboxes

    backend.run(scenario)


def test_a_cap_pauses_the_circuits_of_a_carrier(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        transport = carrier.transport
        transport.carrier = transport.listener.carrier = type(transport.carrier)(
            CarryLimits(bytes_per_s=8 * len(BODY)), transport.links.dialled_by
        )
        anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
        here = await anna.dial(bert)
        there = await bert.incoming()
        paused = False
        for _ in range(4):
            here.link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
        while len(there.received) < 4:
            paused = paused or any("rate" in c.near._read_pauses for c in circuits(carrier))
            await asyncio.sleep(0.002)
        assert paused and all(bytes(blob.data) == BODY for _, blob in there.received if blob)

    backend.run(scenario)


def test_two_peers_that_open_circuits_to_each_other_are_linked(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        carrier = await world.peer("carrier")
        anna, bert = await behind(world, "anna", carrier), await behind(world, "bert", carrier)
        here, there = await asyncio.gather(anna.dial(bert), bert.dial(anna))
        assert here.link.way.via == there.link.way.via == carrier.identity.peer_id
        here.link.send(b"a")
        there.link.send(b"b")
        await (await bert.incoming()).count(1)
        await (await anna.incoming()).count(1)
        assert len(circuits(carrier)) == 4

    backend.run(scenario)
