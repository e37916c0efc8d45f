"""The published algorithm of GWTF (arXiv 2509.21221; as in its authors' implementation), on bad links.

Flows grow from the sink: a node with an unmatched outflow advertises its cost to the sink, a node of the
stage before with spare capacity asks the cheapest for one unit (Request Flow). Nodes of one stage swap next
hops (Request Change) or take each other's place on a path (Request Redirect) where that is cheaper, and else
with probability exp(gain / T), T annealed. What stays unmatched is pushed back or cancelled; neighbours
confirm what they share. Differences, forced by links that lose messages: a unit of flow between two nodes has
a name, replies are kept so that a repeated request gets the same answer, and what stands is reserved apart
(`places.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.flow.agent import (
    CapacityChanged,
    CostChanged,
    DemandChanged,
    Event,
    Held,
    Message,
    PeerDown,
    PeerUp,
    Received,
    Send,
    Setup,
    Side,
    UnitId,
)
from anabranch.flow.dice import Dice
from anabranch.flow.gwtf_messages import (
    Advertise,
    Answer,
    Cancel,
    Confirm,
    CostNow,
    Moved,
    PushBack,
    RequestChange,
    RequestFlow,
    RequestRedirect,
)
from anabranch.flow.places import Places, Release, Reserve, Reserved, Stale

ROUND_S = 2.0
T_START, T_FACTOR = 2.0, 0.95
#: Rounds after which an unmatched inflow is pushed back and an unmatched outflow cancelled.
PATIENCE_IN, PATIENCE_OUT = 4, 8
CONFIRM_ROUNDS = 5
#: Rounds without an accepted change after which a node stops trying, until something near it changes: the
#: published algorithm tries for ever and would never be quiet. Fewer rounds save messages and lose quality:
#: on family E 20, 60 and 180 rounds ended at 1.30, 1.22 and 1.18 times the optimum.
REST_ROUNDS = 60
#: A cancelled outflow is asked for again after 2, 4, ... rounds at most this many.
BACKOFF_ROUNDS = 64
#: Rounds without change after which a relay tells the source that a standing path has been left.
SETTLE_ROUNDS = 3


@dataclass(slots=True)
class _Unit:
    """A unit of flow between this node and a neighbour, and the one it is matched with across the node."""

    link: UnitId
    peer: str
    sink: str
    round: int
    told: float = 0.0
    """Outflow: cost from the next node to the sink."""
    mate: UnitId | None = None


@dataclass(slots=True)
class _Pending:
    number: UnitId
    peer: str
    side: Side
    message: Message
    link: UnitId | None = None


class GwtfAgent:
    """One node's part. A data node is sink of as much as its demand, and source of chains that reach it."""

    def __init__(self, setup: Setup, dice: Dice) -> None:
        self._setup = setup
        self._dice = dice
        self._next: dict[str, float] = {}
        self._previous: dict[str, float] = {}
        self._same: list[str] = []
        self._offers: dict[str, tuple[int, dict[str, float]]] = {}
        self._ins: dict[UnitId, _Unit] = {}
        self._outs: dict[UnitId, _Unit] = {}
        self._pending: _Pending | None = None
        self._answers: dict[str, Answer] = {}
        """The last answer to each neighbour: it has one request outstanding."""
        self._gone: dict[UnitId, int] = {}
        """Units given to a peer of this stage, and in which round: their other end may not know yet."""
        self._count = setup.incarnation << 32
        self._capacity = setup.capacity
        self._demand = setup.demand
        self._temperature = T_START
        self._round = 0
        self._next_round = math.inf
        self._changed = 0
        """Round of the last change of anything here."""
        self._advertised: dict[str, float] = {}
        self._version = 0
        self._told: dict[UnitId, float] = {}
        """Inflow -> the cost that its previous node was told."""
        self._wait_until = 0
        self._backoff = 1
        self._places = Places(setup, self._onward)

    # -- driver ------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Sequence[Send]:
        if self._next_round == math.inf:
            self._next_round = now + ROUND_S * self._dice.uniform()
        sends: list[Send] = []
        match event:
            case Received(peer, side, message):
                sends += self._receive(peer, side, message)
            case PeerUp(peer, side, cost):
                self._unsettle()
                if side is Side.SAME:
                    self._same.append(peer)
                else:
                    self._costs(side)[peer] = cost
                if side is Side.PREVIOUS and self._advertised:
                    sends.append(Send(peer, side, Advertise(self._version, self._advertised)))
            case PeerDown(peer, side):
                self._unsettle()
                sends += self._lose(peer, side)
            case CostChanged(peer, side, cost):
                if side is not Side.SAME:
                    self._costs(side)[peer] = cost
                    self._unsettle()
                    self._temperature = T_START
            case CapacityChanged(capacity):
                self._capacity = self._places.capacity = capacity
                sends += self._shed()
            case DemandChanged(demand):
                self._demand = demand
                sends += self._shed()
            case _:
                if now >= self._next_round:
                    sends += self._take_round()
                    self._next_round = now + ROUND_S
        return sends + self._advertise()

    def deadline(self) -> float | None:
        return None if self._next_round == math.inf else self._next_round

    def standing(self) -> list[Held]:
        return self._places.standing()

    def held(self) -> list[Held]:
        return self._places.held()

    def price(self) -> float:
        if self._setup.is_data:
            return 0.0
        costs = [self._next[unit.peer] + unit.told for unit in self._outs.values()]
        known = [*costs, *(self._next[p] + c for p, (_, o) in self._offers.items() for c in o.values())]
        return min(known, default=math.inf)

    def quiet(self) -> bool:
        idle = self._round - self._changed
        return self._pending is None and idle > REST_ROUNDS and not self._unfinished()

    def _unfinished(self) -> bool:
        return self._places.reserving or self._places.unsettled

    # -- state -------------------------------------------------------------------------------------------

    def _costs(self, side: Side) -> dict[str, float]:
        return self._next if side is Side.NEXT else self._previous

    def _touch(self) -> None:
        """Something useful changed. Chains that grow again after nobody wanted them are no news."""
        if self._backoff == 1:
            self._changed = self._round

    def _unsettle(self) -> None:
        """The graph around this node has changed: bargain afresh."""
        self._backoff, self._wait_until = 1, 0
        self._changed = self._round

    def _name(self) -> UnitId:
        self._count += 1
        return UnitId(self._setup.id, self._count)

    def _load(self) -> int:
        """Places used: each unit that passes or will pass."""
        return len(self._outs) + sum(unit.mate is None for unit in self._ins.values())

    def _cost_to_sink(self, out: _Unit) -> float:
        return self._next[out.peer] + out.told

    def _onward(self, link: UnitId, peer: str | None) -> tuple[str | None, UnitId] | None:
        """Where a unit that comes in goes on (`places.Onward`)."""
        unit = self._ins.get(link)
        if unit is None or unit.peer != peer:
            return None
        if self._setup.is_data:
            return None, link
        if unit.mate is None:
            return None
        return self._outs[unit.mate].peer, unit.mate

    def _offerable(self) -> dict[str, float]:
        """Per sink the least cost among what is unmatched here; a data node offers itself for 0."""
        if self._setup.is_data:
            return {self._setup.id: 0.0} if len(self._ins) < self._demand else {}
        offers: dict[str, float] = {}
        for out in self._outs.values():
            if out.mate is None:
                cost = self._cost_to_sink(out)
                offers[out.sink] = min(cost, offers.get(out.sink, math.inf))
        return offers

    def _advertise(self) -> list[Send]:
        offers = self._offerable()
        if offers == self._advertised:
            return []
        self._advertised = offers
        self._version += 1
        return [Send(peer, Side.PREVIOUS, Advertise(self._version, offers)) for peer in self._previous]

    def _match(self) -> None:
        """Join unmatched inflows with the cheapest unmatched outflows to the same sink."""
        free = sorted(
            (out for out in self._outs.values() if out.mate is None),
            key=lambda out: (self._cost_to_sink(out), out.link),
        )
        for unit in self._ins.values():
            if unit.mate is None:
                out = next((out for out in free if out.sink == unit.sink), None)
                if out is not None:
                    free.remove(out)
                    unit.mate, out.mate = out.link, unit.link

    def _drop_in(self, link: UnitId) -> None:
        unit = self._ins.pop(link, None)
        self._told.pop(link, None)
        if unit is not None:
            self._touch()
            if unit.mate is not None:
                self._outs[unit.mate].mate = None
                self._outs[unit.mate].round = self._round

    def _drop_out(self, link: UnitId) -> None:
        unit = self._outs.pop(link, None)
        if unit is not None:
            self._touch()
            if unit.mate is not None:
                self._ins[unit.mate].mate = None
                self._ins[unit.mate].round = self._round

    def _lose(self, peer: str, side: Side) -> list[Send]:
        """A neighbour is gone, and its units with it."""
        if side is not Side.NEXT:
            self._answers.pop(peer, None)
        if side is Side.SAME:
            self._same.remove(peer)
        else:
            sends = self._places.lost(peer, side)
            self._costs(side).pop(peer, None)
        if self._pending is not None and (self._pending.peer, self._pending.side) == (peer, side):
            self._pending = None
        if side is Side.SAME:
            return []
        table = self._outs if side is Side.NEXT else self._ins
        for link in [link for link, unit in table.items() if unit.peer == peer]:
            (self._drop_out if side is Side.NEXT else self._drop_in)(link)
        if side is Side.NEXT:
            self._offers.pop(peer, None)
        self._temperature = T_START
        return sends

    def _shed(self) -> list[Send]:
        """Give up the dearest units beyond capacity or demand."""
        self._unsettle()
        sends: list[Send] = []
        dearest = sorted(
            self._outs.values(), key=lambda out: (out.mate is not None, -self._cost_to_sink(out))
        )
        if self._setup.is_data:
            for out in dearest[: max(0, len(dearest) - self._demand)]:
                self._drop_out(out.link)
                sends.append(Send(out.peer, Side.NEXT, Cancel((out.link,))))
            for unit in list(self._ins.values())[self._demand :]:
                self._drop_in(unit.link)
                sends.append(Send(unit.peer, Side.PREVIOUS, PushBack((unit.link,))))
            return sends + self._places.keep_only(self._outs)
        for out in dearest[: max(0, self._load() - self._capacity)]:
            mate = self._ins.get(out.mate) if out.mate is not None else None
            self._drop_out(out.link)
            sends.append(Send(out.peer, Side.NEXT, Cancel((out.link,))))
            if mate is not None:
                self._drop_in(mate.link)
                sends.append(Send(mate.peer, Side.PREVIOUS, PushBack((mate.link,))))
        return sends + self._places.moved()

    # -- rounds ------------------------------------------------------------------------------------------

    def _take_round(self) -> list[Send]:
        self._round += 1
        sends: list[Send] = []
        if self._pending is not None:
            sends.append(Send(self._pending.peer, self._pending.side, self._pending.message))
        else:
            sends += self._hygiene()
            if not sends:
                sends += self._request()
        sends += self._tell_costs()
        if self._setup.is_data:
            sends += self._places.keep_only(self._outs)
            sends += self._places.repeat()
            for out in self._outs.values():
                sends += self._places.depart(out.link, out.peer)
        elif self._round - self._changed >= SETTLE_ROUNDS:
            sends += self._places.moved()
        if self._round % CONFIRM_ROUNDS == 0:
            sends += self._confirmations()
        return sends

    def _hygiene(self) -> list[Send]:
        """Push back inflows and cancel outflows that stayed unmatched."""
        if self._setup.is_data:
            return []
        sends: list[Send] = []
        for unit in list(self._ins.values()):
            if unit.mate is None and self._round - unit.round > PATIENCE_IN:
                self._drop_in(unit.link)
                sends.append(Send(unit.peer, Side.PREVIOUS, PushBack((unit.link,))))
        for out in list(self._outs.values()):
            if out.mate is None and self._round - out.round > PATIENCE_OUT:
                self._drop_out(out.link)
                sends.append(Send(out.peer, Side.NEXT, Cancel((out.link,))))
                self._wait_until = self._round + self._backoff
                self._backoff = min(2 * self._backoff, BACKOFF_ROUNDS)
        return sends

    def _request(self) -> list[Send]:
        wish = self._wish_for_flow()
        if wish is not None:
            _, peer, sink, cost = wish
            link = self._name()
            return self._ask(link, peer, Side.NEXT, RequestFlow(link, sink, cost))
        if self._setup.is_data or not self._same or self._round - self._changed > REST_ROUNDS:
            return []
        peer = self._same[self._dice.below(len(self._same))]
        number = self._name()
        outs = [out for out in self._outs.values() if out.mate is not None]
        if outs and (self._load() >= self._capacity or self._dice.below(2)):
            out = outs[self._dice.below(len(outs))]
            message = RequestChange(
                number, out.link, out.sink, out.peer, self._next[out.peer], out.told, dict(self._next)
            )
            return self._ask(number, peer, Side.SAME, message, out.link)
        if self._load() < self._capacity:
            redirect = RequestRedirect(number, dict(self._previous), dict(self._next))
            return self._ask(number, peer, Side.SAME, redirect)
        return []

    def _wish_for_flow(self) -> tuple[float, str, str, float] | None:
        """The cheapest unit on offer that this node may take: (cost, peer, sink, advertised cost)."""
        if self._setup.is_data:
            if len(self._outs) >= self._demand:
                return None
            wanted = {self._setup.id} if self._setup.returns == "own" else None
        else:
            wanted = {unit.sink for unit in self._ins.values() if unit.mate is None}
            if not wanted:
                if self._load() >= self._capacity or self._round < self._wait_until:
                    return None
                wanted = None
        return min(
            (
                (cost + self._next[peer], peer, sink, cost)
                for peer, (_, costs) in self._offers.items()
                if peer in self._next
                for sink, cost in costs.items()
                if wanted is None or sink in wanted
            ),
            default=None,
        )

    def _ask(
        self, number: UnitId, peer: str, side: Side, message: Message, link: UnitId | None = None
    ) -> list[Send]:
        self._pending = _Pending(number, peer, side, message, link)
        return [Send(peer, side, message)]

    def _tell_costs(self) -> list[Send]:
        """Pass changed costs of matched units back along the flow."""
        news: dict[str, list[tuple[UnitId, float]]] = {}
        for link, unit in self._ins.items():
            if unit.mate is not None and not self._setup.is_data:
                cost = self._cost_to_sink(self._outs[unit.mate])
                if self._told.get(link) != cost:
                    self._told[link] = cost
                    news.setdefault(unit.peer, []).append((link, cost))
        return [Send(peer, Side.PREVIOUS, CostNow(tuple(links))) for peer, links in news.items()]

    def _confirmations(self) -> list[Send]:
        sends = []
        self._gone = {link: at for link, at in self._gone.items() if not self._long_gone(at)}
        for peer in self._next:
            links = tuple(out.link for out in self._outs.values() if out.peer == peer)
            units = self._places.towards(peer)
            if links or units:
                sends.append(Send(peer, Side.NEXT, Confirm(links, units)))
        for peer in self._previous:
            links = tuple(unit.link for unit in self._ins.values() if unit.peer == peer)
            units = self._places.coming_from(peer)
            if links or units or self._advertised:
                confirm = Confirm(links, units, self._version, self._advertised)
                sends.append(Send(peer, Side.PREVIOUS, confirm))
        return sends

    # -- messages ----------------------------------------------------------------------------------------

    def _receive(self, peer: str, side: Side, message: Message) -> list[Send]:
        match message:
            case Advertise(version, costs):
                self._note_offer(peer, version, costs)
            case RequestFlow():
                return self._answer_flow(peer, message)
            case RequestChange():
                return self._answer_change(peer, message)
            case RequestRedirect():
                return self._answer_redirect(peer, message)
            case Answer():
                return self._take_answer(peer, message)
            case Moved(link, told):
                self._rename(peer, side, link, told)
            case PushBack(links):
                for link in links:
                    if link in self._outs and self._outs[link].peer == peer:
                        self._drop_out(link)
                return self._places.keep_only(self._outs) if self._setup.is_data else []
            case Cancel(links):
                for link in links:
                    if link in self._ins and self._ins[link].peer == peer:
                        self._drop_in(link)
            case CostNow(links):
                for link, cost in links:
                    out = self._outs.get(link)
                    if out is not None and out.peer == peer:
                        out.told = cost
            case Confirm():
                return self._confirmed(peer, side, message)
            case Reserve():
                return self._places.reserve(peer, message)
            case Reserved(unit):
                return self._places.reserved(peer, unit)
            case Stale(units):
                return self._places.stale(peer, units)
            case Release(units):
                return self._places.release(peer, units)
        return []

    def _note_offer(self, peer: str, version: int, costs: dict[str, float]) -> None:
        known = self._offers.get(peer, (-1, {}))
        if version > known[0]:
            self._offers[peer] = (version, costs)
            if costs and self._wish_for_flow() is not None:
                self._touch()

    def _known(self, peer: str, number: UnitId) -> tuple[bool, list[Send]]:
        """Whether a request was answered before, and what to say: the same again; to an old one nothing."""
        last = self._answers.get(peer)
        if last is None or last.number < number:
            return False, []
        side = Side.PREVIOUS if peer in self._previous else Side.SAME
        return True, [Send(peer, side, last)] if last.number == number else []

    def _answer(self, peer: str, side: Side, answer: Answer) -> list[Send]:
        self._answers[peer] = answer
        return [Send(peer, side, answer)]

    def _answer_flow(self, peer: str, message: RequestFlow) -> list[Send]:
        known, again = self._known(peer, message.link)
        if known:
            return again
        offers = self._offerable()
        if (
            self._pending is not None
            or offers.get(message.sink) != message.cost
            or peer not in self._previous
        ):
            version = self._version + (offers != self._advertised)
            return self._answer(
                peer, Side.PREVIOUS, Answer(message.link, False, version=version, costs=offers)
            )
        self._ins[message.link] = _Unit(message.link, peer, message.sink, self._round)
        if not self._setup.is_data:
            self._match()
            self._told[message.link] = message.cost
        self._touch()
        return self._answer(peer, Side.PREVIOUS, Answer(message.link, True))

    def _answer_change(self, peer: str, message: RequestChange) -> list[Send]:
        known, again = self._known(peer, message.number)
        if known:
            return again
        mine = self._next.get(message.peer)
        swaps: list[tuple[float, UnitId]] = []
        if self._pending is None and mine is not None:
            for out in self._outs.values():
                theirs = message.costs.get(out.peer)
                same_path = out.peer == message.peer or out.sink != message.sink or out.mate is None
                if theirs is not None and not same_path:
                    swaps.append((message.cost + self._next[out.peer] - theirs - mine, out.link))
        if not swaps or not self._accept(max(swaps)[0]):
            return self._answer(peer, Side.SAME, Answer(message.number, False))
        given = self._outs.pop(max(swaps)[1])
        self._gone[given.link] = self._round
        taken = _Unit(message.link, message.peer, message.sink, self._round, message.told, given.mate)
        self._outs[taken.link] = taken
        if given.mate is not None:
            self._ins[given.mate].mate = taken.link
        answer = Answer(message.number, True, given.sink, peer=given.peer, link=given.link, told=given.told)
        moved = Send(taken.peer, Side.NEXT, Moved(taken.link, 0.0))
        return [*self._answer(peer, Side.SAME, answer), moved]

    def _answer_redirect(self, peer: str, message: RequestRedirect) -> list[Send]:
        known, again = self._known(peer, message.number)
        if known:
            return again
        offers: list[tuple[float, UnitId, UnitId]] = []
        if self._pending is None:
            for out in self._outs.values():
                if out.mate is None:
                    continue
                before = self._ins[out.mate].peer
                cost_in, cost_out = message.costs_in.get(before), message.costs_out.get(out.peer)
                if cost_in is not None and cost_out is not None:
                    gain = self._previous[before] + self._next[out.peer] - cost_in - cost_out
                    offers.append((gain, out.link, out.mate))
        if not offers or not self._accept(max(offers)[0]):
            return self._answer(peer, Side.SAME, Answer(message.number, False))
        _, link, link_in = max(offers)
        out, unit = self._outs.pop(link), self._ins.pop(link_in)
        self._told.pop(link_in, None)
        self._gone[link] = self._gone[link_in] = self._round
        answer = Answer(
            message.number,
            True,
            out.sink,
            peer=out.peer,
            link=link,
            told=out.told,
            peer_in=unit.peer,
            link_in=link_in,
        )
        return self._answer(peer, Side.SAME, answer)

    def _take_answer(self, peer: str, answer: Answer) -> list[Send]:
        pending = self._pending
        if pending is None or pending.number != answer.number or pending.peer != peer:
            return []
        self._pending = None
        match pending.message:
            case RequestFlow(link, sink, cost):
                if not answer.taken:
                    self._note_offer(peer, answer.version, answer.costs)
                    return []
                self._outs[link] = _Unit(link, peer, sink, self._round, cost)
                self._touch()
                if not self._setup.is_data:
                    self._match()
                    # Capacity or a waiting inflow may have gone while the answer was on its way.
                    return self._shed() if self._load() > self._capacity else []
                return self._places.depart(link, peer)
            case RequestChange() if answer.taken:
                return self._take_swap(pending, answer)
            case RequestRedirect() if answer.taken:
                return self._take_path(answer)
        return []

    def _take_swap(self, pending: _Pending, answer: Answer) -> list[Send]:
        """The peer has our unit; its own is ours now."""
        assert answer.link is not None and pending.link is not None
        self._temperature *= T_FACTOR
        self._unrest()
        mine = self._outs.pop(pending.link, None)
        if answer.peer not in self._next:
            if mine is not None and mine.mate is not None:
                self._ins[mine.mate].mate = None
            return []
        mate = mine.mate if mine is not None else None
        if mine is not None:
            self._gone[mine.link] = self._round
        unit = _Unit(answer.link, answer.peer, answer.sink, self._round, answer.told, mate)
        self._outs[unit.link] = unit
        if mate is not None:
            self._ins[mate].mate = unit.link
        sends = [Send(unit.peer, Side.NEXT, Moved(unit.link, 0.0))]
        return sends + (self._shed() if self._load() > self._capacity else [])

    def _take_path(self, answer: Answer) -> list[Send]:
        """We stand in for a peer on one path, if there is still room and both neighbours are known."""
        assert answer.link is not None and answer.link_in is not None
        self._temperature *= T_FACTOR
        self._unrest()
        if self._load() >= self._capacity:
            return [
                Send(answer.peer, Side.NEXT, Cancel((answer.link,))),
                Send(answer.peer_in, Side.PREVIOUS, PushBack((answer.link_in,))),
            ]
        if answer.peer not in self._next or answer.peer_in not in self._previous:
            return []
        out = _Unit(answer.link, answer.peer, answer.sink, self._round, answer.told, answer.link_in)
        unit = _Unit(answer.link_in, answer.peer_in, answer.sink, self._round, mate=answer.link)
        self._outs[out.link], self._ins[unit.link] = out, unit
        cost = self._told[unit.link] = self._cost_to_sink(out)
        return [
            Send(out.peer, Side.NEXT, Moved(out.link, 0.0)),
            Send(unit.peer, Side.PREVIOUS, Moved(unit.link, cost)),
        ]

    def _rename(self, peer: str, side: Side, link: UnitId, told: float | None) -> None:
        """The other end of a unit is now `peer`."""
        unit = (self._ins if side is Side.PREVIOUS else self._outs).get(link)
        if unit is None or peer not in self._costs(side) or unit.peer == peer:
            return
        unit.peer = peer
        if told is not None and side is Side.NEXT:
            unit.told = told
        self._unrest()

    def _confirmed(self, peer: str, side: Side, message: Confirm) -> list[Send]:
        """The neighbour names the units it shares with us: mend what differs, return what we lack."""
        table = self._ins if side is Side.PREVIOUS else self._outs
        asked = self._pending.number if self._pending is not None else None
        missing = []
        for link in message.links:
            if link in table:
                self._rename(peer, side, link, None)
            elif link != asked and (link not in self._gone or self._long_gone(self._gone[link])):
                missing.append(link)
        sends = self._places.confirm(peer, side, message.units)
        if side is Side.NEXT:
            self._note_offer(peer, message.version, message.costs)
        if missing:
            reply = PushBack(tuple(missing)) if side is Side.PREVIOUS else Cancel(tuple(missing))
            sends.append(Send(peer, side, reply))
        return sends

    def _long_gone(self, at: int) -> bool:
        return self._round - at > 2 * CONFIRM_ROUNDS

    def _unrest(self) -> None:
        self._changed = self._round

    def _accept(self, gain: float) -> bool:
        """Better always; worse by annealing. Every accepted change cools."""
        temperature = max(self._temperature, 1e-9)
        if gain == 0 or (gain < 0 and self._dice.uniform() >= math.exp(gain / temperature)):
            return False
        self._temperature *= T_FACTOR
        self._unrest()
        return True
