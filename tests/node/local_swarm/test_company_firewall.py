"""Machines behind a company's firewall, which lets out TCP to port 443 alone (root, Linux, nft)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError
from anabranch.net.identity import Identity
from anabranch.net.wan.places import Place
from anabranch.node.lifecycle import tickets
from anabranch.node.local_swarm.supervisor import Process, Supervisor
from anabranch.observe.events import PeerJoined, Step, Vitals
from benchmarks.reach.nat_pairs import Host, Internet, internet
from support.local_swarms import PATIENCE_S, Swarm, check_exact, created, history_of, small_run, swarm_of

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("nft") is None,
        reason="needs root, network namespaces and nft",
    ),
]

LEADER, OPEN, CARRIER = "data-0", "open", "carrier"
#: Machines behind the firewall, with their stages: the two have to meet, and one to meet the open relay.
GUESTS = {"guest-1": "1", "guest-2": "2"}
KIND = "443 out only"
#: Settings of the run, which is stopped when all have taken part.
RUN = dict(run__steps=100_000, fleet__relays_per_stage=[2, 1], evaluation__every=0, checkpoint__every=1000)


@contextlib.contextmanager
def company() -> Iterator[tuple[Internet, dict[str, Host]]]:
    """Public hosts of the run, and one behind a firewall of its own for each guest."""
    try:
        with internet() as made:
            hosts = {name: made.public(name) for name in (LEADER, OPEN, CARRIER)}
            yield made, hosts | {name: made.behind(name, KIND) for name in GUESTS}
    except UserError as error:
        if "failed: mount" in str(error) or "Operation not permitted" in str(error):
            pytest.skip(str(error))
        raise


def places_of(hosts: dict[str, Host]) -> dict[str, Place]:
    return {name: Place(host.namespace, host.address) for name, host in hosts.items()}


def doctor(host: Host, ticket: str) -> dict[str, dict[str, str]]:
    """Checks that `anabranch doctor` makes of the run, on a host."""
    words = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "anabranch", "doctor", "--json"]
    found = subprocess.run([*words, ticket], capture_output=True, text=True, timeout=120, check=False)
    return {check["name"]: check for check in json.loads(found.stdout)}


def ways_of(swarm: Swarm) -> dict[str, set[str]]:
    """For each guest the names of those through which its links went, as it reported."""
    names = {event.subject: event.name for event in swarm.of(PeerJoined)}
    return {
        guest: {
            names.get(way, way)
            for event in swarm.of(Vitals)
            if names.get(event.peer) == guest
            for way in event.ways.values()
        }
        for guest in GUESTS
    }


def listed(directory: RunDirectory) -> dict[str, str]:
    """Dedicated carriers by the log."""
    return dict(tickets.history_of(directory).carriers)


def train(swarm: Swarm, *others: Process) -> None:
    """All join; the run is stopped once one step counted work of each, and each guest has told its ways."""
    names = {OPEN: "1", **GUESTS}
    for name, stage in names.items():
        swarm.join(name, swarm.ticket(), ["--stage", stage])

    def all_worked(step: Step) -> bool:
        ids = {event.name: event.subject for event in swarm.of(PeerJoined)}
        owners = {owner for units in step.owners.values() for owner in units.values()}
        return ids.keys() >= names.keys() and {ids[name] for name in names} <= owners

    swarm.until(lambda _: any(map(all_worked, swarm.of(Step))) and all(ways_of(swarm).values()))
    swarm.stop()
    swarm.to_the_end(*others)


def test_a_leader_that_listens_on_443_is_reached_and_carries(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The guests dial the leader directly, and all others through it; no bit differs (I3)."""
    run = small_run(texts, network__port=443, **RUN)
    directory = created(tmp_path / "run", run)
    with company() as (_, hosts):
        places = places_of(hosts)
        with swarm_of(directory, run, supervisor, places=places, leader_only=True) as swarm:
            checks = doctor(hosts["guest-1"], swarm.ticket())
            way = next(check for name, check in checks.items() if name.startswith("way to "))
            assert f"directly, at {hosts[LEADER].address}:443 (" in way["found"]
            train(swarm)
            assert ways_of(swarm) == {"guest-1": {LEADER}, "guest-2": {LEADER}}
    check_exact(directory, history_of(directory).t)


