"""State of one `gwtf` node: link costs, neighbours' offers, and units of flow, inflows joined to outflows.

Not in it: messages (`negotiation.py`, `surplus.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabranch.flow.agents.interface import Setup, Side, UnitId

#: Rounds between two confirmations to a neighbour: a plain choice, 10 s at `agent.ROUND_S`.
CONFIRM_ROUNDS = 5


@dataclass(slots=True)
class Unit:
    """A unit of flow between this node and the neighbour `peer`: an inflow or an outflow. link: name of the
    unit. round: when the unit was created or lost its partner. beyond: of an outflow, cost from the next node
    to the sink. partner: outflow that an inflow is joined to, or the reverse."""

    link: UnitId
    peer: str
    sink: str
    round: int
    beyond: float = 0.0
    partner: UnitId | None = None


class Units:
    """Inflows from the previous stage, outflows to the next stage, link costs and offers of one node.

    next, previous: neighbour -> link cost. offers: next hop -> version, and cost by sink. ins, outs: inflows
    and outflows by name. reported: inflow -> cost to the sink that its previous node knows. given: unit
    handed over to a node of the same stage -> round, as the unit's other end may not know yet. version,
    advertised: this node's newest offer. round: number of the current round. changed: round of the last
    change; outs_changed: of the last change of outflows or neighbours. wait_until: round before which no
    spare unit is requested; backoff: rounds to wait after the next cancelled outflow.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.next: dict[str, float] = {}
        self.previous: dict[str, float] = {}
        self.offers: dict[str, tuple[int, dict[str, float]]] = {}
        self.ins: dict[UnitId, Unit] = {}
        self.outs: dict[UnitId, Unit] = {}
        self.reported: dict[UnitId, float] = {}
        self.given: dict[UnitId, int] = {}
        self.version = 0
        self.advertised: dict[str, float] = {}
        self.capacity = setup.capacity
        self.demand = setup.demand
        self.round = 0
        self.changed = self.outs_changed = 0
        self.wait_until = 0
        self.backoff = 1
        self._count = setup.incarnation << 32

    def costs(self, side: Side) -> dict[str, float]:
        return self.next if side is Side.NEXT else self.previous

    def note_change(self) -> None:
        """Set the round of the last change to the present one, which keeps the node negotiating; nothing
        during the back-off after a cancelled outflow."""
        if self.backoff == 1:
            self.changed = self.round

    def restart(self) -> None:
        """End the back-off and note a change, as neighbours, costs, capacity or demand have changed."""
        self.backoff, self.wait_until = 1, 0
        self.changed = self.outs_changed = self.round

    def new_name(self) -> UnitId:
        self._count += 1
        return UnitId(self._setup.id, self._count)

    def load(self) -> int:
        """Capacity in use: by units that pass through this node (an inflow joined to an outflow), and by
        inflows and outflows without such a partner."""
        return len(self.outs) + sum(unit.partner is None for unit in self.ins.values())

    def excess(self) -> int:
        """Number of units by which `load` exceeds the capacity of this relay; 0 if it does not."""
        return max(0, self.load() - self.capacity)

    def cost_to_sink(self, out: Unit) -> float:
        return self.next[out.peer] + out.beyond

    def onward(self, link: UnitId, peer: str | None) -> tuple[str | None, UnitId] | None:
        """Next hop and outflow (unit to the next stage) to which the inflow `link` (unit from the previous
        stage, from `peer`) is joined; at a data node (None, `link`). None if it is not joined or there is no
        such inflow (`reservations.Onward`)."""
        unit = self.ins.get(link)
        if unit is None or unit.peer != peer:
            return None
        if self._setup.is_data:
            return None, link
        if unit.partner is None:
            return None
        return self.outs[unit.partner].peer, unit.partner

    def offerable(self) -> dict[str, float]:
        """Units to offer to the previous stage: sink -> least cost over the outflows to that sink that are
        joined to no inflow; a data node with fewer inflows than its demand offers itself at cost 0."""
        if self._setup.is_data:
            return {self._setup.id: 0.0} if len(self.ins) < self.demand else {}
        offers: dict[str, float] = {}
        for out in self.outs.values():
            if out.partner is None:
                cost = self.cost_to_sink(out)
                offers[out.sink] = min(cost, offers.get(out.sink, math.inf))
        return offers

    def join(self) -> None:
        """Join inflows (units from the previous stage) that have no outflow yet to the cheapest free outflows
        (units to the next stage) that end at the same sink."""
        free = sorted(
            (out for out in self.outs.values() if out.partner is None),
            key=lambda out: (self.cost_to_sink(out), out.link),
        )
        for unit in self.ins.values():
            if unit.partner is None:
                out = next((out for out in free if out.sink == unit.sink), None)
                if out is not None:
                    free.remove(out)
                    unit.partner, out.partner = out.link, unit.link

    def drop_in(self, link: UnitId) -> None:
        self.reported.pop(link, None)
        self._drop(link, self.ins, self.outs)

    def drop_out(self, link: UnitId) -> None:
        self.outs_changed = self.round
        self._drop(link, self.outs, self.ins)

    def _drop(self, link: UnitId, table: dict[UnitId, Unit], others: dict[UnitId, Unit]) -> None:
        unit = table.pop(link, None)
        if unit is None:
            return
        self.note_change()
        if unit.partner is not None:
            others[unit.partner].partner = None
            others[unit.partner].round = self.round

    def next_request(self) -> tuple[float, str, str, float] | None:
        """Cheapest offered unit that this node may request, or None: (cost with the link to `peer`, peer,
        sink, advertised cost)."""
        if self._setup.is_data:
            if len(self.outs) >= self.demand:
                return None
            wanted = {self._setup.id} if self._setup.returns == "own" else None
        else:
            wanted = {unit.sink for unit in self.ins.values() if unit.partner is None}
            if not wanted:
                if self.load() >= self.capacity or self.round < self.wait_until:
                    return None
                wanted = None
        return min(
            (
                (cost + self.next[peer], peer, sink, cost)
                for peer, (_, costs) in self.offers.items()
                if peer in self.next
                for sink, cost in costs.items()
                if wanted is None or sink in wanted
            ),
            default=None,
        )

    def note_offer(self, peer: str, version: int, costs: dict[str, float]) -> None:
        known = self.offers.get(peer, (-1, {}))
        if version > known[0]:
            self.offers[peer] = (version, costs)
            if costs and self.next_request() is not None:
                self.note_change()

    def is_long_ago(self, at: int) -> bool:
        """True if `at` is so many rounds ago that neighbours must know by now of a unit handed over then."""
        return self.round - at > 2 * CONFIRM_ROUNDS

    def price(self) -> float:
        """Least cost from this node to a sink, over its outflows and the neighbours' offers; else
        infinite."""
        costs = [self.cost_to_sink(unit) for unit in self.outs.values()]
        costs += [self.next[peer] + cost for peer, (_, of) in self.offers.items() for cost in of.values()]
        return min(costs, default=math.inf)
