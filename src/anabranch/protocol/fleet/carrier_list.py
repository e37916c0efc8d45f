"""Dedicated carriers at the coordinator: who offers to carry, who is gone, and the next record about them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from anabranch.addresses import parse_addresses
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.rate_limits_and_bans import TokenBucket
from anabranch.protocol.interface.events import VerifiedCredential
from anabranch.protocol.log.records import Carriers
from anabranch.protocol.messages.table import Allowance

#: Most dedicated carriers of a run: every peer without an address keeps a link with each.
MOST_CARRIERS = 16
#: Most of them that come by one ticket, so that the holder of one leaves room for others'. A choice.
MOST_OF_TICKET = 4
#: Time (s) without a link to a carrier after which the log lists it no longer. A choice: it may restart.
GONE_S = 20.0
#: Records of carriers: at once, and per second. A choice: one that named another address in each message,
#: though no member, had the leader log little else.
RECORDS = Allowance(16.0, 0.1)
_TEXT_BYTES = 512


class CarrierList:
    """Dedicated carriers (`anabranch relay`) that this coordinator knows. Members are not listed: they carry
    without that."""

    def __init__(self, ctx: PeerContext, credentials: Mapping[str, VerifiedCredential]) -> None:
        """credentials: by peer, the credential (ticket) that it showed."""
        self._ctx, self._credentials = ctx, credentials
        self._tickets: dict[str, str] = {}
        """Carrier that offered itself here, and is listed or to be listed -> key of its ticket."""
        self._offers: dict[str, str] = {}
        self._unlinked: dict[str, float] = {}
        """Listed carrier without a link -> time (s) at which it is given up."""
        self._records = TokenBucket(RECORDS.burst, ctx.clock.now)

    def offered(self, peer: str, address: str) -> str | None:
        """Note the offer of the carrier `peer` for the next record; carriers repeat it. Returns why it is
        refused, or None. address: where it can be dialled; without change to the listed one nothing is to be
        logged."""
        known = self._ctx.run.carriers
        try:
            parsed = parse_addresses(address)
        except ValueError as error:
            return str(error)
        if not parsed or len(address) > _TEXT_BYTES or any(one.carrier or one.kind for one in parsed):
            return "a carrier needs an address of its own"
        if peer in self._ctx.run.membership.members:
            return "a member carries without an offer"
        if peer not in known and len(known.keys() | self._offers.keys()) >= MOST_CARRIERS:
            return f"the run has {MOST_CARRIERS} carriers already"
        credential = self._credentials.get(peer)
        ticket = credential.ticket if credential is not None else ""
        listed = known.keys() | self._offers.keys()
        self._tickets = {each: key for each, key in self._tickets.items() if each in listed}
        others = sum(key == ticket for each, key in self._tickets.items() if each != peer)
        if ticket and peer not in known and others >= MOST_OF_TICKET:
            return f"{MOST_OF_TICKET} carriers came by this ticket already"
        self._tickets[peer] = ticket
        if known.get(peer) != address:
            self._offers[peer] = address
        return None

    def record(self) -> Carriers | None:
        """Next record of the list, which the caller must log, as the offers in it are forgotten; None: the
        list stays as it is, or it is too early for a record (`RECORDS`). Carriers that are revoked, or had no
        link for GONE_S, are left out."""
        run, up, now = self._ctx.run, self._ctx.links.up, self._ctx.clock.now
        if (not run.carriers and not self._offers) or self._wait_s() > 0.0:
            return None
        for carrier in run.carriers:
            if carrier in up:
                self._unlinked.pop(carrier, None)
            else:
                self._unlinked.setdefault(carrier, now + GONE_S)
        listed = {**run.carriers, **self._offers}
        self._offers = {}
        gone = {peer for peer, at in self._unlinked.items() if now >= at}
        gone |= {peer for peer in listed if peer in run.revoked}
        listed = {peer: address for peer, address in listed.items() if peer not in gone}
        if listed == run.carriers:
            return None
        self._unlinked = {peer: at for peer, at in self._unlinked.items() if peer in listed}
        self._records.left -= 1.0
        return Carriers(listed)

    def _wait_s(self) -> float:
        """Seconds until the next record may be logged (`RECORDS`)."""
        self._records.fill(RECORDS.burst, RECORDS.per_s, self._ctx.clock.now)
        left = self._records.left
        return 0.0 if left > 1.0 - 1e-6 else (1.0 - left) / RECORDS.per_s

    def deadline(self) -> float:
        """Time (s) from which `record` may have a record (`RECORDS`): a listed carrier without a link is
        given up then, or new offers are logged; infinite if neither is to come. A link that breaks after the
        last call of `record`, and a revocation, are not foreseen: `record` is to be called after events, too.
        """
        if not (self._unlinked or self._offers):
            return math.inf
        due = min([*self._unlinked.values(), *([-math.inf] if self._offers else [])], default=math.inf)
        return max(due, self._ctx.clock.now + self._wait_s()) if due < math.inf else math.inf
