"""Names that stand for several addresses: a machine whose IPv6 leads nowhere reaches the IPv4 one in time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from anabranch.addresses import MOST_ADDRESSES, Address
from anabranch.net import address_race
from anabranch.net.address_race import resolved
from anabranch.net.errors import DialError
from support.network.net_world import Backend, Inbox, Peer, World, backends, certificate, soon

NAME = "leader.example"
pytestmark = pytest.mark.skipif(sys.platform != "linux" or not socket.has_ipv6, reason="needs Linux and IPv6")


@pytest.fixture(params=backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.param
    assert isinstance(found, Backend)
    return found


@contextlib.contextmanager
def black_hole() -> Iterator[tuple[str, int]]:
    """IPv6 address that answers nothing: Linux drops connections to a listener whose queue is full."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=0) as listener:
        where = listener.getsockname()[:2]
        with contextlib.ExitStack() as waiting:
            for _ in range(3):
                one = waiting.enter_context(socket.socket(socket.AF_INET6))
                one.setblocking(False)
                one.connect_ex(where)
            yield where


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def stands_for(monkeypatch: pytest.MonkeyPatch, *places: tuple[str, int]) -> None:
    """Let NAME stand for these addresses, in this order, also where the loop asks the system by itself."""
    honest = socket.getaddrinfo

    def found(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host != NAME:
            return honest(host, port, *args, **kwargs)
        return [each for place in places for each in honest(*place, type=socket.SOCK_STREAM)]

    async def asked(loop: object, host: Any, port: Any, **kwargs: Any) -> Any:
        return found(host, port, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with contextlib.suppress(ImportError):
        import uvloop

        monkeypatch.setattr(uvloop.Loop, "getaddrinfo", asked)


async def dialled(world: World, anna: Peer, bert: Peer) -> Inbox:
    name = [Address(NAME, bert.port)]
    link = await soon(anna.transport.dial_any(bert.identity.peer_id, name, certificate(anna.identity)))
    return Inbox(link).start()


@pytest.mark.costly(stay=1)
def test_the_second_address_of_a_name_is_tried_while_the_first_is_silent(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        with black_hole() as hole:
            stands_for(monkeypatch, hole, (bert.host, bert.port))
            (await dialled(world, anna, bert)).link.send(b"by IPv4")
            await (await bert.incoming()).count(1)

    backend.run(scenario)


@pytest.mark.costly(stay=1)
def test_ip_versions_take_turns(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen silent addresses of IPv6 before the first of IPv4 would use up the time of a dial."""

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        with contextlib.ExitStack() as stack:
            holes = [stack.enter_context(black_hole()) for _ in range(50)]
            stands_for(monkeypatch, *holes, (bert.host, bert.port))
            await dialled(world, anna, bert)
            await bert.incoming()

    backend.run(scenario)


def test_an_error_tells_each_address_of_a_name(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody listens at any, the cause says so: whoever dialled need not wait for a timeout."""

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        ports = closed_port(), closed_port()
        stands_for(monkeypatch, ("::1", ports[0]), ("127.0.0.1", ports[1]))
        with pytest.raises(DialError) as caught:
            await dialled(world, anna, bert)
        told = str(caught.value)
        assert told.startswith(f"cannot reach {NAME}:{bert.port} (") and "[::1]" in told
        assert "127.0.0.1" in told
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    backend.run(scenario)


def test_a_name_makes_this_machine_dial_few_addresses(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joiner's name may stand for a thousand addresses of others, which each member would dial (I7)."""

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        stands_for(monkeypatch, *[("127.0.0.1", closed_port()) for _ in range(40)])
        with pytest.raises(DialError) as caught:
            await dialled(world, anna, bert)
        assert str(caught.value).count("127.0.0.1:") == MOST_ADDRESSES

    backend.run(scenario)


@pytest.mark.costly(stay=1)
def test_names_whose_servers_never_answer_do_not_keep_others_waiting(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joiner names eight such addresses at a time, and an event loop looked up four or six (I4)."""
    answers, honest = threading.Event(), socket.getaddrinfo

    def found(host: Any, *args: Any, **kwargs: Any) -> Any:
        if str(host).endswith(".slow"):
            answers.wait(60.0)
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return honest("127.0.0.1" if host == NAME else host, *args, **kwargs)

    async def scenario(world: World) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: _as_name(found, *args, **kwargs))
            slow = [asyncio.ensure_future(resolved(f"{k}.slow", 1, socket.SOCK_STREAM)) for k in range(128)]
            await asyncio.sleep(0.01)
            ends = await asyncio.wait_for(resolved(NAME, 1, socket.SOCK_STREAM), 20.0)
            assert ends[0][4] == ("127.0.0.1", 1) and not any(each.done() for each in slow)
            monkeypatch.setattr(address_race, "_free", threading.BoundedSemaphore(1))
            more = asyncio.ensure_future(resolved("one.slow", 1, socket.SOCK_STREAM))
            await asyncio.sleep(0.01)
            with pytest.raises(OSError, match="too many names"):
                await resolved(NAME, 1, socket.SOCK_STREAM)
            answers.set()
            told = await asyncio.gather(more, *slow, return_exceptions=True)
            assert all(isinstance(each, socket.gaierror) for each in told)

    backend.run(scenario)


def _as_name(found: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
    """Look-up of a name, which is no numeric address."""
    if kwargs.get("flags") == socket.AI_NUMERICHOST:
        raise socket.gaierror(-2, "Name or service not known")
    return found(host, *args, **kwargs)
