"""Steps of a single machine that computes with integers: results with which a swarm's are compared.

Not here: the arithmetic (`integer_arithmetic`), inner steps of pipeline islands (`integer_islands`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Slot
from anabranch.protocol.rounds.plan import Plan, Slots, slots_of, with_owners
from anabranch.sim.workers.integer_arithmetic import (
    WORDS,
    Words,
    activated,
    after_step_ahead,
    contribution,
    embedded,
    initial,
    inner_salt,
    input_gradient,
    late_contribution,
    loss_gradient,
    loss_of,
    own_data,
    own_loss,
    predicted,
    slot_state,
    step,
    with_own,
    with_state,
)
from anabranch.sim.workers.integer_islands import SlotResult, slot_on_single_machine

Batch = tuple[tuple[int, int, int, int, int], ...]
"""(microbatch, its iteration, 0, 0, 0) each; in a round (slot, `inner_salt`, number that stands for what it
carries, number of the late contribution that is merged, number of its machine's own data) each, 0 where there
is nothing."""
Carried = tuple[tuple[int, tuple[int, ...]], ...]
"""(slot, numbers that stand for its state after the last round) each: that of its machine, or with pipeline
islands those of all stages from 0 on."""


class Step(NamedTuple):
    """Results of a step on a single machine: gradient and new state of each stage from 0 on; loss of each
    microbatch, or slot, in ascending order."""

    gradients: tuple[Words, ...]
    states: tuple[int, ...]
    losses: tuple[float, ...]


def step_of(
    settings: Settings,
    t: int,
    states: tuple[int, ...],
    slots: Slots,
    before: Carried = (),
    seen: tuple[int, ...] = (),
) -> Step:
    """Results of iteration t on a single machine. states: of stages 0 to S before it. slots: those that count
    in a round; empty if t is no round. before: what slots carry from the round before. seen: numbers of the
    weights with which a delayed iteration computes, by stage (else empty)."""
    if slots and settings.rounds.pipeline:
        return _round_of_crews(settings, states, slots, before)
    return _synchronous(t, states, _batch(t, settings, slots, before), seen, bool(slots))


def carried_after(settings: Settings, states: tuple[int, ...], plan: Plan, before: Carried) -> Carried:
    """Numbers that all slots carry after a round with this plan. states: states of stages 0 to S before the
    round. before: what they carried before it."""
    if not settings.rounds.pipeline:
        return _slot_states(settings.rounds, states, plan, before)
    if not settings.rounds.keeps:
        return ()
    slots = {slot: each for slot, each in enumerate(plan) if each.steps}
    results = _crew_results(settings, states, slots, before)
    return tuple((slot, result.carries) for slot, result in results.items())


def states_after(t: int, settings: Settings, history: LogReplay | None = None) -> tuple[int, ...]:
    """States of stages 0 to S after t steps on a single machine. history: replayed log of a run with rounds,
    from which come the slots that counted and the rounds that were skipped; None: a run without rounds."""
    states, seen = tuple(map(initial, range(settings.stages + 1))), tuple[int, ...]()
    carried: Carried = ()
    for each in range(1, t + 1):
        slots: Slots = {}
        ahead = tuple(map(predicted, states)) if settings.delay.has(each + 1) else ()
        before = carried
        if history is not None and settings.rounds.has(each):
            plan, commit = history.plans[each], history.commits[each - 1]
            plan = with_owners(plan, commit)
            slots, carried = slots_of(plan, commit), carried_after(settings, states, plan, before)
            if commit.verdict == "skip":
                continue
        states = step_of(settings, each, states, slots, before, seen).states
        seen = ahead
    return states


@lru_cache(maxsize=4096)
def _synchronous(
    t: int, former: tuple[int, ...], batch: Batch, seen: tuple[int, ...] = (), whole: bool = False
) -> Step:
    """Results of an iteration in which each microbatch passes all stages once; also of a round of slots that
    hold the whole model (`whole`), whose contributions depend on no gradient. former: states before it.
    batch: its microbatches or slots. seen: as of `step_of`."""
    states = seen or former
    sums = [[0] * WORDS for _ in states]

    def add(stage: int, words: Words) -> None:
        sums[stage] = [total + word for total, word in zip(sums[stage], words, strict=True)]

    losses = []
    for index, salt, carried, late, own in batch:
        x = with_state(embedded(states[0], salt, index), carried)
        add(1, late_contribution(late))
        inputs = []
        for stage in range(1, len(states)):
            inputs.append(x)
            x = activated(states[stage], stage, x)
        losses.append(own_loss(states[1], with_own(inputs[0], own)) if own else loss_of(states[0], x))
        dy = loss_gradient(states[0], x)
        add(0, contribution(states[0], 0, x))
        for stage in range(len(states) - 1, 0, -1):
            used = with_own(inputs[0], own) if stage == 1 else inputs[stage - 1]
            add(stage, contribution(states[stage], stage, used, 0 if whole else dy))
            dy = input_gradient(states[stage], stage, inputs[stage - 1], dy)
        add(0, contribution(states[0], 0, t, index, dy))
    gradients = tuple(map(tuple, sums))
    return Step(gradients, tuple(map(step, former, gradients)), tuple(losses))


def _batch(t: int, settings: Settings, slots: Slots, before: Carried) -> Batch:
    """Microbatches of iteration t, or the slots of a round, in ascending order; arguments as of `step_of`."""
    microbatches, private = settings.microbatches, settings.rounds.private
    if not slots:
        return tuple((index, t, 0, 0, 0) for index in range(microbatches))
    known, found = dict(before), []
    for slot, plan in sorted(slots.items()):
        carried = known.get(slot, (0,))[0] if plan.carried else 0
        own = own_data(plan.peer) if private else 0
        found.append((slot, inner_salt(plan.first, plan.steps), carried, carried if plan.late else 0, own))
    return tuple(found)


def _slot_states(rounds: Rounds, states: Sequence[int], plan: Plan, before: Carried) -> Carried:
    """Numbers that slots of whole models carry after a round and its steps ahead; arguments as of
    `carried_after`."""
    known, found = dict(before), []
    for slot, each in enumerate(plan):
        x = embedded(states[0], inner_salt(each.first, each.steps), slot)
        carried = known.get(slot, (0,))[0] if each.carried else 0
        own = own_data(each.peer) if rounds.private else 0
        number = slot_state(states[1], with_own(with_state(x, carried), own))
        for _ in range(rounds.ahead(each.steps)):
            number = after_step_ahead(number)
        found.append((slot, (number,)))
    return tuple(found)


def _round_of_crews(settings: Settings, states: tuple[int, ...], slots: Slots, before: Carried) -> Step:
    results = _crew_results(settings, states, slots, before).values()
    gradients = []
    for stage in range(len(states)):
        words = zip(*(result.changes[stage] for result in results), strict=True)
        gradients.append(tuple(map(sum, words)))
    losses = tuple(result.loss for result in results)
    return Step(tuple(gradients), tuple(map(step, states, gradients)), losses)


def _crew_results(
    settings: Settings, states: tuple[int, ...], slots: Mapping[int, Slot], before: Carried
) -> dict[int, SlotResult]:
    """Result of each of these slots that pipeline islands fill, by slot in ascending order. states: of stages
    0 to S before the round. before: what slots carry from the round before."""
    known, nothing = dict(before), (0,) * len(states)
    inner = settings.microbatches // settings.rounds.slots
    found = {}
    for slot, plan in sorted(slots.items()):
        carried = known.get(slot, nothing) if plan.carried else nothing
        found[slot] = slot_on_single_machine(states, slot, plan, carried, inner)
    return found
