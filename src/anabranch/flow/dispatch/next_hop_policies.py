"""Policies that choose the next hop (a replica of the next stage) of a microbatch when it is sent.

A policy decides from what the sender knows of each replica (`Candidate`). `Greedy`: the replica with the
least link time plus compute time of this sender's microbatches. `Static`: microbatch index modulo replicas
that are eligible. `Dispatch` (policy `auction`): the least link time + half a pass + queueing time + price.
`Planned` (policy `gwtf`): the one that is furthest below its planned share. Not in it: SWARM's queue
(`swarm_queue.py`), and which replicas are eligible (`protocol.pipeline.hop_candidates`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

#: Share of a mean pass in a microbatch's compute time at a peer: a pass is the mean of forward and backward,
#: the whole is forward, backward and weight gradients.
PASS = 1.0 / 3.0
#: Least time (s) for which a microbatch is held back for a better peer: a choice; less brings nothing.
HOLD_MIN_S = 0.001
#: Longest hold, in multiples of the time that the peer needs for all microbatches that it has: a peer that
#: takes longer may be stuck. A plain choice.
HOLD_PASSES = 2.0


class Candidate(NamedTuple):
    """A live peer of the next stage as the sender sees it.

    link_s: seconds of one activation over the link (latency and transfer), mean of both directions.
    compute_s: compute seconds of the peer per microbatch. outstanding: microbatches that this sender has sent
    to the peer and whose gradients are not back. free: True if the peer has granted this sender a slot that
    is unused. others: microbatches of other senders at the peer, as last reported. price: expected seconds
    from the peer to the end of the pipeline, by the flow's prices; infinite if unknown. planned: microbatches
    that the flow's plan sends to the peer. line_s: seconds for which one microbatch occupies the link.
    """

    peer: str
    link_s: float
    compute_s: float
    outstanding: int
    free: bool
    others: int = 0
    price: float = math.inf
    planned: int = 0
    line_s: float = 0.0


class Choice(NamedTuple):
    """Decision about one microbatch: its next hop. hold_s: 0 to send at once. Else nothing is sent yet: the
    caller requests a slot of that peer, and asks the policy again whenever it passes over its waiting
    microbatches (as when a slot is granted), at the latest after this time (s)."""

    peer: str
    hold_s: float = 0.0


class Policy:
    """Base of the dispatch policies: chooses the next hops of one sender's microbatches. The methods that are
    told of events do nothing in this class."""

    def choose(
        self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0, now: float = 0.0
    ) -> Choice | None:
        """Peer for microbatch `index`, to which the caller sends at once if `hold_s` is 0 (the peer has a
        free slot then); None if no peer that the policy would take has one. candidates: sorted by id.
        waited_s: seconds since some candidate first had a free slot for the microbatch; 0 before."""
        raise NotImplementedError

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        """Peer to request a slot from, after `choose` returned None; None to request no slot."""
        raise NotImplementedError

    def opened(self, peers: Collection[str]) -> None:
        """Called when this sender begins an iteration. peers: replicas that serve the next stage in it; in a
        large swarm this peer's neighbours among them alone, although others may become candidates."""

    def returned(self, index: int) -> None:
        """Called when the gradient of microbatch `index` has come back."""

    def lost(self, peer: str, now: float) -> None:
        """Called when the link to `peer` broke, or `peer` is suspected to have failed."""


class Greedy(Policy):
    """Policy `greedy`: of the peers with a free slot the one with the least link time plus compute time of
    this sender's microbatches there, this one included."""

    def _cost(self, candidate: Candidate) -> tuple[float, int, str]:
        waiting_s = candidate.outstanding * max(candidate.compute_s, 1e-6)
        cost_s = candidate.link_s + candidate.compute_s + waiting_s
        return (cost_s, candidate.outstanding, candidate.peer)

    def choose(
        self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0, now: float = 0.0
    ) -> Choice | None:
        free = [candidate for candidate in candidates if candidate.free]
        return Choice(min(free, key=self._cost).peer) if free else None

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        return min(candidates, key=self._cost).peer if candidates else None


