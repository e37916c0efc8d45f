"""Proof that this peer holds its stage's state: a hash of the state keyed by the log entry that led to it
(R14).

The fingerprint of a state is public as soon as the next step is committed, so repeating it proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import ProveState, Result

#: Iteration, hash of the log entry that led to it, stage.
State = tuple[int, str, int]
NO_STATE: State = (-1, "", -1)


class PossessionProof:
    """Proof of this peer's present state, computed when first asked for. present: function that returns the
    state's iteration, the hash of the log entry that led to it, and the stage. on_proved: callback when a
    proof has been computed."""

    def __init__(
        self, ctx: PeerContext, present: Callable[[], State], on_proved: Callable[[], None]
    ) -> None:
        self._ctx, self._present, self._on_proved = ctx, present, on_proved
        self._known: tuple[State, str] = (NO_STATE, "")
        """State that was proved last, and its proof."""
        self._asked = NO_STATE

    def get(self) -> str | None:
        """Proof of the present state; None: being computed, `on_proved` follows unless the state changes
        before; "": of the initial state, which anyone can make, or without a state."""
        present = self._present()
        if present[0] <= 0:
            return ""
        if self._known[0] == present:
            return self._known[1]
        if self._asked != present:
            self._asked = present
            then = partial(self._computed, present)
            self._ctx.tasks.submit(TaskPriority.STEP, ProveState(*present[:2]), (), then)
        return None

    def _computed(self, present: State, result: Result) -> None:
        if self._asked == present:
            self._asked = NO_STATE
        if not result.error and present == self._present():
            self._known = (present, result.digest)
            self._on_proved()
