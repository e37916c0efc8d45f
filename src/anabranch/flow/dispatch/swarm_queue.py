"""Dispatch policy `swarm`: the next hop by SWARM's rule (Ryabinin et al., ICML 2023, arXiv 2301.11913).

Interleaved weighted round robin: every sender keeps a virtual time for each peer of the next stage and sends
the next microbatch to the peer with the least. That peer's virtual time then grows by the expected time of a
microbatch at the peer, a running mean, so quick peers are chosen more often. If the chosen peer grants no
slot in time, a peer is chosen anew. A peer whose link broke, or that is suspected, is banned for as long as
its announcement would have lasted, and its times are forgotten.

Differences to the published code: a peer takes no more microbatches than it has slots, so a sender waits for
a slot; the time of a microbatch at a peer is computed from measured parts (link both ways, passes, queue), as
the time until the gradient is back includes later stages; if all peers are banned, the bans are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from anabranch.counter_rng import CounterRng
from anabranch.flow.dispatch.next_hop_policies import Candidate, Choice, Policy

#: Seconds to wait for a slot of the chosen peer: the published deadline of a forward.
DEADLINE_S = 30.0
#: Seconds of a ban: the published lifetime of an announcement.
BAN_S = 300.0
#: Expected seconds of a microbatch at an unmeasured peer, and weight of the newest measurement, as published.
FIRST_S, NEWEST = 1.0, 0.1


@dataclass
class Mean:
    """Exponentially weighted mean of times (`seconds`), corrected for the few samples at its beginning;
    FIRST_S before the first."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, seconds: float) -> None:
        self.total += NEWEST * (seconds - self.total)
        self.weight += NEWEST * (1.0 - self.weight)

    @property
    def seconds(self) -> float:
        return self.total / self.weight if self.weight else FIRST_S


@dataclass
class _Call:
    """Record of a choice: `peer` was chosen for a microbatch. waited_s: seconds that the microbatch had
    waited then. took_s: expected seconds of the microbatch at the peer; 0 before it is sent."""

    peer: str
    waited_s: float
    took_s: float = 0.0


class SwarmQueue(Policy):
    """Policy `swarm` at one sender: virtual times, running means and bans of its next hops."""

    def __init__(self, rng: CounterRng) -> None:
        self._dice = rng
        self._time: dict[str, float] = {}
        self._tie: dict[str, float] = {}
        self._mean: dict[str, Mean] = {}
        self._banned: dict[str, float] = {}
        self._calls: dict[int, _Call] = {}

    def choose(
        self, index: int, candidates: Sequence[Candidate], waited_s: float = 0.0, now: float = 0.0
    ) -> Choice | None:
        by_peer = {candidate.peer: candidate for candidate in candidates}
        call = self._calls.get(index)
        if call is None or call.peer not in by_peer or waited_s - call.waited_s >= DEADLINE_S:
            if not by_peer:
                return None
            call = self._calls[index] = _Call(self._next(by_peer, now), waited_s)
        peer = by_peer[call.peer]
        if not peer.free:
            return Choice(call.peer, DEADLINE_S - max(0.0, waited_s - call.waited_s))
        queue_s = peer.compute_s * (peer.outstanding + peer.others)
        call.took_s = 2.0 * peer.link_s + peer.compute_s + queue_s
        return Choice(call.peer)

    def prefer(self, index: int, candidates: Sequence[Candidate]) -> str | None:
        """Always None: `choose` names the peer to request a slot from, by a choice with `hold_s` > 0."""
        return None

    def opened(self, peers: Collection[str]) -> None:
        self._calls.clear()
        for table in (self._time, self._tie, self._mean, self._banned):
            for peer in table.keys() - set(peers):
                del table[peer]  # type: ignore[attr-defined]

    def returned(self, index: int) -> None:
        call = self._calls.pop(index, None)
        if call is not None and call.took_s:
            self._mean.setdefault(call.peer, Mean()).add(call.took_s)

    def lost(self, peer: str, now: float) -> None:
        self._calls = {index: call for index, call in self._calls.items() if call.peer != peer}
        self._time.pop(peer, None)
        self._mean.pop(peer, None)
        self._banned[peer] = now + BAN_S

    def _next(self, peers: Collection[str], now: float) -> str:
        """Choose the peer with the least virtual time, of those not banned (of all, if all are), and return
        it. Its virtual time grows by its mean time of a microbatch; a new peer starts at the least virtual
        time of the others. peers: not empty."""
        able = [peer for peer in peers if now >= self._banned.get(peer, 0.0)] or list(peers)
        head = min((self._time[peer] for peer in able if peer in self._time), default=0.0)
        for peer in able:
            if peer not in self._time:
                self._time[peer], self._tie[peer] = head, self._dice.uniform()
        chosen = min(able, key=lambda peer: (self._time[peer], self._tie[peer], peer))
        self._time[chosen] += self._mean[chosen].seconds if chosen in self._mean else FIRST_S
        self._tie[chosen] = self._dice.uniform()
        return chosen
