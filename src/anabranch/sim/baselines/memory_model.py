"""Memory of a baseline's relays: as many bytes as the protocol's relays have on the same machine.

A relay of the protocol holds activations of `capacity` microbatches and of one more (its repair slot), and
only the inputs of int(capacity * `fleet.recompute`) others. A system that keeps activations has the same
slots. A system that keeps only inputs uses the same bytes for the activations of the one microbatch that is
being computed, and for inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from anabranch.sim.cluster.device_model import Workload

Occupant = TypeVar("Occupant")


def input_slots(work: Workload, stage: int, capacity: int, recompute: float) -> int:
    """Number of microbatches that a relay can hold if only the one that is computed has its activations in
    memory and the others their inputs. The relay has as many bytes as the protocol needs for `capacity` slots
    with activations and int(capacity * recompute) with inputs only. stage: its stage."""
    kept, alone = work.kept_bytes(stage), work.input_bytes
    return 1 + (capacity * kept + int(capacity * recompute) * alone) // alone


@dataclass
class RelayMemory(Generic[Occupant]):
    """Memory slots of one relay, occupied by microbatches (the type parameter). A microbatch that finds no
    free slot waits: repairs first, then by index. A repair may use one further slot, as in the protocol; its
    activations are not kept. size: number of slots. keeps: number of slots whose activations are kept."""

    size: int
    keeps: int
    held: dict[Occupant, bool] = field(default_factory=dict)
    """Microbatch -> True if its activations are kept."""
    _waiting: dict[Occupant, tuple[bool, int, Callable[[], None]]] = field(default_factory=dict)

    def enter(self, occupant: Occupant, index: int, then: Callable[[], None], repairs: bool = False) -> None:
        """Let a microbatch occupy a slot as soon as one is free, maybe now, and then call `then`. index: rank
        of the microbatch among those that wait, lower first. repairs: True if it was sent again after the
        loss of a relay; such ones come before all others."""
        self._waiting[occupant] = (not repairs, index, then)
        self._admit()

    def leave(self, occupant: Occupant) -> None:
        """Free the slot of a microbatch (`occupant`), or remove it from those that wait for one; the next
        that waits enters. Nothing happens if it is neither."""
        self._waiting.pop(occupant, None)
        self.held.pop(occupant, None)
        self._admit()

    @property
    def queued(self) -> int:
        """Number of microbatches that wait for a slot."""
        return len(self._waiting)

    def keeps_activations_of(self, occupant: Occupant) -> bool:
        return self.held.get(occupant, True)

    def _admit(self) -> None:
        while self._waiting:
            occupant = min(self._waiting, key=lambda each: self._waiting[each][:2])
            not_repair, _, then = self._waiting[occupant]
            if len(self.held) >= self.size + (0 if not_repair else 1):
                return
            del self._waiting[occupant]
            self.held[occupant] = not_repair and sum(self.held.values()) < self.keeps
            then()
