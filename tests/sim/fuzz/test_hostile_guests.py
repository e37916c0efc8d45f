"""Hostile guests of `simtest --profile hostile`: what holds, and the seeds that show what does not yet."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from anabranch.protocol.interface.events import Received
from anabranch.protocol.messages import Claim, Keep, Piece
from anabranch.sim.fuzz import trial as trials
from anabranch.sim.fuzz.fault_kinds import PROFILES
from anabranch.sim.fuzz.guest_deeds import DEEDS, OPEN, Deed, Guest, GuestRole, _drops, cells
from anabranch.sim.fuzz.runner import run_seed
from anabranch.sim.fuzz.seed_drawing import draw, profile_of
from anabranch.sim.fuzz.trial import SeedTrial
from anabranch.sim.kernel.violation import Violation
from support.grids import first_of

soak = partial(pytest.param, marks=pytest.mark.soak)


def test_every_deed_is_drawn_by_one_profile_or_the_other() -> None:
    later = cells(False, audits=True, later=True)
    drawn = {(deed.name, role) for deed, role in [*cells(False, audits=True), *later, *cells(True)]}
    assert drawn == {(deed.name, role) for deed in DEEDS.values() for role in deed.roles}
    assert {(deed.name, role) for deed, role in cells(True)} == set(OPEN)
    plans = [plan for seed in range(1000) for plan in draw(seed, "hostile").guests]
    defended = {(deed.name, role) for deed, role in [*cells(False, audits=True), *later]}
    assert {(plan.deed, plan.role) for plan in plans} == defended


def test_seeds_of_a_turn_have_no_guests() -> None:
    """Runs of all profiles in turn stay as they were."""
    assert not any(draw(seed, profile_of(seed)).guests for seed in range(20 * len(PROFILES)))


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of([0, 1, 22, 2, 19], 3))
def test_guests_are_survived(seed: int) -> None:
    """Demands G1 to G3 and all invariants hold, and each guest did its deed."""
    outcome = run_seed(seed, "hostile")
    assert not outcome.violation and not outcome.unmet
    assert outcome.faults


def test_a_flood_of_a_guest_is_no_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 14001280: 150,000 of 200,000 events were messages of a guest, within its budgets, while a black
    hole made steps long."""
    monkeypatch.setattr(trials, "EVENTS_MAX", 10)
    trial = SeedTrial(draw(22, "hostile"))
    node = next(iter(trial.world.nodes.values()))
    trial.world.liars.add("guest")
    for _ in range(100):
        trial._watch(node, Received("guest", Keep(1, 1, "", ())))
    with pytest.raises(Violation, match="circle"):
        for _ in range(100):
            trial._watch(node, Received("honest", Keep(1, 1, "", ())))


def test_many_events_in_many_seconds_are_no_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "EVENTS_MAX", 10)
    monkeypatch.setattr(trials, "EVENTS_PER_S", 50)
    trial = SeedTrial(draw(22, "hostile"))
    node = next(iter(trial.world.nodes.values()))
    monkeypatch.setattr(trial.world.clock, "now", 2.0)
    for _ in range(100):
        trial._watch(node, Received("honest", Keep(1, 1, "", ())))
    with pytest.raises(Violation, match="circle"):
        trial._watch(node, Received("honest", Keep(1, 1, "", ())))


@pytest.mark.soak  # the test before this one holds the rule
def test_a_long_seed_of_slow_peers_is_no_livelock() -> None:
    """200,000 events in 138 virtual seconds: eight steps of five slow stages, in which nothing was wrong."""
    assert not run_seed(20001426, "hostile").violation


def test_a_state_that_a_guest_was_to_keep_may_come_after_its_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """It served when the leader asked it to keep the state, and was moved to another stage while pieces of
    that state were under way. A piece of any other state is one too many (G4)."""
    trial = SeedTrial(draw(22, "hostile"))
    node = next(node for node in trial.world.nodes.values() if node.member.stage)
    guest = Guest(trial.world, node.id, DEEDS["all states"], GuestRole.ADMITTED, Random(0))
    trial.guests.guests.append(guest)
    monkeypatch.setattr(Guest, "stage", 2)

    def hears(message: Keep | Piece) -> None:
        trial.guests._heard(node, Received("d0", message, None))

    monkeypatch.setattr(Guest, "serves", True)
    hears(Keep(1, 8, "", ()))
    monkeypatch.setattr(Guest, "serves", False)
    hears(Piece(1, 8, 0))
    hears(Piece(2, 12, 0))
    hears(Keep(1, 12, "", ()))
    with pytest.raises(Violation, match="G4"):
        hears(Piece(1, 12, 0))


def test_a_guest_that_proved_its_state_and_fetches_a_later_one_may_serve() -> None:
    """It was ready after step 3, and nobody had the gradient of step 4 for it yet (a guest is honest before
    its deed)."""
    assert not run_seed(10000314, "hostile").violation


