"""A link through a carrier is replaced by a direct one once the peer can be dialled."""

from __future__ import annotations

import asyncio

import pytest

from anabranch.node.driver.connections import Connections
from anabranch.protocol.interface import events as ev
from support.network.net_world import Backend, Peer, World, certificate, circuit_backends, until

pytestmark = pytest.mark.skipif(not circuit_backends(), reason="circuits need Python 3.11 or uvloop")


@pytest.fixture(params=circuit_backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


class End:
    """Links of a peer of a small world, without a protocol behind them."""

    def __init__(self, peer: Peer) -> None:
        self.peer, self.got = peer, list[ev.Event]()
        self.links = Connections(peer.transport, self.got.append, certificate(peer.identity))
        peer.transport.listener._on_link = self.links.accept

    def way(self, other: End) -> str:
        """Carrier of the open link to another peer ("": direct); "none": there is no link."""
        link = self.links._links.get(other.peer.identity.peer_id)
        return "none" if link is None else link.way.via

    def ends(self) -> list[ev.LinkDown]:
        return [event for event in self.got if isinstance(event, ev.LinkDown)]

    async def dial(self, other: End, address: str) -> None:
        """Dial, and wait until the dial has succeeded or failed."""
        self.links.dial(other.peer.identity.peer_id, address)
        await until(lambda: not self.links._dialling and not self.links._direct)


async def carried(world: World) -> tuple[End, End, str]:
    """Two peers whose link a carrier forwards, and the address of the second one at the carrier."""
    carrier, near = await world.peer("carrier"), End(await world.peer("near"))
    far = End(await world.peer("far"))
    await far.peer.dial(carrier)
    way = f"{carrier.host}:{carrier.port}/{carrier.identity.peer_id}"
    await near.dial(far, way)
    await until(lambda: far.way(near) != "none")
    assert near.way(far) == far.way(near) == carrier.identity.peer_id
    return near, far, way


def test_a_peer_that_answers_directly_is_carried_no_longer(backend: Backend) -> None:
    """Both ends have the direct link, and are told of the change once."""

    async def scenario(world: World) -> None:
        near, far, _ = await carried(world)
        await near.dial(far, f"{far.peer.host}:{far.peer.port}")
        await until(lambda: near.way(far) == far.way(near) == "")
        for end in (near, far):
            kinds = [type(event) for event in end.got]
            assert kinds == [ev.LinkUp, ev.LinkDown, ev.LinkUp]
        assert near.links._links[far.peer.identity.peer_id].closed_reason is None

    backend.run(scenario)


def test_a_try_in_vain_leaves_the_carried_link_alone(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        near, far, _ = await carried(world)
        via = near.way(far)
        await near.dial(far, "127.0.0.1:1")
        assert near.way(far) == far.way(near) == via and not near.ends() and not far.ends()

    backend.run(scenario)


def test_neither_a_carried_nor_a_direct_link_is_replaced_by_a_carried_one(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        near, far, way = await carried(world)
        first = near.links._links[far.peer.identity.peer_id]
        await near.dial(far, way)
        assert near.links._links[far.peer.identity.peer_id] is first and not near.ends()
        await near.dial(far, f"{far.peer.host}:{far.peer.port}")
        direct = near.links._links[far.peer.identity.peer_id]
        assert direct is not first
        for address in (way, f"{far.peer.host}:{far.peer.port}"):
            await near.dial(far, address)
        assert near.links._links[far.peer.identity.peer_id] is direct and not direct.way.via

    backend.run(scenario)


@pytest.mark.costly(stay=1)
def test_a_direct_try_does_not_hold_up_a_dial_through_a_carrier(backend: Backend) -> None:
    """The own address is behind a firewall, and the carried link breaks while it is tried."""

    async def scenario(world: World) -> None:
        near, far, way = await carried(world)
        there, silent = far.peer.identity.peer_id, list[asyncio.StreamReader]()
        wall = await asyncio.start_server(lambda reader, writer: silent.append(reader), "127.0.0.1", 0)
        port = wall.sockets[0].getsockname()[1]
        near.links.dial(there, f"127.0.0.1:{port}")
        await until(lambda: bool(silent))
        near.links.hang_up(there, "it is silent")
        near.links.dial(there, f"127.0.0.1:{port},{way}")
        assert not near.links._direct and near.links._dialling
        await until(lambda: near.way(far) == far.way(near) == way.rpartition("/")[2])
        wall.close()

    backend.run(scenario)


def test_the_refusal_of_a_direct_try_is_not_told(backend: Backend) -> None:
    """The carried link breaks while the own address is tried: the member would be removed as one at whose
    address nobody listens any more."""

    async def scenario(world: World) -> None:
        near, far, _ = await carried(world)
        there = far.peer.identity.peer_id
        near.links.dial(there, "127.0.0.1:1")
        near.links.hang_up(there, "it is silent")
        await until(lambda: not near.links._dialling and not near.links._direct)
        assert not near.ends()

    backend.run(scenario)
