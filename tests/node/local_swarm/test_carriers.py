"""Real processes that accept no connection: they train through carriers, and lose no step when one is killed,
or harms what it carries."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.chaos import free_port
from anabranch.net.identity import Identity
from anabranch.net.ticket import parse_ticket
from anabranch.node.lifecycle import control_file
from anabranch.node.local_swarm.supervisor import Process, Supervisor
from anabranch.observe.events import Note, PeerRemoved, Step, Vitals
from anabranch.protocol.fleet.operator_control import STEPS
from support.bad_carrier import ORDER_FILE, run_bad_carrier
from support.local_swarms import PATIENCE_S, Swarm, check_exact, created, small_run, steps_of, swarm_of
from support.unhurried_peer import run_unhurried_peer

pytestmark = pytest.mark.slow
#: Steps to the new end of a run, more than are taken until its leader has read the request.
MORE_STEPS = 12


def start_carriers(swarm: Swarm, directory: RunDirectory) -> list[Process]:
    """Start two dedicated carriers that obey orders, and wait until the log lists them."""
    arguments = {
        name: ["relay", swarm.ticket(), "--home", str(directory.peer(name))]
        for name in ("carrier-0", "carrier-1")
    }
    started = [swarm.start_other(name, words, run_bad_carrier) for name, words in arguments.items()]
    until(swarm, lambda: len(listed(directory)) == len(started))
    return started


def join_relays(swarm: Swarm, replicas: int = 2) -> None:
    """Start so many relays for each of two stages, which accept no connection."""
    for stage in (1, 2):
        for number in range(replicas):
            extra = ["--stage", str(stage), "--no-listen"]
            swarm.join(f"relay-{stage}-{number}", swarm.ticket(), extra)


def until(swarm: Swarm, reached: Callable[[], bool]) -> None:
    """Wait for something that must come and that is no event."""
    patience = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < patience, swarm.story()
        time.sleep(0.1)


def carrier_of(process: Process) -> str:
    """Id of a carrier, from what it printed."""
    found = re.search(r"/([0-9a-f]{64}) listens", process.log.read_text())
    return found[1] if found else ""


def carried(swarm: Swarm, since: float = 0.0) -> list[str]:
    """Beginning of the carrier's id, for each link that a member reported as carried, from the time `since`
    on."""
    told = (event.text for event in swarm.of(Note) if event.time >= since)
    found = (re.search(r"linked through carrier (\w{8})", text) for text in told)
    return [each[1] for each in found if each]


@pytest.mark.costly
def test_relays_that_nobody_can_dial_train_and_outlive_their_carrier(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """No step is lost (I3). The run is made to end once a link was made anew through the other carrier."""
    run = small_run(texts, run__steps=2000)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True, target=run_unhurried_peer) as swarm:
        carriers = start_carriers(swarm, directory)
        join_relays(swarm)
        swarm.until(lambda _: len(swarm.of(Step)) >= 2 and bool(carried(swarm)))
        used = carried(swarm)
        busiest = max(carriers, key=lambda process: used.count(carrier_of(process)[:8]))
        assert carrier_of(busiest)[:8] in used, (used, [carrier_of(each) for each in carriers])
        killed_at = time.time()
        busiest.signal(9)
        swarm.until(lambda _: any(each not in carrier_of(busiest) for each in carried(swarm, killed_at)))
        steps = len(swarm.of(Step)) + MORE_STEPS
        control_file.request(directory.path, STEPS, steps)
        swarm.to_the_end()
        [other] = [each for each in carriers if each is not busiest]
        assert other.wait(PATIENCE_S) and other.status == 0, "it ends with the run"
        assert other.log.read_text().endswith("the run is over\n")
        ways = {way for event in swarm.of(Vitals) for way in event.ways.values()}
        assert ways and ways <= {carrier_of(each) for each in carriers}
    check_exact(directory, steps)


@pytest.mark.soak  # in virtual time: swarm/membership/test_carriers.py
@pytest.mark.parametrize(("order", "replicas"), [("swallow", 2), ("swallow bulk", 1), ("delay 2", 2)])
def test_a_carrier_that_swallows_or_delays_what_it_carries_is_left(
    order: str, replicas: int, tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Its own links are sound, and it opens new circuits. No step is lost, nobody is removed (I3). The pair
    without replicas has no way around a carrier that lets heartbeats pass, and drops payloads."""
    run = small_run(texts, run__steps=2000, fleet__relays_per_stage=[replicas, replicas])
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True, target=run_unhurried_peer) as swarm:
        carriers = start_carriers(swarm, directory)
        join_relays(swarm, replicas)
        ends = 2 * replicas
        swarm.until(lambda _: len(swarm.of(Step)) >= 3 and len(ways(swarm)) == ends * (ends - 1))
        used = Counter(ways(swarm).values())
        bad = max(carriers, key=lambda process: used[carrier_of(process)])
        assert carrier_of(bad) in used, (used, [carrier_of(each) for each in carriers])
        (directory.peer(bad.name) / ORDER_FILE).write_text(order)
        swarm.until(lambda _: carrier_of(bad) not in ways(swarm).values())
        made = len(swarm.of(Step))
        swarm.until(lambda _: len(swarm.of(Step)) >= made + 3)
        assert not swarm.of(PeerRemoved)
        swarm.stop()
        swarm.to_the_end(*carriers)
    check_exact(directory, len(steps_of(swarm.seen)))


def ways(swarm: Swarm) -> dict[tuple[str, str], str]:
    """Carrier of each carried link, by the end that told of it last and the other end."""
    last = {event.peer: event.ways for event in swarm.of(Vitals)}
    return {(peer, other): way for peer, found in last.items() for other, way in found.items()}


def listed(directory: RunDirectory) -> dict[str, str]:
    """Dedicated carriers by the log."""
    from anabranch.node.lifecycle.tickets import history_of

    return dict(history_of(directory).carriers)


def test_a_leader_that_nobody_can_dial_leads_through_a_carrier(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Its tickets name the carrier, to which it keeps a link (I3)."""
    port = free_port("127.0.0.1")
    (tmp_path / "carrier").mkdir()
    carrier = Identity.load_or_create(tmp_path / "carrier" / "key").peer_id
    address = f"127.0.0.1:{port}/{carrier}"
    run = small_run(texts, run__steps=4, fleet__relays_per_stage=[1, 1], network__advertise=address)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        ticket = parse_ticket(swarm.ticket(), now_s=0.0)
        assert ticket.first_addresses == address
        options = ["--home", str(tmp_path / "carrier"), "--port", str(port)]
        forwarder = swarm._spawn("carrier", ["relay", swarm.ticket(), *options])
        for stage in (1, 2):
            swarm.join(f"relay-{stage}-0", swarm.ticket(), ["--stage", str(stage), "--no-listen"])
        swarm.to_the_end(forwarder)
        assert carrier[:8] in carried(swarm)
    check_exact(directory, 4)
