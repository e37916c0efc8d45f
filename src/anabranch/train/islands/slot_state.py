"""State that a machine carries of its slot from one round to the next.

It is no part of the state that all replicas share: one machine has it, and the plan in the log says in which
rounds it is used (`protocol.log.records.Slot`). Whoever has the log computes the same again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: Rounds of which states of slots are kept: the last one, and the open one, which may be computed again.
KEPT = 2


@dataclass(frozen=True)
class Moments:
    """Adam's moments of an island (flat), and the steps that each of them has taken."""

    first: Tensor
    second: Tensor
    first_steps: int
    second_steps: int


@dataclass(frozen=True)
class SlotState:
    """State of a slot after its inner steps of round `t`; what a run does not carry is None. sent: its
    contribution, flat. unsent: change of the weights that was not sent, flat. weights: of the island after
    its inner steps, flat. ahead: steps of the next round that are taken. ahead_loss: their loss sum (nats).
    overflow: tensor that overflowed in such a step, with which the slot's next round overflows; "": none
    did."""

    t: int
    sent: Tensor | None = None
    unsent: Tensor | None = None
    weights: Tensor | None = None
    moments: Moments | None = None
    ahead: int = 0
    ahead_loss: float = 0.0
    overflow: str = ""


class SlotStates:
    """Kept states of slots, by slot and round: of the `KEPT` newest rounds. A machine that is of other crews,
    and so of other slots, from round to round would else keep states of all slots."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], SlotState] = {}

    def keep(self, slot: int, state: SlotState) -> None:
        self._states[state.t, slot] = state
        newest = max(t for t, _ in self._states)
        self._states = {of: kept for of, kept in self._states.items() if of[0] > newest - KEPT}

    def find(self, slot: int, t: int) -> SlotState | None:
        """Carried state that a slot had after its inner steps of round t; None if none is kept, so that a
        slot which continues from it cannot be filled here."""
        return self._states.get((t, slot))

    def clear(self) -> None:
        self._states.clear()
