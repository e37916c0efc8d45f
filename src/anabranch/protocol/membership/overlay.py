"""Overlay of a large swarm: the neighbours of a peer, members of its own and adjacent stages with which it
keeps links.

All peers compute the same graph from the log (`rendezvous_graph`): each peer picks a few peers of the other
stage by a hash of the pair, most of them in its own region; two peers are neighbours if either picks the
other. So most peers have about twice as many neighbours as picks, and a change of membership moves few edges.
If a stage has at most twice as many peers as picks, all of them are neighbours. Links to neighbours are kept
and watched, other links only while they are in use.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from anabranch.protocol.membership.rendezvous_graph import (
    RendezvousGraph,
    highest,
    neighbour_graph,
    pair_scores,
)
from anabranch.protocol.membership.view import Membership

#: Iteration number beyond all: every member that is active now or will be counts as active.
ALL_TIMES = 1 << 40


def _with(peers: list[str], peer: str) -> list[str]:
    """Sorted ids `peers` with `peer` added; `peers` itself if it has `peer`, or `peer` is ""."""
    return peers if not peer or peer in peers else sorted([*peers, peer])


class Overlay:
    """Neighbour graph of a run's peers, with caches. me: peer whose neighbours are meant where none is named.
    membership: function that returns the current membership. picks: number of peers that a peer picks in each
    adjacent stage; it picks half as many in its own. stages: number of relay stages."""

    def __init__(self, me: str, membership: Callable[[], Membership], picks: int, stages: int) -> None:
        self.me, self.picks, self.stages = me, picks, stages
        self._membership = membership
        self._seen: Membership | None = None
        self._version = -1
        self._known: dict[tuple[str, int, int], frozenset[str]] = {}
        self._around: dict[tuple[str, int], frozenset[str]] = {}
        self._crowded = False

    def _current(self) -> Membership:
        """Current membership. Clears the caches if it has changed."""
        membership = self._membership()
        if self._seen is not membership or self._version != membership.version:
            self._seen, self._version = membership, membership.version
            self._known.clear()
            self._around.clear()
            self._crowded = membership.widest > 2 * self.picks
        return membership

    @property
    def crowded(self) -> bool:
        """True if a stage has so many peers that not all peers of adjacent stages are neighbours."""
        self._current()
        return self._crowded

    def neighbours_at(self, stage: int, peer: str, own: int, t: int = ALL_TIMES) -> frozenset[str]:
        """Neighbours of `peer` at `stage`, among the members active there at iteration t (by default all that
        are active or will be), without `peer` itself. `stage` is the stage `own` of `peer` or adjacent to
        that. `peer` counts as active, whether or not it is."""
        membership = self._current()
        key = (peer, stage, t)
        if key not in self._known:
            picks = self.picks

            def compute(fellows: list[str]) -> RendezvousGraph:
                if stage == own:
                    return neighbour_graph(tuple(fellows), tuple(fellows), max(1, picks // 2))
                others = membership.live(stage, t)
                regions = membership.regions(fellows), membership.regions(others)
                return neighbour_graph(tuple(fellows), tuple(others), picks, regions)

            if membership.is_live(peer, own, t):
                # The graph of two stages is the same from both ends.
                ends = (stage, own) if stage < own else (own, stage)
                graph = membership.graph(*ends, t, picks, lambda: compute(membership.live(own, t)))
            else:
                graph = compute(_with(membership.live(own, t), peer))
            self._known[key] = graph[peer]
        return self._known[key]

    def could_be_neighbours(self, peer: str, own: int, other: str, stage: int, t: int) -> bool:
        """True if `peer` of stage `own` and `other` of the adjacent stage `stage` are neighbours, or would be
        if both were active at iteration t."""
        membership = self._current()
        fellows, others = _with(membership.live(own, t), peer), _with(membership.live(stage, t), other)
        if max(len(fellows), len(others)) <= 2 * self.picks:
            return True
        return self._picks(membership, peer, others, other) or self._picks(membership, other, fellows, peer)

    def _picks(self, membership: Membership, peer: str, others: list[str], other: str) -> bool:
        """True if `peer` picks `other` as a neighbour among `others`, the peers of an adjacent stage: by the
        highest hashes of pairs, most of them in its own region."""
        (here,), there = membership.regions((peer,)), membership.regions(others)
        same_region = np.array([[region == here for region in there]])
        picked = highest(pair_scores((peer,), others), same_region, self.picks)
        return bool(picked[0, others.index(other)])

    def active_neighbours(self, stage: int, own: int, t: int, peer: str = "") -> list[str]:
        """Neighbours of a peer ("": `me`) of stage `own` active at `stage` in iteration t, sorted by id.
        Unless the swarm is `crowded` these are all peers active there, at its own stage the peer itself
        included."""
        membership = self._current()
        if not self._crowded:
            return membership.live(stage, t)
        neighbours = self.neighbours_at(stage, peer or self.me, own, t)
        return sorted([other for other in neighbours if membership.is_live(other, stage, t)])

    def all(self, own: int, peer: str = "") -> frozenset[str]:
        """All neighbours of a peer ("": `me`) of stage `own`, at its own and both adjacent stages, those
        included that will be active later."""
        self._current()
        key = (peer or self.me, own)
        if key not in self._around:
            around = {own, (own - 1) % (self.stages + 1), (own + 1) % (self.stages + 1)}
            self._around[key] = frozenset().union(
                *(self.neighbours_at(stage, key[0], own) for stage in around)
            )
        return self._around[key]
