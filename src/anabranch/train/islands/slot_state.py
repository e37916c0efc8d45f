"""State that a machine carries of its slot from one round to the next.

It is no part of the state that all replicas share: one machine has it, and the plan in the log says in which
rounds it is used (`protocol.log.records.Slot`). Whoever has the log computes the same again.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: Rounds of a slot whose state is kept: the last one, and the open one, which may be computed again.
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
    """Kept states of slots, by slot and round: of each slot the `KEPT` newest."""

    def __init__(self) -> None:
        self._states: dict[int, dict[int, SlotState]] = {}

    def keep(self, slot: int, state: SlotState) -> None:
        known = self._states.setdefault(slot, {})
        known[state.t] = state
        for t in sorted(known)[:-KEPT]:
            del known[t]

    def find(self, slot: int, t: int) -> SlotState | None:
        """Carried state that a slot had after its inner steps of round t; None if none is kept, so that a
        slot which continues from it cannot be filled here."""
        return self._states.get(slot, {}).get(t)

    def clear(self) -> None:
        self._states.clear()
