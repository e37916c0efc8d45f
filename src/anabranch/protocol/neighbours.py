"""Who is whose neighbour in a swarm that is too large for everybody to know everybody.

Two stages that follow each other, or one with itself, are a graph that every peer computes alike from the
log: each picks, of the other stage, the few with the highest hash of the pair (rendezvous hashing: Thaler and
Ravishankar, IEEE/ACM ToN 6(1), 1998), and an edge is there if either end picked it. So nobody has fewer than
it picked, most have about twice as many, a random graph of that degree is well connected, and who goes or
comes changes the edges of few. Where no stage has more than twice what is picked, all are neighbours.

Of what a peer picks all but one in `FAR` are of its own region, if it has so many there: a microbatch crosses
as many links as there are stages, twice, and short ones have to be there to be chosen.

Links with neighbours are kept and listened to; what else is linked lasts as long as it is of use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from anabranch.protocol.membership import Membership

#: Neighbours are picked afresh for so many pairs of stages before an answer is forgotten: in virtual time a
#: whole swarm asks for the same.
GRAPHS_KEPT = 256
IDS_KEPT = 1 << 14
#: One in so many of those whom a peer picks (and one at least) may be of any region.
FAR = 3
#: Beyond every iteration: all that serve, or are to.
ALL_TIMES = 1 << 40
ALL_BITS = (1 << 64) - 1


@lru_cache(IDS_KEPT)
def _number(peer: str) -> int:
    return int.from_bytes(hashlib.blake2b(peer.encode(), digest_size=8).digest(), "big")


def _scores(one: Sequence[str], other: Sequence[str]) -> NDArray[np.uint64]:
    """A hash of every pair (SplitMix64 of both ids' hashes), the same whichever end comes first."""
    rows, columns = (np.array([_number(peer) for peer in peers], dtype=np.uint64) for peers in (one, other))
    mixed = rows[:, None] ^ columns[None, :]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    scores: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return scores


def _picked(scores: NDArray[np.uint64], near: NDArray[np.bool_] | None, picks: int) -> NDArray[np.bool_]:
    """Whom each row picks of the columns: the highest scores, most of them of those that are near it."""
    picks = min(picks, scores.shape[1])
    found: NDArray[np.bool_] = np.zeros(scores.shape, dtype=np.bool_)
    close = min(picks - max(1, picks // FAR), scores.shape[1])
    if near is not None and close > 0:
        ranked = np.where(near, scores, np.uint64(0))
        found = near & (ranked >= np.partition(ranked, -close, axis=1)[:, -close, None])
    ranked = np.where(found, np.uint64(ALL_BITS), scores)
    picked: NDArray[np.bool_] = ranked >= np.partition(ranked, -picks, axis=1)[:, -picks, None]
    return picked


@lru_cache(GRAPHS_KEPT)
def edges(
    one: tuple[str, ...],
    other: tuple[str, ...],
    picks: int,
    regions: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
) -> Mapping[str, frozenset[str]]:
    """Neighbours of each of `one` in `other`, and the other way round. With one == other: in one stage.
    regions: of each of `one` and of `other` (None: wherever they are)."""
    same = one == other
    if not one or not other or max(len(one), len(other)) <= 2 * picks:
        found = {peer: frozenset(other) - {peer} for peer in one}
        return found if same else found | {peer: frozenset(one) for peer in other}
    scores = _scores(one, other)
    if same:
        np.fill_diagonal(scores, 0)  # nobody picks itself
    near = None if regions is None else np.array(regions[0])[:, None] == np.array(regions[1])[None, :]
    picked = _picked(scores, near, picks)
    picked |= _picked(scores.T, None if near is None else near.T, picks).T
    found = {peer: frozenset(other[n] for n in np.flatnonzero(picked[m])) for m, peer in enumerate(one)}
    for n, peer in enumerate(() if same else other):
        found[peer] = frozenset(one[m] for m in np.flatnonzero(picked[:, n]))
    return found


def _with(peers: list[str], peer: str) -> list[str]:
    """Somebody counts as one of them."""
    return peers if not peer or peer in peers else sorted([*peers, peer])


class Neighbours:
    """As the peer `me` sees them. `membership()` is the log's; picks: in each adjacent stage (half as many in
    its own). `stages`: relay stages of the run."""

    def __init__(self, me: str, membership: Callable[[], Membership], picks: int, stages: int) -> None:
        self.me, self.picks, self.stages = me, picks, stages
        self._membership = membership
        self._version: tuple[Membership, int] | None = None
        self._known: dict[tuple[str, int, int], frozenset[str]] = {}
        self._around: dict[tuple[str, int], frozenset[str]] = {}
        self._crowded = False

    def _look(self) -> Membership:
        """The membership; what was worked out before its last change is forgotten."""
        membership = self._membership()
        if self._version is None or self._version != (membership, membership.version):
            self._version = (membership, membership.version)
            self._known.clear()
            self._around.clear()
            self._crowded = membership.widest() > 2 * self.picks
        return membership

    @property
    def crowded(self) -> bool:
        """Whether there is a stage of which not everybody is everybody's neighbour."""
        self._look()
        return self._crowded

    def at(self, stage: int, peer: str, own: int, t: int = ALL_TIMES) -> frozenset[str]:
        """Neighbours at `stage`, adjacent or its own, of a peer of the stage `own`, of those who serve at t.
        The peer counts as one of its stage, whether it serves or not."""
        membership = self._look()
        key = (peer, stage, t)
        if key not in self._known:
            picks, serves = self.picks, membership.live(own, t)

            def of(fellows: list[str]) -> Mapping[str, frozenset[str]]:
                if stage == own:
                    return edges(tuple(fellows), tuple(fellows), max(1, picks // 2))
                others = membership.live(stage, t)
                regions = membership.regions(fellows), membership.regions(others)
                return edges(tuple(fellows), tuple(others), picks, regions)

            if peer in serves:
                # The graph of two stages is the same from both ends.
                ends = (stage, own) if stage < own else (own, stage)
                graph = membership.graph(*ends, t, picks, lambda: of(serves))
            else:
                graph = of(_with(serves, peer))
            self._known[key] = graph[peer]
        return self._known[key]

    def were(self, peer: str, own: int, other: str, stage: int, t: int) -> bool:
        """Whether a peer of the stage `own` and another of `stage` beside it are neighbours, or were when
        both served."""
        membership = self._look()
        fellows, others = _with(membership.live(own, t), peer), _with(membership.live(stage, t), other)
        if max(len(fellows), len(others)) <= 2 * self.picks:
            return True
        return self._picks(membership, peer, others, other) or self._picks(membership, other, fellows, peer)

    def _picks(self, membership: Membership, peer: str, others: list[str], other: str) -> bool:
        """Whether a peer picks another one of a stage beside its own."""
        (here,), there = membership.regions((peer,)), membership.regions(others)
        near = np.array([[region == here for region in there]])
        return bool(_picked(_scores((peer,), others), near, self.picks)[0, others.index(other)])

    def beside(self, stage: int, own: int, t: int, peer: str = "") -> list[str]:
        """Those who serve `stage` at t and are neighbours of a peer (me) of the stage `own` beside it, by
        id."""
        membership = self._look()
        live = membership.live(stage, t)
        if not self._crowded:
            return live
        near = self.at(stage, peer or self.me, own, t)
        return [other for other in live if other in near]

    def all(self, own: int, peer: str = "") -> frozenset[str]:
        """All neighbours of a peer (me) of the stage `own`: with whom it keeps links."""
        self._look()
        key = (peer or self.me, own)
        if key not in self._around:
            around = {own, (own - 1) % (self.stages + 1), (own + 1) % (self.stages + 1)}
            self._around[key] = frozenset().union(*(self.at(stage, key[0], own) for stage in around))
        return self._around[key]
