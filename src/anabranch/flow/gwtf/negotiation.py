"""Requests of one `gwtf` node to others, and its answers: one request at a time, repeated until answered.

A node requests a unit of flow from the next stage. From a node of its own stage it requests to swap next hops
or to take that node's place on a path; simulated annealing accepts or refuses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabranch.counter_rng import CounterRng
from anabranch.flow.agents.interface import Message, Send, Setup, Side, UnitId
from anabranch.flow.agents.reservations import Reservations
from anabranch.flow.gwtf import messages as msg
from anabranch.flow.gwtf.surplus import shed_excess
from anabranch.flow.gwtf.units import Unit, Units

#: First temperature of the annealing (units of cost), and factor at each accepted change; as published.
T_START, T_FACTOR = 2.0, 0.95
#: Least temperature, and gain or loss (s) that counts as none: below what a clock tells. A loss far below the
#: temperature is always accepted, so two nodes would swap one path for ever.
T_LEAST = 1e-9
#: Rounds without an accepted change after which a node requests no change or redirect, until one happens.
#: The published algorithm never stops. Fewer rounds save messages and lose quality: on family E 20, 60 and
#: 180 rounds ended at 1.30, 1.22 and 1.18 times the optimum.
REST_ROUNDS = 60


@dataclass(slots=True)
class Pending:
    """Unanswered request to neighbour (peer, side). link: outflow that a RequestChange would swap."""

    number: UnitId
    peer: str
    side: Side
    message: Message
    link: UnitId | None = None


class Negotiation:
    """Requests of one node, and its answers to others. pending: this node's unanswered request. answers:
    neighbour -> last answer to it; a neighbour has at most one unanswered request. same: other nodes of this
    stage. temperature: of the simulated annealing."""

    def __init__(self, setup: Setup, rng: CounterRng, units: Units, reservations: Reservations) -> None:
        self._setup = setup
        self._dice = rng
        self._units = units
        self._reservations = reservations
        self.pending: Pending | None = None
        self.answers: dict[str, msg.Answer] = {}
        self.same: list[str] = []
        self.temperature = T_START

    # -- requests ----------------------------------------------------------------------------------------

    def request(self) -> list[Send]:
        """Make the next request and return its message: for a unit of flow, or else a change or redirect with
        a random node of the same stage. It becomes `pending`; call it only if none is. No change or redirect
        is requested by a data node, or once nothing has changed for `REST_ROUNDS`. Empty if there is nothing
        to request."""
        units = self._units
        wanted = units.next_request()
        if wanted is not None:
            _, peer, sink, cost = wanted
            link = units.new_name()
            return self._ask(link, peer, Side.NEXT, msg.RequestFlow(link, sink, cost))
        if self._setup.is_data or not self.same or units.round - units.changed > REST_ROUNDS:
            return []
        peer = self.same[self._dice.below(len(self.same))]
        number = units.new_name()
        outs = [out for out in units.outs.values() if out.partner is not None]
        if outs and (units.load() >= units.capacity or self._dice.below(2)):
            out = outs[self._dice.below(len(outs))]
            costs = dict(units.next)
            message = msg.RequestChange(
                number, out.link, out.sink, out.peer, costs[out.peer], out.beyond, costs
            )
            return self._ask(number, peer, Side.SAME, message, out.link)
        if units.load() < units.capacity:
            redirect = msg.RequestRedirect(number, dict(units.previous), dict(units.next))
            return self._ask(number, peer, Side.SAME, redirect)
        return []

    def _ask(
        self, number: UnitId, peer: str, side: Side, message: Message, link: UnitId | None = None
    ) -> list[Send]:
        self.pending = Pending(number, peer, side, message, link)
        return [Send(peer, side, message)]

    # -- answers to others -------------------------------------------------------------------------------

    def _earlier_answer(self, peer: str, number: UnitId) -> list[Send] | None:
        """Messages that answer a request seen before: the earlier answer if the request is repeated, none if
        it is out of date. None if the request is new."""
        last = self.answers.get(peer)
        if last is None or last.number < number:
            return None
        side = Side.PREVIOUS if peer in self._units.previous else Side.SAME
        return [Send(peer, side, last)] if last.number == number else []

    def _answer(self, peer: str, side: Side, answer: msg.Answer) -> list[Send]:
        self.answers[peer] = answer
        return [Send(peer, side, answer)]

    def answer_flow(self, peer: str, message: msg.RequestFlow) -> list[Send]:
        earlier = self._earlier_answer(peer, message.link)
        if earlier is not None:
            return earlier
        units = self._units
        offers = units.offerable()
        is_offered = offers.get(message.sink) == message.cost
        if self.pending is not None or not is_offered or peer not in units.previous:
            version = units.version + (offers != units.advertised)
            refusal = msg.Answer(message.link, False, version=version, costs=offers)
            return self._answer(peer, Side.PREVIOUS, refusal)
        units.ins[message.link] = Unit(message.link, peer, message.sink, units.round)
        if not self._setup.is_data:
            units.join()
            units.reported[message.link] = message.cost
        units.note_change()
        return self._answer(peer, Side.PREVIOUS, msg.Answer(message.link, True))

    def answer_change(self, peer: str, message: msg.RequestChange) -> list[Send]:
        earlier = self._earlier_answer(peer, message.number)
        if earlier is not None:
            return earlier
        units = self._units
        mine = units.next.get(message.peer)
        swaps: list[tuple[float, UnitId]] = []
        if self.pending is None and mine is not None:
            for out in units.outs.values():
                theirs = message.costs.get(out.peer)
                same_path = out.peer == message.peer or out.sink != message.sink or out.partner is None
                if theirs is not None and not same_path:
                    gain = (message.cost + units.next[out.peer]) - (theirs + mine)
                    swaps.append((gain, out.link))
        if not swaps or not self._accept(max(swaps)[0]):
            return self._answer(peer, Side.SAME, msg.Answer(message.number, False))
        given = units.outs.pop(max(swaps)[1])
        units.given[given.link] = units.round
        taken = Unit(message.link, message.peer, message.sink, units.round, message.told, given.partner)
        units.outs[taken.link] = taken
        if given.partner is not None:
            units.ins[given.partner].partner = taken.link
        answer = msg.Answer(
            message.number, True, given.sink, peer=given.peer, link=given.link, told=given.beyond
        )
        moved = Send(taken.peer, Side.NEXT, msg.Moved(taken.link, 0.0))
        return [*self._answer(peer, Side.SAME, answer), moved]

    def answer_redirect(self, peer: str, message: msg.RequestRedirect) -> list[Send]:
        earlier = self._earlier_answer(peer, message.number)
        if earlier is not None:
            return earlier
        units = self._units
        offers: list[tuple[float, UnitId, UnitId]] = []
        if self.pending is None:
            for out in units.outs.values():
                if out.partner is None:
                    continue
                before = units.ins[out.partner].peer
                cost_in, cost_out = message.costs_in.get(before), message.costs_out.get(out.peer)
                if cost_in is not None and cost_out is not None:
                    gain = (units.previous[before] + units.next[out.peer]) - (cost_in + cost_out)
                    offers.append((gain, out.link, out.partner))
        if not offers or not self._accept(max(offers)[0]):
            return self._answer(peer, Side.SAME, msg.Answer(message.number, False))
        _, link, link_in = max(offers)
        out, unit = units.outs.pop(link), units.ins.pop(link_in)
        units.reported.pop(link_in, None)
        units.given[link] = units.given[link_in] = units.round
        answer = msg.Answer(
            message.number,
            True,
            out.sink,
            peer=out.peer,
            link=link,
            told=out.beyond,
            peer_in=unit.peer,
            link_in=link_in,
        )
        return self._answer(peer, Side.SAME, answer)

    # -- answers to this node ----------------------------------------------------------------------------

    def take_answer(self, peer: str, answer: msg.Answer) -> list[Send]:
        pending, units = self.pending, self._units
        if pending is None or pending.number != answer.number or pending.peer != peer:
            return []
        self.pending = None
        match pending.message:
            case msg.RequestFlow() if not answer.taken:
                units.note_offer(peer, answer.version, answer.costs)
            case msg.RequestFlow(link, sink, cost):
                units.outs[link] = Unit(link, peer, sink, units.round, cost)
                units.outs_changed = units.round
                units.note_change()
                if self._setup.is_data:
                    return self._reservations.depart(link, peer)
                units.join()
                # Capacity or an inflow without a partner may have gone since the request.
                return self._shed_excess()
            case msg.RequestChange() if answer.taken:
                return self._take_swap(pending, answer)
            case msg.RequestRedirect() if answer.taken:
                return self._take_path(answer)
        return []

    def _take_swap(self, pending: Pending, answer: msg.Answer) -> list[Send]:
        """Complete a granted RequestChange: give up this node's unit and take over the peer's; if that leads
        to no neighbour of this node, the inflow is left without a partner. Returns the messages to send."""
        assert answer.link is not None and pending.link is not None
        units = self._units
        self._cool()
        mine = units.outs.pop(pending.link, None)
        if answer.peer not in units.next:
            if mine is not None and mine.partner is not None:
                units.ins[mine.partner].partner = None
            return []
        partner = mine.partner if mine is not None else None
        if mine is not None:
            units.given[mine.link] = units.round
        unit = Unit(answer.link, answer.peer, answer.sink, units.round, answer.told, partner)
        units.outs[unit.link] = unit
        if partner is not None:
            units.ins[partner].partner = unit.link
        return [Send(unit.peer, Side.NEXT, msg.Moved(unit.link, 0.0)), *self._shed_excess()]

    def _take_path(self, answer: msg.Answer) -> list[Send]:
        """Complete a granted RequestRedirect: replace the peer on one path. Returns the messages to the
        path's nodes before and after this one: that it did or, without capacity, that they drop the unit;
        none if they are no neighbours of this node, which then takes nothing."""
        assert answer.link is not None and answer.link_in is not None
        units = self._units
        self._cool()
        if units.load() >= units.capacity:
            return [
                Send(answer.peer, Side.NEXT, msg.Cancel((answer.link,))),
                Send(answer.peer_in, Side.PREVIOUS, msg.PushBack((answer.link_in,))),
            ]
        if answer.peer not in units.next or answer.peer_in not in units.previous:
            return []
        out = Unit(answer.link, answer.peer, answer.sink, units.round, answer.told, answer.link_in)
        unit = Unit(answer.link_in, answer.peer_in, answer.sink, units.round, partner=answer.link)
        units.outs[out.link], units.ins[unit.link] = out, unit
        cost = units.reported[unit.link] = units.cost_to_sink(out)
        return [
            Send(out.peer, Side.NEXT, msg.Moved(out.link, 0.0)),
            Send(unit.peer, Side.PREVIOUS, msg.Moved(unit.link, cost)),
        ]

    def _shed_excess(self) -> list[Send]:
        return shed_excess(self._setup, self._units, self._reservations) if self._units.excess() else []

    # -- annealing ---------------------------------------------------------------------------------------

    def _accept(self, gain: float) -> bool:
        """Annealing's decision on a change that lowers the cost by `gain` (negative: raises it): True for a
        gain, for a loss with probability exp(gain / temperature), never for one of at most T_LEAST either
        way. If True, also lowers the temperature (`_cool`)."""
        temperature = max(self.temperature, T_LEAST)
        if abs(gain) <= T_LEAST or (gain < 0 and self._dice.uniform() >= math.exp(gain / temperature)):
            return False
        self._cool()
        return True

    def _cool(self) -> None:
        """Lower the temperature and note a change of units, after a change or redirect was accepted at this
        node or by its peer."""
        self.temperature *= T_FACTOR
        self._units.changed = self._units.round
