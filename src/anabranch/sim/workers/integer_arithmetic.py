"""Steps of a single machine that computes with integers instead of tensors: the arithmetic, and all states.

Every activation, gradient and contribution is a hash of its inputs: the state of the stage, the microbatch,
and the payloads received. A contribution (the weight gradient of a microbatch) is a vector of 64-bit numbers,
and a reduced gradient is the sum of contributions. So a contribution that is lost, added twice, or computed
from a stale state or another microbatch's payload changes the sum, the state after the step, and all later
states. Not here: a peer's tasks (`integer_worker`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.rounds.plan import Plan, Slots, slots_of

#: Numbers in a contribution and in a gradient (a choice).
WORDS = 4
#: Pieces of a snapshot, besides the one that contains its iteration (a choice).
PIECES = 4

Words = tuple[int, ...]
Batch = tuple[tuple[int, int, int, int], ...]
"""(microbatch, its iteration, 0, 0) each; in a round (slot, `inner_salt`, number that stands for what it
carries, number of the late contribution that is merged) each, 0 where there is nothing."""
Carried = tuple[tuple[int, int], ...]
"""(slot, number that stands for its state after the last round) each."""


def mix(*numbers: int) -> int:
    """64-bit hash of the given integers, the same in every process (ints are hashed without a seed)."""
    return hash(numbers) & 0xFFFFFFFFFFFFFFFF


def initial(stage: int) -> int:
    return mix(0, stage)


def embedded(state: int, salt: int, index: int) -> int:
    """Embedding of a microbatch. salt: its iteration, or `inner_salt` of a slot in a round."""
    return mix(1, state, salt, index)


def inner_salt(first: int, steps: int) -> int:
    """Number that stands for the inner steps `first` + 1 to `first` + `steps` of a slot in a round: all
    results of the slot depend on it."""
    return mix(9, first, steps)


def with_state(x: int, carried: int) -> int:
    """Input x of a slot at a relay, mixed with the number of the state that the relay carries of the slot; x
    itself if `carried` is 0 (no state)."""
    return mix(12, x, carried) if carried else x


def slot_state(state: int, x: int) -> int:
    """Number that stands for a machine's own state of a slot (its inner optimizer) after a round. state: the
    stage's state before the round. x: input of the slot, `with_state`."""
    return mix(11, state, x)


def late_contribution(number: int) -> Words:
    """Numbers that stand for a slot's contribution that came too late for its round and is added in the next.
    number: `slot_state` after the late round; 0: none was late, and all numbers are 0."""
    return tuple(mix(13, word, number) if number else 0 for word in range(WORDS))


def slot_states(states: Sequence[int], plan: Plan, before: Carried) -> Carried:
    """Numbers of all slots after a round. states: before the round. before: of the round before."""
    known, found = dict(before), []
    for slot, each in enumerate(plan):
        x = embedded(states[0], inner_salt(each.first, each.steps), slot)
        carried = known.get(slot, 0) if each.carried else 0
        found.append((slot, slot_state(states[1], with_state(x, carried))))
    return tuple(found)


def activated(state: int, stage: int, x: int) -> int:
    return mix(2, state, stage, x)


def loss_of(state: int, x: int) -> float:
    return float(mix(3, state, x) % 10_007)


def loss_gradient(state: int, x: int) -> int:
    return mix(4, state, x)


def input_gradient(state: int, stage: int, x: int, dy: int) -> int:
    return mix(5, state, stage, x, dy)


def contribution(state: int, stage: int, *boundary: int) -> Words:
    """Stand-in for a stage's contribution of a microbatch to its gradient: WORDS 64-bit hashes of all
    arguments. state: the stage's state (an integer). boundary: activation and gradient received; at stage 0
    the activation that the head received, or (t, index, gradient) for the embedding."""
    return tuple(mix(6, word, state, stage, *boundary) for word in range(WORDS))


def step(state: int, gradient: Words) -> int:
    """State after a step; it depends on all earlier steps and on their order."""
    return mix(7, state, *gradient)


def digest_of(gradient: Words) -> str:
    return f"{mix(8, *gradient):x}"


