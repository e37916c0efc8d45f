"""`doctor TICKET` and `join` say which way leads to whom in a live run, before this machine has a stage."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from anabranch.cli.chaos import free_port
from anabranch.cli.main import main
from anabranch.net.identity import Identity
from anabranch.net.iroh.engine import installed
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerJoined, Step
from support.local_swarms import Swarm, check_exact, created, small_run, swarm_of, voters_of
from support.unhurried_peer import run_unhurried_peer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="circuits of asyncio need Python 3.11"),
]
VOTERS = 3


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, str]]:
    main(["doctor", "--json", *arguments])
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)}


def no_guest_stayed(swarm: Swarm) -> None:
    """The doctor is no member, and the run goes on."""
    joined = {event.name for event in swarm.of(PeerJoined)}
    steps = len(swarm.of(Step))
    swarm.until(lambda _: len(swarm.of(Step)) > steps + 1)
    assert {event.name for event in swarm.of(PeerJoined)} == joined


@pytest.mark.costly
def test_each_peer_of_the_run_has_its_way(
    tmp_path: Path, texts: Path, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """Directly, at the leader's address, and at those of the members that keep the log also through the
    leader. The leader dials this machine back."""
    fleet = dict(fleet__voters=VOTERS, evaluation__every=0, checkpoint__every=1000)
    run = small_run(texts, run__steps=100_000, **fleet)
    directory = created(tmp_path / "run", run)
    with swarm_of(directory, run, supervisor, target=run_unhurried_peer) as swarm:
        swarm.until(lambda _: len(swarm.of(Step)) >= 3 and len(voters_of(directory)) == VOTERS)
        checks = examined(capsys, swarm.ticket())
        ways = {name: check for name, check in checks.items() if name.startswith("way to ")}
        assert len(ways) == VOTERS
        leader = ways[f"way to {swarm.peer_id('data-0')[:8]}"]
        assert re.match(r"the run's data node: directly, at 127\.0\.0\.1:\d+ \(\d+ ms\)$", leader["found"])
        assert all(check["verdict"] == "green" for check in ways.values()), ways
        members = [check["found"] for check in ways.values() if check is not leader]
        by_leader = f"through carrier {swarm.peer_id('data-0')[:8]} at 127.0.0.1:"
        for found in members:
            assert found.startswith("a member that keeps the log: directly, at 127.0.0.1:"), found
            assert by_leader in found
        assert checks["run"]["verdict"] == checks["dialled back"]["verdict"] == "green"
        assert re.match(r"by the run's leader \w{8}, at 127\.0\.0\.1:\d+$", checks["dialled back"]["found"])
        nobody = f"127.0.0.1:{free_port('127.0.0.1')}"
        unreached = examined(capsys, swarm.ticket(), "--advertise", nobody)["dialled back"]
        assert unreached["verdict"] == "yellow" and nobody in unreached["found"]
        assert "--advertise" in unreached["repair"]
        guest = swarm.join("guest", swarm.ticket())
        swarm.until(lambda _: any(event.name == "guest" for event in swarm.of(PeerJoined)))
        said = guest.log.read_text()
        assert re.search(r"connected to the run's data node, directly, at 127\.0\.0\.1:\d+\n", said), said
        assert said.count("which keeps the run's log: directly, at 127.0.0.1:") == VOTERS - 1, said
        no_guest_stayed(swarm)
        swarm.stop()
        swarm.to_the_end()
    check_exact(directory, len(swarm.of(Step)))


@pytest.mark.costly
def test_a_leader_behind_a_carrier_is_reached_or_the_step_is_named(
    tmp_path: Path, texts: Path, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port("127.0.0.1")
    (tmp_path / "carrier").mkdir()
    carrier = Identity.load_or_create(tmp_path / "carrier" / "key").peer_id
    address = f"127.0.0.1:{port}/{carrier}"
    run = small_run(
        texts,
        run__steps=100_000,
        fleet__relays_per_stage=[1, 1],
        network__advertise=address,
        evaluation__every=0,
        checkpoint__every=1000,
    )
    directory = created(tmp_path / "run", run)
    with swarm_of(
        directory, run, supervisor, leader_only=True, target=run_unhurried_peer
    ) as swarm:
        ticket = swarm.ticket()

        def way() -> dict[str, str]:
            checks = examined(capsys, ticket)
            return next(check for name, check in checks.items() if name.startswith("way to "))

        before = way()
        assert before["verdict"] == "red" and f"the carrier at 127.0.0.1:{port} (TCP" in before["found"]
        assert "nothing listens there" in before["repair"]
        options = ["--home", str(tmp_path / "carrier"), "--port", str(port)]
        forwarder = swarm._spawn("carrier", ["relay", ticket, *options])
        for stage in (1, 2):
            swarm.join(f"relay-{stage}-0", ticket, ["--stage", str(stage), "--no-listen"])
        swarm.until(lambda _: len(swarm.of(Step)) >= 2)
        found = way()
        assert found["verdict"] == "green", found
        assert f"the run's data node: through carrier {carrier[:8]} at 127.0.0.1:{port} (" in found["found"]
        log = swarm.processes["relay-1-0"].log.read_text()
        assert f"connected to the run's data node, through carrier {carrier[:8]} at" in log
        swarm.stop()
        swarm.to_the_end(forwarder)
    check_exact(directory, len(swarm.of(Step)))


@pytest.mark.soak  # net/test_iroh.py has the ways, the tests above what is told
@pytest.mark.skipif(not installed(), reason="iroh is not installed")
def test_a_way_through_iroh_is_told(
    tmp_path: Path, texts: Path, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run names a relay that nobody runs: iroh is tried and the failure told, beside TCP, which works."""
    relay = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    run = small_run(
        texts,
        run__steps=100_000,
        fleet__relays_per_stage=[1, 1],
        network__transport="auto",
        network__iroh_relay=relay,
        evaluation__every=0,
        checkpoint__every=1000,
    )
    directory = created(tmp_path / "run", run)
    with swarm_of(
        directory, run, supervisor, leader_only=True, target=run_unhurried_peer
    ) as swarm:
        checks = examined(capsys, swarm.ticket())
        assert checks["iroh"]["verdict"] == "green" and relay in checks["iroh"]["found"]
        [way] = [check for name, check in checks.items() if name.startswith("way to ")]
        assert way["verdict"] == "green" and "directly, at 127.0.0.1:" in way["found"]
        assert f"iroh, {relay}" in way["found"]