@pytest.mark.parametrize("open_leader", [True, False], ids=["leader on 7700", "leader without address"])
def test_a_carrier_that_listens_on_443_is_enough(
    tmp_path: Path, texts: Path, supervisor: Supervisor, open_leader: bool
) -> None:
    """The leader is reached through the carrier alone, at another port than 443 or at none; no bit differs
    (I3)."""
    (tmp_path / CARRIER).mkdir()
    carrier = Identity.load_or_create(tmp_path / CARRIER / "key").peer_id
    with company() as (_, hosts):
        at = f"{hosts[CARRIER].address}:443"
        ways = [f"{hosts[LEADER].address}:7700", f"{at}/{carrier}"]
        advertise = ",".join(ways if open_leader else ways[1:])
        listens = dict(network__host=hosts[LEADER].address, network__port=7700)
        run = small_run(texts, network__advertise=advertise, **listens, **RUN)
        directory = created(tmp_path / "run", run)
        places = places_of(hosts) | {LEADER: Place(hosts[LEADER].namespace, "")}
        with swarm_of(directory, run, supervisor, places=places, leader_only=True) as swarm:
            options = ["--home", str(tmp_path / CARRIER), "--host", hosts[CARRIER].address, "--port", "443"]
            forwarder = swarm._spawn(CARRIER, ["relay", swarm.ticket(), *options])
            until = time.monotonic() + PATIENCE_S
            while carrier not in listed(directory):
                assert time.monotonic() < until, swarm.story()
                time.sleep(0.1)
            way = {"verdict": "red"}
            while way["verdict"] != "green":  # the leader dials the carrier after a while
                assert time.monotonic() < until, way["found"] + swarm.story()
                checks = doctor(hosts["guest-1"], swarm.ticket())
                way = next(check for name, check in checks.items() if name.startswith("way to "))
            assert f"through carrier {carrier[:8]} at {at} (" in way["found"]
            if open_leader:
                refused = f"not at {ways[0]}: {ways[0]} did not answer within 10 s (TCP connection)"
                assert refused in way["found"]
            train(swarm, forwarder)
            assert ways_of(swarm) == {name: {carrier} for name in GUESTS}
    check_exact(directory, history_of(directory).t)


def test_a_run_without_443_is_refused_by_name(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Neither join nor doctor say only that it does not work: address, step and repair."""
    run = small_run(texts, network__port=7700, **RUN)
    directory = created(tmp_path / "run", run)
    with contextlib.ExitStack() as stack:
        _, hosts = stack.enter_context(company())
        swarm = stack.enter_context(
            swarm_of(directory, run, supervisor, places=places_of(hosts), leader_only=True)
        )
        at = f"{hosts[LEADER].address}:7700"
        checks = doctor(hosts["guest-1"], swarm.ticket())
        way = next(check for name, check in checks.items() if name.startswith("way to "))
        assert way["verdict"] == "red" and f"{at} did not answer within 10 s (TCP" in way["found"]
        assert "if only port 443 is let out, ask for a carrier that listens there" in way["repair"]
        guest = swarm.join("guest-1", swarm.ticket(), ["--stage", "1", "--patience", "1"])
        assert guest.wait(60.0)
        said = guest.log.read_text()
        assert guest.status == 75 and f"{at} did not answer within 10 s (TCP connection)" in said
        assert "anabranch doctor TICKET" in said


def test_a_proxy_that_opens_tls_is_refused_by_name(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """It answers in place of the leader, with a certificate of its own."""
    run = small_run(texts, network__port=443, **RUN)
    directory = created(tmp_path / "run", run)
    proxy_files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=proxy", *proxy_files]
    subprocess.run(words, check=True, capture_output=True)
    with company() as (made, hosts), contextlib.ExitStack() as stack:
        proxy, leader = hosts[CARRIER], hosts[LEADER]
        inspect = f'iifname "lan" ip daddr {leader.address} tcp dport 443 dnat to {proxy.address}:443'
        router = made.router_of("guest-1")
        command = ["ip", "netns", "exec", router, "nft", "add", "rule", "ip", "nat", "into", *inspect.split()]
        subprocess.run(command, check=True)
        server = ["ip", "netns", "exec", proxy.namespace, "openssl", "s_server", "-accept", "443", "-quiet"]
        server += ["-cert", str(tmp_path / "cert.pem"), "-key", str(tmp_path / "key.pem")]
        listener = stack.enter_context(subprocess.Popen(server, stdin=subprocess.PIPE))
        stack.callback(listener.kill)
        swarm = stack.enter_context(
            swarm_of(directory, run, supervisor, places=places_of(hosts), leader_only=True)
        )
        checks = doctor(hosts["guest-1"], swarm.ticket())
        way = next(check for name, check in checks.items() if name.startswith("way to "))
        told = f"a server without a peer's key answers at {leader.address}:443"
        assert way["verdict"] == "red" and told in way["found"]
        assert "a proxy opens TLS connections" in way["repair"]
        guest = swarm.join("guest-1", swarm.ticket(), ["--stage", "1"])
        assert guest.wait(60.0) and guest.status == 1
        assert told in guest.log.read_text() and "proxy" in guest.log.read_text()