def predicted(state: int) -> int:
    """Stand-in for the weights with which the iteration after the next one computes, if it is delayed."""
    return mix(10, state)


def fingerprint(t: int, state: int, ahead: int | None = None) -> str:
    """Fingerprint after step t. ahead: what iteration t + 1 computes with, if it is delayed."""
    return f"{t}:{state:x}" if ahead is None else f"{t}:{state:x}:{ahead:x}"


def in_pieces(state: int) -> tuple[int, ...]:
    """State split into PIECES pieces."""
    return tuple(state >> (16 * place) & 0xFFFF for place in range(PIECES))


def from_pieces(t: int, pieces: Sequence[Payload]) -> int | None:
    """State after step t, joined from its pieces; None if they are not the pieces of such a state."""
    numbers = [piece for piece in pieces if isinstance(piece, int) and piece >= 0]
    if len(numbers) != PIECES + 1 or numbers[0] != t or any(number >> 16 for number in numbers[1:]):
        return None
    return sum(number << (16 * place) for place, number in enumerate(numbers[1:]))


class Step(NamedTuple):
    """Results of a step on a single machine: gradient and new state by stage, loss of each microbatch."""

    gradients: tuple[Words, ...]
    states: tuple[int, ...]
    losses: tuple[float, ...]


@lru_cache(maxsize=4096)
def single_machine(t: int, former: tuple[int, ...], batch: Batch, seen: tuple[int, ...] = ()) -> Step:
    """Results of iteration t on a single machine, from the states `former` of stages 0 to S. seen: what the
    iteration computes with, if it is delayed."""
    states = seen or former
    sums = [[0] * WORDS for _ in states]

    def add(stage: int, words: Words) -> None:
        sums[stage] = [total + word for total, word in zip(sums[stage], words, strict=True)]

    losses = []
    for index, salt, carried, late in batch:
        x = with_state(embedded(states[0], salt, index), carried)
        add(1, late_contribution(late))
        inputs = []
        for stage in range(1, len(states)):
            inputs.append(x)
            x = activated(states[stage], stage, x)
        losses.append(loss_of(states[0], x))
        dy = loss_gradient(states[0], x)
        add(0, contribution(states[0], 0, x))
        for stage in range(len(states) - 1, 0, -1):
            add(stage, contribution(states[stage], stage, inputs[stage - 1], dy))
            dy = input_gradient(states[stage], stage, inputs[stage - 1], dy)
        add(0, contribution(states[0], 0, t, index, dy))
    gradients = tuple(map(tuple, sums))
    return Step(gradients, tuple(map(step, former, gradients)), tuple(losses))


def batch_of(t: int, microbatches: int, slots: Slots, before: Carried = ()) -> Batch:
    """Batch of iteration t. slots: those that count; empty if t is no round. before: states of the slots
    after the round before."""
    if not slots:
        return tuple((index, t, 0, 0) for index in range(microbatches))
    known, found = dict(before), []
    for slot, plan in sorted(slots.items()):
        carried = known.get(slot, 0) if plan.carried else 0
        found.append((slot, inner_salt(plan.first, plan.steps), carried, carried if plan.late else 0))
    return tuple(found)


def states_after(t: int, settings: Settings, history: LogReplay | None = None) -> tuple[int, ...]:
    """States of all stages after t steps on a single machine. history: log of a run with rounds, for the
    slots that counted and the rounds that were skipped."""
    states, seen = tuple(map(initial, range(settings.stages + 1))), tuple[int, ...]()
    carried: Carried = ()
    for each in range(1, t + 1):
        slots: Slots = {}
        ahead = tuple(map(predicted, states)) if settings.delay.has(each + 1) else ()
        if history is not None and settings.rounds.has(each):
            commit = history.commits[each - 1]
            slots = slots_of(history.plans[each], commit)
            if commit.verdict == "skip":
                continue
        batch = batch_of(each, settings.microbatches, slots, carried)
        if history is not None:
            carried = slot_states(states, history.plans.get(each, ()), carried)
        states = single_machine(each, states, batch, seen).states
        seen = ahead
    return states
