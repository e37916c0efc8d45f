"""Hostile guests in audited runs of real processes: they lie where no audit is likely, or two of them lie
together."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.node.lifecycle.tickets import history_of
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Audit, FaultDelivered, PeerJoined
from anabranch.observe.events import Rollback as RolledBack
from anabranch.protocol.consensus.log_replay import fold
from anabranch.protocol.interface.tasks import AUDIT_STEPS
from anabranch.protocol.log.records import Members, Revoke, Rollback, decode_entry
from node.local_swarm.test_voters import copies_elsewhere, lines_of, three_vote, wait_until
from support.audit_deeds import run_audited_guest
from support.crash_points import PLAN_FILE
from support.hostile_runs import HostileRun, LiveGuest
from support.local_swarms import created, small_run, swarm_of

#: Share of audits by which practically nothing is drawn.
TINY = 1e-9
#: Guests of a test that come one after the other, until one of them is drawn for its deed.
TRIES = 8


@contextmanager
def audited_run(path: Path, texts: Path, supervisor: Supervisor, **changes: Any) -> Iterator[HostileRun]:
    """Run without end, of which all contributions are audited, once it has taken two steps. When the test is
    over, no honest member may have lost its seat."""
    plain = {"run__steps": 100_000, "checkpoint__every": 3, "evaluation__every": 0, "audit__share": 1.0}
    # Under "static" every replica has its share of the microbatches, a guest too.
    run = small_run(texts, **{**plain, "routing__policy": "static", **changes})
    directory = created(path, run)
    with swarm_of(directory, run, supervisor) as swarm:
        hostile = HostileRun(swarm, run_audited_guest)
        hostile.until(lambda: hostile.steps > 2)
        yield hostile
        assert not hostile.honest_removed(), swarm.story()


def no_bit_differs(hostile: HostileRun) -> None:
    report = verify(hostile.swarm.directory.path)
    assert report.holds and report.promise == "bits" and report.steps > 2, report.lines()


def revoked(hostile: HostileRun) -> set[str]:
    """Keys and tickets that the log revokes."""
    return set(history_of(hostile.swarm.directory).revoked.reasons)


def found_by(hostile: HostileRun, guest: LiveGuest, verdict: str) -> list[Audit]:
    """Audits in which the guest reported this verdict."""
    return [a for a in hostile.swarm.of(Audit) if (a.auditor, a.verdict) == (guest.peer, verdict)]


def serves(hostile: HostileRun, guest: LiveGuest) -> Callable[[], bool]:
    return lambda: guest.peer in hostile.serving()


def found_or_not(hostile: HostileRun, liar: LiveGuest) -> Callable[[], bool]:
    """Condition: a guest that lied once is out, or the audits of that step are over."""
    over = hostile.withstood(liar, steps=AUDIT_STEPS)
    return lambda: bool(hostile.out(liar)) or over()


@pytest.mark.costly
@pytest.mark.slow
def test_walk_ins_that_compute_falsely_are_out_and_the_door_stays_open(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Nothing but the work of walk-ins is audited. With an invited ticket the second conviction would revoke
    the ticket."""
    with audited_run(tmp_path / "run", texts, supervisor, audit__share=TINY) as hostile:
        swarm, door = hostile.swarm, hostile.ticket("open", 0)
        liars = [hostile.invite("false part", stage, door) for stage in (1, 2)]
        hostile.until(lambda: all(map(hostile.out, liars)) and bool(swarm.of(RolledBack)))
        peers = {liar.peer for liar in liars}
        audits = [audit for audit in swarm.of(Audit) if audit.verdict == "different"]
        assert {audit.subject for audit in audits} == peers, swarm.story()
        assert not peers & {audit.auditor for audit in audits}
        assert revoked(hostile) == peers, swarm.story()  # their keys, and not the ticket
        assert all("two replicas computed the work" in hostile.out(liar) for liar in liars)
        swarm.join("walk-in", door.text, ["--stage", "1"])
        hostile.until(lambda: swarm.serves("walk-in"))
        hostile.goes_on()
    no_bit_differs(hostile)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_liar_finds_no_work_that_is_never_audited(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """It lies once, in the first step in which a draw by the hash that the iteration begins with would spare
    it. By the commit's hash nine tenths of such lies are drawn: after one that is not, another run begins."""
    for number in range(TRIES):
        with audited_run(tmp_path / f"{number}", texts, supervisor, audit__share=0.9) as hostile:
            liar = hostile.invite("false where no audit is foreseen", 1)
            hostile.until(found_or_not(hostile, liar))
            if not hostile.out(liar):
                continue
            assert "two replicas computed the work" in hostile.out(liar)
            hostile.until(lambda: bool(hostile.swarm.of(RolledBack)))
            assert revoked(hostile) == {liar.peer}
            hostile.goes_on()
        no_bit_differs(hostile)
        return
    pytest.fail("no lie was found")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_pair_that_accuses_together_takes_nobody_out(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Two of five replicas find honest work different where they are drawn first. The other two do not, and
    at least the one that was heard before them loses its seat."""
    fleet = {"fleet__relays_per_stage": [3, 2], "fleet__minimum": 2}
    with audited_run(tmp_path / "run", texts, supervisor, **fleet) as hostile:
        pair = [hostile.invite("accuses with another", 1) for _ in range(2)]
        hostile.until(lambda: any(map(hostile.out, pair)))
        for guest in filter(hostile.out, pair):
            assert "different, which others did not" in hostile.out(guest)
            assert found_by(hostile, guest, "different")
        assert not revoked(hostile) and not hostile.swarm.of(RolledBack), hostile.swarm.story()
        hostile.goes_on()
    no_bit_differs(hostile)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_liar_is_convicted_though_another_finds_its_work_right(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """In a stage of five it lies once. If its accomplice is asked first (one lie of four), nobody else looks;
    if it is asked last, its word may not be heard: then another run begins."""
    fleet = {"fleet__relays_per_stage": [3, 2], "fleet__minimum": 2}
    for number in range(TRIES):
        with audited_run(tmp_path / f"{number}", texts, supervisor, **fleet) as hostile:
            fellow = hostile.invite("finds another's lies right", 1)
            hostile.until(serves(hostile, fellow))
            liar = hostile.invite("false part once", 1)
            hostile.until(found_or_not(hostile, liar))
            if not hostile.out(liar) or not found_by(hostile, fellow, "same"):
                continue
            hostile.until(lambda: bool(hostile.swarm.of(RolledBack)))
            hostile.goes_on()
            if fellow.begun < 0:
                continue
            assert "three replicas computed the work" in hostile.out(liar)
            assert revoked(hostile) == {liar.peer}
        no_bit_differs(hostile)
        return
    pytest.fail("no lie was found that another had found right")


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_false_state_for_auditors_convicts_nobody(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """A guest gives an auditor a false state that is consistent in itself, so that the auditor would find all
    honest work different. An auditor asks any replica for its state, so several come until one asks the
    guest."""
    words = "the state that was fetched is not the run's"
    with audited_run(tmp_path / "run", texts, supervisor) as hostile:
        swarm, guest = hostile.swarm, hostile.invite("false state for auditors", 1)
        hostile.until(serves(hostile, guest))
        names = list[str]()
        while len(names) < TRIES and not hostile.told(words):
            names.append(f"auditor-{len(names)}")
            swarm.join(names[-1], hostile.ticket("auditor").text, ["--stage", "1"], command="audit")
            hostile.until(partial(same_by, hostile, names[-1]))
        assert guest.begun >= 0 and hostile.told(words), swarm.story()
        assert "different" not in {audit.verdict for audit in swarm.of(Audit)}
        assert not revoked(hostile) and not swarm.of(RolledBack), swarm.story()
    no_bit_differs(hostile)


def same_by(hostile: HostileRun, name: str) -> bool:
    """True once the member with this name has found work right."""
    peers = {event.subject for event in hostile.swarm.of(PeerJoined) if event.name == name}
    return any(a.auditor in peers and a.verdict == "same" for a in hostile.swarm.of(Audit))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_liar_is_convicted_though_the_leader_dies(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """The leader dies once it was told of a difference, before the second auditor is heard. The guest lies in
    one step only: the next leader knows it from the first one's audits alone."""
    fleet = {"fleet__data_nodes": 2, "fleet__voters": 3, "fleet__minimum": 2}
    plain = {"run__steps": 100_000, "checkpoint__every": 3, "evaluation__every": 0, "audit__share": 1.0}
    run = small_run(texts, **plain, **fleet, routing__policy="static")
    directory = created(tmp_path / "run", run)
    plan = {"data-0": {"at": "accused", "iteration": 1}}
    with swarm_of(directory, run, supervisor, plan) as swarm:
        hostile = HostileRun(swarm, run_audited_guest)
        hostile.until(lambda: hostile.steps > 2)
        wait_until(lambda: any(map(three_vote, copies_elsewhere(directory))), swarm, "no three voters")
        liar = hostile.invite("false part once", 1)
        wait_until(lambda: not swarm.leader.running, swarm, "the leader lives")
        assert swarm.leader.status == -signal.SIGKILL and liar.words("begun") and not revoked(hostile)
        before = history_of(directory).t
        wait_until(lambda: gone_on(directory, liar.peer, before), swarm, "nobody was convicted")
        (directory.peer("data-0") / PLAN_FILE).unlink()
        swarm.start_leader()
        wait_until(lambda: history_of(directory).t > before + 3, swarm, "the first leader does not follow")
    assert revoked(hostile) == {liar.peer}
    records = [decode_entry(line).record for line in lines_of(directory)]
    removed = {peer for record in records if isinstance(record, Members) for peer in record.removed}
    assert len(removed - {liar.peer}) <= 1, swarm.story()  # the dead leader
    [died] = events_of(directory.events, FaultDelivered)
    assert died.phase.startswith("accused") and removed <= {liar.peer, died.peer}
    no_bit_differs(hostile)


def gone_on(directory: RunDirectory, liar: str, t: int) -> bool:
    """True if a copy of the log beside the founder's revokes the liar's key, goes back, and has a step after
    t."""
    for lines in copies_elsewhere(directory):
        kinds = [decode_entry(line).record for line in lines]
        convicted = any(isinstance(record, Revoke) and record.id == liar for record in kinds)
        if convicted and any(isinstance(record, Rollback) for record in kinds) and fold(lines).t > t:
            return True
    return False
