"""Live runs over IPv6 alone, through firewalls of IPv6, and of two machines of which one has only IPv4 and
the other only IPv6."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.net.iroh.engine import installed
from anabranch.net.wan.places import Place
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerJoined, Step, Vitals
from support.local_swarms import Swarm, check_exact, created, history_of, small_run, swarm_of
from support.network.lan import lan, missing, run_in

pytestmark = pytest.mark.slow

STEPS = 3
LEADER, FIRST, SECOND = "data-0", "relay-1.0", "relay-2.0"
#: Relays of the run in which each has one IP version.
IPV4, IPV6 = FIRST, SECOND
STAGES = {IPV4: "1", IPV6: "2"}
#: Port of the leader that listens on all addresses.
PORT = 7700
RELAY_PORT = 3340
#: Firewall as home routers have it for IPv6: what was not asked for from inside does not come in.
_FIREWALL = """
table ip6 home {
  chain in {
    type filter hook input priority 0; policy drop;
    iifname "lo" accept
    meta l4proto ipv6-icmp accept
    ct state established,related accept
  }
}
"""


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def ways_between(swarm: Swarm, one: str, other: str) -> set[str]:
    """Ways of the links of two peers that either reported so far, but the direct one."""
    names = {event.subject: event.name for event in swarm.of(PeerJoined)}
    return {
        way
        for event in swarm.of(Vitals)
        for peer, way in event.ways.items()
        if {names.get(event.peer), names.get(peer)} == {one, other}
    }


def joined(swarm: Swarm) -> set[str]:
    """Names of the members that joined so far."""
    return {event.name for event in swarm.of(PeerJoined)}


def addresses_of(directory: RunDirectory) -> dict[str, str]:
    """Addresses of each member by name, from the log, their ports left out."""
    members = history_of(directory).membership.members.values()
    return {each.name: each.address.rpartition(":")[0] for each in members}


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_run_over_ipv6_alone(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    run = small_run(texts, run__steps=STEPS, fleet__relays_per_stage=[1, 1], evaluation__every=0)
    directory = created(tmp_path / "run", run)
    places = {name: Place("", "::1") for name in (LEADER, FIRST, SECOND)}
    with swarm_of(directory, run, supervisor, places=places) as swarm:
        swarm.to_the_end()
    assert set(addresses_of(directory).values()) == {"[::1]"}
    check_exact(directory, STEPS)


@pytest.mark.costly
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize(
    "order",
    [
        pytest.param((IPV4, IPV6), id="IPv6 dials"),
        pytest.param((IPV6, IPV4), id="IPv4 dials", marks=pytest.mark.soak),
    ],
)
def test_a_machine_without_ipv4_trains_with_one_without_ipv6(
    tmp_path: Path, texts: Path, supervisor: Supervisor, order: tuple[str, str]
) -> None:
    """The leader listens on all its addresses with one socket; each dials the one that it has a route to. The
    two relays meet at the leader, which carries, whichever of them joins last, and so has to dial."""
    run = small_run(
        texts,
        run__steps=STEPS,
        fleet__relays_per_stage=[1, 1],
        evaluation__every=0,
        network__host="::",
        network__port=PORT,
        network__advertise=f"[fd00:77::1]:{PORT},10.78.0.1:{PORT}",
    )
    directory = created(tmp_path / "run", run)
    hosts = {LEADER: ["10.78.0.1/24", "fd00:77::1/64"], IPV4: ["10.78.0.2/24"], IPV6: ["fd00:77::3/64"]}
    own = {LEADER: "", IPV4: "10.78.0.2", IPV6: "fd00:77::3"}
    with lan(hosts) as namespaces:
        places = {name: Place(namespaces[name], own[name]) for name in hosts}
        with swarm_of(directory, run, supervisor, places=places, leader_only=True) as swarm:
            for name in order:
                swarm.join(name, swarm.ticket(), ["--stage", STAGES[name]])
                swarm.until(lambda _, name=name: name in joined(swarm))  # type: ignore[misc]
            swarm.to_the_end()
            assert ways_between(swarm, IPV4, IPV6) == {swarm.peer_id(LEADER)}
    check_exact(directory, STEPS)


@contextlib.contextmanager
def iroh_relay(namespace: str, address: str) -> Iterator[None]:
    """The tests' iroh relay in a namespace, while this is entered."""
    path = os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "support.network.iroh_relay", address, str(RELAY_PORT)]
    words = ["ip", "netns", "exec", namespace, "env", f"PYTHONPATH={path}", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.kill()


@pytest.mark.soak
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.skipif(not installed() or shutil.which("nft") is None, reason="needs iroh and nft")
def test_holes_are_punched_through_firewalls_of_ipv6(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Two relays behind firewalls, in a network without IPv4, are linked directly over UDP."""
    run = small_run(
        texts,
        run__steps=1000,
        fleet__relays_per_stage=[1, 1],
        evaluation__every=0,
        network__transport="auto",
        network__iroh_relay=f"http://[fd00:77::9]:{RELAY_PORT}",
    )
    directory = created(tmp_path / "run", run)
    own = {LEADER: "fd00:77::1", FIRST: "fd00:77::2", SECOND: "fd00:77::3", "iroh": "fd00:77::9"}
    with contextlib.ExitStack() as stack:
        namespaces = stack.enter_context(lan({name: [f"{own[name]}/64"] for name in own}))
        stack.enter_context(iroh_relay(namespaces["iroh"], own["iroh"]))
        for name in (FIRST, SECOND):
            run_in(namespaces[name], "nft", "-f", "-", text=_FIREWALL)
        places = {name: Place(namespaces[name], own[name]) for name in (LEADER, FIRST, SECOND)}
        swarm = stack.enter_context(swarm_of(directory, run, supervisor, places=places))
        swarm.until(lambda _: "punched" in ways_between(swarm, FIRST, SECOND))
        swarm.stop()
        swarm.to_the_end()
    check_exact(directory, len(swarm.of(Step)))
