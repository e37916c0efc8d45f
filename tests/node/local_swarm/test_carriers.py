"""Real processes that accept no connection: they train through carriers, and lose no step when one is
killed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.chaos import free_port
from anabranch.net.identity import Identity
from anabranch.net.ticket import parse_ticket
from anabranch.node.local_swarm.supervisor import Process, Supervisor
from anabranch.observe.events import Note, Step, Vitals
from support.local_swarms import PATIENCE_S, Swarm, check_exact, created, small_run, swarm_of

pytestmark = pytest.mark.slow
STEPS = 8


def start_carrier(swarm: Swarm, directory: RunDirectory, name: str) -> Process:
    """Start a dedicated carrier, and wait until the log lists it."""
    home = directory.peer(name)
    return swarm._spawn(name, ["relay", swarm.ticket(), "--home", str(home)])


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


def carried(swarm: Swarm) -> list[str]:
    """Beginning of the carrier's id, for each link that a member reported as carried."""
    found = (re.search(r"linked through carrier (\w{8})", event.text) for event in swarm.of(Note))
    return [each[1] for each in found if each]


def test_relays_that_nobody_can_dial_train_and_outlive_their_carrier(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """No step is lost (I3)."""
    run = small_run(texts, run__steps=STEPS)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, leader_only=True) as swarm:
        carriers = [start_carrier(swarm, directory, f"carrier-{number}") for number in (0, 1)]
        until(swarm, lambda: len(listed(directory)) == 2)
        for stage in (1, 2):
            for number in (0, 1):
                extra = ["--stage", str(stage), "--no-listen"]
                swarm.join(f"relay-{stage}-{number}", swarm.ticket(), extra)
        swarm.until(lambda _: len(swarm.of(Step)) >= 2 and bool(carried(swarm)))
        used = carried(swarm)
        busiest = max(carriers, key=lambda process: used.count(carrier_of(process)[:8]))
        assert carrier_of(busiest)[:8] in used, (used, [carrier_of(each) for each in carriers])
        busiest.signal(9)
        swarm.to_the_end(*carriers)
        assert any(each not in carrier_of(busiest) for each in carried(swarm)[len(used) :])
        ways = {way for event in swarm.of(Vitals) for way in event.ways.values()}
        assert ways and ways <= {carrier_of(each) for each in carriers}
    check_exact(directory, STEPS)


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
