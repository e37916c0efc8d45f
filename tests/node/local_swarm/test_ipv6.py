"""Live runs over IPv6 alone, and of two machines of which one has only IPv4 and the other only IPv6."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.net.wan.places import Place
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerJoined, Vitals
from support.local_swarms import Swarm, check_exact, created, history_of, small_run, swarm_of
from support.network.lan import lan, missing

pytestmark = pytest.mark.slow

STEPS = 3
LEADER, IPV4, IPV6 = "data-0", "relay-1.0", "relay-2.0"
STAGES = {IPV4: "1", IPV6: "2"}
#: Port of the leader that listens on all addresses.
PORT = 7700


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


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
    places = {name: Place("", "::1") for name in (LEADER, IPV4, IPV6)}
    with swarm_of(directory, run, supervisor, places=places) as swarm:
        swarm.to_the_end()
    assert set(addresses_of(directory).values()) == {"[::1]"}
    check_exact(directory, STEPS)


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("order", [(IPV4, IPV6), (IPV6, IPV4)], ids=["IPv6 dials", "IPv4 dials"])
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
            relays = {swarm.peer_id(name) for name in (IPV4, IPV6)}
            ways = {(event.peer, peer): way for event in swarm.of(Vitals) for peer, way in event.ways.items()}
            carried = {pair: way for pair, way in ways.items() if set(pair) == relays}
            assert set(carried.values()) == {swarm.peer_id(LEADER)}, ways
    check_exact(directory, STEPS)
