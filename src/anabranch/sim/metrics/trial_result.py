"""Result of one seed of `simtest`."""

from __future__ import annotations

import msgspec


class DeliveredFaults(msgspec.Struct):
    """Record of one fault that was injected into a seed's swarm. phase: phase of the victim (`peer`) at that
    moment. aimed: the intended phase ("": none, as of churn). at_s: virtual time. text: the fault in words.
    repaired, wasted_s: microbatches sent again and seconds of compute wasted from then until the next
    fault."""

    kind: str
    phase: str
    at_s: float
    peer: str
    text: str
    repaired: int = 0
    wasted_s: float = 0.0
    aimed: str = ""


class Outcome(msgspec.Struct):
    """Result of one seed of `simtest`. torch: True if the seed computed with tensors. nodes: machines at the
    start. steps: last committed iteration. events: number handled. computed_s, wasted_s: virtual seconds of
    compute, and those that entered no step. cpu_s: CPU seconds of the seed. invariant, violation: code of a
    violated invariant and description of the violation, or "". unmet: if the run could not go on, those
    conditions of invariant I4 that did not hold."""

    seed: int
    profile: str
    torch: bool
    nodes: int
    steps: int = 0
    events: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    computed_s: float = 0.0
    wasted_s: float = 0.0
    faults: list[DeliveredFaults] = []
    invariant: str = ""
    violation: str = ""
    unmet: list[str] = []

    @property
    def failed(self) -> bool:
        return bool(self.violation)
