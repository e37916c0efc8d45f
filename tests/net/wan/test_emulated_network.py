"""The emulated network with real processes. Needs root and TUN; skipped where they are not to be had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.net.wan import namespaces
from anabranch.net.wan.emulated_network import EmulatedNetwork
from anabranch.net.wan.profile import Link, Profile, find_profile
from anabranch.net.wan.shape import Host, WanError
from support.network.wan_world import ask, echo, pour, run

WAN10 = find_profile("wan10")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_emulated_network")]
#: Seconds within which what must happen happens, even on a busy machine.
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def wan() -> Iterator[EmulatedNetwork]:
    """Three hosts without delay or rate; r1 echoes."""
    with EmulatedNetwork({name: Host() for name in ("d0", "r1", "r2")}) as network, echo(network, "r1"):
        yield network


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def named(token: str) -> list[str]:
    return [name for name in os.listdir("/run/netns") if name.startswith(f"anb-{token}-")]


def token(wan: EmulatedNetwork) -> str:
    return wan.namespace("d0").split("-")[1]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("place", ["link", "uplink", "downlink"])
def test_rate(place: str) -> None:
    """A transfer at a rate arrives whole, and no sooner than the rate allows: full queues cut bursts into
    valid packets, as TCP would stall for ever on a damaged one."""
    size, rate = 200_000, 4e6
    line = {} if place == "link" else {f"{place}_bps": rate}
    hosts = {"d0": Host("A", **line), "r1": Host("B", **line), "r2": Host()}
    profile = Profile("made up", ("A", "B"), Link(0.001, 1e9), {frozenset("AB"): Link(0.03, rate * 100)})
    if place == "link":
        profile = replace(profile, links={frozenset("AB"): Link(0.03, rate)})
    with EmulatedNetwork(hosts, profile) as wan, echo(wan, "r1"):
        count, seconds = pour(wan, "d0", "r1", size)
        assert count == size and seconds >= size * 8 / rate
        numbers, first = ask(wan, "d0", "r1", 1)
        assert numbers == [0] and first >= 0.06
        assert ask(wan, "r2", "r1", 5)[0] == list(range(5))


def test_a_process_can_enter_by_itself_and_has_a_loopback(wan: EmulatedNetwork) -> None:
    program = """
import json, socket, sys
from anabranch.net.wan.namespaces import enter
enter(sys.argv[1])
listener = socket.create_server((sys.argv[2], 0))
local = socket.create_server(("127.0.0.1", 0))
socket.create_connection(local.getsockname(), timeout=5)
print(json.dumps(listener.getsockname()[0]))
"""
    command = [sys.executable, "-c", program, wan.namespace("r2"), wan.address("r2")]
    assert run_here(command) == f'"{wan.address("r2")}"'
    # And a host's address is nowhere else.
    assert (
        run_here([sys.executable, "-c", "import socket, sys; print(socket.if_nameindex())"]).find("wan0") < 0
    )


def run_here(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_a_profile_delays_by_region() -> None:
    with EmulatedNetwork({"d0": Host("Ohio"), "r1": Host("Virginia")}, WAN10) as wan, echo(wan, "r1"):
        numbers, first = ask(wan, "d0", "r1", 1)
        assert numbers == [0] and first >= 0.022


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WanError, match="cannot name a host"):
        EmulatedNetwork({"../etc": Host()})
    with pytest.raises(WanError, match="no region 'Atlantis'"):
        EmulatedNetwork({"d0": Host("Atlantis"), "r1": Host("Ohio")}, WAN10)
    monkeypatch.setattr("anabranch.net.wan.emulated_network.MTU", -1)
    with pytest.raises(WanError, match=r"`ip .*failed"):
        EmulatedNetwork({"d0": Host()})


def test_nothing_is_left() -> None:
    wan = EmulatedNetwork({"d0": Host(), "r1": Host()})
    mine = token(wan)
    assert len(named(mine)) == 2
    wan.close()
    assert not named(mine) and not (namespaces.LOCKS / mine).exists()
    wan.close()


def test_the_remains_of_a_router_that_dies_are_removed() -> None:
    with EmulatedNetwork({"d0": Host(), "r1": Host()}) as wan:
        mine = token(wan)
        os.kill(wan._router.pid, signal.SIGKILL)
    assert not named(mine) and not (namespaces.LOCKS / mine).exists()


#: Makes a network, forks a child that keeps everything open, tells its names, and waits to be killed.
_OWNER = """
import os, sys, time
from anabranch.net.wan.emulated_network import EmulatedNetwork
from anabranch.net.wan.shape import Host
wan = EmulatedNetwork({"d0": Host(), "r1": Host()})
child = os.fork() if sys.argv[1] == "fork" else -1
if child == 0:
    time.sleep(60)
print(wan.namespace("d0").split("-")[1], wan._router.pid, child, flush=True)
time.sleep(60)
"""


def owner(how: str) -> tuple[subprocess.Popen[str], str, int, int]:
    process = subprocess.Popen([sys.executable, "-c", _OWNER, how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    mine, router, child = process.stdout.readline().split()
    return process, mine, int(router), int(child)


def test_a_network_ends_with_the_process_that_made_it() -> None:
    """Even if a child of that process has its sockets open."""
    process, mine, _, child = owner("fork")
    assert len(named(mine)) == 2
    process.kill()
    process.wait()
    try:
        assert eventually(lambda: not named(mine) and not (namespaces.LOCKS / mine).exists())
    finally:
        os.kill(child, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()


def test_a_sweep_removes_what_nobody_holds_and_nothing_else(wan: EmulatedNetwork) -> None:
    process, mine, router, _ = owner("plain")
    try:
        namespaces.sweep()
        assert len(named(mine)) == 2
        os.kill(router, signal.SIGSTOP)  # so that it cannot clean up after its parent
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        namespaces.sweep()
        assert len(named(mine)) == 2  # the router still holds its claim
        os.kill(router, signal.SIGKILL)
        assert eventually(lambda: set(namespaces.sweep()) >= {f"anb-{mine}-d0"} or not named(mine))
        assert not named(mine) and not (namespaces.LOCKS / mine).exists()
        assert len(named(token(wan))) == 3
        assert run(wan, "r2", "print(1)") == 1
    finally:
        assert process.stdout is not None
        process.stdout.close()


def test_a_sweep_leaves_other_namespaces_alone() -> None:
    name = f"anbtest-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        assert name not in namespaces.sweep()
        assert Path("/run/netns", name).exists()
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
