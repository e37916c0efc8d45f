"""Routing policies: which peer of the next stage gets the next microbatch.

A policy sees only what its node knows. `greedy`: among peers with a free slot the least cost of handing
it over now, `d_ij` (GWTF, section on the flow problem) plus what this node already has waiting there.
`static`: replica = index mod replicas, waiting for that peer even if others are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Candidate:
    """A live peer of the next stage as the sender sees it.

    link_s: seconds for one activation over the link (latency and transfer), both directions averaged.
    compute_s: its compute seconds per microbatch. outstanding: units sent to it and not yet back.
    free: whether it has granted a slot that is not used.
    """

    peer: str
    link_s: float
    compute_s: float
    outstanding: int
    free: bool


class Policy(Protocol):
    """Chooses by a pure rule; returns None to wait."""

    def choose(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        """The peer to send `index` to now, if it has a free slot. `candidates` are sorted by id."""
        ...

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        """The peer to ask for a slot when `choose` found none."""
        ...


class Greedy:
    def _cost(self, candidate: Candidate) -> tuple[float, int, str]:
        waiting = candidate.outstanding * max(candidate.compute_s, 1e-6)
        return (candidate.link_s + candidate.compute_s + waiting, candidate.outstanding, candidate.peer)

    def choose(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        free = [candidate for candidate in candidates if candidate.free]
        return min(free, key=self._cost).peer if free else None

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        return min(candidates, key=self._cost).peer if candidates else None


class Static:
    def choose(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        if not candidates:
            return None
        chosen = candidates[index % len(candidates)]
        return chosen.peer if chosen.free else None

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        return candidates[index % len(candidates)].peer if candidates else None


POLICIES: dict[str, type[Policy]] = {"greedy": Greedy, "static": Static}


def make_policy(name: str) -> Policy:
    """The policy called `name`; ValueError lists the names there are."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"no routing policy {name!r}; there are {', '.join(sorted(POLICIES))}") from None
