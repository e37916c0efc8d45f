"""The schedule of a storm, whom it hits, and what is told of it: no processes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.chaos import _metrics, configured
from anabranch.cli.main import main
from anabranch.config import relays_by_stage, render_run_file, with_changes
from anabranch.node.chaos.fault_injector import ChaosSwarm, FaultInjector
from anabranch.node.chaos.fault_schedule import DATA, RELAY, STAGE, VOTER, PlannedFault, draw_schedule
from anabranch.node.chaos.metrics import metrics_of
from anabranch.node.chaos.report import Result, Settings, Verdict
from anabranch.node.chaos.run_record import DeliveredFault, RunRecord
from anabranch.node.chaos.step_comparison import tokens_of
from anabranch.node.chaos.swarm_tracker import SwarmTracker, voters_of
from anabranch.node.chaos.victims import Candidate, choose_victims
from anabranch.node.chaos.wasted_compute import WastedCompute, wasted_compute
from anabranch.node.driver import compute_ledger as ledger
from anabranch.node.local_swarm.local_swarm import LEADER
from anabranch.observe.events import (
    Event,
    PeerActive,
    PeerJoined,
    PeerRemoved,
    Repair,
    Rollback,
    Step,
    Suspected,
)
from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import (
    NO_ENTRY,
    Commit,
    Control,
    Entry,
    NoOp,
    StageCommit,
    Voters,
    Witness,
    encode_entry,
)
from support import hand_made_logs


def test_a_founder_that_was_removed_while_it_was_frozen_returns_after_the_last_fault() -> None:
    """It learns so when it wakes, and ends; without it nobody tells how the run goes on."""
    started: list[str] = []
    founder = SimpleNamespace(running=True)
    swarm = SimpleNamespace(
        processes={LEADER: founder}, stopping=False, restart_leader=lambda: started.append(LEADER)
    )
    injector = FaultInjector(cast(ChaosSwarm, swarm), [], lambda text: None)
    injector.begin()
    injector.end()
    injector.poll()
    assert not started
    founder.running = False
    injector.poll()
    assert started == [LEADER]


def test_a_killed_voter_counts_as_gone_before_the_system_says_so(tmp_path: Path) -> None:
    """Two voters of three were hit within a tenth of a second: the first one seemed to run. Nothing was
    committed for 23 s."""
    names = [LEADER, "relay-1.0", "relay-1.1"]
    processes = {name: SimpleNamespace(running=True, signal=lambda number: None) for name in names}
    directory = SimpleNamespace(events=tmp_path / "events.jsonl")
    swarm = SimpleNamespace(processes=processes, voters=lambda: set(names), directory=directory)
    faults = [planned(VOTER, at_s=0.0), planned(VOTER, at_s=0.0, freeze_s=9.0)]
    injector = FaultInjector(cast(ChaosSwarm, swarm), faults, lambda text: None)
    injector.tracker.names = {name: name for name in names}
    injector.begin()
    injector.poll()
    assert [len(fault.victims) for fault in injector.record.delivered] == [1]


def planned(target: str = RELAY, pick: float = 0.0, freeze_s: float = 0.0, at_s: float = 1.0) -> PlannedFault:
    return PlannedFault(at_s, target, freeze_s, pick, returns=False, replace_s=0.5)


def candidates() -> list[Candidate]:
    """Two data nodes, the first keeps the log; stage 1 has three relays, stage 2 one and a joiner."""
    return [
        Candidate("data-0", 0, serves=True, votes=True),
        Candidate("data-1", 0, serves=True),
        *(Candidate(f"relay-1.{n}", 1, serves=True) for n in range(3)),
        Candidate("relay-2.0", 2, serves=True),
        Candidate("relay-x1", 2, serves=False),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_a_function_of_its_seed_and_has_all_kinds(seed: int) -> None:
    strikes = draw_schedule(seed, 600.0, 20.0, 0.2)
    assert strikes == draw_schedule(seed, 600.0, 20.0, 0.2) != draw_schedule(seed + 1, 600.0, 20.0, 0.2)
    assert len(strikes) == 200
    assert [s.at_s for s in strikes] == sorted(s.at_s for s in strikes)
    assert strikes[0].at_s >= 0 and strikes[-1].at_s < 600
    assert Counter(s.target for s in strikes) == {RELAY: 179, DATA: 10, VOTER: 10, STAGE: 1}
    frozen = [s for s in strikes if s.freeze_s]
    assert len(frozen) == 40 and all(0.5 <= s.freeze_s <= 30 for s in frozen)
    stage = next(s for s in strikes if s.target == STAGE)
    assert not stage.freeze_s and abs(stage.at_s - 300) < 20
    assert {s.returns for s in strikes} == {True, False}


def test_small_plans() -> None:
    assert draw_schedule(1, 60.0, 0.0, 0.2) == []
    assert [s.target for s in draw_schedule(1, 60.0, 3.0, 0.0)] == [RELAY] * 3
    assert Counter(s.target for s in draw_schedule(1, 60.0, 4.0, 1.0)) == {
        RELAY: 1,
        DATA: 1,
        VOTER: 1,
        STAGE: 1,
    }


def test_a_relay_is_struck_but_not_the_last_of_its_stage() -> None:
    hit = {choose_victims(planned(pick=p / 100), candidates(), 1) for p in range(100)}
    assert hit == {("relay-1.0",), ("relay-1.1",), ("relay-1.2",), ("relay-x1",)}
    lonely = [each for each in candidates() if each.name in ("data-0", "relay-2.0")]
    assert choose_victims(planned(), lonely, 1) == "every relay is the last of its stage"
    assert choose_victims(planned(), lonely[:1], 1) == "there is no relay"
    asleep = [lonely[0], Candidate("a", 1, serves=True), Candidate("b", 1, serves=True, awake=False)]
    assert choose_victims(planned(), asleep, 1) == "every relay is the last of its stage"


def test_a_whole_stage_is_struck_with_those_who_sleep_or_are_on_their_way() -> None:
    assert choose_victims(planned(STAGE, 0.0), candidates(), 1) == ("relay-1.0", "relay-1.1", "relay-1.2")
    assert choose_victims(planned(STAGE, 0.99), candidates(), 1) == ("relay-2.0", "relay-x1")
    assert choose_victims(planned(STAGE), candidates()[:2], 1) == "no stage is served"


def test_data_nodes_and_voters() -> None:
    assert choose_victims(planned(DATA, 0.9), candidates(), 1) == ("data-1",)
    assert choose_victims(planned(DATA), candidates()[:1], 1) == "a majority of the voters would be gone"
    assert "one voter" in choose_victims(planned(VOTER), candidates(), 1)


def test_a_majority_of_the_voters_is_spared() -> None:
    three = [
        *candidates(),
        Candidate("relay-3.0", 3, True, votes=True),
        Candidate("relay-3.1", 3, True, votes=True),
    ]
    hit = {choose_victims(planned(VOTER, p / 10), three, 3) for p in range(10)}
    assert hit == {("data-0",), ("relay-3.0",), ("relay-3.1",)}
    assert {choose_victims(planned(DATA, p / 10), three, 3) for p in range(10)} == {("data-0",), ("data-1",)}
    assert {choose_victims(planned(STAGE, p / 10), three, 3) for p in range(10)} == {
        ("relay-1.0", "relay-1.1", "relay-1.2"),
        ("relay-2.0", "relay-x1"),
    }
    asleep = [*three[:-1], Candidate("relay-3.1", 3, True, awake=False, votes=True)]
    assert choose_victims(planned(VOTER), asleep, 3) == "a majority of the voters would be gone"
    assert ("relay-3.0",) not in {choose_victims(planned(pick=p / 100), asleep, 3) for p in range(100)}


def test_who_votes_is_the_last_word_of_the_log() -> None:
    records = [Voters(("a",)), NoOp(), Voters(("a/1", "b/2", "c/3")), Control("pause")]
    entries = [encode_entry(Entry(index, 1, "", record)) for index, record in enumerate(records)]
    assert voters_of(b"\n".join([*entries, b'{"cut "voters" off'])) == {"a", "b", "c"}
    assert voters_of(entries[0] + b"\n") == {"a"} and voters_of(b"") == set()


def joined(subject: str, name: str, stage: int) -> PeerJoined:
    return PeerJoined(subject=subject, name=name, region="", role="relay", stage=stage, numerics_class="c")


def test_the_tracker_follows_who_comes_moves_and_goes() -> None:
    tracker = SwarmTracker()
    for event in (joined("id1", "a", 1), PeerActive(subject="id1", stage=1, from_iteration=4)):
        tracker.on_event(event)
    assert "a" in tracker.stages and tracker.serving == {"a"} and tracker.stages == {"a": 1}
    tracker.on_event(PeerRemoved(subject="id1", stage=1, reason="moves to stage 2"))
    assert "a" not in tracker.stages
    tracker.on_event(joined("id1", "a", 2))
    assert tracker.stages == {"a": 2} and not tracker.serving
    tracker.on_event(step(7, 0.0))
    tracker.on_event(Rollback(t=5))
    assert tracker.t == 5


def step(t: int, time: float) -> Step:
    return Step(
        time=time,
        t=t,
        loss=1.0,
        tokens=1,
        grad_norm=1.0,
        clip_factor=1.0,
        learning_rate=1.0,
        seconds=1.0,
        manifest_hash="",
    )


def a_record() -> RunRecord:
    killed = DeliveredFault(planned(), 110.0, 4, 1, ("a",), ("A",))
    frozen = DeliveredFault(planned(freeze_s=5.0), 120.0, 6, 1, ("b",), ("B",))
    return RunRecord(
        delivered=[killed, frozen],
        undelivered=[(planned(VOTER), "one voter")] * 2,
        began=100.0,
        began_t=3,
        ended=140.0,
        ended_t=8,
        after_last=3,
        replaced_s=[(killed, 2.0), (killed, 4.0)],
    )


def events() -> list[Event]:
    def repair(dead: str, time: float, t: int = 5) -> Repair:
        return Repair(time=time, t=t, index=0, stage=1, dead=dead, replacement="", reason="forward")

    def suspected(subject: str, time: float) -> Suspected:
        return Suspected(time=time, subject=subject, reason="silent")

    return [
        step(4, 105.0),
        repair("A", 110.5),
        PeerJoined(time=110.9, subject="B", name="b", region="", role="relay", stage=1, numerics_class="c"),
        PeerRemoved(time=111.0, subject="A", stage=1, reason="nobody listens at its address any more"),
        PeerJoined(time=111.5, subject="A", name="a", region="", role="relay", stage=1, numerics_class="c"),
        step(5, 112.0),
        repair("A", 113.0),
        step(6, 115.0),
        suspected("B", 121.0),
        repair("B", 121.5),
        repair("B", 138.0, t=9),  # it is back, and kept a microbatch for too long
        suspected("B", 139.9),
        suspected("C", 130.0),
        PeerRemoved(time=131.0, subject="C", stage=1, reason="silent"),
        PeerRemoved(time=131.0, subject="D", stage=1, reason="moves to stage 2, which has one replica"),
        step(7, 132.0),
        Rollback(time=133.0, t=5),
        step(6, 134.0),
        step(7, 135.0),
        step(8, 139.0),
        step(9, 141.0),
    ]


def test_figures_of_a_storm() -> None:
    metrics = metrics_of(a_record(), events(), 36, WastedCompute(computed_s=10.0, killed_s=0.5))
    assert metrics.faults.delivered == {"relay killed": 1, "relay frozen": 1}
    assert metrics.faults.undelivered == {"voter killed": {"one voter": 2}}
    assert (metrics.steps, metrics.rollbacks, metrics.rolled_back, metrics.repaired) == (5, 1, 2, 4)
    assert (metrics.falsely_suspected, metrics.falsely_removed) == (1, 1)
    assert metrics.peer_hours == pytest.approx(0.4)
    killed, frozen = metrics.recovery["killed"], metrics.recovery["frozen"]
    assert (killed.next_hop.count, killed.next_hop.median) == (1, 0.5)
    assert (frozen.next_hop.count, frozen.next_hop.median) == (1, 1.5)
    assert (killed.commit.median, frozen.commit.median) == (2.0, 12.0)
    assert (killed.replaced.count, killed.replaced.median) == (2, 3.0)
    assert frozen.replaced.count == 0


def a_history() -> LogReplay:
    """Steps 5 and 6: of two microbatches at stage 1 peer A owns the first, B the second."""

    def commit(t: int) -> Commit:
        stage = StageCommit("", "", {}, ("A", "B"), (), (0, 1))
        nothing = StageCommit("", "", {}, (), (), ())
        values = (1.0, 1.0, 0.1, 1.0, 1.0, t)
        return Commit("", 0, 1, t, "", "", "step", 1, (), (nothing, stage), *values)

    return LogReplay(commits=[commit(5), commit(6)])


def test_waste_is_what_entered_no_step_put_down_to_its_cause() -> None:
    def entry(at: float, t: int, unit: int, seconds: float, kind: str = "Forward") -> ledger.Entry:
        return ledger.Entry(at, t, 1, unit, kind, seconds)

    record = (
        a_record()
    )  # A was killed at 110 when step 4 was committed, B frozen from 120 to 125 after step 6
    ledgers = {
        "A": [
            entry(106.0, 5, 1, 1.0),  # not its own in the end: it died
            entry(111.5, 5, 0, 2.0),  # it came again, and owned that one
            entry(114.0, 6, 0, 4.0),  # counted in the first step 6, which was rolled back
            entry(133.5, 6, 0, 8.0),
            entry(133.6, 6, 0, 16.0, "WeightGradient"),
            entry(133.7, 6, 1, 32.0),  # nobody was struck then
            entry(140.0, 7, 0, 64.0),  # the run ended in it
        ],
        "B": [
            entry(122.0, 6, 0, 2.0 + 128.0),
            entry(134.0, 6, 1, 5.0 + 256),
            entry(134.0, 6, 1, 5.0 + 512, "Recount"),
        ],
    }
    # A stopped process computes nothing: of these six seconds five were no work.
    ledgers["B"].append(entry(125.5, 5, 1, 6.0))
    waste = wasted_compute(record, events(), a_history(), ledgers)
    assert waste.computed_s == 1023 - 64 + 1
    assert (waste.killed_s, waste.frozen_s, waste.rolled_back_s, waste.other_s) == (1, 128, 4, 32 + 512)
    assert waste.share(waste.wasted_s) == pytest.approx(677 / 960)


def test_tokens_of_skipped_steps_do_not_count(tmp_path: Path) -> None:
    """The record of a skipped step has its batch's tokens; what a guest had skipped is no throughput."""
    steps = [hand_made_logs.step(t) for t in (1, 2, 3, 4)]
    steps[2] = msgspec.structs.replace(steps[2], verdict="skip", witness=Witness("r", 1, 0, "wq"))
    lines = hand_made_logs.chained([hand_made_logs.genesis(), *steps])
    directory = RunDirectory(tmp_path)
    directory.log.write_bytes(b"".join(line + b"\n" for line in lines))
    assert steps[2].tokens and tokens_of(directory, 1, 4) == steps[1].tokens + steps[3].tokens


