"""Outgoing microbatch of one iteration at one peer: its states on the way to the next stage, its load.

Not here: the choice of the next hop (`hop_candidates`), sending (`sender`), repair (`repair`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from anabranch.protocol.interface.tasks import Payload


class OutgoingState(Enum):
    """States of an outgoing microbatch, from the search for it or the wait for a credit to its
    transmission."""

    FINDING = "asking the next stage who has it"
    WAITING = "waiting for a slot"
    PREPARING = "has a slot; the activation is being computed"
    SENT = "sent"


@dataclass
class OutgoingMicrobatch:
    """Outgoing microbatch. Times are in seconds of this peer's clock.

    train: False for an evaluation microbatch. path: peers that computed it, this one last. payload: its
    activation, None until computed. leg: its state. repair: True if it is sent again after a loss, or
    searched. returned: True if its gradient is back. redoing: True if it was sent again after that, since a
    claim was lost. peer: peer that it was sent to, or is being computed for, or that a search found to have
    it. transmission: number of its last transmission or search, unique at this sender. lost: peers of the
    next stage that had it, or may have had it, before the present one (at most LOST_MAX). asked: (peer,
    repair) of its outstanding credit requests. refused_by: peer -> how often it gave it up, kept it too long,
    sent an unusable gradient of it, or granted no credit for it; those with the least number are preferred.
    finding: peers that have not answered yet if they have it. told: peers that it was sent to, or that were
    asked if they have it; only these may give its gradient. rejected: those of them whose gradient could not
    be used, and that give no further one until it is sent to them, or they are asked, anew. further: True if
    a later stage may have it although no reachable peer of the next stage does.

    sendable_since: time since which a credit was free. waits_since: time since which it waits for a preferred
    replica, or one that is no standby. lost_since: time since which it waited for its machine the first time
    that this was lost, a slot of a round. held_for: preferred peer that it is held back for. held_until: time
    at which its next hop is chosen again at the latest: the hold ends, or further peers become eligible.
    asked_at: time since which it waits for credits that it asked for. sent_at: time of its last transmission.
    kept_since: peer that kept it too long -> time of the first such transmission to it. given_by: peer that
    gave its gradient ("": none yet). overdue: how often it was kept, or left waiting for a credit, too long.
    ahead_bytes: bytes queued on the link when it was last sent, its own included. probe_at: time of the next
    inquiry after it. probes: inquiries so far. unclaimed: how often the leader missed the claim of the peer
    that gave its gradient back. unsent: how often the leader missed it at a later stage, though its gradient
    is back. unacknowledged: peer -> time of the first transmission to it over its present link that it has
    not acknowledged.
    """

    index: int
    train: bool
    path: tuple[str, ...]
    payload: Payload | None
    leg: OutgoingState = OutgoingState.WAITING
    repair: bool = False
    returned: bool = False
    given_by: str = ""
    redoing: bool = False
    peer: str | None = None
    transmission: int = 0
    lost: tuple[str, ...] = ()
    asked: set[tuple[str, bool]] = field(default_factory=set)
    finding: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    further: bool = False
    sendable_since: float = math.inf
    waits_since: float = math.inf
    lost_since: float = math.inf
    refused_by: Counter[str] = field(default_factory=Counter)
    held_for: str | None = None
    held_until: float = math.inf
    asked_at: float = math.inf
    sent_at: float = 0.0
    kept_since: dict[str, float] = field(default_factory=dict)
    overdue: int = 0
    ahead_bytes: float = 0.0
    probe_at: float = math.inf
    probes: int = 0
    unclaimed: int = 0
    unsent: int = 0
    unacknowledged: dict[str, float] = field(default_factory=dict)

    @property
    def giver(self) -> str:
        """Peer that gave the microbatch's gradient, else the one that has it; "" if there is none."""
        return self.given_by or self.peer or ""

    def bound_for(self) -> Collection[str]:
        """Peers whose expected load includes this microbatch. While it waits: the peer that it is held back
        for, else every peer asked for a credit, so that requests spread over the peers. Else the peer that
        has it; none once its gradient is back, unless it is redone."""
        if self.leg is OutgoingState.WAITING:
            return {peer for peer, _ in self.asked} if self.held_for is None else (self.held_for,)
        done = self.returned and not self.redoing
        return () if done or self.peer is None else (self.peer,)

    def count(self, outstanding: dict[str, int], change: int) -> None:
        """Add `change` to the load (peer -> microbatches) of each peer in `bound_for`."""
        for peer in self.bound_for():
            outstanding[peer] = outstanding.get(peer, 0) + change
