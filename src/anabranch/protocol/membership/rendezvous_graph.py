"""Neighbour graph of two stages, or of one with itself, by rendezvous hashing (Thaler and Ravishankar,
IEEE/ACM ToN 6(1), 1998)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

#: Graphs and hashes of ids that are kept. A choice: the peers of a simulated swarm ask for the same ones.
GRAPHS_KEPT = 256
IDS_KEPT = 1 << 14
#: Share of a peer's picks that may be of any region: 1/FAR, at least one pick. A choice: two thirds of the
#: links are short, and the graph between regions stays connected.
FAR = 3
_HIGHEST = np.uint64((1 << 64) - 1)


@lru_cache(IDS_KEPT)
def _id_hash(peer: str) -> int:
    return int.from_bytes(hashlib.blake2b(peer.encode(), digest_size=8).digest(), "big")


def pair_scores(rows: Sequence[str], columns: Sequence[str]) -> NDArray[np.uint64]:
    """Score of every pair of peers, shape (rows, columns): SplitMix64 of both ids' hashes. Symmetric."""
    left, right = (np.array([_id_hash(peer) for peer in peers], dtype=np.uint64) for peers in (rows, columns))
    mixed = left[:, None] ^ right[None, :]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    scores: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return scores


def highest(
    scores: NDArray[np.uint64], same_region: NDArray[np.bool_] | None, picks: int
) -> NDArray[np.bool_]:
    """Mask, shaped as `scores`, of the picks of each row: its `picks` columns with the highest scores. One
    pick in FAR (at least one) is of any region, the others of the row's own if that has as many.

    same_region: mask of pairs of one region, shape as `scores`; None: picks ignore regions.
    """
    picks = min(picks, scores.shape[1])
    picked: NDArray[np.bool_] = np.zeros(scores.shape, dtype=np.bool_)
    close = min(picks - max(1, picks // FAR), scores.shape[1])
    if same_region is not None and close > 0:
        ranked = np.where(same_region, scores, np.uint64(0))
        picked = same_region & (ranked >= np.partition(ranked, -close, axis=1)[:, -close, None])
    ranked = np.where(picked, _HIGHEST, scores)
    result: NDArray[np.bool_] = ranked >= np.partition(ranked, -picks, axis=1)[:, -picks, None]
    return result


class RendezvousGraph:
    """Neighbour graph of two stages (or of one with itself), as `neighbour_graph` computes it: `graph[peer]`
    is the set of the peer's neighbours in the other stage (KeyError for a peer of neither, unless all are
    neighbours).

    adjacency: shape (peers of the first stage, peers of the second); None: all are neighbours.
    """

    def __init__(
        self, first: tuple[str, ...], second: tuple[str, ...], adjacency: NDArray[np.bool_] | None
    ) -> None:
        self._ends = first, second
        self._adjacency = adjacency
        self._rows = {peer: row for row, peer in enumerate(first)}
        self._columns = {peer: column for column, peer in enumerate(second)} if first != second else {}
        self._known: dict[str, frozenset[str]] = {}

    def __getitem__(self, peer: str) -> frozenset[str]:
        if peer not in self._known:
            self._known[peer] = self._neighbours_of(peer)
        return self._known[peer]

    def _neighbours_of(self, peer: str) -> frozenset[str]:
        (first, second), row = self._ends, self._rows.get(peer)
        if self._adjacency is None:
            return frozenset(first if row is None else second) - {peer}
        if row is not None:
            return frozenset([second[column] for column in np.flatnonzero(self._adjacency[row]).tolist()])
        found = np.flatnonzero(self._adjacency[:, self._columns[peer]])
        return frozenset([first[row] for row in found.tolist()])


@lru_cache(GRAPHS_KEPT)
def neighbour_graph(
    first: tuple[str, ...],
    second: tuple[str, ...],
    picks: int,
    regions: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
) -> RendezvousGraph:
    """Neighbour graph of two stages, given as their peers (the same tuple twice: of one stage with itself).

    Two peers are neighbours if either picks the other; all are, if no stage has more than 2 * `picks`.
    regions: regions of the peers of each stage; None: picks ignore regions.
    """
    if not first or not second or max(len(first), len(second)) <= 2 * picks:
        return RendezvousGraph(first, second, None)
    scores = pair_scores(first, second)
    if first == second:
        np.fill_diagonal(scores, 0)  # nobody picks itself
    same = None if regions is None else np.array(regions[0])[:, None] == np.array(regions[1])[None, :]
    adjacency = highest(scores, same, picks)
    adjacency |= highest(scores.T, None if same is None else same.T, picks).T
    return RendezvousGraph(first, second, adjacency)
