"""Hostile guests of the chaos test: their schedule, their figures, and live ones in waves (`HostileRun`)."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from anabranch.audit.verify import verify
from anabranch.cli.main import main
from anabranch.node.chaos.fault_schedule import DATA, GUEST, RELAY, STAGE, VOTER, draw_schedule, with_guests
from anabranch.node.chaos.guest_host import DEEDS, GuestHost
from anabranch.node.chaos.guests.member_deeds import DEEDS as MEMBER_DEEDS
from anabranch.node.chaos.guests.member_deeds import Guest
from anabranch.node.chaos.honest_seats import HonestSeats
from anabranch.node.chaos.metrics import metrics_of
from anabranch.node.chaos.report import Result, Settings, Verdict
from anabranch.node.chaos.run_record import GuestVisit, RunRecord
from anabranch.node.chaos.swarm_tracker import SwarmTracker
from anabranch.node.chaos.wasted_compute import WastedCompute
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import Event, PeerActive, PeerRemoved, Rollback, Skip, Step
from anabranch.protocol.fleet.carrier_list import RECORDS
from anabranch.protocol.interface.events import Send
from anabranch.protocol.interface.settings import Settings as RunSettings
from anabranch.protocol.log.records import Carriers, Commit, decode_entry
from anabranch.protocol.messages import Ping
from anabranch.protocol.peer.peer import Peer
from support.hostile_runs import HostileRun, hostile_run
from support.local_swarms import PATIENCE_S, created, small_run, steps_of, swarm_of

#: Settings of a run that ends only with its test.
ENDLESS = {"run__steps": 100_000, "checkpoint__every": 100_000, "evaluation__every": 0}
#: Waves of guests that lose their seats or their links: deed, stage, words of the reason.
PUT_OUT = [
    [
        ("false state", 1, "differs from its stage's"),
        ("wrong digest", 2, "gradient"),
    ],
    [
        ("false overflow", 1, "overflow"),
        ("withheld parts", 2, "parts of its sum"),
    ],
    [
        ("false state of an idle member", 1, "differs from its stage's"),
        ("empty member", 2, "the state it fetched"),
    ],
]
#: Further waves of guests that lose their seats; stage 0: with a data node's ticket.
PUT_OUT_TOO = [
    [
        ("blames others", 2, "overflows that others did not find"),
        ("state of long ago", 1, "older than any"),
        ("losses without a sum", 0, "a loss"),
    ],
    [
        # It refuses to sum what it does not hold, if the leader believed it.
        ("claims its whole stage", 1, "claimed the work of others|parts of its sum"),
    ],
]
#: Deed of a guest that lies in its own work and in its audits of others.
LIES_TOO = "false work and audits"
#: Guests that no proof puts out, and that ask or say too much: deed, stage, words that tell the owner.
TOO_MUCH = [
    ("gradients for a stranger", 1, "the gradient of another stage"),
    ("carrier that moves", 1, ""),
    ("calls copies spoilt", 1, ""),
    ("large parts of no reduce", 1, "more bytes than a stage's sum"),
    ("calls back again and again", 1, ""),
    ("long names of tensors", 2, "sums of squares that no gradient has"),
]
#: Waves of guests that no proof puts out: deed, stage, words that tell the owner ("": the run needs none).
ENDURED = [
    [
        ("opens no iteration", 1, ""),
        ("claims nothing", 2, "does not claim the microbatch"),
    ],
    [
        ("black hole", 1, "has kept the microbatch for far longer than usual"),
        ("inputs that overflow", 2, "with inputs of"),
    ],
    [
        ("withheld gradients", 1, "has kept the microbatch for far longer than usual"),
        ("withheld gradients", 2, "has kept the microbatch for far longer than usual"),
    ],
    [
        ("all states for a newcomer", 1, "for which it has no need"),
        ("all states for a stranger", 1, "for which it has no need"),
    ],
]


@pytest.mark.parametrize("seed", range(3))
def test_a_third_of_the_faults_are_guests_with_all_deeds(seed: int) -> None:
    plain = draw_schedule(seed, 600.0, 20.0, 0.2)
    faults = with_guests(plain, seed, 1 / 3, DEEDS)
    assert faults == with_guests(plain, seed, 1 / 3, DEEDS)
    assert [fault.at_s for fault in faults] == [fault.at_s for fault in plain]
    guests = [fault for fault in faults if fault.target == GUEST]
    assert len(guests) == 67 and not any(fault.freeze_s for fault in guests)
    times = Counter(fault.deed for fault in guests)
    assert set(times) == set(DEEDS) and max(times.values()) - min(times.values()) <= 1
    others = Counter(fault.target for fault in faults if fault.target != GUEST)
    assert others == {RELAY: 179 - 67, DATA: 10, VOTER: 10, STAGE: 1}
    assert with_guests(plain, seed, 0.0, DEEDS) == plain


def removed(peer: str, time: float, reason: str = "silent") -> PeerRemoved:
    return PeerRemoved(time=time, subject=peer, stage=1, reason=reason)


def test_a_seat_is_lost_until_its_peer_serves_again_unless_a_fault_hit_it() -> None:
    names = {"A": "a", "B": "b", "C": "c", "D": "d"}
    seats = HonestSeats(names.get, lambda peer, at: peer == "B")
    events: list[Event] = [
        removed("A", 1.0),
        removed("B", 1.0),  # hit by a fault
        removed("C", 1.0),
        removed("D", 1.0, "moves to stage 2"),
        removed("G", 1.0),  # a guest
        PeerActive(time=4.0, subject="A", stage=1, from_iteration=3),
    ]
    for event in events:
        seats.on_event(event)
    assert [(seat.name, seat.back_s) for seat in seats.lost] == [("a", 3.0), ("c", -1.0)]
    assert seats.waiting == {"C"}
    seats.struck("C")
    assert not seats.waiting


def a_record(**changes: object) -> RunRecord:
    faults = with_guests(draw_schedule(1, 60.0, 3.0, 0.0), 1, 1.0, ["false state"])
    guests = [
        GuestVisit("guest-1", faults[0], 2, 100.0, "G1", began=103.0, put_out="differs", put_out_s=2.0),
        GuestVisit("guest-2", faults[1], 1, 110.0, "G2", began=112.0, began_t=5, ended=132.0, ended_t=25),
        GuestVisit("guest-3", faults[2], 1, 120.0),
    ]
    undelivered = [(faults[2], "it never came into its role")]
    record = RunRecord(began=90.0, ended=150.0, ended_t=30, guests=guests, undelivered=undelivered)
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def result_of(record: RunRecord) -> Result:
    events = [removed("G1", 105.0), removed("A", 106.0)]
    metrics = metrics_of(record, events, 8, WastedCompute())
    setting = Settings(6, 2, 2, 1, 1.0, 0.2, 20.0, 0.2, "", "runs/chaos", 1.0)
    return Result(setting, record, metrics, Verdict(True, 9, "verify: 9 steps: zero bits differ"))


def test_a_result_counts_guests_by_deed_and_names_those_that_were_put_out() -> None:
    result = result_of(a_record())
    metrics = result.metrics
    assert metrics.faults.delivered == {"guest: false state": 2}
    assert metrics.faults.undelivered == {"guest: false state": {"it never came into its role": 1}}
    assert metrics.removed == 1, "a guest is no volunteer that was removed"
    assert [(g.name, g.put_out, g.seconds, g.steps) for g in metrics.hostile.guests] == [
        ("guest-1", True, 2.0, 0),
        ("guest-2", False, 20.0, 20),
    ]
    told = "\n".join(result.lines())
    assert "false state: 2 came, 1 put out within 2.0 s (guest-1; 1: differs); stayed: guest-2" in told
    assert "honest members removed without a fault: 0; lost for good: none" in told
    assert not result.problems


def test_a_result_fails_if_an_honest_member_lost_its_seat() -> None:
    result = result_of(a_record(empty_seats=["relay-1.0"]))
    assert result.problems == ["honest members lost their seats: relay-1.0"]


def test_a_deed_leaves_all_other_messages_alone() -> None:
    settings = RunSettings(run="r", epoch=0, stages=1, microbatches=1, steps=1)
    guest = Guest(Peer("me", 1, "leader", settings))
    send = Send("other", Ping(1, 0))
    assert all(deed.swap(guest, send) == [send] for deed in MEMBER_DEEDS.values() if deed.swap)


def test_guests_need_addresses_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--hostile", "--wan", "wan10"]) == 2
    assert "leave out --wan" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("data node with a relay's ticket", "as a relay, not as a data node"),
        # In the ordinary suite a stranger floods: tests/node/local_swarm/test_hostile_guests.py.
        pytest.param(
            "flood about past iterations",
            "too many messages about past iterations",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_live_guest_is_put_out_and_no_bit_differs(
    tmp_path: Path, texts: Path, supervisor: Supervisor, deed: str, words: str
) -> None:
    """A guest that the chaos test invites."""
    run = small_run(texts, fleet__relays_per_stage=[3, 3], **ENDLESS)
    directory = created(tmp_path / "run", run)
    tracker, record = SwarmTracker(), RunRecord()
    with swarm_of(directory, run, supervisor) as swarm:
        host = GuestHost(swarm, tracker, record, lambda text: None)
        swarm.until(lambda events: len(steps_of(events)) > 2)
        [fault] = with_guests(draw_schedule(1, 60.0, 1.0, 0.0), 1, 1.0, [deed])
        host.invite(fault)
        [visit] = record.guests

        def put_out(events: list[Event]) -> bool:
            for event in (events[-1], *events) if not tracker.t else events[-1:]:
                tracker.on_event(event)
                host.on_event(event)
            host.poll()
            return bool(visit.put_out)

        swarm.until(put_out)
        out_at = len(swarm.of(Step))
        swarm.until(lambda _: len(swarm.of(Step)) > out_at + 2)
        host.end()
        honest = [event for event in swarm.of(PeerRemoved) if event.subject != visit.peer]
    assert visit.began and words in visit.put_out, visit
    assert not [event for event in honest if not event.reason.startswith("moves to")], honest
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


def put_out(hostile: HostileRun, wave: list[tuple[str, int, str]]) -> None:
    """Invite a wave of guests, and follow the run until all have lost their seats for the right reasons."""
    guests = [hostile.invite(deed, stage) for deed, stage, _ in wave]
    hostile.until(lambda: all(map(hostile.out, guests)))
    for guest, (deed, _, words) in zip(guests, wave, strict=True):
        assert re.search(words, hostile.out(guest)), (deed, hostile.out(guest))
    hostile.goes_on()
    hostile.end(*guests)


@pytest.mark.soak  # a live guest, above; in virtual time each deed that docs/explanation/trust.md names
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_guests_are_put_out_one_wave_after_the_other(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """Each serves beside two honest replicas of its stage."""
    run = small_run(texts, **ENDLESS)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        for wave in PUT_OUT:
            put_out(hostile, wave)
        assert not hostile.honest_removed(), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_further_guests_are_put_out(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    run = small_run(texts, **ENDLESS, fleet__data_nodes=2)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        for wave in PUT_OUT_TOO:
            put_out(hostile, wave)
        assert not hostile.honest_removed(), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak  # in virtual time: docs/explanation/trust.md names a test of each of these deeds
@pytest.mark.timeout(900)
def test_guests_that_ask_or_say_too_much_get_nothing(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """All at once: a carrier's addresses do not fill the log, no gradient leaves its stage, and whom a guest
    calls back asks nobody too often."""
    run = small_run(texts, **ENDLESS)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        guests = [hostile.invite(deed, stage) for deed, stage, _ in TOO_MUCH]
        withstood, all_words = hostile.withstood(*guests, steps=30), [words for *_, words in TOO_MUCH]
        hostile.until(lambda: withstood() and all(map(hostile.told, all_words)))
        assert not guests[0].words("gradient")
        assert not hostile.honest_refused(), hostile.honest_refused()
        hostile.end(*guests)
        assert not hostile.honest_removed(), swarm.story()
    records = [decode_entry(line).record for line in directory.log.read_bytes().splitlines()]
    carriers = sum(isinstance(record, Carriers) for record in records)
    assert 0 < carriers <= RECORDS.burst + 1 + RECORDS.per_s * 3 * PATIENCE_S
    assert carriers < sum(isinstance(record, Commit) for record in records)
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_guests_that_no_proof_puts_out_cost_no_honest_seat(
    tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    run = small_run(texts, **ENDLESS, fleet__data_nodes=2)
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        for wave in ENDURED:
            guests = [hostile.invite(deed, stage) for deed, stage, _ in wave]
            hostile.until(hostile.withstood(*guests))
            for guest, (deed, _, words) in zip(guests, wave, strict=True):
                assert not words or hostile.told(words), (deed, swarm.story())
                assert not deed.startswith("all states") or not guest.words("piece"), (deed, guest)
            hostile.end(*guests)
        assert not hostile.honest_removed(), swarm.story()
        assert not swarm.of(Skip), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_guests_that_only_audits_find(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """Deeds: a seal that its sender never made; other bytes than were signed; differences that the second
    auditor does not find; a false contribution of a guest that dies before its receipt; a receipt that lacks
    a result; false work of one that audits falsely, too."""
    audited = {"audit__share": 1.0, "routing__policy": "static", "checkpoint__every": 3}
    run = small_run(texts, **{**ENDLESS, **audited})
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        seal, unsigned = hostile.invite("made-up seal", 1), hostile.invite("other bytes than it signed", 2)
        hostile.until(lambda: bool(hostile.out(seal) and hostile.told("does not have the seal of its")))
        assert "seal of the activation" in hostile.out(seal)
        hostile.goes_on()
        hostile.end(seal, unsigned)
        auditor, gone = hostile.invite("false audits", 1), hostile.invite("false part, then gone", 2)
        hostile.until(lambda: bool(hostile.out(auditor) and gone.begun >= 0 and not gone.process.running))
        hostile.goes_on()
        hostile.end(auditor, gone)
        lacking, liar = hostile.invite("receipt that lacks a result", 1), hostile.invite(LIES_TOO, 2)
        hostile.until(lambda: bool(hostile.out(lacking) and hostile.out(liar)))
        assert hostile.told("a receipt of other units than it owns"), swarm.story()
        hostile.goes_on()
        hostile.end(lacking, liar)
        assert not hostile.honest_removed(), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_one_of_two_replicas_lies(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    """A wrong digest is told by the coordinator's own sum, and for a report of a state the run waits a while.
    A false state is not told: the log goes back, nobody is removed on one word, and the run takes steps again
    once the liar is gone."""
    run = small_run(texts, **{**ENDLESS, "checkpoint__every": 4, "fleet__relays_per_stage": [1, 1]})
    with hostile_run(tmp_path / "run", run, supervisor) as hostile:
        swarm, directory = hostile.swarm, hostile.swarm.directory
        digest = hostile.invite("wrong digest", 1)
        hostile.until(lambda: bool(hostile.out(digest)))
        assert "gradient" in hostile.out(digest)
        hostile.goes_on()
        hostile.end(digest)
        silent = hostile.invite("no report of its state", 1)
        hostile.until(lambda: bool(hostile.out(silent)))
        assert "waits for its report of its state" in hostile.out(silent)
        hostile.goes_on()
        hostile.end(silent)
        state = hostile.invite("false state", 2)
        hostile.until(lambda: state.begun >= 0 and bool(swarm.of(Rollback)))
        hostile.end(state)
        hostile.goes_on()
        assert not hostile.honest_removed(), swarm.story()
    report = verify(directory.path)
    assert report.holds and report.promise == "bits", report.lines()