@pytest.mark.parametrize(
    ("seed", "deed"),
    [
        (303, "silent circuits"),
        (1406, "broken circuits"),
        soak(1096, "silent circuits"),
        soak(283, "broken circuits"),
    ],
)
def test_harmful_carriers_carry_and_are_left(seed: int, deed: str) -> None:
    """The guest really carried: a circuit went through it and met its deed (G5, and all others)."""
    trial = SeedTrial(draw(seed, "hostile"))
    outcome = trial.run()
    assert not outcome.violation and deed in {fault.kind for fault in outcome.faults}
    taken = {carrier for carrier, _ in trial.world.circuits_made}
    assert taken & trial.world.liars


def test_every_seed_with_a_harmful_carrier_has_pairs_that_need_one() -> None:
    """Nobody can dial their relays, and they compute with whole numbers."""
    drawn = [draw(seed, "hostile") for seed in range(400)]
    harmful = [each for each in drawn if any(DEEDS[plan.deed].hides for plan in each.guests)]
    assert harmful and not any(each.torch for each in harmful)
    assert not any(machine.reachable for each in harmful for machine in each.machines if machine.stage)


def test_seeds_with_audits_draw_auditors() -> None:
    """In some seeds; without them and in turns none are drawn."""
    drawn = [draw(seed, "hostile") for seed in range(8_300_000, 8_300_100)]
    assert {len(each.auditors) for each in drawn} >= {0, 1, 2}
    assert not any(each.auditors for each in drawn if not each.settings.audit_share)
    assert not any(draw(seed, name).auditors for seed in range(40) for name in PROFILES if name != "hostile")


@pytest.mark.parametrize("seed", first_of([8300012, 8300068, 8300092]))
def test_seeds_with_auditors_hold(seed: int) -> None:
    """Auditors find what is false and accuse nobody else."""
    trial = SeedTrial(draw(seed, "hostile"))
    outcome, auditors = trial.run(), {machine.id for machine in trial.drawn.auditors}
    found = [fields for _, _, kind, fields in trial.world.notes if kind == "audit"]
    different = [each["subject"] for each in found if each["verdict"] == "different"]
    assert auditors & {each["auditor"] for each in found} and not outcome.violation
    assert set(different) <= trial.world.liars


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    "seed",
    [
        5211106,  # the only replica that was no standby lied, and both standbys were removed on its word
        5300156,  # receipts of a reduce that the coordinator summed were refused, and the stage was removed
        5211933,  # two liars of five replicas reported the same overflow, and the step was skipped
        5300593,  # the first auditor moved to another stage, and nobody audited the false step
        5212131,  # a relay that moved away and back was removed for work that it had to drop
        5400086,  # two checkpoints later, no state from before a false step was left when it was found
        5300338,  # a black hole held credits of the next stage, and honest relays waited for these
        6200334,  # two liars of three that worked removed the third, which two honest standbys agreed with
        6200475,  # a joiner's proof from before a return of the log was compared with a later one
        5400240,  # the only neighbour at the next stage of a large swarm was a black hole
        22000315,  # a peer that had sent a liar its inputs was moved, and dropped what the audit needed
        20004054,  # an auditor saw a link that it had dialled a second late, and the liar's audit expired
        23003223,  # a relay that was moved in an iteration gave no receipt of what it had sent there
        23001729,  # the only relay that was no standby held all credits of the next stage, and used none
        5212158,  # a guest that withheld its inputs held an auditor up until the liar's audit had expired
        # Smaller tests hold these: test_sender.py, and of the last two swarm/byzantine/test_review_audits.py
        # and test_audit.py.
        soak(5211405),  # a data node that was new waited for a black hole for ever
        soak(5302312),  # a search waited for a replica that never opened the iteration
        soak(5212438),  # a false sum in a stage of several cells had no receipt
    ],
)
def test_seeds_that_once_failed(seed: int) -> None:
    assert not run_seed(seed, "hostile").violation


@pytest.mark.costly
@pytest.mark.parametrize("seed", first_of([46, 52]))
def test_a_relay_that_claims_nothing_makes_no_wait_longer_than_the_last(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader waits for several times the last step's duration, of which its former wait was a part."""
    serves = GuestRole.SERVES
    monkeypatch.setitem(DEEDS, "no claims", Deed("no claims", frozenset({serves}), _drops(Claim)))
    drawn = draw(seed, "hostile")
    first = replace(drawn.guests[0], deed="no claims", role=serves, stage=drawn.guests[0].stage or 1)
    outcome = SeedTrial(replace(drawn, guests=(first, *drawn.guests[1:]))).run()
    assert not outcome.violation, outcome.violation


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("seed", "deed"),
    [
        (24, "wrong digest"),  # the liar is one of two
        (34, "false apart"),  # the liar owns no unit, and does not report the result
        (74, "false apart"),  # the liar would have an honest replica removed on its word
        (97, "false apart"),  # the stage has more members than one cell of a reduce
        (10100099, "wrong digest"),  # a newcomer got the result before it opened the iteration
    ],
)
def test_deeds_that_the_coordinator_witnesses(seed: int, deed: str) -> None:
    """It sums all parts itself when a reduce failed, and removes only whose fault it saw."""
    assert deed in {plan.deed for plan in draw(seed, "undefended").guests}
    outcome = run_seed(seed, "undefended")
    assert not outcome.violation, outcome.violation
