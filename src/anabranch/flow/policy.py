"""Routing policies: which peer of the next stage gets the next microbatch.

A policy sees only what its node knows. `greedy`: among peers with a free slot the least cost of handing
it over now, `d_ij` (GWTF, section on the flow problem) plus what this node already has waiting there.
`static`: replica = index mod replicas, waiting for that peer even if others are free. `auction`: the flow is
the map, the queue is the traffic: the least link time + wait that the peer reports + its cost to go by the
flow's prices. What the flow planned has slots, so it is found free; but a peer without a free slot (it is
full, or has not taken up the iteration yet) is waited for as long as that costs less than the longer queue at
one that has a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from anabranch.flow.agent import AgentFactory
from anabranch.flow.auction import AuctionAgent

#: Nothing is held back for less (s).
HOLD_MIN_S = 0.001
#: ... nor for longer than a peer should need for so many times what it has of ours: it may be stuck.
HOLD_PASSES = 2.0


@dataclass(frozen=True)
class Candidate:
    """A live peer of the next stage as the sender sees it.

    link_s: seconds for one activation over the link (latency and transfer), both directions averaged.
    compute_s: its compute seconds per microbatch. outstanding: units sent to it and not yet back.
    free: whether it has granted a slot that is not used. wait_s: seconds of work that waits there. price: its
    cost to go by the flow's prices (s), infinite where there is none.
    """

    peer: str
    link_s: float
    compute_s: float
    outstanding: int
    free: bool
    wait_s: float = 0.0
    price: float = math.inf


class Choice(NamedTuple):
    """Whom to send to: at once, or with hold_s > 0 when it has a slot, for which it is worth waiting so long:
    until then it is better than who has one now."""

    peer: str
    hold_s: float = 0.0


class Policy(Protocol):
    """Chooses by a pure rule; returns None to wait."""

    def choose(self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0) -> Choice | None:
        """Where to send `index`, which could have been sent `waited_s` ago; None where nobody has a free
        slot. `candidates` are sorted by id."""
        ...

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        """The peer to ask for a slot when `choose` found none."""
        ...


class Greedy:
    def _cost(self, candidate: Candidate) -> tuple[float, int, str]:
        waiting = candidate.outstanding * max(candidate.compute_s, 1e-6)
        return (candidate.link_s + candidate.compute_s + waiting, candidate.outstanding, candidate.peer)

    def choose(self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0) -> Choice | None:
        free = [candidate for candidate in candidates if candidate.free]
        return Choice(min(free, key=self._cost).peer) if free else None

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        return min(candidates, key=self._cost).peer if candidates else None


class Dispatch:
    """wait, price, hold: whether the wait that peers report and the prices of the flow are heeded, and peers
    without a free slot waited for (measurements of what each brings leave some out)."""

    def __init__(self, wait: bool = True, price: bool = True, hold: bool = True) -> None:
        self._wait, self._price, self._hold = wait, price, hold

    def choose(self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0) -> Choice | None:
        ranked = self._ranked(candidates)
        free = next(((cost, peer) for cost, peer in ranked if peer.free), None)
        if free is None:
            return None
        cost, peer = free
        least, best = ranked[0]
        patience_s = best.link_s + best.wait_s + HOLD_PASSES * best.compute_s * (best.outstanding + 1)
        hold_s = min(cost - least, patience_s) - waited_s
        return Choice(best.peer, hold_s) if self._hold and hold_s >= HOLD_MIN_S else Choice(peer.peer)

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        return next((candidate.peer for _, candidate in self._ranked(candidates)), None)

    def _ranked(self, candidates: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        known = [candidate.price for candidate in candidates if candidate.price < math.inf]
        unknown = max(known, default=0.0)  # no reason to prefer whom nothing is known of
        costs = [(self._cost(candidate, unknown), candidate) for candidate in candidates]
        return sorted(costs, key=lambda pair: (pair[0], pair[1].outstanding, pair[1].peer))

    def _cost(self, candidate: Candidate, unknown: float) -> float:
        # As in d_ij: half of a pass at the receiver, a pass being the mean of forward and backward. What was
        # sent there and is not back adds to it, so a peer's cost is convex in what it has of us; what waits
        # there by its own account has that among it.
        queue_s = candidate.compute_s * candidate.outstanding
        if self._wait:
            queue_s = max(queue_s, candidate.wait_s)
        cost = candidate.link_s + 0.25 * candidate.compute_s + queue_s
        if self._price:
            cost += candidate.price if candidate.price < math.inf else unknown
        return cost


class Static:
    def choose(self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0) -> Choice | None:
        if not candidates:
            return None
        chosen = candidates[index % len(candidates)]
        return Choice(chosen.peer) if chosen.free else None

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        return candidates[index % len(candidates)].peer if candidates else None


POLICIES: dict[str, Callable[[], Policy]] = {"auction": Dispatch, "greedy": Greedy, "static": Static}
#: Policies of which every peer runs an agent that plans ahead with its neighbours.
PLANNERS: dict[str, AgentFactory] = {"auction": AuctionAgent}


def planner(name: str) -> AgentFactory | None:
    """What makes the agents of the policy called `name`; None where nothing is planned."""
    return PLANNERS.get(name)


def make_policy(name: str) -> Policy:
    """The policy called `name`; ValueError lists the names there are."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"no routing policy {name!r}; there are {', '.join(sorted(POLICIES))}") from None
