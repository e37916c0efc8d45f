"""`anabranch doctor` finds what is wrong, and says what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.main import main
from anabranch.config import render_run_file
from anabranch.net.identity import Identity
from anabranch.net.ticket import PeerAddress, issue_ticket
from anabranch.node.diagnostics import doctor
from anabranch.node.diagnostics import reachability as reach
from anabranch.node.diagnostics.doctor import examine, speeds
from anabranch.node.diagnostics.link_test import (
    Greeting,
    LinkTestClient,
    LinkTestError,
    LinkTestServer,
    listening,
)
from support.local_swarms import small_run


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", *arguments])
    return status, {check["name"]: check for check in json.loads(capsys.readouterr().out)}


def test_each_stage_of_a_run_is_measured(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(render_run_file(small_run(texts)))
    told: list[str] = []
    found = list(speeds(small_run(texts), told.append))
    assert [result.name for result in found] == ["capacity", "stage 1", "stage 2"]
    assert told == [
        "measuring how many microbatches fit into memory",
        "measuring stages 1, 2 (2 blocks)",
    ], "stages that are alike are measured once"
    _, checks = examined(capsys, str(run_file))
    for stage in ("stage 1", "stage 2"):
        assert checks[stage]["verdict"] == "green" and "backward" in checks[stage]["found"]
    assert checks["Python"]["verdict"] == checks["torch"]["verdict"] == "green"


def test_all_that_may_take_long_is_named_before_it_begins() -> None:
    told: list[str] = []
    for _ in examine(None, Path.cwd(), "127.0.0.1", 0, ["127.0.0.1:1", "127.0.0.1:1/c0de"], told.append):
        pass
    assert told == ["importing torch", "dialling 127.0.0.1:1", "measuring the link to 127.0.0.1:1"]


def test_a_port_that_is_taken_and_a_peer_that_is_not_there_are_red(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken, there = f"--port={port}", f"127.0.0.1:{port}"
        status, checks = examined(
            capsys, taken, "--peer", there, "--peer", "nonsense", "--peer", "127.0.0.1:x"
        )
        assert status == 1 and checks["listening"]["verdict"] == "red"
        assert checks[f"peer {there}"]["verdict"] != "red"
    for name in (f"peer {there}", "peer nonsense", "peer 127.0.0.1:x"):
        _, checks = examined(capsys, "--peer", name.removeprefix("peer "))
        assert checks[name]["verdict"] == "red" and checks[name]["repair"]


@pytest.mark.parametrize("peer", ["localhost", "my.host:", ":7700", "my.host:http"])
def test_a_peer_that_is_no_address_is_told(peer: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, checks = examined(capsys, "--peer", peer)
    assert status == 1 and checks[f"peer {peer}"]["repair"] == "write it as HOST:PORT"


def test_no_way_to_the_peer_that_a_ticket_names_is_red(capsys: pytest.CaptureFixture[str]) -> None:
    """Something listens at one address, which is no peer; nobody at the other."""
    owner = Identity.generate()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        doors = [PeerAddress(owner.peer_id, "127.0.0.1", port), PeerAddress(owner.peer_id, "::1", 1)]
        words: dict[str, Any] = {"run": "x", "role": "relay", "peers": doors}
        ticket = issue_ticket(owner, expires_at_s=int(time.time()) + 60, **words)

        def hang_up() -> None:
            while True:
                server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        status, checks = examined(capsys, ticket.text)
    way = checks[f"way to {owner.peer_id[:8]}"]
    assert status == 1 and way["verdict"] == "red"
    assert way["found"].startswith("no way leads there; the run's data node: not at 127.0.0.1:")
    assert f"{port} (TLS)" in way["found"] and "[::1]:1 (TCP connection)" in way["found"]
    assert "another program has that port" in way["repair"] and "nothing listens there" in way["repair"]
    assert checks["run"]["verdict"] == "red" and "cannot be asked" in checks["run"]["found"]
    late = issue_ticket(owner, expires_at_s=int(time.time()) - 60, **words)
    assert main(["doctor", late.text]) == 2
    assert "the ticket expired" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "own", "verdict"),
    [
        ("127.0.0.1", "10.0.0.1", "yellow"),
        ("0.0.0.0", "10.0.0.1", "yellow"),
        ("0.0.0.0", "8.8.8.8", "green"),
        ("0.0.0.0", "", "red"),
        ("my.host", "8.8.8.8", "yellow"),
    ],
)
def test_whether_others_can_dial_is_judged_by_the_addresses(
    monkeypatch: pytest.MonkeyPatch, host: str, own: str, verdict: str
) -> None:
    def own_address(host: str, port: int) -> str:
        if not own:
            raise OSError("no network")
        return own

    monkeypatch.setattr(doctor, "own_address", own_address)
    assert doctor._reachability(host).verdict == verdict


@pytest.mark.parametrize(
    ("advertise", "wrong"),
    [
        ("", False),
        ("10.0.0.1:7700", False),
        ("192.168.1.10:7700", True),
        ("my.host:7700,192.168.1.10:7700", True),
        ("8.8.8.8:7700", False),
    ],
)
def test_a_private_address_that_is_not_this_machines_is_told(
    monkeypatch: pytest.MonkeyPatch, advertise: str, wrong: bool
) -> None:
    monkeypatch.setattr(doctor, "own_address", lambda host, port: "10.0.0.1")
    found = doctor._advertised(advertise, "0.0.0.0")
    assert (found is not None) == wrong
    if found is not None:
        assert "192.168.1.10 is no address of this machine, which has 10.0.0.1" in found.found


def test_a_machine_with_ipv6_alone_has_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_address(host: str, port: int) -> str:
        if ":" not in host:
            raise OSError("no network")
        return "2a00:1450::7"

    monkeypatch.setattr(doctor, "own_address", own_address)
    assert doctor._reachability("::").verdict == "green"
    refused = doctor._reachability("0.0.0.0")
    assert (refused.verdict, refused.repair) == ("red", "listen there: --host ::")


def test_little_room_is_doubtful_and_none_is_too_little() -> None:
    for found, verdict in ((1 << 40, "green"), (2 << 30, "yellow"), (1 << 20, "red")):
        check = doctor._amount("disk", found, doctor.DISK_BYTES, "free", "make room")
        assert (check.verdict, check.repair) == (verdict, "" if verdict == "green" else "make room")


@pytest.fixture
def answering() -> Iterator[str]:
    """HOST:PORT/CODE of a machine that answers."""
    with answers("127.0.0.1") as port:
        yield f"127.0.0.1:{port}/c0de"


@contextlib.contextmanager
def answers(host: str) -> Iterator[int]:
    """While this is entered, a machine answers at a port of `host` whoever knows the code."""
    started: queue.Queue[tuple[int, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def serve() -> None:
        machine, over = LinkTestServer("c0de"), asyncio.Event()
        started.put((await machine.start(host, 0), asyncio.get_running_loop(), over))
        await over.wait()
        await machine.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    port, loop, over = started.get(timeout=20)
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket of both IP versions")
def test_a_machine_answers_over_both_ip_versions() -> None:
    """It names IPv4 addresses as they are, not as mapped into IPv6, and dials them back."""
    with answers("::") as port, listening("::", 0) as server:
        for host in ("127.0.0.1", "::1"):
            far = LinkTestClient(host, port, "c0de")
            assert far.hello().host == host
            assert far.dials_back(server.getsockname()[1])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket of both IP versions")
def test_a_machine_that_answers_at_a_name_of_ipv6_alone_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = socket.getaddrinfo

    def found(host: Any, *args: Any, **kwargs: Any) -> Any:
        return honest("::1" if host == "six.example" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with answers("::1") as port:
        assert LinkTestClient("six.example", port, "c0de").hello().host == "::1"


def test_a_machine_that_answers_tells_of_the_link_the_clock_and_the_router(
    answering: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = answering.partition("/")[0]
    _, checks = examined(capsys, "--peer", answering)
    for way in ("up", "down"):
        assert checks[f"peer {address} {way}"]["found"].endswith("Mbit/s")
    assert "ms" in checks[f"peer {address}"]["found"]
    assert checks["clock against peers"]["verdict"] == "green"
    assert checks["NAT"]["verdict"] == "green" and checks["dialled back"]["verdict"] == "green"
    status, checks = examined(capsys, "--peer", f"{address}/wrong")
    assert status == 1 and "the code is wrong" in checks[f"peer {address}"]["found"]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert not LinkTestClient.parse(answering).dials_back(closed.getsockname()[1])


@pytest.mark.parametrize("peer", ["127.0.0.1/c0de", "127.0.0.1:no/c0de", "127.0.0.1:99999/c0de", "/c0de"])
def test_a_peer_with_a_code_that_has_no_port_is_red(peer: str) -> None:
    """It ended with a traceback."""
    checks = list(reach.remote_checks([peer], "127.0.0.1", 0))
    assert [check.verdict for check in checks] == ["red"] and "port" in checks[0].found.lower()


def test_it_closes_with_those_who_are_still_asking() -> None:
    """Clients: a silent one, one in the middle of its bytes, and one that does not read its answer."""

    async def asked_and_closed() -> None:
        before, asking = asyncio.all_tasks(), []
        machine = LinkTestServer("c0de")
        port = await machine.start("127.0.0.1", 0)
        for words in (b"", b"c0de up\n" + bytes(1000), b"c0de down\n"):
            asking.append(await asyncio.open_connection("127.0.0.1", port, limit=1))
            asking[-1][1].write(words)
        while len(asyncio.all_tasks() - before) < len(asking):
            await asyncio.sleep(0.01)
        await machine.close()
        assert asyncio.all_tasks() == before
        for reader, writer in asking:
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 16):
                    pass
            writer.close()

    asyncio.run(asyncio.wait_for(asked_and_closed(), 20))


def test_nonsense_is_not_answered_and_nonsense_answers_are_not_believed(answering: str) -> None:
    host, _, rest = answering.partition(":")
    port = int(rest.partition("/")[0])
    for words in (b"\n", b"\xff\xff\n", b"c0de\n", b"c0de dial x\n", b"c0de dial 99999999\n", b"x" * 70000):
        with socket.create_connection((host, port), timeout=20) as raw:
            raw.sendall(words)
            with contextlib.suppress(ConnectionResetError):
                assert raw.recv(100) in (b"", b"{}\n")
    with socket.create_server(("127.0.0.1", 0)) as liar:
        far = LinkTestClient("127.0.0.1", liar.getsockname()[1], "c0de")

        def lie() -> None:
            for said in (b"[1]\n", b'{"time": "x"}\n', b"\xff\n", b"\n" * 5000):
                connection, _ = liar.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(said)

        thread = threading.Thread(target=lie)
        thread.start()
        for _ in range(4):
            with pytest.raises(LinkTestError):
                far.hello()
        thread.join()


@pytest.mark.parametrize(
    ("sees", "ports", "words", "verdict"),
    [
        (["10.0.0.1"], [1], "none", "green"),
        (["203.0.113.9"], [1], "a second --peer", "yellow"),
        (["203.0.113.9", "203.0.113.9"], [7, 7], "endpoint-independent", "yellow"),
        (["203.0.113.9", "203.0.113.9"], [7, 8], "another port for each peer", "yellow"),
    ],
)
def test_the_kind_of_router_follows_from_what_others_see(
    monkeypatch: pytest.MonkeyPatch, sees: list[str], ports: list[int], words: str, verdict: str
) -> None:
    monkeypatch.setattr(reach, "own_address", lambda host, port: "10.0.0.1")
    seen = [
        (LinkTestClient(f"192.0.2.{at}", 1, "c"), Greeting(0.01, 0.0, host, 1))
        for at, host in enumerate(sees)
    ]
    told = {
        far.host: Greeting(0.01, 0.0, see.host, port) for (far, see), port in zip(seen, ports, strict=True)
    }
    monkeypatch.setattr(LinkTestClient, "hello", lambda far, own_port=0: told[far.host])
    check = reach._nat(seen)
    assert words in check.found and check.verdict == verdict


def test_a_machine_without_a_route_to_the_other_has_an_unknown_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended `doctor`, and the checks behind it were not made."""

    def no_route(host: str, port: int) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(reach, "own_address", no_route)
    check = reach._nat([(LinkTestClient("192.0.2.1", 1, "c"), Greeting(0.01, 0.0, "203.0.113.9", 1))])
    assert check.verdict == "yellow" and "Network is unreachable" in check.found and check.repair


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket of both IP versions")
def test_the_own_address_towards_a_name_of_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = socket.getaddrinfo

    def found(host: Any, *args: Any, **kwargs: Any) -> Any:
        return honest("::1" if host == "six.example" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert reach.own_address("six.example", 9) == "::1"


def test_a_clock_is_judged_by_who_agrees_best() -> None:
    for differences, verdict in (([0.1, 900.0], "green"), ([-20.0], "yellow"), ([900.0, 800.0], "red")):
        assert reach._clocks(differences).verdict == verdict
