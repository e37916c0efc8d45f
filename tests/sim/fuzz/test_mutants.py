"""The mutation check: every deliberate breakage of the protocol is caught by a named invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.protocol.membership.view import Membership
from support.swarms.mutants import (
    MUTANTS,
    SEEDS,
    Mutant,
    Patch,
    budget_by_key,
    caught,
    checkpoint_unchecked,
    early_slot_stays,
    every_stage_doubted,
    far_off_by_one_word,
    first_answer_believed,
    lost_contribution_merged,
    nobody_called_in,
    old_words_count,
    one_word_against_several,
    predictable_draw,
    withholders_stay,
    workers_alone_decide,
)

#: Mutants that a small seed of their profile catches.
QUICK = {
    "a slot granted twice": 2,
    "an embedding counted twice": 4,
    "a repair slot used by admission": 0,
    "acknowledged twice": 2,
    "claims of the removed": 0,
    "doubles kept": 36,
    "commit with one PREPARED": 8,
    "the lowest id decides": 15,
    "the late are waited for without end": 0,
    "a majority of the absent": 231,
    "possession unproven": 127,
    "the initial state unproven": 21,
    "the role of the link": 84,
    "carriers never left": 1406,
    "ends of a dead carrier wait": 42001038,
    "a dead carrier is kept": 0,
    "work under way over a dead carrier is given up": 151,
    "a carrier's line is not shared": 0,
    "carried bytes arrive twice": 0,
    "audits that find nothing": 51,
    "one auditor convicts": 547,
    "a conviction without a return": 26,
    "sums without receipts": 4,
    "receipts of data nodes unread": 91,
    "a codec at one end only": 41,
    "a codec of activations at one end only": 41,
    "a delayed iteration on the state's weights": 14,
    "a delayed iteration in units of the open one": 146,
    "draws by attempt": 41,
    "units of the state before": 127,
    "a slot repeats its batches": 0,
    "a late slot merged": 7,
    "state of a slot survives its reset": 5,
    "a contribution merged once more": 0,
    "a late contribution forgotten": 40,
    "a late contribution merged twice": 40,
    "batches of a late contribution skipped": 7,
    "state of a slot at another machine": 2,
    "a stale outer state": 0,
    "a step ahead left out": 7,
    "a dropped slot skips its batches": 4,
    "a microbatch of inner steps left out": 2,
    "an island of a stale state": 1,
    "activations of inner steps exchanged": 2,
    "an old incarnation reduces": 201,
    "a joiner serving before its fingerprint is checked": 1,
    "backward on other weights": 0,
    "weights predicted at one end": 0,
    "claims of two iterations": 7,
    "cover unchecked": 212,
    "slots by deltas": 2,
}


def one_for_each_invariant() -> list[Any]:
    """The first mutant of QUICK for each set of invariants that are to catch it stays in the suite: it shows
    that their checks are alive. The others are marked `soak`."""
    seen, sets = set[tuple[str, ...]](), list[Any]()
    for name in QUICK:
        invariants = MUTANTS[name].caught_by
        sets.append(pytest.param(name, marks=[pytest.mark.soak] * (invariants in seen)))
        seen.add(invariants)
    return sets


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("name", one_for_each_invariant())
def test_a_few_mutants_are_caught_at_once(name: str) -> None:
    assert caught(name, [QUICK[name]])


def former_name(patch: Patch) -> None:
    patch.setattr(Membership, "apply", lambda self, record: self.former_name(record))


def former_arguments(patch: Patch) -> None:
    patch.setattr(Membership, "apply", lambda self: None)


@pytest.mark.parametrize(
    ("stale", "words"), [(former_name, "former_name"), (former_arguments, "takes 1 positional argument")]
)
def test_a_mutant_that_does_not_fit_the_program_is_told(stale: Callable[[Patch], None], words: str) -> None:
    """A mutant that named a renamed method survived 2,000 seeds, each of which ended in its own exception;
    so did two whose functions lacked an argument that had come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MUTANTS, "stale", Mutant(stale, "calm", ("I7",)))
        with pytest.raises(RuntimeError, match=f"does not fit the program: .*{words}"):
            caught("stale", [0])


def test_budgets_by_key_are_caught_by_their_test() -> None:
    """No demand of the simulator shows this mutant: a stranger's flood costs virtual time nothing."""
    from protocol.context import test_rate_limits

    with pytest.MonkeyPatch.context() as patch:
        budget_by_key(patch)
        with pytest.raises(AssertionError):
            test_rate_limits.test_strangers_share_the_allowance_of_their_ticket()
        with pytest.raises(AssertionError):
            test_rate_limits.test_a_ban_outlives_a_new_key(("ab" * 32, ""))


