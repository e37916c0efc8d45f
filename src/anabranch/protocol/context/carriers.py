"""Carriers: peers that forward the bytes of two others which cannot dial each other (`net.circuit`).

Carriers are the dedicated ones of the log (`Carriers` records) and all members with an address of their own.
A carrier can reach a peer if that peer dialled it, so the candidates follow from the rules by which members
dial each other. A carrier that is gone, or has no such link, refuses, and the next one is tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.addresses import carrier_ways, direct_addresses
from anabranch.protocol.context.links import LinkTable
from anabranch.protocol.context.run_view import LogView, RunView
from anabranch.protocol.membership.rendezvous_graph import pair_scores
from anabranch.protocol.telemetry.peer_costs import PeerCosts

#: Carriers that one dial tries, and addresses of carriers that it tries in all. Choices: two carriers may die
#: at once; of three, each is tried at two addresses, as the first may be of the other IP version, or local.
TRIED, ADDRESSES_TRIED = 3, 6
#: Links of about the same cost are ranked by a hash, so that their carriers share the load: costs within this
#: factor, and the least cost (s) that is told from none.
ALIKE, LEAST_S = 2.0, 1e-3


@dataclass(frozen=True)
class CarrierChoice:
    """Choice of the carriers through which one peer reaches others."""

    me: str
    run: RunView
    log: LogView
    links: LinkTable
    costs: PeerCosts

    def listed(self) -> Mapping[str, str]:
        """Dedicated carriers (peer -> addresses) with which this peer keeps links, because others reach it
        through them: those that its own addresses name, and those of the log. So it does with a direct
        address, too: a firewall may let others out to a carrier's port alone. Only in a large swarm it then
        leaves out those of the log, as no carrier could hold links with all members. Empty if it is no
        member."""
        member = self.run.membership.members.get(self.me)
        if member is None:
            return {}
        own: dict[str, str] = {}
        for way in carrier_ways(member.address):
            address, _, carrier = way.rpartition("/")
            own[carrier] = f"{own[carrier]},{address}" if carrier in own else address
        if direct_addresses(member.address) and self.run.near.crowded:
            return own
        return {**own, **self.run.carriers}

    def ways(self, peer: str) -> list[str]:
        """Addresses of `peer` through carriers (`address/carrier`), at most ADDRESSES_TRIED of the TRIED best
        carriers, in the order to try them: the first address of each carrier, then the second of each, and so
        on; [] if no carrier is known. Suspected carriers come last; before that, carriers are ordered by the
        number of circuits to `peer` that broke and of dials that named them in vain, then dedicated ones
        first and the log's leader last, then by the measured cost of the link to the carrier."""
        candidates = {c: direct for c, a in self.run.carriers.items() if (direct := direct_addresses(a))}
        for other in self._linked_members(peer):
            if address := direct_addresses(self.run.membership.members[other].address):
                candidates.setdefault(other, address)
        candidates = {c: a for c, a in candidates.items() if c not in (self.me, peer)}
        scores = pair_scores((peer,), tuple(candidates))[0].tolist() if candidates else []
        keys = {c: (*self._rank(peer, c), score) for c, score in zip(candidates, scores, strict=True)}
        best = sorted(candidates, key=keys.__getitem__)[:TRIED]
        each = [[f"{address}/{carrier}" for address in candidates[carrier].split(",")] for carrier in best]
        turns = itertools.zip_longest(*each)
        return [way for turn in turns for way in turn if way is not None][:ADDRESSES_TRIED]

    def _linked_members(self, peer: str) -> list[str]:
        """Members with which `peer` has a link, since `peer` dials them, as far as this peer can tell: they
        can forward to `peer`. In the order in which they joined; [] if `peer` is no member."""
        run, membership = self.run, self.run.membership
        stage, stages = membership.stage_of(peer), self.run.settings.stages + 1
        if stage is None:
            return []
        linked = {self.log.leader, *self.log.voting_peers}
        if run.near.crowded:
            linked |= run.near.all(stage, peer)
        else:
            linked.update(*(membership.of(s % stages) for s in (stage - 1, stage, stage + 1)))
        known = sorted(linked.intersection(membership.members), key=membership.order.__getitem__)
        return [other for other in known if membership.dials(peer, other)]

    def _rank(self, peer: str, carrier: str) -> tuple[bool, int, bool, bool, int]:
        links, suspected = self.links, carrier in self.links.suspects
        vain = links.broken_circuits[peer, carrier] + links.tried_carriers[peer, carrier]
        known = self.costs.neighbours.get(carrier)
        cost_s = known.link.seconds(self.costs.activation_bytes) if known is not None else 0.0
        measured = math.floor(math.log(max(cost_s, LEAST_S) / LEAST_S, ALIKE))
        return suspected, vain, carrier not in self.run.carriers, carrier == self.log.leader, measured
