"""Each address of a peer is tried, and what fails is told with address, step and repair."""

from __future__ import annotations

import socket

import pytest

from anabranch.addresses import Address
from anabranch.net import errors
from anabranch.net.connection_limits import Limits
from anabranch.net.errors import DialError, Refused
from anabranch.net.iroh.engine import installed
from anabranch.net.tcp.ways import Attempt, attempts, repair_of, told, way_of
from support.network.net_world import (
    Backend,
    World,
    certificate,
    circuit_backends,
    iroh_backends,
    soon,
)

BACKENDS = circuit_backends()


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_address_has_its_way_or_its_reason(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        anna = await world.peer("anna", limits=Limits(handshake_timeout_s=2.0))
        bert, carl, carrier = [await world.peer(name) for name in ("bert", "carl", "carrier")]
        await soon(bert.dial(carrier, certificate(bert.identity)))
        there, middle = bert.identity.peer_id, carrier.identity.peer_id
        with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            addresses = [
                bert.address,
                Address(carrier.host, carrier.port, middle),
                carl.address,
                Address(*closed.getsockname()),
                Address(*silent.getsockname()),
                Address(*closed.getsockname(), middle),
                Address(carl.host, carl.port, middle),
                Address("127.0.0.1", 9, kind="udp"),
                Address("no.such.host.invalid", 7700),
            ]
            found = await soon(attempts(anna.transport, there, addresses, certificate(anna.identity)))
        assert [each.address for each in found] == addresses
        assert [each.how for each in found[:2]] == [
            f"directly, at {bert.address.where}",
            f"through carrier {middle[:8]} at {carrier.address.where}",
        ]
        for attempt, reason, repair in zip(
            found[2:],
            (
                f"another peer answers at {carl.address}",
                f"cannot reach {addresses[3]} (TCP connection): Connection refused",
                f"{addresses[4]} did not answer within 2 s (TLS)",
                f"cannot reach the carrier at {addresses[5].where} (TCP connection): ",
                f"the carrier at {carl.address.where}: another peer answers",
                "iroh is not in use here",
                "(name of the host)",
            ),
            ("proxy", "nothing listens", "another program", "nothing listens", "proxy", "UDP", "name"),
            strict=True,
        ):
            assert not attempt.how and reason in attempt.reason, attempt
            assert repair in attempt.repair, attempt
        sentence = told(found)
        assert sentence.startswith(f"directly, at {bert.address.where} (") and carl.address.where in sentence
        nobody = await soon(
            attempts(anna.transport, carl.identity.peer_id, addresses[1:2], certificate(anna.identity))
        )
        assert "the peer to reach has not connected to it" in nobody[0].reason
        assert "check that the peer runs" in nobody[0].repair
        assert not bert.inboxes and not carl.inboxes, "a way is tried without a link"

    backend.run(scenario)


@pytest.mark.slow
@pytest.mark.skipif(not installed(), reason="iroh is not installed")
@pytest.mark.parametrize("backend", iroh_backends()[:1], ids=lambda backend: backend.name)
def test_a_way_through_iroh_is_told_with_the_path_that_it_found(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        anna, bert, carl = [await world.peer(name) for name in ("anna", "bert", "carl")]
        shown = certificate(anna.identity)
        at = bert.address
        [found] = await soon(attempts(anna.transport, bert.identity.peer_id, [at], shown))
        assert found.how == f"through iroh, at 127.0.0.1:{at.port}", found
        [other] = await soon(attempts(anna.transport, carl.identity.peer_id, [at], shown))
        assert not other.how and other.repair, other

    backend.run(scenario)


def test_a_repair_follows_from_the_refusal_or_the_step() -> None:
    assert "new ticket" in repair_of(Refused(errors.EXPIRED, "late"))
    assert "release" in repair_of(Refused(errors.VERSION, "other"))
    assert "443" in repair_of(DialError("silence", errors.TCP))
    assert repair_of(Refused(errors.LANE, "odd")) == repair_of(DialError("all of several")) == ""
    assert told([]) == "it has named no address"
    failed = Attempt(Address("a", 1), "", 0.0, "why")
    assert told([failed]) == "not at a:1: why"
    assert way_of(Address("a", 1, kind="iroh")) == "through iroh (a:1)"
