"""Live guests in rounds of islands that wait for late slots: they begin, compute or give back no slots."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerRemoved
from support.hostile_runs import HostileRun
from support.local_swarms import Swarm, created, small_run, swarm_of


def waiting_run(texts: Path, **changes: Any) -> RunConfig:
    """Run without an end, with a few synchronous steps and then rounds of four slots that wait for all."""
    plain = {
        "run__steps": 100_000,
        "checkpoint__every": 100_000,
        "evaluation__every": 0,
        "pipeline__stages": 0,
        "batch__microbatches": 4,
        "round__slots": 4,
        "round__steps": 4,
        "round__start": 0.00003,
        "round__late": "wait",
        "fleet__relays_per_stage": [3],
    }
    return small_run(texts, **{**plain, **changes})


def holds(directory: RunDirectory) -> None:
    """No bit of the run differs from that of a single process."""
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


def removals(swarm: Swarm, peer: str) -> list[str]:
    """Reasons for which a peer lost its seat, in order."""
    return [event.reason for event in swarm.of(PeerRemoved) if event.subject == peer]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_machine_that_computes_no_slot_is_removed_and_the_second_time_expelled(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = waiting_run(texts)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        hostile = HostileRun(swarm)
        hostile.until(lambda: hostile.steps > 5)
        guest = hostile.invite("computes no slot", 1)
        hostile.until(lambda: guest.begun >= 0 and len(removals(swarm, guest.peer)) == 2)
        assert all("it is overdue with its slot" in reason for reason in removals(swarm, guest.peer))
        hostile.goes_on()
        assert not hostile.honest_removed(), swarm.story()
        hostile.end(guest)
    holds(directory)


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_data_node_that_begins_no_slots_is_removed_and_its_machines_are_not(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = waiting_run(texts, fleet__relays_per_stage=[4])
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        hostile = HostileRun(swarm)
        hostile.until(lambda: hostile.steps > 5)
        guest = hostile.invite("begins and claims no slot", 0)
        hostile.until(lambda: bool(guest.begun >= 0 and removals(swarm, guest.peer)))
        assert "of this data node are overdue, and no others" in removals(swarm, guest.peer)[0]
        hostile.end(guest)
        hostile.goes_on()
        assert not hostile.honest_removed(), swarm.story()
    holds(directory)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_slot_of_a_lost_machine_that_others_keep_goes_on_to_another(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Two guests give no slots of others back. A machine is killed, its slot goes to one of the three others,
    and on; again with another machine if an honest one was asked first."""
    run = waiting_run(texts, fleet__relays_per_stage=[1])
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor) as swarm:
        hostile = HostileRun(swarm)
        hostile.until(lambda: hostile.steps > 5)
        guests = [hostile.invite("computes no slot of others", 1) for _ in range(2)]
        victims = set[str]()
        for number in range(4):
            name = f"victim-{number}"
            victim = swarm.join(name, swarm.ticket(), ["--stage", "1"])
            hostile.until(lambda name=name: swarm.serves(name) and swarm.owns(name))  # type: ignore[misc]
            victims.add(swarm.peer_id(name))
            victim.signal(signal.SIGKILL)
            hostile.until(lambda: not victims & hostile.serving())
            hostile.goes_on()
            if kept := [line for guest in guests for line in guest.words("kept")]:
                break
        assert kept, swarm.story()
        assert {event.subject for event in hostile.honest_removed()} <= victims, swarm.story()
        hostile.end(*guests)
    holds(directory)
