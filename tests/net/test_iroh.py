"""Links through iroh: its process, the relay, the path of a connection, and the identity end to end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from anabranch.addresses import Address, carrier_ways, direct_addresses, host_port, parse_address
from anabranch.config import ConfigError, RunConfig, with_changes
from anabranch.errors import UserError
from anabranch.net import errors
from anabranch.net.errors import DialError, ListenError, Refused
from anabranch.net.framing import Blob
from anabranch.net.iroh import engine as iroh_engine
from anabranch.net.iroh.engine import IrohEngine, installed
from anabranch.node.driver.connections import _credential
from anabranch.node.lifecycle.addresses import relay_address, relay_of, started_engine
from support.network.iroh_relay import Relay
from support.network.net_world import Backend, World, certificate, identity, iroh_backends, soon, until

BODY = bytes(range(256)) * 4096
#: An iroh relay that nobody runs: peers find each other by their UDP addresses alone.
NO_RELAY = Address("127.0.0.1", 9, kind="iroh+http")
needs_iroh = pytest.mark.skipif(not installed(), reason="iroh is not installed")
BACKENDS = [pytest.param(each, marks=[pytest.mark.slow, needs_iroh]) for each in iroh_backends()[:1]]


def test_addresses_through_iroh_are_no_carriers() -> None:
    carrier = "ab" * 32
    text = f"a:1,b:2/{carrier},c:3/iroh,d:4/iroh+http,5.6.7.8:9/udp"
    parsed = [parse_address(one) for one in text.split(",")]
    assert ",".join(map(str, parsed)) == text
    assert direct_addresses(text) == "a:1" and carrier_ways(text) == [f"b:2/{carrier}"]
    assert [one.relay_url for one in parsed] == ["", "", "https://c:3", "http://d:4", ""]
    assert relay_of(text) == parsed[2] and relay_of("a:1") is None
    for url in ("https://c:3", "http://d:4"):
        assert relay_address(url).relay_url == url
    assert relay_address("https://relay.my.host") == Address("relay.my.host", 443, kind="iroh")


def test_a_run_that_uses_iroh_names_a_relay() -> None:
    with pytest.raises(ConfigError, match=r"network\.iroh_relay"):
        with_changes(RunConfig(), {"network.transport": "auto"})
    with_changes(RunConfig(), {"network.transport": "iroh", "network.iroh_relay": "https://relay.my.host"})


def test_without_iroh_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iroh_engine, "installed", lambda: False)
    with pytest.raises(ListenError, match=r"anabranch\[iroh\]"):
        asyncio.run(IrohEngine(identity("anna")).start())


@pytest.mark.costly
@pytest.mark.parametrize("backend", BACKENDS)
def test_links_break_with_the_process_of_iroh_and_come_back(backend: Backend) -> None:
    async def scenario(world: World) -> None:
        here, there = await world.pair()
        anna, bert = world._peers
        assert here.link.way.iroh and there.link.way.iroh
        engine = bert.transport.engine
        assert engine is not None and engine._process is not None
        os.kill(engine._process.pid, signal.SIGKILL)
        await there.closed()
        await until(lambda: engine._process is not None and bool(engine.sockets))
        await here.closed()
        while True:
            try:
                again = await anna.dial(bert)
                break
            except DialError:
                await asyncio.sleep(0.1)
        again.link.send(b"again")
        await (await bert.incoming(1)).count(1)

    backend.run(scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_peers_meet_at_a_relay_and_go_on_without_it(backend: Backend) -> None:
    """The relay forwards the first bytes; then the connection moves to a direct path, which is reported."""

    async def scenario(world: World) -> None:
        relay = Relay()
        server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        anna, bert = await world.peer("anna"), await world.peer("bert")
        paths: dict[str, str] = {}
        for peer in (anna, bert):
            engine = IrohEngine(peer.identity, [f"http://127.0.0.1:{port}"])
            await engine.start()
            assert peer.transport.engine is not None
            await peer.transport.engine.close()
            peer.transport.engine = peer.transport.end.engine = engine
            engine.on_incoming = peer.transport.listener.take_iroh
        assert anna.transport.engine is not None
        anna.transport.engine.on_path = paths.__setitem__
        await until(lambda: len(relay.clients) == 2)
        where = [Address("127.0.0.1", port, kind="iroh+http")]
        link = await soon(anna.transport.dial_any(bert.identity.peer_id, where, certificate(anna.identity)))
        link.start(lambda message, blob: None, lambda reason: None)
        await until(lambda: paths.get(bert.identity.peer_id, "relay") != "relay")
        assert relay.forwarded
        before = relay.forwarded
        link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
        await (await bert.incoming()).count(1)
        assert relay.forwarded - before < len(BODY)
        server.close()

    backend.run(scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_process_of_the_machine_cannot_speak_for_a_peer(backend: Backend) -> None:
    """The local port takes connections with the secret only, and the key is proved inside in any case."""

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        engine = bert.transport.engine
        assert engine is not None and engine._listener is not None
        taken: list[object] = []
        honest = engine.on_incoming
        engine.on_incoming = lambda *each: (taken.append(each), honest(*each))  # type: ignore[func-returns-value]
        reader, writer = await asyncio.open_connection(*engine._listener.getsockname())
        writer.write(iroh_engine.parse.__name__.encode().ljust(iroh_engine.HEADER_BYTES))
        assert await soon(reader.read(1)) == b"" and not taken
        writer.close()
        with pytest.raises((Refused, DialError)) as caught:
            where = [bert.address]
            await soon(
                anna.transport.dial_any(identity("mallory").peer_id, where, certificate(anna.identity))
            )
        assert caught.value is not None and errors.SERVER_KEY

    backend.run(scenario)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_peer_through_iroh_is_banned_with_its_address_block(backend: Backend) -> None:
    """Its connection comes from this machine's process of iroh, so new keys of a banned stranger came in."""

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        engine, take = bert.transport.engine, bert.transport.listener.take_iroh
        assert engine is not None
        engine.on_incoming = lambda connection, peer, path: take(connection, peer, "192.0.2.7:99")
        await anna.dial(bert)
        there = (await bert.incoming()).link
        shown = _credential(there)
        assert shown is not None and shown.block == "192.0.2.0/24"
        engine.on_incoming = lambda connection, peer, path: take(connection, peer, "relay")
        await anna.dial(bert)
        shown = _credential((await bert.incoming(1)).link)
        assert shown is not None and not shown.block

    backend.run(scenario)


