"""Dialling of members: one attempt at a time to each, repeated with back-off.

The first attempt is direct where the member has an address of its own; the later ones also try carriers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from anabranch.addresses import direct_addresses
from anabranch.counter_rng import CounterRng
from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.context.carriers import CarrierChoice
from anabranch.protocol.context.clock import Clock
from anabranch.protocol.context.links import LinkTable
from anabranch.protocol.context.outbox import Outbox
from anabranch.protocol.context.run_view import RunView
from anabranch.protocol.interface.events import Dial

#: First and longest time (s) between attempts to reach a member; it doubles, with jitter.
REDIAL_S, REDIAL_MAX_S = 0.5, 8.0
#: Least time (s) between two dials in a large swarm, where an answer takes several round trips.
ANSWER_S = 4.0
#: Seconds for which a peer waits to be dialled by a member that is to dial it, before it dials that one
#: itself, and between two such dials. A choice: the other end has tried four times by then.
STAND_BY_S = 8.0


@dataclass(eq=False)
class Dialer:
    """Dialer of members, fellow voters and dedicated carriers: one attempt at a time to each."""

    me: str
    clock: Clock
    links: LinkTable
    outbox: Outbox
    run: RunView
    rng: CounterRng
    carriers: CarrierChoice
    fellows: dict[str, str] = field(default_factory=dict)
    """Addresses by peer of the other voters, from this peer's disk; used until it follows the log."""
    _dials: dict[str, tuple[float, Backoff]] = field(default_factory=dict)
    """Time (s) of the next attempt, and the back-off after it, by peer."""
    _due_at: float | None = math.inf
    """Earliest of these times; None: to be worked out."""

    @property
    def dialled(self) -> Iterable[str]:
        """Peers to which a dial is in progress, or planned."""
        return self._dials

    def use_fellows(self, addresses: Mapping[str, str]) -> None:
        self.fellows = dict(addresses)

    def deadline(self) -> float:
        """Time (s) of the next attempt; infinite if none is planned."""
        if self._due_at is None:
            self._due_at = min([at for at, _ in self._dials.values()], default=math.inf)
        return self._due_at

    def reach(self, peer: str) -> None:
        """Dial a member, fellow voter or carrier with a known address, and go on with back-off until it is
        linked, unless it is linked or being dialled. Nothing for this peer itself, or without an address."""
        if peer == self.me or peer in self.links.up or peer in self._dials:
            return
        if address := self.addresses(peer):
            self._dial(peer, address)

    def reach_some(self, peers: Iterable[str]) -> None:
        """Dial a random few of `peers` that are not linked: as many as a peer picks neighbours."""
        strangers = [peer for peer in peers if peer not in self.links.up]
        self.rng.shuffle(strangers)
        for peer in strangers[: self.run.near.picks]:
            self.reach(peer)

    def plan(self, peer: str, least_s: float = 0.0) -> None:
        """Plan the next attempt to dial `peer`, in place of one that is planned, after a back-off of at least
        `least_s` seconds, longer each time."""
        _, backoff = self._dials.get(peer, (0.0, None))
        backoff = backoff or Backoff(self.rng, REDIAL_S, REDIAL_MAX_S)
        self._dials[peer] = (self.clock.now + max(least_s, backoff.next() or REDIAL_MAX_S), backoff)
        self._due_at = None

    def stand_by(self, peer: str) -> None:
        """Plan to dial, in STAND_BY_S, a member without an address of its own that is to dial this peer,
        unless it is linked by then: it may know no carrier that reaches this peer, where this peer knows one
        that reaches it."""
        member = self.run.membership.members.get(peer)
        if member is None or direct_addresses(member.address):
            return
        if peer != self.me and peer not in self.links.up and peer not in self._dials:
            self._dials[peer] = (self.clock.now + STAND_BY_S, Backoff(self.rng, STAND_BY_S, STAND_BY_S))
            self._due_at = None

    def cancel(self, peer: str) -> None:
        if self._dials.pop(peer, None) is not None:
            self._due_at = None

    def tick(self) -> None:
        """Make the attempts that are due; drop those to peers that are linked now, or have no address."""
        if self.clock.now < self.deadline():
            return
        for peer, (at, _) in list(self._dials.items()):
            if self.clock.now < at:
                continue
            address = "" if peer in self.links.up else self.addresses(peer, again=True)
            if address:
                self._dial(peer, address)
            else:
                self.cancel(peer)

    def addresses(self, peer: str, again: bool = False) -> str:
        """Addresses of `peer` to dial now, joined by commas, in order of preference ("" if there is none):
        its own, and after them those through carriers if it has none that is direct, or if `again`, as it did
        not answer at its own. The carriers that are named count as tried, so that others come first the next
        time. Of a peer that is no member: its address as a dedicated carrier, or as a voter on this peer's
        disk."""
        member = self.run.membership.members.get(peer)
        if member is None:
            return self.carriers.listed().get(peer) or self.fellows.get(peer, "")
        if not again and direct_addresses(member.address):
            return member.address
        carried = self.carriers.ways(peer)
        self.links.tried_carriers.update({(peer, way.rpartition("/")[2]) for way in carried})
        return ",".join(filter(None, [member.address, *carried]))

    def _dial(self, peer: str, address: str) -> None:
        self.plan(peer, ANSWER_S if self.run.near.crowded else 0.0)
        self.outbox.emit(Dial(peer, address))
