"""Agent of policy `gwtf`: it takes a node's events and returns its messages to neighbours.

The algorithm is GWTF's (arXiv 2509.21221), as its authors implemented it. Flows grow from the sink: a node
with an outflow that no inflow is joined to advertises its cost to the sink, and a node of the stage before
with spare capacity requests one unit of the cheapest (Request Flow). Nodes of one stage swap next hops
(Request Change) or take each other's place on a path (Request Redirect) if that is cheaper, otherwise with
probability exp(gain / T), T annealed. Unjoined units are given up. Neighbours periodically confirm the units
they share.

Differences because links lose messages: a unit between two nodes has a name; answers are kept, so that a
repeated request gets the same one; confirmed paths are reserved separately (`flow.agents.reservations`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anabranch.counter_rng import CounterRng
from anabranch.flow.agents import interface as ev
from anabranch.flow.agents.interface import Held, Message, Send, Setup, Side, UnitId
from anabranch.flow.agents.reservations import Release, Reservations, Reserve, Reserved, Stale
from anabranch.flow.gwtf import messages as msg
from anabranch.flow.gwtf.negotiation import REST_ROUNDS, T_START, Negotiation
from anabranch.flow.gwtf.surplus import drop_unjoined, shed_excess
from anabranch.flow.gwtf.units import CONFIRM_ROUNDS, Unit, Units

#: Length of a round (s): several round trips, so that an answer comes within it. A plain choice.
ROUND_S = 2.0
#: Rounds without change after which a relay reports to the sources that paths have moved. A plain choice.
SETTLE_ROUNDS = 3
#: Rounds without change of its outflows after which a data node counts as quiet, although relays with spare
#: capacity go on requesting units of it: 7,200 s, the horizon of the benchmarks.
UNUSED_ROUNDS = 3600


class GwtfAgent:
    """Agent of policy `gwtf` at one node (`flow.agents.interface.Agent`). A data node is the source of its
    units, and a sink for as many as its demand."""

    def __init__(self, setup: Setup, rng: CounterRng) -> None:
        self._setup = setup
        self._dice = rng
        self._units = Units(setup)
        self._reservations = Reservations(setup, self._units.onward)
        self._negotiation = Negotiation(setup, rng, self._units, self._reservations)
        self._next_round = math.inf

    # -- driver ------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> Sequence[Send]:
        if self._next_round == math.inf:
            self._next_round = now + ROUND_S * self._dice.uniform()
        sends: list[Send] = []
        match event:
            case ev.Received(peer, side, message):
                sends += self._receive(peer, side, message)
            case ev.PeerUp(peer, side, cost):
                sends += self._add_peer(peer, side, cost)
            case ev.PeerDown(peer, side):
                self._units.restart()
                sends += self._remove_peer(peer, side)
            case ev.CostChanged(peer, side, cost):
                if side is not Side.SAME:
                    self._units.costs(side)[peer] = cost
                    self._units.restart()
                    self._negotiation.temperature = T_START
            case ev.CapacityChanged(capacity):
                self._units.capacity = self._reservations.capacity = capacity
                sends += shed_excess(self._setup, self._units, self._reservations)
            case ev.DemandChanged(demand):
                self._units.demand = demand
                sends += shed_excess(self._setup, self._units, self._reservations)
            case _:
                if now >= self._next_round:
                    sends += self._take_round()
                    self._next_round = now + ROUND_S
        return sends + self._advertise()

    def deadline(self) -> float | None:
        return None if self._next_round == math.inf else self._next_round

    def standing(self) -> list[Held]:
        return self._reservations.standing()

    def held(self) -> list[Held]:
        return self._reservations.held()

    def price(self) -> float:
        return 0.0 if self._setup.is_data else self._units.price()

    def quiet(self) -> bool:
        units = self._units
        rests = units.round - units.changed > REST_ROUNDS
        unused = self._setup.is_data and units.round - units.outs_changed > UNUSED_ROUNDS
        if self._negotiation.pending is not None or not (rests or unused):
            return False
        return not (self._reservations.reserving or self._reservations.unsettled)

    # -- neighbours --------------------------------------------------------------------------------------

    def _advertise(self) -> list[Send]:
        units, offers = self._units, self._units.offerable()
        if offers == units.advertised:
            return []
        units.advertised = offers
        units.version += 1
        return [Send(peer, Side.PREVIOUS, msg.Advertise(units.version, offers)) for peer in units.previous]

    def _add_peer(self, peer: str, side: Side, cost: float) -> list[Send]:
        units = self._units
        units.restart()
        if side is Side.SAME:
            self._negotiation.same.append(peer)
        else:
            units.costs(side)[peer] = cost
        if side is Side.PREVIOUS and units.advertised:
            return [Send(peer, side, msg.Advertise(units.version, units.advertised))]
        return []

    def _remove_peer(self, peer: str, side: Side) -> list[Send]:
        """Remove a lost neighbour, its offer, the request to it, and the units and paths through it. Returns
        messages for other neighbours that free their parts of these paths. Unless it is of this node's stage,
        annealing begins anew."""
        negotiation, units = self._negotiation, self._units
        pending = negotiation.pending
        if pending is not None and (pending.peer, pending.side) == (peer, side):
            negotiation.pending = None
        if side is not Side.NEXT:
            negotiation.answers.pop(peer, None)
        if side is Side.SAME:
            negotiation.same.remove(peer)
            return []
        sends = self._reservations.lost(peer, side)
        units.costs(side).pop(peer, None)
        table, drop = (units.outs, units.drop_out) if side is Side.NEXT else (units.ins, units.drop_in)
        for link in [link for link, unit in table.items() if unit.peer == peer]:
            drop(link)
        if side is Side.NEXT:
            units.offers.pop(peer, None)
        negotiation.temperature = T_START
        return sends

    # -- rounds ------------------------------------------------------------------------------------------

    def _take_round(self) -> list[Send]:
        units, pending = self._units, self._negotiation.pending
        units.round += 1
        sends: list[Send] = []
        if pending is not None:
            sends.append(Send(pending.peer, pending.side, pending.message))
        else:
            sends += [] if self._setup.is_data else drop_unjoined(units)
            if not sends:
                sends += self._negotiation.request()
        sends += self._report_costs()
        if self._setup.is_data:
            sends += self._reservations.keep_only(units.outs)
            sends += self._reservations.repeat()
            for out in units.outs.values():
                sends += self._reservations.depart(out.link, out.peer)
        elif units.round - units.changed >= SETTLE_ROUNDS:
            sends += self._reservations.moved()
        if units.round % CONFIRM_ROUNDS == 0:
            sends += self._confirmations()
        return sends

    def _report_costs(self) -> list[Send]:
        """Messages to the previous nodes with changed costs to the sink of joined units; none at a data
        node."""
        if self._setup.is_data:
            return []
        units = self._units
        changes: dict[str, list[tuple[UnitId, float]]] = {}
        for link, unit in units.ins.items():
            if unit.partner is not None:
                cost = units.cost_to_sink(units.outs[unit.partner])
                if units.reported.get(link) != cost:
                    units.reported[link] = cost
                    changes.setdefault(unit.peer, []).append((link, cost))
        return [Send(peer, Side.PREVIOUS, msg.CostNow(tuple(links))) for peer, links in changes.items()]

    def _confirmations(self) -> list[Send]:
        sends: list[Send] = []
        units, reservations = self._units, self._reservations
        units.given = {link: at for link, at in units.given.items() if not units.is_long_ago(at)}
        for peer in units.next:
            links, reserved = _links_with(units.outs, peer), reservations.towards(peer)
            if links or reserved:
                sends.append(Send(peer, Side.NEXT, msg.Confirm(links, reserved)))
        for peer in units.previous:
            links, reserved = _links_with(units.ins, peer), reservations.coming_from(peer)
            if links or reserved or units.advertised:
                confirm = msg.Confirm(links, reserved, units.version, units.advertised)
                sends.append(Send(peer, Side.PREVIOUS, confirm))
        return sends

    # -- messages ----------------------------------------------------------------------------------------

    def _receive(self, peer: str, side: Side, message: Message) -> list[Send]:
        match message:
            case msg.RequestFlow():
                return self._negotiation.answer_flow(peer, message)
            case msg.RequestChange():
                return self._negotiation.answer_change(peer, message)
            case msg.RequestRedirect():
                return self._negotiation.answer_redirect(peer, message)
            case msg.Answer():
                return self._negotiation.take_answer(peer, message)
            case msg.Confirm():
                return self._compare(peer, side, message)
            case Reserve():
                return self._reservations.reserve(peer, message)
            case Reserved(unit):
                return self._reservations.reserved(peer, unit)
            case Stale(units):
                return self._reservations.stale(peer, units)
            case Release(units):
                return self._reservations.release(peer, units)
        return self._note(peer, side, message)

    def _note(self, peer: str, side: Side, message: Message) -> list[Send]:
        """Handle a notice (`Advertise`, `Moved`, `PushBack`, `Cancel`, `CostNow`) of neighbour (peer, side);
        returns messages about paths that are given up for it. Any other message has no effect."""
        units = self._units
        match message:
            case msg.Advertise(version, costs):
                units.note_offer(peer, version, costs)
            case msg.Moved(link, cost):
                self._change_end(peer, side, link, cost)
            case msg.PushBack(links):
                for link in links:
                    if link in units.outs and units.outs[link].peer == peer:
                        units.drop_out(link)
                return self._reservations.keep_only(units.outs) if self._setup.is_data else []
            case msg.Cancel(links):
                for link in links:
                    if link in units.ins and units.ins[link].peer == peer:
                        units.drop_in(link)
            case msg.CostNow(links):
                for link, cost in links:
                    out = units.outs.get(link)
                    if out is not None and out.peer == peer:
                        out.beyond = cost
        return []

    def _change_end(self, peer: str, side: Side, link: UnitId, cost: float | None) -> None:
        """Record that the unit `link` (one hop of a path, shared by the nodes at its ends) has `peer` as its
        other end, on `side`, from now on. cost: from `peer` to the data node where the path ends, if told.
        Without effect if this node has no such unit, or no such neighbour on that side."""
        units = self._units
        unit = (units.ins if side is Side.PREVIOUS else units.outs).get(link)
        if unit is None or peer not in units.costs(side) or unit.peer == peer:
            return
        unit.peer = peer
        if cost is not None and side is Side.NEXT:
            unit.beyond = cost
        units.changed = units.round

    def _compare(self, peer: str, side: Side, message: msg.Confirm) -> list[Send]:
        """Take over the other ends of units, and a next hop's offer, from a neighbour's `Confirm`; returns
        messages with the listed units and reservations that this node lacks, which the neighbour then drops.
        A unit that this node has just requested or handed over does not count as lacking."""
        units, pending = self._units, self._negotiation.pending
        table = units.ins if side is Side.PREVIOUS else units.outs
        requested = pending.number if pending is not None else None
        missing = []
        for link in message.links:
            if link in table:
                self._change_end(peer, side, link, None)
            elif link != requested and (link not in units.given or units.is_long_ago(units.given[link])):
                missing.append(link)
        sends = self._reservations.confirm(peer, side, message.units)
        if side is Side.NEXT:
            units.note_offer(peer, message.version, message.costs)
        if missing:
            reply = msg.PushBack(tuple(missing)) if side is Side.PREVIOUS else msg.Cancel(tuple(missing))
            sends.append(Send(peer, side, reply))
        return sends


def _links_with(table: dict[UnitId, Unit], peer: str) -> tuple[UnitId, ...]:
    return tuple(unit.link for unit in table.values() if unit.peer == peer)