def test_a_run_whose_steps_were_all_skipped_keeps_no_throughput() -> None:
    calm = RunRecord(began=0.0, ended=10.0, ended_t=2, tokens=128)
    setting = Settings(6, 2, 2, 1, 1.0, 0.2, 20.0, 0.2, "", "runs/chaos")
    metrics = metrics_of(a_record(), events(), 36, WastedCompute())
    assert metrics.steps and Result(setting, a_record(), metrics, Verdict(True, 9, ""), [calm]).kept == 0.0


def test_a_result_says_what_it_found_and_fails_for_a_bit() -> None:
    calm = RunRecord(began=0.0, ended=10.0, ended_t=2)
    setting = Settings(6, 2, 2, 1, 1.0, 0.2, 20.0, 0.2, "", "runs/chaos")
    metrics = metrics_of(a_record(), events(), 36, WastedCompute())
    result = Result(setting, a_record(), metrics, Verdict(True, 9, "verify: 9 steps: fine"), [calm], True)
    assert result.problems == [] and result.kept == pytest.approx(5 / 40 / 0.2)
    told = "\n".join(result.lines())
    assert "faults delivered: 2 (1 relay killed, 1 relay frozen)" in told
    assert "not delivered: 2 voter killed: one voter" in told
    assert "throughput kept: 62 %" in told
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["survived"] is True
    bent = Result(setting, a_record(), metrics, Verdict(False, 9, "verify: 1 value differs"), [], False)
    assert len(bent.problems) == 2 and bent.kept is None
    stuck = RunRecord(delivered=a_record().delivered, stuck="nothing was committed")
    still = Result(
        setting, stuck, metrics_of(stuck, events(), 36, WastedCompute()), Verdict(True, 0, "verify")
    )
    assert len(still.problems) == 2 and still.lines()[-1] == "failed: no step was committed"


