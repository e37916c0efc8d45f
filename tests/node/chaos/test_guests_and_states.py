"""Live guests that give joiners false states, or ask for states and report them without end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Checkpoint, Note, PeerJoined, Refused
from anabranch.protocol.fleet.admission import ADMISSIONS
from support.counting_peers import run_counting_peer
from support.hostile_runs import HostileRun, hostile_run
from support.local_swarms import small_run
from support.state_deeds import TRICKLES

#: Settings of a run that ends only with its test.
ENDLESS = {"run__steps": 100_000, "checkpoint__every": 100_000, "evaluation__every": 0}


def join(hostile: HostileRun, stage: int, met: Callable[[str], bool]) -> None:
    """Let honest relays join `stage`, one after the other, until one has `met` the guest, to which it may
    have no link when it asks for the state; all come to serve."""
    for number in range(4):
        name = f"late-{stage}.{number}.{len(hostile.guests)}"
        hostile.swarm.join(name, hostile.swarm.ticket(), ["--stage", str(stage)])
        hostile.until(lambda name=name: hostile.swarm.serves(name))  # type: ignore[misc]
        if met(hostile.swarm.peer_id(name)):
            return
    raise AssertionError(f"no joiner met the guest: {hostile.swarm.story()}")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_guests_that_ask_and_report_without_end_cost_the_leader_little(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """All at once. The leader reads a state when a checkpoint is new, looks for a stage once for each
    admission, and keeps what members report alone, as much as there is to hold."""
    run = small_run(texts, **{**ENDLESS, "checkpoint__every": 20})
    with hostile_run(tmp_path / "run", run, supervisor, target=run_counting_peer) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        asks, much = hostile.invite("states all the time", 1), hostile.invite("holds too much", 2)
        seatless, turns = hostile.invite("holds without a seat", 1), hostile.invite("comes and goes", -1)
        hostile.until(hostile.withstood(asks, much, seatless, turns, steps=40))
        hostile.until(lambda: hostile.told("more than there is to hold"))

        def admitted() -> int:
            return sum(event.subject == turns.peer for event in swarm.of(PeerJoined))

        hostile.until(lambda: admitted() > ADMISSIONS.burst)
        waits = len(turns.words("came"))  # from now on it asks more often than it is admitted
        hostile.until(lambda: len(turns.words("came")) > waits + 80)
        asked, came = len(asks.words("asked")), len(turns.words("came"))
        reads, written = hostile.printed("data-0", "read"), len(swarm.of(Checkpoint))
        # A state may be read again if the next checkpoint was written meanwhile.
        assert 0 < reads.count("1") <= 2 * (written + 1) < asked / 4, (reads, written, asked)
        placed = hostile.printed("data-0", "placed").count(turns.peer)
        assert 0 < placed <= admitted() + 2 < came / 2, (placed, admitted(), came)
        reported = hostile.printed("data-0", "reported")
        assert f"{seatless.peer} 0" in reported and f"{seatless.peer} 1" not in reported
        hostile.end(asks, much, seatless, turns)
        assert not hostile.honest_removed(), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_liar_that_joiners_ask_first_keeps_none_out(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """At one stage it gives a state that is false and consistent: the leader says so, and the joiner asks
    another. At the other it offers one of 64 GiB, of which nobody asks for a piece, or one that trickles,
    which is given up before it is whole."""
    run = small_run(texts, **ENDLESS)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        false = hostile.invite("false state for joiners", 1, first=True)
        vast = hostile.invite("state of 64 GiB", 2, first=True)
        hostile.until(lambda: {false.peer, vast.peer} <= hostile.serving())
        doubted = f"the state that {false.peer[:8]} gave is not the run's"
        join(hostile, 1, lambda joiner: any(doubted in e.text for e in swarm.of(Note) if e.peer == joiner))
        condemned = vast.peer, "StateOffer: not the state that the run has"
        join(
            hostile,
            2,
            lambda joiner: (joiner, *condemned) in {(e.peer, e.subject, e.reason) for e in swarm.of(Refused)},
        )
        assert not vast.words("asked")
        hostile.end(vast)
        trickles = hostile.invite("state that trickles", 2, first=True)
        hostile.until(lambda: trickles.peer in hostile.serving())

        def trickled(joiner: str) -> int:
            return sum(line.startswith(joiner) for line in trickles.words("trickled"))

        join(hostile, 2, lambda joiner: 0 < trickled(joiner) < TRICKLES)
        hostile.goes_on()
        assert not hostile.honest_removed(), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_checkpoints_have_the_agreed_states_whoever_is_asked_first(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The guest gives the leader a state that is false and consistent for each checkpoint: the next source is
    asked. What came first was written to the run directory, and the log said otherwise."""
    run = small_run(texts, **{**ENDLESS, "checkpoint__every": 4})
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        guest = hostile.invite("false state for joiners", 1, first=True)
        hostile.until(lambda: guest.peer in hostile.serving())
        condemned = guest.peer, "StateOffer: not the state that the run has"
        hostile.until(lambda: condemned in {(e.subject, e.reason) for e in swarm.of(Refused)})
        written = len(swarm.of(Checkpoint))
        hostile.until(lambda: len(swarm.of(Checkpoint)) > written + 1)
        hostile.end(guest)
        hostile.goes_on()
        assert not hostile.honest_removed(), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_lone_replica_that_never_gets_a_state_is_out_and_its_stage_restored(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The only other replica of the stage is killed once the guest serves. The log goes back three times."""
    snapshots = {"snapshots__every": 2, "snapshots__copies": 2, "fleet__relays_per_stage": [3, 1]}
    run = small_run(texts, **ENDLESS, **snapshots)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        guest = hostile.invite("never gets a state", 2)
        hostile.until(lambda: guest.peer in hostile.serving())
        victim = swarm.peer_id("relay-2.0")
        swarm.processes["relay-2.0"].signal(signal.SIGKILL)
        hostile.until(lambda: bool(hostile.out(guest)))
        assert "the log went back 3 times" in hostile.out(guest), hostile.out(guest)
        hostile.end(guest)
        hostile.goes_on(5)
        assert {removed.subject for removed in hostile.honest_removed()} == {victim}, swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()
