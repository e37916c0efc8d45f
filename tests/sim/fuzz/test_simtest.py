"""Seeds of `anabranch simtest`: drawn swarms and faults, every invariant checked at every event."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from msgspec import structs

from anabranch.cli.main import main
from anabranch.executors import Processes
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.fleet.stragglers import Stragglers
from anabranch.protocol.log.records import Commit, decode_entry
from anabranch.protocol.rounds.plan import slots_of
from anabranch.sim.fuzz.fault_kinds import KINDS, OTHERS, PROFILES, ROUNDS, matrix_cells, reachable
from anabranch.sim.fuzz.narrative import story
from anabranch.sim.fuzz.peer_phases import LATE_SLOTS, ROUND_PHASES, STEPS_AHEAD
from anabranch.sim.fuzz.runner import run_seed, run_seeds
from anabranch.sim.fuzz.seed_drawing import draw, profile_of
from anabranch.sim.fuzz.summary import report, summarize
from anabranch.sim.fuzz.trial import STEPS_AFTER, SeedTrial

#: A seed of at most so many machines costs little.
CHEAP = 4


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("profile", PROFILES)
def test_cheap_seeds_of_every_profile(profile: str) -> None:
    drawn = (draw(seed, profile) for seed in range(120))
    small = (each for each in drawn if len(each.machines) <= CHEAP and not each.torch)
    cheap = [each.seed for each in small if not each.first_t][:6]
    outcomes = [run_seed(seed, profile) for seed in cheap]
    for outcome in outcomes:
        assert not outcome.violation, (outcome.seed, outcome.violation)
        assert outcome.unmet or outcome.steps >= STEPS_AFTER
    delivered = sum(len(outcome.faults) for outcome in outcomes)
    assert delivered >= len(outcomes) if profile != "calm" else delivered == 0


def test_a_copied_key_of_a_peer_that_comes_to_lead_stops_nothing() -> None:
    """The second process of r1.0 connects while r1.0 is elected, and takes the link of the last data node.
    Three members that do not vote hear that data node; the lead goes to a voter that hears it, too (I4)."""
    assert not run_seed(3173583, "storm").violation


def test_a_leader_that_sums_all_parts_of_two_stages_keeps_its_bounds() -> None:
    """After a partition the leader sums the parts of two stages at once: 39 sums wait, and all came from
    members (I5)."""
    assert not run_seed(3200158, "partition").violation


def test_a_data_node_that_came_later_takes_over_from_the_only_one() -> None:
    """Before the first step a stage is lost, so that a second data node serves in the same iteration, which
    was split before it came; then the first one crashes (I4, R2)."""
    assert not run_seed(331, "islands").violation


def test_a_founder_and_strangers_who_know_it_alone_do_not_ask_each_other_for_ever() -> None:
    """No process knows more than its ticket, the addresses of the data nodes (I4)."""
    assert not run_seed(56, "tickets").violation


@pytest.mark.costly
def test_seeds_of_pipeline_islands_with_counted_slots() -> None:
    """Crews of at least two relays and a data node fill slots, several in a round, under faults."""
    drawn = (draw(seed, "crews") for seed in range(60))
    several = (each for each in drawn if each.settings.rounds.pipeline and each.settings.rounds.slots > 1)
    cheap = [each for each in several if 6 <= len(each.machines) <= 10][:5]
    counts = Counter[int]()
    for each in cheap:
        trial = SeedTrial(each)
        assert not trial.run().violation, each.seed
        history = trial.world.history()
        for commit in history.commits:
            plan = history.plans.get(commit.t, ())
            assert all(len(slot.crew) == each.settings.stages + 1 for slot in plan if slot.peer)
            if plan and commit.verdict == "step":
                counts[len(slots_of(plan, commit))] += 1
    assert len(cheap) == 5
    assert min(counts[1], counts[2]) >= 5, counts


def test_rounds_of_several_stages_complete() -> None:
    """Every stage sent the slots of a round to their data node, not only the last one (I4)."""
    assert not run_seed(10100010, "islands").violation


def test_the_loss_of_a_slot_goes_to_another_data_node_if_its_own_serves_later() -> None:
    """Its data node crashed and came back as a new process, which serves from the next round; the machine of
    the slot waited for a credit of it (I4)."""
    assert not run_seed(10100057, "islands").violation


def test_a_leader_with_a_prepared_round_does_not_wake_for_late_slots() -> None:
    """A data node is removed after all stages are PREPARED, so that its slot lacks again. Nothing is dropped
    from a result that is PREPARED, and the leader woke for the past deadline without end (I4)."""
    assert not run_seed(16000195, "rounds").violation


def test_a_slot_goes_to_the_last_machine_although_it_did_not_answer_before() -> None:
    """The data node could not be heard for 20 s: it took the only machine that was left for one that grants
    no credit, and never gave it the slot (I4)."""
    assert not run_seed(21000136, "rounds").violation


def make_leaders_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new leader count itself among those that have to report to it, until it claims work."""
    take_over = Stragglers.take_over

    def of_all(absent: Stragglers) -> None:
        take_over(absent)
        absent._unheard.add(absent.ctx.me)

    monkeypatch.setattr(Stragglers, "take_over", of_all)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("silent", [False, True])