def test_the_run_of_a_storm(tmp_path: Path) -> None:
    default = configured(None, None)
    assert relays_by_stage(default) == (3, 3, 3, 3) and default.fleet.minimum == 3
    file = tmp_path / "run.toml"
    file.write_text(
        render_run_file(
            with_changes(
                default, {"run.steps": 50, "fleet.minimum": 1, "fleet.relays_per_stage": [2, 1, 1, 1]}
            )
        )
    )
    own = configured(file, None)
    assert relays_by_stage(own) == (2, 1, 1, 1)
    assert own.run.steps > 100_000 and own.optimizer.decay_steps == default.optimizer.decay_steps
    assert relays_by_stage(configured(file, 9)) == (3, 2, 2, 2)


@pytest.mark.parametrize(
    "arguments",
    [["--population", "0"], ["--minutes", "0"], ["--freeze", "1.5"], ["--faults-per-minute", "-1"]],
)
def test_what_makes_no_storm_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_inner_steps_of_a_crew_are_in_the_ledger_each_once(tmp_path: Path) -> None:
    """The data node's work is of its slot's units at stage 0, a relay's of the slot."""
    each = [
        tasks.InnerForward(3, 1, 5, 0),
        tasks.InnerHead(3, 1, 5, 0),
        tasks.InnerBackward(3, 1, 5, 1),
        tasks.InnerStep(3, 1, 5),
    ]
    found = {}
    for stage in (0, 2):
        kept = ledger.Ledger(tmp_path / f"{stage}.jsonl")
        for task in each:
            kept.add(task, stage, 4, 1.0)
        entries = ledger.read_ledger(tmp_path / f"{stage}.jsonl")
        found[stage] = [(entry.unit, entry.kind) for entry in entries]
    kinds = ["InnerForward 5.0", "InnerHead 5.0", "InnerBackward 5.1", "InnerStep 5"]
    assert found[0] == list(zip((3, 2, 3, 3), kinds, strict=True))
    assert found[2][0] == (1, kinds[0]) and found[2][2:] == [(1, kinds[2]), (1, kinds[3])]


def test_the_measures_are_taken_from_a_log_whose_last_line_is_cut_off(tmp_path: Path) -> None:
    """The founder has just been killed; its log was read to the end, and the experiment ended by that."""
    directory = RunDirectory.create(tmp_path / "run")
    line = encode_entry(Entry(0, 1, NO_ENTRY, NoOp()))
    directory.log.write_bytes(line + b"\n" + line[:-9])
    directory.events.touch()
    metrics = _metrics(RunRecord(began=1.0, ended=2.0), directory, population=3)
    assert metrics.compute.computed_s == 0.0
