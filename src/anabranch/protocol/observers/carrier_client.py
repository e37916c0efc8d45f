"""Protocol of a dedicated carrier: it offers itself to the run's leader and answers heartbeats."""

from __future__ import annotations

from anabranch.counter_rng import CounterRng
from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import Carry, Elsewhere, Ping, Pong, Refused

#: Time (s) between two offers: a leader forgets a carrier without a link after several.
OFFER_S = 5.0
#: First and longest time (s) between attempts to connect to the leader.
REDIAL_S, REDIAL_MAX_S = 0.5, 15.0


class CarrierClient:
    """Dedicated carrier `me`, with the same interface to drivers as `peer.Peer`. It follows no log, so it
    asks those that it is linked with for the leader. A leader whose addresses name this carrier dials it:
    only over such a link can it forward to the leader. linked: peers with a link."""

    def __init__(
        self, leader: str, leader_address: str, own_address: str, me: str, seed: int = 0
    ) -> None:
        self._me = me
        self.linked: dict[str, None] = {}
        self._leader, self._leader_address = leader, leader_address
        self._own_address = own_address
        self._at = float("inf")
        self._asked = 0
        self._backoff = Backoff(CounterRng(seed), REDIAL_S, REDIAL_MAX_S)

    def deadline(self) -> float:
        """Driver's time (s) at which `Wake` is wanted next."""
        return self._at

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        match event:
            case ev.Started():
                return self._go_on(now)
            case ev.LinkUp(peer):
                self.linked[peer] = None
                if peer == self._leader:
                    self._backoff.reset()
                    return self._go_on(now)
            case ev.LinkDown(peer):
                self.linked.pop(peer, None)
                if peer == self._leader:
                    self._at = now + (self._backoff.next() or REDIAL_MAX_S)
            case ev.Received(peer, Ping() as ping):
                return [ev.Send(peer, Pong(ping.number, 0.0, 0.0, 0.0, 0.0))]
            case ev.Received(peer, Elsewhere(leader, address)) if leader and address:
                if peer in self.linked and leader != self._leader:
                    self._leader, self._leader_address = leader, address
                    return self._go_on(now)
            case ev.Received(peer, Refused(reason)) if peer == self._leader:
                return [ev.Stop(reason, ok=False)]
            case ev.Wake() if now >= self._at:
                return self._go_on(now)
        return []

    def _go_on(self, now: float) -> list[ev.Effect]:
        """Offer this carrier to the leader; without a link to the leader dial it, unless its addresses lead
        through this carrier, and send the offer to another linked peer, whose answer names the present
        leader."""
        self._at = now + OFFER_S
        offer = Carry(self._own_address)
        if self._leader in self.linked:
            return [ev.Send(self._leader, offer)]
        effects: list[ev.Effect] = []
        if f"/{self._me}" not in self._leader_address:
            effects.append(ev.Dial(self._leader, self._leader_address))
        if self.linked:
            self._asked += 1
            effects.append(ev.Send(sorted(self.linked)[self._asked % len(self.linked)], offer))
        return effects