@pytest.mark.costly
@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stranger_holds_neither_descriptors_nor_connections(backend: Backend) -> None:
    """A thousand streams without a handshake, by eleven keys without a ticket, used up the descriptors of the
    process of iroh: nobody came to the peer through iroh any more, nor the peer to others (I5)."""

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        engine = bert.transport.engine
        assert engine is not None and engine._process is not None
        folder = Path(f"/proc/{engine._process.pid}/fd")
        before = len(list(folder.iterdir()))
        where = f"{bert.address.host}:{bert.address.port}"
        command = (sys.executable, "-m", "support.network.iroh_stranger")
        stranger = await asyncio.create_subprocess_exec(
            *(*command, bert.identity.peer_id, where, "3", "100"),
            cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=asyncio.subprocess.PIPE,
        )
        assert stranger.stdout is not None
        told: set[bytes] = set()
        while {b"closed 3", b"closed 4", b"ready"} - told:  # a stream of one direction, no stream
            told.add((await soon(stranger.stdout.readline())).strip())
        await until(lambda: len(list(folder.iterdir())) <= before + 3)
        link = await anna.dial(bert)
        link.link.send(b"still there")
        await (await bert.incoming()).count(1)
        stranger.kill()
        await stranger.wait()

    backend.run(scenario)


@pytest.mark.costly(stay=1)
@needs_iroh
@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_udp_address_is_of_either_ip_version_or_a_name(host: str) -> None:
    """The port that a user forwards, or opens in a firewall, is that of the socket of its IP version."""

    async def scenario(world: World) -> None:
        peers = []
        for name in ("anna", "bert"):
            peer = await world.peer(name)
            place = f"{host_port(host, free_udp_port())}/udp"
            engine = await started_engine(peer.identity, NO_RELAY, f"192.0.2.1:1,{place}", True, print)
            assert engine is not None and peer.transport.engine is not None
            await peer.transport.engine.close()
            peer.transport.engine = peer.transport.end.engine = engine
            engine.on_incoming = peer.transport.listener.take_iroh
            peers.append((peer, parse_address(place)))
        (anna, _), (bert, where) = peers
        link = await soon(anna.transport.dial_any(bert.identity.peer_id, [where], certificate(anna.identity)))
        link.start(lambda message, blob: None, lambda reason: None)
        link.send(b"by UDP")
        await (await bert.incoming()).count(1)

    iroh_backends()[0].run(scenario)


@needs_iroh
@pytest.mark.slow
def test_a_name_of_no_address_is_refused_with_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"my\.host:7701/udp: Name or service not known"):
        asyncio.run(started_engine(identity("anna"), NO_RELAY, "my.host:7701/udp", True, print))


def free_udp_port() -> int:
    """Port that is free in both IP versions."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("::", 0))
        return int(probe.getsockname()[1])