class Dispatch(Policy):
    """Policy `auction`: the least link time + half a pass + queueing time + price; no choice (None) if no
    peer has a free slot. Queueing is at the peer or on the link, whichever is slower. If the best peer has no
    free slot, the microbatch is held back for as long as waiting costs less than the best peer with a free
    slot, and no longer than the peer's link time + HOLD_PASSES times what it needs for all its microbatches.
    load, price, hold: switches for benchmarks. load = False ignores other senders' microbatches at a peer
    (this sender's own still queue), price = False the prices; hold = False never holds back."""

    def __init__(self, load: bool = True, price: bool = True, hold: bool = True) -> None:
        self._load, self._price, self._hold = load, price, hold

    def choose(
        self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0, now: float = 0.0
    ) -> Choice | None:
        if not any(candidate.free for candidate in candidates):
            return None
        costs = self._costs(candidates)
        free = [pair for pair in costs if pair[1].free]
        cost, peer = min(free, key=_rank)
        least, best = min(costs, key=_rank)
        ahead = best.outstanding + best.others + 1
        slowest_s = max(best.compute_s * ahead, best.line_s * (best.outstanding + 1))
        patience_s = best.link_s + HOLD_PASSES * slowest_s
        hold_s = min(cost - least, patience_s) - waited_s
        return Choice(best.peer, hold_s) if self._hold and hold_s >= HOLD_MIN_S else Choice(peer.peer)

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        costs = self._costs(candidates)
        return min(costs, key=_rank)[1].peer if costs else None

    def _costs(self, candidates: Sequence[Candidate]) -> list[tuple[float, Candidate]]:
        """(cost in seconds, candidate) of each candidate, in their order. An unknown price counts as the
        highest known one, or 0."""
        known = [candidate.price for candidate in candidates if candidate.price < math.inf]
        unknown = max(known, default=0.0)  # an unknown price counts as the highest known one
        return [(self._cost(candidate, unknown), candidate) for candidate in candidates]

    def _cost(self, candidate: Candidate, unknown: float) -> float:
        # As in the link cost d_ij, half of a pass at the receiver. The receiver's queue makes the cost convex
        # in its load. The link is a server too: this sender's microbatches pass it one after the other.
        ahead = candidate.outstanding + (candidate.others if self._load else 0)
        queue_s = max(ahead * candidate.compute_s, candidate.outstanding * candidate.line_s)
        cost = candidate.link_s + PASS / 2.0 * candidate.compute_s + queue_s
        if self._price:
            cost += candidate.price if candidate.price < math.inf else unknown
        return cost


def _rank(pair: tuple[float, Candidate]) -> tuple[float, int, str]:
    """Key that sorts pairs (cost, candidate), the best first: by cost, then outstanding microbatches, then
    id, so no two are equal."""
    cost, candidate = pair
    return cost, candidate.outstanding, candidate.peer


class Static(Policy):
    """Policy `static`: microbatch index modulo the number of candidates, sorted by id; it waits for a free
    slot of that one, with no other choice while the candidates stay the same."""

    def choose(
        self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0, now: float = 0.0
    ) -> Choice | None:
        if not candidates:
            return None
        chosen = candidates[index % len(candidates)]
        return Choice(chosen.peer) if chosen.free else None

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        return candidates[index % len(candidates)].peer if candidates else None


class Planned(Greedy):
    """Policy `gwtf`: of the free peers with fewer microbatches outstanding than planned, the one with the
    smallest ratio of the two. If there is none: as `greedy`."""

    def choose(
        self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0, now: float = 0.0
    ) -> Choice | None:
        open_hops = [peer for peer in candidates if peer.free and peer.outstanding < peer.planned]
        if not open_hops:
            return super().choose(index, candidates)
        lacking = min(open_hops, key=lambda peer: (peer.outstanding / peer.planned, *self._cost(peer)))
        return Choice(lacking.peer)