def test_a_gradient_of_the_working_alone_is_caught_by_its_test() -> None:
    """Seeds draw no two liars that agree on a digest and are most of those that work."""
    from protocol.coordinator import test_prepared

    with pytest.MonkeyPatch.context() as patch:
        workers_alone_decide(patch)
        with pytest.raises(AssertionError):
            test_prepared.test_fewer_liars_than_honest_replicas_decide_nothing()


def test_a_merge_of_a_lost_contribution_is_caught_by_its_test() -> None:
    """In seeds another slot is nearly always ready, so that the round ends without the one that nobody can
    begin: 215 seeds of `rounds` did not catch it."""
    from protocol.coordinator import test_island_rounds

    with pytest.MonkeyPatch.context() as patch:
        lost_contribution_merged(patch)
        with pytest.raises(AssertionError):
            test_island_rounds.test_a_machine_that_lost_its_contribution_is_not_asked_to_merge_it()


def test_a_draw_that_can_be_foreseen_is_caught_by_its_test() -> None:
    from swarm.byzantine import test_audit

    with pytest.MonkeyPatch.context() as patch:
        predictable_draw(patch)
        assert not any(test_audit.a_foreseer_is_found(seed) for seed in (1, 3, 4))


def test_a_norm_that_is_far_off_by_one_word_is_caught_by_its_test() -> None:
    """Seeds have workers whose sums have no moments."""
    from protocol.audit import test_contribution_monitor

    test_contribution_monitor.test_one_false_report_decides_nothing()
    with pytest.MonkeyPatch.context() as patch:
        far_off_by_one_word(patch)
        with pytest.raises(AssertionError):
            test_contribution_monitor.test_one_false_report_decides_nothing()


def test_a_checkpoint_that_is_not_compared_is_caught_by_its_test() -> None:
    """No demand of the simulator is about the files of a checkpoint."""
    from swarm.byzantine import test_false_checkpoints as files

    with pytest.MonkeyPatch.context() as patch:
        checkpoint_unchecked(patch)
        with pytest.raises(AssertionError):
            files.test_a_checkpoint_has_the_agreed_states(files.false_state, 2)


def test_a_slot_claimed_early_that_stays_in_the_sum_is_caught_by_its_test() -> None:
    """In 200 seeds of `rounds` no round ended without such a slot."""
    from swarm.islands import test_unanswered_slots

    with pytest.MonkeyPatch.context() as patch:
        early_slot_stays(patch)
        with pytest.raises(RuntimeError, match="could not do Recount"):
            test_unanswered_slots.test_a_slot_whose_loss_never_came_leaves_the_sum_again("drop")


def test_a_state_of_the_first_answer_is_caught_by_its_test() -> None:
    from swarm.byzantine import test_false_states_after_absence as away

    with pytest.MonkeyPatch.context() as patch:
        first_answer_believed(patch)
        with pytest.raises(AssertionError):
            away.test_it_works_on_with_the_state_of_the_run(0, False)


def test_rules_of_doubted_stages_are_caught_by_their_tests() -> None:
    """Guests of seeds do not hold a step up for minutes."""
    from protocol.recovery import test_last_states
    from swarm.byzantine import test_doubted_stages as doubted
    from swarm.byzantine import test_lone_black_hole as lone

    tests = {
        old_words_count: test_last_states.test_words_about_earlier_states_do_not_count,
        nobody_called_in: lambda: lone.test_a_newcomer_serves_in_the_step_that_it_holds_up(
            "gives nothing back"
        ),
        withholders_stay: lambda: lone.test_one_that_withholds_its_state_too_loses_its_seat(False),
        one_word_against_several: (
            doubted.test_several_that_withhold_their_state_lose_their_seats_by_as_many_words
        ),
        every_stage_doubted: doubted.test_nobody_is_doubted_whose_state_is_not_agreed_for_others_reports,
    }
    for breaks, test in tests.items():
        with pytest.MonkeyPatch.context() as patch:
            breaks(patch)
            with pytest.raises(AssertionError):
                test()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    known = [QUICK[name]] if name in QUICK else []  # perhaps no early one
    outcome = caught(name, [*range(SEEDS), *known])
    assert outcome is not None, f"{name} survives {SEEDS} seeds of {MUTANTS[name].profile}"
    print(f"{name}: seed {outcome.seed} of {outcome.profile}: {outcome.violation}")
