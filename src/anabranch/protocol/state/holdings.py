"""Index of the snapshots that peers report to hold: by peer, and by (stage, iteration, fingerprint).

In a large swarm every member reports within moments, and each report makes the leader look up holders.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

#: (stage, t) -> fingerprint of the held state.
Held = Mapping[tuple[int, int], str]


class Holdings:
    """Last report of each peer about the snapshots that it holds, indexed by snapshot."""

    def __init__(self) -> None:
        self._of: dict[str, Held] = {}
        self._who: dict[tuple[int, int, str], set[str]] = {}

    def who(self, stage: int, t: int, digest: str) -> Collection[str]:
        """Peers that hold the state of `stage` after iteration t with this fingerprint, in no order. It is
        the index's own set: not to be changed, and it follows later reports."""
        return self._who.get((stage, t, digest), ())

    def told(self, peer: str, held: Held) -> None:
        """Replace the report of `peer` by a new one, which lists everything that it holds. held: (stage,
        iteration) -> fingerprint."""
        before = self._of.get(peer, {})
        self._of[peer] = held
        for (stage, t), digest in before.items():
            if held.get((stage, t)) != digest:
                self._drop(peer, (stage, t, digest))
        for (stage, t), digest in held.items():
            self._who.setdefault((stage, t, digest), set()).add(peer)

    def forget(self, peer: str) -> None:
        for (stage, t), digest in self._of.pop(peer, {}).items():
            self._drop(peer, (stage, t, digest))

    def _drop(self, peer: str, what: tuple[int, int, str]) -> None:
        peers = self._who[what]
        peers.discard(peer)
        if not peers:
            del self._who[what]
