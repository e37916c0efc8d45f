"""Table of one peer's links: connected peers, their processes, how long they were silent, suspected peers.

`failure_detection.connections` opens and closes links; all parts read this table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout

#: Processes of a peer that may send something false before its later ones get no work either. A choice: one
#: may have had a fault that its owner repaired; with more, a forger that starts anew would cost its victims
#: their seats (`coordinator.reports.Reports.false_witnesses`).
FORGIVEN = 1
#: Seconds after which a payload that should have been there is late, and number of late payloads of one link
#: after which its carrier is left if none was acknowledged since. Choices: inquiry and answer cross payloads
#: that have just come.
LATE_S, LATE_PAYLOADS = 3.0, 2

#: Name of a payload: "activation" or "gradient", iteration, microbatch, number of its transmission; or
#: "state", iteration, piece, number of times that its source may still be asked.
LatePayload = tuple[str, int, int, int]


@dataclass(frozen=True)
class LostLink:
    """Link that broke, or dial that failed. refused: True if nothing listens at the peer's address.
    patience_s: longest silence (s) that is normal for this peer, from its history."""

    peer: str
    reason: str
    refused: bool
    patience_s: float


class LinkTable:
    """Table of the connected peers: of each link its silence timeout, the epoch announced on it, its carrier,
    and whether it loses payloads. Beside it: peers that are suspected or sent something false, and counts of
    what failed through which carrier. Delays and bandwidths are in `PeerCosts`. incarnations: last linked
    process (incarnation) of each peer; outlives the link."""

    def __init__(self) -> None:
        self.up: dict[str, AdaptiveTimeout] = {}
        """Adaptive timeout of each linked peer, learnt from the gaps between its messages."""
        self.incarnations: dict[str, int] = {}
        self.epochs: dict[str, int] = {}
        """Epoch of the run that each linked peer announced."""
        self.suspects: set[str] = set()
        """Peers suspected to have failed: no new work is sent to them (R3)."""
        self.forgers: dict[str, set[int]] = {}
        """Peer -> incarnations of its processes that sent a payload that is false, or has not their own
        seal: no work is shared with them, nor with a peer's later ones after FORGIVEN such processes."""
        self.broken_circuits: Counter[tuple[str, str]] = Counter()
        """Number of links that ended, by (peer, carrier): a carrier may drop the bytes of others, although
        its own link is sound. The counts of a peer begin anew after a direct link."""
        self.tried_carriers: Counter[tuple[str, str]] = Counter()
        """Number of dials since the last link, by (peer, carrier named): without it the same few carriers
        would be named for ever, though they never answer."""
        self.carriers: dict[str, str] = {}
        """Carrier of each link that has one, by peer."""
        self.lossy: set[str] = set()
        """Peers whose carried links lose payloads and are to be renewed: a carrier may pass heartbeats on and
        drop the bytes of a link's other connection."""
        self._late: dict[str, set[LatePayload]] = {}
        self._timed: dict[str, set[bool]] = {}
        self._users: list[Callable[[], Collection[str]]] = []
        self._waiting: list[Callable[[], Collection[str]]] = []

    def opened(self, peer: str, incarnation: int, via: str = "") -> None:
        """Record to which process of `peer` a new link leads, and through which carrier ("": none); `add`
        enters the link itself. The counts of dials through carriers, of late payloads, and after a direct
        link of broken circuits, begin anew."""
        self.incarnations[peer] = incarnation
        self.payloads_come(peer)
        _forget(self.tried_carriers, peer)
        if via:
            self.carriers[peer] = via
        else:
            self.carriers.pop(peer, None)
            _forget(self.broken_circuits, peer)

    def add(self, peer: str, silence: AdaptiveTimeout) -> None:
        self.up[peer] = silence
        self.suspects.discard(peer)

    def drop(self, peer: str) -> AdaptiveTimeout | None:
        """Remove the link to `peer` and what is known of it, a suspicion of `peer` too; if a carrier
        forwarded it, count a broken circuit. Returns the peer's adaptive silence timeout; None if there was
        no link."""
        self.suspects.discard(peer)
        self.lossy.discard(peer)
        self.epochs.pop(peer, None)
        self._timed.pop(peer, None)
        if via := self.carriers.pop(peer, ""):
            self.broken_circuits[peer, via] += 1
        return self.up.pop(peer, None)

    def payload_late(self, peer: str, payload: LatePayload, late_s: float) -> None:
        """Note that `payload`, which `peer` should have got (or sent, if it is a piece of a state), is not
        there, although it should have been there `late_s` seconds before even over a slow link (negative: it
        need not be there yet). Nothing below LATE_S, or if no carrier forwards the link. With LATE_PAYLOADS
        different payloads the link is `lossy`."""
        if late_s >= LATE_S and peer in self.carriers:
            late = self._late.setdefault(peer, set())
            late.add(payload)
            if len(late) >= LATE_PAYLOADS:
                self.lossy.add(peer)

    def payloads_come(self, peer: str) -> None:
        """Forget which payloads to `peer` were late, so that its link is not `lossy`: it acknowledged one, or
        there is no better way. A link's payloads arrive in order, so nothing that was sent before an
        acknowledged one is lost."""
        self._late.pop(peer, None)
        self.lossy.discard(peer)

    def close(self, peer: str) -> None:
        """Remove the link, which must be up, to a peer that was removed from the run, but keep its
        measurements, and whether it is suspected."""
        self.up.pop(peer)

    def forget_process(self, peer: str) -> None:
        """Forget to which process of `peer` its last link led: it never was a member, and keys cost
        nothing."""
        self.incarnations.pop(peer, None)

    def forget_carriers(self, peer: str) -> None:
        """Drop the counts about carriers to a peer that is no member any more: keys cost nothing."""
        _forget(self.tried_carriers, peer)
        _forget(self.broken_circuits, peer)

    def forged(self, peer: str) -> None:
        """Record that the linked process of `peer` sent a payload that is false, or without a valid seal
        (signature); no more work is shared with that process (`forgers`)."""
        self.forgers.setdefault(peer, set()).add(self.incarnations.get(peer, 0))

    def is_forger(self, peer: str) -> bool:
        forged = self.forgers.get(peer, set())
        return len(forged) > FORGIVEN or self.incarnations.get(peer, 0) in forged

    def announced(self, peer: str, epoch: int) -> None:
        """Record the epoch (number of the voters' replacement by the owner) that `peer` announced."""
        self.epochs[peer] = epoch

    def timed_directions(self, peer: str) -> set[bool]:
        """Directions of the link to `peer` in which this peer has acknowledged a payload since the link came
        up: True for backward, False for forward. The first payload in each direction is always acknowledged,
        so that `peer` can measure the link. It is the stored set: the caller adds to it."""
        return self._timed.setdefault(peer, set())

    def register_user(
        self,
        partners: Callable[[], Collection[str]],
        waits_for: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """Register a component that exchanges work with other peers: `partners()` returns them.
        `waits_for()`: those among them that it may wait for, whose links are to be watched; by default all.
        """
        self._users.append(partners)
        self._waiting.append(waits_for or partners)

    def in_use(self) -> set[str]:
        """Peers with which any component of this peer exchanges work now, neighbours or not, linked or
        not."""
        return {peer for partners in self._users for peer in partners()}

    def waited_for(self) -> set[str]:
        """Those among the peers of `in_use` that a component of this peer may wait for now."""
        return {peer for waits_for in self._waiting for peer in waits_for()}


def _forget(counts: Counter[tuple[str, str]], peer: str) -> None:
    for pair in [pair for pair in counts if pair[0] == peer]:
        del counts[pair]
