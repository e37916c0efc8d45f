"""Slots of a round that pipeline islands fill, in integers: the state of an island at one stage, and a whole
slot on a single machine.

An island's state is a number that depends on every inner step: on the microbatches of each, their order, and
the payloads that came from the other stages. So a microbatch that is skipped, added twice, taken out of order
or belongs to another step or slot changes the slot's contribution. Not here: the tasks of a peer
(`integer_slots`), sums over slots (`single_machine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from anabranch.protocol.log.records import Slot
from anabranch.sim.workers.integer_arithmetic import (
    Words,
    activated,
    contribution,
    embedded,
    inner_salt,
    input_gradient,
    late_contribution,
    loss_gradient,
    loss_of,
    mix,
    slot_state,
)


class StageIsland:
    """State of a slot's island at one stage, from the slot's begin to its end in a round.

    state: number that stands for the stage's state before the round. first, steps: as of `records.Slot`. x:
    activation received when the slot was begun (0 at stage 0). step: inner steps of the slot that were taken,
    those of earlier rounds included. carried: number of what this stage carries of the slot from the round
    before (0: nothing). opening: activation with which the slot is begun at the next stage. loss: sum over
    the microbatches so far (stage 0).
    """

    def __init__(
        self, stage: int, state: int, slot: int, first: int, steps: int, carried: int, x: int
    ) -> None:
        salt = inner_salt(first, steps)
        self.stage, self.slot, self.step, self.carried = stage, slot, first, carried
        self.loss = 0.0
        self._x = x
        self.opening = activated(state, stage, x) if stage else embedded(state, salt, slot)
        self._weights = mix(14, state, stage, slot, first, steps, carried, x)
        self._gradient = self._head_gradient = 0
        self._graphs: dict[int, int] = {}

    def forward(self, number: int, x: int = 0) -> int:
        """Activation that microbatch `number` of the open inner step leaves this stage with; its input is
        held until `backward`. x: activation received (0 at stage 0)."""
        self._graphs[number] = x
        if self.stage:
            return activated(self._weights, self.stage, x)
        return embedded(self._weights, inner_salt(self.step + 1, number), self.slot)

    def head(self, number: int, x: int) -> tuple[int, float]:
        """(Gradient of x, loss) of microbatch `number` at stage 0; the head's weight gradient is added to the
        island's, and the loss to its sum. x: activation received."""
        self._head_gradient = mix(15, self._head_gradient, number, x)
        loss = loss_of(self._weights, x)
        self.loss += loss
        return loss_gradient(self._weights, x), loss

    def backward(self, number: int, dy: int) -> int | None:
        """Gradient of the input of microbatch `number`; its weight gradient is added to the island's. None,
        and nothing is added, if its forward is not held. dy: gradient received."""
        x = self._graphs.pop(number, None)
        if x is None:
            return None
        self._gradient = mix(16, self._gradient, number, x, dy)
        return input_gradient(self._weights, self.stage, x, dy)

    def take_step(self) -> None:
        """Take the optimizer step with the gradients of the open inner step, and clear these. The next inner
        step is open then."""
        self.step += 1
        self._weights = mix(17, self._weights, self.step, self._gradient, self._head_gradient)
        self._gradient = self._head_gradient = 0
        self._graphs.clear()

    def head_end(self, x: int) -> int:
        """Gradient that stage 0 sends to the last relay stage to end the slot there. x: activation that came
        back to stage 0 when the slot was begun."""
        return loss_gradient(self._weights, x)

    def end_gradient(self, dy: int) -> int:
        """Gradient that this stage sends to the stage before it to end the slot there. dy: the one with which
        the slot was ended here."""
        return input_gradient(self._weights, self.stage, self._x, dy)

    def change(self, received: int, merges: bool) -> Words:
        """Contribution of the slot at this stage, after its last inner step. received: at stage 0 the
        activation that came back, else the gradient with which the slot is ended. merges: True to add the
        late contribution of the round before."""
        words = contribution(self._weights, self.stage, self._x, received)
        late = late_contribution(self.carried if merges else 0)
        return tuple(word + other for word, other in zip(words, late, strict=True))

    @property
    def carries(self) -> int:
        """Number that stands for what this stage carries of the slot to the next round."""
        return slot_state(self._weights, self._x)


class SlotResult(NamedTuple):
    """Result of a slot in a round. changes: contribution of each stage from 0 on. carries: number of what
    each stage carries to the next round. loss: sum over its inner steps."""

    changes: tuple[Words, ...]
    carries: tuple[int, ...]
    loss: float


@lru_cache(maxsize=4096)
def slot_on_single_machine(
    states: tuple[int, ...], slot: int, plan: Slot, carried: tuple[int, ...], microbatches: int
) -> SlotResult:
    """Result of a slot that a single machine computes, one microbatch after another. states: states of all
    stages, from 0 on, before the round. slot, plan: its number, and its entry in the round's plan. carried:
    number of what each stage carries of it (0: nothing). microbatches: number in each inner step."""
    islands: list[StageIsland] = []
    x = 0
    for stage, state in enumerate(states):
        island = StageIsland(stage, state, slot, plan.first, plan.steps, carried[stage], x)
        islands.append(island)
        x = island.opening
    for _ in range(plan.steps):
        _take_inner_step(islands, microbatches)
    changes = [islands[0].change(x, plan.late > 0)]
    dy = islands[0].head_end(x)
    for island in reversed(islands[1:]):
        changes.insert(1, island.change(dy, plan.late > 0))
        dy = island.end_gradient(dy)
    return SlotResult(tuple(changes), tuple(island.carries for island in islands), islands[0].loss)


def _take_inner_step(islands: Sequence[StageIsland], microbatches: int) -> None:
    ends, relays = islands[0], islands[1:]
    for number in range(microbatches):
        x = ends.forward(number)
        for island in relays:
            x = island.forward(number, x)
        dy, _ = ends.head(number, x)
        for island in (*reversed(relays), ends):
            back = island.backward(number, dy)
            assert back is not None
            dy = back
    for island in islands:
        island.take_step()
