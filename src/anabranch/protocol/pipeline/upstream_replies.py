"""Answers to upstream peers: gradients sent back, new upstream peers of a microbatch, inquiries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from anabranch.protocol.audit.seals import GRADIENT, Seals
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import Backward, Forward, Have, Lack, Want
from anabranch.protocol.pipeline.incoming import IncomingMicrobatch, ReturnedGradient

#: Times that the gradient of a microbatch is sent to one upstream peer over one link. Plain choice: a link
#: that holds delivers the first, and a peer that asks on and on must not take up the line.
MOST_SENT = 2
#: Time (s) after which that holds for a peer, too, that did not send the microbatch, and has had its gradient
#: once: it may have asked before it had a use for it, and asks again. A plain choice.
SENT_AGAIN_S = 15.0
#: Forwards of a microbatch that is here for each of which the gradient is sent once more. Derived: an honest
#: peer gives a microbatch with its gradient up, and sends it anew, at most once for an overflow and once when
#: it is called back.
MOST_AGAIN = 2
#: Microbatches that a peer may ask for although it did not send them and their sender is heard: one, and this
#: share of those that it computed in the last step. A choice: a replica that takes over the work of a slow
#: fellow asks all replicas of this stage, and gets a part of it from each; who computes nothing cannot live
#: on what others send. Who is told that a microbatch is not here sends it whole.
MAY_ASK = 0.5


def no_units(peer: str) -> int:
    """Number of microbatches that an upstream peer computed before the first step: none."""
    return 0


class UpstreamReplies:
    """Replies to upstream peers about the incoming microbatches of iteration t. computed(peer): microbatches
    that an upstream peer computed in the last step that was taken."""

    def __init__(
        self, ctx: PeerContext, t: int, base: str, seals: Seals, computed: Callable[[str], int]
    ) -> None:
        self.ctx = ctx
        self._seals = seals
        self._computed = computed
        self._asked: dict[str, set[int]] = defaultdict(set)
        """Peer -> microbatches that it asked for, that others sent and are there to ask for themselves."""
        self.t = t
        self.base = base

    def send_back(self, unit: IncomingMicrobatch) -> None:
        """Send the gradient of a microbatch, which must be ready, to all upstream peers that wait for it,
        again to one that had it; a message without the tensor in an evaluation, or if they have that gradient
        already."""
        payload = unit.gradient_out if unit.train and unit.gradient_needed else None
        seal = self._seals.seal(GRADIENT, unit.index) if payload is not None else b""
        message = Backward(self.ctx.fence(self.t, self.base), unit.index, seal)
        now = unit.sent_back_at = self.ctx.clock.now
        for peer, transmission in ((unit.upstream, unit.transmission), *unit.others.items()):
            ahead_bytes = self.ctx.costs.hand(peer, now) if payload is not None else 0.0
            tensors = (unit.back[peer].tensors if peer in unit.back else 0) + (payload is not None)
            unit.back[peer] = ReturnedGradient(transmission, payload is not None, now, ahead_bytes, tensors)
            self.ctx.outbox.send(peer, message, payload)
        unit.others.clear()

    def adopt(self, unit: IncomingMicrobatch, upstream: str, message: Forward | Want) -> None:
        """Make `upstream` the upstream peer of a microbatch, and send it the gradient if that is ready and
        not on its way to that peer (`_on_its_way_back`). A former upstream peer that waits for it, and still
        serves, gets it too: the microbatch may have come over two paths."""
        waits = unit.upstream != upstream and unit.gradient_needed and not unit.returned
        if waits and self.ctx.run.membership.is_live(unit.upstream, self.ctx.run.previous_stage(), self.t):
            unit.others[unit.upstream] = unit.transmission
        unit.others.pop(upstream, None)
        unit.upstream, unit.transmission = upstream, message.way
        unit.gradient_needed = unit.gradient_needed or message.gradient_needed
        unit.again[upstream] += isinstance(message, Forward)
        if unit.returned and not self._on_its_way_back(unit, asked=isinstance(message, Want)):
            self.send_back(unit)

    def _on_its_way_back(self, unit: IncomingMicrobatch, asked: bool) -> bool:
        """True if the gradient is being sent to the upstream peer already, perhaps over a slow link, or was
        sent to it often enough: MOST_SENT times, and once more for each Forward of it since (MOST_AGAIN); but
        once to a peer that never sent the microbatch, until SENT_AGAIN_S later. A tensor counts for whatever
        transmission it was sent: an upstream peer takes any. asked: True if that peer asks for it (`Want`):
        then a gradient that is late counts against the link (`LinkTable.payload_late`)."""
        back, tensor = unit.back.get(unit.upstream), unit.train and unit.gradient_needed
        if back is None or (tensor and not back.tensors):
            return False
        late_s = self.ctx.clock.now - back.at - self.ctx.costs.most_s(unit.upstream, back.ahead_bytes)
        if tensor:
            if asked and unit.sent_back_at is not None:
                name = ("gradient", self.t, unit.index, back.tensors)
                self.ctx.links.payload_late(unit.upstream, name, late_s)
            long_ago = self.ctx.clock.now >= back.at + SENT_AGAIN_S
            most = MOST_SENT if long_ago or self._sent(unit, unit.upstream) else 1
            if back.tensors >= most + min(unit.again[unit.upstream], MOST_AGAIN):
                return True
        elif back.transmission != unit.transmission:
            return False
        return late_s < 0.0

    def on_want(self, unit: IncomingMicrobatch | None, peer: str, message: Want) -> None:
        """Answer a peer that asks for a microbatch: Lack if this peer does not have it (`unit` is None) or
        `peer` asks for more than it may (MAY_ASK), else Have; then `peer` becomes its upstream peer, and gets
        its gradient."""
        if unit is None or not self._may_ask(unit, peer):
            self.lack(peer, message.index, message.way, refused=False)
            return
        self.ctx.outbox.send(peer, Have(self.ctx.fence(self.t, self.base), message.index, message.way))
        self.adopt(unit, peer, message)

    def _heard(self, sender: str) -> bool:
        run = self.ctx.run
        return self.ctx.reachable(sender) and run.membership.is_live(sender, run.previous_stage(), self.t)

    @staticmethod
    def _sent(unit: IncomingMicrobatch, peer: str) -> bool:
        return peer == unit.sender or unit.again[peer] > 0

    def _may_ask(self, unit: IncomingMicrobatch, peer: str) -> bool:
        """True if a peer gets the gradient of a microbatch for the asking: it sent this peer the microbatch
        itself, or whoever sent it is not heard any more, or the peer has asked for few microbatches that
        others sent (MAY_ASK; this one is counted then). Always in an evaluation."""
        if not unit.train or self._sent(unit, peer) or not self._heard(unit.sender):
            return True
        asked = self._asked[peer]
        if unit.index not in asked and len(asked) > MAY_ASK * self._computed(peer):
            return False
        asked.add(unit.index)
        return True

    def delivered(self, unit: IncomingMicrobatch | None, peer: str) -> None:
        """Measure the link to `peer` by its acknowledgement of a gradient; ignored unless it is awaited from
        `peer`. unit: None if this peer does not have the microbatch."""
        if unit is not None and unit.upstream == peer and unit.sent_back_at is not None:
            self.ctx.costs.delivered(peer, self.ctx.clock.now - unit.sent_back_at, self.ctx.clock.now)
            self.ctx.links.payloads_come(peer)
            unit.sent_back_at = None

    def lack(self, peer: str, index: int, transmission: int, refused: bool) -> None:
        """Tell an upstream peer that this peer does not have a microbatch. transmission: the upstream peer's
        number of the send or search that is answered. refused: True if the microbatch came, and was given up
        or called back."""
        self.ctx.outbox.send(peer, Lack(self.ctx.fence(self.t, self.base), index, refused, transmission))
