"""Sampling of links: the receiver acknowledges some payloads, so that their sender can time the transfer."""

from __future__ import annotations

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import Got

#: Iterations in which links are timed: the first SAMPLED_FIRST, then every SAMPLED_EVERYth. Plain choices.
SAMPLED_FIRST, SAMPLED_EVERY = 3, 4


def sampled(t: int) -> bool:
    """True if links are timed in iteration t."""
    return t <= SAMPLED_FIRST or t % SAMPLED_EVERY == 0


class LinkSampling:
    """Receiver's acknowledgements (`Got`) of some payloads of iteration t, by which the senders measure their
    links."""

    def __init__(self, ctx: PeerContext, t: int, base: str) -> None:
        self.ctx = ctx
        self.t = t
        self.base = base
        self._sampled: set[tuple[str, bool]] = set()

    def acknowledge(self, peer: str, index: int, backward: bool) -> None:
        """Acknowledge the payload of microbatch `index` from `peer` if it is the peer's first in this
        direction (backward or forward) in this iteration, and that is sampled or the link's first payload in
        this direction comes with it; never in a run with rounds."""
        if (peer, backward) in self._sampled or self.ctx.run.settings.rounds.inner:
            return  # token ids are too few to tell a line's rate; it is tried before the exchange of a round
        timed = self.ctx.links.timed_directions(peer)
        if sampled(self.t) or backward not in timed:
            timed.add(backward)
            self._sampled.add((peer, backward))
            self.ctx.outbox.send(peer, Got(self.ctx.fence(self.t, self.base), index, backward))