def test_a_leader_that_sums_the_parts_of_a_stage_is_not_silent_to_itself(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """A relay that had come to lead, and had no work to claim, counted as one whose report was late: it gave
    up the reduce that it helped with, and ordered it anew, without end. silent: it counts as such."""
    if silent:
        make_leaders_silent(monkeypatch)
    assert not run_seed(31006093, "rounds").failed


def test_a_peer_that_goes_round_in_a_circle_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader of the test before, without its mends, and within one event: no count of events tells."""
    make_leaders_silent(monkeypatch)
    monkeypatch.setattr(
        ReduceAttempts, "_silent_helpers", lambda self, attempt, look: look[2].intersection(attempt.helpers)
    )
    assert "have no end" in run_seed(31006093, "rounds").violation


def test_joiners_ask_another_if_the_one_they_take_for_the_leader_vanished() -> None:
    """It vanished without a word, so its link stayed, while the leader and the others were cut off."""
    assert not run_seed(31008433, "rounds").failed


def test_who_dials_a_peer_whose_second_process_ended_comes_to_the_first() -> None:
    """A process with the key of the only relay was started and crashed: no newcomer could dial the relay any
    more, nor reach it through others (the simulation's mistake)."""
    assert not run_seed(41002139, "rounds").failed


def test_a_founder_that_lost_its_disk_founds_no_other_run() -> None:
    """It came back without its disk, joined, and crashed again: then it began another log (the simulation's
    mistake: the run's directory was gone)."""
    assert not run_seed(43000712, "rounds").failed


def test_a_flood_by_the_only_relay_ends() -> None:
    """Among its messages is a question for a gradient that it has no use for yet. The data node answered, and
    did not answer its later questions (I4)."""
    assert not run_seed(43002479, "rounds").failed


def test_a_voter_that_is_no_member_any_more_reaches_a_voter_that_came_later() -> None:
    """A leader dies with the record of a new voter on two disks of four: that of the former founder, which is
    no member, and the new voter's own. They must reach each other to be a majority with a third (I4)."""
    assert not run_seed(45100217, "rounds").failed


def test_a_data_node_adds_no_gradient_to_a_slot_that_its_former_process_began() -> None:
    """It serves in the round that it was removed in, as the other data node is gone; its crew sends the
    slot's gradient (I7)."""
    assert not run_seed(45102937, "rounds").failed


def test_a_credit_whose_microbatch_was_refused_too_early_is_used_again() -> None:
    """A data node floods the relay, which then refuses a slot of a round that it has not opened: the credit
    counted as used at one end, and as unused at the other (I4)."""
    assert not run_seed(44305365, "rounds").failed


def test_voters_that_began_anew_hand_the_lead_to_a_member() -> None:
    """The third voter was gone for good, and the processes of the two others were new: they had the log, and
    no member was left that votes, so nobody could lead (I4)."""
    assert not run_seed(48019858, "rounds").failed


def test_a_process_does_not_link_with_another_of_its_own_key() -> None:
    """A fault of the simulation (I7): the second process of a copied key was led to the first one, and got a
    link with one end."""
    assert not run_seed(49012527, "phases").failed


def test_a_leader_that_resigns_follows_whoever_claimed_the_term_before() -> None:
    """A partition had two leaders. The first one heard of the second from a member, then from the voters, and
    forgot whom it followed: it never reported to the new leader, and a unit was nobody's (I4)."""
    assert not run_seed(49015137, "phases").failed


def test_a_microbatch_on_a_credit_foreseen_in_vain_is_counted_at_both_ends() -> None:
    """A data node that took slots over foresaw credits that the relay, which had opened the round before, did
    not grant. It counted the refused one as used, and the next one was never used (I4)."""
    assert not run_seed(49017616, "phases").failed


def test_a_reduce_does_not_begin_once_the_step_is_skipped() -> None:
    """The last weight gradient of a skipped round ended, and the reduce that had waited for it took units out
    of a sum that the worker had dropped (I7). The seed ended otherwise in every second process, as a voter
    dialled the others in the order of a set."""
    assert not run_seed(49003915, "phases").failed


def test_a_member_that_is_ready_and_moved_to_a_lost_stage_has_not_got_its_state() -> None:
    """After two rounds without a crew a relay that was ready for its stage was moved to one that had just
    lost its replicas, and counted as ready for that: the log did not go back to a snapshot (I4)."""
    assert not run_seed(46200037, "rounds").failed


def test_two_ends_of_a_dead_carrier_dial_each_other() -> None:
    """Their own link broke for a second, so a relay carried it, and vanished without a word. Each took the
    other for silent and dialled nobody, so of the two voters that were left neither could lead."""
    outcome = run_seed(42001038, "rounds")
    assert not outcome.failed and outcome.steps == 7


def test_what_a_peer_sent_before_it_moved_counts() -> None:
    """It added a unit of step 5 at stage 2, sent its sum, and moved to stage 1, whose state after step 4 it
    loaded (I1)."""
    assert not run_seed(36, "delayed").violation


def test_a_fetched_gradient_that_is_none_is_refused() -> None:
    """A flood has the answer to a question that its target asked a moment ago."""
    assert not run_seed(31002092, "rounds").failed


def test_a_peer_that_loads_a_state_may_add_units_again() -> None:
    """It missed the first of two iterations in flight and had added a unit of the second, which its worker
    dropped when it loaded the state between them (I1)."""
    assert not run_seed(16000281, "storm").violation


def test_a_seed_with_tensors() -> None:
    outcome = run_seed(131)
    assert outcome.torch
    assert not outcome.violation


def test_a_seed_with_tensors_has_the_audits_that_it_draws() -> None:
    """They were drawn, and such seeds ran without them: a guest that computed falsely kept its seat."""
    trial = SeedTrial(draw(10001097, "hostile"))
    outcome = trial.run()
    assert outcome.torch and not outcome.violation
    steps = [r for line in trial.world.log if isinstance(r := decode_entry(line).record, Commit)]
    assert trial.world.settings.audit_share == trial.drawn.settings.audit_share == 0.3
    assert any(receipt for step in steps for stage in step.stages for receipt in stage.receipts)


@pytest.mark.soak
@pytest.mark.timeout(36_000)
def test_twenty_thousand_seeds() -> None:
    """No violation, and every cell of the matrix of phases and faults is filled."""
    jobs = os.cpu_count() or 1
    found = summarize(run_seeds(range(20_000), where=Processes(jobs)), 0, 20_000, "", 1.0)
    assert not found.failures, found.failures[:5]
    assert found.thinnest_cell >= 100, report(found)


@pytest.mark.costly
def test_a_seed_means_the_same_in_every_process() -> None:
    """Sets and dictionaries of names are hashed anew in each. Seed 49003915 went two ways, by the order in
    which a voter dialled the others."""
    program = """
import msgspec
from anabranch.sim.fuzz.runner import run_seed
for seed, profile in [(105, "storm"), *((49003915 + more, "phases") for more in range(8))]:
    outcome = run_seed(seed, profile)
    outcome.cpu_s = 0.0
    print(msgspec.json.encode(outcome).decode())
"""
    command = [sys.executable, "-c", program]
    path = ":".join(sys.path)
    told = set()
    for salt in ("1", "2"):
        salted = {"PYTHONHASHSEED": salt, "PYTHONPATH": path}
        told.add(subprocess.run(command, env=salted, capture_output=True, text=True, check=True).stdout)
    assert len(told) == 1


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simtest", "--seeds", "8:10", "--jobs", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 1
    assert found["seeds"] == 2
    assert found["failures"] == []
    assert sum(found["faults"].values()) == sum(
        cell["delivered"] for row in found["matrix"].values() for cell in row.values()
    )


def test_a_trace_tells_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simtest", "--trace", "104", "--profile", "churn20"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("seed 104, profile churn20: ")
    assert "FAULT (" in told
    assert "is removed from the run" in told
    assert "step 3 is committed" in told
    assert told.endswith("nothing is violated\n")


def test_a_failing_seed_says_how_to_see_it_again() -> None:
    trial = SeedTrial(draw(105, "storm"))
    watched = trial.invariants._exactly_once

    def without_a_loss(commit: Commit) -> None:
        watched(structs.replace(commit, loss_sums=(float("nan"),)))

    trial.invariants._exactly_once = without_a_loss  # type: ignore[method-assign]
    outcome = trial.run()
    assert outcome.invariant == "I1"
    found = summarize([outcome], 105, 106, "storm", 1.0)
    assert found.failed
    assert found.violations == {"I1": 1}
    assert found.failures[0].reproduce == "anabranch simtest --trace 105 --profile storm"
    assert "VIOLATION I1" in "\n".join(story(trial))


def test_aims_fill_the_matrix_evenly() -> None:
    """Every cell that can be reached is aimed at by some profile."""
    aimed = {cell for profile in PROFILES.values() for cell in profile.cells}
    assert aimed == matrix_cells()
    in_rounds = {(kind, phase) for kind in KINDS for phase in ROUND_PHASES if reachable(kind, phase)}
    assert in_rounds <= aimed and len(in_rounds) > 190 and len(aimed - in_rounds) > 250


def test_a_third_of_the_seeds_takes_rounds() -> None:
    """Machines alone fill slots in some, crews in others; each other profile has a ninth of the seeds."""
    turns = Counter(profile_of(seed) for seed in range(900))
    assert turns == {ROUNDS.name: 300} | {profile.name: 100 for profile in OTHERS}
    drawn = [draw(seed, ROUNDS.name) for seed in range(300)]
    assert all(each.settings.rounds.inner for each in drawn)
    crews = sum(each.settings.rounds.pipeline for each in drawn)
    assert min(crews, len(drawn) - crews) > 90


def test_seeds_have_what_the_aimed_phases_of_a_round_need() -> None:
    """Steps ahead and late slots do not occur in every run with rounds."""
    for seed in range(200):
        drawn = draw(seed, ROUNDS.name)
        rounds, phases = drawn.settings.rounds, {aim.phase for aim in drawn.aims}
        assert rounds.overlap or STEPS_AHEAD not in phases
        assert rounds.slots > 1 or LATE_SLOTS not in phases
        for aim in drawn.aims:
            hits = rounds.has(aim.after_t + 1)
            assert hits or aim.phase not in ROUND_PHASES


def test_faults_hit_every_phase_of_a_round() -> None:
    met = Counter[str]()
    for seed in (9, 14):
        outcome = run_seed(seed, ROUNDS.name)
        assert not outcome.violation, (seed, outcome.violation)
        met.update(fault.phase for fault in outcome.faults if fault.phase == fault.aimed)
    assert set(ROUND_PHASES) <= set(met), met


@pytest.mark.parametrize(
    "arguments", [["--seeds", "7"], ["--seeds", "9:3"], ["--jobs", "-1"], ["--profile", "hurricane"]]
)
def test_bad_arguments_are_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simtest", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_profiles_meet_all_that_seeds_draw() -> None:
    """The draws of a seed do not correlate with the order of the profiles."""
    met: dict[str, set[str | int]] = {name: set() for name in PROFILES}
    for seed in range(150 * len(OTHERS)):
        drawn = draw(seed, profile_of(seed))
        settings = drawn.settings
        what = (settings.policy, f"torch {drawn.torch}", f"{settings.voters} voters")
        met[drawn.profile.name].update((*what, settings.snapshot_every))
    for name in PROFILES:
        tensors = 1 if name == ROUNDS.name else 2
        assert len(met[name]) == 3 + tensors + 2 + 4, (name, met[name])
